"""What a testbed really does to packets: round trips, rates and losses, measured between its sites.

Rules of this file:
1. The traffic is real and passes everything that a benchmark's does: echo requests that the far kernel answers, and
   UDP that is counted where it arrives. No counter of a queueing discipline is asked: it would judge itself.
2. UDP, not TCP: how fast TCP gets going over a long path with losses says little about the line.
3. A rate is what arrives while more is offered, counted from the first to the last arrival in the window: neither the
   bucket's first burst nor the window's edges count.
4. Arrivals of echoes are stamped by the kernel, so that a busy measuring process does not lengthen a path.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import msgspec

from benchmarks.netbed.namespace_exec import opened_in
from benchmarks.netbed.qdisc import PACKET_BYTES
from benchmarks.netbed.topology import address

PORT = 9
PAYLOAD_BYTES = 1472
SMALL_BYTES = 16
SMALL_WIRE_BYTES = 60
MOST_SEGMENTS = 44
CHUNK_S = 0.002
WARM_S = 0.25
LEAST_PACKETS = 300
WINDOW_S = (0.6, 5.0)
SO_TIMESTAMPNS, UDP_SEGMENT, UDP_GRO = 35, 103, 104
SO_RCVBUFFORCE = 33
RECEIVE_BYTES = 16 << 20
ECHO_REQUEST, ECHO_REPLY = 8, 0
_ECHO = struct.Struct("!BBHHH")
_STAMP = struct.Struct("!HHQ")


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic to be offered, by sites' indices; bits per second on the wire."""

    source: int
    target: int
    bps: float


def round_trips(
    sites: Sequence[str], pairs: Collection[tuple[int, int]], count: int, interval_s: float, patience_s: float
) -> dict[tuple[int, int], list[float]]:
    """Seconds until each echo came back, by pair; those missing did not. The first echo of a pair is not counted: it
    waits for ARP."""
    identity = os.getpid() & 0xFFFF
    with contextlib.ExitStack() as stack:
        sources = {i: stack.enter_context(opened_in(sites[i], _echo_socket)) for i, _ in pairs}
        found: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}
        begin = time.monotonic()
        plan = [
            (begin + k * interval_s + n * interval_s / len(pairs), k, pair)
            for k in range(count + 1)
            for n, pair in enumerate(pairs)
        ]
        plan.sort()
        end = plan[-1][0] + patience_s
        step = 0
        while (now := time.monotonic()) < end:
            while step < len(plan) and plan[step][0] <= now:
                _, k, (i, j) = plan[step]
                sources[i].sendto(_echo(identity, i, j, k), (address(j), 0))
                step += 1
            if step == len(plan) and sum(map(len, found.values())) == count * len(found):
                break
            until = plan[step][0] if step < len(plan) else end
            for source in select.select(list(sources.values()), (), (), max(0.0, until - now))[0]:
                _take_echo(source, identity, found)
    return found


def arriving(sites: Sequence[str], flows: Sequence[Flow], slowest_bps: float, delay_s: float) -> float:
    """Bits per second on the wire that arrive, all flows together, while they are offered.

    ``slowest_bps`` is what is expected: it says how long a window must be; ``delay_s`` the longest path's."""
    window_s = min(max(LEAST_PACKETS * PACKET_BYTES * 8 / slowest_bps, WINDOW_S[0]), WINDOW_S[1])
    begin = time.monotonic() + WARM_S + delay_s
    end = begin + window_s
    counts: list[_Count] = []
    with contextlib.ExitStack() as stack:
        for target in {flow.target for flow in flows}:
            receiver = stack.enter_context(opened_in(sites[target], _receiver))
            counts.append(_Count(receiver, begin, end))
        offering = []
        for source in sorted({flow.source for flow in flows}):
            sender = stack.enter_context(opened_in(sites[source], _segmenting_sender))
            theirs = [flow for flow in flows if flow.source == source]
            offering.append(threading.Thread(target=_offer, args=(sender, theirs, end), name="offering"))
        for thread in (*counts, *offering):
            thread.start()
        for thread in (*counts, *offering):
            thread.join()
    return sum(count.rate() for count in counts)


def losses(sites: Sequence[str], flows: Sequence[Flow], seconds: float, delay_s: float) -> list[tuple[int, int]]:
    """For each flow of small packets: how many were sent, and how many arrived."""
    sent = [0] * len(flows)
    with contextlib.ExitStack() as stack:
        targets = {flow.target for flow in flows}
        receivers = {j: stack.enter_context(opened_in(sites[j], _receiver)) for j in targets}
        for receiver in receivers.values():
            receiver.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 0)
        sources = {flow.source for flow in flows}
        senders = {i: stack.enter_context(opened_in(sites[i], _sender)) for i in sources}
        arrived = [0] * len(flows)
        stop = threading.Event()
        counting = [
            threading.Thread(target=_count_small, args=(receiver, arrived, stop)) for receiver in receivers.values()
        ]
        for thread in counting:
            thread.start()
        for number in _schedule([flow.bps / (SMALL_WIRE_BYTES * 8) for flow in flows], time.monotonic() + seconds):
            flow = flows[number]
            message = number.to_bytes(SMALL_BYTES, "big")
            with contextlib.suppress(BlockingIOError):
                senders[flow.source].sendto(message, (address(flow.target), PORT))
                sent[number] += 1
        time.sleep(delay_s + WARM_S)
        stop.set()
        for thread in counting:
            thread.join()
    return list(zip(sent, arrived, strict=True))


