"""Rules C of docs/protocol.md: joining, restarting, leaving, the end of a run."""

from __future__ import annotations

from typing import Any

import pytest
from stage import (
    NEWS_S,
    SHARD,
    STEP_S,
    TOKENS,
    A,
    B,
    C,
    D,
    Stage,
    bare,
    digest,
    head_of,
    life,
    notes,
    only,
    sent,
    tokens,
)

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import Chain, genesis_head
from p2pdiloco.protocol.config import RunEnd, Sizes
from p2pdiloco.protocol.connectivity import listed
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId, fingerprint
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.messages import Head
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import base_config, make_world

THREE = ((ShardId(0), ShardId(1), ShardId(2)),)


def newcomer(*others: msg.Peer, **changes: Any) -> Stage:
    """Peer a comes with nothing."""
    return Stage(*others, is_founder=False, has_learner=False, **changes)


def heads(version: int, *shards: int) -> msg.Heads:
    """What a donor answers."""
    found = (Head(ShardId(s), version, digest(f"s{s}v{version}"), 100 * version) for s in shards)
    return msg.Heads(tuple(found), 4 * version)


def state(head: Head) -> ev.ShardState:
    """What a download brings."""
    return ev.ShardState(head, 4 * head.version, ((life(B), ev.Mark(100, 10, head.version)),))


def test_only_the_founder_brings_version_0() -> None:
    """C1a: whoever else comes has no head, tells of none, and takes part in no round, however long nobody answers."""
    stage = newcomer(B)
    effects = stage.wait(20.0) + stage.hear(B, msg.HeadsRequest()) + stage.train(8)
    assert stage.machine.view.known_heads == ()
    assert stage.machine.view.phase == "joining"
    assert not sent(effects, msg.Heads) + sent(effects, msg.Round)
    assert Stage().machine.view.known_heads[0].version == 0


def test_version_0_is_named_by_the_run() -> None:
    """C1a: so that chains of two runs never meet."""
    one, other = (genesis_head(RunId(run), SHARD, digest("same state")) for run in ("one", "other"))
    assert one.version == other.version == 0
    assert one.id != other.id


def test_a_newcomer_brings_nothing_and_takes_what_it_is_given() -> None:
    """C1a: any version of any chain of the run."""
    stage = newcomer(B)
    theirs = heads(7, 0)
    assert only(stage.hear(B, theirs), ef.Fetch) == [ef.Fetch(SHARD, B)]
    effects = stage.work(stage.tell(ev.Fetched(B, state(theirs.heads[0]))))
    assert stage.machine.view.known_heads == theirs.heads
    assert only(effects, ef.BecameCurrent)


def test_a_newcomer_asks_live_peers_for_heads_one_after_the_other_until_it_has_all_states() -> None:
    """C2a: nobody answers at first; then the download from one fails, and the other delivers."""
    stage = newcomer(B, C)
    asked = [to for to, _ in sent(stage.wait(5.0), msg.HeadsRequest)]
    assert asked[:8:2] == asked[2:10:2] == [asked[0]] * 4
    assert set(asked) == {B, C}
    stage.hear(B, heads(1, 0))
    assert not only(stage.tell(ev.Failed("fetch", SHARD, B, "broke off")), ef.Fetch)
    assert {to for to, _ in sent(stage.wait(1.5), msg.HeadsRequest)} == {B, C}
    assert only(stage.hear(C, heads(1, 0)), ef.Fetch) == [ef.Fetch(SHARD, C)]
    stage.work(stage.tell(ev.Fetched(C, state(heads(1, 0).heads[0]))))
    assert not sent(stage.wait(5.0), msg.HeadsRequest)


def test_a_newcomer_gets_each_state_from_a_peer_that_has_it() -> None:
    """C2a: and asks no other newcomer."""
    stage = newcomer(B, C, D, fragments=THREE)
    said = {B: heads(1, 0, 1), C: heads(1, 1, 2), D: heads(1, 0, 2)}
    fetches = [only(stage.hear(peer, theirs), ef.Fetch) for peer, theirs in said.items()]
    assert fetches == [[], [ef.Fetch(ShardId(1), C)], [ef.Fetch(ShardId(0), B), ef.Fetch(ShardId(2), C)]]
    other = newcomer()
    assert not sent(other.meet(B, phase="joining") + other.wait(3.0), msg.HeadsRequest)
    assert [to for to, _ in sent(other.says(B, phase="training"), msg.HeadsRequest)] == [B], "it has all now"


