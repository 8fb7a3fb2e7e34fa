"""Rules M7g to M7k of docs/protocol.md: in a large run a peer is connected to its group, and to some of each other one.

By their keys, peers a, c and e are of one group, b, d and j of the other.
"""

from __future__ import annotations

from itertools import count

import msgspec
import pytest
from grouped import FIRST, E, J, given, grouped, header_of
from stage import SHARD, A, B, C, D, Stage, digest, notes, only, run_owned, sent, tokens

from p2pdiloco.peer.driver import topic_of
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.commit_relay import tree_order
from p2pdiloco.protocol.data_blocks import Block, BlockLedger, EpochSlots
from p2pdiloco.protocol.groups import drawn_groups, group_of
from p2pdiloco.protocol.ids import PeerId, fingerprint

NEAR, FAR = {C, E}, {B, D, J}


def many(**changes: object) -> Stage:
    """Version 1 has merged five learners, of both groups."""
    stage = Stage(B, C, D, E, J, **{"run": run_owned("bacdej", 2, 1), "together": 3, **changes})
    stage.take(stage.commit(*FIRST, tokens(E, 0, 40), tokens(J, 0, 40)))
    assert stage.machine.core.chains[SHARD].group_bits == 1
    return stage


def told(effects: list[ef.Effect], kind: type[msg.Message]) -> set[PeerId]:
    """Return the peers to which a message of this kind goes."""
    return {to for to, _ in sent(effects, kind)}


# -- owners ------------------------------------------------------------------------------------------------------------


def test_the_first_peers_of_all_groups_own_before_the_others() -> None:
    """M7g: b and d come first of all; but after b, the first of the other group is next."""
    assert grouped(owners="bdac").machine.core.participation.ranked_owners(SHARD) == (B, A, D, C)
    for peer, rank in ((B, 0), (A, 1), (D, 0), (C, 1)):
        found = grouped(owners="bdac").machine.core.participation.rank(peer, SHARD)
        assert found == rank or peer in (A, C), "which peer of another group is its first is not known here"


def test_who_leaves_owns_nothing_while_another_of_its_group_stays() -> None:
    """O1a: of b's group, d is connected as well."""
    stage = grouped(owners="bdac")
    stage.says(B, phase="leaving")
    assert stage.machine.core.participation.ranked_owners(SHARD) == (D, A, C)


def test_a_group_that_leaves_keeps_its_turn_until_it_has_left() -> None:
    """O1a: b is all of its group that is connected here, and passes on what is for others. If a owned instead, so would
    b's group, which may not know that anybody stays: both would commit."""
    stage = grouped(B, C, owners="bdac")
    stage.says(B, phase="leaving")
    assert stage.machine.core.participation.ranked_owners(SHARD) == (B, A, C)
    stage.beats.pop(B)
    stage.hear(B, msg.Leaving("bye"))
    stage.says(C, weight=2.0)
    assert stage.machine.core.participation.ranked_owners(SHARD) == (A, C)


def test_who_leaves_with_all_of_its_group_owns_in_its_turn() -> None:
    """O1a: a, c and e leave, and b and d stay. All agree that the first of the three owns."""
    stage = many(run=run_owned("cbdeja", 2, 1))
    for peer in (C, E):
        stage.says(peer, phase="leaving")
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    stage.says(B, weight=2.0)
    assert stage.machine.core.participation.ranked_owners(SHARD)[:2] == (C, B)
    for peer in (C, E):
        stage.beats.pop(peer)
        stage.hear(peer, msg.Leaving("bye"))
    stage.says(B, weight=1.0)
    assert stage.machine.core.participation.ranked_owners(SHARD)[0] == A
    assert stage.machine.core.membership.owners.may_own


def test_who_has_left_is_not_waited_for_in_its_groups_merges() -> None:
    """M7e: d and j have left, so b's merge is all of its group, also if it came before their goodbyes."""
    for is_before in (True, False):
        stage = many(run=run_owned("cbdeja", 2, 1), has_learner=False)
        effects = stage.hear(C, given(stage, B, B)) if is_before else []
        collection = stage.machine.aggregation.collections[SHARD]
        assert not collection.answered
        for peer in (D, J):
            stage.beats.pop(peer)
            effects += stage.hear(peer, msg.Leaving("bye"))
        if not is_before:
            stage.hear(C, given(stage, B, B))
        assert len(collection.answered) == 1


