"""Bounds of the memory and connections that peers can make this one hold, and deadlines, in one place."""

from __future__ import annotations

from typing import Literal, Self

from msgspec import Struct

from p2pdiloco.net.send_queue import GROUP_BYTES

UpBudget = float | Literal["auto"] | None
"""Bytes per second; "auto": learned; None: no limit."""


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Bounds of one connection."""

    outbox_bytes: int = 1 << 30
    """Most payload bytes that wait to be sent (they are shared, not copied)."""
    control_bytes: int = 16 << 20
    """Most control bytes that wait to be sent."""
    inbox_bytes: int = 128 << 20
    """Most payload bytes in progress from the peer; what does not fit is refused. A sender opens payloads of one
    priority up to ``send_queue.GROUP_BYTES`` and one more, so this must hold that and twice the largest payload: here
    60 MiB."""
    window_bytes: int = 64 << 20
    """Most bulk that the peer may send beyond what was received and taken: as much as a long path holds (100 ms at
    5 Gbit/s). The payloads in progress (``inbox_bytes``) come on top."""
    requests: int = 256
    """Most requests of ours that wait for an answer."""
    answers: int = 16
    """Most requests of the peer that are being answered."""
    answer_s: float = 60.0
    """Time that the user has to answer a request."""
    handshake_s: float = 10.0
    """Time from the first byte to a proved peer."""
    retire_s: float = 30.0
    """Time that a duplicate connection has to finish what has begun."""
    part_s: float = 5.0
    """Time that flushing may take when a connection closes."""

    @classmethod
    def for_payloads(cls, largest_bytes: int) -> Self:
        """Limits with room for payloads of ``largest_bytes``: one that is under way, a more urgent one, and those that
        share the turns with it."""
        return cls(inbox_bytes=2 * largest_bytes + 2 * GROUP_BYTES)


class TransportLimits(Struct, frozen=True, kw_only=True):
    """Bounds of a transport."""

    connection: ConnectionLimits = ConnectionLimits()
    connections: int = 512
    """Most proved peers at once. One more replaces one of a machine that holds more, or is refused."""
    handshakes: int = 64
    """Accepted connections that have not proved themselves. One more takes the place of the oldest of the machine that
    holds most."""
    silent: int = 256
    """Accepted sockets that have not said a whole greeting, and as many that have and wait for their turn. One more
    takes the place of the oldest of the machine that holds most."""
    shut_out_after: int = 64
    """Sockets of a machine that were turned away lately before its next ones are dropped for ``shut_out_s``."""
    shut_out_s: float = 60.0
    failures_at_once: int = 128
    """Handshakes of strangers that come to nothing before the others wait for ``failures_per_s``."""
    failures_per_s: float = 10.0
    """Handshakes that come to nothing, over time: one takes 1 ms of a processor (benchmarks.hostile.arrivals)."""
    reused_bytes: int = 256 << 20
    """Payload memory kept for reuse."""
    window_bytes: int = 1 << 30
    """As ``ConnectionLimits.window_bytes``, over all connections."""
    up_bytes_per_s: UpBudget = None
    """Sent over all connections, control included; control never waits. None: no limit. 4 to 10 % under the link.
    "auto": learned from what the kernel says was delivered, and 10 % under that (net/bandwidth.py)."""
    down_bytes_per_s: float | None = None
    """Bulk received over all connections. None: no limit."""
    lanes: int | Literal["auto"] = "auto"
    """Connections of each pair that we dial: more than one fill long fat paths. "auto": by round trip and budget."""
    lane_idle_s: float = 60.0
    """Without bulk for so long, a pair's further connections are closed; the next bulk has them dialled again."""
    congestion: str = "bbr"
    """Asked of the kernel for each connection ("" for its default); a kernel that says no keeps its own."""
