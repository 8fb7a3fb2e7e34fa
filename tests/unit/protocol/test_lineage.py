"""Rules H of docs/protocol.md: whose word a state needs before it is taken."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from stage import SHARD, STEP_S, A, B, C, D, Stage, commit_on, digest, head_of, notes, only, sent, tokens

from p2pdiloco.peer.signatures import signed
from p2pdiloco.peer.state_proof import check_lineage
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.connectivity import listed
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId, fingerprint, learner_id
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, commit_id
from p2pdiloco.protocol.state_acceptance import FAR_REQUESTS
from p2pdiloco.transport.identity import Identity
from p2pdiloco.wire.control_messages import SignedCommit
from tests.machine_sim.scenarios import base_config

RUN = RunId("run")
ANN, EVE = Identity.ephemeral(), Identity.ephemeral()


# -- what travels ------------------------------------------------------------------------------------------------------


def line(length: int, by: Identity = ANN) -> list[SignedCommit]:
    """Commits that follow each other, 40 tokens each."""
    found, head = list[SignedCommit](), Head(SHARD, 3, digest("base"), 90)
    for number in range(length):
        mine = Contributor(learner_id(ANN.peer_id, "1"), 40 * number, 40 * number + 40, 4 * number, 4 * number + 4)
        given = signed(by, RUN, SHARD, head.id, mine, digest("payload"))
        header = commit_on(head, given, owner=ANN.peer_id)
        found.append(SignedCommit(header, ANN.sign(messages.signed_commit_bytes(commit_id(header)))))
        head = head_of(header)
    return found


def ours(header: CommitHeader, **changes: Any) -> SignedCommit:
    """Another commit in its place, signed by its owner."""
    changed = msgspec.structs.replace(header, **changes)
    return SignedCommit(changed, ANN.sign(messages.signed_commit_bytes(commit_id(changed))))


def test_a_lineage_is_an_unbroken_line_of_signed_commits() -> None:
    """H1a."""
    *earlier, head = line(5)
    check_lineage(RUN, head.header, earlier)
    check_lineage(RUN, head.header, [])
    check_lineage(RUN, None, [])
    others = line(5, by=EVE)
    for lineage, reason in (
        (earlier[:-1], "broken"),
        (earlier[:1] + earlier[2:], "broken"),
        (earlier[::-1], "broken"),
        ([*earlier, head], "broken"),
        ([*earlier[:-1], msgspec.structs.replace(earlier[-1], signature=bytes(64))], "owner's signature"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_lineage(RUN, head.header, lineage)
    with pytest.raises(ValueError, match="broken at version"):
        check_lineage(RUN, None, earlier)
    with pytest.raises(ValueError, match="its peer's signature"):
        check_lineage(RUN, others[-1].header, others[:-1])
    with pytest.raises(ValueError, match="its peer's signature"):
        check_lineage(RunId("another"), head.header, earlier)


def test_a_lineage_weighs_what_was_given() -> None:
    """H1a, M7f: whatever its owners sign, also of parts."""
    first, second = line(2)
    part = msg.Part(ANN.peer_id, b"", b"", (0,), 25)
    check_lineage(RUN, ours(second.header, parts=(part,), tokens=second.header.tokens - 30).header, [first])
    with pytest.raises(ValueError, match="counts tokens that nobody contributed"):
        check_lineage(RUN, ours(second.header, parts=(part,)).header, [first])
    heavier = ours(second.header, tokens=second.header.tokens + 1)
    with pytest.raises(ValueError, match="version 5 of shard 0 counts tokens that nobody contributed"):
        check_lineage(RUN, heavier.header, [first])
    weighed = ours(second.header, factors=(25,), tokens=second.header.tokens - 30)
    check_lineage(RUN, weighed.header, [first])
    with pytest.raises(ValueError, match="counts tokens that nobody contributed"):
        check_lineage(RUN, ours(second.header, factors=(25,)).header, [first])
    with pytest.raises(ValueError, match="one factor for each contributor"):
        check_lineage(RUN, ours(second.header, factors=(25, 25)).header, [first])
    (given,) = second.header.contributors
    again = msgspec.structs.replace(given, learner=learner_id(ANN.peer_id, "2"), payload=b"", signature=b"")
    again = signed(ANN, RUN, SHARD, second.header.parent, again, digest("payload"))
    both = ours(second.header, contributors=(given, again), tokens=second.header.tokens + 40)
    with pytest.raises(ValueError, match="two learners of one peer"):
        check_lineage(RUN, both.header, [first])
    skipping = ours(second.header, version=7)
    with pytest.raises(ValueError, match="broken"):
        check_lineage(RUN, skipping.header, [first])
    elsewhere = ours(second.header, shard=ShardId(1))
    with pytest.raises(ValueError, match="broken"):
        check_lineage(RUN, elsewhere.header, [first])


# -- newcomers ---------------------------------------------------------------------------------------------------------


HONEST = tuple(Head(SHARD, 7 + i, digest(f"honest {i}"), 700 + 100 * i) for i in range(3))
NOBODY = PeerId("")
ROUND_S = STEP_S * base_config().sync_every
"""Time between two versions of a shard, with the stage's learners."""
FORGED = Head(SHARD, 5000, digest("forged"), 10**6)


