"""Going back (K): jumps of the held-out loss, votes against commits, and the way back to states without them."""

from __future__ import annotations

from itertools import permutations

import pytest
from stage import SHARD, A, B, C, D, Stage, commit_on, digest, head_of, life, notes, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import Digest, PeerId

GOOD, BAD = 2.0, 3.1
"""Held-out losses; 3.1 is a jump, and 3.0 is none."""


def grow(stage: Stage, versions: int) -> list[ev.ShardState]:
    """Make versions, by turns of everybody; returns the states, oldest first."""
    states = []
    for _ in range(versions):
        version = stage.head().version
        stage.wait(2.0)
        stage.take(stage.commit(tokens(B, 40 * version, 40 * (version + 1)), step=4 * (version + 1)))
        states.append(stage.machine.core.chains[SHARD].state())
    return states


def measure(stage: Stage, step: int, loss: float, *peers: PeerId) -> list[ef.Effect]:
    """Peers measure this loss, this one included if it is named."""
    effects: list[ef.Effect] = []
    for peer in peers:
        if peer == A:
            effects += stage.tell(ev.Evaluated(stage.head().version, loss))
        else:
            effects += stage.hear(peer, msg.Evaluation(stage.head().version, 10, step, loss))
    return effects


def against(*states: ev.ShardState) -> msg.AbandonVote:
    return msg.AbandonVote(tuple(state.head.id for state in states))


def votes(effects: list[ef.Effect]) -> set[tuple[Digest, ...]]:
    """Return the votes that this peer sends: the commits that each names."""
    return {message.commits for _, message in sent(effects, msg.AbandonVote)}


def ids(states: list[ev.ShardState]) -> tuple[Digest, ...]:
    return tuple(state.head.id for state in states)


def ruined(stage: Stage, versions: int = 3) -> list[ev.ShardState]:
    """Versions; the first is in the known-good checkpoint, and all have measured it."""
    states = grow(stage, versions)
    stage.tell(ev.CheckpointGood((states[0].head.id,)))
    measure(stage, 1, GOOD, A, B, C, D)
    return states


def gone_back(stage: Stage, states: list[ev.ShardState]) -> list[ef.Effect]:
    """All others have voted against what follows the first state."""
    return [effect for peer in (B, C, D) for effect in stage.hear(peer, against(*states[1:]))]


def test_a_peer_votes_against_what_followed_its_good_checkpoint_when_the_loss_has_jumped() -> None:
    """K1a, K2a, K2b: it, and most that measured, at least two, have found that twice in a row."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    assert not votes(measure(stage, 2, BAD, A, B, C) + measure(stage, 3, BAD, B, C)), "its own second is missing"
    assert votes(measure(stage, 3, BAD, A)) == {ids(states[1:])}


@pytest.mark.parametrize(
    ("first", "second"),
    [((A, B, C), (A, B)), ((A, B), (A, B, C)), ((B, C, D), (B, C, D))],
)
def test_fewer_or_others_alone_make_no_vote(first: tuple[PeerId, ...], second: tuple[PeerId, ...]) -> None:
    """K2a: a few liars cannot make a peer vote, nor can all others if it measures nothing unusual itself."""
    stage = Stage(B, C, D)
    ruined(stage)
    effects = measure(stage, 2, BAD, *first) + measure(stage, 3, BAD, *second)
    assert not votes(effects)


def test_what_is_little_more_or_came_down_again_is_no_jump() -> None:
    """K1a: each peer is compared with its own best loss, and two in a row are needed."""
    stage = Stage(B, C, D)
    ruined(stage)
    for step in range(2, 6):
        assert not votes(measure(stage, step, 3.0, A, B, C, D))
    for step, loss in ((6, BAD), (7, GOOD), (8, BAD)):
        assert not votes(measure(stage, step, loss, A, B, C, D))


def test_an_alarm_that_most_others_refute_mutes_its_author() -> None:
    """K1c: so that a peer whose evaluations alternate does not have all others measure each version."""
    stage = Stage(B, C, D, evaluation_every=1)
    ruined(stage)
    drawn, asked, usual = Stage(B, C, D, evaluation_every=1), 0, 0
    ruined(drawn)
    for step in range(2, 14):
        measure(stage, step, GOOD if step % 2 else 50.0, B)
        asked += bool(only(taken(stage), ef.Evaluate))
        measure(stage, step, GOOD, A, C, D)
        usual += bool(only(taken(drawn), ef.Evaluate))
    assert asked <= usual + 1
    taken(stage)
    for step in (14, 15):
        measure(stage, step, 50.0, B, C, D)
        assert only(taken(stage), ef.Evaluate), "the alarm of others counts"
    measure(stage, 16, GOOD, B, C, D)
    taken(stage)
    measure(stage, 17, 50.0, D)
    assert only(taken(stage), ef.Evaluate), "most had confirmed its first one"


def test_who_is_proved_to_have_lied_has_no_vote() -> None:
    """K3a: and is not among those of whom more than half must vote."""
    for is_proved in (True, False):
        stage = Stage(B, C, D)
        states = ruined(stage)
        if is_proved:
            one, other = (stage.commit(tokens(C, 400, 400 + n), owner=D) for n in (40, 80))
            stage.hear(B, msg.Equivocation(one, other, bytes(64), bytes(64)))
        stage.hear(B, against(*states[1:]))
        stage.hear(C, against(*states[1:]))
        assert bool(stage.machine.core.abandoned) == is_proved


def taken(stage: Stage) -> list[ef.Effect]:
    """The next version's effects."""
    version = stage.head().version
    stage.wait(2.0)
    return stage.take(stage.commit(tokens(B, 40 * version, 40 * (version + 1)), step=4 * (version + 1)))


