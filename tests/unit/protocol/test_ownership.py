"""Rules O of docs/protocol.md: ownership."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from stage import SHARD, A, B, C, D, Stage, bare, commit_on, head_of, life, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.ownership import Candidates, ranked_owners
from p2pdiloco.protocol.suspicion import COMMITS_LEAST, SmallCommits

RUN = RunId("run")
FOUR: Candidates = tuple((peer, 1.0) for peer in (A, B, C, D))


def owners(stage: Stage) -> list[PeerId]:
    """Who may own anything, as the machine sees it."""
    return [peer for peer, _ in stage.machine.core.membership.owners.candidates]


def test_owners_are_all_live_peers_that_are_neither_joining_nor_leaving() -> None:
    """O1a: finished and following ones may own, too."""
    stage = Stage(B, C, D)
    assert owners(stage) == [A, B, C, D]
    stage.says(B, phase="joining")
    stage.says(C, phase="leaving")
    stage.says(D, phase="finished")
    assert owners(stage) == [A, D]
    stage.says(B, phase="following")
    assert owners(stage) == [A, B, D]
    del stage.beats[D]
    stage.wait(5.0)
    assert owners(stage) == [A, B], "silent peers are not live"


def test_who_leaves_owns_only_if_nobody_else_may() -> None:
    """O1a."""
    stage = Stage(B)
    stage.tell(ev.LeaveRequested("asked to"))
    stage.wait(0.6)
    assert owners(stage) == [B]
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert owners(stage) == [A]


def test_peers_that_all_leave_at_once_agree_on_owners() -> None:
    """O1a: if each counted itself alone, each would wait for the others and then merge alone, one after the other."""
    stage = Stage(B, C)
    stage.tell(ev.LeaveRequested("asked to"))
    stage.says(B, phase="leaving")
    assert owners(stage) == [C]
    stage.says(C, phase="leaving")
    assert owners(stage) == [A, B, C]


def test_who_leaves_merges_nothing_while_others_may() -> None:
    """O1a: what it holds it merges once it is the last."""
    stage = Stage(B, C, owners="abc", has_learner=False)
    stage.says(C, is_participating=True)
    stage.announce(B, 4)
    stage.offer(B)
    stage.tell(ev.LearnerStarted(life(A)))  # with nothing to leave for it would be gone
    stage.train(1)
    stage.tell(ev.LeaveRequested("asked to"))
    stage.tell(ev.LearnerPaused(1, 10))
    assert not only(stage.offer(C) + stage.wait(4.0), ef.Merge), "B and C may"
    effects = stage.says(B, phase="leaving") + stage.says(C, phase="leaving")
    assert [merge.shard for merge in only(effects, ef.Merge)] == [SHARD]


def test_owners_are_ranked_by_weighted_rendezvous_hashing() -> None:
    """O1b: shares follow the weights, and without one candidate the others keep their order."""
    weighted = ((A, 1.0), (B, 3.0))
    first = Counter(ranked_owners(RUN, 0, version, weighted)[0] for version in range(4000))
    assert 0.72 < first[B] / 4000 < 0.78
    for version in range(50):
        ranked = ranked_owners(RUN, 0, version, FOUR)
        rest = tuple(c for c in FOUR if c[0] != ranked[0])
        assert ranked_owners(RUN, 0, version, rest) == ranked[1:]


def test_owners_are_ranked_over_the_peer_the_shard_and_the_version() -> None:
    """O1b: each of them changes the order; nothing else is needed to know it."""
    by_version = {ranked_owners(RUN, 0, version, FOUR) for version in range(200)}
    by_shard = {ranked_owners(RUN, shard, 1, FOUR) for shard in range(200)}
    assert len(by_version) == len(by_shard) == 24


def test_who_asks_for_no_weight_owns_only_if_nobody_else_may() -> None:
    """O1b."""
    stage = Stage(B, C, weight=0.0)
    stage.says(C, weight=0.0)
    assert owners(stage) == [B]
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert owners(stage) == [A, C]


def test_a_contribution_goes_to_rank_0() -> None:
    """O3a."""
    assert [to for to, _ in sent(Stage(B, C, owners="bac").give(), msg.Contribution)] == [B]
    assert [to for to, _ in sent(Stage(B, C, owners="cab").give(), msg.Contribution)] == [C]
    stage = Stage(B, C, owners="abc")
    assert not sent(stage.give(), msg.Contribution)
    assert only(stage.wait(2.0), ef.Merge), "its own it keeps and merges"


def test_if_its_target_is_lost_a_contribution_goes_to_the_new_rank_0_at_once() -> None:
    """O3b."""
    stage = Stage(B, C, owners="bca")
    [(_, given)] = sent(stage.give(), msg.Contribution)
    assert sent(stage.tell(ev.PeerDisconnected(B, "gone")), msg.Contribution) == [(C, given)]


def test_if_its_target_starts_to_leave_a_contribution_goes_to_the_new_rank_0_at_once() -> None:
    """O3b: who leaves is no owner any more."""
    stage = Stage(B, C, owners="bca")
    [(_, given)] = sent(stage.give(), msg.Contribution)
    assert sent(stage.says(B, phase="leaving"), msg.Contribution) == [(C, given)]


def test_the_commit_of_a_target_that_leaves_is_waited_for_until_its_connection_ends() -> None:
    """O3b: the payload of its commit is still on its way. Another commit on the same parent would be a fork."""
    for last_word in (None, msg.Leaving("asked to")):
        stage = Stage(B, C, owners="bca")
        [(_, given)] = sent(stage.give(), msg.Contribution)
        stage.hear(B, msg.Refused(SHARD, given.base.id, "stale", head_of(stage.commit(tokens(B, 0, 40)))))
        effects = stage.says(B, phase="leaving")
        if last_word is not None:
            effects += stage.hear(B, last_word)
        assert not sent(effects, msg.Contribution)
        assert sent(stage.tell(ev.PeerDisconnected(B, "gone")), msg.Contribution) == [(C, given)]


def test_if_no_commit_comes_within_the_takeover_time_a_contribution_goes_to_the_next_rank_too() -> None:
    """O3c."""
    stage = Stage(B, C, owners="bca")
    [(_, given)] = sent(stage.give(), msg.Contribution)
    takeover_s = stage.machine.aggregation.waits().takeover_s
    assert not sent(stage.wait(takeover_s - 0.01), msg.Contribution)
    assert sent(stage.wait(0.02), msg.Contribution) == [(C, given)]
    assert only(stage.wait(3 * takeover_s), ef.Merge), "and then to this peer itself, rank 2"


def test_who_leaves_turns_to_the_next_rank_sooner() -> None:
    """O3c: that one may be the owner for the others, and they wait for it no longer than the takeover time (M4c)."""
    stage = Stage(B, C, owners="bca")
    stage.train(3)
    stage.tell(ev.LeaveRequested("asked to"))
    effects = stage.wait(0.6) + stage.tell(ev.LearnerPaused(3, 30, 3)) + stage.wait(0.1)
    [(owner, given)] = sent(stage.work(effects, ef.Snapshot, ef.Encode), msg.Contribution)
    takeover_s = stage.machine.aggregation.waits().takeover_s
    assert not sent(stage.wait(takeover_s / 2 - 0.01), msg.Contribution)
    assert sent(stage.wait(0.02), msg.Contribution) == [(C, given)]
    assert owner == B
    stage.wait(takeover_s / 2)
    assert {weight for _, weight in stage.machine.core.membership.owners.candidates} == {1.0}, "for the others, as well"


def test_a_commit_that_comes_in_time_stops_the_takeover() -> None:
    """O3c: what was pending is merged or stale then."""
    stage = Stage(B, C, owners="bca")
    [(_, given)] = sent(stage.give(), msg.Contribution)
    stage.take(stage.commit(given.contributor))
    assert not sent(stage.wait(10.0), msg.Contribution)


def test_what_an_owner_with_a_heavier_head_refused_is_not_offered_to_it_again() -> None:
    """O3d: B has committed already, on its own; it has answered, and stays the first owner. A refusal for another
    reason is no such answer."""
    stage = Stage(B, owners="ba")
    [(_, given)] = sent(stage.give(), msg.Contribution)
    theirs = head_of(stage.commit(tokens(B, 0, 40)))
    stage.hear(B, msg.Refused(SHARD, given.base.id, "stale", theirs))
    takeover_s = stage.machine.aggregation.waits().takeover_s
    effects = stage.wait(20 * takeover_s)
    assert not sent(effects, msg.Contribution)
    assert only(effects, ef.Merge), "this peer itself is next in rank"
    found = stage.machine.core.membership.owners
    assert found.candidates == found.willing, "B was not passed over"

    stage = Stage(B, owners="ba")
    [(_, given)] = sent(stage.give(), msg.Contribution)
    stage.hear(B, msg.Refused(SHARD, given.base.id, "too much waits", stage.head()))
    assert (B, given) in sent(stage.wait(20 * takeover_s), msg.Contribution)
    found = stage.machine.core.membership.owners
    assert dict(found.candidates)[B] < dict(found.willing)[B], "B was passed over"


def test_an_owner_that_refused_and_comes_back_is_offered_it_again() -> None:
    """O3d: its head may be an older one now. This peer is on its way out, and no owner itself."""
    stage = Stage(B, owners="ba")
    stage.train(1)
    stage.tell(ev.LeaveRequested("asked to"))
    stage.wait(0.6)
    [(_, given)] = sent(stage.work(stage.tell(ev.LearnerPaused(1, 10))), msg.Contribution)
    stage.hear(B, msg.Refused(SHARD, given.base.id, "stale", head_of(stage.commit(tokens(B, 0, 40)))))
    assert not sent(stage.wait(3.0), msg.Contribution)
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert (B, given) in sent(stage.meet(B), msg.Contribution)


def test_rank_r_merges_no_sooner_than_r_takeover_times_after_it_heard_of_the_round() -> None:
    """O4: everybody has answered, and yet rank 1 waits once and rank 2 twice."""
    for order, rank in (("bac", 1), ("bca", 2)):
        stage = Stage(B, C, owners=order, has_learner=False)
        stage.announce(B, 4)
        takeover_s = stage.machine.aggregation.waits().takeover_s
        stage.wait(0.5)
        effects = stage.offer(B) + stage.offer(C)
        assert not only(effects + stage.wait(rank * takeover_s - 0.51), ef.Merge)
        assert [m.shard for m in only(stage.wait(0.02), ef.Merge)] == [SHARD]


def test_rank_0_does_not_wait() -> None:
    """O4."""
    stage = Stage(B, C, owners="abc", has_learner=False)
    stage.announce(B, 4)
    assert only(stage.offer(B) + stage.offer(C), ef.Merge)


def is_applied(effects: list[ef.Effect], header: msg.CommitHeader) -> bool:
    """Whether this commit is applied."""
    return any(effect.header == header for effect in only(effects, ef.Apply))


def test_a_commit_out_of_turn_that_few_took_part_in_waits_for_its_owners_turn() -> None:
    """O5a, O5b: else one member could merge its own contribution alone before every other, and end the run with it."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    alone = stage.commit(tokens(D, 0, 40), owner=D)
    stage.announce(B, 4)
    assert not is_applied(stage.hear(D, msg.Commit(alone)), alone), "D is of rank 2, and one of three participants"
    takeover_s = stage.machine.aggregation.waits().takeover_s
    assert not is_applied(stage.wait(0.9 * takeover_s), alone)
    assert is_applied(stage.wait(1.2 * takeover_s), alone), "by then D might have taken over"


