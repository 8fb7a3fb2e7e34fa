"""From a seed to a run: its size, its speeds, its faults, its end; and what is demanded of it.

A run has four phases. *Faults*: everything may go wrong, and only safety is demanded. *Healed*: nothing fails any more,
everybody must join and versions must advance. *Ending*: some runs have peers leave in order or complete their steps.
*Rest*: learners stand still and all heads must become equal, with every token accounted for.
"""

from __future__ import annotations

import traceback
from random import Random
from typing import Literal

import msgspec

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.core import ProtocolConfig
from p2pdiloco.protocol.identifiers import PeerId, RunId, ShardId
from p2pdiloco.simulation.driver import PeerSetting, Process
from p2pdiloco.simulation.faults import Fault, FaultRates, draw_faults, schedule_faults, storm
from p2pdiloco.simulation.liars import Liars
from p2pdiloco.simulation.network import LinkQuality, NetworkSetting
from p2pdiloco.simulation.transcript import Transcript
from p2pdiloco.simulation.world import World

HEALING_S = 12.0
"""By then everybody is connected and current, and old requests have been given up."""
PROGRESS_S = 12.0
"""Within this time, and the time between two turns, every shard must have a new version once all is healed."""
REST_S = 12.0
ENDING_S = 100.0
GLACIAL_S = 30.0
"""Step time of the odd learner that nobody may wait for."""
FORK_S = 30.0
"""Logs are long enough for forks that grew for this time: what is deeper is not promised to come back."""

POISON_SHARE = 0.1
"""Runs with a learner whose values are never finite."""
STORM_SHARE = 0.1
"""Runs in which one peer restarts again and again."""
STOP_SHARE = 0.03
"""Runs in which one peer stands still for up to two minutes."""
TWINS_SHARE = 0.1
"""Runs whose learners all have the same speed, so that forks of equal weight are common."""

Ending = Literal["rest", "finish", "leave"]


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A run as drawn from its seed."""

    seed: int
    config: ProtocolConfig
    """All but the peer and its weight."""
    network: NetworkSetting
    default_link: LinkQuality
    links: tuple[tuple[PeerId, PeerId, LinkQuality], ...]
    peers: tuple[tuple[PeerId, PeerSetting, float], ...]
    """Name, setting, and when it comes; the first is the founder."""
    clock_drift: float
    directory_lag_s: float
    checkpoint_every_s: float
    faults: tuple[Fault, ...]
    faults_s: float
    ending: Ending


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to."""

    seed: int
    events: int
    violations: tuple[str, ...]
    tokens_lost: int
    tokens_merged: int
    versions: int
    forks: int


MIXED = "mixed"
SCENARIOS: dict[str, FaultRates] = {
    "calm": FaultRates(),
    "crashes": FaultRates(crash=4.0, wipe=1.0, learner=3.0, blackout=1.0),
    "cuts": FaultRates(cut=6.0, mute=3.0, break_=6.0),
    "pauses": FaultRates(pause=4.0, slow=3.0),
    "leaves": FaultRates(leave=3.0, crash=1.0),
    "liars": FaultRates(),
}
"""Runs with only some kinds of faults, for ``simulate --scenario``; ``mixed`` draws all kinds from the seed."""