def newcomer(*others: PeerId, **changes: Any) -> Stage:
    return Stage(*others, is_founder=False, has_learner=False, **changes)


def bring(stage: Stage, head: Head, *lineage: Digest, by: PeerId = B, owner: PeerId = NOBODY) -> list[ef.Effect]:
    """A state is there, with a lineage that was checked."""
    return stage.work(stage.tell(ev.Fetched(by, ev.ShardState(head, 4, ()), lineage, owner)))


def test_a_newcomer_takes_what_more_than_half_stand_by() -> None:
    """H2a: heads that moved on meanwhile lie in the lineage of those who moved on."""
    stage = newcomer(B, C, D)
    stage.hear(B, msg.Heads((FORGED,), 0))
    for peer, head in ((C, HONEST[0]), (D, HONEST[1])):
        stage.hear(peer, msg.Heads((head,), 0))
    effects = bring(stage, FORGED)
    assert stage.machine.view.known_heads == ()
    assert "1 of 3 peers stand by it" in notes(effects, "fetch")[0]
    bring(stage, HONEST[2], HONEST[0].id, by=C)
    assert stage.machine.view.known_heads == (), "C's word alone"
    bring(stage, HONEST[2], HONEST[0].id, HONEST[1].id, by=C)
    assert stage.machine.view.known_heads == (HONEST[2],)


def test_where_for_long_most_stand_by_nothing_a_newcomer_takes_what_as_many_stand_by_as_by_any_other() -> None:
    """H2d: three parts that only this peer can join (seed 49 of the scenario meshes). Not before, and not what one of
    three says while two agree."""
    stage = newcomer(B, C, D)
    for peer, head in zip((B, C, D), HONEST, strict=True):
        stage.hear(peer, msg.Heads((head,), 0))
    bring(stage, HONEST[0])
    stage.wait(2 * stage.config.request_s - 0.5)
    bring(stage, HONEST[0])
    assert stage.machine.view.known_heads == ()
    stage.wait(0.6)
    stage.hear(D, msg.Heads((HONEST[1],), 0))
    bring(stage, FORGED)
    bring(stage, HONEST[0])
    assert stage.machine.view.known_heads == (), "c and d stand by another"
    for head in (HONEST[2], FORGED):
        stage.hear(D, msg.Heads((head,), 0))
    bring(stage, HONEST[0], owner=B)
    assert stage.machine.view.known_heads == (HONEST[0],)


def test_what_a_peer_commits_itself_tells_of_its_head() -> None:
    """H2c: and of the one before; what it hands on tells nothing (seed 6004320)."""
    stage = newcomer(B, C)
    child = commit_on(HONEST[0], tokens(C, 0, 40), owner=C)
    stage.hear(B, msg.Heads((HONEST[0],), 0))
    assert not only(stage.hear(B, msg.Commit(child)), ef.Fetch), "handed on"
    assert only(stage.hear(C, msg.Commit(child)), ef.Fetch)
    bring(stage, HONEST[0])
    assert stage.machine.view.known_heads == (head_of(child),), "and the commit that waited is applied"