def test_a_commit_in_turn_or_that_most_took_part_in_is_applied_at_once() -> None:
    """O5a: also while another one waits."""
    for owner, givers in ((B, (B, C)), (D, (C,)), (D, (B, D)), (C, (B, C, D))):
        stage = Stage(B, C, D, owners="bcda", has_learner=False)
        stage.announce(B, 4)
        stage.hear(D, msg.Commit(stage.commit(tokens(D, 0, 40), owner=D)))
        header = stage.commit(*(tokens(giver, 0, 40) for giver in givers), owner=owner)
        assert is_applied(stage.hear(owner, msg.Commit(header)), header), (owner, givers)


def test_a_commit_in_turn_that_few_took_part_in_waits_as_its_owner_has_to() -> None:
    """O5a, M4d: else a member merged its own contribution before the others were told of the round."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    alone = stage.commit(tokens(B, 0, 40), owner=B)
    assert not is_applied(stage.hear(B, msg.Commit(alone)), alone), "no round was announced"
    wait_s = stage.machine.aggregation.waits().nearly_all_s
    assert wait_s == pytest.approx(1.0)
    assert not is_applied(stage.announce(B, 4) + stage.wait(0.9 * wait_s), alone)
    assert is_applied(stage.wait(0.2 * wait_s), alone)


def test_while_a_participant_leaves_no_round_waits_for_the_others() -> None:
    """M4d, O5a: its time is short."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    stage.announce(B, 4)
    assert stage.machine.aggregation.waits().nearly_all_s > 0.0
    stage.says(D, phase="leaving")
    assert stage.machine.aggregation.waits().nearly_all_s == 0.0
    alone = stage.commit(tokens(B, 0, 40), owner=B)
    assert is_applied(stage.hear(B, msg.Commit(alone)), alone)
    stage = Stage(B, C, D, has_learner=False)
    stage.says(D, phase="finished")
    assert stage.machine.aggregation.waits().nearly_all_s > 0.0, "the end of the run is no hurry"


