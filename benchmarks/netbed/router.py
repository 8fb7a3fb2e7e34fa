"""The fallback for a kernel without netem: a process that carries packets between sites, late and with losses.

``python -m benchmarks.netbed.router FILE`` opens a TUN device in every site's edge namespace, prints READY, and routes
by what FILE says (``RouterPlan`` as JSON), which it reads again on SIGHUP.

Rules of this file:
1. Devices take packets of up to 64 KiB that are still to be segmented, so one read and one write carry about 44
   segments, while the links' MTU stays 1500.
2. A packet leaves ``delay`` plus or minus up to ``jitter`` (uniform) after it came, never before one that came earlier
   on its path. Losses are drawn for segments, as gaps between losses, so that a path without losses costs nothing.
3. What waits is bounded; beyond that, packets are lost.
4. It ends up in the namespace ``home``, where those that clean up find it; and it keeps a real-time priority if it can
   have one: what it delivers late, the whole testbed gets late.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import ipaddress
import math
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.netbed.namespace_exec import enter

DEVICE = "wan"
READ_BYTES = 70_000
READS = 16
"""From one device before others have their turn."""
HELD_BYTES = 1 << 30
PRIORITY = 10
NEVER = 1 << 62
TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
OFFLOAD_CHECKSUM, OFFLOAD_TCP, OFFLOAD_UDP = 0x01, 0x02, 0x20 | 0x40


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two sites."""

    delay_s: float
    jitter_s: float
    loss: float


class RouterPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the router is told."""

    home: str
    namespaces: tuple[str, ...]
    """Of the sites' edges, where the devices are."""
    addresses: tuple[tuple[str, str], ...]
    """Of each site, IPv4 and IPv6."""
    ways: tuple[tuple[Way, ...], ...]
    """From the first index to the second; a site's way to itself is not used."""


class _Queue:
    """One direction while it runs."""

    __slots__ = ("_delay_ns", "_jitter_ns", "_last_ns", "_log_kept", "_random", "until_loss")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._last_ns = 0

    def become(self, way: Way) -> None:
        self._delay_ns = round(way.delay_s * 1e9)
        self._jitter_ns = round(way.jitter_s * 1e9)
        self._log_kept = math.log1p(-way.loss) if way.loss else 0.0
        self.until_loss = self._gap()

    def due_ns(self, now_ns: int) -> int:
        """When a packet that came now goes on."""
        due = now_ns + self._delay_ns
        if self._jitter_ns:
            due += self._random.randint(-self._jitter_ns, self._jitter_ns)
        self._last_ns = due = max(due, self._last_ns)
        return due

    def lost_of(self, segments: int) -> list[int]:
        """Which of the next segments are lost; ascending."""
        lost = []
        while self.until_loss < segments:
            lost.append(self.until_loss)
            self.until_loss += 1 + self._gap()
        self.until_loss -= segments
        return lost

    def _gap(self) -> int:
        if not self._log_kept:
            return NEVER
        return int(math.log(1.0 - self._random.random()) / self._log_kept)


class Router:
    """Devices, queues, and the loop that serves them."""

    def __init__(self, plan: RouterPlan, waker: socket.socket) -> None:
        self._waker = waker
        """Readable when a signal came, since that does not end select()."""
        self._devices = [_open_device(namespace) for namespace in plan.namespaces]
        self._site_of = {ipaddress.ip_address(one).packed: i for i, both in enumerate(plan.addresses) for one in both}
        sites = range(len(self._devices))
        self._queues = [[_Queue(i * len(self._devices) + j) for j in sites] for i in sites]
        self._heap: list[tuple[int, int, int, bytes]] = []
        self._number = 0
        self._held_bytes = 0
        self.become(plan)

    def become(self, plan: RouterPlan) -> None:
        """Treat packets that come from now on like this."""
        for queues, ways in zip(self._queues, plan.ways, strict=True):
            for queue, way in zip(queues, ways, strict=True):
                queue.become(way)

    def serve_once(self) -> None:
        """Send what is due, wait for the next thing, take what came."""
        heap = self._heap
        now_ns = time.monotonic_ns()
        while heap and heap[0][0] <= now_ns:
            _, _, site, packet = heapq.heappop(heap)
            self._held_bytes -= len(packet)
            with contextlib.suppress(OSError):  # a device's queue is full, or it is down: lost
                os.write(self._devices[site], packet)
        wait_s = max(0.0, (heap[0][0] - time.monotonic_ns()) / 1e9) if heap else None
        for device in select.select([*self._devices, self._waker.fileno()], (), (), wait_s)[0]:
            if device == self._waker.fileno():
                self._waker.recv(READS)
                continue
            site = self._devices.index(device)
            for _ in range(READS):
                try:
                    packet = os.read(device, READ_BYTES)
                except BlockingIOError:
                    break
                self._take(site, packet)

    def _take(self, site: int, packet: bytes) -> None:
        target = self._site_of.get(destination(packet) or b"")
        if target is None or self._held_bytes > HELD_BYTES:
            return
        queue, segments = self._queues[site][target], count(packet)
        parts = [packet]
        if queue.until_loss < segments:
            parts = without(packet, queue.lost_of(segments))
        elif queue.until_loss != NEVER:
            queue.until_loss -= segments
        due_ns = queue.due_ns(time.monotonic_ns())
        for part in parts:
            self._number += 1
            self._held_bytes += len(part)
            heapq.heappush(self._heap, (due_ns, self._number, target, part))


def _open_device(namespace: str) -> int:
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
    fcntl.ioctl(device, TUNSETVNETHDRSZ, struct.pack("i", 10))
    try:
        fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOAD_CHECKSUM | OFFLOAD_TCP | OFFLOAD_UDP)
    except OSError:  # before Linux 6.2
        fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOAD_CHECKSUM | OFFLOAD_TCP)
    return device


def _read(path: Path) -> RouterPlan:
    return msgspec.json.decode(path.read_bytes(), type=RouterPlan)


def main() -> int:
    """Route until killed."""
    path = Path(sys.argv[1])
    plan = _read(path)
    waker, alarm = socket.socketpair()
    alarm.setblocking(False)
    router = Router(plan, waker)
    enter(plan.home)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    is_new = False

    def changed(*_: object) -> None:
        nonlocal is_new
        is_new = True

    signal.signal(signal.SIGHUP, changed)
    signal.set_wakeup_fd(alarm.fileno())
    os.write(sys.stdout.fileno(), b"READY\n")
    while True:
        router.serve_once()
        if is_new:
            is_new = False
            router.become(_read(path))


# -- Packets as a TUN device with offloads hands them over: up to 64 KiB, still to be cut into segments ----------------
# Rules of this file:
# 1. Pure. A packet begins with its virtio header (10 bytes), whose fields are little-endian as x86 and arm64 are.
# 2. Loss hits segments, not packets: what is left of a packet without some of its segments is one packet for each run
#    of neighbours that is left, with right lengths, sequence numbers, flags and checksums. (Dropping whole packets, as
#    netem does, flatters CUBIC elevenfold.) IPv6, which few sites have, is dropped whole.


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
    """Split ``packet`` at its lost segments (numbers, ascending) into the packets that are left.

    Raises:
        ValueError: no segment was lost.
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
    """Length in bytes of the packet's IP header and its TCP or UDP header."""
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


if __name__ == "__main__":
    sys.exit(main())
