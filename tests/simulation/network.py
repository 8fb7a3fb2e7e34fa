"""What the networks of both simulators have in common: directions with delay and bandwidth, cuts, and dialing.

Rules of this file:
1. Messages without a payload keep their order in a direction. Those with one share its bandwidth, and the others do not
   wait for them.
2. A cut direction holds messages back (the transport resends); when the cut lasts, the connection breaks, and each end
   notices at its own time. What was under way on a broken connection is lost.
3. A broken pair dials again until it meets. The directory only decides when the first dial is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Generic, TypeVar

from p2pdiloco.protocol.ids import PeerId
from tests.simulation.topologies import WHOLE, Mesh, Pair, pair_of

Key = tuple[PeerId, PeerId]
"""A direction: its source and its target."""


class Direction:
    """One direction of a connection."""

    __slots__ = ("control_at", "held", "is_dead", "payload_at")

    LEAST_S = 0.0
    """Between two messages without a payload."""

    def __init__(self, control_at: float = 0.0) -> None:
        self.control_at = control_at
        """When the last message without a payload arrives."""
        self.payload_at = 0.0
        """When the last payload has left."""
        self.held: list[Any] = []
        """What a cut holds back."""
        self.is_dead = False
        """It carries nothing any more, and nobody is told."""

    def arrives_at(self, now: float, size: float, bytes_per_s: float, delay_s: float, jitter_s: float) -> float:
        """When a message that is sent now is there. ``size``: of its payload in bytes; 0: it has none."""
        if size:
            self.payload_at = max(self.payload_at, now) + size / bytes_per_s
            return self.payload_at + delay_s + jitter_s
        at = self.control_at = max(now + delay_s + jitter_s, self.control_at + self.LEAST_S)
        return at


D = TypeVar("D", bound=Direction)


class PairNetwork(ABC, Generic[D]):
    """Which pairs meet, and which directions are cut."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.blocked: dict[Key, int] = {}
        """Directions that are cut, with how many cuts hold them."""
        self.apart: Mesh = WHOLE
        """Pairs that cannot connect now."""
        self._dialling: set[Pair] = set()

    @property
    @abstractmethod
    def redial_s(self) -> float:
        """Between two tries, on average."""

    @abstractmethod
    def _later(self, after_s: float, action: Callable[[Any], None], argument: Any) -> None:
        """Call ``action(argument)`` then, whoever lives."""

    @abstractmethod
    def _direction(self, key: Key) -> D | None:
        """That of the connection that the source has, if it has one."""

    @abstractmethod
    def _meet(self, pair: Pair, *, is_cut: bool) -> bool:
        """Connect the two, unless they are connected or not there. False: they have to try again."""

    @abstractmethod
    def _lose_patience_later(self, key: Key, direction: D) -> None:
        """A source breaks the connection if the cut lasts."""

    @abstractmethod
    def _resume(self, direction: D, held: Any) -> None:
        """What was held back sets off."""

    def is_dialling(self, a: PeerId, b: PeerId) -> bool:
        """Whether the pair tries to meet."""
        return pair_of(a, b) in self._dialling

    def dial_later(self, a: PeerId, b: PeerId, after_s: float) -> None:
        """The pair tries to meet after this time."""
        pair = pair_of(a, b)
        if pair not in self._dialling and pair not in self.apart:
            self._dialling.add(pair)
            self._later(after_s, self._dial, pair)

    def _dial(self, pair: Pair) -> None:
        self._dialling.discard(pair)
        if pair in self.apart:
            return  # it dials when the mesh is another
        is_cut = pair in self.blocked or pair[::-1] in self.blocked
        if not self._meet(pair, is_cut=is_cut):
            self.dial_later(*pair, self.redial_s * (0.5 + self.random.random()))

    def cut(self, directions: Iterable[Key]) -> None:
        """Nothing passes in these directions from now on."""
        for key in directions:
            self.blocked[key] = self.blocked.get(key, 0) + 1
            if (direction := self._direction(key)) is not None:
                self._lose_patience_later(key, direction)

    def mend(self, directions: Iterable[Key]) -> None:
        """The cut is over; what was held back goes on its way."""
        for key in directions:
            self.blocked[key] -= 1
            if self.blocked[key]:
                continue
            del self.blocked[key]
            if (direction := self._direction(key)) is not None:
                held, direction.held = direction.held, []
                for one in held:
                    self._resume(direction, one)