def test_in_a_group_that_leaves_whoever_collects_is_asked_once() -> None:
    """M7b, O3b: none of it is a candidate. Each heartbeat let its members turn to another of them."""
    stage = many(run=run_owned("cbdeja", 2, 1))
    for peer in (C, E):
        stage.says(peer, phase="leaving")
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    effects = stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    [(first, _)] = sent(effects, msg.Contribution)
    assert first in NEAR
    stage.says(B, step_time_s=0.2)
    again = stage.says(B, weight=2.0)
    assert not sent(again, msg.Contribution)
    assert stage.machine.contributions.pending[SHARD].target == first


def test_once_all_of_a_group_leave_they_turn_to_the_same_one() -> None:
    """O3b: c was the last that seemed to stay. Those that had asked it left before e had what it merged for all."""
    stage = many(run=run_owned("ecbdja", 2, 1))
    stage.says(E, phase="leaving")
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    effects = stage.tell(ev.LearnerPaused(2, 20))
    stage.beats[C] = msgspec.structs.replace(stage.beats[C], phase="leaving")
    effects += stage.beat(C)
    assert told(stage.work(effects, ef.Snapshot, ef.Encode), msg.Contribution) == {C}
    assert told(stage.says(C, phase="leaving"), msg.Contribution) == {E}
    assert not sent(stage.says(B, weight=2.0), msg.Contribution), "no news of its own group"


@pytest.mark.parametrize("others", [(B, C), (B, C, D)])
def test_who_leaves_last_of_those_it_knows_gives_others_time(others: tuple[PeerId, ...]) -> None:
    """M4c: d may stay, and have all; a did not know when it committed alone. Not if it knows that d has left."""
    stage = grouped(*others)
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    effects = stage.work(stage.tell(ev.LearnerPaused(2, 20)), ef.Snapshot, ef.Encode)
    for peer in others:
        del stage.beats[peer]
        effects += stage.hear(peer, msg.Leaving("asked to"))
    effects = stage.work(effects + stage.wait(0.3), ef.Merge)
    is_known = D in others
    assert [one.is_group for one in only(effects, ef.Merge)] == ([True, False] if is_known else [True])
    assert is_known or only(stage.wait(stage.machine.aggregation.waits().takeover_s), ef.Merge)