def draw_scene(seed: int, scenario: str = MIXED) -> Scene:
    """The run that ``seed`` names.

    Raises:
        KeyError: there is no such scenario.
    """
    random = Random(f"scene {seed}")
    size = random.choice((3, 3, 4, 4, 5, 5, 6, 7, 8, 10, 12))
    names = [PeerId(f"p{i}") for i in range(size)]
    fragments = random.randint(1, 3)
    sizes = [random.randint(1, 2) for _ in range(fragments)]
    shards = [[ShardId(sum(sizes[:f]) + i) for i in range(n)] for f, n in enumerate(sizes)]
    sync_every = fragments * random.randint(1, 4) * (2 if fragments < 3 else 1)
    fastest_s = random.choice((0.15, 0.25, 0.4))
    faults_s = random.choice((15.0, 20.0, 30.0))
    ending: Ending = random.choice(("rest", "rest", "finish", "leave"))
    drawn = _draw_rates(random)
    rates = drawn if scenario == MIXED else SCENARIOS[scenario]
    learners = 0
    peers = []
    are_twins = Random(f"twins {seed}").random() < TWINS_SHARE
    for i, name in enumerate(names):
        has_learner = i < 2 or random.random() < 0.9
        learners += has_learner
        setting = PeerSetting(
            step_s=GLACIAL_S
            if i >= 3 and random.random() < 0.04
            else fastest_s * random.choice((1.0, 1.0, 1.3, 2.0, 4.0)),
            tokens_per_step=random.choice((7, 10, 16)),
            has_learner=has_learner,
            weight=0.0 if i >= 2 and random.random() < 0.1 else random.choice((1.0, 1.0, 3.0)),
            work_s=min(random.choice((0.002, 0.01, 0.05)), 0.1 * sync_every * fastest_s / sum(sizes)),
            payload_bytes=random.choice((500, 5000)),
            learner_lag_s=random.choice((0.0, 0.0, 0.02)),
            failed_share=random.choice((0.0, 0.0, 0.02)),
        )
        if are_twins:
            learners += not has_learner
            setting = msgspec.structs.replace(
                setting, step_s=fastest_s, step_jitter=0.0, tokens_per_step=10, has_learner=True
            )
        comes_at = 0.0 if i == 0 else random.choice((0.0, 0.5, 5.0, faults_s * random.random()))
        peers.append((name, setting, comes_at))
    config = ProtocolConfig(
        run=RunId(f"run {seed}"),
        peer=names[0],
        fragments=tuple(tuple(f) for f in shards),
        sync_every=sync_every,
        overlap=random.randint(1, max(1, min(4, sync_every - 1))),
        min_quorum=min(random.choice((1, 1, 1, 2, 3)), learners),
        grace_share=random.choice((0.0, 0.5, 0.7, 1.0)),
        blocks=Random(f"blocks {seed}").choice((0, 7, 50, 400)),
        total_steps=int((faults_s + HEALING_S) / min(p.step_s for _, p, _ in peers if p.has_learner))
        if ending == "finish"
        else 10**9,
        is_overwrite=random.random() < 0.05,
        evaluation_every=random.choice((0, 2)),
        log_length=max(random.choice((16, 32)), int(FORK_S / (sync_every * fastest_s))),
        heartbeat_s=random.choice((0.5, 1.0)),
        takeover_floor_s=0.5,
        takeover_ceiling_s=4.0,
        request_s=3.0,
        leave_s=10.0,
        finish_s=30.0,
    )
    delay_s = random.choice((0.002, 0.02, 0.08))
    load = 5000 * sum(sizes) / (sync_every * fastest_s)
    """Bytes a second of all commits; contributions are at most as many."""
    links = [
        (
            a,
            b,
            LinkQuality(
                delay_s=delay_s * random.choice((0.5, 1, 4)),
                jitter_s=delay_s * random.choice((0.1, 1, 3)),
                bytes_per_s=load * random.choice((3.0, 100.0)),
            ),
        )
        for a in names
        for b in names
        if a != b and random.random() < 0.5
    ]
    scene = Scene(
        seed=seed,
        config=config,
        network=NetworkSetting(
            duplicated_share=random.choice((0.0, 0.0, 0.02)),
            patience_s=random.choice((3.0, 8.0)),
            redial_s=random.choice((0.3, 1.0)),
            silent_close_share=random.choice((0.0, 0.3)),
        ),
        default_link=LinkQuality(delay_s=delay_s, jitter_s=delay_s * 0.3, bytes_per_s=1e6),
        links=tuple(links),
        peers=tuple(peers),
        clock_drift=random.choice((0.0, 1e-3, 1e-2)),
        directory_lag_s=random.choice((0.2, 2.0, 10.0)),
        checkpoint_every_s=random.choice((2.0, 10.0)),
        faults=tuple(draw_faults(random, rates, names, 1.0, faults_s)),
        faults_s=faults_s,
        ending=ending,
    )
    return with_liars(scene) if scenario == "liars" else with_rarities(scene) if scenario == MIXED else scene


