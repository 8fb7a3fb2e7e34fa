"""The faults of a chaos run: a plan from a TOML file, and the schedule of faults drawn from it and a seed.

Rules of this file:
1. Pure: the same plan and seed give the same schedule, to the byte. It is written before anything runs.
2. A schedule is fair: at every moment at least one peer is free of faults that take its processes, since the protocol
   promises nothing when the last holder of the state dies; only ``blackout`` kills all, and has the run resumed.
3. What a fault hits, and for how long, is drawn here; what is the case when it comes due is for ``runner.py`` to see.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.protocol.manifest_validation import config_problems

Kind = Literal[
    "kill",
    "kill-saving",
    "rollback",
    "twins",
    "learner",
    "stop",
    "freeze",
    "stop-learner",
    "leave",
    "disk",
    "starve",
    "memory",
    "unwritable",
    "no-process",
    "region",
    "blackout",
    "power-cut",
    "cut",
    "mute",
    "one-way",
    "split",
    "slow",
    "corrupt",
    "break",
]
LIES = frozenset(
    (
        *("values", "tokens", "others", "steps", "heads", "blocks", "weight", "tiny", "flip", "noise", "merges"),
        *("x10", "x1000", "random", "drift", "hidden", "replay", "stale", "labels", "rounds", "loss"),
        *("reversed", "static", "first", "idle", "reconnect", "states", "grafts", "forks", "flood"),
        *("hurry", "fast", "selfish", "puppet", "crowd", "hub", "slander", "stall", "late", "patchy", "orphans"),
        *("sink", "lingers", "overwrites", "cabal", "heavy", "keeps"),
        *("faces", "sleepers", "parting"),
    )
)
"""The lies of hostile peers (``byzantine.py``)."""
COUNTED = frozenset({"values", "others"})
"""Lies that honest peers write down as faults; the rest is within what they believe, or has no effect."""
DARK_KINDS: frozenset[Kind] = frozenset({"blackout", "power-cut"})
"""They hit everybody at once. A plan says how many; they are not drawn."""
LINK_KINDS = frozenset({"cut", "mute", "one-way", "split", "slow", "corrupt", "break"})
"""They hit connections, not processes; a peer may have one of each sort at a time."""
DURATIONS_S: dict[Kind, tuple[float, float]] = {
    "kill": (1.0, 8.0),
    "kill-saving": (0.0, 0.0),
    "rollback": (5.0, 20.0),
    "twins": (60.0, 60.0),
    "learner": (0.0, 0.0),
    "stop": (1.0, 12.0),
    "freeze": (61.0, 80.0),
    "stop-learner": (1.0, 12.0),
    "leave": (1.0, 8.0),
    "disk": (6.0, 15.0),
    "starve": (6.0, 20.0),
    "memory": (3.0, 10.0),
    "unwritable": (6.0, 20.0),
    "no-process": (6.0, 20.0),
    "region": (2.0, 8.0),
    "blackout": (2.0, 4.0),
    "power-cut": (0.0, 40.0),
    "cut": (3.0, 15.0),
    "mute": (3.0, 15.0),
    "one-way": (12.0, 12.0),
    "split": (3.0, 15.0),
    "slow": (5.0, 15.0),
    "corrupt": (0.0, 0.0),
    "break": (0.0, 0.0),
}
"""Shortest and longest. For what ends processes: until they are started again; for ``rollback``: the copy's age;
for ``power-cut``: when each peer comes back;
for ``one-way``: what the peers are given to find out, and to meet again, since nobody undoes it;
for ``twins``: what the copy that is started beside its original is given to start, find out, and end."""
RECOVERY_S = 12.0
"""Time for a restart and for catching up, before a peer's processes are hit again."""
LEARNER_KINDS: frozenset[Kind] = frozenset({"learner", "starve", "unwritable", "no-process"})
"""They kill a learner."""
SHORT_KINDS: frozenset[Kind] = LEARNER_KINDS - {"learner"}
"""While they last, no other learner can be started."""
LEARNER_LIVES = 3
"""Kills of one peer's learner in one schedule, so that no node runs out of its learner's lives."""
BLACKOUT_CALM_S = 30.0
"""Without faults after a blackout: everything starts again, one after the other."""
MEET_S = 60.0
"""Time in which all peers merge together after the last of them was started again after a power cut."""

MOST_CLOCK_S = 10 * 365 * 86_400.0
LEAVE_S = 20.0
"""Time for a peer that is asked to leave to have everything merged."""

