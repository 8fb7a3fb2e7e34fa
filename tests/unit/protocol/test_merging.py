"""Rules M of docs/protocol.md: merging. Peer a owns version 1 and has no learner, unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from stage import SHARD, A, B, C, D, Stage, bare, commit_on, digest, head_of, life, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import Contributor, Head


def owner(*others: PeerId, **changes: Any) -> Stage:
    """Peer a owns version 1 and only merges."""
    order = "".join((A, *others))
    return Stage(*others, owners=order, **{"has_learner": False, **changes})


def merged(effects: list[ef.Effect]) -> list[tuple[Contributor, ...]]:
    """The ranges of each merge that was begun."""
    return [tuple(bare(c.contributor) for c in merge.contributions) for merge in only(effects, ef.Merge)]


def test_a_contribution_is_accepted_only_on_the_owners_own_head() -> None:
    """M1a: on an unknown base of the same version it is not."""
    stage = owner(B)
    fork = msgspec.structs.replace(stage.head(), id=stage.head().id[::-1])
    effects = stage.hear(B, stage.contribution(B, base=fork)) + stage.wait(5.0)
    assert merged(effects) == []
    assert merged(stage.offer(B)) == [(tokens(B, 0, 40),)]


def test_a_contribution_is_accepted_only_from_its_own_learners_peer() -> None:
    """M1a: c cannot give what b trained."""
    stage = owner(B, C)
    effects = stage.hear(C, stage.contribution(B))
    assert [(to, "another peer" in refused.reason) for to, refused in sent(effects, msg.Refused)] == [(C, True)]
    assert merged(stage.wait(5.0)) == []


def test_a_contribution_is_accepted_once_for_a_learner_and_version() -> None:
    """M1a: the second one, of another range, changes nothing."""
    stage = owner(B, C)
    effects = stage.offer(B, 0, 40) + stage.offer(B, 0, 80) + stage.offer(C)
    assert merged(effects) == [(tokens(B, 0, 40), tokens(C, 0, 40))]


def test_of_a_peer_whose_learner_was_replaced_only_the_new_learner_is_merged() -> None:
    """M1a: a peer gives once, too."""
    stage = owner(B, C)
    reborn = stage.contribution(B, contributor=Contributor(life(B, 2), 0, 20, 0, 2))
    effects = stage.offer(B) + stage.hear(B, reborn) + stage.offer(C)
    assert merged(effects) == [(bare(reborn.contributor), tokens(C, 0, 40))]


def test_a_contribution_is_accepted_only_where_the_chain_does_not_hold_its_tokens_already() -> None:
    """M1a."""
    stage = Stage(B, has_learner=False)
    stage.take(stage.commit(tokens(B, 0, 40)))
    effects = stage.offer(B, 0, 80) + stage.offer(B, 39, 80)
    assert [refused.reason for _, refused in sent(effects, msg.Refused)] == ["its tokens are merged already"] * 2
    assert merged(effects + stage.wait(5.0)) == []
    assert merged(stage.offer(B, 40, 80) + stage.wait(5.0)) == [(tokens(B, 40, 80),)]


def test_a_contribution_for_an_older_head_is_refused_with_the_newest_head() -> None:
    """M2a."""
    stage = owner(B, C)
    late = stage.contribution(B)
    stage.take(stage.commit(tokens(C, 0, 40)), C)
    assert sent(stage.hear(B, late), msg.Refused) == [(B, msg.Refused(SHARD, late.base.id, "stale", stage.head()))]
    lighter = stage.contribution(B, base=Head(SHARD, 1, digest("fork"), 39))
    assert sent(stage.hear(B, lighter), msg.Refused)[0][1].head == stage.head()
    assert merged(stage.wait(5.0)) == []


def test_a_contribution_for_a_head_that_is_not_reached_yet_waits_until_it_is() -> None:
    """M2b: it comes before the commit that it is based on, which is of a later version and heavier."""
    stage = Stage(B, C, has_learner=False)
    header = stage.commit(tokens(C, 0, 40))
    effects = stage.hear(B, stage.contribution(B, base=head_of(header)))
    assert not sent(effects, msg.Refused)
    effects = stage.take(header, C) + stage.offer(C, 40, 80) + stage.wait(10.0)
    assert merged(effects) == [(tokens(B, 0, 40), tokens(C, 40, 80))]


def test_a_contribution_that_waits_for_its_head_is_dropped_when_its_senders_connection_ends() -> None:
    """M2b."""
    stage = Stage(B, C, has_learner=False)
    header = stage.commit(tokens(C, 0, 40))
    stage.hear(B, stage.contribution(B, base=head_of(header)))
    stage.tell(ev.PeerDisconnected(B, "gone"))
    effects = stage.take(header, C) + stage.offer(C, 40, 80) + stage.wait(10.0)
    assert merged(effects) == [(tokens(C, 40, 80),)]


def test_below_the_quorum_nothing_is_merged() -> None:
    """M3a: K = 2 of three participants; one that says it has nothing does not count."""
    stage = owner(B, C, D, min_quorum=2)
    effects = stage.offer(B) + stage.offer(C, 0, 0) + stage.wait(30.0)
    assert merged(effects) == []
    assert merged(stage.offer(D) + stage.wait(5.0)) == [(tokens(B, 0, 40), tokens(D, 0, 40))]


def test_with_k_in_the_quorum_is_reached() -> None:
    """M3a: K = 2, and neither more nor fewer."""
    stage = owner(B, C, D, min_quorum=2)
    assert merged(stage.offer(B) + stage.offer(C) + stage.wait(5.0)) == [(tokens(B, 0, 40), tokens(C, 0, 40))]


def test_the_quorum_is_all_participants_if_they_are_fewer_than_k() -> None:
    """M3a: K = 3, but c only follows and d has gone."""
    stage = owner(B, C, D, min_quorum=3)
    effects = stage.offer(B) + stage.says(C, phase="following", is_participating=False)
    assert merged(effects) == []
    assert merged(stage.tell(ev.PeerDisconnected(D, "gone"))) == [(tokens(B, 0, 40),)]


def test_a_quorum_is_lost_when_more_can_contribute() -> None:
    """M4a (bounded seed 141): K = 2, and c comes while this peer waits for the first owner."""
    stage = Stage(B, owners="ba", min_quorum=2, has_learner=False)
    stage.offer(B)
    collection = stage.machine.aggregation.collections[SHARD]
    assert collection.quorum_at is not None
    stage.meet(C)
    stage.offer(B, 0, 41)
    assert collection.quorum_at is None, "the window begins with c's"
    stage.offer(C)
    assert collection.quorum_at == stage.machine.core.now


def test_who_is_on_its_way_out_and_has_nothing_for_a_shard_is_not_counted_for_its_quorum() -> None:
    """M3a: b and c each hold progress for another shard at the run's end, and would wait for each other (K = 2)."""
    stage = owner(B, C, min_quorum=2)
    effects = stage.says(C, phase="finished", is_participating=True) + stage.offer(B)
    assert merged(effects) == []
    assert merged(stage.offer(C, 0, 0)) == [(tokens(B, 0, 40),)]

    stage = owner(B, C, min_quorum=2)
    assert merged(stage.offer(B) + stage.offer(C, 0, 0)) == [], "c trains on, and may give next time"


