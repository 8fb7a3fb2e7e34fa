"""Rules A of docs/protocol.md: how a peer takes commits and other heads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from stage import SHARD, A, B, C, D, Stage, commit_on, digest, head_of, life, notes, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import MARK_LIFE_LOGS
from p2pdiloco.protocol.ids import FragmentId
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head
from p2pdiloco.protocol.replication import MAX_COMMITS_SENT, TRIES
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import P0, P1, base_config, make_world


def heavy(head: Head, by: int = 1000) -> Head:
    """A heavier head of another chain."""
    return Head(head.shard, head.version + 1, digest(f"other than {head.id}"), head.tokens + by)


def state(head: Head, mark: int = 0) -> ev.ShardState:
    """A state that a donor has; its chain has merged this many tokens of our learner."""
    return ev.ShardState(head, 4, ((life(A), ev.Mark(mark, mark // 10, head.version)),) if mark else ())


def install(stage: Stage, theirs: ev.ShardState) -> list[ef.Effect]:
    """The stage downloads a state that it did or did not want."""
    return stage.work(stage.bring(theirs, B))


def test_a_commit_is_applied_only_on_top_of_its_parent() -> None:
    """A1a: neither with another parent, nor with another version."""
    stage = Stage(B)
    good = stage.commit(tokens(B, 0, 40))
    for changes in ({"parent": digest("x")}, {"version": 2}):
        bad = msgspec.structs.replace(good, **changes)
        assert not only(stage.hear(B, msg.Commit(bad)), ef.Apply)
    assert [apply.header for apply in only(stage.hear(B, msg.Commit(good)), ef.Apply)] == [good]


@pytest.mark.parametrize(
    "contributors",
    [
        (tokens(C, 0, 40), tokens(B, 0, 40)),
        (tokens(C, 0, 40), tokens(C, 40, 80)),
        (),
        (tokens(C, 0, 0),),
        (tokens(B, 0, 40),),
    ],
    ids=["not sorted", "not distinct", "no contributors", "an empty range", "merged before"],
)
def test_a_commits_contributors_are_sorted_distinct_not_empty_and_not_merged_before(
    contributors: tuple[Contributor, ...],
) -> None:
    """A1a: else it is not taken."""
    stage = Stage(B)
    stage.take(stage.commit(tokens(B, 0, 20)))
    effects = stage.take(stage.commit(*contributors))
    assert stage.head().version == 1
    assert notes(effects, "commit")


def test_a_commits_cumulative_tokens_are_right() -> None:
    """A1a."""
    stage = Stage(B)
    for wrong in (0, 39, 41):
        stage.take(stage.commit(tokens(B, 0, 40), tokens=wrong))
    assert stage.head().version == 0
    stage.take(stage.commit(tokens(B, 0, 40), tokens=40))
    assert stage.head().tokens == 40


def test_a_child_that_comes_before_its_parent_waits() -> None:
    """A1d: also while its parent is being applied."""
    stage = Stage(B, has_learner=False)
    first = stage.commit(tokens(B, 0, 40))
    second = commit_on(head_of(first), tokens(B, 40, 80))
    third = commit_on(head_of(second), tokens(B, 80, 120))
    assert not only(stage.hear(B, msg.Commit(second)), ef.Apply)
    applying = stage.hear(B, msg.Commit(first))
    stage.hear(B, msg.Commit(third))
    stage.work(applying, ef.Apply)
    assert stage.head() == head_of(third)


def test_of_two_children_that_wait_the_heavier_is_kept() -> None:
    """A1d: in whichever order they come."""
    for is_heavier_first in (True, False):
        stage = Stage(B)
        first = stage.commit(tokens(B, 0, 50))
        heavier = commit_on(head_of(first), tokens(B, 50, 100))
        lighter = commit_on(head_of(first), tokens(B, 50, 90))
        for header in (heavier, lighter) if is_heavier_first else (lighter, heavier):
            stage.hear(B, msg.Commit(header))
        stage.take(first)
        assert stage.head() == head_of(heavier)


def test_of_two_heads_the_one_with_more_cumulative_tokens_wins() -> None:
    """A2a: whatever their versions and ids are."""
    stage = Stage(B)
    for version, name, weight, wins in ((9, "f", 50, True), (2, "a", 51, True), (99, "f", 50, False)):
        theirs = Head(SHARD, version, digest(name), weight)
        install(stage, state(theirs))
        assert (stage.head() == theirs) == wins


def test_of_two_heads_with_as_many_tokens_the_larger_id_wins() -> None:
    """A2a: in whichever order they come."""
    small, large = sorted((digest("x"), digest("y")))
    for order in ((small, large), (large, small)):
        stage = Stage(B)
        for name in order:
            install(stage, state(Head(SHARD, 5, name, 50)))
        assert stage.head().id == large


@pytest.mark.parametrize("how", ["in a round", "in an answer", "in a refusal"])
def test_who_hears_of_a_heavier_head_asks_for_what_follows_its_own_after_the_commit_patience(how: str) -> None:
    """A3a."""
    stage = Stage(B)
    theirs = heavy(stage.head())
    says: dict[str, msg.Message] = {
        "in a round": msg.Round(FragmentId(0), 4, (theirs,)),
        "in an answer": msg.Heads((theirs,), 4),
        "in a refusal": msg.Refused(SHARD, stage.head().id, "stale", theirs),
    }
    effects = stage.hear(B, says[how])
    patience_s = stage.machine.aggregation.waits().commit_s
    assert not sent(effects + stage.wait(patience_s - 0.01), msg.CommitsRequest)
    assert sent(stage.wait(0.02), msg.CommitsRequest) == [(B, msg.CommitsRequest(SHARD, stage.head().id))]


def test_a_heavier_head_that_comes_by_itself_is_not_asked_for() -> None:
    """A3a."""
    stage = Stage(B)
    header = stage.commit(tokens(B, 0, 40))
    effects = stage.announce(B, 4, head_of(header)) + stage.wait(0.1) + stage.take(header) + stage.wait(3.0)
    assert not sent(effects, msg.CommitsRequest)


def test_who_is_farther_behind_than_an_answer_reaches_asks_again() -> None:
    """A3e: also while a later commit waits, to which the answer did not lead."""
    stage = Stage(B, has_learner=False)
    heads, headers = [stage.head()], []
    for begin in range(0, 40 * (MAX_COMMITS_SENT + 2), 40):
        headers.append(commit_on(heads[-1], tokens(B, begin, begin + 40)))
        heads.append(head_of(headers[-1]))
    patience_s = stage.machine.aggregation.waits().commit_s + 0.1
    effects = stage.hear(B, msg.Commit(headers[-1])) + stage.wait(patience_s)
    for header in headers[:MAX_COMMITS_SENT]:
        stage.take(header)
    effects += stage.hear(B, msg.Heads((heads[-1],), stage.machine.core.step)) + stage.wait(patience_s)
    asked = [request.head for _, request in sent(effects, msg.CommitsRequest)]
    assert asked == [heads[0].id, heads[MAX_COMMITS_SENT].id]


def asked_again_after(stage: Stage, theirs: Head) -> float:
    """Seconds until b, which goes on reporting a head, is asked for what leads to it."""
    waited = 0.0
    while not sent(stage.announce(B, 4, theirs) + stage.wait(0.25), msg.CommitsRequest):
        waited += 0.25
    return waited


def test_who_delivers_nothing_is_asked_less_and_less_often() -> None:
    """A3d: a head to which nothing valid leads must not keep a peer from what others have."""
    stage = Stage(B, C, has_learner=False)
    request_s, theirs = stage.machine.core.config.request_s, heavy(stage.head())
    patience_s = stage.machine.aggregation.waits().commit_s
    waits = []
    for _ in range(5):
        waits.append(asked_again_after(stage, theirs) - patience_s)
        stage.tell(ev.Failed("commit", SHARD, B, "a signature is wrong"))
    for waited, times in zip(waits, (0, 1, 2, 4, 8), strict=True):
        assert waited == pytest.approx(times * request_s, abs=0.6)
    asked_again_after(stage, theirs)
    stage.take(stage.commit(tokens(B, 0, 40)), sender=B)
    stage.tell(ev.Failed("commit", SHARD, B, "a signature is wrong"))
    theirs = heavy(stage.head())
    asked_again_after(stage, theirs)
    stage.tell(ev.Failed("commit", SHARD, B, "a signature is wrong"))
    assert asked_again_after(stage, theirs) - patience_s == pytest.approx(request_s, abs=0.6), "it had delivered"


def test_another_peer_is_asked_for_what_does_not_come() -> None:
    """A3d: a peer that tells of commits and does not send them must not hold others up for long."""
    stage = Stage(B, C, has_learner=False)
    theirs = head_of(stage.commit(tokens(B, 0, 40)))
    patience_s = stage.machine.aggregation.waits().commit_s
    first = stage.announce(B, 4, theirs) + stage.announce(C, 4, theirs) + stage.wait(patience_s + 0.1)
    assert [peer for peer, _ in sent(first, msg.CommitsRequest)] == [B]
    assert not sent(stage.wait(0.5 * patience_s), msg.CommitsRequest)
    assert [peer for peer, _ in sent(stage.wait(0.5 * patience_s), msg.CommitsRequest)] == [C]
    second = stage.announce(B, 5, theirs) + stage.wait(stage.config.request_s - 0.2)
    assert not sent(second, msg.CommitsRequest), "a thin line carries one answer at a time"


def test_nobody_else_is_asked_while_what_has_come_is_applied() -> None:
    """A3d: a busy machine takes longer than a patience, and its peer has delivered."""
    stage = Stage(B, C, has_learner=False)
    commit = stage.commit(tokens(B, 0, 40), tokens(C, 0, 40))
    for peer in (B, C):
        stage.announce(peer, 4, head_of(commit))
    patience_s = stage.machine.aggregation.waits().commit_s
    assert sent(stage.wait(patience_s + 0.1), msg.CommitsRequest)
    assert only(stage.hear_in_turn(B, commit), ef.Apply)
    assert not sent(stage.wait(4 * patience_s), msg.CommitsRequest)
    assert stage.machine.core.membership.peers[B].ignored_until == 0.0


def test_while_a_commit_waits_for_its_turn_another_peer_is_asked_and_who_sent_it_believed() -> None:
    """A3d: the others may have gone on with another chain, and its sender has delivered."""
    stage = Stage(B, C, D, owners="bcda", has_learner=False)
    alone = stage.commit(tokens(D, 0, 40), owner=D)
    stage.announce(C, 4, head_of(alone))
    stage.announce(D, 4, heavy(stage.head()))
    patience_s = stage.machine.aggregation.waits().commit_s
    assert [peer for peer, _ in sent(stage.wait(patience_s + 0.1), msg.CommitsRequest)] == [C]
    assert not only(stage.hear(C, msg.Commit(alone)), ef.Apply)
    assert [peer for peer, _ in sent(stage.wait(patience_s + 0.1), msg.CommitsRequest)] == [D]
    assert stage.machine.core.membership.peers[C].ignored_until == 0.0


def test_who_has_not_delivered_is_asked_last() -> None:
    """A3d: a peer whose heads lead nowhere could be the first to report one each time."""
    stage = Stage(B, C, D, has_learner=False)
    theirs = head_of(stage.commit(tokens(B, 0, 40)))
    stage.announce(B, 4, theirs)
    stage.wait(1.0)
    stage.tell(ev.Failed("commit", SHARD, B, "a signature is wrong"))
    stage.wait(stage.config.request_s)
    for peer in (B, C, D):
        stage.announce(peer, 5, theirs)
    asked = [peer for peer, _ in sent(stage.wait(2.0), msg.CommitsRequest)]
    assert asked == [C, D]


def test_an_invalid_commit_of_who_was_not_asked_ends_no_request() -> None:
    """A3d: or anybody could."""
    stage = Stage(B, C, has_learner=False)
    stage.announce(B, 4, heavy(stage.head()))
    stage.wait(1.0)
    stage.tell(ev.Failed("commit", SHARD, C, "a signature is wrong"))
    assert stage.machine.replication.asked == {SHARD: B}


def test_who_is_asked_sends_what_follows_or_advises_to_download() -> None:
    """A3b: the donor's side."""
    stage = Stage(B)
    start = stage.head()
    headers: list[CommitHeader] = []
    for i in range(3):
        headers.append(stage.commit(tokens(B, 40 * i, 40 * i + 40)))
        stage.take(headers[-1])
    answer = sent(stage.hear(B, msg.CommitsRequest(SHARD, headers[0].parent)), msg.Commit)
    assert [commit.header for _, commit in answer] == headers
    assert start.id == headers[0].parent
    unknown = stage.hear(B, msg.CommitsRequest(SHARD, digest("of a fork")))
    assert sent(unknown, msg.FetchAdvised) == [(B, msg.FetchAdvised(SHARD, stage.head()))]