Weight = Annotated[float, Meta(ge=0.0, le=1e6)]
RegionName = Annotated[str, Meta(min_length=1, max_length=16, pattern=r"^[a-z0-9-]+\Z")]

SHIPPED = Path(__file__).parent / "plans"


class PlanError(Exception):
    """The plan cannot be used; the message names the field and what is allowed."""


class Slow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Delay and rate of a slow link."""

    delay_s: Annotated[float, Meta(ge=0.0, le=10.0)] = 0.3
    """Added in each direction."""
    bytes_per_s: Annotated[float, Meta(ge=100.0, le=1e10)] = 50e3


class Least(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least shares that a run must reach."""

    goodput: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of the learners' time alive that ended in merged tokens."""
    merged: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Share of all trained tokens that was merged; tokens of learners that were killed count."""


class Oddities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Defects of single peers from the start on."""

    clocks_off_s: Annotated[tuple[float, ...], Meta(max_length=26)] = ()
    """How far the peers' wall clocks are off, in their order, from the start on; 0 for those that are not named."""
    hostile: Annotated[tuple[str, ...], Meta(max_length=26)] = ()
    """The lies (``byzantine.py``) that the peers tell, in their order, joined by "+"; none for those that are not
    named. The first is honest, and fewer than half are hostile. Of these nothing is judged but what the others make of
    them."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One TOML file."""

    name: Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[a-z0-9-]+\Z")]
    peers: Annotated[int, Meta(ge=2, le=26)]
    seconds: Annotated[float, Meta(ge=1.0, le=86_400.0)]
    """In which faults come, counted from the moment at which all peers train. Start and end come on top."""
    regions: Annotated[tuple[RegionName, ...], Meta(min_length=1, max_length=8)] = ("here",)
    """Peers are dealt to them in turn."""
    every_s: Annotated[float, Meta(ge=0.1, le=86_400.0)] = 10.0
    """Mean time between two faults (exponential)."""
    blackouts: Annotated[int, Meta(ge=0, le=100)] = 0
    """Times that everybody is killed at once, evenly spread; one peer then resumes from what all left."""
    power_cuts: Annotated[int, Meta(ge=0, le=10)] = 0
    """Times that everybody and the bootstrap node, which does not come back, are killed at once, evenly spread. A
    service manager starts each peer again with its own command, at some time."""
    bootstrap_dies: bool = False
    """The bootstrap node is killed before the first fault, and does not come back."""
    settle_s: Annotated[float, Meta(ge=5.0, le=600.0)] = 20.0
    """Quiet time at the end, with everybody back; the second half of it is judged."""
    calm_s: Annotated[float, Meta(ge=2.0, le=600.0)] = 6.0
    """After a fault's end nothing is asked for so long; a quiet time of at least this after that must see a version."""
    least: Least = Least()
    weights: dict[Kind, Weight] = msgspec.field(default_factory=lambda: dict.fromkeys(_drawn_kinds(), 1.0))
    """How often each kind is drawn, in proportion; what is left out never is."""
    odd: Oddities = Oddities()
    slow: Slow = Slow()
    config: str = ""
    """A run's TOML file, relative to the plan's folder; or ..."""
    run: RunConfig | None = None
    """... the same inline."""

    @property
    def names(self) -> tuple[str, ...]:
        """The peers: A, B, C, ..."""
        return tuple(chr(ord("A") + index) for index in range(self.peers))

    def region_of(self, name: str) -> str:
        """The region of a peer."""
        return self.regions[self.names.index(name) % len(self.regions)]

    def lies(self, name: str) -> str:
        """The lies of a peer; empty if it is honest."""
        index = self.names.index(name)
        return self.odd.hostile[index] if index < len(self.odd.hostile) else ""

    def clock_off_s(self, name: str) -> float:
        """How far a peer's wall clock is ahead."""
        index = self.names.index(name)
        return self.odd.clocks_off_s[index] if index < len(self.odd.clocks_off_s) else 0.0

    def members_of(self, region: str) -> tuple[str, ...]:
        """The peers of a region."""
        return tuple(name for name in self.names if self.region_of(name) == region)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the schedule."""

    number: int
    at: float
    """Seconds from the moment at which all peers train."""
    kind: Kind
    peers: tuple[str, ...]
    """Whom it hits; for ``split`` one side; for ``blackout`` first the one that resumes."""
    duration_s: float
    returns_s: tuple[float, ...] = ()
    """For ``power-cut``: seconds after which each of ``peers`` is started again."""

    @property
    def end(self) -> float:
        """When it is undone."""
        return self.at + self.duration_s


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``schedule.json``."""

    seed: int
    plan: Plan
    faults: tuple[Fault, ...]


