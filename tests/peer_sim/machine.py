"""What of a peer outlives the lives of its node: the machine that it runs on, and its key."""

from __future__ import annotations

from random import Random

import msgspec

from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.protocol.ids import Digest
from p2pdiloco.transport.identity import Identity
from tests.peer_sim.disk import SimulatedDisk
from tests.peer_sim.lying_owner import Lie


class PeerSetting(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer is like, in all its lives."""

    step_s: float
    tokens_per_step: int
    is_follower: bool = False
    reattach_s: float = 10.0
    load_s: float = 0.3
    clock: tuple[float, float] = (0.0, 1.0)
    """Offset in seconds, and rate."""
    has_compiler: bool = True
    """Else torch computes what kernels do elsewhere, with the same bits."""
    link_s: float = 0.001
    """How long what node and learner tell each other is on its way, at most."""
    copies: int = 0
    """How many times its learner looks, at most, until a copy of its parameters has ended, as on a GPU."""
    tensor_threads: int = 1
    """Of its node: work on different shards overtakes each other."""
    is_rough: bool = False
    lie: Lie = ""
    """What is wrong with the merges that it makes."""


class Computer:
    """One peer's. All chance at it comes from ``seed``."""

    def __init__(self, seed: int, identity: Identity, setting: PeerSetting) -> None:
        self.identity = identity
        self.setting = setting
        self.disk = SimulatedDisk(Random(f"{seed}/{identity.peer_id}/disk"))
        self.version = WIRE_VERSION
        """Of the program that is installed."""
        self.last_heads: tuple[Digest, ...] = ()
        """When its peer ended."""
        self.is_excused = False
        """Its peer may end for a reason that a fault gave it."""

    @property
    def is_full(self) -> bool:
        """Nothing can be written there."""
        return self.disk.room is not None or self.disk.is_failing or self.disk.shortage is not None