def test_a_commit_that_waits_is_applied_when_most_others_have_it() -> None:
    """O5a: as soon as they say so, not when it would have been due."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    stage.announce(B, 4)
    header = stage.commit(tokens(D, 0, 40), owner=D)
    assert not is_applied(stage.hear(D, msg.Commit(header)), header)
    effects = [effect for peer in (C, D) for effect in stage.announce(peer, 8, head_of(header))]
    assert is_applied(effects, header)


def test_peers_that_have_finished_are_still_among_those_of_whom_most_take_part() -> None:
    """O5a: else who trains on after the end would be most participants by itself."""
    for have_given in (True, False):
        stage = Stage(B, C, D, owners="bcda", has_learner=False)
        givers = (B, C, D) if have_given else (B,)
        stage.take(stage.commit(*(tokens(peer, 0, 40) for peer in givers)))
        for peer in (C, D):
            stage.says(peer, phase="finished", is_participating=False)
        stage.announce(B, 4)
        alone = stage.commit(tokens(B, 40, 80), owner=B)
        assert is_applied(stage.hear(B, msg.Commit(alone)), alone) != have_given
    stage = Stage(B, C, owners="bca")
    given = map(life, (A, C))
    stage.machine.core.chains[SHARD].marks.update((learner, ev.Mark(4, 1, 0)) for learner in given)
    core = stage.machine.core
    assert core.learner is not None
    core.departure, core.learner.is_paused = "finished", True
    assert not core.is_participating()
    stage.says(C, phase="finished", is_participating=False)
    alone = stage.commit(tokens(B, 0, 40), owner=B)
    assert not is_applied(stage.hear(B, msg.Commit(alone)), alone), "a peer that has finished is one of them, and waits"


def test_a_commit_of_an_owner_that_leaves_most_out_comes_after_the_next_owners() -> None:
    """O5d: it may be right, so that no audit finds it, and hold what nobody can compare with anything."""
    for is_unfair in (True, False):
        stage = Stage(B, C, D, owners="bcda")
        small_commits = stage.machine.aggregation.small_commits
        for _ in range(COMMITS_LEAST):
            small_commits.record(B, is_small=True)
            small_commits.record(C, is_small=not is_unfair)
        given = [message for _, message in sent(stage.give(), msg.Contribution)]
        alone = stage.commit(tokens(B, 0, 40), owner=B)
        effects = stage.hear(B, msg.Commit(alone)) + stage.wait(1.2)
        assert is_applied(effects, alone) != is_unfair
        weights = dict(stage.machine.core.membership.owners.candidates)
        assert (weights[B] < 1e-6) == is_unfair, "the next contributions go to others at once"
        if is_unfair:
            effects = stage.wait(stage.machine.aggregation.waits().takeover_s - 1.0)
            assert [to for to, _ in sent(effects, msg.Contribution)] == [C], "the next owner gets it"
            every = (given[0].contributor, tokens(C, 0, 40), tokens(D, 0, 40))
            joint = stage.commit(*sorted(map(bare, every), key=lambda c: c.learner), owner=C)
            assert not is_applied(effects, alone)
            assert is_applied(stage.hear(C, msg.Commit(joint)), joint)


def test_where_owners_do_not_wait_none_is_suspected_of_leaving_somebody_out() -> None:
    """O5d: with a gamma of 0, and in a pair, the faster learner's commits regularly hold its own contribution alone."""
    for others, grace_share in (((B, C, D), 0.0), ((B,), 1.0), ((B, C, D), 1.0)):
        stage = Stage(*others, owners="bcda", grace_share=grace_share)
        stage.announce(B, 4)
        for _ in range(COMMITS_LEAST):
            stage.machine.aggregation.small_commits.record(B, is_small=True)
            stage.machine.aggregation.small_commits.record(C, is_small=False)
        alone = stage.commit(tokens(B, 0, 40), owner=B)
        effects = stage.hear(B, msg.Commit(alone)) + stage.wait(1.2)
        assert is_applied(effects, alone) == (grace_share == 0.0 or others == (B,))