def test_a_newcomer_asks_for_what_was_committed_meanwhile_when_it_has_all_states() -> None:
    """C2a: at once, since nobody sends it (M6b); and not before, since states come first."""
    stage = newcomer(B, fragments=THREE, weight=0.0)
    theirs = heads(3, 0, 1, 2)
    stage.hear(B, theirs)
    effects = stage.work(stage.tell(ev.Fetched(B, state(theirs.heads[0]))))
    effects += stage.work(stage.tell(ev.Fetched(B, state(theirs.heads[1]))))
    effects += stage.hear(B, heads(4, 1)) + stage.wait(30.0)
    assert not sent(effects, msg.CommitsRequest)
    effects = stage.work(stage.tell(ev.Fetched(B, state(theirs.heads[2])))) + stage.wait(0.01)
    assert sent(effects, msg.CommitsRequest) == [(B, msg.CommitsRequest(ShardId(1), theirs.heads[1].id))]


def test_what_a_newcomer_was_offered_by_who_has_gone_is_forgotten() -> None:
    """C2a: also if that was silent before, so that it was lost already (a node stopped at it)."""
    stage = newcomer(B, C, weight=0.0)
    del stage.beats[B]
    stage.wait(60.0)
    assert B not in stage.machine.core.membership.live
    stage.hear(B, heads(4, 0))
    stage.tell(ev.PeerDisconnected(B, "broken"))
    theirs = heads(3, 0)
    stage.hear(C, theirs)
    effects = stage.work(stage.tell(ev.Fetched(C, state(theirs.heads[0]))))
    assert only(effects, ef.BecameCurrent)


def test_a_newcomers_learner_starts_from_the_states_that_it_got() -> None:
    """C2a: it may start when the last one is there, and its first contribution is relative to them."""
    stage = newcomer(B, fragments=THREE, weight=0.0)
    theirs = heads(3, 0, 1, 2)
    stage.hear(B, theirs)
    current = [
        bool(only(stage.work(stage.tell(ev.Fetched(B, state(head)))), ef.BecameCurrent)) for head in theirs.heads
    ]
    assert current == [False, False, True]
    stage.tell(ev.LearnerStarted(life(A)))
    given = [c for _, c in sent(stage.give(), msg.Contribution)]
    assert tuple(c.base for c in given) == theirs.heads
    assert {bare(c.contributor) for c in given} == {tokens(A, 0, 40)}


def test_a_learner_that_starts_is_a_new_learner() -> None:
    """C3a: its tokens count from 0, under its own name."""
    stage = Stage(B, weight=0.0)
    stage.give()
    stage.take(stage.commit(tokens(A, 0, 40)))
    stage.tell(ev.LearnerStopped("killed"))
    stage.tell(ev.LearnerStarted(life(A, 2)))
    stage.steps = 0
    [(_, given)] = sent(stage.give(), msg.Contribution)
    assert (given.contributor.learner, given.contributor.tokens_from, given.contributor.tokens_to) == (
        life(A, 2),
        0,
        40,
    )


def test_what_the_last_learner_had_not_merged_is_gone_with_it() -> None:
    """C3a: its contribution is offered to nobody any more, and it is not waited for."""
    stage = Stage(B, C, owners="bca")
    stage.give()
    assert stage.machine.view.unmerged_tokens() == 40
    stage.tell(ev.LearnerStopped("killed"))
    assert stage.machine.view.unmerged_tokens() == 0
    stage.tell(ev.LearnerStarted(life(A, 2)))
    effects = stage.tell(ev.PeerDisconnected(B, "gone")) + stage.wait(10.0)
    assert not sent(effects, msg.Contribution)
    assert stage.machine.payloads(SHARD) == set()


