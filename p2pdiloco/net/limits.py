"""Limits on the memory and connections that peers can make this one hold, and deadlines, in one place."""

from __future__ import annotations

from typing import Literal, Self

from msgspec import Struct

from p2pdiloco.net.send_queue import GROUP_BYTES

UpBudget = float | Literal["auto"] | None
"""Bytes per second; "auto": learned; None: no limit."""


class ConnectionLimits(Struct, frozen=True, kw_only=True):
    """Limits of one connection."""

    outbox_bytes: int = 1 << 30
    """Maximum payload bytes that wait to be sent (they are shared, not copied)."""
    control_bytes: int = 16 << 20
    """Maximum control bytes that wait to be sent."""
    inbox_bytes: int = 128 << 20
    """Maximum payload bytes in progress from the peer; payloads beyond it are refused.

    A sender opens payloads of one priority up to ``send_queue.GROUP_BYTES``, and one more. So this must hold that and
    twice the largest payload: here 60 MiB.
    """
    window_bytes: int = 64 << 20
    """Maximum bulk bytes that the peer may send beyond those received and taken.

    The default is the content of a long path (100 ms at 5 Gbit/s). Payloads in progress (``inbox_bytes``) come on top.
    """
    requests: int = 256
    """Maximum number of this peer's requests that wait for an answer."""
    answers: int = 16
    """Maximum number of the other peer's requests that are being answered."""
    answer_s: float = 60.0
    """Time that the user has to answer a request."""
    handshake_s: float = 10.0
    """Time from the first byte until the peer must have proved itself."""
    retire_s: float = 30.0
    """Time in which a duplicate connection must finish what it has begun."""
    part_s: float = 5.0
    """Maximum time for flushing when a connection closes."""

    @classmethod
    def for_payloads(cls, largest_bytes: int) -> Self:
        """Return limits for payloads of up to ``largest_bytes``.

        They hold one that is under way, a more urgent one, and those sent in turns with it.
        """
        return cls(inbox_bytes=2 * largest_bytes + 2 * GROUP_BYTES)


class TransportLimits(Struct, frozen=True, kw_only=True):
    """Limits of a transport."""

    connection: ConnectionLimits = ConnectionLimits()
    connections: int = 512
    """Maximum number of proved peers. Another one replaces one of a machine that holds more, or is refused."""
    handshakes: int = 64
    """Maximum number of accepted connections that have not proved themselves.

    Another one replaces the oldest of the machine that holds most.
    """
    silent: int = 256
    """Maximum number of accepted sockets without a whole greeting, and of those that have greeted and wait.

    Another one replaces the oldest of the machine that holds most.
    """
    shut_out_after: int = 64
    """Recent failed sockets of a machine after which its next ones are dropped for ``shut_out_s``."""
    shut_out_s: float = 60.0
    failures_at_once: int = 128
    """Burst of failed handshakes with strangers, before others wait for ``failures_per_s``."""
    failures_per_s: float = 10.0
    """Rate of failed handshakes: one takes 1 ms of a processor (benchmarks.hostile.arrivals)."""
    reused_bytes: int = 256 << 20
    """Payload memory kept for reuse."""
    window_bytes: int = 1 << 30
    """``ConnectionLimits.window_bytes`` over all connections together."""
    up_bytes_per_s: UpBudget = None
    """Upload budget over all connections, control included (control never waits). None: no limit.

    A fixed value should be 4 to 10 % below the link's rate. "auto" learns the rate and stays 10 % below it
    (net/bandwidth.py).
    """
    down_bytes_per_s: float | None = None
    """Download budget for bulk data over all connections. None: no limit."""
    lanes: int | Literal["auto"] = "auto"
    """Connections to dial for each pair; several fill long fat paths. "auto": by round trip and budget."""
    lane_idle_s: float = 60.0
    """Idle time after which a pair's additional connections are closed; they are dialled again for the next bulk data.
    """
    congestion: str = "bbr"
    """Congestion control for each connection ("" for the kernel's default). An unsupported one is ignored."""