def test_a_commit_whose_givers_nobody_hears_comes_after_the_next_owners() -> None:
    """O5e: an owner can make keys, and what they give is then what all others' contributions are measured by."""
    for keys, is_crowd in ((0, False), (1, True), (8, True)):
        stage = Stage(B, C, D, owners="bcda", has_learner=False)
        stage.announce(B, 4)
        crowd = [PeerId(f"k{number}") for number in range(keys)]
        header = stage.commit(*(tokens(peer, 0, 40) for peer in sorted([B, C, D, *crowd])), owner=B)
        effects = stage.hear(B, msg.Commit(header))
        assert is_applied(effects, header) != is_crowd, keys
        takeover_s = stage.machine.aggregation.waits().takeover_s
        if is_crowd:
            assert not is_applied(stage.wait(1.9 * takeover_s), header)
            assert is_applied(stage.wait(0.3 * takeover_s), header), "nobody else has made one"
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    stage.beats.pop(D)
    stage.tell(ev.PeerDisconnected(D, "left"))
    stage.announce(B, 4)
    header = stage.commit(tokens(B, 0, 40), tokens(D, 0, 40), owner=B)
    effects = stage.hear(B, msg.Commit(header)) + stage.wait(0.1)
    assert is_applied(effects, header), "what one that has left gave is nobody's crowd"