def test_who_leaves_stops_its_learner() -> None:
    """C4a: once, and not if it only follows."""
    stage = Stage(B)
    effects = stage.tell(ev.LeaveRequested("asked to")) + stage.tell(ev.LeaveRequested("again"))
    assert len(only(effects, ef.PauseLearner)) == 1
    assert not only(Stage(B, has_learner=False).tell(ev.LeaveRequested("asked to")), ef.PauseLearner)


def leaving() -> Stage:
    """Peer a is asked to leave with 20 tokens that are not merged."""
    stage = Stage(B)
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    return stage


def test_who_leaves_opens_rounds_for_what_is_unmerged() -> None:
    """C4a: out of schedule, as soon as its learner stands still."""
    stage = leaving()
    effects = stage.tell(ev.LearnerPaused(2, 20))
    assert [to for to, _ in sent(effects, msg.Round)] == [B]
    [(to, given)] = sent(stage.work(effects, ef.Snapshot, ef.Encode), msg.Contribution)
    assert (to, bare(given.contributor)) == (B, tokens(A, 0, 20))


def test_who_leaves_announces_again_what_nobody_has_merged() -> None:
    """C4g: each takeover time, at the same step: nobody's run is the shorter for it."""
    stage = leaving()
    [(_, announced)] = sent(stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode), msg.Round)
    takeover_s = stage.machine.aggregation.waits().takeover_s
    assert not sent(stage.wait(takeover_s - 0.1), msg.Round)
    assert sent(stage.wait(0.2), msg.Round) == [(B, announced)]
    assert sent(stage.wait(takeover_s), msg.Round) == [(B, announced)]


def test_who_leaves_goes_when_all_of_it_is_merged() -> None:
    """C4a: and says so to all; with nothing unmerged, at once."""
    stage = leaving()
    effects = stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    assert not only(effects + stage.wait(3.0), ef.Leave)
    effects = stage.take(stage.commit(tokens(A, 0, 20)))
    assert sent(effects, msg.Leaving) == [(B, msg.Leaving("asked to"))]
    assert only(effects, ef.Leave) == [ef.Leave("asked to")]
    assert only(Stage(B, has_learner=False).tell(ev.LeaveRequested("asked to")), ef.Leave)


@pytest.mark.parametrize("who", [A, B])
def test_rounds_of_who_leaves_do_not_prolong_its_turns(who: PeerId) -> None:
    """W4: it has no time. Others measure on: one that says for ever that it leaves must not stop that."""
    stage = Stage(B, C)
    if who == A:
        stage.tell(ev.LeaveRequested("asked to"))
    else:
        stage.says(B, phase="leaving")
    before = stage.machine.aggregation.round_s
    stage.announce(C, 4)
    stage.wait(10.0)
    stage.take(stage.commit(tokens(C, 0, 40)), C)
    assert (stage.machine.aggregation.round_s > before) == (who == B)


def test_who_has_left_says_so_to_whoever_connects_later() -> None:
    """C4a: while it saves. c waited for it, as for one that is lost."""
    stage = Stage(B, has_learner=False)
    assert only(stage.tell(ev.LeaveRequested("asked to")), ef.Leave)
    assert (C, msg.Leaving("asked to")) in sent(stage.meet(C), msg.Leaving)


def test_who_leaves_waits_until_one_that_stays_has_its_commit() -> None:
    """C4a: b leaves as well, so what it has does not count. A commit of an owner that left at once was lost."""
    stage = Stage(B, C, owners="abc", has_learner=False)
    stage.announce(B, 4)
    effects = stage.hear(B, stage.contribution(B)) + stage.hear(C, stage.contribution(C)) + stage.wait(2.0)
    [merge] = only(effects, ef.Merge)
    effects = stage.tell(ev.LeaveRequested("asked to"))
    assert not only(effects, ef.Leave), "the merge runs"
    for peer in (B, C):
        stage.says(peer, heads_mark=1)
    effects = stage.work([merge])
    assert stage.head().version == 1
    effects += stage.says(B, phase="leaving", heads_mark=1) + stage.hear(B, msg.Heads((stage.head(),), 4))
    assert not only(effects + stage.wait(2.0), ef.Leave)
    assert only(stage.hear(C, msg.Heads((stage.head(),), 4)), ef.Leave)


