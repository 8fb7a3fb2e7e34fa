"""The seven invariants (I) of docs/protocol.md, looked at in one small run with a cut, a standstill and a death.

The simulator's own checkers are not asked: what must hold is counted anew from what each machine was told and answered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from stage import SHARD, only

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from tests.machine_sim.integer_shards import value_of
from tests.machine_sim.process import PeerSetting, Process
from tests.machine_sim.scenarios import P0, P1, P2, P3, base_config, make_world
from tests.machine_sim.transcript import Transcript
from tests.machine_sim.world import World

PEERS = (P0, P1, P2, P3)
STEP_S = 0.2
LOG_LENGTH = 16


class Handled(NamedTuple):
    """One event at one peer: the head before the machine was told, and what it answered."""

    at: float
    peer: PeerId
    head: Digest | None
    state: Digest | None
    event: ev.Event
    effects: tuple[ef.Effect, ...]


class Witness(Transcript):
    """Remembers instead of telling."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Handled] = []
        self.largest = 0

    def write(self, process: Process, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        """Called after each event."""
        head, value = process.machine.core.chains[SHARD].head, process.states.values[SHARD]
        state = None if value is None else value.digest
        entry = Handled(
            process.world.now, process.name, None if head is None else head.id, state, event, tuple(effects)
        )
        self.seen.append(entry)
        self.largest = max(self.largest, len(process.machine.payloads(SHARD)))


class Story(NamedTuple):
    """The run's end."""

    world: World
    witness: Witness
    healed_at: float
    equal_at: float


@pytest.fixture(scope="module")
def story() -> Story:
    witness = Witness()
    settings = {name: PeerSetting(step_s=STEP_S, step_jitter=0.0) for name in PEERS}
    world = make_world(base_config(log_length=LOG_LENGTH), settings, witness)
    world.run_until(4.0)
    for name in PEERS:  # shorter than connections last: what was held back comes late
        cut = [pair for other in PEERS if other != name for pair in ((name, other), (other, name))]
        world.network.cut(cut)
        world.run_until(world.now + 0.7)
        world.network.mend(cut)
        world.run_until(world.now + 0.5)
    cut = [pair for a in (P0, P1) for b in (P2, P3) for pair in ((a, b), (b, a))]
    world.network.cut(cut)
    world.run_until(world.now + 4.0)
    world.network.mend(cut)
    world.run_until(world.now + 1.0)
    world.pause(P1, 1.5)
    world.run_until(world.now + 2.0)
    world.crash(P2, keeps_disk=True, restart_s=1.0)
    world.run_until(world.now + 1.0)
    cut = [pair for name in (P0, P1, P2) for pair in ((name, P3), (P3, name))]
    world.network.cut(cut)
    world.run_until(world.now + 3.0)
    world.conditions.is_frozen = True
    world.network.mend(cut)
    healed_at = world.now
    while len({p.states.heads[SHARD] for p in world.living()}) > 1 and world.now < healed_at + 20.0:
        world.run_until(world.now + 0.1)
    equal_at = world.now
    world.run_until(equal_at + 5.0)
    assert not world.checks.is_over, world.checks.violations
    return Story(world, witness, healed_at, equal_at)


def commits(story: Story) -> dict[Digest, CommitHeader]:
    """All that were ever applied."""
    return {a.id: a.header for entry in story.witness.seen for a in only(list(entry.effects), ef.Apply)}


def winning_chain(story: Story) -> list[CommitHeader]:
    """From version 1 to the head that all have in the end."""
    known = commits(story)
    head = story.world.processes[P0].machine.core.head(SHARD)
    chain = []
    at = head.id
    while at in known:
        chain.append(known[at])
        at = known[at].parent
    assert len(chain) == head.version
    return chain[::-1]


def test_a_version_has_the_same_digest_everywhere_on_one_chain(story: Story) -> None:
    """I1a: whoever came to a head, by whatever way, has the state that its commit names."""
    result = {head: header.result for head, header in commits(story).items()}
    version_0 = story.witness.seen[0]
    assert version_0.head is not None
    assert version_0.state is not None
    result[version_0.head] = version_0.state
    states: dict[Digest, set[Digest | None]] = defaultdict(set)
    for entry in story.witness.seen:
        if isinstance(entry.event, ev.Applied) and entry.event.head == entry.head:
            states[entry.event.head].add(entry.state)
    assert len(states) > 20
    for head, found in states.items():
        assert found == {result[head]}


def test_a_peer_applies_only_a_commit_whose_parent_is_its_head(story: Story) -> None:
    """A1a: and the run had forks, so that others were there to be taken."""
    applies = [(entry.head, apply) for entry in story.witness.seen for apply in only(list(entry.effects), ef.Apply)]
    assert all(apply.header.parent == head and apply.id == commit_id(apply.header) for head, apply in applies)
    parents = [header.parent for header in commits(story).values()]
    assert len(parents) > len(set(parents)), "a fork"


def test_along_a_chain_each_learners_token_range_is_merged_at_most_once(story: Story) -> None:
    """I2."""
    merged: dict[str, int] = defaultdict(int)
    for header in winning_chain(story):
        for c in header.contributors:
            assert c.tokens_from == merged[c.learner] < c.tokens_to
            merged[c.learner] = c.tokens_to
    assert len(merged) == 5, "four learners and the one that died"


def test_a_living_learners_tokens_are_in_the_winning_chain_or_still_in_its_delta(story: Story) -> None:
    """I3: the global state holds exactly the tokens up to the mark, and the learner lost and got nothing else."""
    for process in story.world.living():
        learner, view, value = process.learner, process.machine.core.learner, process.states.values[SHARD]
        assert learner is not None
        assert view is not None
        assert value is not None
        assert value.of(learner.name) == value_of(view.marks[SHARD].tokens)
        assert 0 < view.marks[SHARD].tokens <= learner.tokens
        assert (learner.moved[SHARD], learner.tokens_lost) == (0, 0)


def test_after_faults_end_heads_become_equal_within_a_bounded_time(story: Story) -> None:
    """I4: and stay so."""
    assert 0.0 < story.equal_at - story.healed_at < 5.0
    assert {p.machine.core.head(SHARD) for p in story.world.living()} == {
        story.world.processes[P0].machine.core.head(SHARD)
    }


def test_with_one_live_learner_versions_advance() -> None:
    """I5a: K = 3, and all but one die."""
    settings = {name: PeerSetting(step_s=STEP_S) for name in (P0, P1, P2)}
    world = make_world(base_config(min_quorum=3), settings, None)
    world.run_until(4.0)
    for name in (P1, P2):
        world.crash(name, keeps_disk=False, restart_s=None)
    before = world.checks.newest[SHARD]
    world.run_until(12.0)
    assert world.checks.newest[SHARD] > before + 3


def test_nobody_is_waited_for_longer_than_the_takeover_time() -> None:
    """I5a: one of three stands still in the middle of the run; the others make versions all the time."""
    settings = {name: PeerSetting(step_s=STEP_S) for name in (P0, P1, P2)}
    world = make_world(base_config(), settings, None)
    world.run_until(4.0)
    world.pause(P2, 20.0)
    takeover_s = base_config().takeover_ceiling_s
    before, at, longest_s = world.checks.newest[SHARD], world.now, 0.0
    while world.now < 20.0:
        world.run_until(world.now + 0.05)
        if world.checks.newest[SHARD] > before:
            before, at = world.checks.newest[SHARD], world.now
        longest_s = max(longest_s, world.now - at)
    assert longest_s < 4 * STEP_S + takeover_s + 0.3, "a round, and the wait for the owner or contributor"
    assert before > 8


def test_queues_logs_and_buffers_stay_within_their_bounds(story: Story) -> None:
    """I6: the machine's own invariants, and the payloads that it asks its driver to hold."""
    for process in story.world.living():
        process.machine.check_invariants()
        assert len(process.machine.core.chains[SHARD].log) <= LOG_LENGTH
        assert len(process.machine.contributions.ledgers[SHARD].edges) <= LOG_LENGTH
    assert story.witness.largest <= 3 * LOG_LENGTH + 2 * len(PEERS)


def test_the_learner_never_waits(story: Story) -> None:
    """I7: nobody is told to pause, and each learner makes its steps at its own pace from start to end."""
    steps: dict[tuple[PeerId, int], list[float]] = defaultdict(list)
    lives: dict[PeerId, int] = defaultdict(int)
    for entry in story.witness.seen:
        assert not only(list(entry.effects), ef.PauseLearner)
        if isinstance(entry.event, ev.LearnerStarted):
            lives[entry.peer] += 1
        if isinstance(entry.event, ev.Stepped) and entry.peer != P1:  # that process stood still
            steps[entry.peer, lives[entry.peer]].append(entry.at)
    assert len(steps) == 4
    for times in steps.values():
        gaps = [b - a for a, b in pairwise(times)]
        assert max(gaps) < STEP_S + 1e-6
