"""A learner's own contributions to one shard, and what adopting another head does to its delta.

A chain merges a prefix of a learner's tokens, so where a chain stands with this learner is one number: the mark. Every
contribution that was sent is an edge from one mark to a later one. Moving to another head moves the mark, forwards or
(after a fork) backwards; the walk along edges says which contributions leave the learner's delta (settled) and which
return to it (restored). One rule thus serves carry, refusal, takeover, forks and their healing.

Because what was *sent* (after quantization) is what leaves the delta, the quantization error stays in it and is sent
with the next contribution: error feedback without a buffer of its own.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from p2pdiloco.protocol.identifiers import Digest


class Edge(NamedTuple):
    """One contribution: own tokens ``start`` to ``stop``, and its payload."""

    start: int
    stop: int
    payload: Digest


class Walk(NamedTuple):
    """Payloads that leave the learner's delta, and payloads that return to it."""

    settled: tuple[Digest, ...]
    restored: tuple[Digest, ...]


STAY = Walk((), ())


class Ledger:
    """The last ``depth`` contributions to one shard in this life of the learner."""

    __slots__ = ("edges",)

    def __init__(self, depth: int) -> None:
        self.edges: deque[Edge] = deque(maxlen=depth)

    def record(self, start: int, stop: int, payload: Digest) -> None:
        """Remember a contribution; of the same range sent twice (another base), walks take the newer."""
        self.edges.append(Edge(start, stop, payload))

    @property
    def last(self) -> int:
        """The furthest mark that a contribution may have led to; -1 if there was none."""
        return max((edge.stop for edge in self.edges), default=-1)

    def walk(self, old: int, new: int) -> Walk | None:
        """From mark ``old`` to mark ``new`` along contributions, fewest first; None if they do not lead there."""
        if old == new:
            return STAY
        came: dict[int, tuple[int, Edge, bool]] = {old: (old, Edge(0, 0, Digest("")), True)}
        queue = deque([old])
        while queue and new not in came:
            at = queue.popleft()
            for edge in reversed(self.edges):
                if edge.start == at and edge.stop not in came:
                    came[edge.stop] = (at, edge, True)
                    queue.append(edge.stop)
                elif edge.stop == at and edge.start not in came:
                    came[edge.start] = (at, edge, False)
                    queue.append(edge.start)
        if new not in came:
            return None
        settled: list[Digest] = []
        restored: list[Digest] = []
        at = new
        while at != old:
            at, edge, is_forward = came[at]
            (settled if is_forward else restored).append(edge.payload)
        return Walk(tuple(reversed(settled)), tuple(reversed(restored)))
