"""What goes wrong in a run, and when: a schedule drawn from the seed before the run begins.

Faults are applied by what is the case then: nobody is killed whose death would end the run (the last holder of its
states), since the protocol promises nothing after that.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import PeerId
from tests.machine_sim.network import LinkQuality
from tests.machine_sim.world import World

Kind = Literal["crash", "wipe", "learner", "pause", "cut", "mute", "one-way", "break", "slow", "leave", "blackout"]

STORM_CRASHES = 8
ONE_WAY_SHARE = 0.15
"""Runs in which connections go dead one way."""
ONE_WAY_S = 8.0
"""What their ends need to find out, and to meet again."""
SLOW = LinkQuality(delay_s=0.2, jitter_s=0.3, bytes_per_s=2e3)


class FaultRates(msgspec.Struct, frozen=True, kw_only=True):
    """Expected number of each fault for one peer and minute."""

    crash: float = 0.0
    """The process dies and restarts from its disk."""
    wipe: float = 0.0
    """The process dies and restarts with nothing."""
    learner: float = 0.0
    """Only the learner dies."""
    pause: float = 0.0
    """The process is stopped and goes on later."""
    cut: float = 0.0
    """The network falls into two parts."""
    mute: float = 0.0
    """One peer is not heard by some others, which it hears."""
    break_: float = msgspec.field(default=0.0, name="break")
    """A connection breaks and is dialled again."""
    slow: float = 0.0
    """A peer's upload is slow for a while."""
    leave: float = 0.0
    """A peer leaves in order."""
    blackout: float = 0.0
    """Every process dies at once and restarts from its disk."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault."""

    at: float
    kind: Kind
    peers: tuple[PeerId, ...]
    """Whom it hits; for a cut, one side."""
    duration_s: float


def draw_faults(random: Random, rates: FaultRates, peers: list[PeerId], start: float, end: float) -> list[Fault]:
    """Faults between ``start`` and ``end``, by time."""
    minutes = (end - start) / 60.0
    faults = []
    kinds: tuple[tuple[Kind, float, float], ...] = (
        ("crash", rates.crash, 8.0),
        ("wipe", rates.wipe, 8.0),
        ("learner", rates.learner, 2.0),
        ("pause", rates.pause, 8.0),
        ("cut", rates.cut, 15.0),
        ("mute", rates.mute, 10.0),
        ("break", rates.break_, 0.0),
        ("slow", rates.slow, 10.0),
        ("leave", rates.leave, 0.0),
        ("blackout", rates.blackout, 3.0),
    )
    for kind, rate, longest_s in kinds:
        expected = rate * minutes * (1 if kind in ("cut", "blackout") else len(peers))
        count = int(expected) + (random.random() < expected % 1.0)
        for _ in range(count):
            at = start + (end - start) * random.random()
            duration_s = min(longest_s * random.random() ** 2 + 0.05, end - at)
            if kind in ("cut", "mute", "break", "slow"):
                hit = tuple(sorted(random.sample(peers, random.randint(1, max(1, len(peers) - 1)))))
            else:
                hit = (random.choice(peers),)
            faults.append(Fault(at=at, kind=kind, peers=hit, duration_s=duration_s))
    return sorted(faults, key=lambda f: f.at)


def storm(random: Random, peers: list[PeerId], end: float) -> list[Fault]:
    """One peer that dies again and again, each time soon after it has come back."""
    peer, at = random.choice(peers), end * random.random() / 2
    faults: list[Fault] = []
    while len(faults) < STORM_CRASHES and at < end - 1.0:
        faults.append(Fault(at=at, kind="crash", peers=(peer,), duration_s=0.05 + 0.3 * random.random()))
        at += 0.4 + 1.5 * random.random()
    return faults


def one_way(random: Random, peers: list[PeerId], end: float) -> list[Fault]:
    """In some runs, what one peer says on its connections with some others is lost for as long as they last."""
    if random.random() >= ONE_WAY_SHARE:
        return []
    return [
        Fault(
            at=max(1.0, end - ONE_WAY_S) * random.random(),
            kind="one-way",
            peers=tuple(random.sample(peers, random.randint(2, len(peers)))),
            duration_s=ONE_WAY_S,
        )
        for _ in range(random.randint(1, 3))
    ]


def schedule_faults(world: World, faults: list[Fault]) -> None:
    """Let them happen."""
    for fault in faults:
        world.schedule(fault.at, None, lambda f: strike(world, f), fault)


def strike(world: World, fault: Fault) -> None:
    """One fault happens now."""
    if world.transcript is not None:
        world.transcript.say(f"{fault.kind} of {', '.join(fault.peers)} for {fault.duration_s:.2f} s")
    first = fault.peers[0]
    match fault.kind:
        case "crash":
            world.crash(first, keeps_disk=True, restart_s=fault.duration_s)
        case "wipe":
            if first in world.processes and world.survives_without(first):
                world.crash(first, keeps_disk=False, restart_s=fault.duration_s)
        case "learner":
            process = world.processes.get(first)
            if process is not None and not process.is_paused():
                process.crash_learner(fault.duration_s)
        case "pause":
            world.pause(first, fault.duration_s)
        case "cut":
            others = [p for p in world.settings if p not in fault.peers]
            _cut(
                world,
                [(a, b) for a in fault.peers for b in others] + [(b, a) for a in fault.peers for b in others],
                fault,
            )
        case "mute":
            _cut(world, [(first, p) for p in fault.peers[1:]], fault)
        case "one-way":
            process = world.processes.get(first)
            links = process.links if process is not None else {}
            for link in [links[name] for name in fault.peers[1:] if name in links]:
                back = link.target.links.get(first)
                if back is None or not back.is_dead:  # dead both ways is the kernel's to notice
                    link.is_dead = True
        case "break":
            process = world.processes.get(first)
            if process is not None:
                for name in fault.peers[1:]:
                    world.network.break_connection(process, name, "broken")
        case "slow":
            for other in world.settings:
                world.network.slow_down((first, other), SLOW)
                world.schedule(world.now + fault.duration_s, None, world.network.speed_up, (first, other))
        case "leave":
            process = world.processes.get(first)
            if process is not None and not process.is_paused() and world.survives_without(first):
                process.tell(ev.LeaveRequested("asked to"))
        case "blackout":
            for name in sorted(world.processes):
                world.crash(name, keeps_disk=True, restart_s=fault.duration_s * (0.5 + world.random.random()))


def _cut(world: World, directions: list[tuple[PeerId, PeerId]], fault: Fault) -> None:
    world.network.cut(directions)
    world.schedule(world.now + fault.duration_s, None, world.network.mend, directions)