def test_between_as_many_on_each_side_the_founders_word_decides() -> None:
    """H2a, H2d: one liar beside one honest donor neither keeps a newcomer out nor brings it to another model."""
    for donors in ((B, C), (C, B)):
        stage = newcomer(*donors, founder=B)
        for peer, head in ((C, FORGED), (B, HONEST[0])):
            stage.hear(peer, msg.Heads((head,), 0))
        bring(stage, FORGED, by=C)
        stage.wait(4 * stage.config.request_s)
        bring(stage, FORGED, by=C)
        assert stage.machine.view.known_heads == (), "not even after a while"
        at_once = newcomer(*donors, founder=B)
        for peer, head in ((C, FORGED), (B, HONEST[0])):
            at_once.hear(peer, msg.Heads((head,), 0))
        bring(at_once, HONEST[0], by=B)
        assert at_once.machine.view.known_heads == (HONEST[0],)
    alone = newcomer(B, C, D, founder=B)
    for peer, head in ((B, FORGED), (C, HONEST[0]), (D, HONEST[0])):
        alone.hear(peer, msg.Heads((head,), 0))
    bring(alone, FORGED, by=B)
    assert alone.machine.view.known_heads == (), "more than half know better than the founder"
    bring(alone, HONEST[0], by=C)
    assert alone.machine.view.known_heads == (HONEST[0],)


def telling(*heads: tuple[PeerId, Head], **changes: Any) -> Stage:
    """A newcomer that was told of these."""
    stage = newcomer(*(peer for peer, _ in heads), **changes)
    for peer, head in heads:
        stage.hear(peer, msg.Heads((head,), 0))
    return stage


def test_where_a_run_has_fallen_apart_the_founders_part_is_asked_for() -> None:
    """H2d: as seed 384 of the scenario meshes, in which the founder's part was never asked, and no other taken."""
    two, three = Head(SHARD, 9, digest("two"), 910), Head(SHARD, 9, digest("three"), 920)
    e, founder = PeerId("e"), PeerId("f")
    stage = telling((B, two), (C, two), (D, three), (e, three), (founder, HONEST[0]), founder=founder)
    assert [fetch.peer for fetch in only(bring(stage, two, by=B), ef.Fetch)] == [founder]
    stage.wait(2 * stage.config.request_s + 0.1)
    bring(stage, two, by=C)
    assert stage.machine.view.known_heads == ()
    bring(stage, HONEST[0], by=founder)
    assert stage.machine.view.known_heads == (HONEST[0],)


def test_while_the_founder_may_come_two_besides_its_maker_must_have_a_head() -> None:
    """H2f: a liar that came first (seed 10200121), or two. After a while the founder is not waited for, nor where it is
    long ago that it brought version 0."""
    young, old = tuple(digest(f"version {i}") for i in range(7)), (digest("parent"),)
    for others in (), (C,):
        stage = telling(*((peer, HONEST[0]) for peer in (B, *others)), founder=D)
        effects = bring(stage, HONEST[0], *young, owner=B, by=(B, *others)[-1])
        assert "the founder may come" in notes(effects, "fetch")[0]
        stage.wait(stage.config.request_s - 0.5)
        bring(stage, HONEST[0], *young, owner=B)
        assert stage.machine.view.known_heads == ()
        stage.wait(0.6)
        bring(stage, HONEST[0], *young, owner=B, by=(B, *others)[-1])
        assert stage.machine.view.known_heads == (HONEST[0],), "it has not come"
    for lineage, founder, owner in ((old, D, B), (young, D, D), (young, B, B), (young, A, B), (young, NOBODY, B)):
        stage = telling((B, HONEST[0]), founder=founder)
        bring(stage, HONEST[0], *lineage, owner=owner)
        assert stage.machine.view.known_heads == (HONEST[0],), "at once"
    stage = telling((B, HONEST[0]), (C, HONEST[0]), (PeerId("e"), HONEST[0]), founder=D)
    bring(stage, HONEST[0], *young, owner=B)
    assert stage.machine.view.known_heads == (HONEST[0],), "two others have it"


