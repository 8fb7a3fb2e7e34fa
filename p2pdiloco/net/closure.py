"""How far a connection has come on its way to its end: it parts, it retires for another connection, it is over.

Nothing is done here: connection.py asks, and does it.
"""

from __future__ import annotations


class Closure:
    """Of one connection."""

    __slots__ = ("_retired", "goodbye", "has_failed", "is_retiring", "over", "parting")

    def __init__(self) -> None:
        self.over: str | None = None
        """Why it is over: nothing is read or sent from then on."""
        self.parting: str | None = None
        """Why we are leaving: nothing new is sent; what is queued is."""
        self.goodbye: bytes | None = None
        """Waits until everything that is sent in parts is acknowledged."""
        self.is_retiring = False
        """Another connection stays: what is begun here is finished."""
        self.has_failed = False
        """It is told that there will be no proof."""
        self._retired: set[str] = set()
        """Which of "us" and "them" has said that another connection stays."""

    @property
    def is_ending(self) -> bool:
        """Saying or having said goodbye, or over."""
        return self.over is not None or self.parting is not None

    @property
    def reason(self) -> str:
        """Why it is over, or about to be; "" while it is not."""
        return self.over or self.parting or ""

    @property
    def is_said(self) -> bool:
        """The goodbye is out, or in the outbox."""
        return self.parting is not None and self.goodbye is None

    @property
    def have_both_retired(self) -> bool:
        """Each side has said that another connection stays."""
        return len(self._retired) == 2

    def retires(self, who: str) -> bool:
        """``who`` ("us" or "them") says that another connection stays; False: that was said."""
        is_news = who not in self._retired
        self._retired.add(who)
        return is_news
