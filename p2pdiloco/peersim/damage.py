"""Faults of disks and memory, done to a world: see ``strikes``.

Whoever is spoilt or damaged is told to the checkers, which do not call the harm a bug.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from p2pdiloco.peersim.faults import Fault
from p2pdiloco.peersim.restarts import again
from p2pdiloco.peersim.world import World

# -- disks -------------------------------------------------------------------------------------------------------------


def power(world: World, fault: Fault) -> bool:
    """Killed, and what was not synced is anything."""
    if fault.peer not in world.hosts or not world.survives_without({fault.peer}):
        return False
    world.kill(fault.peer, with_learner=True)
    world.computers[fault.peer].disk.cut_power()
    again(world, fault)
    return True


def in_write(world: World, fault: Fault) -> bool:
    """Killed in the middle of an operation."""
    host = world.hosts.get(fault.peer)
    if host is None or not world.survives_without({fault.peer}):
        return False
    disk = world.computers[fault.peer].disk
    disk.dies_in = world.random.randint(1, 12)

    def look() -> None:
        if world.hosts.get(fault.peer) is not host:
            world.happened["in-write"] += disk.dies_in is None
            world.begin(fault.peer)
        elif disk.dies_in is not None:
            world.at(world.now + 1.0, look)

    world.at(world.now + 1.0, look)
    return False  # it is counted when the process died


def full(world: World, fault: Fault) -> bool:
    """For a while."""
    disk = world.computers[fault.peer].disk
    world.computers[fault.peer].disk.is_unreliable = True
    disk.room = world.random.randrange(1 << 16)

    def empty() -> None:
        disk.room = None

    world.at(world.now + min(fault.seconds, 20.0), empty)
    return fault.peer in world.hosts


def fsync(world: World, fault: Fault) -> bool:
    """It refuses to sync, for a while."""
    disk = world.computers[fault.peer].disk
    world.computers[fault.peer].disk.is_unreliable = True
    disk.is_failing = True

    def heal() -> None:
        disk.is_failing = False

    world.at(world.now + min(fault.seconds, 20.0), heal)
    return fault.peer in world.hosts


def lost_write(world: World, fault: Fault) -> bool:
    """The next file is not written, and nobody hears of it."""
    return _lie(world, fault, "lost")


def misdirected_write(world: World, fault: Fault) -> bool:
    """The next file lands in another one."""
    return _lie(world, fault, "misdirected")


def _lie(world: World, fault: Fault, lie: str) -> bool:
    if not world.survives_without({fault.peer}):
        return False
    disk = world.computers[fault.peer].disk
    disk.lie = lie
    disk.lied = lambda: world.happened.update([fault.kind])
    world.checks.damaged.add(fault.peer)
    world.checks.forgetful.add(fault.peer)  # it may be a payload's
    return False  # it is counted when something was written


def flip_file(world: World, fault: Fault) -> bool:
    """A bit of a file."""
    if not world.survives_without({fault.peer}) or not world.computers[fault.peer].disk.flip():
        return False
    world.checks.spoilt.add(fault.peer)
    world.checks.damaged.add(fault.peer)
    return True


def rollback(world: World, fault: Fault) -> bool:
    """Killed, and the disk is put back to an older copy."""
    disk = world.computers[fault.peer].disk
    old = disk.keep()

    def put_back() -> None:
        if world.survives_without({fault.peer}) and fault.peer in world.hosts:
            world.kill(fault.peer, with_learner=True)
            world.computers[fault.peer].disk.is_unreliable = True
            disk.put_back(old)
            again(world, fault)
            world.happened["rollback"] += 1

    world.at(world.now + 5.0, put_back)
    return False


def wipe(world: World, fault: Fault) -> bool:
    """Killed, and nothing is left on the disk."""
    if not world.survives_without({fault.peer}):
        return False
    is_alive = fault.peer in world.hosts
    world.kill(fault.peer, with_learner=True)
    world.computers[fault.peer].disk.is_unreliable = True
    world.computers[fault.peer].disk.put_back({})
    again(world, fault)
    return is_alive


# -- memory ------------------------------------------------------------------------------------------------------------


def flip_state(world: World, fault: Fault) -> bool:
    """A bit of the node's parameters or momentum."""
    host = world.hosts.get(fault.peer)
    if host is None or len(world.hosts) < 2 or not world.survives_without({fault.peer}):
        return False
    world.checks.spoilt.add(fault.peer)
    vector = world.random.choice((host.peer.state.theta, host.peer.state.momentum))
    element, bit = world.random.randrange(vector.numel()), world.random.randrange(31)
    whole = vector.view(torch.int32 if vector.itemsize == 4 else torch.int16)
    whole[element] ^= 1 << bit % (8 * vector.itemsize - 1)
    return True


def flip_learner(world: World, fault: Fault) -> bool:
    """A bit of the learner's parameters."""
    learner = world.learners.newest.get(fault.peer)
    if learner is None or fault.peer not in world.hosts:
        return False
    world.checks.spoilt.add(fault.peer)
    vector = world.random.choice(learner.model.parameters).view(-1)
    vector.view(torch.int32)[world.random.randrange(vector.numel())] ^= 1 << world.random.randrange(30)
    return True


def poison(world: World, fault: Fault) -> bool:
    """The learner's parameters are not numbers any more."""
    learner = world.learners.newest.get(fault.peer)
    if learner is None or fault.peer not in world.hosts:
        return False
    learner.is_poisoned = True
    world.computers[fault.peer].is_excused = True
    return True


def forget(world: World, fault: Fault) -> bool:
    """Every other payload that the node holds is gone."""
    host = world.hosts.get(fault.peer)
    if host is None:
        return False
    world.checks.forgetful.add(fault.peer)
    held = [(shelf.payloads, digest) for shelf in host.peer.driver.cargo.shelves for digest in sorted(shelf.payloads)]
    for payloads, digest in held:
        if world.random.random() < 0.5:
            del payloads[digest]
    return bool(held)


def encode(world: World, fault: Fault) -> bool:
    """Nothing can be encoded in this life of the node."""
    host = world.hosts.get(fault.peer)
    if host is None:
        return False

    def refuse(*_: object) -> NoReturn:
        raise ValueError("no scale fits")

    setattr(host.peer.state, "encode", refuse)  # noqa: B010 (a fault, not a method)
    world.computers[fault.peer].is_excused = True
    return True