def test_a_loss_that_stays_high_is_the_usual_one() -> None:
    """K1a: after 16 evaluations."""
    stage = Stage(B, C, D)
    ruined(stage)
    for _ in range(16):
        measure(stage, 0, BAD, A)
    assert stage.machine.view.is_doubtful
    measure(stage, 0, BAD, A)
    assert not stage.machine.view.is_doubtful


def test_one_member_alone_keeps_no_checkpoint_from_being_known_as_good() -> None:
    """K1d: it could say for ever that the loss has jumped, and nobody would have where to go back to."""
    for peers, is_doubtful in (((B,), False), ((B, C), False), ((B, C, D), True), ((A,), True)):
        stage = Stage(B, C, D)
        ruined(stage)
        measure(stage, 2, BAD, *peers)
        assert stage.machine.view.is_doubtful == is_doubtful, peers


def test_all_measure_while_somebody_has_found_a_jump() -> None:
    """K1c: and who has never measured; otherwise one peer at a time."""
    stage = Stage(B, C, D, evaluation_every=1)

    def asked() -> list[bool]:
        found = []
        for _ in range(6):
            version = stage.head().version
            stage.wait(2.0)
            effects = stage.take(stage.commit(tokens(B, 40 * version, 40 * (version + 1)), step=4 * (version + 1)))
            found.append(bool(only(effects, ef.Evaluate)))
        return found

    assert asked() == [True] * 6
    measure(stage, 1, GOOD, A, B)
    assert not all(asked())
    measure(stage, 2, BAD, B)
    assert asked() == [True] * 6


def test_who_has_no_good_checkpoint_leaves_the_choice_to_others() -> None:
    """K2b: it votes without naming a commit. So does one whose checkpoint is older than its log."""
    stage = Stage(B, C, D)
    grow(stage, 2)
    measure(stage, 1, GOOD, A, B, C)
    assert votes(measure(stage, 2, BAD, A, B, C) + measure(stage, 3, BAD, A, B, C)) == {()}
    stage = Stage(B, C, D, log_length=4)
    states = ruined(stage)
    grow(stage, 5)
    assert states[0].head.id not in stage.machine.core.chains[SHARD].ancestry
    assert votes(measure(stage, 2, BAD, A, B, C) + measure(stage, 3, BAD, A, B, C)) == {()}