def _drawn_kinds() -> list[Kind]:
    return [kind for kind in get_args(Kind) if kind not in DARK_KINDS]


def find_plan(text: str) -> Path:
    """A path, or the name of a plan that is shipped.

    Raises:
        PlanError: neither.
    """
    path = Path(text)
    if path.exists():
        return path
    shipped = SHIPPED / f"{text}.toml"
    if shipped.exists():
        return shipped
    names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.toml")))
    raise PlanError(f"--plan {text}: no such file; shipped plans: {names}")


def read_plan(
    path: Path, *, peers: int | None = None, seconds: float | None = None, together: int | None = None
) -> Plan:
    """Decode and check a plan; ``peers``, ``seconds`` and the run's ``schedule.together`` take the place of the file's.

    Raises:
        PlanError: no such file, not TOML, an unknown key, a value out of bounds, an impossible combination.
    """
    try:
        values = msgspec.toml.decode(path.read_bytes(), type=dict[str, object])
        values |= {key: value for key, value in (("peers", peers), ("seconds", seconds)) if value is not None}
        plan = msgspec.convert(values, Plan)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error
    if plan.config and plan.run is None:
        plan = msgspec.structs.replace(plan, config="", run=_read_config(path.parent / plan.config))
    if plan.run is not None and together is not None:
        in_groups = msgspec.structs.replace(plan.run.schedule, together=together)
        plan = msgspec.structs.replace(plan, run=msgspec.structs.replace(plan.run, schedule=in_groups))
    problems = plan_problems(plan)
    if problems:
        raise PlanError("\n".join(f"{path}: {problem}" for problem in problems))
    return plan


def _read_config(path: Path) -> RunConfig:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=RunConfig)
    except OSError as error:
        raise PlanError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error


def plan_problems(plan: Plan) -> list[str]:
    """Contradictions between fields that are valid on their own."""
    found = []
    if plan.run is None:
        found.append("name a run's file in config, or describe the run in [run]")
    elif plan.config:
        found.append("give config or [run], not both")
    else:
        found += [f"run: {problem}" for problem in config_problems(plan.run)]
    if len(set(plan.regions)) < len(plan.regions):
        found.append("regions: two have the same name")
    if len(plan.regions) > plan.peers:
        found.append(f"regions: {len(plan.regions)} of them need at least as many peers, not {plan.peers}")
    if len(plan.odd.clocks_off_s) > plan.peers:
        found.append(f"clocks_off_s: {len(plan.odd.clocks_off_s)} of them for {plan.peers} peers")
    if not all(abs(off_s) < MOST_CLOCK_S for off_s in plan.odd.clocks_off_s):
        found.append(f"clocks_off_s: less than {MOST_CLOCK_S:.0f} s each")
    told = [names for names in plan.odd.hostile if names]
    if 2 * len(told) >= plan.peers or any(plan.odd.hostile[:1]):
        found.append("hostile: the first peer is honest, and more than half are")
    found += [f"hostile: there is no lie {name!r}" for names in told for name in names.split("+") if name not in LIES]
    for kind, field in (("blackout", "blackouts"), ("power-cut", "power_cuts")):
        if kind in plan.weights:
            found.append(f"weights: {kind} is not drawn; say {field} = N")
    if not any(plan.weights.values()) and not plan.blackouts and not plan.power_cuts:
        found.append("weights: at least one must be more than 0, or blackouts, or power_cuts")
    are_chosen = set(plan.weights) != set(_drawn_kinds())
    if len(plan.regions) < 2 and are_chosen and any(plan.weights.get(kind) for kind in _OF_REGIONS):
        found.append("weights: region and split need two regions")
    if plan.blackouts and plan.bootstrap_dies:
        found.append("blackouts: with bootstrap_dies nobody would be left to find the others by")
    if plan.blackouts and plan.power_cuts:
        found.append("blackouts: who resumes needs a bootstrap node, and power_cuts leave none")
    apart_s = DURATIONS_S["power-cut"][1]
    if plan.power_cuts and plan.seconds / (plan.power_cuts + 1) < apart_s:
        found.append(
            f"power_cuts: {plan.power_cuts} of them need {(plan.power_cuts + 1) * apart_s:.0f} seconds or more"
        )
    if plan.blackouts and plan.seconds / plan.blackouts < 2 * BLACKOUT_CALM_S:
        found.append(f"blackouts: each needs {2 * BLACKOUT_CALM_S:.0f} of the {plan.seconds:.0f} seconds")
    return found


