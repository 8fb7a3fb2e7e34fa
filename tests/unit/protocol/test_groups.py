"""Rules M7 of docs/protocol.md: where many learners contribute, groups merge first.

By their keys, peers a and c are of one group of two, b and d of the other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from actors import FOUNDER, genesis
from grouped import FIRST, E, J, given, grouped, header_of
from stage import (
    SHARD,
    A,
    B,
    C,
    D,
    Stage,
    digest,
    head_of,
    merged_by,
    notes,
    only,
    run_owned,
    sent,
    tokens,
    with_payload,
)
from troupe import Member, act
from troupe import Stage as Theatre

from p2pdiloco.codec import merge
from p2pdiloco.peer.audit import ANSWER_S
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.signatures import (
    FalseContributionError,
    ForgedError,
    check_commit,
    check_group,
    signed,
    signed_group,
)
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.barred_owners import all_payloads, audited_payloads
from p2pdiloco.protocol.config import Sizes
from p2pdiloco.protocol.group_merges import group_name, merged_parts
from p2pdiloco.protocol.groups import MOST_TOGETHER, group_bits, group_of, most_members
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, digest_of, learner_id
from p2pdiloco.protocol.manifest import TensorSpec, make_layout
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import GetPayload, decode_request
from p2pdiloco.wire.request_reply import Answer

# -- who is merged with whom -------------------------------------------------------------------------------------------


def test_groups_have_half_as_many_learners_as_are_merged_together_or_more() -> None:
    """M7a: up to that many are one group."""
    assert [group_bits(n) for n in (0, 1, MOST_TOGETHER, MOST_TOGETHER + 1)] == [0, 0, 0, 1]
    assert [group_bits(n) for n in (2 * MOST_TOGETHER, 2 * MOST_TOGETHER + 1, 1024)] == [1, 2, 5]
    for learners in range(1, 5000):
        most, groups = MOST_TOGETHER, 2 ** group_bits(learners)
        assert learners <= most * groups
        assert groups == 1 or learners > most * groups / 2


def test_a_peers_key_decides_its_group() -> None:
    """M7a: more groups are halves of fewer."""
    assert [group_of(peer, 1) for peer in (A, B, C, D)] == [0, 1, 0, 1]
    peers = [PeerId(f"peer {i}") for i in range(1000)]
    assert all(group_of(peer, 3) // 2 == group_of(peer, 2) for peer in peers)
    assert all(100 < sum(group_of(peer, 3) == group for peer in peers) < 150 for group in range(8))


def test_with_few_learners_there_are_no_groups() -> None:
    """M7a, M7f: a commit with parts is not applied there, nor one without where there are groups."""
    stage = Stage(B, C, D, together=3)
    stage.take(stage.commit(*FIRST))
    one = given(stage, B, B, D)
    assert "groups" in notes(stage.hear(B, msg.Commit(header_of(stage, one))), "commit")[0]
    stage = grouped()
    flat = stage.commit(with_payload(tokens(B, 40, 80), "given"))
    assert "groups" in notes(stage.hear(B, msg.Commit(flat)), "commit")[0]


def test_a_contribution_goes_to_the_first_of_its_own_group() -> None:
    """M7b: b is first of all, but of the other group; after the takeover time it goes to the next one of the group.
    Nobody blames c: others may have what it merged, and members that blame different peers ask different ones."""
    stage = grouped(owners="bcda")
    [(collector, _)] = sent(stage.give(8), msg.Contribution)
    assert collector == C
    takeover_s = stage.machine.aggregation.waits().takeover_s
    effects = stage.wait(takeover_s + 0.1)
    assert [one.is_group for one in only(effects, ef.Merge)] in ([], [True]), "this peer is next"
    assert late_at(stage) == set()


def late_at(stage: Stage) -> set[PeerId]:
    """Return the peers that collect and own after all others."""
    return {peer for peer, weight in stage.machine.core.participation.candidates() if weight < 1.0}


def test_where_nobody_of_a_group_may_collect_its_participants_do() -> None:
    """M7b: c is gone, and this peer asks for no weight."""
    stage = grouped(B, C, D, owners="bcda", weight=0.0)
    stage.tell(ev.PeerDisconnected(C, "gone"))
    effects = stage.give(8)
    assert not sent(effects, msg.Contribution)
    [merge] = [one for one in only(effects + stage.wait(5.0), ef.Merge) if one.is_group]
    assert [c.giver for c in merge.contributions] == [A]
    for peer in (B, D):
        stage.tell(ev.PeerDisconnected(peer, "gone"))
    participation = stage.machine.core.participation
    assert participation.collectors(SHARD, 1) == participation.ranked_owners(SHARD), "nobody is left there"


def test_a_contribution_of_another_group_is_refused() -> None:
    """M7b: or one peer could be in the merges of all groups."""
    stage = grouped(has_learner=False)
    [(to, refused)] = sent(stage.hear(B, stage.contribution(B, 40, 80)), msg.Refused)
    assert (to, refused.reason) == (B, "its peer is of another group")


# -- the collector -----------------------------------------------------------------------------------------------------


def test_a_collector_merges_its_group_and_sends_the_result_to_the_owner() -> None:
    """M7c: as soon as all of the group have answered; b and d are not waited for."""
    stage = grouped(owners="badc", has_learner=False)
    effects = stage.work(stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    [merge] = only(effects, ef.Merge)
    assert merge.is_group
    assert [c.giver for c in merge.contributions] == [C]
    [(owner, contribution)] = sent(effects, msg.Contribution)
    assert owner == B
    assert contribution.group is not None
    assert contribution.contributor == msg.part_as_one(contribution.group)
    assert contribution.group.collector == A


def test_what_comes_after_a_groups_merge_is_merged_at_once_if_nobody_is_missing() -> None:
    """M7d: the owner that has the first merge gets it. A group whose learners had to finish a step before they left was
    one contribution for ten seconds."""
    stage = grouped(owners="badc", has_learner=False, grace_share=0.0)
    stage.meet(PeerId("e"))
    stage.work(stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    effects = stage.work(stage.hear(PeerId("e"), stage.contribution(PeerId("e"))), ef.Merge)
    [merge] = [one for one in only(effects, ef.Merge) if one.is_group]
    assert [c.giver for c in merge.contributions] == [C, "e"]
    assert [owner for owner, _ in sent(effects, msg.Contribution)] == [B]
    takeover_s = stage.machine.aggregation.waits().takeover_s
    assert not sent(stage.wait(takeover_s - 0.1), msg.Contribution)
    stage.wait(0.2)
    assert stage.machine.aggregation.collections[SHARD].given, "the next owner is this peer"


def test_what_comes_after_a_groups_merge_is_merged_after_a_takeover_time() -> None:
    """M7d: with the rest; the owner that has the first merge, and the next one, get it. This peer's learner is
    missing."""
    stage = grouped(owners="badc", grace_share=0.0)
    stage.meet(PeerId("e"))
    stage.work(stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    effects = stage.hear(PeerId("e"), stage.contribution(PeerId("e")))
    assert not only(effects, ef.Merge)
    takeover_s = stage.machine.aggregation.waits().takeover_s
    effects = stage.work(effects + stage.wait(takeover_s + 0.1), ef.Merge)
    [merge] = [one for one in only(effects, ef.Merge) if one.is_group]
    assert [c.giver for c in merge.contributions] == [C, "e"]
    owners = [owner for owner, one in sent(effects, msg.Contribution) if len(one.contributors) == 2]
    assert owners[0] == B
    assert owners[1:] or stage.machine.aggregation.collections[SHARD].given, "the next one is this peer"


def test_a_groups_merge_goes_to_the_next_owner_after_each_takeover_time() -> None:
    """M7d: first to one of each group; and at once if the owner is gone."""
    for is_gone in (True, False):
        stage = grouped(owners="bdac", has_learner=False, grace_share=0.0)
        effects = stage.work(stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
        assert [owner for owner, _ in sent(effects, msg.Contribution)] == [B]
        if is_gone:
            effects = stage.tell(ev.PeerDisconnected(B, "gone")) + stage.tell(ev.PeerDisconnected(D, "gone"))
            effects += stage.wait(0.8 * stage.machine.aggregation.waits().takeover_s)
        else:
            effects = stage.wait(stage.machine.aggregation.waits().takeover_s + 0.1)
        assert [group.is_group for group in only(effects, ef.Merge)] == [False], "this peer is next itself"


# -- the owner ---------------------------------------------------------------------------------------------------------


def test_an_owner_merges_the_groups_merges_once_all_groups_have_answered() -> None:
    """M7e, M7f: the commit names all contributors, and which of them are in which part."""
    stage = grouped(owners="acbd", has_learner=False)
    stage.announce(B, 8)
    effects = stage.hear(B, given(stage, B, B, D)) + stage.hear(C, stage.contribution(C, 40, 80))
    effects = stage.work(effects, ef.Merge)
    own, merge = only(effects, ef.Merge)
    assert own.is_group
    assert not merge.is_group
    assert [c.giver for c in merge.contributions] == [A, B]
    [header] = {commit.header for _, commit in sent(stage.work(effects, ef.Apply), msg.Commit)}
    assert [c.learner[0] for c in header.contributors] == ["b", "c", "d"]
    assert [(part.collector, part.members) for part in header.parts] == [(A, (1,)), (B, (0, 2))]
    assert header.groups() == tuple(c.group for c in merge.contributions)


def test_a_group_has_answered_when_nearly_all_of_it_have() -> None:
    """M7e: until then the owner waits, for longer than a collector does. It is not connected to all of them, so those
    are counted that contributed lately."""
    stage = Stage(B, C, D, run=run_owned("acbd", 2, 1), together=2, has_learner=False, grace_share=1.0)
    stage.take(stage.commit(*FIRST, tokens(J, 0, 40)))
    stage.announce(B, 8)
    stage.hear(B, given(stage, B, B))
    stage.work(stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    collection = stage.machine.aggregation.collections[SHARD]
    assert collection.answered == {group_name(0)}
    assert not collection.is_closed
    waits = stage.machine.aggregation.waits()
    assert stage.machine.aggregation.waits_for(SHARD).usual_s > waits.usual_s
    effects = stage.hear(D, given(stage, D, B, D))
    assert [c.giver for c in only(effects, ef.Merge)[0].contributions] == [A, D]


def test_for_a_group_of_which_one_leaves_the_owner_waits_until_the_next_owner_would_soon_merge() -> None:
    """M4c (seed 843): groups' merges go to the next owner after the takeover time, which then merges, too."""
    stage = Stage(B, C, D, run=run_owned("acbd", 2, 1), together=2, has_learner=False, grace_share=1.0)
    stage.take(stage.commit(*FIRST, tokens(J, 0, 40)))
    stage.says(D, phase="leaving")
    stage.announce(B, 8)
    stage.work(stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    stage.hear(B, given(stage, B, B))
    collection, takeover_s = stage.machine.aggregation.collections[SHARD], stage.machine.aggregation.waits().takeover_s
    assert collection.quorum_at is not None
    until = collection.quorum_at + 0.75 * takeover_s
    effects = stage.wait(until - stage.now - 0.02)
    assert not [merge for merge in only(effects, ef.Merge) if not merge.is_group]
    effects = stage.wait(0.04)
    assert [c.giver for c in only(effects, ef.Merge)[0].contributions] == [A, B]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_of_two_merges_with_a_contributor_in_common_the_larger_one_counts(order: tuple[int, int]) -> None:
    """M7e: whoever comes first. So nobody displaces a group's merge by one of few. Two that have none both count, and
    one that holds no more than both displaces none."""
    stage = grouped(owners="acbd", has_learner=False, grace_share=1.0)
    stage.announce(B, 8)
    given_ = stage.machine.aggregation.collections[SHARD].given
    for size in order:
        stage.hear((B, D)[size - 1], given(stage, (B, D)[size - 1], *(B, D)[:size]))
    assert [one.giver for one in given_.values()] == [D]
    stage = grouped(owners="acbd", has_learner=False, grace_share=1.0)
    stage.announce(B, 8)
    stage.hear(B, given(stage, B, B))
    stage.hear(D, given(stage, D, D))
    stage.meet(PeerId("i"))
    stage.hear(PeerId("i"), given(stage, PeerId("i"), B, D))
    given_ = stage.machine.aggregation.collections[SHARD].given
    assert sorted(one.giver for one in given_.values()) == [B, D]


def test_a_groups_merge_is_not_taken_from_another_peer_than_its_collector() -> None:
    """M7c: nor where there are no groups, nor of another group's contributions, nor of what is merged already."""
    stage = grouped(owners="acbd", has_learner=False)
    stage.announce(B, 8)
    for sender, one in (
        (D, given(stage, B, B, D)),
        (B, given(stage, B, B, D, factors=(5, 100))),
        (B, given(stage, B, B, D, factors=(100, 100))),
        (C, given(stage, C, B)),
    ):
        assert sent(stage.hear(sender, one), msg.Refused)
    old = merged_by(B, with_payload(tokens(B, 0, 40), "old"))
    one = msg.Contribution(SHARD, stage.head(), 8, msg.part_as_one(old), 100, old)
    assert sent(stage.hear(B, one), msg.Refused)
    stage = Stage(B, C, has_learner=False)
    assert sent(stage.hear(B, given(stage, B, B, C)), msg.Refused)


def test_a_merge_of_more_than_a_group_can_have_is_not_downloaded() -> None:
    """M7c: each signature in it would have to be checked."""
    stage = grouped()
    peers = [PeerId(f"b{number}") for number in range(most_members(2) + 1)]
    assert stage.machine.wants(B, given(stage, B, *peers[1:]))
    assert not stage.machine.wants(B, given(stage, B, *peers))
    assert not stage.machine.wants(D, given(stage, B, *peers[1:]))


# -- the commit --------------------------------------------------------------------------------------------------------


def test_a_commit_with_parts_is_applied() -> None:
    """M7f: its contributions count as much as its own factor and that of its part say."""
    stage = grouped(owners="bacd")
    merges = given(stage, B, B, D, factors=(100, 50)), given(stage, C, C)
    commit = header_of(stage, *merges, factors=(40, 100))
    assert commit.counted_factors == (40, 100, 20)
    assert commit.groups() == tuple(one.group for one in merges), "as their collectors signed them"
    effects = stage.take(commit)
    assert only(effects, ef.Apply)
    assert stage.head() == head_of(commit)
    stage = grouped(owners="bacd")
    wrong = header_of(stage, given(stage, B, B, D), factors=(9,))
    assert "factor" in notes(stage.hear(B, msg.Commit(wrong)), "commit")[0]
    stage = grouped(owners="bacd")
    wrong = header_of(stage, given(stage, B, B, C))
    assert "another group" in notes(stage.hear(B, msg.Commit(wrong)), "commit")[0]


def test_a_collector_has_one_part_of_a_commit() -> None:
    """M7f: parts of its own for two halves of its group would be clipped apart."""
    stage = grouped(owners="bacd")
    sound = header_of(stage, given(stage, B, B, D), given(stage, C, C))
    first, last = sound.parts
    halves = [msgspec.structs.replace(first, members=(place,)) for place in first.members]
    for parts in ((*halves, last), (last, first)):
        wrong = msgspec.structs.replace(sound, parts=parts)
        assert "sorted" in notes(stage.hear(B, msg.Commit(wrong)), "commit")[0]
    assert only(stage.take(sound), ef.Apply)


def test_parts_that_do_not_divide_the_contributors_are_not_decoded() -> None:
    """M7f: a contributor in two parts, in none, or that there is not; factors of some."""
    stage = grouped()
    header = header_of(stage, given(stage, B, B, D), given(stage, C, C))
    first, second = header.parts
    for members in ((0, 1), (0,), (0, 3), (0, 2, 2)):
        with pytest.raises(ValueError, match="divide"):
            msgspec.structs.replace(header, parts=(msgspec.structs.replace(first, members=members), second))
    with pytest.raises(ValueError, match="divide"):
        msgspec.structs.replace(header, factors=(100,))
    with pytest.raises(ValueError, match="no part"):
        msg.WrongMerge(header, b"", 2)


# -- who answers for a merge -------------------------------------------------------------------------------------------

ANN, BOB = Identity.ephemeral(), Identity.ephemeral()
RUN = RunId("run")


def signed_commit(by: Identity, collector: Identity) -> tuple[msg.CommitHeader, bytes]:
    """A commit of ``by`` with one part, whose collector has signed it."""
    mine = msg.Contributor(learner_id(by.peer_id, "1"), 0, 30, 0, 3)
    contributor = signed(by, RUN, SHARD, digest("base"), mine, digest("given"))
    group = signed_group(collector, RUN, SHARD, digest("base"), merged_by(ANN.peer_id, contributor))
    parts = merged_parts([msg.Contribution(SHARD, msg.Head(SHARD, 3, digest("base"), 90), 4, mine, 1, group)], ())
    text = {"payload": digest("payload"), "result": digest("result"), "record": digest("record"), "tokens": 120}
    header = msg.CommitHeader(shard=SHARD, version=4, parent=digest("base"), step=4, owner=by.peer_id, **parts, **text)
    return header, by.sign(msg.signed_commit_bytes(msg.commit_id(header)))


def test_a_collector_signs_its_groups_merge() -> None:
    """M7c: an owner that commits one without its signature has lied, which the commit proves."""
    header, signature = signed_commit(ANN, ANN)
    check_commit(RUN, header, signature)
    [group] = header.groups()
    check_group(RUN, SHARD, digest("base"), group)
    for forged in ({"factors": (50,)}, {"payload": b"x"}, {"collector": BOB.peer_id}):
        with pytest.raises(ForgedError):
            check_group(RUN, SHARD, digest("base"), msgspec.structs.replace(group, **forged))
    with pytest.raises(ForgedError):
        check_group(RUN, SHARD, digest("other"), group)
    header, signature = signed_commit(ANN, BOB)
    with pytest.raises(FalseContributionError) as found:
        check_commit(RUN, header, signature)
    assert found.value.proof.owner == ANN.peer_id


def test_the_merge_of_each_group_is_audited_too() -> None:
    """V5b: with the same probability, at its collector."""
    stage = grouped(owners="bacd", has_learner=False)
    audits = only(stage.take(header_of(stage, given(stage, D, B, D), given(stage, C, C)), D), ef.Audit)
    assert [(audit.part, audit.chance) for audit in audits] == [(part, audits[0].chance) for part in (-1, 0, 1)]
    header = stage.machine.core.chains[SHARD].log[-1]
    assert audited_payloads(header, 0) == {
        Digest(one.payload.hex()) for one in (*header.groups()[0].contributors, header.merged[0])
    }
    assert audited_payloads(header) == {header.payload, *(Digest(one.payload.hex()) for one in header.merged)}
    assert all_payloads(header) == audited_payloads(header) | audited_payloads(header, 0) | audited_payloads(header, 1)


def test_who_collected_a_wrong_merge_is_barred_and_not_the_owner() -> None:
    """V5d."""
    stage = grouped(owners="bacd", has_learner=False)
    stage.take(header := header_of(stage, given(stage, D, B, D), given(stage, C, C)), D)
    stage.tell(ev.Contradicted(msg.WrongMerge(header, b"", 0)))
    assert stage.machine.core.membership.owners.barred == {C}
    assert stage.machine.barred_owners.payloads(SHARD) == audited_payloads(header, 0)


def test_the_merge_of_a_collector_that_has_lied_is_refused() -> None:
    """V5d: for the next versions, too."""
    stage = grouped(owners="bacd", has_learner=False)
    stage.take(header := header_of(stage, given(stage, D, B, D), given(stage, C, C)), D)
    more = msg.GroupMerge(C, (with_payload(tokens(C, 80, 120), "more"),), bytes.fromhex(digest("merged")))
    one = msg.Contribution(SHARD, stage.head(), 12, msg.part_as_one(more), 100, more)
    stage.tell(ev.Contradicted(msg.WrongMerge(header, b"", 0)))
    stage.wait(1.0)
    [(to, refused)] = sent(stage.hear(C, one), msg.Refused)
    assert (to, refused.reason) == (C, "its collector has lied")


def test_a_collector_keeps_what_it_merged_for_auditors() -> None:
    """V5f."""
    stage = grouped(owners="bcda", has_learner=False)
    mine = given(stage, A, C)
    stage.take(header_of(stage, given(stage, B, B, D), mine), B)
    header = stage.machine.core.chains[SHARD].log[-1]
    assert header.parts[0].collector == A
    held = stage.machine.payloads(SHARD, most_bytes=1)
    assert held >= audited_payloads(header, 0)
    assert not held & (audited_payloads(header, 1) - audited_payloads(header))


def test_of_an_owner_and_a_collector_each_answers_for_itself() -> None:
    """M7d, V5d: c collects for another owner. It is forgiven for the owner's commit, and barred for its own lie."""
    stage = grouped(owners="bcda")
    stage.give(8)
    stage.wait(stage.machine.aggregation.waits().takeover_s + 0.1)
    stage.take(header := header_of(stage, given(stage, D, B, D), given(stage, C, C), owner=D), D)
    stage.wait(1.0)
    assert late_at(stage) == set()
    stage.tell(ev.Contradicted(msg.WrongMerge(header, b"", 0)))
    assert stage.machine.core.membership.owners.barred == {C}


# -- who waits for whom ------------------------------------------------------------------------------------------------


def test_a_collector_waits_for_its_group() -> None:
    """M7c: but not for a member that is gone."""
    stage = grouped(owners="badc", has_learner=False, grace_share=1.0)
    stage.meet(E)
    effects = stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80))
    assert not only(effects, ef.Merge)
    [merge] = only(stage.hear(E, stage.contribution(E)), ef.Merge)
    assert [c.giver for c in merge.contributions] == [C, E]
    stage = grouped(owners="badc", has_learner=False, grace_share=1.0)
    stage.meet(E)
    effects = stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80))
    stage.beats.pop(E)
    assert not only(effects, ef.Merge)
    [merge] = only(stage.tell(ev.PeerDisconnected(E, "gone")), ef.Merge)
    assert [c.giver for c in merge.contributions] == [C]