def test_a_peer_votes_again_only_much_later() -> None:
    """K2c: a run that always diverges is not caught between two versions."""
    stage = Stage(B, C, D, log_length=4)
    ruined(stage)
    effects = [effect for step in (2, 3, 4, 5) for effect in measure(stage, step, BAD, A, B, C)]
    assert len(sent(effects, msg.AbandonVote)) == 3, "one vote, to each of the others"
    grow(stage, 8)
    assert votes(measure(stage, 6, BAD, A, B, C))


def test_commits_are_abandoned_that_most_vote_against() -> None:
    """K3a: more than half of the participants, without those that abstain."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    assert not only(stage.hear(B, against(*states[1:])) + stage.hear(C, against(*states)), ef.Restore)
    assert only(stage.hear(D, against()), ef.Restore) == [ef.Restore(SHARD)]
    assert set(stage.machine.core.abandoned) == set(ids(states[1:])), "one vote does not name the first"


def test_a_single_vote_abandons_nothing_and_of_a_pair_both_must_vote() -> None:
    """K3a: a commit is named by at least two votes."""
    stage = Stage(B, C)
    states = ruined(stage)
    stage.hear(B, against(*states[1:]))
    stage.hear(C, against())
    assert not stage.machine.core.abandoned
    stage = Stage(B)
    states = ruined(stage)
    measure(stage, 2, BAD, A, B)
    stage.hear(B, against(*states[1:]))
    assert not stage.machine.core.abandoned
    assert votes(measure(stage, 3, BAD, B, A)) == {ids(states[1:])}
    assert set(stage.machine.core.abandoned) == set(ids(states[1:]))


def test_who_names_a_commit_several_times_has_one_vote() -> None:
    """K3a."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    assert not only(stage.hear(B, against(*4 * states[1:])), ef.Restore)
    assert not stage.machine.core.abandoned


def test_a_vote_is_forgotten_after_some_evaluations() -> None:
    """K3a: it says nothing of a model that has gone on since."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    for peer in (B, C):
        stage.hear(peer, against(*states[1:]))
    grow(stage, 5)
    stage.hear(D, against(*states[1:]))
    assert not stage.machine.core.abandoned


def test_no_vote_gains_weight_because_others_leave() -> None:
    """K3a: nor at the end of the run, when one learner after the other rests."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    for peer in (B, C):
        stage.hear(peer, against(*states[1:]))
    stage.says(D, is_participating=False)
    stage.wait(1.0)
    assert not stage.machine.core.abandoned


def test_what_follows_an_abandoned_commit_is_refused_and_nobody_barred() -> None:
    """K3b: neither applied nor taken as a state, even if all report it."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    child = stage.commit(tokens(C, 0, 40), owner=C, step=16)
    gone_back(stage, states)
    assert not only(stage.hear(C, msg.Commit(child)), ef.Apply)
    stage.work(stage.tell(ev.Restored(SHARD, states[0], ())), ef.Install)
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((head_of(child),), 16))
    state = ev.ShardState(head_of(child), 16, ())
    effects = stage.tell(ev.Fetched(B, state, ids(states), C))
    assert not only(effects, ef.Install)
    assert not stage.machine.view.barred


def test_a_commit_that_waits_for_its_turn_is_not_applied_to_an_abandoned_head() -> None:
    """K3b: else this peer would be at no abandoned head when its good state is there, and keep the bad one."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    alone = stage.commit(tokens(C, 0, 40), owner=C, step=16)
    assert not only(stage.hear(C, msg.Commit(alone)), ef.Apply), "it waits"
    gone_back(stage, states)
    assert not only(stage.wait(3 * stage.machine.aggregation.waits().takeover_s), ef.Apply)
    effects = stage.work(stage.tell(ev.Restored(SHARD, states[0], ())), ef.Install)
    assert stage.head().id == states[0].head.id, effects