def with_liars(scene: Scene) -> Scene:
    """Eight peers of the scene's kind, of which one or two lie now and then, or always."""
    random = Random(f"liars {scene.seed}")
    honest = [setting for _, setting, _ in scene.peers if setting.step_s < GLACIAL_S and setting.has_learner]
    peers = [(PeerId(f"p{i}"), honest[i % len(honest)], 0.5 * i) for i in range(8)]
    for i in range(random.choice((1, 2))):
        name, setting, comes_at = peers[-1 - i]
        peers[-1 - i] = (name, msgspec.structs.replace(setting, lies=random.choice((0.05, 0.3, 1.0))), comes_at)
    config = msgspec.structs.replace(scene.config, min_quorum=min(2, scene.config.min_quorum), total_steps=10**5)
    return msgspec.structs.replace(scene, peers=tuple(peers), config=config, ending="rest")


def with_rarities(scene: Scene) -> Scene:
    """``scene``, and now and then what no usual run has: a poisoned learner, restarts in a row, a stop of minutes."""
    random = Random(f"rare {scene.seed}")
    peers, faults, faults_s = list(scene.peers), list(scene.faults), scene.faults_s
    names = [name for name, _, _ in peers]
    if random.random() < POISON_SHARE:
        name, setting, comes_at = peers[-1]
        healthy = sum(s.has_learner for _, s, _ in peers[:-1])
        if setting.has_learner and healthy >= scene.config.min_quorum:
            poisoned = msgspec.structs.replace(setting, poison=random.choice(("encode", "merge")))
            peers[-1] = (name, poisoned, comes_at)
    if random.random() < STORM_SHARE:
        faults += storm(random, names, faults_s)
    if random.random() < STOP_SHARE:
        stop_s = 20.0 + 100.0 * random.random()
        faults.append(Fault(at=faults_s, kind="pause", peers=(random.choice(names),), duration_s=stop_s))
        faults_s += stop_s
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(scene, peers=tuple(peers), faults=tuple(faults), faults_s=faults_s)


def _draw_rates(random: Random) -> FaultRates:
    """Each kind of fault is in about half of all runs."""

    def some(most: float) -> float:
        return most * random.random() if random.random() < 0.5 else 0.0

    return FaultRates(
        crash=some(2.0),
        wipe=some(1.0),
        learner=some(3.0),
        pause=some(2.0),
        cut=some(4.0),
        mute=some(1.5),
        break_=some(6.0),
        slow=some(2.0),
        leave=some(0.5),
        blackout=0.0 if random.random() < 0.9 else 2.0,
    )


def build_world(scene: Scene, transcript: Transcript | None = None) -> World:
    """The world at its first moment, with all that is to happen."""

    def make_config(name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(scene.config, peer=name, weight=setting.weight)

    world = World(scene.seed, make_config, scene.network, transcript)
    if any(setting.lies for _, setting, _ in scene.peers):
        world.liars = Liars(scene.seed)
    world.conditions.clock_drift = scene.clock_drift
    world.conditions.directory_lag_s = scene.directory_lag_s
    world.network.default = scene.default_link
    for a, b, quality in scene.links:
        world.network.qualities[a, b] = quality
    for i, (name, setting, at) in enumerate(scene.peers):
        world.add(name, setting, at, is_founder=i == 0)
    schedule_faults(world, list(scene.faults))
    _save_all(world, scene.checkpoint_every_s)
    return world


def _save_all(world: World, every_s: float) -> None:
    def save(_: None) -> None:
        for name in sorted(world.processes):
            world.save(name)
        world.schedule(world.now + every_s, None, save, None)

    world.schedule(every_s, None, save, None)


def run_seed(seed: int, transcript: Transcript | None = None, scenario: str = MIXED) -> Outcome:
    """Run ``seed`` to its end or its first violation."""
    return run_scene(draw_scene(seed, scenario), transcript)


def run_scene(scene: Scene, transcript: Transcript | None = None) -> Outcome:
    """Run all phases."""
    world = build_world(scene, transcript)
    try:
        _run_phases(world, scene)
    except AssertionError as error:
        world.checks.violated(6, _where(error))
    checks = world.checks
    return Outcome(
        seed=scene.seed,
        events=world.events,
        violations=tuple(checks.violations),
        tokens_lost=checks.tokens_lost,
        tokens_merged=checks.tokens_merged,
        versions=checks.versions,
        forks=checks.forks,
    )


def _where(error: AssertionError) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line} {error}"