def test_who_is_asked_while_it_applies_answers_when_it_has() -> None:
    """A3e: its log of before would lead the asker nowhere (seed 6005196); nobody who went meanwhile is answered."""
    stage = Stage(B, C)
    start, header = stage.head(), stage.commit(tokens(B, 0, 40), tokens(C, 0, 40))
    asked = stage.hear(B, msg.Commit(header)) + stage.hear(B, msg.CommitsRequest(SHARD, start.id))
    asked += stage.hear(C, msg.CommitsRequest(SHARD, start.id))
    assert not sent(asked, msg.Commit)
    stage.tell(ev.PeerDisconnected(C, "gone"))
    assert sent(stage.work(asked, ef.Apply), msg.Commit) == [(B, msg.Commit(header))]


def test_if_its_own_head_is_not_in_the_donors_log_it_downloads_the_shards_state() -> None:
    """A3b."""
    stage = Stage(B)
    theirs = heavy(stage.head())
    stage.announce(B, 4, theirs)
    assert sent(stage.wait(1.0), msg.CommitsRequest)
    assert only(stage.hear(B, msg.FetchAdvised(SHARD, theirs)), ef.Fetch) == [ef.Fetch(SHARD, B)]
    install(stage, state(theirs))
    assert stage.head() == theirs