def test_a_young_runs_newcomer_waits_longer_while_others_hear_somebody() -> None:
    """H2f: of a liar and one that vouches for it (seed 10205900), while others were heard that came late. For a while:
    whom they say they hear may never come."""
    young = tuple(digest(f"version {i}") for i in range(7))
    for others in (), (C,):
        stage = telling(*((peer, HONEST[0]) for peer in (B, *others)), founder=D)
        stage.says(B, hears=listed(map(fingerprint, (A, PeerId("e")))))
        bring(stage, HONEST[0], *young, owner=B, by=(B, *others)[-1])
        stage.wait(FAR_REQUESTS * stage.config.request_s - 0.5)
        effects = bring(stage, HONEST[0], *young, owner=B, by=(B, *others)[-1])
        assert "the founder may come" in notes(effects, "fetch")[0]
        stage.wait(0.6)
        bring(stage, HONEST[0], *young, owner=B, by=(B, *others)[-1])
        assert stage.machine.view.known_heads == (HONEST[0],)


def test_a_commit_is_not_taken_at_its_makers_word_alone() -> None:
    """H2g: what lies before it others have signed, so they stand by it, and have perhaps refused the commit."""
    before, head = HONEST[0], HONEST[1]
    stage = telling((B, head), (C, before), (D, before))
    for _ in range(2):
        effects = bring(stage, head, before.id, owner=B)
        assert "only its maker" in notes(effects, "fetch")[0]
        assert {to for to, _ in sent(effects, msg.HeadsRequest)} == {C, D}
        assert stage.machine.view.known_heads == ()
        stage.wait(3 * stage.config.request_s)
    bring(stage, head, before.id, by=C, owner=B)
    assert stage.machine.view.known_heads == (head,), (
        "c hands it over, so it has taken it, and no other is more frequent"
    )
    stage = telling((B, head), (C, before), (D, before))
    bring(stage, head, before.id, owner=B)
    stage.hear(D, msg.Heads((head,), 0))
    stage.wait(stage.config.request_s + 0.1)
    bring(stage, head, before.id, owner=B)
    assert stage.machine.view.known_heads == (head,), "d has told of it"


def test_what_few_have_is_taken_after_a_while_if_no_more_have_another() -> None:
    """H2g: without the founder. A word is not taken back by who goes on."""
    before, head, other, e = HONEST[0], HONEST[1], HONEST[2], PeerId("e")
    for rival in before, other:
        stage = telling((B, head), (C, before), (D, before), (e, before))
        for peer in D, e:
            stage.hear(peer, msg.Heads((rival,), 0))
        for wait_s in (stage.config.request_s - 0.5, 0.6):
            effects = bring(stage, head, before.id, by=C, owner=B)
            assert "1 of 3 peers besides its maker have it" in notes(effects, "fetch")[0]
            assert stage.machine.view.known_heads == ()
            stage.wait(wait_s)
        bring(stage, head, before.id, by=C, owner=B)
        assert stage.machine.view.known_heads == (head,)
    stage = telling((B, head), (C, before), (D, before), (e, before), (PeerId("f"), before))
    stage.hear(C, msg.Heads((head,), 0))
    for _ in range(3):
        bring(stage, head, before.id, by=C, owner=B)
        assert stage.machine.view.known_heads == (), "three have another"
        stage.wait(3 * stage.config.request_s)
    stage = telling((B, head), (C, before), (D, before), (e, before), (PeerId("f"), before))
    for peer in (D, e):
        stage.hear(peer, msg.Heads((head,), 0))
        stage.hear(peer, msg.Heads((other,), 0))
    bring(stage, head, before.id, by=C, owner=B)
    assert stage.machine.view.known_heads == (head,), "d and e had it"


def test_where_the_founder_is_there_a_newcomer_takes_what_it_or_most_have() -> None:
    """H2h: two liars beside it bring a newcomer to nothing that it has refused (seed 10204377), for however long."""
    before, head = HONEST[0], HONEST[1]
    stage = telling((D, before), (B, head), (C, before), founder=D)
    for _ in range(3):
        effects = bring(stage, head, before.id, by=C, owner=B)
        assert "1 of 2 peers besides its maker have it, and the founder does not" in notes(effects, "fetch")[0]
        assert stage.machine.view.known_heads == ()
        stage.wait(3 * stage.config.request_s)
    for told in ((D, head), (B, head), (C, before)), ((D, before), (B, head), (C, head), (PeerId("e"), head)):
        stage = telling(*told, founder=D)
        bring(stage, head, before.id, by=C, owner=B)
        assert stage.machine.view.known_heads == (head,)
    stage = telling((D, before), (B, head), (C, before), founder=D)
    bring(stage, head, before.id, by=D, owner=B)
    assert stage.machine.view.known_heads == (head,), "the founder hands it over"


