"""What goes wrong, and when: a schedule drawn from the seed before the world begins.

Nobody is harmed whose loss would end the run (the last who has all states): nothing is promised after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Literal, get_args

import msgspec
import torch

from p2pdiloco.peersim.host import WORK_S
from p2pdiloco.peersim.world import World
from p2pdiloco.protocol.identifiers import PeerId

Kind = Literal[
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


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    at: float
    kind: Kind
    peer: PeerId
    seconds: float


def draw_faults(random: Random, names: list[PeerId], typical_s: float) -> list[Fault]:
    """By time, within the time that the run takes without faults."""
    count = random.choice((0, 1, 2, 3, 5, 8))
    kinds = random.sample(get_args(Kind), random.randint(1, 6))
    faults = [
        Fault(
            at=1.0 + random.random() * typical_s,
            kind=random.choice(kinds),
            peer=random.choice(names),
            seconds=random.choice((0.1, 1.0, 5.0, 5.0, 20.0, 120.0)) * (0.5 + random.random()),
        )
        for _ in range(count)
    ]
    return sorted(faults, key=lambda fault: fault.at)


def schedule(world: World, faults: list[Fault]) -> None:
    """Let them happen."""
    for fault in faults:
        world.at(fault.at, partial(strike, world, fault))


def strike(world: World, fault: Fault) -> None:
    """One fault happens now."""
    world.harm_until(world.now + fault.seconds)
    _STRIKES[fault.kind](world, fault)


def _again(world: World, fault: Fault, longest_s: float = 10.0) -> None:
    world.at(world.now + 0.05 + min(fault.seconds, longest_s), lambda: world.begin(fault.peer))


def _node(world: World, fault: Fault) -> None:
    if world.survives_without({fault.peer}) or world.disks[fault.peer].files:
        world.kill(fault.peer)
        _again(world, fault)


def _peer(world: World, fault: Fault) -> None:
    if world.survives_without({fault.peer}):
        world.kill(fault.peer, with_learner=True)
        _again(world, fault)


def _learner(world: World, fault: Fault) -> None:
    learner = world.processes.get(fault.peer)
    if learner is not None and fault.peer in world.hosts:
        learner.kill()
        world.excused.add(fault.peer)  # too many in a row, and it gives up


def _pause(world: World, fault: Fault) -> None:
    host = world.hosts.get(fault.peer)
    if host is not None and not host.is_paused:
        host.pause()
        world.at(world.now + fault.seconds, host.resume)


def _pause_learner(world: World, fault: Fault) -> None:
    learner = world.processes.get(fault.peer)
    if learner is not None and not learner.is_paused:
        learner.is_paused = True

        def resume() -> None:
            learner.is_paused = False

        world.at(world.now + fault.seconds, resume)


def _cut(world: World, fault: Fault) -> None:
    others = [name for name in world.identities if name != fault.peer]
    directions = [(fault.peer, other) for other in others]
    if world.random.random() < 0.7:
        directions += [(other, fault.peer) for other in others]
    world.network.cut(directions, min(fault.seconds, 30.0))


def _break(world: World, fault: Fault) -> None:
    host = world.hosts.get(fault.peer)
    for connection in [] if host is None else list(host.links.connections.values()):
        world.network.break_connection(connection, "broken", is_silent=world.random.random() < 0.3)


def _slow(world: World, fault: Fault) -> None:
    world.network.slow[fault.peer] = 1e4
    world.at(world.now + min(fault.seconds, 30.0), lambda: world.network.slow.pop(fault.peer, None))


def _power(world: World, fault: Fault) -> None:
    if world.survives_without({fault.peer}):
        world.kill(fault.peer, with_learner=True)
        world.disks[fault.peer].cut_power()
        _again(world, fault)


def _in_write(world: World, fault: Fault) -> None:
    if fault.peer in world.hosts and world.survives_without({fault.peer}):
        world.disks[fault.peer].dies_in = world.random.randint(1, 12)
        _watch_death(world, fault)


def _watch_death(world: World, fault: Fault) -> None:
    """It is started again some time after it died."""
    host = world.hosts.get(fault.peer)

    def look() -> None:
        if world.hosts.get(fault.peer) is not host:
            world.begin(fault.peer)
        elif world.disks[fault.peer].dies_in is not None:
            world.at(world.now + 1.0, look)

    world.at(world.now + 1.0, look)


def _full(world: World, fault: Fault) -> None:
    disk = world.disks[fault.peer]
    disk.room = world.random.randrange(1 << 16)

    def empty() -> None:
        disk.room = None

    world.at(world.now + min(fault.seconds, 20.0), empty)


def _fsync(world: World, fault: Fault) -> None:
    disk = world.disks[fault.peer]
    disk.is_failing = True

    def heal() -> None:
        disk.is_failing = False

    world.at(world.now + min(fault.seconds, 20.0), heal)


def _slow_queue(queue: Literal["tensors", "disk"], factor: float) -> Callable[[World, Fault], None]:
    def strike(world: World, fault: Fault) -> None:
        host = world.hosts.get(fault.peer)
        if host is not None:
            host.slowness[queue] = factor
            world.excused.update(world.identities)  # what it owns, or has to give, may come too late for the end
            world.harm_until(world.now + 2 * factor * WORK_S[queue])  # one job that has begun ends no sooner
            longest_s = 2.0 if queue == "tensors" else fault.seconds
            world.at(world.now + min(fault.seconds, longest_s), lambda: host.slowness.pop(queue, None))

    return strike


def _flip_file(world: World, fault: Fault) -> None:
    if world.survives_without({fault.peer}) and world.disks[fault.peer].flip():
        world.checks.spoilt.add(fault.peer)
        world.checks.damaged.add(fault.peer)


def _flip_state(world: World, fault: Fault) -> None:
    host = world.hosts.get(fault.peer)
    if host is None or len(world.hosts) < 2 or not world.survives_without({fault.peer}):
        return
    world.checks.spoilt.add(fault.peer)
    vector = world.random.choice((host.peer.state.theta, host.peer.state.momentum))
    element, bit = world.random.randrange(vector.numel()), world.random.randrange(31)
    whole = vector.view(torch.int32)
    whole[element] ^= 1 << bit


def _flip_learner(world: World, fault: Fault) -> None:
    learner = world.processes.get(fault.peer)
    if learner is not None and fault.peer in world.hosts:
        world.checks.spoilt.add(fault.peer)
        vector = world.random.choice(learner.parameters).view(-1)
        vector.view(torch.int32)[world.random.randrange(vector.numel())] ^= 1 << world.random.randrange(30)


def _poison(world: World, fault: Fault) -> None:
    learner = world.processes.get(fault.peer)
    if learner is not None and fault.peer in world.hosts:
        learner.is_poisoned = True
        world.excused.add(fault.peer)


def _storm(world: World, fault: Fault) -> None:
    for number, name in enumerate(world.identities):
        one = msgspec.structs.replace(fault, peer=name, seconds=0.5 + 3.0 * world.random.random())
        _learner(world, one)
        if number % 2:
            world.at(world.now + number * world.random.random(), partial(_node, world, one))


def _rollback(world: World, fault: Fault) -> None:
    disk = world.disks[fault.peer]
    old = disk.keep()

    def put_back() -> None:
        if world.survives_without({fault.peer}) and fault.peer in world.hosts:
            world.kill(fault.peer, with_learner=True)
            disk.put_back(old)
            _again(world, fault)

    world.at(world.now + 5.0, put_back)


def _wipe(world: World, fault: Fault) -> None:
    if world.survives_without({fault.peer}):
        world.kill(fault.peer, with_learner=True)
        world.disks[fault.peer].put_back({})
        _again(world, fault)


_STRIKES: dict[Kind, Callable[[World, Fault], None]] = {
    "node": _node,
    "peer": _peer,
    "learner": _learner,
    "pause": _pause,
    "pause-learner": _pause_learner,
    "cut": _cut,
    "break": _break,
    "slow": _slow,
    "power": _power,
    "in-write": _in_write,
    "full": _full,
    "fsync": _fsync,
    "slow-disk": _slow_queue("disk", 100.0),
    "slow-work": _slow_queue("tensors", 20000.0),
    "flip-file": _flip_file,
    "flip-state": _flip_state,
    "flip-learner": _flip_learner,
    "poison": _poison,
    "storm": _storm,
    "rollback": _rollback,
    "wipe": _wipe,
}