def test_of_two_downloads_the_second_may_end_after_commits_were_asked_for() -> None:
    """A3b, A3d: that request is over then, too, with its alarm."""
    stage = Stage(B, C)
    theirs = heavy(stage.head())
    stage.announce(B, 4, theirs)
    stage.wait(1.0)
    assert only(stage.hear(B, msg.FetchAdvised(SHARD, theirs)), ef.Fetch)
    stage.hear_in_turn(B, stage.commit(tokens(B, 0, 40)))
    assert only(stage.tell(ev.Failed("apply", SHARD, None, "another digest")), ef.Fetch), "the second"
    stage.tell(ev.Failed("fetch", SHARD, B, "gone"))
    stage.announce(C, 8, theirs)
    assert sent(stage.wait(3.0), msg.CommitsRequest)
    stage.tell(ev.Failed("fetch", SHARD, C, "gone"))
    assert SHARD not in stage.machine.replication.asked


def test_advice_that_was_not_asked_for_is_ignored() -> None:
    """A3b: nobody can make a peer download."""
    stage = Stage(B, C)
    theirs = heavy(stage.head())
    stage.announce(B, 4, theirs)
    assert not only(stage.hear(C, msg.FetchAdvised(SHARD, theirs)), ef.Fetch)


def test_who_hears_of_a_lighter_fork_shows_its_head() -> None:
    """A3c: in a round or by a commit; a lighter head of its own chain is no fork."""
    stage = Stage(B)
    start = stage.head()
    stage.take(stage.commit(tokens(B, 0, 40)))
    lighter = commit_on(start, tokens(C, 0, 20))
    shown = [(B, msg.Heads((stage.head(),), stage.machine.view.step))]
    assert sent(stage.announce(B, 4, head_of(lighter)), msg.Heads) == shown
    assert sent(stage.hear(B, msg.Commit(lighter)), msg.Heads) == shown
    assert not sent(stage.announce(B, 4, start), msg.Heads)
    assert not sent(stage.announce(B, 4, stage.head()), msg.Heads)