def test_beside_the_founder_makers_of_heads_are_not_believed_in_a_divided_run() -> None:
    """H2h: two liars wait until honest peers have told of so many heads that none has most."""
    before, head = HONEST[0], HONEST[1]
    rest = tuple((PeerId(name), Head(SHARD, 9, digest(name), 900)) for name in "efgh")
    stage = telling((D, before), (B, head), (C, head), *rest, founder=D)
    for _ in range(3):
        bring(stage, head, before.id, by=C, owner=B)
        assert stage.machine.view.known_heads == ()
        stage.wait(3 * stage.config.request_s)
    bring(stage, before, by=D)
    assert stage.machine.view.known_heads == (before,)


def test_who_is_in_doubt_asks_all_others_once_a_heartbeat() -> None:
    """H2i: what was told is old while a run is fast."""
    stage = telling((B, FORGED), (C, HONEST[0]), (D, HONEST[1]))
    stage.wait(2.0)
    assert {to for to, _ in sent(bring(stage, FORGED), msg.HeadsRequest)} == {C, D}
    assert not sent(bring(stage, HONEST[0], by=C), msg.HeadsRequest)
    stage.wait(2.0)
    assert {to for to, _ in sent(bring(stage, HONEST[0], by=C), msg.HeadsRequest)} == {B, D}


def test_what_a_proved_liar_made_is_taken_only_if_most_others_have_it() -> None:
    """H2h: for however long."""
    before = HONEST[0]
    first, second = (commit_on(before, tokens(B, 0, end), owner=B) for end in (10, 20))
    stage = telling((B, head_of(first)), (C, before), (D, before))
    stage.tell(ev.Contradicted(msg.Equivocation(first, second, b"", b"")))
    bring(stage, head_of(first), before.id, by=C, owner=B)
    stage.wait(3 * stage.config.request_s)
    bring(stage, head_of(first), before.id, by=C, owner=B)
    assert stage.machine.view.known_heads == ()
    stage.hear(D, msg.Heads((head_of(first),), 0))
    bring(stage, head_of(first), before.id, by=C, owner=B)
    assert stage.machine.view.known_heads == (head_of(first),)


def test_what_a_proved_liar_made_waits_for_the_founder_as_others_do() -> None:
    """H2f: though most of those who are there have it, who is one that vouches for it (seed 575 of early-liars)."""
    first, second = (commit_on(HONEST[0], tokens(B, 0, end), owner=B) for end in (10, 20))
    head, young = head_of(first), tuple(digest(f"version {i}") for i in range(head_of(first).version))
    stage = telling((C, head), founder=D)
    stage.tell(ev.Contradicted(msg.Equivocation(first, second, b"", b"")))
    effects = bring(stage, head, *young, by=C, owner=B)
    assert "the founder may come" in notes(effects, "fetch")[0]
    stage.wait(stage.config.request_s + 0.1)
    bring(stage, head, *young, by=C, owner=B)
    assert stage.machine.view.known_heads == (head,)


def test_a_newcomer_fetches_nothing_before_more_than_half_have_told_of_their_heads() -> None:
    """H2b: of those who have states; it goes on asking, and a head that was told just before counts, too."""
    stage = newcomer(B, C, D)
    stage.says(D, phase="joining")
    assert not only(stage.hear(B, msg.Heads((FORGED,), 0)) + stage.wait(3.0), ef.Fetch)
    assert {to for to, _ in sent(stage.wait(3.0), msg.HeadsRequest)} >= {B, C}
    assert only(stage.hear(C, msg.Heads((HONEST[0],), 0)), ef.Fetch)
    stage.hear(C, msg.Heads((HONEST[1],), 0))
    stage.hear(B, msg.Heads((HONEST[0],), 0))
    bring(stage, HONEST[0])
    assert stage.machine.view.known_heads == (HONEST[0],)


# -- who has a state ---------------------------------------------------------------------------------------------------


def settled(*others: PeerId) -> tuple[Stage, Head]:
    """Peer a at version 1, and its head before."""
    stage = Stage(*others, has_learner=False)
    before = stage.head()
    stage.take(stage.commit(tokens(C, 0, 40)), C)
    return stage, before


