"""Rules T of docs/protocol.md: rounds."""

from __future__ import annotations

from stage import SHARD, TOKENS, A, B, C, Stage, bare, life, only, sent, tokens, with_payload

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.config import Sizes
from p2pdiloco.protocol.ids import FragmentId, ShardId
from tests.machine_sim.learner import Copy
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import P0, P1, P2, P3, base_config, make_world

TWO_SHARDS = ((ShardId(0), ShardId(1)),)


def test_the_learner_that_reaches_a_fragments_step_announces_its_turn_to_all_live_peers() -> None:
    """T1a."""
    stage = Stage(B, C)
    assert not sent(stage.train(3), msg.Round)
    announced = sent(stage.train(1), msg.Round)
    assert announced == [(peer, msg.Round(FragmentId(0), 4, (stage.head(),))) for peer in (B, C)]


def test_each_fragment_has_its_own_step() -> None:
    """T1a: H = 4 and two fragments are due two steps apart."""
    stage = Stage(B, fragments=((ShardId(0),), (ShardId(1),)))
    due = [[sync_round.fragment for _, sync_round in sent(stage.train(1), msg.Round)] for _ in range(8)]
    assert due == [[], [1], [], [0], [], [1], [], [0]]


def test_everybody_who_hears_of_a_round_adopts_the_step() -> None:
    """T1b."""
    stage = Stage(B)
    assert only(stage.announce(B, 8), ef.AdoptStep) == [ef.AdoptStep(8)]
    assert stage.machine.view.step == 8
    assert not only(stage.announce(B, 4), ef.AdoptStep), "never back"


def due_alone(stage: Stage, steps: int, seconds: float = 0.0) -> list[int]:
    """The steps at which a round begins, of so many that take so long together; rounds end at once."""
    found = []
    for step in range(stage.steps + 1, stage.steps + 1 + steps):
        stage.wait(seconds / steps)
        effects = stage.train(1)
        found += [step] if only(effects, ef.Snapshot) else []
        stage.work(effects)
    return found


def test_a_peer_alone_lets_rounds_wait_that_would_serve_nobody() -> None:
    """T1d: H = 4; nobody would have the version, and the outer step takes over what the learner has."""
    assert due_alone(Stage(takes_mean=True), 100) == [4, 36, 68, 100]
    assert due_alone(Stage(takes_mean=True), 16, seconds=80.0) == [4, 8, 12, 16], "not for more than ten seconds"
    assert due_alone(Stage(takes_mean=False), 12) == [4, 8, 12], "another outer step is not the same for being rarer"
    assert due_alone(Stage(takes_mean=True, sizes=Sizes(budget=10**6)), 12) == [4, 8, 12], "a budget counts them"


def test_rounds_do_not_wait_where_somebody_is_or_was() -> None:
    """T1d: rarer versions count for less, so a fork of those who were here could win over them."""
    stage = Stage(takes_mean=True)
    assert due_alone(stage, 20) == [4]
    stage.meet(B, phase="following", is_participating=False, weight=0.0)
    assert due_alone(stage, 8) == [24, 28]
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert due_alone(stage, 40) == [60], "it has left nothing here"
    stage = Stage(B, owners="ba", takes_mean=True)
    stage.take(stage.commit(tokens(B, 0, 40), step=4))
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert due_alone(stage, 12) == [5, 9], "global steps 8 and 12"


def test_who_leaves_alone_merges_what_waits() -> None:
    """T1d, C4a."""
    stage = Stage(takes_mean=True)
    assert due_alone(stage, 20) == [4]
    stage.tell(ev.LeaveRequested("asked to"))
    stage.work(stage.tell(ev.LearnerPaused(stage.steps, stage.tokens)))
    assert stage.machine.core.unmerged_tokens() == 0


def test_a_step_during_which_others_went_on_does_not_count_twice() -> None:
    """T1c."""
    stage = Stage(B)
    stage.train(3)
    stage.announce(B, 4)
    assert not sent(stage.train(1), msg.Round), "it is at step 4, as the others are"
    assert stage.machine.view.step == 4
    stage.train(1)
    assert stage.machine.view.step == 5


def test_learners_of_equal_speed_advance_the_global_step_as_one() -> None:
    """T1c: four peers with a round every step; ten steps each, a little apart, are about ten global steps."""
    config = base_config(fragments=tuple((ShardId(shard),) for shard in range(4)), heartbeat_s=2.0)
    peers = {name: PeerSetting(step_s=1.0 + 0.001 * n, step_jitter=0.0) for n, name in enumerate((P0, P1, P2, P3))}
    world = make_world(config, peers, None)
    world.run_until(60.0)
    for process in world.living():
        learner = process.machine.core.learner
        assert learner is not None
        assert learner.steps > 40
        assert process.machine.core.step <= learner.steps + 6, "six seconds to come and join"


def test_a_shards_round_is_open_until_its_head_moves() -> None:
    """T2a: the next round of an open shard asks for nothing; with the head moved it asks for a snapshot."""
    stage = Stage(B, C, owners="bac")
    stage.give()
    assert not only(stage.announce(C, 8), ef.Snapshot)
    stage.take(stage.commit(tokens(A, 0, 40), step=8))
    assert only(stage.announce(C, 12), ef.Snapshot) == [ef.Snapshot(FragmentId(0), 12)]