def test_heads_that_were_shown_are_not_answered() -> None:
    """A3c: or two peers would show each other their heads for ever."""
    stage = Stage(B)
    start = stage.head()
    stage.take(stage.commit(tokens(B, 0, 40)))
    assert not sent(stage.hear(B, msg.Heads((head_of(commit_on(start, tokens(C, 0, 20))),), 4)), msg.Heads)


def test_when_a_head_changes_the_learner_moves_by_new_global_minus_old_global() -> None:
    """A4a: in a small world each learner's own part is moved by exactly that and what was settled, so that it stays
    what it trained: never reset, never moved by other learners' tokens."""
    world = make_world(base_config(), {P0: PeerSetting(), P1: PeerSetting()}, None)
    world.run_until(8.0)
    assert world.checks.newest[SHARD] > 3
    for process in world.living():
        learner = process.learner
        assert learner is not None
        assert learner.tokens_lost == 0
        assert (learner.moved, learner.resets) == ([0], [0])


def carry(effects: list[ef.Effect]) -> list[tuple[Any, ...]]:
    """What is settled and restored, and whether the learner is reset."""
    return [(e.settled, e.restored, e.is_reset) for e in effects if isinstance(e, ef.Apply | ef.Install)]


def test_the_learner_gets_back_its_own_contributions_between_the_old_mark_and_the_new_one() -> None:
    """A4b: settled; of a commit without them nothing is."""
    stage = Stage(B, weight=0.0)
    [(_, given)] = sent(stage.give(), msg.Contribution)
    assert carry(stage.take(stage.commit(given.contributor))) == [((given.payload,), (), False)]
    assert carry(stage.take(stage.commit(tokens(B, 0, 40)))) == [((), (), False)]