def test_who_leaves_waits_until_one_that_stays_has_its_progress() -> None:
    """C4a: c merged it, and leaves as well. b may hear of it from this peer alone."""
    stage = Stage(B, C, owners="cba")
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    stage.says(C, phase="leaving")
    for peer in (B, C):
        stage.says(peer, heads_mark=1)
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    effects = stage.take(stage.commit(tokens(A, 0, 20), owner=C), C)
    assert stage.machine.core.unmerged_tokens() == 0
    assert not only(effects + stage.wait(2.0), ef.Leave)
    told = [to for to, said in sent(effects, msg.Heads) if said.heads == (stage.head(),)]
    assert (set(told), sent(effects, msg.HeadsRequest)) == ({B, C}, [(B, msg.HeadsRequest())])
    assert only(stage.hear(B, msg.Heads((stage.head(),), 4)), ef.Leave)


def test_who_leaves_does_not_wait_for_an_owner_that_stays() -> None:
    """C4a: c has what it has merged."""
    stage = Stage(B, C, owners="cba")
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    for peer in (B, C):
        stage.says(peer, heads_mark=1)
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    assert only(stage.take(stage.commit(tokens(A, 0, 20), owner=C), C), ef.Leave)


def test_who_leaves_is_told_that_others_have_its_commit() -> None:
    """C4a: b has the head already, and waits for somebody else."""
    stage = Stage(B, C, D)
    stage.says(B, phase="leaving")
    header = stage.commit(tokens(B, 0, 40), owner=C)
    stage.hear(B, msg.Heads((head_of(header),), 4))
    effects = stage.take(header, C)
    assert B in [to for to, said in sent(effects, msg.Heads) if said.heads == (stage.head(),)]


def test_who_leaves_goes_when_leave_s_has_passed() -> None:
    """C4a: with a warning, if it holds unmerged tokens."""
    stage = leaving()
    effects = stage.tell(ev.LearnerPaused(2, 20)) + stage.wait(stage.config.leave_s - 0.1)
    assert not only(effects, ef.Leave)
    effects = stage.wait(0.2)
    assert only(effects, ef.Leave)
    assert "20 tokens unmerged" in notes(effects, "leave")[0]
    stage = Stage(B)
    stage.tell(ev.LeaveRequested("asked to"))
    assert "the learner did not stop in time" in notes(stage.wait(stage.config.leave_s + 0.1), "leave")[0]


def test_who_is_alone_since_others_were_lost_waits_for_them() -> None:
    """C4e: until `leave_s` has passed; not if they said goodbye, nor for those lost long ago."""
    stage = leaving()
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    del stage.beats[B]
    effects = stage.tell(ev.PeerDisconnected(B, "timed out"))
    effects = stage.work(effects + stage.wait(2.0))
    assert stage.machine.core.unmerged_tokens() == 0, "it merged its progress by itself"
    assert not only(effects, ef.Leave)
    effects = stage.meet(B)
    assert only(effects, ef.Leave), "B is back, with the same heads"

    stage = leaving()
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    del stage.beats[B]
    stage.work(stage.tell(ev.PeerDisconnected(B, "timed out")))
    effects = stage.work(stage.wait(stage.config.leave_s))
    assert "did not come back" in notes(effects, "leave")[-1]

    stage = leaving()
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    del stage.beats[B]
    effects = stage.work(stage.hear(B, msg.Leaving("asked to")) + stage.wait(2.0))
    assert only(effects, ef.Leave)

    stage = Stage(B, has_learner=False)
    del stage.beats[B]
    stage.tell(ev.PeerDisconnected(B, "timed out"))
    stage.wait(stage.config.finish_s)
    assert only(stage.tell(ev.LeaveRequested("asked to")), ef.Leave)


