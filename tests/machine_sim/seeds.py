"""From a seed to a run: its size, its speeds, its faults, its end; and what is demanded of it.

A run has four phases. *Faults*: everything may go wrong, and only safety is demanded. *Healed*: nothing fails any more,
everybody must join and versions must advance. *Ending*: some runs have peers leave in order or complete their steps.
*Rest*: learners stand still and all heads must become equal, with every token accounted for.
"""

from __future__ import annotations

import traceback

import msgspec

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.health import SILENT_S
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.state import ProtocolConfig
from p2pdiloco.protocol.state_acceptance import FAR_REQUESTS
from tests.machine_sim.byzantine import Liars
from tests.machine_sim.faults import schedule_faults
from tests.machine_sim.process import PeerSetting, Process
from tests.machine_sim.seed_world import GLACIAL_S, HEALING_S, MIXED, Scene, draw_scene
from tests.machine_sim.shared_link_network import share_lines
from tests.machine_sim.transcript import Transcript
from tests.machine_sim.world import World

PROGRESS_S = 16.0
"""Within this time, and the time between two rounds, every shard must have a new version once all is healed. If all are
needed for a quorum and one went on alone, the others believe its chain after three rounds (H3b)."""
REST_S = 12.0
ENDING_S = 100.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one run came to."""

    seed: int
    events: int
    violations: tuple[str, ...]
    tokens_lost: int
    tokens_merged: int
    versions: int
    forks: int
    wrong: dict[str, int] = {}
    """Wrong commits of each lying owner that others applied,"""
    caught: dict[str, int] = {}
    """and how many these were when it was found."""
    audits: dict[str, int] = {}
    """What ``Auditing`` counted."""
    went_back: bool = False
    """Whether some peer went back."""
    ruined: int = 0
    """Living peers that have a ruined model at the end."""


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
    if scene.bandwidths:
        share_lines(world, dict(scene.bandwidths))
    for at, mesh in scene.meshes:
        world.schedule(at, None, world.network.part, mesh)
    for i, (name, setting, at) in enumerate(scene.peers):
        world.add(name, setting, at, is_founder=i == 0)
    schedule_faults(world, list(scene.faults))
    world.poison = scene.poison
    world.save_all(scene.checkpoint_every_s)
    return world


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
        wrong={str(owner): count for owner, count in world.auditing.wrong.items()},
        caught={str(owner): count for owner, count in world.auditing.caught.items()},
        audits=dict(world.auditing.counted),
        went_back=world.has_gone_back,
        ruined=sum(process.is_ruined() for process in world.living()),
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
    world.run_until(world.now + scene.patience * HEALING_S)
    if not all(process.machine.core.is_current for process in world.living()):
        world.run_until(world.now + FAR_REQUESTS * scene.config.request_s)  # for others' word: rule H2f
    if not checks.is_over and world.fates.gone and not any(p.machine.core.is_current for p in world.living()):
        return  # the run was complete before the last ones came
    if not checks.is_over:
        checks.joined()
    is_moving = _can_progress(world, scene)
    if is_moving and scene.ending != "finish":
        started_at = world.now
        checks.progress_begins()
        deadline = started_at + PROGRESS_S + _longest_round_s(world, scene) + _waiting_rounds_s(world)
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
        world.run_until(world.now + scene.patience * REST_S + _waiting_rounds_s(world))
        if not checks.is_over and checks.different_heads():  # an owner waited for its learner, which rests: rule N3a
            world.run_until(world.now + SILENT_S)
    if not checks.is_over:
        checks.heads_equal()
    if not checks.is_over:
        world.auditing.check_end()
    if not checks.is_over:
        _count_tokens(world, scene)


def _trains(process: Process) -> bool:
    learner, setting = process.machine.core.learner, process.setting
    return learner is not None and not learner.is_paused and setting.step_s < GLACIAL_S and not setting.poison


def _longest_round_s(world: World, scene: Scene) -> float:
    """The time between two rounds of a fragment, if the fastest of those that are left sets the pace."""
    return scene.config.sync_every * min(p.setting.step_s for p in world.living() if _trains(p))


def _waiting_rounds_s(world: World) -> float:
    """Return how long others need for the versions that a peer made alone while it was cut off: one per round (O5b)."""
    return max(
        (
            (world.checks.newest[chain.shard] - chain.head.version) * process.machine.aggregation.waits().few_s
            for process in world.living()
            for chain in process.machine.core.chains
            if chain.head is not None and ("turn", chain.shard) in process.machine.core.alarms
        ),
        default=0.0,
    )


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
    left = sorted(name for name, process in world.processes.items() if not _is_glacial(process))
    if left and not world.checks.is_over:
        world.checks.violated(5, f"{', '.join(left)} cannot finish")


def _is_glacial(process: Process) -> bool:
    """Whether its learner makes steps that nobody waits for: when the others have gone, it makes what is left alone."""
    learner = process.machine.core.learner
    return process.setting.step_s >= GLACIAL_S and learner is not None and not learner.is_paused


def _count_tokens(world: World, scene: Scene) -> None:
    if scene.config.is_overwrite:
        return
    for process in world.living():
        values = [value for value in process.states.values if value is not None]
        if process.learner is not None and process.machine.core.is_current and process.machine.core.learner is not None:
            world.checks.conserved(process.learner, values)
