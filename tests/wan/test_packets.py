"""The router's pure parts: packets that lose some of their segments, and when a packet goes on."""

from __future__ import annotations

import struct

import pytest

from benchmarks.netbed.router import Way, _Queue, checksum, count, destination, without

pytestmark = pytest.mark.xdist_group("wan")  # namespaces are the machine's

SEGMENT = 100
IP, TCP = 20, 20
SEQUENCE = 0xFFFF_FFF0
FIN_PUSH_ACK_CWR = 0x80 | 0x10 | 0x08 | 0x01


def tcp_packet(data: bytes) -> bytes:
    kind = 1 if len(data) > SEGMENT else 0
    virtio = struct.pack("<BBHHHH", 1, kind, IP + TCP, SEGMENT if kind else 0, IP, 16)
    ip = bytearray(
        struct.pack("!BBHHHBBH4s4s", 0x45, 0, IP + TCP + len(data), 7, 0, 64, 6, 0, b"\1\2\3\4", b"\5\6\7\10")
    )
    struct.pack_into("!H", ip, 10, checksum(bytes(ip)) ^ 0xFFFF)
    tcp = struct.pack("!HHIIBBHHH", 1, 2, SEQUENCE, 9, 0x50, FIN_PUSH_ACK_CWR, 100, 0, 0)
    return virtio + bytes(ip) + tcp + data


@pytest.mark.parametrize("lost", [[0], [9], [4], [0, 1, 2], [1, 5, 9], list(range(9)), list(range(10))])
def test_what_is_left_are_the_other_segments(lost):
    data = bytes(range(256)) * 4
    data = data[: 9 * SEGMENT + 30]
    packet = tcp_packet(data)
    assert count(packet) == 10
    kept = {}
    for part in without(packet, lost):
        ip, tcp = part[10:30], part[30:50]
        (total,) = struct.unpack_from("!H", ip, 2)
        assert total == len(part) - 10
        assert checksum(ip) == 0xFFFF
        offset = (struct.unpack_from("!I", tcp, 4)[0] - SEQUENCE) % 2**32
        body = part[50:]
        first, flags = offset // SEGMENT, tcp[13]
        assert struct.unpack_from("!H", ip, 4)[0] == 7 + first
        is_last = offset + len(body) == len(data)
        assert bool(flags & 0x01) == bool(flags & 0x08) == is_last
        assert bool(flags & 0x80) == (first == 0)
        pseudo = ip[12:20] + struct.pack("!HH", 6, TCP + len(body))
        assert struct.unpack_from("!H", tcp, 16)[0] == checksum(pseudo)
        assert (part[1], part[4] | part[5] << 8) == ((1, SEGMENT) if len(body) > SEGMENT else (0, 0))
        for k in range(count(part)):
            kept[first + k] = body[k * SEGMENT : (k + 1) * SEGMENT]
    assert kept == {k: data[k * SEGMENT : (k + 1) * SEGMENT] for k in range(10) if k not in lost}


def test_a_single_segment_is_lost_whole():
    packet = tcp_packet(b"x")
    assert (count(packet), without(packet, [0])) == (1, [])
    assert destination(packet) == b"\5\6\7\10"
    assert destination(packet[:10] + b"\x50" + packet[11:]) is None
    six = packet[:10] + b"\x60" + bytes(23) + bytes(range(16)) + bytes(20)
    assert destination(six) == bytes(range(16))


def test_packets_keep_their_order_whatever_the_jitter():
    queue = _Queue(1)
    queue.become(Way(delay_s=0.010, jitter_s=0.005, loss=0.0))
    due = [queue.due_ns(now) for now in range(0, 1_000_000_000, 1_000_000)]
    assert due == sorted(due)
    late = [(d - now) / 1e6 for d, now in zip(due, range(0, 1_000_000_000, 1_000_000), strict=True)]
    assert min(late) >= 5.0
    assert max(late) <= 15.0


def test_as_many_segments_are_lost_as_asked_for():
    queue = _Queue(1)
    queue.become(Way(delay_s=0.0, jitter_s=0.0, loss=0.02))
    lost = sum(len(queue.lost_of(44)) for _ in range(10_000))
    assert lost == pytest.approx(0.02 * 440_000, rel=0.05)
