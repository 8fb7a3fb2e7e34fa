"""Pauses between looks at something that seldom changes."""

from __future__ import annotations


class Backoff:
    """Each pause is twice as long as the one before, from ``shortest_s`` to ``longest_s``, until there is news."""

    def __init__(self, shortest_s: float, longest_s: float) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self.pause_s = shortest_s
        """The next one."""

    def next_s(self) -> float:
        """A pause begins."""
        pause_s, self.pause_s = self.pause_s, min(2 * self.pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """There is news: the next pause is the shortest."""
        self.pause_s = self._shortest_s
