"""Packets as a TUN device with offloads hands them over: up to 64 KiB, still to be cut into segments.

Rules of this file:
1. Pure. A packet begins with its virtio header (10 bytes), whose fields are little-endian as x86 and arm64 are.
2. Loss hits segments, not packets: what is left of a packet without some of its segments is one packet for each run of
   neighbours that is left, with right lengths, sequence numbers, flags and checksums. (Dropping whole packets, as netem
   does, flatters CUBIC elevenfold.) IPv6, which few sites have, is dropped whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

VIRTIO_BYTES = 10
GSO_NONE = 0
GSO_UDP = 5
UDP_HEADER, IP6_HEADER = 8, 40
FIN_AND_PUSH = 0x09
CONGESTION_REDUCED = 0x80
_VIRTIO = struct.Struct("<BBHHHH")
_IP = VIRTIO_BYTES


def count(packet: bytes) -> int:
    """How many segments go over the wire for it."""
    if packet[1] == GSO_NONE:
        return 1
    segment_bytes = packet[4] | packet[5] << 8
    return -(-(len(packet) - _IP - _header_bytes(packet)) // segment_bytes)


def destination(packet: bytes) -> bytes | None:
    """Its address; None if it is neither IPv4 nor IPv6."""
    version = packet[_IP] >> 4
    if version == 6:
        return packet[_IP + 24 : _IP + 40]
    return packet[_IP + 16 : _IP + 20] if version == 4 else None


def without(packet: bytes, lost: Sequence[int]) -> list[bytes]:
    """What is left when the segments with these numbers (ascending) are lost.

    Raises:
        ValueError: none of them is.
    """
    if not lost:
        raise ValueError("nothing is lost")
    if packet[1] == GSO_NONE or packet[_IP] >> 4 == 6:
        return []
    segment_bytes, total = packet[4] | packet[5] << 8, count(packet)
    data = memoryview(packet)[_IP + _header_bytes(packet) :]
    left, begin = [], 0
    for end in (*lost, total):
        if end > begin:
            left.append(_part(packet, data[begin * segment_bytes : end * segment_bytes], begin, is_last=end == total))
        begin = end + 1
    return left


def checksum(data: bytes) -> int:
    """The internet checksum's sum, not inverted."""
    if len(data) % 2:
        data += b"\0"
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def _header_bytes(packet: bytes) -> int:
    """Of IP and TCP or UDP."""
    ip = IP6_HEADER if packet[_IP] >> 4 == 6 else (packet[_IP] & 15) * 4
    return ip + (UDP_HEADER if packet[1] == GSO_UDP else (packet[_IP + ip + 12] >> 4) * 4)


def _part(packet: bytes, data: memoryview, first: int, *, is_last: bool) -> bytes:
    """A packet of the segments in ``data``, of which the first has the number ``first``; the checksum is left to the
    kernel, which wants that of the pseudo header in its place."""
    _, kind, _, segment_bytes, checksum_start, checksum_offset = _VIRTIO.unpack_from(packet)
    size = _header_bytes(packet)
    header = bytearray(packet[_IP : _IP + size])
    ip_size = (header[0] & 15) * 4
    (identity,) = struct.unpack_from("!H", header, 4)
    struct.pack_into("!HH", header, 2, size + len(data), (identity + first) & 0xFFFF)
    header[10:12] = b"\0\0"
    struct.pack_into("!H", header, 10, checksum(bytes(header[:ip_size])) ^ 0xFFFF)
    is_udp = kind == GSO_UDP
    if is_udp:
        struct.pack_into("!H", header, ip_size + 4, UDP_HEADER + len(data))
    else:
        (sequence,) = struct.unpack_from("!I", header, ip_size + 4)
        struct.pack_into("!I", header, ip_size + 4, (sequence + first * segment_bytes) & 0xFFFFFFFF)
        if not is_last:
            header[ip_size + 13] &= ~FIN_AND_PUSH & 0xFF
        if first:
            header[ip_size + 13] &= ~CONGESTION_REDUCED & 0xFF
    pseudo = bytes(header[12:20]) + struct.pack("!HH", header[9], size - ip_size + len(data))
    struct.pack_into("!H", header, ip_size + checksum_offset, checksum(pseudo))
    is_many = len(data) > segment_bytes
    virtio = (1, kind, size, segment_bytes) if is_many else (1, GSO_NONE, size, 0)
    return _VIRTIO.pack(*virtio, checksum_start, checksum_offset) + header + data