def test_a_heavier_fork_is_taken_if_learners_can_have_made_it_meanwhile() -> None:
    """H3a: one member alone makes as many versions as it likes. Versions before this peer came took a round each."""
    for rounds, versions, is_taken in ((2.1, 2, True), (2.1, 3, False), (4.1, 5, True), (4.1, 6, False)):
        stage, _ = settled(B, C)
        left = stage.head().id
        stage.wait(rounds * ROUND_S)
        stage.take(stage.commit(tokens(C, 40, 80)), C)
        for peer in (B, C):
            stage.hear(peer, msg.Heads((stage.head(),), 0))
        fork = Head(SHARD, 1 + versions, digest("fork"), 10**6)
        effects = bring(stage, fork, left)
        assert (stage.head() == fork) == is_taken, (rounds, versions)
        assert is_taken == (not any("than learners can have made" in note for note in notes(effects, "fetch")))
    stage, _ = settled(B, C)
    far = Head(SHARD, 20, digest("far"), 10**4)
    for peer in (B, C):
        stage.hear(peer, msg.Heads((far,), 0))
    bring(stage, far, stage.head().id, digest("far back"))
    assert stage.head() == far
    for peer in (B, C):
        stage.hear(peer, msg.Heads((far,), 0))
    stage.wait(1.1 * ROUND_S)
    for peer in (B, C):
        stage.hear(peer, msg.Heads((far,), 0))
    for versions, is_taken in ((3, False), (2, True)):
        fork = Head(SHARD, 19 + versions, digest(f"fork of {versions}"), 10**6)
        bring(stage, fork, digest("far back"))
        assert (stage.head() == fork) == is_taken, versions


def test_a_state_whose_commits_follow_our_head_is_not_taken_while_more_than_half_stand_by_it() -> None:
    """H3b: its owner alone vouches for it. The commits would show what was merged; most others have got them."""
    stage, _ = settled(B, C, D)
    ours = stage.head()
    for peer in (C, D):
        stage.hear(peer, msg.Heads((ours,), 0))
    made_up = Head(SHARD, 2, digest("made up"), ours.tokens + 40)
    stage.hear(B, msg.Heads((made_up,), 0))
    effects = bring(stage, made_up, ours.id)
    assert stage.head() == ours
    assert "its commits follow our head, and 3 of 4 peers stand by ours" in notes(effects, "fetch")[0]
    for peer in (C, D):
        stage.hear(peer, msg.Heads((made_up,), 0))
    stage.wait(stage.config.request_s)
    bring(stage, made_up, ours.id)
    assert stage.head() == made_up


def test_a_state_that_follows_our_head_is_taken_if_nothing_else_comes_for_long() -> None:
    """H3a: its commits have left all logs, and others hear other peers."""
    stage, _ = settled(B, C, D)
    ours = stage.head()
    later = Head(SHARD, 3, digest("later"), ours.tokens + 80)
    for rounds, is_taken in ((2.9, False), (0.2, True)):
        stage.wait(rounds * ROUND_S)
        for peer in (C, D):
            stage.hear(peer, msg.Heads((ours,), 0))
        bring(stage, later, ours.id)
        assert (stage.head() == later) == is_taken, rounds


def test_who_is_left_by_most_follows_their_lighter_chain_in_the_end() -> None:
    """H3f: if they go on with it. Their heads say nothing while they stand still: they may be far behind."""
    for is_moving in (True, False):
        stage, _ = settled(B, C, D)
        common = stage.head().id
        stage.take(stage.commit(tokens(C, 40, 80)), C)
        fetched, before, fork = list[ef.Fetch](), common, stage.head()
        for second in range(2 * int(stage.config.request_s) + 2):
            if is_moving or not second:
                before, fork = fork.id, Head(SHARD, 2 + second, digest(f"fork {second}"), 41 + second)
            for peer in (B, C, D):
                fetched += only(stage.announce(peer, 8, fork), ef.Fetch)
            stage.wait(1.0)
        assert bool(fetched) == is_moving
        bring(stage, fork, common, before)
        assert (stage.head() == fork) == is_moving


