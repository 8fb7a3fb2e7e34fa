"""Rules E of docs/protocol.md: one owner, one commit of a parent."""

from __future__ import annotations

import msgspec
import pytest
from stage import SHARD, A, B, C, D, Stage, digest, head_of, notes, only, run_owned, sent, tokens

from p2pdiloco.peer.signatures import UnknownMemberError, check_equivocation
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.barred_owners import PROOFS_MOST, TERM
from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.own_commits import OWN_TRIES
from p2pdiloco.transport.identity import Identity
from tests.machine_sim.report import simulate

FAILED = ev.Failed("apply", SHARD, None, "no memory")


def proof_of(stage: Stage, owner: PeerId = B, version: int = 1) -> msg.Equivocation:
    """Two commits of ``owner`` on one parent."""
    first = stage.commit(tokens(C, 0, 40), owner=owner, version=version)
    return msg.Equivocation(first, msgspec.structs.replace(first, step=first.step + 1), b"", b"")


def owners(stage: Stage) -> set[PeerId]:
    return {peer for peer, _ in stage.machine.core.membership.owners.candidates}


# -- what the honest do ------------------------------------------------------------------------------------------------


def test_an_owner_makes_one_commit_of_a_parent() -> None:
    """E1a: merged again, with more than before, it is the same commit."""
    stage = Stage(B, C, owners="abc", has_learner=False, grace_share=0.0)
    (first,) = {message.header for _, message in sent(stage.work(stage.offer(C), ef.Merge), msg.Commit)}
    stage.tell(FAILED)
    stage.offer(B)
    effects = stage.work(stage.wait(stage.machine.aggregation.waits().takeover_s), ef.Merge)
    assert {message.header for _, message in sent(effects, msg.Commit)} == {first}
    assert first.payload in stage.machine.payloads(SHARD)
    assert msg.commit_id(first) in stage.machine.commits(SHARD)
    stage.work(effects, ef.Apply)
    assert stage.head() == head_of(first)
    assert not stage.machine.commits(SHARD) - {first.parent, stage.head().id}


def test_what_an_earlier_life_has_made_is_applied_again() -> None:
    """E1a: at once, where its parent is the head; else when it is."""
    stage = Stage(B, has_learner=False)
    first = stage.commit(tokens(C, 0, 40), owner=A)
    stage.take(stage.commit(tokens(C, 0, 40), owner=A))
    second = stage.commit(tokens(C, 40, 80), owner=A)
    again = Stage(has_learner=False, is_founder=False)
    begun = ev.Started((Stage(has_learner=False).machine.core.chains[SHARD].state(),), (), (first, second))
    again.work(again.tell(begun), ef.Apply)
    assert again.head() == head_of(second)
    newcomer = Stage(B, has_learner=False, is_founder=False)
    newcomer.tell(ev.Started((), (), (first,)))
    assert first.payload in newcomer.machine.payloads(SHARD), "it waits for a state"


def test_what_a_heavier_chain_has_left_behind_is_not_made_again() -> None:
    """E1a."""
    stage = Stage(B, has_learner=False)
    first = stage.commit(tokens(C, 0, 40), owner=A)
    stage.take(stage.commit(tokens(C, 0, 60)))
    state = stage.machine.core.chains[SHARD].state()
    again = Stage(has_learner=False, is_founder=False)
    assert not only(again.tell(ev.Started((state,), (), (first,))), ef.Apply)
    assert first.payload not in again.machine.payloads(SHARD)