def test_with_the_quorum_in_the_owner_merges_when_every_participant_has_answered() -> None:
    """M4a: at once; an answer without tokens is one."""
    stage = owner(B, C, grace_share=1.0, overlap=100)
    assert merged(stage.offer(B)) == []
    assert merged(stage.offer(C, 0, 0)) == [(tokens(B, 0, 40),)]


def test_the_owner_waits_for_its_own_learner_as_for_any_other() -> None:
    """M4a."""
    stage = Stage(B, owners="ab", grace_share=1.0, overlap=100)
    assert merged(stage.hear(B, stage.contribution(B))) == []
    assert merged(stage.give()) == [(tokens(A, 0, 40), tokens(B, 0, 40))]


def test_with_the_quorum_in_the_owner_merges_when_the_grace_window_is_over() -> None:
    """M4a: 0.7 x 2 steps of 0.5 s after the first contribution, if the others usually take longer than it may wait."""
    stage = owner(B, C, grace_share=0.7, overlap=2)
    stage.machine.aggregation.response_times.record(C, 10.0)
    assert merged(stage.offer(B) + stage.wait(0.69)) == []
    assert merged(stage.wait(0.02)) == [(tokens(B, 0, 40),)]


def test_for_a_peer_on_its_way_out_the_owner_waits_up_to_the_takeover_time() -> None:
    """M4c: the grace window alone would be over at once."""
    for phase in ("leaving", "finished"):
        stage = owner(B, C, grace_share=0.0)
        stage.says(C, phase=phase)
        takeover_s = stage.machine.aggregation.waits().takeover_s
        assert takeover_s > 1.0
        assert merged(stage.offer(B) + stage.wait(takeover_s - 0.01)) == []
        assert merged(stage.wait(0.02)) == [(tokens(B, 0, 40),)]