def test_a_commit_needs_a_quorum_of_learners_and_a_groups_merge_needs_none() -> None:
    """M7e: three learners in two parts are three."""
    stage = grouped(owners="acbd", has_learner=False, min_quorum=3)
    stage.announce(B, 8)
    effects = stage.work(stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    assert [merge.is_group for merge in only(effects, ef.Merge)] == [True]
    effects = stage.hear(B, given(stage, B, B, D))
    assert [merge.is_group for merge in only(effects, ef.Merge)] == [False]


def test_a_later_collector_sends_its_merge_to_a_later_owner() -> None:
    """M7d: if both are second, the first ones have probably failed."""
    stage = grouped(owners="bcda", has_learner=False, grace_share=0.0)
    effects = stage.announce(C, 8) + stage.hear(C, stage.contribution(C, 40, 80))
    assert not only(effects, ef.Merge), "c comes first in its group"
    effects = stage.work(stage.wait(stage.machine.aggregation.waits().takeover_s + 0.1), ef.Merge)
    assert [owner for owner, _ in sent(effects, msg.Contribution)] == [C]


def test_a_collector_keeps_what_it_has_collected_and_what_it_offers() -> None:
    """M7c: until the shard's next version."""
    stage = grouped(owners="badc", has_learner=False)
    effects = stage.announce(C, 8) + stage.hear(C, one := stage.contribution(C, 40, 80))
    assert one.payload in stage.machine.payloads(SHARD, most_bytes=1)
    [(_, offered)] = sent(stage.work(effects, ef.Merge), msg.Contribution)
    assert {one.payload, offered.payload} <= stage.machine.payloads(SHARD, most_bytes=1)
    stage.take(header_of(stage, given(stage, B, B, D)), B)
    assert not {one.payload, offered.payload} & stage.machine.payloads(SHARD, most_bytes=1)


def test_the_limit_of_a_commit_with_parts_is_that_of_its_contributors() -> None:
    """V1b: not of its collectors, who may have no learners. A group's merge has no limit."""
    stage = Stage(B, C, D, run=run_owned("acbd", 2), together=2, has_learner=False, sizes=Sizes(elements=(100,)))
    chain = stage.machine.core.chains[SHARD]
    stage.take(stage.commit(*FIRST, length=4.0, record=chain.record_after(1, FIRST, 4.0)))
    stage.announce(B, 8)
    effects = stage.hear(B, given(stage, B, B, D)) + stage.hear(C, stage.contribution(C, 40, 80))
    effects = stage.work(effects, ef.Merge)
    own, merge = only(effects, ef.Merge)
    assert own.longest == math.inf
    [header] = {commit.header for _, commit in sent(effects, msg.Commit)}
    assert merge.longest == chain.longest(header.contributors) > chain.longest(header.merged)
    assert header.longest == chain.stated_longest(header.contributors)


# -- what is checked on receipt ----------------------------------------------------------------------------------------


def test_a_groups_merge_is_verified_on_receipt() -> None:
    """M7c: the collector's signature, those of its members, and what it counts."""
    layout = make_layout((TensorSpec(name="t", shape=(8,), merge="rda", fragment=FragmentId(0)),), 1, 2**20, "rda")
    cache = PayloadCache(layout, ANN, RUN)
    mine = msg.Contributor(learner_id(ANN.peer_id, "1"), 0, 30, 0, 3)
    member = signed(ANN, RUN, SHARD, digest("base"), mine, digest("given"))
    unsigned = msgspec.structs.replace(member, signature=bytes(64))
    head, payload = msg.Head(SHARD, 3, digest("base"), 90), b"the merge of one"

    def message(member: msg.Contributor = member, by: Identity = BOB, **changes: Any) -> msg.Contribution:
        bare = msg.GroupMerge(BOB.peer_id, (member,), bytes.fromhex(digest_of(payload)))
        group = signed_group(by, RUN, SHARD, head.id, bare)
        one = msg.Contribution(SHARD, head, 4, msg.part_as_one(group), len(payload), group)
        return msgspec.structs.replace(one, **changes)

    cache.verify_contribution(memoryview(payload), message())
    more = msgspec.structs.replace(message().contributor, tokens_to=31)
    for forged in (message(by=ANN), message(unsigned), message(contributor=more)):
        with pytest.raises(ForgedError):
            cache.verify_contribution(memoryview(payload), forged)
    with pytest.raises(ForgedError):
        cache.verify_contribution(memoryview(b"other"), message())


# -- whole peers -------------------------------------------------------------------------------------------------------


def of_group(group: int) -> Identity:
    """A new peer of one of two groups."""
    return next(one for one in iter(Identity.ephemeral, None) if group_of(one.peer_id, 1) == group)


class Company:
    """Ann collects her own contributions, Bob his and Cat's. A version is owned by one of them. Dan audits all."""

    def __init__(self, folder: Path) -> None:
        self.stage = Theatre(folder, fragments=1)
        config = self.stage.manifest.config
        schedule = msgspec.structs.replace(config.schedule, together=2)
        config = msgspec.structs.replace(config, schedule=schedule)
        self.stage.manifest = msgspec.structs.replace(self.stage.manifest, config=config)

    async def meet(self) -> None:
        """All of them are there and know each other; nothing is trained."""
        stage, others = self.stage, 1 - group_of(FOUNDER.peer_id, 1)
        self.ann = await stage.found()
        self.bob = await stage.add("bob", genesis(stage.manifest), identity=of_group(others), weight=1e-6)
        self.cat = await stage.add("cat", genesis(stage.manifest), identity=of_group(others), weight=0.0)
        key = of_group(others)
        self.dan = await stage.add("dan", genesis(stage.manifest), identity=key, has_learner=False, weight=0.0)
        for member in (self.bob, self.cat):
            await stage.ready(member)
        await stage.wait(3.0)
        self.dan.draws = 0.0

    async def train(self, steps: int) -> None:
        """Inner steps of each learner. No two contributions are the same."""
        for step in range(steps):
            for member, change in ((self.ann, 1.0), (self.bob, 2.0), (self.cat, 4.0)):
                member.learner.step(change * (1.0 + step / 8))
            for member in (self.ann, self.bob, self.cat):
                await self.stage.rest(member)
            await self.stage.wait(0.5)


def lies_as_collector(member: Member) -> None:
    """From now on it puts one value of its own into each merge of its group."""
    sound = member.state.merge

    def merged(*given: Any, is_group: bool = False, **options: Any) -> Any:
        encode = merge.encode

        def changed(how: Any, values: torch.Tensor, *rest: Any) -> Any:
            values[3] += 1.0 if is_group else 0.0
            return encode(how, values, *rest)

        merge.encode = changed  # type: ignore[assignment]
        try:
            return sound(*given, is_group=is_group, **options)
        finally:
            merge.encode = encode

    member.state.merge = merged  # type: ignore[method-assign]


def payloads_asked_of(member: Member) -> set[Digest]:
    """The payloads that others ask it for from now on."""
    found, honest = set[Digest](), member.peer.answer

    async def answer(peer: PeerId, body: bytes) -> Answer:
        request = decode_request(body)
        if isinstance(request, GetPayload):
            found.add(request.payload)
        return await honest(peer, body)

    member.peer.answer = answer  # type: ignore[method-assign]
    return found


def test_whoever_made_a_merge_is_asked_for_what_it_merged(tmp_path: Path) -> None:
    """V5c: each collector for its group's contributions, whoever is the owner; all merges are right."""

    async def story() -> None:
        company = Company(tmp_path)
        async with company.stage:
            await company.meet()
            ann, bob, dan = company.ann, company.bob, company.dan
            asked = {member.id: payloads_asked_of(member) for member in (ann, bob)}
            await company.train(6)
            await company.stage.wait(ANSWER_S)
            parts = [part for header in ann.machine.core.chains[SHARD].log for part in header.groups()]
            merged = {Digest(c.payload.hex()) for part in parts if part.collector == bob.id for c in part.contributors}
            assert len(merged) >= 4
            assert asked[bob.id] >= merged
            assert not asked[ann.id] & merged
            ended = [event for event in dan.events if isinstance(event, ev.Audited)]
            assert {event.owner for event in ended} == {ann.id, bob.id}
            assert all(event.has_delivered for event in ended)
            assert not dan.machine.view.barred

    act(story)


def test_a_lying_collector_is_found_and_each_finds_it_for_itself(tmp_path: Path) -> None:
    """V5c, V5d: the owner that merged its merge is barred nowhere."""

    async def story() -> None:
        company = Company(tmp_path)
        async with company.stage:
            await company.meet()
            lies_as_collector(company.bob)
            await company.train(6)
            await company.stage.wait(ANSWER_S)
            for member in (company.ann, company.cat, company.dan):
                assert set(member.machine.view.barred) == {company.bob.id}
            assert company.dan.faults() == {"merge": 1}

    act(story)


def test_a_collector_that_gets_the_commit_after_its_auditor_is_not_blamed(tmp_path: Path) -> None:
    """V5g: it shows payloads only with a commit, and another peer may have that first."""

    async def story() -> None:
        company = Company(tmp_path)
        async with company.stage:
            await company.meet()
            stage, bob, dan = company.stage, company.bob, company.dan
            await company.train(2)
            stage.catch = lambda sender, to, message: to == bob.id and isinstance(message, msg.Commit)
            for _ in range(32):  # until Ann owns
                if not stage.caught:
                    await company.train(2)
            caught = stage.caught[0]
            stage.catch = lambda sender, to, message: False
            assert isinstance(caught.message, msg.Commit)
            assert bob.id in [part.collector for part in caught.message.header.parts]
            await stage.deliver(bob, caught.sender, caught.message, caught.payload)
            await company.train(4)
            await stage.wait(ANSWER_S)
            audited = [event for event in dan.events if isinstance(event, ev.Audited)]
            assert bob.id in {event.owner for event in audited}
            assert all(event.has_delivered for event in audited)

    act(story)
