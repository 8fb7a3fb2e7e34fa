"""What a chaos run tells while it runs: lines of ``happened.jsonl`` for the judge, and its status for a person."""

from __future__ import annotations

from typing import Literal

import msgspec

What = Literal[
    "began",
    "launched",
    "struck",
    "undone",
    "skipped",
    "back",
    "ended",
    "twin",
    "settling",
    "settled",
    "leaving",
    "over",
]


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``happened.jsonl``."""

    time: float
    """Unix time."""
    what: What
    peer: str = ""
    fault: int = 0
    """Number in the schedule, for struck, undone, skipped and twin."""
    status: int | None = None
    """Exit status, for ended and twin (None: it had not ended)."""
    is_expected: bool = True
    """For ended: it was killed or asked to leave."""
    text: str = ""
    """What was done, or what a twin said."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """For the person who watches."""

    phase: str
    seconds: float
    """Since all peers trained."""
    peers: tuple[tuple[str, str], ...]
    """Name and state of each."""
    version: int
    last: str
    """What was done last."""
