"""Faults of disks and memory, done to a world: see ``strikes``.

Whoever is spoilt or damaged is told to the checkers, which do not call the harm a bug.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec
import torch

from p2pdiloco.peer.payload_store import PAYLOADS
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import Contribution, Contributor, Message
from p2pdiloco.wire.control_messages import decode_message
from tests.peer_sim.disk import SimulatedDisk
from tests.peer_sim.faults import Fault, again
from tests.peer_sim.world import World

EARLY_BYTES = 16
GARBLED_LEAST_S = 5.0
FORGETS_S = 0.5
CUT_MOST_S = 20.0

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
        disk.room, disk.healed_at = None, world.now

    world.at(world.now + min(fault.seconds, 20.0), empty)
    return fault.peer in world.hosts


def fsync(world: World, fault: Fault) -> bool:
    """It refuses to sync, for a while."""
    disk = world.computers[fault.peer].disk
    world.computers[fault.peer].disk.is_unreliable = True
    disk.is_failing = True

    def heal() -> None:
        disk.is_failing, disk.healed_at = False, world.now

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

    def lied() -> None:
        world.happened.update([fault.kind])
        if world.setting.is_rough and world.random.random() < 0.5:
            world.at(world.now + world.random.random(), lambda: _read_it(world, fault))

    disk.lied = lied
    world.checks.damaged.add(fault.peer)
    world.checks.forgetful.add(fault.peer)  # it may be a payload's
    return False  # it is counted when something was written


def flip_file(world: World, fault: Fault) -> bool:
    """A bit of a file."""
    if not world.survives_without({fault.peer}):
        return False
    path = _flip(world, world.computers[fault.peer].disk)
    if path is None:
        return False
    world.durability.flipped(fault.peer, path)
    world.checks.spoilt.add(fault.peer)
    world.checks.damaged.add(fault.peer)
    if world.setting.is_rough and PAYLOADS not in path:
        _read_it(world, fault)
    return True


def _read_it(world: World, fault: Fault) -> None:
    """The process ends, so that its next life reads what was harmed, before something new takes its place."""
    if fault.peer in world.hosts and world.survives_without({fault.peer}):
        world.kill(fault.peer, with_learner=True)
        again(world, fault)


def _flip(world: World, disk: SimulatedDisk) -> str | None:
    """In rough worlds often where lengths and names lie, or in the newest checkpoint."""
    match world.random.randrange(4) if world.setting.is_rough else 0:
        case 1:
            return disk.flip(within=world.durability.newest(disk))
        case 2 | 3:
            return disk.flip(EARLY_BYTES)
        case _:
            return disk.flip()


def rollback(world: World, fault: Fault) -> bool:
    """Killed, and the disk is put back to an older copy."""
    disk = world.computers[fault.peer].disk
    old = disk.keep()

    def put_back() -> None:
        if world.survives_without({fault.peer}) and fault.peer in world.hosts:
            disk.is_unreliable = True
            world.kill(fault.peer, with_learner=True)
            disk.put_back(*old)
            again(world, fault)
            world.happened["rollback"] += 1

    world.at(world.now + 5.0, put_back)
    return False


def wipe(world: World, fault: Fault) -> bool:
    """Killed, and nothing is left on the disk."""
    if not world.survives_without({fault.peer}):
        return False
    is_alive = fault.peer in world.hosts
    world.computers[fault.peer].disk.is_unreliable = True
    world.kill(fault.peer, with_learner=True)
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
    """Every other payload that the node holds is gone; in a rough world again and again, as long as the fault lasts."""
    host = world.hosts.get(fault.peer)
    if host is None:
        return False
    world.checks.forgetful.add(fault.peer)
    if world.setting.is_rough and fault.seconds > 0:
        after_s = FORGETS_S * world.random.random()
        next_one = msgspec.structs.replace(fault, seconds=min(fault.seconds, CUT_MOST_S) - after_s)
        world.at(world.now + after_s, lambda: world.hosts.get(fault.peer) is host and forget(world, next_one))
    held = [
        (shelf.payloads, digest) for shelf in host.peer.driver.payload_cache.shards for digest in sorted(shelf.payloads)
    ]
    for payloads, digest in held:
        if world.random.random() < 0.5:
            del payloads[digest]
    return bool(held)


def garble(world: World, fault: Fault) -> bool:
    """Bits flip in signatures that come in, before anybody has looked at them. Each costs who has signed a takeover's
    time: not for so long that nothing can be merged until the run's end must be over (``finish_s``)."""
    host = world.hosts.get(fault.peer)
    if host is None:
        return False
    peer, message = host.peer, host.peer.message
    until = world.now + min(max(fault.seconds, GARBLED_LEAST_S), CUT_MOST_S)

    def garbled(source: PeerId, body: bytes | Message, payload: memoryview | None) -> object:
        if world.now < until and world.random.random() < 0.5:
            body = _with_another_signature(world, decode_message(body) if isinstance(body, bytes) else body)
        return message(source, body, payload)

    setattr(peer, "message", garbled)  # noqa: B010 (a fault, not a method)
    return True


def forge(world: World, fault: Fault) -> bool:
    """Bits flip in signatures of contributions after they were looked at: the owner's commit names what nobody gave."""
    host = world.hosts.get(fault.peer)
    if host is None or len(world.hosts) < 2 or not world.survives_without({fault.peer}):
        return False
    if world.happened["forge"]:
        return False  # one of a world
    driver, feed, until = host.peer.driver, host.peer.driver.feed, world.now + max(fault.seconds, GARBLED_LEAST_S)
    world.checks.spoilt.add(fault.peer)
    for computer in world.computers.values():
        computer.is_excused = True  # what it owns comes to nothing, and with a quorum of two nobody else may be left

    def forged(event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, Contribution) and world.now < until:
            event = msgspec.structs.replace(event, message=_with_another_signature(world, event.message))
        feed(event)

    setattr(driver, "feed", forged)  # noqa: B010 (a fault, not a method)
    return True


def _with_another_signature(world: World, message: Message) -> Message:
    """A contribution's, or one of those that a commit names."""
    match message:
        case Contribution(contributor=one) if one.signature:
            return msgspec.structs.replace(message, contributor=_altered(world, one))
        case _:
            return message


def _altered(world: World, contributor: Contributor) -> Contributor:
    signature = bytearray(contributor.signature)
    signature[world.random.randrange(len(signature))] ^= 1 << world.random.randrange(8)
    return msgspec.structs.replace(contributor, signature=bytes(signature))


def encode(world: World, fault: Fault) -> bool:
    """Nothing can be encoded in this life of the node."""
    host = world.hosts.get(fault.peer)
    if host is None:
        return False

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ValueError("no scale fits")

    setattr(host.peer.state, "encode", refuse)  # noqa: B010 (a fault, not a method)
    world.computers[fault.peer].is_excused = True
    return True