class _Count(threading.Thread):
    """Counts what arrives at one site in the window."""

    def __init__(self, receiver: socket.socket, begin: float, end: float) -> None:
        super().__init__(name="counting")
        self._receiver = receiver
        self._begin = begin
        self._end = end
        self._bytes = 0
        self._first = self._last = 0.0

    def run(self) -> None:
        buffer = bytearray(1 << 16)
        while (now := time.monotonic()) < self._end:
            if not select.select([self._receiver], (), (), self._end - now)[0]:
                break
            size = self._receiver.recv_into(buffer)
            now = time.monotonic()
            if now < self._begin:
                continue
            if self._first:
                self._bytes += size
                self._last = now
            else:
                self._first = now

    def rate(self) -> float:
        """Bits per second on the wire."""
        if self._last <= self._first:
            return 0.0
        return self._bytes * 8 * PACKET_BYTES / PAYLOAD_BYTES / (self._last - self._first)


def _offer(sender: socket.socket, flows: Sequence[Flow], end: float) -> None:
    data = memoryview(bytes(PAYLOAD_BYTES * MOST_SEGMENTS))
    segments = [max(1, min(MOST_SEGMENTS, int(flow.bps * CHUNK_S / 8 / PACKET_BYTES))) for flow in flows]
    rates = [flow.bps / (PACKET_BYTES * 8 * many) for flow, many in zip(flows, segments, strict=True)]
    for number in _schedule(rates, end):
        flow = flows[number]
        with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
            sender.sendto(data[: PAYLOAD_BYTES * segments[number]], (address(flow.target), PORT))


def _schedule(rates: Sequence[float], end: float) -> Iterator[int]:
    """Indices of ``rates``, each as often in a second as its rate says; late ones are caught up with."""
    now = time.monotonic()
    heap = [(now + k / (rate * len(rates)), k) for k, rate in enumerate(rates)]
    heapq.heapify(heap)
    while (now := time.monotonic()) < end:
        due, k = heap[0]
        if due > now:
            time.sleep(min(due, end) - now)
            continue
        heapq.heapreplace(heap, (due + 1 / rates[k], k))
        yield k


def _echo_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    made.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    return made


def _echo(identity: int, i: int, j: int, k: int) -> bytes:
    body = _STAMP.pack(i, j, time.clock_gettime_ns(time.CLOCK_REALTIME))
    head = _ECHO.pack(ECHO_REQUEST, 0, 0, identity, k)
    total = sum(struct.unpack(f"!{len(head + body) // 2}H", head + body))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return _ECHO.pack(ECHO_REQUEST, 0, total ^ 0xFFFF, identity, k) + body


def _take_echo(source: socket.socket, identity: int, found: dict[tuple[int, int], list[float]]) -> None:
    packet, extra, *_ = source.recvmsg(256, 256)
    head = (packet[0] & 15) * 4
    kind, _, _, whose, k = _ECHO.unpack_from(packet, head)
    if (kind, whose) != (ECHO_REPLY, identity) or k == 0:
        return
    i, j, sent_ns = _STAMP.unpack_from(packet, head + _ECHO.size)
    for level, name, data in extra:
        if (level, name) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", data[:16])
            found[i, j].append((seconds * 1_000_000_000 + nanoseconds - sent_ns) / 1e9)


def _receiver() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with contextlib.suppress(PermissionError):  # root of a namespace, not of the machine
        made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BYTES)
    with contextlib.suppress(OSError):  # before Linux 5.0
        made.setsockopt(socket.IPPROTO_UDP, UDP_GRO, 1)
    made.bind(("0.0.0.0", PORT))
    return made


def _sender() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


def _segmenting_sender() -> socket.socket:
    made = _sender()
    made.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, PAYLOAD_BYTES)
    return made


def _count_small(receiver: socket.socket, arrived: list[int], stop: threading.Event) -> None:
    while not stop.is_set():
        if not select.select([receiver], (), (), 0.1)[0]:
            continue
        with contextlib.suppress(BlockingIOError):
            while True:
                message = receiver.recv(1 << 11, socket.MSG_DONTWAIT)
                arrived[int.from_bytes(message, "big")] += 1