def test_a_vote_is_also_sent_to_those_that_connect_later() -> None:
    """K2a: else one that restarts counts too few."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    measure(stage, 2, BAD, A, B, C)
    measure(stage, 3, BAD, A, B, C)
    stage.tell(ev.PeerDisconnected(D, "gone"))
    assert sent(stage.tell(ev.PeerConnected(D)), msg.AbandonVote) == [(D, against(*states[1:]))]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_order_of_votes_changes_nothing(order: tuple[int, ...]) -> None:
    """K3a: so all peers that hear the same votes abandon the same commits."""
    stage = Stage(B, C, D, PeerId("e"))
    states = ruined(stage, 4)
    told = [(B, 1), (C, 1), (D, 2), (PeerId("e"), 2)]
    for i in order:
        peer, first = told[i]
        stage.hear(peer, against(*states[first:]))
    assert set(stage.machine.core.abandoned) == set(ids(states[2:]))
    stage.hear(B, against(*states[1:]))
    stage.wait(1.0)
    assert set(stage.machine.core.abandoned) == set(ids(states[2:]))


def test_a_peer_returns_to_its_good_checkpoint() -> None:
    """K4a, K4b: meanwhile it merges nothing; its learner takes the global parameters."""
    stage = Stage(B, C, D, owners="abcd")
    states = ruined(stage)
    stage.give()
    gone_back(stage, states)
    for peer in (B, C, D):
        assert not only(stage.hear(peer, stage.contribution(peer, 1000, 1040)), ef.Merge)
    [install] = only(stage.tell(ev.Restored(SHARD, states[0], ())), ef.Install)
    assert install.state == states[0]
    assert install.is_reset
    effects = stage.tell(ev.Failed("install", SHARD, None, "it is not there any more"))
    for peer in (B, C, D):
        effects += stage.hear(peer, stage.contribution(peer, 1000, 1040))
    assert not only(effects + stage.wait(5.0), ef.Merge), "nor once that has failed"
    trained = stage.tokens
    assert trained
    effects = stage.work(stage.tell(ev.Restored(SHARD, states[0], ())), ef.Install, ef.Snapshot, ef.Encode)
    assert stage.head() == states[0].head
    given = only(effects + stage.give(8), ef.Encode)
    assert [effect.contributor.tokens_from for effect in given] == [trained], "what it had trained before is not given"


def test_a_good_checkpoint_that_others_abandon_is_not_installed() -> None:
    """K4a: another peer's state is, once most stand by it."""
    stage = Stage(B, C, D)
    states = ruined(stage, 4)
    for peer in (B, C, D):
        stage.hear(peer, against(*states[2:]))
    assert not only(stage.tell(ev.Restored(SHARD, states[2], ids(states[:2]))), ef.Install)
    assert not only(stage.tell(ev.Restored(SHARD, None)), ef.Install)
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((states[1].head,), 8))
    assert only(stage.wait(2.0), ef.Fetch)
    assert only(stage.tell(ev.Fetched(B, states[1], ids(states[:1]), B)), ef.Install)


def test_a_restart_with_an_abandoned_state_asks_others_for_theirs() -> None:
    """K4a: a crash before the disk was set right leads to no way back."""
    first = Stage(B, C, D)
    states = ruined(first)
    gone_back(first, states)
    later = Stage(is_founder=False, has_learner=False)
    later.tell(ev.Started((states[2],), (ids(states[:2]),), (), first.machine.view.convictions()))
    for peer in (B, C, D):
        later.meet(peer)
        later.hear(peer, msg.Heads((states[0].head,), 8))
    assert only(later.wait(1.0), ef.Fetch)
    assert only(later.tell(ev.Fetched(B, states[0], (), B)), ef.Install)


def test_the_word_of_those_that_returned_counts() -> None:
    """K4a: peers that still report an abandoned head say nothing about others. One alone is believed later."""
    stage = Stage(B, C, D, PeerId("e"), PeerId("f"))
    states = ruined(stage, 4)
    for peer in (B, C, D, PeerId("e")):
        stage.hear(peer, against(*states[1:]))
        stage.hear(peer, msg.Heads((states[3].head,), 16))
    stage.hear(PeerId("f"), msg.Heads((states[3].head,), 16))
    stage.tell(ev.Restored(SHARD, None))
    stage.hear(B, msg.Heads((states[0].head,), 8))
    assert not only(stage.tell(ev.Fetched(B, states[0], (), B)), ef.Install)
    stage.hear(C, msg.Heads((states[0].head,), 8))
    assert only(stage.tell(ev.Fetched(B, states[0], (), B)), ef.Install)