_OF_REGIONS: tuple[Kind, ...] = ("region", "split")


def draw_schedule(plan: Plan, seed: int) -> Schedule:
    """The faults, by time."""
    random = Random(f"{plan.name}/{seed}")
    dark = [_blackout(plan, random, (index + 1) / (plan.blackouts + 1)) for index in range(plan.blackouts)]
    dark += [_power_cut(plan, random, (index + 1) / (plan.power_cuts + 1)) for index in range(plan.power_cuts)]
    drawn = list(dark)
    at = 0.0
    while (at := at + random.expovariate(1.0 / plan.every_s)) < plan.seconds:
        fault = _draw(plan, random, at, drawn)
        if fault is not None:
            drawn.append(fault)
    drawn.sort(key=lambda fault: fault.at)
    numbered = (msgspec.structs.replace(fault, number=number) for number, fault in enumerate(drawn, start=1))
    return Schedule(seed=seed, plan=plan, faults=tuple(numbered))


def _blackout(plan: Plan, random: Random, share: float) -> Fault:
    order = list(plan.names)
    random.shuffle(order)
    duration_s = round(random.uniform(*DURATIONS_S["blackout"]), 2)
    return Fault(
        number=0, at=round(plan.seconds * share, 2), kind="blackout", peers=tuple(order), duration_s=duration_s
    )


def _power_cut(plan: Plan, random: Random, share: float) -> Fault:
    returns_s = tuple(round(random.uniform(*DURATIONS_S["power-cut"]), 2) for _ in plan.names)
    return Fault(
        number=0,
        at=round(plan.seconds * share, 2),
        kind="power-cut",
        peers=plan.names,
        duration_s=max(returns_s),
        returns_s=returns_s,
    )


def _draw(plan: Plan, random: Random, at: float, drawn: list[Fault]) -> Fault | None:
    """A fault at ``at`` that is fair beside those already ``drawn``; None if none is."""
    weights = {kind: weight for kind, weight in sorted(plan.weights.items()) if weight}
    if len(plan.regions) < 2:
        weights = {kind: weight for kind, weight in weights.items() if kind not in _OF_REGIONS}
    while weights:
        kind = random.choices(list(weights), list(weights.values()))[0]
        shortest, longest = DURATIONS_S[kind]
        duration_s = min(random.uniform(shortest, longest), max(0.0, plan.seconds - at))
        candidates = _targets(plan, kind)
        random.shuffle(candidates)
        for peers in candidates:
            fault = Fault(number=0, at=round(at, 2), kind=kind, peers=peers, duration_s=round(duration_s, 2))
            if _is_fair(plan, fault, drawn):
                return fault
        del weights[kind]
    return None


def _targets(plan: Plan, kind: Kind) -> list[tuple[str, ...]]:
    if kind in _OF_REGIONS:
        return [plan.members_of(region) for region in plan.regions]
    return [(name,) for name in plan.names]


def _is_fair(plan: Plan, fault: Fault, drawn: list[Fault]) -> bool:
    """Whether rule 2 holds with it, and nobody is hit twice by the same sort at once."""
    for other in drawn:
        if other.kind in DARK_KINDS and other.at - 1.0 < fault.at < other.end + BLACKOUT_CALM_S:
            return False  # what began before it ends with it
    lives = sum(other.kind in LEARNER_KINDS and other.peers == fault.peers for other in drawn)
    if fault.kind in LEARNER_KINDS and lives >= LEARNER_LIVES:
        return False
    if fault.kind in LINK_KINDS:
        alike = [other for other in drawn if other.kind == fault.kind]
        return not any(_overlap(fault, other, 1.0) and {*fault.peers} & {*other.peers} for other in alike)
    taken = {
        name
        for other in drawn
        if other.kind not in LINK_KINDS and _overlap(fault, other, RECOVERY_S)
        for name in other.peers
    }
    return not taken & {*fault.peers} and len(taken | {*fault.peers}) < plan.peers


def _overlap(one: Fault, other: Fault, gap_s: float) -> bool:
    return one.at < other.end + gap_s and other.at < one.end + gap_s
