"""Hypothesis plays the adversary: it chooses what goes wrong next, and shrinks what it finds to a short story."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pdiloco.protocol.ids import PeerId
from tests.machine_sim.network import LinkQuality
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import base_config, make_world
from tests.machine_sim.transcript import Transcript

NAMES = [PeerId(f"p{i}") for i in range(4)]
NAME = st.sampled_from(NAMES)


class Swarm(RuleBasedStateMachine):
    """Four peers, one of them slow; after any story, heads become equal and no token is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.transcript = Transcript(is_full=False)
        peers = {name: PeerSetting(step_s=0.6 if name == NAMES[3] else 0.2) for name in NAMES}
        self.world = make_world(base_config(log_length=64), peers, self.transcript)
        self.world.run_until(1.5)
        self.cuts: list[list[tuple[PeerId, PeerId]]] = []

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)

    @rule(name=NAME, restart_s=st.sampled_from([0.1, 1.0]))
    def crash(self, name: PeerId, restart_s: float) -> None:
        self.world.crash(name, keeps_disk=True, restart_s=restart_s)

    @rule(name=NAME)
    def save(self, name: PeerId) -> None:
        self.world.save(name)

    @rule(name=NAME, seconds=st.sampled_from([0.3, 2.0]))
    def pause(self, name: PeerId, seconds: float) -> None:
        self.world.pause(name, seconds)

    @rule(name=NAME)
    def learner_dies(self, name: PeerId) -> None:
        process = self.world.processes.get(name)
        if process is not None and not process.is_paused():
            process.crash_learner(0.2)

    @precondition(lambda self: len(self.cuts) < 2)
    @rule(here=NAME, there=NAME, is_both_ways=st.booleans())
    def cut(self, here: PeerId, there: PeerId, is_both_ways: bool) -> None:
        if here != there:
            self.cuts.append([(here, there), *([(there, here)] if is_both_ways else [])])
            self.world.network.cut(self.cuts[-1])

    @precondition(lambda self: bool(self.cuts))
    @rule()
    def mend(self) -> None:
        self.world.network.mend(self.cuts.pop(0))

    @rule(here=NAME, there=NAME)
    def slow_link(self, here: PeerId, there: PeerId) -> None:
        self.world.network.slow_down((here, there), LinkQuality(delay_s=0.3, bytes_per_s=1e4))

    @invariant()
    def holds(self) -> None:
        assert not self.world.checks.violations, self.story()

    def teardown(self) -> None:
        world = self.world
        while self.cuts:
            world.network.mend(self.cuts.pop())
        for key in list(world.network.slowed):
            world.network.speed_up(key)
        world.run_until(world.now + 8.0)
        world.conditions.is_frozen = True
        world.run_until(world.now + 8.0)
        if not world.checks.is_over:
            world.checks.joined()
            world.checks.heads_equal()
        self.holds()

    def story(self) -> str:
        return "\n".join([*world_lines(self.transcript), *self.world.checks.violations])


def world_lines(transcript: Transcript) -> list[str]:
    """The end of the story."""
    return transcript.lines[-200:]


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(
    max_examples=120, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
