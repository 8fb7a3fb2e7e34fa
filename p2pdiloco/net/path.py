"""What the kernel knows of the way to the other side."""

from __future__ import annotations

from msgspec import Struct


class Path(Struct, frozen=True):
    """Of one connection."""

    congestion: str
    """The congestion control that it uses."""
    round_trip_s: float
    """Smoothed."""
    least_round_trip_s: float = 0.0
    """Of late: that of the way alone, without queues and busy processors. As ``round_trip_s`` where it is not told."""
    acked_bytes: int | None = None
    """That the other side has acknowledged since the connection's start; None: the kernel does not count them."""
    is_local: bool = False
    """Both ends are on this machine."""