def test_who_is_left_by_most_follows_their_heads_when_nobody_announces_rounds_any_more() -> None:
    """H3f: at the end of a run, for one. It does not tell them of its heavier head again for each of theirs."""
    stage, _ = settled(B, C, D)
    common = stage.head().id
    stage.take(stage.commit(tokens(C, 40, 80)), C)
    forks = [Head(SHARD, 2 + number, digest(f"fork {number}"), 41 + number) for number in range(2)]
    for peer in (B, C, D):
        stage.announce(peer, 8, forks[0])
    fetched, told = list[ef.Fetch](), list[msg.Heads]()
    for _ in range(2 * int(stage.config.request_s) + 2):
        stage.wait(1.0)
        for peer in (B, C, D):
            effects = stage.hear(peer, msg.Heads((forks[1],), 0))
            fetched += only(effects, ef.Fetch)
            told += sent(effects, msg.Heads)
    assert fetched
    assert not told
    bring(stage, forks[1], common, forks[0].id)
    assert stage.head() == forks[1]


def test_a_state_that_leads_to_nothing_we_know_is_not_taken_while_more_than_half_stand_by_ours() -> None:
    """H3b: this peer is one of them. Who offered it is left alone for a while, and offers in vain."""
    stage, _ = settled(B, C)
    stage.announce(C, 8, stage.head())
    stage.hear(B, msg.Heads((FORGED,), 0))
    ours = stage.head()
    effects = bring(stage, FORGED, digest("nothing that anybody knows"))
    assert stage.head() == ours
    assert "2 of 3 peers stand" in notes(effects, "fetch")[0]
    stage.announce(B, 12, FORGED)
    assert not sent(stage.wait(2.0), msg.CommitsRequest)
    stage.wait(stage.config.request_s)
    stage.announce(B, 16, FORGED)
    assert sent(stage.wait(2.0), msg.CommitsRequest)


def test_peers_that_are_a_version_ahead_of_ours_stand_by_ours() -> None:
    """H3b: their next commit is on its way here. Who has moved to the state that is offered does not."""
    stage, _ = settled(B, C, D)
    ours = stage.head()
    for peer in (C, D):
        stage.hear(peer, msg.Heads((ours,), 0))
        stage.hear(peer, msg.Heads((Head(SHARD, ours.version + 1, digest("next"), ours.tokens + 80),), 0))
    stage.hear(B, msg.Heads((FORGED,), 0))
    effects = bring(stage, FORGED, digest("nothing that anybody knows"))
    assert stage.head() == ours
    assert "3 of 4 peers stand" in notes(effects, "fetch")[0]
    for peer in (C, D):
        stage.hear(peer, msg.Heads((ours,), 0))
        stage.hear(peer, msg.Heads((FORGED,), 0))
    stage.wait(stage.config.request_s)
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((ours,), 0))
        stage.hear(peer, msg.Heads((FORGED,), 0))
    bring(stage, FORGED, digest("nothing that anybody knows"))
    assert stage.head() == FORGED


def test_who_is_versions_behind_does_not_take_what_one_member_stands_by() -> None:
    """H3b: more of the others are at one later head, which leads on from ours for all that is known here."""
    stage, _ = settled(B, C, D)
    ours = stage.head()
    ahead = [Head(SHARD, ours.version + n, digest(f"ahead {n}"), ours.tokens + 80 * n) for n in (2, 3)]
    for _ in range(int(3 * stage.config.request_s)):
        stage.wait(1.0)
        stage.hear(B, msg.Heads((FORGED,), 0))
        for peer, heads in ((C, ahead[:1]), (D, ahead)):
            for head in heads:
                stage.hear(peer, msg.Heads((head,), 0))
        effects = bring(stage, FORGED, digest("nothing that anybody knows"))
        assert stage.head() == ours
        assert "1 of 4 peers stand by ours, 1 by it" in notes(effects, "fetch")[0]