def test_who_merged_alone_waits_until_somebody_has_the_same_heads() -> None:
    """C4e: the first that is back has not compared heads yet, and its fork may win."""
    stage = leaving()
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    del stage.beats[B]
    stage.work(stage.tell(ev.PeerDisconnected(B, "timed out")) + stage.wait(2.0))
    assert stage.machine.core.unmerged_tokens() == 0, "it merged its progress by itself"
    theirs = stage.machine.core.heads_mark + 1
    effects = stage.meet(B, heads_mark=theirs) + stage.wait(1.0)
    assert not only(effects, ef.Leave)
    assert only(stage.says(B, heads_mark=stage.machine.core.heads_mark) + stage.wait(NEWS_S), ef.Leave)

    stage = leaving()
    stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    del stage.beats[B]
    stage.work(stage.tell(ev.PeerDisconnected(B, "timed out")) + stage.wait(2.0))
    stage.meet(B, heads_mark=theirs)
    effects = stage.take(stage.commit(tokens(B, 0, 10)))
    assert only(effects + stage.wait(NEWS_S), ef.Leave), "B has merged on top of it"


def finished() -> Stage:
    """Peer a's learner has completed the run; everything is merged."""
    stage = Stage(B, C, owners="bac", total_steps=4)
    stage.give()
    stage.take(stage.commit(tokens(A, 0, 40)))
    stage.tell(ev.LearnerPaused(4, 40))
    return stage


@pytest.mark.parametrize("is_same", [True, False])
def test_the_last_to_leave_does_not_wait_for_one_that_was_lost_before(is_same: bool) -> None:
    """C4e, C6f: c left before it had told that it had finished, too. The last peer then waited for d, which was killed
    shortly before the end, for as long as it could."""
    stage = Stage(B, C, D, owners="bac", total_steps=4)
    stage.give()
    stage.take(stage.commit(tokens(A, 0, 40)))
    del stage.beats[D]
    stage.tell(ev.PeerDisconnected(D, "timed out"))
    stage.tell(ev.LearnerPaused(4, 40))
    mark = stage.machine.core.heads_mark
    stage.says(B, phase="finished", is_participating=False, heads_mark=mark if is_same else mark + 1)
    assert not only(stage.hear(B, msg.Leaving("the run is complete")), ef.Leave)
    assert bool(only(stage.hear(C, msg.Leaving("the run is complete")), ef.Leave)) == is_same


def test_when_the_run_is_complete_peers_stay_until_all_live_ones_are_there_with_the_same_heads() -> None:
    """C5a: b, then c; newcomers (d) are not waited for."""
    stage = finished()
    mark = stage.machine.core.heads_mark
    effects = stage.says(B, phase="finished", is_participating=False, heads_mark=mark)
    effects += stage.says(C, phase="training", is_participating=True, heads_mark=mark) + stage.wait(2.0)
    effects += stage.says(C, phase="finished", is_participating=True, heads_mark=mark) + stage.wait(2.0)
    effects += stage.says(C, phase="finished", is_participating=False, heads_mark=mark + 1) + stage.wait(2.0)
    effects += stage.meet(D, phase="joining", is_participating=False)
    assert not only(effects, ef.Leave)
    effects = stage.says(C, phase="finished", is_participating=False, heads_mark=mark)
    assert only(effects, ef.Leave) == [ef.Leave("the run is complete")]


def test_while_a_peer_is_heard_by_others_only_all_stay_until_those_say_that_it_is_there_too() -> None:
    """C5a: c hears d, which this peer does not meet."""
    stage = finished()
    mark = stage.machine.core.heads_mark
    stage.says(B, phase="done", is_participating=False, heads_mark=mark)
    hears = listed(map(fingerprint, (A, B, D)))
    effects = stage.says(C, phase="training", is_participating=True, hears=hears)
    effects += stage.says(C, phase="finished", is_participating=False, heads_mark=mark) + stage.wait(2.0)
    assert not only(effects, ef.Leave)
    assert {beat.phase for _, beat in sent(stage.wait(1.0), msg.Heartbeat)} == {"done"}
    effects = stage.says(C, phase="done", is_participating=False, heads_mark=mark)
    assert only(effects, ef.Leave)


def test_when_the_run_is_complete_peers_stay_no_longer_than_finish_s() -> None:
    """C5a."""
    stage = finished()
    assert not only(stage.wait(stage.config.finish_s - 0.1), ef.Leave)
    assert not stage.machine.shutdown.is_overdue
    assert only(stage.wait(0.2), ef.Leave)
    assert stage.machine.shutdown.is_overdue