def test_who_leaves_suspects_nobody() -> None:
    """O5b (uplinks seed 272): two takeover times are much of the time that it has."""
    stage = Stage(B, C, D, owners="bcda")
    stage.train(3)
    stage.tell(ev.LeaveRequested("asked to"))
    crowd = [tokens(PeerId(f"k{number}"), 0, 40) for number in range(8)]
    header = stage.commit(tokens(B, 0, 40), *crowd, owner=B)
    assert is_applied(stage.hear(B, msg.Commit(header)), header)


def test_an_owner_is_suspected_if_it_leaves_most_out_more_often_than_others_do() -> None:
    """O5d: who is slow is late for all."""
    rates = SmallCommits()

    def record(owner: PeerId, *, small: int = 0, of: int) -> bool:
        for number in range(of):
            rates.record(owner, is_small=number < small)
        return rates.is_unfair(B)

    assert not record(B, small=8, of=8), "there is nobody to compare it with"
    assert not record(C, of=5)
    assert record(C, of=1)
    assert not record(C, small=6, of=6), "others' commits are small half of the time"
    assert record(C, of=24)
    assert record(B, of=7), "eight of fifteen"
    assert not record(B, of=1), "half of them"
    assert record(B, small=24, of=24)
    rates = SmallCommits()
    record(C, of=6)
    assert not record(B, small=5, of=5), "five are too few"
    assert record(B, small=1, of=1)
    stage = Stage(B, C, D, owners="bcda")
    latest = stage.machine.aggregation.small_commits._latest
    stage.take(stage.commit(tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40)))
    assert not latest, "B was met later than its parent came, and may have made it alone"
    stage.take(stage.commit(tokens(B, 40, 80), tokens(C, 40, 80), tokens(D, 40, 80)))
    assert latest == {B: deque((False,))}
    stage.take(stage.commit(tokens(B, 80, 120)))
    assert latest == {B: deque((False, True))}
    stage.take(stage.commit(tokens(C, 120, 160), tokens(D, 120, 160), owner=A))
    assert latest == {B: deque((False, True)), A: deque((False,))}, "its own commits are a measure, too"
    stage = Stage(B, C, D, owners="bcda")
    parent = stage.commit(tokens(B, 0, 40))
    stage.hear(B, msg.Commit(commit_on(head_of(parent), tokens(B, 40, 80))))
    stage.take(parent)
    stage.work(stage.wait(5.0))
    assert stage.head().version == 2
    assert not stage.machine.aggregation.small_commits._latest, "it was here before its parent"