def test_of_several_rounds_that_were_put_off_only_the_newest_is_opened_at_once() -> None:
    """T2a."""
    stage = Stage(B, C, owners="bac")
    stage.give()
    stage.announce(B, 8)
    stage.announce(C, 12)
    done = stage.take(stage.commit(tokens(A, 0, 40), step=4))
    assert only(done, ef.Snapshot) == [ef.Snapshot(FragmentId(0), 12)]
    assert not only(stage.take(stage.commit(tokens(B, 0, 40), step=12)), ef.Snapshot), "none was queued"


def test_a_round_that_was_put_off_is_not_opened_if_the_commit_is_of_no_older_round() -> None:
    """T2a."""
    stage = Stage(B, C, owners="bac")
    stage.give()
    stage.announce(B, 8)
    assert not only(stage.take(stage.commit(tokens(A, 0, 40), step=8)), ef.Snapshot)


def test_a_due_round_is_announced_even_where_it_is_put_off() -> None:
    """T1a."""
    stage = Stage(B, owners="ba")
    stage.give()
    effects = stage.train(4)
    assert not only(effects, ef.Snapshot)
    assert [(peer, sync_round.step) for peer, sync_round in sent(effects, msg.Round)] == [(B, 8)]


def test_a_learner_is_asked_for_one_snapshot_of_a_fragment_at_a_time() -> None:
    """T4a: of two shards one gets a new head, and with it a new round, while the snapshot for both is under way."""
    stage = Stage(B, fragments=TWO_SHARDS)
    asked = only(stage.train(4), ef.Snapshot)
    assert len(asked) == 1
    more = stage.take(stage.commit(tokens(B, 0, 40), step=4)) + stage.announce(B, 8)
    assert not only(more, ef.Snapshot)
    assert {e.shard for e in only(stage.tell(stage.end_of(asked[0])), ef.Encode)} == set(TWO_SHARDS[0])


def test_a_learner_answers_at_a_step_boundary() -> None:
    """T4a: the simulated learner takes its copy when its step ends, not when it is asked."""
    world = make_world(base_config(), {P0: PeerSetting(step_s=1.0, step_jitter=0.0)}, None)
    world.run_until(2.7)
    learner = world.processes[P0].learner
    assert learner is not None
    steps = learner.steps
    learner.order(Copy(FragmentId(0), 4))
    world.run_until(world.now + 0.3)
    assert (learner.steps, len(learner.commands), learner.orders.snapshots) == (steps, 1, {})
    world.run_until(world.now + 0.7)
    assert (learner.steps, len(learner.commands)) == (steps + 1, 0)
    assert SHARD in learner.orders.snapshots


def test_a_learner_is_never_stopped_for_its_turn() -> None:
    """T4a: from the announcement to the commit, nobody tells the learner to pause."""
    stage = Stage(B, owners="ab")
    effects = stage.work(stage.train(4)) + stage.work(stage.offer(B)) + stage.work(stage.wait(5.0))
    assert stage.head().version == 1
    assert not only(effects, ef.PauseLearner)
    assert stage.machine.view.phase == "training"


def test_a_contribution_covers_all_tokens_that_the_bases_chain_has_not_merged() -> None:
    """T5: the first four steps were not merged, so the next contribution holds all eight; then come later ones."""
    stage = Stage(B, weight=0.0)
    [(_, first)] = sent(stage.give(), msg.Contribution)
    assert bare(first.contributor) == tokens(A, 0, 40)
    stage.take(stage.commit(tokens(B, 0, 40)))
    [(_, second)] = sent(stage.give(), msg.Contribution)
    assert (bare(second.contributor), second.base) == (tokens(A, 0, 80), stage.head())
    stage.take(stage.commit(tokens(A, 0, 80)))
    [(_, third)] = sent(stage.give(), msg.Contribution)
    assert bare(third.contributor) == tokens(A, 80, 120)


def test_tokens_trained_while_the_snapshot_is_encoded_are_not_in_the_contribution() -> None:
    """T5: it covers the snapshot, not the moment at which it is sent."""
    stage = Stage(B, owners="ba")
    encode = only(stage.work(stage.train(4), ef.Snapshot), ef.Encode)[0]
    stage.train(2)
    [(_, given)] = sent(
        stage.tell(ev.Encoded(SHARD, encode.base.id, with_payload(encode.contributor, "x"), 100)), msg.Contribution
    )
    assert given.contributor.tokens_to == 4 * TOKENS


def test_a_learner_that_has_nothing_to_give_says_so() -> None:
    """T6: it made no step since it was merged."""
    stage = Stage(B, C, owners="bac")
    [(_, given)] = sent(stage.work(stage.announce(B, 4), ef.Snapshot, ef.Encode), msg.Contribution)
    assert (given.contributor.learner, given.contributor.tokens, given.payload) == (life(A), 0, "")


def test_a_learner_whose_outer_gradient_cannot_be_encoded_says_that_it_has_nothing_to_give() -> None:
    """T6."""
    stage = Stage(B, C, owners="bac")
    stage.work(stage.train(4), ef.Snapshot)
    [(_, given)] = sent(stage.tell(ev.Failed("encode", SHARD, None, "not finite")), msg.Contribution)
    assert (given.contributor.tokens, given.payload) == (0, "")