def _run_phases(world: World, scene: Scene) -> None:
    checks = world.checks
    world.run_until(scene.faults_s + 0.1)
    world.conditions.is_healed = True
    world.network.setting = msgspec.structs.replace(world.network.setting, duplicated_share=0.0)
    for fault in scene.faults:
        assert fault.at + fault.duration_s <= world.now
    world.run_until(world.now + HEALING_S)
    if not checks.is_over and world.fates.gone and not any(p.machine.core.is_current for p in world.living()):
        return  # the run was complete before the last ones came
    if not checks.is_over:
        checks.joined()
    is_moving = _can_progress(world, scene)
    if is_moving and scene.ending != "finish":
        started_at = world.now
        checks.progress_begins()
        deadline = started_at + PROGRESS_S + _longest_turn_s(world, scene)
        while world.now < deadline and not checks.is_over:
            world.run_until(world.now + 1.0)
            if min(checks.advanced_at.values(), default=0.0) > started_at:
                break
        if not checks.is_over:
            for shard, at in checks.advanced_at.items():
                if at <= started_at:
                    checks.violated(5, f"shard {shard} stands at version {checks.newest[shard]}")
    if scene.ending == "leave" and is_moving and not checks.is_over:
        _leave_one_by_one(world, scene)
    if scene.ending == "finish" and not checks.is_over:
        _finish(world, scene)
    for name, setting in world.settings.items():
        if setting.lies and name in world.processes:
            world.crash(name, keeps_disk=False, restart_s=float("inf"))  # what it might still say is no rest
    if not checks.is_over:
        world.conditions.is_frozen = True
        world.run_until(world.now + REST_S)
    if not checks.is_over:
        checks.heads_equal()
    if not checks.is_over:
        _count_tokens(world, scene)


def _trains(process: Process) -> bool:
    learner, setting = process.machine.core.learner, process.setting
    return learner is not None and not learner.is_paused and setting.step_s < GLACIAL_S and not setting.poison


def _longest_turn_s(world: World, scene: Scene) -> float:
    """The time between two turns of a fragment, if the fastest of those that are left sets the pace."""
    return scene.config.sync_every * min(p.setting.step_s for p in world.living() if _trains(p))


def _can_progress(world: World, scene: Scene) -> bool:
    return sum(map(_trains, world.living())) >= scene.config.min_quorum


def _leave_one_by_one(world: World, scene: Scene) -> None:
    """Peers leave in order while the others train; nothing may be left behind."""
    world.conditions.are_leaves_whole = True
    for process in world.living()[1:]:
        trains = sum(map(_trains, world.living()))
        if trains <= max(scene.config.min_quorum, 1) or not _trains(process):
            continue
        process.tell(ev.LeaveRequested("asked to"))
        deadline = world.now + scene.config.leave_s + 5.0
        while not process.is_dead and world.now < deadline and not world.checks.is_over:
            world.run_until(world.now + 0.5)
        if not process.is_dead and not world.checks.is_over:
            world.checks.violated(5, f"{process.name} cannot leave")


def _finish(world: World, scene: Scene) -> None:
    """The run completes; every peer must come to its end, once the steps that are left have been made."""
    steps_left = scene.config.total_steps - max((p.machine.core.step for p in world.living()), default=0)
    training = [p.setting.step_s for p in world.living() if _trains(p)]
    if steps_left > 0 and not training:
        return
    deadline = world.now + ENDING_S + max(0, steps_left) * min(training, default=0.0)
    while world.processes and world.now < deadline and not world.checks.is_over:
        world.run_until(world.now + 0.5)
    if world.processes and not world.checks.is_over:
        world.checks.violated(5, f"{', '.join(sorted(world.processes))} cannot finish")


def _count_tokens(world: World, scene: Scene) -> None:
    if scene.config.is_overwrite:
        return
    for process in world.living():
        values = [value for value in process.states.values if value is not None]
        if process.learner is not None and process.machine.core.is_current and process.machine.core.learner is not None:
            world.checks.conserved(process.learner, values)