def test_who_says_it_is_far_faster_than_all_others_is_believed_to_be_eight_times_faster() -> None:
    """W3d: else owners would wait for nobody but that peer."""
    stage = Stage(B, C, D, owners="abcd", has_learner=False)
    stage.says(B, step_time_s=1e-9)
    stage.wait(1.0)
    assert stage.machine.core.fastest_step_time_s() == pytest.approx(0.5 / 8)
    stage.says(B, step_time_s=0.2)
    stage.wait(1.0)
    assert stage.machine.core.fastest_step_time_s() == pytest.approx(0.2)


def test_a_commit_that_most_others_have_is_applied_at_once() -> None:
    """O5a: they have judged it, and this peer may have missed why."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    header = stage.commit(tokens(D, 0, 40), owner=D)
    for peer in (C, D):
        stage.hear(peer, msg.Heads((head_of(header),), 4))
    assert is_applied(stage.hear(D, msg.Commit(header)), header)


def test_commits_out_of_turn_are_as_rare_as_half_rounds() -> None:
    """O5b: what others made alone while this peer was away is taken without delay, and no more than that."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    unusual_s = stage.machine.aggregation.waits().few_s
    stage.wait(3.5 * unusual_s)
    for number in range(5):
        version = stage.head().version + 1
        order = ranked_owners(stage.config.run, SHARD, version, FOUR)
        late = next(peer for peer in reversed(order) if peer != A)
        header = stage.commit(tokens(late, 40 * number, 40 * number + 40), owner=late)
        stage.work(stage.hear(late, msg.Commit(header)), ef.Apply)
        assert (stage.head().version == version) == (number < 3), number
        if number >= 3:
            break


def test_the_round_of_another_owner_does_not_depend_on_what_only_this_peer_saw() -> None:
    """O5c: B missed its takeover time here, and C merges for those that did not see that."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    membership = stage.machine.core.membership
    membership.on_takeover_missed(B, stage.now, 1.0)
    assert owners(stage)
    ranked = ranked_owners(stage.config.run, SHARD, 1, membership.owners.candidates)
    assert ranked[-1] == B
    for owner in (B, C):
        stage = Stage(B, C, D, owners="bcda", has_learner=False)
        stage.machine.core.membership.on_takeover_missed(B, stage.now, 1.0)
        stage.announce(C, 4)
        header = stage.commit(tokens(owner, 0, 40), owner=owner)
        effects = stage.hear(owner, msg.Commit(header)) + stage.wait(
            1.1 * stage.machine.aggregation.waits().nearly_all_s
        )
        assert is_applied(effects, header), owner
    stage = Stage(B, C, owners="bca", has_learner=False)
    stage.announce(C, 4)
    header = stage.commit(tokens(C, 0, 40), owner=PeerId("z"))
    assert not is_applied(stage.hear(B, msg.Commit(header)), header)
    assert is_applied(stage.wait(1.1 * stage.machine.aggregation.waits().takeover_s), header), "no candidate: of rank 1"
