"""A power cut of all peers and of the bootstrap node: they come back in any order, find each other, and merge together.

Rules of this file:
1. The bootstrap node comes back as late as a peer, or never. Until then the directory has no records and takes none, so
   peers meet by the addresses that they remember.
2. They must have met ``MEET_S`` after the last peer was started again: all have taken versions that merge learners of
   all.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING

import msgspec

from p2pdiloco.protocol.ids import Digest, PeerId, peer_of
from p2pdiloco.protocol.messages import CommitHeader, commit_id

if TYPE_CHECKING:
    from tests.peer_sim.world import World, WorldSetting

MEET_S = 60.0
RETURN_S = 40.0
"""When the last peer comes back, at most."""
LOOK_S = 0.5
STEP_S = 0.4
ROUND_STEPS, GRACE_SHARE = 8, 0.7
"""In shorter rounds, or with no grace, contributions of slower peers are often late, also without a power cut."""
RUN_S = 240.0
"""Length of the run: nobody may finish it alone before the others are back."""


def darkened(setting: WorldSetting, random: Random) -> WorldSetting:
    """With three to five peers, all of which train, and a longer run, in which merges wait for slower peers."""
    peers = (setting.peers * 5)[: random.randint(3, 5)]
    trainers = tuple(
        msgspec.structs.replace(peer, is_follower=False, step_s=STEP_S * random.choice((1.0, 1.2, 1.5)))
        for peer in peers
    )
    round_steps = ROUND_STEPS * setting.schedule.fragments
    schedule = msgspec.structs.replace(
        setting.schedule, sync_every=round_steps, overlap=round_steps // 2, grace_share=GRACE_SHARE
    )
    return msgspec.structs.replace(setting, peers=trainers, schedule=schedule, steps=int(RUN_S / STEP_S))


class Blackout:
    """One power cut of a world."""

    def __init__(self, world: World, random: Random, at: float) -> None:
        self._world = world
        self._random = random
        self._since: float | None = None
        """When the last peer was started again."""
        self._takers: dict[Digest, set[PeerId]] = {}
        self._merged: set[PeerId] = set()
        world.at(at, self._strike)

    def _strike(self) -> None:
        """As soon as everybody has written a checkpoint and taken part."""
        world, names = self._world, [*self._world.computers]
        if any(name not in world.hosts or not world.durability.has_whole(name) for name in names):
            world.at(world.now + LOOK_S, self._strike)
            return
        returns = {name: RETURN_S * self._random.random() for name in names}
        for name in names:
            world.kill(name, with_learner=True)
            world.computers[name].disk.cut_power()
            world.at(world.now + returns[name], partial(world.begin, name))
        away_s = RETURN_S * self._random.random() if self._random.random() < 0.5 else float("inf")
        world.directory.be("empty", min(away_s, world.setting.limit_s))
        world.happened["blackout"] += 1
        world.at(world.now + max(returns.values()), self._all_are_back)

    def _all_are_back(self) -> None:
        world = self._world
        self._since = world.now
        world.harm_until(world.now)
        world.at(world.now + MEET_S, self._check)

    def applied(self, name: PeerId, header: CommitHeader) -> None:
        """A peer has taken a version."""
        if self._since is None:
            return
        takers = self._takers.setdefault(commit_id(header), set())
        takers.add(name)
        everybody = self._world.computers.keys()
        if takers == everybody:
            self._merged |= {peer_of(contributor.learner) for contributor in header.contributors}
            if self._merged == everybody:
                self._world.happened["met-again"] += 1
                self._world.end()

    def _check(self) -> None:
        left = sorted(name[-6:] for name in self._world.computers.keys() - self._merged)
        self._world.checks.violated(6, f"{MEET_S:.0f} s after the last start nothing of {', '.join(left)} was merged")
