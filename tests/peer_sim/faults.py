"""What goes wrong, and when: a schedule drawn from the seed before the world begins. How it is done: ``strikes``."""

from __future__ import annotations

from random import Random
from typing import Literal, get_args

import msgspec

from p2pdiloco.protocol.ids import PeerId
from tests.peer_sim.world import World

FirstKind = Literal[
    "node",  # the node is killed; its learner goes on, and is found again
    "peer",  # node and learner are killed
    "learner",
    "pause",  # node stands still, for up to two minutes
    "pause-learner",
    "cut",
    "break",
    "slow",
    "power",  # killed, and what was not synced is anything
    "in-write",  # killed in the middle of an operation on the disk
    "full",  # the disk is full for a while
    "fsync",  # the disk refuses to sync for a while
    "slow-disk",
    "slow-work",  # one job on tensors takes very long
    "flip-file",
    "flip-state",  # a bit of the node's parameters or momentum
    "flip-learner",  # a bit of the learner's parameters
    "poison",  # the learner's parameters are not numbers any more
    "storm",  # everybody's learner and every other node are killed, one after the other
    "rollback",  # killed, and the disk is put back to an older copy
    "wipe",
]
FurtherKind = Literal[
    "directory-empty",  # it has no records for a while, and takes none
    "directory-forgets",  # each record is missing in every other answer
    "directory-lies",  # records lead to other peers
    "repeat",  # what a peer sends comes once more, later, also to the next life of who got it
    "spoil",  # of what a peer sends with its messages and answers, bits are flipped on the way
    "join-in-fork",  # two halves are cut apart; a newcomer comes who reaches both
    "upgrade",  # everybody is restarted, one after the other, with a release that the one before cannot talk to
    "lost-write",  # the disk says that it has written, and has not
    "misdirected-write",  # what is written lands in another file
    "jump",  # the process's clock is suddenly later
    "leave",  # somebody asks the peer to leave in order; it may come back later
    "forget",  # payloads that the node holds are gone: memory was short
    "encode",  # nothing that the learner trains can be encoded, in this life of its node
]
LateKind = Literal[
    "one-way",  # what a peer says on the connections that it has is lost from then on, and nobody is told
]
RoughKind = Literal[
    "crash-loop",  # the learner ends soon after each of its beginnings
    "misuse",  # the learner ends, and says that somebody must repair it
    "blackout",  # everybody is killed at once, and one comes back with the best of all checkpoints
    "garble",  # bits flip in signatures that come in
    "forge",  # the same, after they were found sound: what the peer commits then bears them
]
ShortKind = Literal[
    "no-process",  # nothing can be started for a while
    "no-descriptor",  # nothing can be opened, and no connection made
    "no-memory",  # ENOMEM from the system
    "unwritable",  # the peer's folder
]
Kind = FirstKind | FurtherKind | LateKind | RoughKind | ShortKind
FURTHER_SHARE = 0.4
"""Of seeds have further kinds."""
LATE_SHARE = 0.2
"""Of seeds have late ones."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    at: float
    kind: Kind
    peer: PeerId
    seconds: float


def draw_faults(random: Random, further: Random, late: Random, names: list[PeerId], typical_s: float) -> list[Fault]:
    """By time, within the time that the run takes without faults. Those of ``FurtherKind`` and ``LateKind`` are drawn
    apart, so that the worlds of seeds that have none stay as they were."""
    faults = _draw(random, random.choice((0, 1, 2, 3, 5, 8)), get_args(FirstKind), names, typical_s)
    if further.random() < FURTHER_SHARE:
        faults += _draw(further, further.choice((1, 2, 3, 5)), get_args(FurtherKind), names, typical_s)
    if late.random() < LATE_SHARE:
        faults += _draw(late, late.choice((1, 2)), get_args(LateKind), names, typical_s)
    return sorted(faults, key=lambda fault: fault.at)


def draw_rough(random: Random, names: list[PeerId], typical_s: float) -> list[Fault]:
    """Of a rough world: of all kinds, and many."""
    kinds = (*get_args(FirstKind), *get_args(FurtherKind), *get_args(LateKind), *get_args(RoughKind))
    faults = _draw(random, random.choice((4, 8, 12, 16)), kinds, names, typical_s)
    return sorted(faults, key=lambda fault: fault.at)


def draw_shortages(random: Random, names: list[PeerId], typical_s: float) -> list[Fault]:
    """Machines that lack something for a while, beside the other faults."""
    return _draw(random, random.choice((1, 2, 3, 5)), get_args(ShortKind), names, typical_s)


def _draw(
    random: Random, count: int, all_kinds: tuple[Kind, ...], names: list[PeerId], typical_s: float
) -> list[Fault]:
    kinds = random.sample(all_kinds, min(len(all_kinds), random.randint(1, 6)))
    return [
        Fault(
            at=1.0 + random.random() * typical_s,
            kind=random.choice(kinds),
            peer=random.choice(names),
            seconds=random.choice((0.1, 1.0, 5.0, 5.0, 20.0, 120.0)) * (0.5 + random.random()),
        )
        for _ in range(count)
    ]


# -- A peer that was killed comes back ---------------------------------------------------------------------------------


LONGEST_S = 10.0


def again(world: World, fault: Fault) -> None:
    """After as long as the fault lasts, but soon."""
    world.at(world.now + 0.05 + min(fault.seconds, LONGEST_S), lambda: world.begin(fault.peer))