def test_whether_the_others_have_all_is_known_at_the_end() -> None:
    """C5a: if they are there with the same heads, or have left with them; not if they were lost, or are late."""
    at_rest, left, late, lost = (finished() for _ in range(4))
    for stage in (at_rest, left, late, lost):
        assert not stage.machine.view.is_shared
    for peer in (B, C):
        at_rest.says(peer, phase="finished", is_participating=False, heads_mark=at_rest.machine.core.heads_mark)
        left.hear(peer, msg.Leaving("the run is complete"))
        del lost.beats[peer]
        lost.tell(ev.PeerDisconnected(peer, "timed out"))
    for stage in (late, lost):
        stage.wait(stage.config.finish_s + 1.0)
    assert all(stage.machine.shutdown.is_done for stage in (at_rest, left, late, lost))
    assert [stage.machine.view.is_shared for stage in (at_rest, left, late, lost)] == [True, True, False, False]


def test_a_peer_with_a_learner_waits_for_it_when_the_run_is_complete() -> None:
    """C5a: its node died at the end of the run, and comes back past the run's last step, before its learner."""
    stage = Stage(total_steps=4, expects_learner=True)
    stage.tell(ev.Stepped(4, 40, STEP_S))
    stage.tell(ev.LearnerStopped("killed"))
    assert not only(stage.wait(2.0), ef.Leave), "its next life may hold progress"
    stage.tell(ev.LearnerStarted(life(A, 2)))
    assert only(stage.tell(ev.LearnerPaused(0, 0)), ef.Leave)


def test_with_a_budget_of_tokens_a_learner_stops_when_merged_and_under_way_make_it_up() -> None:
    """C7a: here 400 tokens; two versions of 160 are merged, half of the last one's as much is on its way."""
    stage = Stage(B, sizes=Sizes(budget=400))
    stage.train(3)
    first = stage.take(stage.commit(tokens(B, 0, 160)))
    assert only(first, ef.AdoptStep)[-1].tokens == 160, "its rate follows"
    assert not only(first, ef.PauseLearner)
    assert len(only(stage.take(stage.commit(tokens(B, 160, 320))), ef.PauseLearner)) == 1
    assert not only(stage.wait(5.0), ef.PauseLearner), "once"
    stage.tell(ev.LearnerPaused(3, 30))
    assert stage.machine.core.departure == "finished"


def test_a_learner_that_comes_when_the_budget_is_spent_makes_no_steps() -> None:
    """C7b: and who only follows ends with the others."""
    stage = Stage(B, sizes=Sizes(budget=100), has_learner=False)
    stage.take(stage.commit(tokens(B, 0, 100)))
    assert only(stage.tell(ev.LearnerStarted(life(A))) + stage.wait(1.0), ef.PauseLearner)
    late = Stage(B, sizes=Sizes(budget=100), has_learner=False, expects_learner=True)
    late.says(B, phase="finished", is_participating=False)
    late.take(late.commit(tokens(B, 0, 100)))
    late.wait(2.0)
    assert late.machine.core.departure == "finished", "before its learner is there"
    assert only(late.tell(ev.LearnerStarted(life(A))), ef.PauseLearner)
    follower = Stage(B, sizes=Sizes(budget=100), has_learner=False, expects_learner=False)
    follower.says(B, phase="finished", is_participating=False)
    follower.take(follower.commit(tokens(B, 0, 100)))
    follower.wait(2.0)
    assert follower.machine.core.departure == "finished"


def test_a_peer_that_has_finished_trains_on_when_the_run_is_prolonged() -> None:
    """C8a: it has not left, since C still trains. Its learner is told, and its turns go on beyond the earlier end."""
    stage = finished()
    assert stage.machine.core.departure == "finished"
    effects = stage.tell(ev.EndMoved(RunEnd(12)))
    assert only(effects, ef.MoveEnd) == [ef.MoveEnd(RunEnd(12))]
    assert {beat.phase for _, beat in sent(effects, msg.Heartbeat)} == {"training"}
    assert not only(stage.wait(stage.config.finish_s + 1.0), ef.Leave), "it does not wait for the end any more"
    opened = stage.train(4)
    assert [sync_round.step for _, sync_round in sent(opened, msg.Round)] == [8, 8]
    stage.train(4)
    assert stage.machine.core.step == 12
    effects = stage.tell(ev.LearnerPaused(12, 120, 12))
    assert stage.machine.core.departure == "finished"
    assert not only(effects, ef.MoveEnd)


