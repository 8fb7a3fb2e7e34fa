"""Faults of processes, clocks and connections, done to a world. Those of disks and memory: ``damage``.

Rules of this file:
1. Nobody is harmed whose loss would end the run (the last who has all states): nothing is promised after that.
2. A fault that had nobody to hit did not happen: a strike returns whether it did, and the world counts those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from p2pdiloco.peer.learner_supervisor import MISUSED, RESTARTS
from tests.peer_sim import disk_faults
from tests.peer_sim.disk import Shortage
from tests.peer_sim.faults import Fault, Kind, again
from tests.peer_sim.host import WORK_S
from tests.peer_sim.world import World

Strike = Callable[[World, Fault], bool]

CUT_MOST_S = 30.0
SPOILT_LEAST_S = 5.0
SHORT_LEAST_S = 2.0
ONE_WAY_S = 20.0
"""What both ends need to find out, with heartbeats of the slowest kind, and to meet again."""
FORKED_S = 4.0
"""After a cut, both sides have versions of their own."""


def schedule(world: World, faults: list[Fault]) -> None:
    """Let them happen."""
    for fault in faults:
        world.at(fault.at, partial(strike, world, fault))


def strike(world: World, fault: Fault) -> None:
    """One fault happens now."""
    world.harm_until(world.now + fault.seconds)
    if STRIKES[fault.kind](world, fault):
        world.happened[fault.kind] += 1


# -- processes ---------------------------------------------------------------------------------------------------------


def _node(world: World, fault: Fault) -> bool:
    if fault.peer not in world.hosts:
        return False
    if not world.survives_without({fault.peer}) and not world.computers[fault.peer].disk.files:
        return False
    world.kill(fault.peer)
    again(world, fault)
    return True


def _peer(world: World, fault: Fault) -> bool:
    if fault.peer not in world.hosts or not world.survives_without({fault.peer}):
        return False
    world.kill(fault.peer, with_learner=True)
    again(world, fault)
    return True


def _learner(world: World, fault: Fault) -> bool:
    learner = world.learners.newest.get(fault.peer)
    if learner is None or learner.is_dead or fault.peer not in world.hosts:
        return False
    learner.kill()
    world.computers[fault.peer].is_excused = True  # too many in a row, and it gives up
    return True


def _crash_loop(world: World, fault: Fault) -> bool:
    """Each learner of this life of the node ends soon after it began."""
    host, again_s = world.hosts.get(fault.peer), 1.0 + world.random.random()

    def crash() -> None:
        if world.hosts.get(fault.peer) is host:
            _learner(world, fault)
            world.at(world.now + again_s, crash)

    crash()
    return host is not None


def _shortage(kind: Shortage) -> Strike:
    """The machine refuses something for a while; often the learner has just ended, so that it must be started then."""

    def strike(world: World, fault: Fault) -> bool:
        disk = world.computers[fault.peer].disk
        if disk.shortage is not None:
            return False
        seconds = min(max(fault.seconds, SHORT_LEAST_S), CUT_MOST_S)
        disk.shortage = kind
        if kind != "no-process":
            disk.is_unreliable = True
            world.checks.forgetful.add(fault.peer)  # what cannot be written down is kept in memory, so less of it
        world.harm_until(world.now + 3 * seconds)  # backoff: the learner is started again by then

        def end() -> None:
            disk.shortage, disk.healed_at = None, world.now

        world.at(world.now + seconds, end)
        if world.random.random() < 0.5:
            _learner(world, fault)
        return fault.peer in world.hosts

    return strike


def _misuse(world: World, fault: Fault) -> bool:
    """Another life would end the same way: there must be none."""
    learner, host = world.learners.newest.get(fault.peer), world.hosts.get(fault.peer)
    if learner is None or learner.is_dead or host is None or learner.channel.is_closed:
        return False
    world.computers[fault.peer].is_excused = True
    host.workers.learners = 1 + RESTARTS
    learner.exit(MISUSED, "it is misused")
    return True


def _blackout(world: World, fault: Fault) -> bool:
    """Everybody is killed at once. They come back one after the other, the first with the best of all disks."""
    names = [name for name in world.computers if name in world.hosts]
    disks = [world.computers[name].disk for name in names]
    if not names or world.checks.spoilt or world.checks.damaged or any(disk.is_unreliable for disk in disks):
        return False
    if any(not world.durability.has_whole(name) for name in names):
        return False
    for name in names:
        world.computers[name].is_excused = True
        world.kill(name, with_learner=True)
    world.random.shuffle(names)
    world.durability.resumes = names[0]
    for number, name in enumerate(names):
        world.at(world.now + 0.5 + number + world.random.random(), partial(world.begin, name))
    return True


def _pause(world: World, fault: Fault) -> bool:
    host = world.hosts.get(fault.peer)
    if host is None or host.is_paused:
        return False
    host.pause()
    world.at(world.now + fault.seconds, host.resume)
    return True


def _pause_learner(world: World, fault: Fault) -> bool:
    learner = world.learners.newest.get(fault.peer)
    if learner is None or learner.is_dead or learner.is_paused:
        return False
    learner.is_paused = True

    def resume() -> None:
        learner.is_paused, learner.hears_since = False, world.now

    world.at(world.now + fault.seconds, resume)
    return True


def _leave(world: World, fault: Fault) -> bool:
    """Not the last who has all states: nobody could go on."""
    host = world.hosts.get(fault.peer)
    if host is None or host.peer.is_over or not world.survives_without({fault.peer}):
        return False
    if world.setting.is_rough:
        for computer in world.computers.values():
            computer.is_excused = True  # two who leave at once, with slow learners and a quorum of two, may be too late
    host.do(lambda: host.peer.request_leave("asked to"))

    def come_back() -> None:
        if host.is_dead and fault.peer in world.checks.endings and len(world.hosts) > 0:
            del world.checks.endings[fault.peer]
            world.begin(fault.peer)

    if world.random.random() < 0.5:
        world.at(world.now + fault.seconds, come_back)
    return True


def _storm(world: World, fault: Fault) -> bool:
    hit = False
    for number, name in enumerate(world.computers):
        one = msgspec.structs.replace(fault, peer=name, seconds=0.5 + 3.0 * world.random.random())
        hit |= _learner(world, one)
        if number % 2:
            world.at(world.now + number * world.random.random(), partial(_node, world, one))
    return hit


def _upgrade(world: World, fault: Fault) -> bool:
    """One release after the other, as people do it: nobody is asked, and each restarts its own peer."""
    spread_s = min(fault.seconds, CUT_MOST_S)
    for name in world.computers:
        one = msgspec.structs.replace(fault, peer=name, seconds=0.5 + world.random.random())
        world.at(world.now + spread_s * world.random.random(), partial(_restart_newer, world, one))
    return len(world.hosts) > 1


def _restart_newer(world: World, fault: Fault) -> None:
    world.computers[fault.peer].version += 1
    if fault.peer in world.hosts and not _node(world, fault):
        world.computers[fault.peer].version -= 1  # who has the only state is not restarted

        world.at(world.now + 1.0, partial(_restart_newer, world, fault))


def _jump(world: World, fault: Fault) -> bool:
    host = world.hosts.get(fault.peer)
    if host is None:
        return False
    host.jump(fault.seconds)
    return True


# -- connections and the directory -------------------------------------------------------------------------------------


def _cut(world: World, fault: Fault) -> bool:
    others = [name for name in world.computers if name != fault.peer]
    directions = [(fault.peer, other) for other in others]
    if world.random.random() < 0.7:
        directions += [(other, fault.peer) for other in others]
    world.network.cut_for(directions, min(fault.seconds, CUT_MOST_S))
    return bool(others) and fault.peer in world.hosts


def _break(world: World, fault: Fault) -> bool:
    host = world.hosts.get(fault.peer)
    connections = [] if host is None else list(host.links.connections.values())
    for connection in connections:
        world.network.break_connection(connection, "broken", is_silent=world.random.random() < 0.3)
    return bool(connections)


def _one_way(world: World, fault: Fault) -> bool:
    host = world.hosts.get(fault.peer)
    connections = [] if host is None else list(host.links.connections.values())
    for connection in connections:
        if not any(direction.is_dead for direction in connection.directions.values()):
            connection.directions[fault.peer].is_dead = True
    world.harm_until(world.now + ONE_WAY_S)
    return bool(connections)


def _slow(world: World, fault: Fault) -> bool:
    world.network.slow[fault.peer] = 1e4
    world.at(world.now + min(fault.seconds, CUT_MOST_S), lambda: world.network.slow.pop(fault.peer, None))
    return fault.peer in world.hosts


def _repeat(world: World, fault: Fault) -> bool:
    world.network.repeating[fault.peer] = world.now + fault.seconds
    world.harm_until(world.now + fault.seconds + world.network.REPEATED_S)
    return fault.peer in world.hosts


def _spoil(world: World, fault: Fault) -> bool:
    """One peer of a world, so that somebody is left to be asked: a donor is asked no more in this life when another
    one has sent what it should have sent (``peer.downloads``, rule 2)."""
    if world.network.spoiling.keys() - {fault.peer}:
        return False
    world.computers[fault.peer].is_excused = True  # nobody fetches what it alone has, nor merges what it gives
    world.network.spoiling[fault.peer] = world.now + min(max(fault.seconds, SPOILT_LEAST_S), CUT_MOST_S)
    return False  # it is counted when something was spoilt


def _join_in_fork(world: World, fault: Fault) -> bool:
    others = [name for name in world.hosts if name != fault.peer]
    if len(others) < 2 or not world.survives_without({fault.peer}):
        return False
    world.random.shuffle(others)
    half = len(others) // 2
    pairs = [(one, other) for one in others[:half] for other in others[half:]]
    seconds = min(max(fault.seconds, 2 * FORKED_S), CUT_MOST_S)
    world.network.cut_for(pairs + [(other, one) for one, other in pairs], seconds)
    world.harm_until(world.now + seconds)
    world.computers[fault.peer].disk.is_unreliable = True
    world.kill(fault.peer, with_learner=True)
    world.computers[fault.peer].disk.put_back({})

    def come() -> None:
        heads = {tuple(c.head for c in world.hosts[n].peer.machine.core.chains) for n in others if n in world.hosts}
        if fault.peer not in world.hosts and len(heads) > 1:
            world.happened["join-in-fork"] += 1
        world.begin(fault.peer)

    world.at(world.now + FORKED_S, come)
    return False  # it is counted when there is a fork


def _directory(mood: Literal["empty", "forgets", "lies"]) -> Strike:
    def strike(world: World, fault: Fault) -> bool:
        world.directory.be(mood, min(fault.seconds, CUT_MOST_S))
        return True

    return strike


# -- work --------------------------------------------------------------------------------------------------------------


def _slow_queue(queue: Literal["tensors", "disk"], factor: float) -> Strike:
    def strike(world: World, fault: Fault) -> bool:
        host = world.hosts.get(fault.peer)
        if host is None:
            return False
        host.workers.slowness[queue] = factor
        host.workers.held_up_at = float("inf")  # what waits is not known
        for computer in world.computers.values():
            computer.is_excused = True  # what it owns, or has to give, may come too late for the end
        world.harm_until(world.now + 2 * factor * WORK_S[queue])  # one job that has begun ends no sooner
        longest_s = 2.0 if queue == "tensors" else fault.seconds
        world.at(world.now + min(fault.seconds, longest_s), lambda: host.workers.slowness.pop(queue, None))
        return True

    return strike


STRIKES: dict[Kind, Strike] = {
    "node": _node,
    "peer": _peer,
    "learner": _learner,
    "pause": _pause,
    "pause-learner": _pause_learner,
    "cut": _cut,
    "break": _break,
    "one-way": _one_way,
    "slow": _slow,
    "power": disk_faults.power,
    "in-write": disk_faults.in_write,
    "full": disk_faults.full,
    "fsync": disk_faults.fsync,
    "slow-disk": _slow_queue("disk", 100.0),
    "slow-work": _slow_queue("tensors", 20000.0),
    "flip-file": disk_faults.flip_file,
    "flip-state": disk_faults.flip_state,
    "flip-learner": disk_faults.flip_learner,
    "poison": disk_faults.poison,
    "storm": _storm,
    "rollback": disk_faults.rollback,
    "wipe": disk_faults.wipe,
    "directory-empty": _directory("empty"),
    "directory-forgets": _directory("forgets"),
    "directory-lies": _directory("lies"),
    "repeat": _repeat,
    "spoil": _spoil,
    "join-in-fork": _join_in_fork,
    "upgrade": _upgrade,
    "lost-write": disk_faults.lost_write,
    "misdirected-write": disk_faults.misdirected_write,
    "jump": _jump,
    "leave": _leave,
    "forget": disk_faults.forget,
    "encode": disk_faults.encode,
    "crash-loop": _crash_loop,
    "misuse": _misuse,
    "blackout": _blackout,
    "garble": disk_faults.garble,
    "forge": disk_faults.forge,
    "no-process": _shortage("no-process"),
    "no-descriptor": _shortage("no-descriptor"),
    "no-memory": _shortage("no-memory"),
    "unwritable": _shortage("unwritable"),
}