def test_who_begins_from_a_disk_hears_others_before_it_commits() -> None:
    """E1d: the disk may be an older copy, and the next commit made before. Who is alone waits for a ``request_s``."""
    run = run_owned("ab", version=2)
    before = Stage(B, has_learner=False, run=run)
    before.take(before.commit(tokens(C, 0, 40)))
    state, lineage = before.machine.core.chains[SHARD].state(), before.lineage()
    further = before.commit(tokens(C, 40, 80), owner=A)

    def begun() -> Stage:
        stage = Stage(B, run=run, is_founder=False, has_learner=False, grace_share=0.0)
        stage.tell(ev.Started((state,), (lineage,)))
        assert not only(stage.hear(B, stage.contribution(B, 40, 50)), ef.Merge), "nobody has told of a head"
        return stage

    assert only(begun().announce(B, 8, state.head), ef.Merge)
    assert only(begun().hear(B, msg.Heads((state.head,), 4)), ef.Merge)
    assert not only(begun().hear(B, msg.Heads((head_of(further),), 4)), ef.Merge), "it is further"
    crowd = begun()
    for peer in (C, D):
        crowd.meet(peer, is_participating=False, weight=0.0)
    effects = crowd.hear(B, msg.Heads((state.head,), 4)) + crowd.wait(0.5)
    assert not only(effects, ef.Merge), "one of three"
    assert only(crowd.hear(C, msg.Heads((state.head,), 4)) + crowd.wait(0.5), ef.Merge)
    alone = begun()
    assert not only(alone.wait(alone.config.request_s - 0.2), ef.Merge)
    assert only(alone.wait(0.3), ef.Merge)


def test_who_is_alone_and_cannot_apply_its_own_makes_another_at_last() -> None:
    """E1c: else a run whose last peer has a spoilt state would stand still."""
    stage = Stage(B, C, owners="abc", has_learner=False, grace_share=0.0)
    (first,) = {m.header for _, m in sent(stage.work(stage.offer(C), ef.Merge), msg.Commit)}
    effects = stage.tell(FAILED)
    for peer in (B, C):
        stage.beats.pop(peer)
        effects += stage.tell(ev.PeerDisconnected(peer, "gone"))
    made = []
    for _ in range(OWN_TRIES):
        effects = stage.work(stage.wait(stage.machine.aggregation.waits().takeover_s), ef.Merge)
        made += [apply.header for apply in only(effects, ef.Apply)]
        stage.tell(FAILED)
    assert set(made) == {first}
    assert not stage.machine.aggregation.own_commits.commits(SHARD)


def test_who_comes_back_to_a_parent_whose_commit_it_dropped_merges_nothing_there() -> None:
    """E1e: most peers have a lighter chain (H3f), and that is where this peer's way leads."""
    for dropped in ("in this life", "at the start of this life", ""):
        stage = Stage(B, C, owners="abc", has_learner=False, grace_share=0.0)
        made = stage.commit(tokens(C, 0, 40), owner=A)
        log = stage.machine.aggregation.own_commits
        if dropped == "in this life":
            log.record(made)
            log.on_head_changed(HeadChange(SHARD, stage.head(), head_of(made), made))
        elif dropped:
            assert not log.restore(made, head_of(made))
        assert not log.commits(SHARD)
        assert not only(stage.offer(C), ef.Merge) if dropped else only(stage.offer(C), ef.Merge)


# -- who does it -------------------------------------------------------------------------------------------------------


def test_two_commits_of_one_owner_on_one_parent_are_a_proof() -> None:
    """E2a: with both signatures; nothing else is."""
    ann, bob = Identity.ephemeral(), Identity.ephemeral()
    stage = Stage(B)

    def proof(first: msg.CommitHeader, second: msg.CommitHeader, *, by: Identity = ann) -> msg.Equivocation:
        signed = [one.sign(messages.signed_commit_bytes(msg.commit_id(h))) for one, h in ((ann, first), (by, second))]
        return msg.Equivocation(first, second, *signed)

    first = stage.commit(tokens(C, 0, 40), owner=ann.peer_id)
    second = msgspec.structs.replace(first, step=first.step + 1)
    check_equivocation(proof(first, second))
    for other in (
        first,
        msgspec.structs.replace(second, parent=digest("another")),
        msgspec.structs.replace(second, shard=1),
        msgspec.structs.replace(second, owner=bob.peer_id),
    ):
        with pytest.raises(ValueError, match="do not exclude each other"):
            check_equivocation(proof(first, other, by=bob if other.owner == bob.peer_id else ann))
    with pytest.raises(ValueError, match="has not signed one of these"):
        check_equivocation(proof(first, second, by=bob))

    class Nobody:
        def was_member(self, peer: PeerId) -> bool:
            return False

        def may_contribute(self, peer: PeerId) -> bool:
            return False

    with pytest.raises(UnknownMemberError):
        check_equivocation(proof(first, second), Nobody())