def test_a_merge_is_offered_to_who_stands_for_a_group_until_its_turn_is_over() -> None:
    """M7d: b leaves, and owns for those that a is not connected to. It is no candidate, either."""
    stage = grouped(B, C, owners="bdac", has_learner=False)
    stage.says(B, phase="leaving")
    stage.announce(B, 8)
    effects = stage.work(stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    assert told(effects, msg.Contribution) == {B}
    stage.says(C, weight=2.0)
    assert not stage.machine.aggregation.collections[SHARD].given, "a owns next"
    stage.wait(stage.machine.aggregation.waits().takeover_s)
    assert stage.machine.aggregation.collections[SHARD].given


def test_who_has_left_merges_nothing_any_more() -> None:
    """C4a: a collector that all connections left, while it saved, merged what others had given it, alone."""
    stage = many(has_learner=False)
    for peer in (B, C, D, E, J):
        stage.says(peer, phase="leaving")
    stage.announce(E, 8)
    assert only(stage.tell(ev.LeaveRequested("asked to")), ef.Leave)
    effects = stage.hear(E, stage.contribution(E, 40, 80))
    for peer in (B, C, D, E, J):
        stage.beats.pop(peer)
        effects += stage.tell(ev.PeerDisconnected(peer, "silent"))
    assert not only(effects + stage.wait(2 * stage.config.takeover_ceiling_s), ef.Merge)


def test_groups_take_turns() -> None:
    """M7g: in an order that each version draws."""
    assert {drawn_groups(f"run/0/{version}", 2)[0] for version in range(50)} == {0, 1, 2, 3}
    assert all(sorted(drawn_groups(f"{i}", 3)) == list(range(8)) for i in range(20))


# -- merges for another group ------------------------------------------------------------------------------------------


def test_a_merge_that_comes_to_another_peer_of_the_owners_group_is_passed_on() -> None:
    """M7h: c owns, and b's group is not connected to it."""
    stage = grouped(owners="cabd", has_learner=False)
    one = given(stage, B, B, D)
    assert stage.machine.wants(B, one)
    effects = stage.hear(B, one)
    assert sent(effects, msg.Contribution) == [(C, one)]
    assert stage.machine.aggregation.collections[SHARD].given, "in case that it owns next"


def test_what_a_peer_of_the_own_group_passes_on_is_taken() -> None:
    """M7h: but not what a peer of another group, or a learner of this one, has of others."""
    stage = grouped(owners="acbd", has_learner=False)
    one = given(stage, B, B, D)
    assert stage.machine.wants(C, one)
    assert not sent(stage.hear(C, one), msg.Contribution)
    assert [c.giver for c in stage.machine.aggregation.collections[SHARD].given.values()] == [B]
    stage = grouped(owners="acbd", has_learner=False)
    for sender, other in ((D, one), (C, stage.contribution(E)), (C, given(stage, E, E))):
        assert not stage.machine.wants(sender, other)
        [(to, refused)] = sent(stage.hear(sender, other), msg.Refused)
        assert (to, refused.reason) == (sender, "its learner is another peer's")


def test_merges_of_two_groups_wait_side_by_side_to_be_sent() -> None:
    """M7h: a later merge of the same group takes the place of its earlier one, and a contribution that of no merge."""
    stage = grouped(owners="cabd", has_learner=False)
    one, other, later = given(stage, B, B), given(stage, D, D), given(stage, B, B, D)
    assert len({topic_of(one), topic_of(other), topic_of(stage.contribution(C))}) == 3
    assert topic_of(later) == topic_of(one)


def test_of_each_other_group_one_merge_waits_for_a_later_head() -> None:
    """M7h, P6a: whoever passes it on. So no member fills the memory with merges of many keys."""
    stage = grouped(owners="acbd", has_learner=False)
    ahead = msg.Head(SHARD, 2, given(stage, B, B).payload, 240)
    for collector in (B, D, J):
        one = given(stage, collector, collector)
        late = msg.Contribution(SHARD, ahead, 12, one.contributor, 100, one.group)
        assert stage.machine.wants(C, late)
        stage.hear(C, late)
    assert len(stage.machine.aggregation.early[SHARD]) == 1


def test_an_owner_waits_for_groups_of_which_it_knows_nobody() -> None:
    """M7e: as long as they contributed to one of the last four versions."""
    stage = Stage(C, run=run_owned("acbd", 2, 1), together=2, has_learner=False, grace_share=1.0)
    stage.take(stage.commit(*FIRST), C)
    stage.announce(C, 8)
    effects = stage.work(stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    assert [merge.is_group for merge in only(effects, ef.Merge)] == [True]
    effects = stage.hear(C, given(stage, B, B, D))
    assert [merge.is_group for merge in only(effects, ef.Merge)] == [False]
    chain = stage.machine.core.chains[SHARD]
    assert {group: len(members) for group, members in chain.recent_members().items()} == {0: 1, 1: 2}
    for version in range(2, 5):
        assert chain.head is not None
        chain.head = msg.Head(SHARD, version, chain.head.id, chain.head.tokens)
        assert (1 in chain.recent_members()) == (version < 5)
    chain.head = msg.Head(SHARD, 5, chain.head.id, chain.head.tokens)
    assert chain.recent_members() == {}


def test_a_majority_is_one_of_all_that_contributed_lately() -> None:
    """C6e: not of those that are connected. Here these are two of five."""
    stage = Stage(C, run=run_owned("acbd", 2, 1), together=2, has_learner=False, needs_majority=True, grace_share=0.0)
    stage.take(stage.commit(*FIRST, tokens(J, 0, 40)), C)
    stage.announce(C, 8)
    effects = stage.work(stage.hear(C, stage.contribution(C, 40, 80)), ef.Merge)
    effects += stage.wait(8.0)
    assert not [merge for merge in only(effects, ef.Merge) if not merge.is_group]
    effects = stage.hear(C, given(stage, B, B, D, J))
    assert [merge.is_group for merge in only(effects, ef.Merge)] == [False]


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_a_round_is_announced_to_the_group_and_to_one_peer_of_each_other_group() -> None:
    """M7i."""
    receivers = told(many().give(8), msg.Round)
    assert receivers & NEAR == NEAR
    assert len(receivers & FAR) == 1


def test_what_another_group_announces_is_passed_on_to_the_own_one() -> None:
    """M7i: once."""
    stage = many(has_learner=False)
    assert told(stage.announce(B, 8), msg.Round) == NEAR
    assert told(stage.announce(D, 8), msg.Round) == set()
    assert told(many(has_learner=False).announce(C, 8), msg.Round) == set()


# -- commits -----------------------------------------------------------------------------------------------------------


def test_a_commit_goes_to_the_own_group_and_to_one_peer_of_the_other_group() -> None:
    """M7j: that of its owner is the first in the tree of groups."""
    stage = many(has_learner=False, run=run_owned("acbdej", 2, 1))
    stage.announce(B, 8)
    effects = stage.hear(B, given(stage, B, B, D, J))
    effects += stage.hear(C, stage.contribution(C, 40, 80)) + stage.hear(E, stage.contribution(E, 40, 80))
    commits = [(to, commit.entry) for to, commit in sent(stage.work(effects, ef.Merge, ef.Apply), msg.Commit)]
    assert {(to, None) for to in NEAR} <= set(commits)
    assert len(commits) == 3


def test_a_commit_of_another_group_goes_down_the_tree_below_the_peer_that_got_it() -> None:
    """M7j: here this one, if nobody else says that it did."""
    stage = many(has_learner=False)
    header = header_of(stage, given(stage, B, B, D, J), given(stage, C, C, E))
    effects = stage.work(stage.hear(B, msg.Commit(header)), ef.Apply)
    assert sorted((to, commit.entry) for to, commit in sent(effects, msg.Commit)) == [(C, A), (E, A)]
    assert not told(effects, msg.Heads)


@pytest.mark.parametrize("place", [1, 2])
def test_a_peer_at_each_place_of_a_tree_tells_another_group(place: int) -> None:
    """M7j: so a root that keeps a commit cuts nobody off. The first one below it would tell group 0, its own."""
    stage = many(has_learner=False)
    sound = header_of(stage, given(stage, B, B, D, J), given(stage, C, C, E))
    headers = (msgspec.structs.replace(sound, payload=digest(f"merged {i}")) for i in count())
    near = tuple((peer, 1.0) for peer in (A, C, E))
    header = next(one for one in headers if tree_order(msg.commit_id(one), C, near).index(A) == place)
    effects = stage.work(stage.hear(C, msg.Commit(header, C)), ef.Apply)
    assert not told(effects, msg.Commit), "three are one level of the tree"
    assert len(told(effects, msg.Heads) & FAR) == place - 1


def test_also_few_peers_tell_all_other_groups() -> None:
    """M7j: the last peer of a group told nobody, and who was connected to it alone heard late."""
    stage = Stage(B, C, D, J, run=run_owned("bacdej", 2, 1), together=3, has_learner=False)
    stage.take(stage.commit(*FIRST, tokens(E, 0, 40), tokens(J, 0, 40)))
    sound = header_of(stage, given(stage, B, B, D, J), given(stage, C, C, E))
    headers = (msgspec.structs.replace(sound, payload=digest(f"merged {i}")) for i in count())
    bridges = stage.machine.core.participation.bridges
    header = next(one for one in headers if bridges(SHARD, msg.commit_id(one)) == {1: J})
    effects = stage.work(stage.hear(B, msg.Commit(header)) + stage.wait(6.0), ef.Apply)
    assert told(effects, msg.Heads) == {J}


def test_of_a_commit_that_was_asked_for_all_of_the_group_are_told() -> None:
    """M7j: it should have come unasked, so others may lack it, too. It is not sent, since they may have it."""
    stage = many(has_learner=False)
    header = header_of(stage, given(stage, B, B, D, J), given(stage, C, C, E))
    head = msg.Head(SHARD, 2, msg.commit_id(header), header.tokens)
    effects = stage.hear(D, msg.Heads((head,), 0)) + stage.wait(3.0)
    assert told(effects, msg.CommitsRequest) == {D}
    effects = stage.work(stage.hear(D, msg.Commit(header)), ef.Apply)
    assert not told(effects, msg.Commit)
    assert told(effects, msg.Heads) & NEAR == NEAR


def test_a_commit_that_others_of_the_group_have_begins_no_second_tree() -> None:
    """M7j: another one of the group got it before."""
    stage = many(has_learner=False)
    header = header_of(stage, given(stage, B, B, D, J), given(stage, C, C, E))
    stage.hear(C, msg.Heads((msg.Head(SHARD, 2, msg.commit_id(header), header.tokens),), 0))
    effects = stage.work(stage.hear(B, msg.Commit(header)), ef.Apply)
    assert not told(effects, msg.Commit)


def test_bridges_have_no_slow_lines_if_others_are_there() -> None:
    """M7j: what is sent to a group leaves its bridge's line four times."""
    stage = many(has_learner=False)
    participation = stage.machine.core.participation
    assert {participation.bridges(SHARD, str(i))[1] for i in range(50)} == FAR
    stage.says(B, weight=0.5)
    stage.says(C, weight=0.5)
    assert {participation.bridges(SHARD, str(i))[1] for i in range(50)} == FAR - {B}
    for peer in (D, J):
        stage.says(peer, weight=0.5)
    assert {participation.bridges(SHARD, str(i))[1] for i in range(50)} == FAR


# -- who is there ------------------------------------------------------------------------------------------------------


def test_heartbeats_list_the_own_group() -> None:
    """M7k: and who is of another group is not only heard by others."""
    stage = many(has_learner=False)
    stage.wait(3.0)
    membership = stage.machine.core.membership
    assert membership.connectivity.lists[A] == {fingerprint(peer) for peer in NEAR}
    assert stage.machine.view.heard_by_others == frozenset()
    stage.says(
        C, hears=b"".join(fingerprint(peer).to_bytes(4, "big") for peer in sorted((A, B, D, E), key=fingerprint))
    )
    assert membership.connectivity.indirect == frozenset(), "b and d are connected"


def test_the_loss_of_most_of_those_that_are_connected_is_told() -> None:
    """C6a: of whatever group they are. Half of the own group is not most."""
    stage = many(has_learner=False)
    stage.wait(3.0)
    found: list[str] = []
    for peer, apart in ((C, 0), (E, 0), (B, 1)):
        stage.beats.pop(peer)
        found += notes(stage.tell(ev.PeerDisconnected(peer, "gone")) + stage.wait(0.1), "apart")
        assert len(found) == apart


# -- data --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "groups"), [(64, 4), (100, 8), (7, 4), (3, 8)])
def test_groups_train_different_blocks(blocks: int, groups: int) -> None:
    """D2a: peers of two groups do not know what the others take; all blocks of an epoch belong to one."""

    def slots(_epoch: int) -> EpochSlots:
        return EpochSlots(range(64), (), 0.4)

    taken: dict[int, set[Block]] = {}
    for group in range(groups):
        ledger, mine = BlockLedger(blocks), set[Block]()
        for _ in range(len(range(group, blocks, groups))):
            block = ledger.next_free(mine, slots, group, groups)
            assert block is not None
            mine.add(block)
        taken[group] = mine
    assert sorted(block for mine in taken.values() for block in mine) == list(range(blocks))


def test_more_groups_divide_the_peers_further() -> None:
    """M7a."""
    assert [group_of(peer, 1) for peer in (A, C, E, B, D, J)] == [0, 0, 0, 1, 1, 1]