def test_for_a_peer_on_its_way_out_no_owner_waits_until_it_is_gone() -> None:
    """M4c: half of the time that it has; what waits longer than that for a silent peer is lost with its giver."""
    for times in ({"leave_s": 4.0}, {"finish_s": 4.0}):
        stage = owner(B, C, grace_share=0.0, takeover_floor_s=30.0, **times)
        stage.says(C, phase="leaving")
        assert merged(stage.offer(B) + stage.wait(1.99)) == []
        assert merged(stage.wait(0.02)) == [(tokens(B, 0, 40),)]


def test_a_shard_has_one_merge_under_way_at_a_time() -> None:
    """M5: the head moves while a merge is under way; the next begins only when that one has ended."""
    stage = owner(B)
    [first] = only(stage.offer(B), ef.Merge)
    stage.take(stage.commit(tokens(B, 0, 20)))
    assert only(stage.offer(B, 20, 40) + stage.wait(10.0), ef.Merge) == []
    ended = stage.tell(stage.end_of(first))
    assert not sent(ended, msg.Commit), "its result is dropped, since the head moved on"
    assert merged(ended) == [(tokens(B, 20, 40),)]


def test_a_merge_that_fails_late_does_not_touch_the_next_versions_contributions() -> None:
    """M5."""
    stage = owner(B)
    stage.offer(B)
    stage.take(stage.commit(tokens(B, 0, 20)))
    stage.offer(B, 20, 40)
    stage.wait(5.0)
    assert merged(stage.tell(ev.Failed("merge", SHARD, None, "the head has moved"))) == [(tokens(B, 20, 40),)]


def test_a_merge_that_fails_drops_whom_it_blames_and_merges_the_rest() -> None:
    """M5: also when the two are in the other order."""
    for culprit, other in ((B, C), (C, B)):
        stage = owner(B, C)
        stage.offer(B)
        [merge] = only(stage.offer(C) + stage.wait(5.0), ef.Merge)
        assert len(merge.contributions) == 2
        effects = stage.tell(ev.Failed("merge", SHARD, culprit, "values are not finite"))
        assert [c.contributor.learner for m in only(effects, ef.Merge) for c in m.contributions] == [life(other)]
        assert [(to, m.reason) for to, m in sent(effects, msg.Refused)] == [(culprit, "values are not finite")]


def test_a_merge_that_fails_and_blames_nobody_drops_all() -> None:
    """M5: they come again on the next round."""
    stage = owner(B, C)
    stage.offer(B)
    stage.work(stage.offer(C) + stage.wait(5.0), ef.Snapshot)
    effects = stage.tell(ev.Failed("merge", SHARD, None, "a payload is gone"))
    assert not only(effects + stage.wait(5.0), ef.Merge)
    assert stage.machine.aggregation.collections[SHARD].quorum_at is None, "the quorum is not in any more"
    assert {to for to, _ in sent(effects, msg.Refused)} == {B, C}


def test_what_this_peer_has_given_and_lost_its_learner_gives_anew() -> None:
    """M5: whoever was to merge it, and with what was trained since."""
    for stage, is_owner in ((Stage(owners="a"), True), (Stage(B, C, owners="bac"), False)):
        assert bool(only(stage.give(), ef.Merge)) == is_owner
        stage.train(2)
        if is_owner:
            assert not only(stage.tell(ev.Failed("merge", SHARD, A, "its payload is gone")), ef.Snapshot)
        effects = stage.tell(ev.Failed("give", SHARD, None, "its payload is gone"))
        again = only(stage.work(effects, ef.Snapshot), ef.Encode)
        assert [bare(encode.contributor) for encode in again] == [tokens(A, 0, 60)]


