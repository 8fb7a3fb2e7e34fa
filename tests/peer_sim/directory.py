"""The directory of a simulated world, and who dials whom because of it (``node.peer_manager`` and
``runtime.directory``).

Rules of this file:
1. Each life announces itself, looks now and then, and dials whom it does not know a connection to. What it has read it
   remembers, also in its next lives.
2. The directory may be empty, forget, or lie: a record that leads to somebody else costs a dial, since who answers
   there cannot prove to be the one that was looked for (``net.handshake``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from p2pdiloco.protocol.ids import PeerId

if TYPE_CHECKING:
    from tests.peer_sim.host import SimulatedHost
    from tests.peer_sim.world import World

LOOK_S = 2.0
ANNOUNCE_S = 10.0
RECORD_LIFE_S = 40.0
Mood = Literal["", "empty", "forgets", "lies"]


class Directory:
    """One world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._records: dict[PeerId, float] = {}
        """Until when each stands."""
        self._remembered: dict[PeerId, dict[PeerId, PeerId]] = {name: {} for name in world.computers}
        """What each peer has read: whom it finds where it looks for whom."""
        self._mood: Mood = ""

    def be(self, mood: Mood, seconds: float) -> None:
        """So, for a while."""
        self._mood = mood
        if mood == "empty":
            self._records.clear()
        self._world.at(self._world.now + seconds, self._calm)

    def _calm(self) -> None:
        self._mood = ""

    def begin(self, host: SimulatedHost) -> None:
        """A life takes part."""
        self._round(host, self._world.now)

    def withdraw(self, name: PeerId) -> None:
        """It has ended in order."""
        self._records.pop(name, None)

    def _round(self, host: SimulatedHost, announce_at: float) -> None:
        world = self._world
        if host.is_dead or host.links.is_closed:
            return
        if world.now >= announce_at:
            announce_at = world.now + ANNOUNCE_S
            if self._mood != "empty":
                self._records.pop(host.name, None)
                self._records[host.name] = world.now + RECORD_LIFE_S
        known = self._remembered[host.name]
        known.update(self._read(host.name))
        for name, where in known.items():
            if name in world.hosts and name not in host.links.connections:
                self._dial(host.name, name, where)
        world.at(world.now + LOOK_S, partial(host.do, partial(self._round, host, announce_at)))

    def _read(self, reader: PeerId) -> dict[PeerId, PeerId]:
        world, random = self._world, self._world.random
        found = {name: name for name, until in self._records.items() if until > world.now and name != reader}
        match self._mood:
            case "forgets":
                return {name: name for name in found if random.random() < 0.5}
            case "lies":
                return {name: random.choice(list(world.computers)) for name in found}
            case _:
                return found

    def _dial(self, host: PeerId, name: PeerId, where: PeerId) -> None:
        world = self._world
        if where != name:
            world.happened["misled-dial"] += 1  # whoever answers there, it is not the one
        elif not world.network.is_dialling(host, name):
            world.network.dial_later(host, name, 0.05 + 0.5 * world.random.random())