def test_a_proof_is_told_to_all_and_to_who_comes_later() -> None:
    """E2a: once."""
    stage = Stage(B, C, D)
    proof = proof_of(stage)
    assert dict(sent(stage.hear(C, proof), msg.Equivocation)) == {B: proof, D: proof}
    assert not sent(stage.hear(D, proof), msg.Equivocation)
    assert not sent(stage.tell(ev.Contradicted(proof_of(stage, version=2))), msg.Equivocation), "one is enough"
    assert (PeerId("e"), proof) in sent(stage.meet(PeerId("e")), msg.Equivocation)
    another = Stage(B, C)
    assert notes(another.tell(ev.Contradicted(proof)), "equivocation")
    assert B in another.machine.view.barred


def test_a_proof_is_told_to_a_connected_peer_that_is_silent() -> None:
    """E2a: it was stopped for a while, and no other connection of it comes later."""
    stage = Stage(B, C)
    del stage.beats[C]
    stage.wait(20.0)
    assert C not in stage.machine.core.membership.live
    proof = proof_of(stage, PeerId("d"))
    assert (C, proof) in sent(stage.hear(B, proof), msg.Equivocation)


def test_proofs_are_bounded() -> None:
    """E2a: who has many names proves many things."""
    stage = Stage(B)
    for number in range(2 * PROOFS_MOST):
        stage.hear(B, proof_of(stage, PeerId(f"e{number}")))
    assert len(stage.machine.view.barred) == PROOFS_MOST


def test_proofs_against_keys_that_are_not_here_displace_none_against_a_peer() -> None:
    """E2a: a peer that was proved to lie makes keys, and proofs against them, until its own is forgotten."""
    stage = Stage(B, C)
    stage.hear(C, proof_of(stage, B))
    for number in range(2 * PROOFS_MOST):
        stage.hear(B, proof_of(stage, PeerId(f"e{number}")))
    assert B in stage.machine.view.barred


def test_who_is_proved_to_have_done_it_owns_nothing_for_a_term() -> None:
    """E3a: counted in versions, which all count alike."""
    stage = Stage(B, C, log_length=2)
    assert owners(stage) == {A, B, C}
    stage.hear(C, proof_of(stage))
    stage.wait(1.0)
    assert owners(stage) == {A, C}
    state = stage.machine.core.chains[SHARD].state()
    for version, expected in ((TERM, {A, C}), (TERM + 1, {A, B, C})):
        head = msg.Head(SHARD, version, digest(f"version {version}"), 10**6 + version)
        later = msgspec.structs.replace(state, head=head)
        stage.work(stage.bring(later, C), ef.Install)
        assert stage.head() == head
        stage.wait(1.0)
        assert owners(stage) == expected
    assert not notes(stage.hear(C, proof_of(stage)), "equivocation"), "it has served for that"


def test_what_it_makes_is_taken_from_others_alone() -> None:
    """E3b: what somebody has built on is not taken apart."""
    stage = Stage(B, C)
    stage.hear(C, proof_of(stage))
    stage.wait(1.0)
    header = stage.commit(tokens(C, 0, 40), owner=B)
    stage.take(header, sender=B)
    assert stage.head().version == 0
    stage.take(header, sender=C)
    assert stage.head() == head_of(header)


def test_where_nobody_else_can_own_it_owns_all_the_same() -> None:
    """E3a."""
    stage = Stage(B, is_founder=False, has_learner=False)
    stage.tell(ev.Contradicted(proof_of(Stage(B))))
    stage.wait(1.0)
    assert owners(stage) == {B}
    founder = Stage(B)
    founder.tell(ev.Contradicted(proof_of(founder, A)))
    founder.wait(1.0)
    assert owners(founder) == {B}
    founder.beats.pop(B)
    founder.tell(ev.PeerDisconnected(B, "gone"))
    assert owners(founder) == {A}


def test_honest_owners_that_are_killed_at_any_moment_are_never_proved_to_have_done_it() -> None:
    """E1a: the simulator looks at all that honest owners make, in all their lives; whole peers: test_whole.py."""
    report = simulate(range(8), "crashes", jobs=1)
    assert not report.violations
    assert report.versions > 100