def test_the_commit_names_exactly_what_was_merged_sorted_by_learner() -> None:
    """M6a: what comes while the merge is under way is not in it."""
    stage = owner(B, C, D, grace_share=0.0, min_quorum=2)
    effects = stage.offer(C) + stage.offer(B)
    [merge] = only(effects, ef.Merge)
    stage.offer(D)
    header = sent(stage.tell(stage.end_of(merge)), msg.Commit)[0][1].header
    assert tuple(map(bare, header.contributors)) == (tokens(B, 0, 40), tokens(C, 0, 40))
    assert header.contributors == tuple(c.contributor for c in merge.contributions)
    assert (header.parent, header.version, header.tokens) == (merge.base.id, 1, 80)


def test_the_commit_goes_to_all_live_peers() -> None:
    """M6b: to those that gave nothing, too, but not to one that never beat."""
    stage = owner(B, C, D)
    stage.tell(ev.PeerConnected(PeerId("mute")))
    stage.says(D, phase="following", is_participating=False)
    commits = sent(stage.work(stage.offer(B) + stage.offer(C)), msg.Commit)
    assert [to for to, _ in commits] == [B, C, D]
    assert head_of(commits[0][1].header) == stage.head()


def test_a_newcomer_is_told_of_the_head_and_gets_no_commit() -> None:
    """M6b: it could not apply it, and its states come over the same line."""
    stage = owner(B, C)
    stage.meet(D, phase="joining", is_participating=False)
    effects = stage.work(stage.offer(B) + stage.offer(C))
    assert [to for to, _ in sent(effects, msg.Commit)] == [B, C]
    assert [(to, told.heads) for to, told in sent(effects, msg.Heads)] == [(D, (stage.head(),))]


def test_a_commit_by_others_ends_the_collection_for_its_version() -> None:
    """M1a: what was collected for the old head is not merged on the new one."""
    stage = owner(B, C, min_quorum=2)
    stage.offer(B)
    genesis: Head = stage.head()
    stage.take(commit_on(genesis, tokens(C, 0, 40)), C)
    assert merged(stage.offer(C, 40, 80) + stage.wait(10.0)) == []


def test_a_contribution_alone_opens_no_round() -> None:
    """M4e: one that comes right after the head was merged alone, before the others were told of a round."""
    stage = owner(B, C, D)
    assert merged(stage.hear(B, stage.contribution(B)) + stage.wait(0.5)) == []
    assert stage.machine.aggregation.collections[SHARD].opened_at is None
    effects = stage.announce(C, 4) + stage.hear(C, stage.contribution(C)) + stage.hear(D, stage.contribution(D))
    assert merged(effects) == [(tokens(B, 0, 40), tokens(C, 0, 40), tokens(D, 0, 40))]
    stage = owner(B, C, D)
    effects = stage.hear(B, stage.contribution(B)) + stage.hear(C, stage.contribution(C))
    assert merged(effects + stage.wait(5.0)) == [(tokens(B, 0, 40), tokens(C, 0, 40))], "two of three contribute"
    stage = owner(B, C, D)
    effects = stage.hear(B, stage.contribution(B)) + stage.wait(2.2 * stage.machine.aggregation.waits().takeover_s)
    assert merged(effects) == [(tokens(B, 0, 40),)], "an announcement may have been lost"


def test_an_owner_waits_longer_while_most_have_not_answered() -> None:
    """M4d: half of a round, however fast one of them says it is; of two, one is enough."""
    for answered in ((B,), (B, C)):
        stage = owner(B, C, D)
        stage.says(B, step_time_s=1e-9)
        stage.wait(1.0)
        effects = [effect for peer in answered for effect in stage.offer(peer)]
        wait_s = stage.machine.aggregation.waits().nearly_all_s
        assert wait_s == pytest.approx(1.0), "half of a round"
        effects += stage.wait(0.8 * wait_s)
        assert bool(merged(effects)) == (len(answered) == 2)
        assert merged(effects + stage.wait(0.4 * wait_s)) == [tuple(tokens(peer, 0, 40) for peer in answered)]
    stage = owner(B, C)
    stage.says(B, step_time_s=1e-9)
    stage.wait(1.0)
    assert merged(stage.offer(B) + stage.wait(0.3)) == [(tokens(B, 0, 40),)]