def test_a_fork_takes_the_learners_own_contributions_between_the_new_mark_and_the_old_one_back() -> None:
    """A4b: restored; the lighter chain had merged two, the heavier one only the first."""
    stage = Stage(B, weight=0.0)
    [(_, first)] = sent(stage.give(), msg.Contribution)
    stage.take(stage.commit(first.contributor))
    [(_, second)] = sent(stage.give(), msg.Contribution)
    stage.take(stage.commit(second.contributor))
    effects = install(stage, state(heavy(stage.head()), mark=40))
    assert carry(effects) == [((), (second.payload,), False)]
    assert stage.machine.view.unmerged_tokens() == 40


def test_what_the_ledger_cannot_tell_apart_resets_the_learner_with_a_warning() -> None:
    """A4d: the heavier chain has merged up to a mark at which no contribution began or ended."""
    stage = Stage(B, weight=0.0)
    [(_, given)] = sent(stage.give(), msg.Contribution)
    stage.take(stage.commit(given.contributor))
    effects = install(stage, state(heavy(stage.head()), mark=30))
    assert carry(effects) == [((), (), True)]
    assert "loses its unmerged progress" in notes(effects, "carry")[0]

    stage = Stage(B, weight=0.0)
    stage.give()
    effects = stage.take(stage.commit(tokens(A, 0, 30)))  # as well, if a commit does it
    assert carry(effects) == [((), (), True)]
    assert "loses its unmerged progress" in notes(effects, "carry")[0]

    stage = Stage(B, weight=0.0, is_overwrite=True)  # and always where runs are to throw it away
    [(_, given)] = sent(stage.give(), msg.Contribution)
    assert carry(stage.take(stage.commit(given.contributor))) == [((), (), True)]
    assert carry(install(stage, state(heavy(stage.head())))) == [((), (), True)]


def test_what_a_chain_forgot_for_its_age_stays_merged() -> None:
    """A4b: a state that is more than a mark's life further on and does not name the learner; an earlier one takes its
    contribution back."""
    for versions, is_forgotten in ((MARK_LIFE_LOGS * 4, False), (MARK_LIFE_LOGS * 4 + 1, True)):
        stage = Stage(B, weight=0.0, log_length=4)
        [(_, given)] = sent(stage.give(), msg.Contribution)
        stage.take(stage.commit(given.contributor))
        assert stage.machine.view.unmerged_tokens() == 0
        later = Head(SHARD, 1 + versions, digest("later"), 10**6)
        effects = install(stage, ev.ShardState(later, 4, ()))
        assert carry(effects) == [((), () if is_forgotten else (given.payload,), False)]
        assert stage.machine.view.unmerged_tokens() == (0 if is_forgotten else 40)


def test_a_commit_whose_digest_does_not_come_out_is_not_taken() -> None:
    """A5a: the shard's state is fetched from a live peer."""
    stage = Stage(B)
    before = stage.head()
    stage.hear(B, msg.Commit(stage.commit(tokens(B, 0, 40))))
    effects = stage.tell(ev.Failed("apply", SHARD, None, "the digest is not the commit's"))
    assert stage.head() == before
    assert only(effects, ef.Fetch) == [ef.Fetch(SHARD, B)]
    install(stage, state(heavy(before)))
    assert stage.head() == heavy(before)