@pytest.mark.parametrize("is_budget", [False, True])
def test_a_learner_that_stops_at_the_earlier_end_goes_on(*, is_budget: bool) -> None:
    """C8a: the news and its last step have crossed. With a budget, its node has asked it to stop."""
    end = RunEnd(100, 1000) if is_budget else RunEnd(100)
    stage = Stage(B, total_steps=100 if is_budget else 4, sizes=Sizes(budget=100 if is_budget else 0))
    asked = stage.train(3) + stage.take(stage.commit(tokens(B, 0, 100)))
    assert bool(only(asked, ef.PauseLearner)) == is_budget
    assert only(stage.tell(ev.EndMoved(end)), ef.MoveEnd) == [ef.MoveEnd(end)]
    stage.tell(ev.LearnerPaused(3, 30, 4))
    assert stage.machine.core.departure == ""
    assert stage.machine.view.phase == "training"
    stage.tell(ev.LearnerPaused(100, 1000, 100))
    assert stage.machine.core.departure == "finished"


def test_a_run_may_be_prolonged_before_a_peer_has_its_state_and_again_and_be_shortened() -> None:
    """C8a: a follower that starts at the earlier end does not end. The step is that of its chains."""
    follower = Stage(is_founder=False, has_learner=False, total_steps=4)
    follower.machine = Machine(follower.config)
    follower.tell(ev.EndMoved(RunEnd(50)))
    follower.tell(ev.Started((state(Head(SHARD, 5, digest("there"), 400)),)))
    assert follower.machine.core.step == 20
    follower.tell(ev.EndMoved(RunEnd(60)))
    assert not only(follower.wait(2.0), ef.Leave)
    assert follower.machine.view.last_step == 60
    effects = follower.tell(ev.EndMoved(RunEnd(20)))
    assert only(effects + follower.wait(2.0), ef.Leave), "the admin who prolonged it was banned"
    assert not follower.machine.view.is_prolonged
    follower.tell(ev.EndMoved(RunEnd(60)))
    assert follower.machine.view.is_prolonged, "its node starts it again"
    assert follower.machine.core.departure == "finished"


def test_a_peer_that_was_asked_to_leave_leaves_though_the_run_is_prolonged() -> None:
    """C8a."""
    stage = Stage(B, total_steps=4)
    stage.tell(ev.LeaveRequested("asked to"))
    assert not only(stage.tell(ev.EndMoved(RunEnd(12))), ef.MoveEnd)
    assert only(stage.tell(ev.LearnerPaused(0, 0, 0)) + stage.wait(1.0), ef.Leave)


def test_who_does_not_know_that_the_run_is_prolonged_merges_what_others_train_beyond_its_end() -> None:
    """C8a: as an owner it merges, it applies commits, and it takes states, whatever their steps."""
    stage = Stage(B, C, owners="abc", has_learner=False, total_steps=4)
    far = msg.Contributor(life(B), 990, 1000, 99, 100)
    effects = stage.hear(B, stage.contribution(B, contributor=far)) + stage.hear(C, stage.contribution(C))
    assert not sent(effects, msg.Refused), "its learner has made many times the steps that the run had"
    stage.work(effects + stage.wait(3.0))
    assert stage.head().version == 1
    for step in (60, 120, 180):
        commit = stage.commit(tokens(C, step * TOKENS, (step + 4) * TOKENS), step=step)
        stage.take(commit)
        assert stage.head() == head_of(commit)
    assert stage.machine.core.step <= 4 + stage.config.sync_every, "P1e: its own clock stays at the end that it knows"
    late = newcomer(B, total_steps=4)
    there = Head(SHARD, 20, digest("there"), 400)
    late.hear(B, msg.Heads((there,), 0))
    late.work(late.tell(ev.Fetched(B, state(there))))
    assert late.head() == there
    late.tell(ev.EndMoved(RunEnd(400)))
    assert late.machine.core.step == 80, "it goes on when it hears"