def test_what_as_many_stand_by_as_by_ours_is_taken_after_a_while() -> None:
    """H3b: the other half does so, or is at a head that this peer is about to hear of."""
    for is_behind in (True, False):
        stage, _ = settled(B, C)
        ours, ahead = stage.head(), Head(SHARD, 3, digest("ahead"), 120)
        taken_s = 0
        while stage.head() == ours and taken_s < 5 * stage.config.request_s:
            taken_s += 1
            stage.wait(1.0)
            stage.hear(B, msg.Heads((FORGED,), 0))
            stage.hear(C, msg.Heads((ahead,), 0))
            stage.hear(C, msg.Heads((Head(SHARD, 4, digest("farther"), 160),), 0))
            if is_behind and taken_s == int(stage.config.request_s):
                stage.hear(C, msg.Heads((ours,), 0))
            bring(stage, FORGED, digest("nothing that anybody knows"))
        assert stage.head() == FORGED
        usual = 2 * stage.config.request_s + 1.0
        assert taken_s == pytest.approx(usual + (stage.config.request_s if is_behind else 0.0), abs=1.0)
        again = msgspec.structs.replace(FORGED, id=digest("forged again"), tokens=FORGED.tokens + 1)
        stage.hear(C, msg.Heads((Head(SHARD, 5, digest("farthest"), 200),), 0))
        bring(stage, again, digest("nothing that anybody knows, either"))
        assert stage.head() == FORGED, "the next one has to wait as long"


def test_who_has_told_nothing_of_late_is_asked_before() -> None:
    """H3b: what was told long ago is no word for or against."""
    stage, _ = settled(B, C, D)
    ours = stage.head()
    for peer in (C, D):
        stage.announce(peer, 8, ours)
    stage.wait(stage.config.request_s + 1.0)
    stage.hear(B, msg.Heads((FORGED,), 0))
    effects = bring(stage, FORGED)
    assert stage.head() == ours
    assert {to for to, _ in sent(effects, msg.HeadsRequest)} == {B, C, D}
    assert "asked for their heads first" in notes(effects, "fetch")[0]
    for peer in (C, D):
        stage.hear(peer, msg.Heads((ours,), 0))
    assert "3 of 4 peers stand" in notes(bring(stage, FORGED), "fetch")[0]


def test_who_was_away_for_long_takes_the_heavier_state() -> None:
    """H3b: nobody is at its head any more, or too few are."""
    stage, _ = settled(B, C)
    ours = stage.head()
    stage.announce(B, 8, ours)
    for peer in (B, C):
        stage.hear(peer, msg.Heads((HONEST[0],), 0))
    bring(stage, HONEST[0], digest("later than all we have"))
    assert stage.head() == HONEST[0] != ours


def test_what_was_approved_once_is_taken_when_it_is_there() -> None:
    """H3e: a download of hours, while everybody goes on."""
    stage = newcomer(B)
    stage.hear(B, msg.Heads((HONEST[0],), 0))
    stage.tell(ev.StateOffered(B, FORGED, ()))
    assert stage.machine.replication.acceptance.refusal(FORGED)
    stage.tell(ev.StateOffered(B, HONEST[0], ()))
    assert stage.machine.replication.acceptance.refusal(HONEST[0]) is None
    for head in (*HONEST, FORGED):
        stage.hear(B, msg.Heads((head,), 0))
    bring(stage, HONEST[0])
    assert stage.machine.view.known_heads == (HONEST[0],)
    assert A not in stage.machine.core.membership.live


def test_what_led_to_a_state_outlives_a_restart() -> None:
    """H3e."""
    stage = Stage(B, C)
    stage.machine = Machine(stage.config)
    stage.tell(ev.Started((ev.ShardState(HONEST[1], 4, ()),), ((HONEST[0].id,),)))
    assert tuple(stage.machine.view.ancestry(SHARD)) == (HONEST[0].id,)


def test_what_led_to_a_state_is_kept_while_it_is_on_its_way_in() -> None:
    """H3e: nobody else may have its signatures when the next checkpoint is written."""
    stage = Stage(B, C)
    stage.machine = Machine(stage.config)
    stage.tell(ev.Started((ev.ShardState(HONEST[0], 4, ()),), ((),)))
    for peer in (B, C):
        stage.meet(peer)
        stage.hear(peer, msg.Heads((HONEST[1],), 0))
    effects = stage.tell(ev.Fetched(B, ev.ShardState(HONEST[1], 4, ()), (HONEST[0].id, digest("between")), C))
    assert only(effects, ef.Install)
    assert {HONEST[0].id, digest("between"), HONEST[1].id} <= stage.machine.commits(SHARD)