def test_after_a_commit_that_was_not_taken_the_contributions_are_still_there() -> None:
    """A5a: an owner may merge on its old head."""
    stage = Stage(B, C, owners="abc", has_learner=False, grace_share=0.0)
    stage.work(stage.offer(C), ef.Merge)
    assert not only(stage.tell(ev.Failed("apply", SHARD, None, "no memory")), ef.Merge), "at once it would fail again"
    effects = stage.wait(stage.machine.aggregation.waits().takeover_s)
    assert [m.base for m in only(effects, ef.Merge)] == [stage.head()]


SPOILT = ev.Failed("state", SHARD, None, "a bit has flipped")


def test_a_spoilt_state_is_fetched_again_at_its_head() -> None:
    """A6a: the log stays, and the learner is not moved by it."""
    stage = Stage(B)
    stage.give()
    stage.take(stage.commit(tokens(A, 0, 40)))
    head, chain = stage.head(), stage.machine.core.chains[SHARD]
    assert only(stage.tell(SPOILT), ef.Fetch) == [ef.Fetch(SHARD, B)]
    effects = stage.tell(ev.Fetched(B, chain.state()))
    assert [(i.state.head, i.settled, i.restored, i.is_reset) for i in only(effects, ef.Install)] == [
        (head, (), (), False)
    ]
    stage.tell(ev.Applied(SHARD, head.id))
    assert stage.head() == head
    assert list(chain.log_ids) == [head.id], "who lags is still sent what follows"
    assert not only(stage.tell(ev.Fetched(B, chain.state())), ef.Install), "once"


def test_on_a_spoilt_state_nothing_is_merged_and_contributions_wait() -> None:
    """A6a."""
    stage = Stage(B, C, owners="abc", has_learner=False, grace_share=0.0)
    stage.tell(SPOILT)
    assert not only(stage.offer(C) + stage.wait(5.0), ef.Merge)
    stage.tell(ev.Fetched(B, stage.machine.core.chains[SHARD].state()))
    assert only(stage.tell(ev.Applied(SHARD, stage.head().id)) + stage.offer(C), ef.Merge)


def test_the_owner_of_the_head_is_not_asked_for_a_repair_beside_others() -> None:
    """A6d: it may have signed another state, which only it has."""
    stage = Stage(B, C, D)
    stage.take(stage.commit(tokens(C, 0, 40), owner=B))
    asked = [only(stage.tell(SPOILT), ef.Fetch)[0].peer]
    for _ in range(30):
        stage.tell(ev.Failed("fetch", SHARD, asked[-1], "it is corrupted here"))
        asked += [effect.peer for effect in only(stage.wait(1.0), ef.Fetch)]
    assert B not in asked
    assert len(asked) == TRIES
    pair = Stage(B)
    pair.take(pair.commit(tokens(B, 0, 40), owner=B))
    assert only(pair.tell(SPOILT), ef.Fetch)[0].peer == B, "there is no other"


def test_a_repair_is_asked_for_until_it_comes_and_who_is_alone_goes_on() -> None:
    """A6c."""
    stage = Stage(B, C)
    first = only(stage.tell(SPOILT), ef.Fetch)[0]
    stage.tell(ev.Failed("fetch", SHARD, first.peer, "it has gone"))
    assert only(stage.wait(3.0), ef.Fetch)

    for _ in range(40):
        stage.tell(ev.Failed("fetch", SHARD, first.peer, "it has another head"))
        stage.wait(1.0)
    assert not stage.machine.replication.repairing, "nobody has this head"
    assert not only(stage.wait(5.0), ef.Fetch)

    alone = Stage()
    assert not only(alone.tell(SPOILT) + alone.wait(3.0), ef.Fetch)
    assert not alone.machine.replication.repairing


def test_a_commit_that_the_head_has_overtaken_waits_no_longer() -> None:
    """A1d: one of the head's own version neither, whose parent another chain has."""
    stage = Stage(B, C)
    other = msg.Head(SHARD, 1, digest("another parent"), 5)
    stage.hear(C, msg.Commit(commit_on(other, tokens(C, 0, 40), owner=C)))
    assert stage.machine.replication.orphans.of_shard(SHARD)
    for sync_round in range(2):
        stage.take(stage.commit(tokens(B, 40 * sync_round, 40 * (sync_round + 1))))
    assert stage.head().version == 2
    assert not stage.machine.replication.orphans.of_shard(SHARD)