@pytest.mark.parametrize(("seed", "has_budget"), [(1, False), (2, False), (3, True), (4, True)])
def test_peers_that_hear_at_different_times_that_the_run_is_prolonged_end_together(
    seed: int, *, has_budget: bool
) -> None:
    """C8a: one before the end, two at it, one that has finished. No token is lost, and all have one model."""
    fragments = tuple((ShardId(f),) for f in range(2))
    sizes, later = (Sizes(budget=6_000), RunEnd(10**6, 20_000)) if has_budget else (Sizes(), RunEnd(500))
    total_steps = 10**6 if has_budget else 200
    config = base_config(fragments=fragments, sync_every=8, sizes=sizes, total_steps=total_steps, finish_s=30.0)
    peers = {PeerId(f"p{i}"): PeerSetting(step_s=step_s) for i, step_s in enumerate((0.2, 0.2, 0.3, 0.25))}
    world = make_world(config, peers, None, seed)
    hear_at, told = {"p0": 25.0, "p1": 40.0, "p2": 40.1, "p3": 46.0}, set[str]()
    was_finished, chains = set[str](), list[Chain]()
    world.run_until(20.0)
    while world.now < 300.0 and world.living():
        world.run_until(world.now + 0.1)
        for process in world.living():
            if process.name not in told and process.machine.core.departure == "finished":
                was_finished.add(process.name)
            if process.name not in told and world.now >= hear_at[process.name]:
                told.add(process.name)
                process.tell(ev.EndMoved(later))
            chains = process.machine.core.chains
    assert not world.living(), "nobody went"
    assert told == set(hear_at)
    assert "p3" in was_finished
    assert not world.checks.is_over, world.checks.violations
    if has_budget:
        assert sum(chain.head.tokens for chain in chains if chain.head) / 2 == pytest.approx(20_000, rel=0.03)
    else:
        assert 500 <= max(chain.step for chain in chains) <= 500 + 8


@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_ends_within_2_percent_of_its_budget_whoever_trains(seed: int) -> None:
    """C7a: speeds 1:1:2:4, one that is killed and comes back, one that comes late."""
    fragments = tuple((ShardId(f),) for f in range(4))
    budget = 12_000
    config = base_config(fragments=fragments, sync_every=8, sizes=Sizes(budget=budget), finish_s=20.0)
    speeds = {f"p{i}": step_s for i, step_s in enumerate((0.8, 0.8, 0.4, 0.2))}
    world = make_world(config, {PeerId(p): PeerSetting(step_s=s) for p, s in speeds.items()}, None, seed)
    world.run_until(20.0)
    world.crash(PeerId("p1"), keeps_disk=False, restart_s=5.0)
    world.run_until(30.0)
    world.add(PeerId("p4"), PeerSetting(step_s=0.4), world.now)
    heads = [0]
    while world.now < 300.0 and world.living():
        world.run_until(world.now + 1.0)
        heads = [c.head.tokens for p in world.living()[:1] for c in p.machine.core.chains if c.head] or heads
    assert not world.living(), "nobody went"
    assert not world.checks.is_over, world.checks.violations
    assert sum(heads) / len(heads) == pytest.approx(budget, rel=0.02)


def test_a_newcomer_opens_no_round_that_was_over_before_it_came() -> None:
    """C1a, T1b: its state is of step 28, so an announcement of step 12 that was on its way is no news."""
    stage = newcomer(B)
    theirs = heads(7, 0)
    stage.hear(B, theirs)
    stage.work(stage.tell(ev.Fetched(B, state(theirs.heads[0]))))
    stage.tell(ev.LearnerStarted(life(A), has_blocks=False))
    stage.train(1)
    assert not only(stage.announce(B, 12, theirs.heads[0]) + stage.wait(0.1), ef.Snapshot)
    assert only(stage.announce(B, 32, theirs.heads[0]) + stage.wait(0.1), ef.Snapshot)