def test_no_second_commit_is_made_on_a_parent_after_going_back() -> None:
    """K4c: neither in this life nor in the next, whose disk holds nothing newer than the good state."""
    stage = Stage(B, C, D, owners="abcd")
    state = stage.machine.core.chains[SHARD].state()
    stage.offer(B)
    stage.give()
    stage.work(stage.hear(C, stage.contribution(C)) + stage.hear(D, stage.contribution(D)) + stage.wait(5.0))
    states = [stage.machine.core.chains[SHARD].state()]
    assert states[0].head.version == 1
    for peer in (B, C, D):
        stage.hear(peer, against(*states))
    stage.work(stage.tell(ev.Restored(SHARD, state, ())), ef.Install)
    assert stage.head() == state.head
    convictions = stage.machine.view.convictions()

    def is_merging(stage: Stage) -> bool:
        effects = stage.announce(B, 8)
        for peer in (B, C, D):
            effects += stage.hear(peer, stage.contribution(peer, 400, 440))
        return bool(only(effects + stage.wait(20.0), ef.Merge))

    assert not is_merging(stage)
    for known, may_merge in ((convictions, False), (ev.Convictions(), True)):
        later = Stage(owners="abcd", is_founder=False, has_learner=False)
        later.tell(ev.Started((state,), ((),), (), known))
        for peer in (B, C, D):
            later.meet(peer)
        later.tell(ev.LearnerStarted(life(A, 2)))
        assert is_merging(later) == may_merge


def test_a_life_that_began_later_merges_nothing_at_older_versions() -> None:
    """K4c: what an earlier life committed there is not known any more."""
    first = Stage(B, C, D, owners="abcd")
    states = grow(first, 3)
    later = Stage(owners="abcd", is_founder=False, has_learner=False)
    later.tell(ev.Started((states[2],), (ids(states[:2]),)))
    for peer in (B, C, D):
        later.meet(peer)
        later.hear(peer, against(*states[1:]))
    later.tell(ev.LearnerStarted(life(A, 2)))
    assert later.machine.core.abandoned
    later.work(later.tell(ev.Restored(SHARD, states[0], ())), ef.Install)
    assert later.head() == states[0].head
    for peer in (B, C, D):
        later.announce(peer, 40)
        later.hear(peer, later.contribution(peer, 400, 440))
    assert not only(later.wait(20.0), ef.Merge)


def test_a_peer_that_nobody_follows_gives_in() -> None:
    """K5a: once most others have gone on for long with what it left."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    child = stage.commit(tokens(C, 0, 40), owner=C, step=16)
    grandchild = msg.Head(SHARD, 5, digest("next"), head_of(child).tokens + 40)
    gone_back(stage, states)
    stage.work(stage.tell(ev.Restored(SHARD, states[0], ())), ef.Install)
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((head_of(child),), 16))
    assert not notes(stage.wait(40.0), "going-back"), "they do not go on"
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((grandchild,), 16))
    assert any("this peer goes on with what it had left" in note for note in notes(stage.wait(1.0), "going-back"))
    gone_back(stage, states)
    assert not stage.machine.core.abandoned, "votes do not count for a while"


def test_who_counts_too_few_votes_follows_those_that_left() -> None:
    """K5b: half of the participants are not more than half, but they go on with a lighter chain."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    theirs = head_of(commit_on(states[0].head, tokens(D, 0, 10)))
    for peer in (B, C):
        stage.hear(peer, against(*states[1:]))
    stage.hear(B, msg.Heads((theirs,), 16))
    assert not only(stage.wait(30.0), ef.Restore), "one has left"
    stage.hear(C, msg.Heads((theirs,), 16))
    assert only(stage.wait(30.0), ef.Restore)
    assert set(stage.machine.core.abandoned) == set(ids(states[1:]))
