"""Who else was here, and who of them is missing since the swarm fell apart.

A peer that dies and a cut that takes it away look the same. Rules of this file:
1. Those who are lost one after the other while most stay are dead, or will find out themselves that they are the fewer.
   If within a while as many are lost as stay, this peer included, it may be this one that was cut off: those are
   *missing*, and may have gone on without it.
2. Whom only others heard is lost with the last of them, if that one said nothing; else it has left.
3. Who was lost and says goodbye has not been cut off: it stood still, and so have left those whom it heard.
4. This peer is apart until most of those whom it knew are back, or others with whom they are most.
"""

from __future__ import annotations

MOST_LOST = 4096
"""Remembered; the last."""
WINDOW_BEATS = 32
"""Own heartbeats within which the losses of one cut are noticed: paths time out one after the other."""


class Company:
    """All others, as fingerprints (``connectedness``)."""

    def __init__(self) -> None:
        self.silently_lost_at: float | None = None
        """When a live peer was last lost that had not said goodbye; None again once nobody is lost but who has."""
        self.missing: set[int] = set()
        self.has_left = False
        """This peer has gone in order: who goes after it is not lost."""
        self._here: frozenset[int] = frozenset()
        """Heard by this peer, or by one that it hears."""
        self._lost: dict[int, float] = {}
        """Without a word, and not here again; and when."""

    @property
    def is_apart(self) -> bool:
        """As many are missing as are here, this peer included: they may have another model by now."""
        return bool(self.missing)

    def look(self, now: float, here: frozenset[int], window_s: float, *, is_silent: bool) -> None:
        """Those are ``here`` now; ``is_silent``: one was lost that had not said goodbye."""
        if here == self._here and not (is_silent or self._lost or self.missing):
            return
        gone, self._here = self._here - here, here
        if is_silent and not self.has_left:
            self.silently_lost_at = now
            self._lost.update(dict.fromkeys(gone, now))
        self._found(here)
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        if not self.has_left:
            self.missing.update(one for one, at in self._lost.items() if now - at <= window_s)
        self._compare()

    def parted(self, those: frozenset[int]) -> None:
        """One says goodbye, who has heard the others of ``those``."""
        if those:
            self._found(those)
            self._compare()
            if not self._lost:
                self.silently_lost_at = None

    def _found(self, those: frozenset[int]) -> None:
        for one in those & self._lost.keys():
            del self._lost[one]
        self.missing -= those

    def _compare(self) -> None:
        if len(self.missing) <= len(self._here):
            self.missing.clear()
