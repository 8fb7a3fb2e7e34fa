"""Rules G of docs/protocol.md: who may say what. Real keys; what a driver does with it is in test_peer_driver.py."""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import Any

import msgspec
import pytest
from stage import SHARD, A, B, C, Stage, commit_on, digest, life, notes, tokens

from p2pdiloco.peer.signatures import (
    FalseContributionError,
    UnknownMemberError,
    all_but,
    all_of,
    check_commit,
    check_contributor,
    drawn,
    none_of,
    signed,
)
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.chain import record_of
from p2pdiloco.protocol.data_blocks import Block, Trained
from p2pdiloco.protocol.events import Mark
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId, learner_id
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, WrongMerge, commit_id
from p2pdiloco.transport.identity import Identity
from tests.machine_sim.report import simulate

RUN = RunId("run")
ANN, BOB = Identity.ephemeral(), Identity.ephemeral()
BASE = Head(SHARD, 3, digest("base"), 90)


class Known:
    """A register of these."""

    def __init__(self, *those: Identity, followers: tuple[Identity, ...] = (), most: int = 1000) -> None:
        self._those = {one.peer_id for one in those}
        self._followers = {one.peer_id for one in followers}
        self._most = most
        """How many of them their common invite admits."""

    def was_member(self, peer: PeerId) -> bool:
        return peer in self._those

    def may_contribute(self, peer: PeerId) -> bool:
        return peer in self._those - self._followers

    def invite_problem(self, peers: Collection[PeerId]) -> str | None:
        return None if len(peers) <= self._most else f"{len(peers)} of its peers came with one invite"


def given(by: Identity = ANN, *, signer: Identity | None = None, **says: Any) -> Contributor:
    """Tokens 0 to 30 of ``by``'s learner, as ``signer`` signed them."""
    said = {"tokens_from": 0, "tokens_to": 30, "steps_from": 0, "steps_to": 3, "blocks": (Block(2), Block(5)), **says}
    mine = Contributor(learner_id(by.peer_id, "1"), **said)
    return signed(signer or by, RUN, SHARD, BASE.id, mine, digest("payload"))


def committed(*contributors: Contributor, by: Identity = ANN) -> tuple[CommitHeader, bytes]:
    """A commit of these, and its owner's signature."""
    header = commit_on(BASE, *sorted(contributors, key=lambda c: c.learner), owner=by.peer_id)
    return header, by.sign(messages.signed_commit_bytes(commit_id(header)))


def test_a_contribution_is_signed_for_its_run_its_shard_and_its_base() -> None:
    """G1a."""
    check_contributor(RUN, SHARD, BASE.id, given())
    for run, shard, base in (
        (RunId("another"), SHARD, BASE.id),
        (RUN, ShardId(1), BASE.id),
        (RUN, SHARD, digest("another")),
    ):
        with pytest.raises(ValueError, match="its peer's signature"):
            check_contributor(run, shard, base, given())


@pytest.mark.parametrize(
    "lie",
    [
        {"tokens_from": 1},
        {"tokens_to": 31},
        {"steps_from": 1},
        {"steps_to": 4},
        {"blocks": ()},
        {"payload": bytes(20)},
        {"signature": bytes(64)},
        {"signature": b""},
        {"learner": learner_id(BOB.peer_id, "1")},
        {"learner": learner_id(ANN.peer_id, "2")},
        {"learner": life(A)},
    ],
    ids=lambda lie: "-".join(lie),
)
def test_a_contribution_is_signed_for_all_that_it_says(lie: dict[str, Any]) -> None:
    """G1a, G2a: as it comes, and as a commit names it."""
    said = msgspec.structs.replace(given(), **lie)
    with pytest.raises(ValueError, match="its peer's signature"):
        check_contributor(RUN, SHARD, BASE.id, said)
    with pytest.raises(ValueError, match="its peer's signature"):
        check_commit(RUN, *committed(said))


def test_nobody_signs_in_anothers_name() -> None:
    """G1a."""
    for signer in (BOB, Identity.ephemeral()):
        with pytest.raises(ValueError, match="does not bear its peer's signature"):
            check_contributor(RUN, SHARD, BASE.id, given(ANN, signer=signer))
        with pytest.raises(ValueError, match="does not bear its peer's signature"):
            check_commit(RUN, *committed(given(BOB), given(ANN, signer=BOB), by=BOB))


def test_what_a_peer_has_signed_itself_is_known_on_that_head_and_as_it_was() -> None:
    """G2a: a commit that says anything else in its name is checked as for everybody."""
    known, mine = msgspec.structs.replace(given(), signature=bytes(64)), BASE.id
    check_commit(RUN, *committed(known, given(BOB), by=BOB), selection=all_but((mine, known)))
    for head, other in (
        (digest("another"), known),
        (mine, msgspec.structs.replace(known, tokens_to=known.tokens_to + 1)),
    ):
        with pytest.raises(ValueError, match="its peer's signature"):
            check_commit(RUN, *committed(known, by=BOB), selection=all_but((head, other)))


def test_a_contribution_that_was_not_made_proves_that_the_owner_lied() -> None:
    """G2f: the owner signed the commit with it; of a lineage, few of each commit are drawn."""
    names = [Identity.ephemeral() for _ in range(11)]
    false = given(names[1], signer=names[0])
    others = [given(name) for name in names if name is not names[1]]
    header, signature = committed(false, *others, by=names[0])
    drawings = [drawn(Random(seed)) for seed in range(100)]
    found = [drawn(Random(seed))(header) for seed in range(100)]
    assert {len(drawing) for drawing in found} == {4}
    assert {c.learner for drawing in found for c in drawing} == {c.learner for c in header.contributors}
    assert 25 <= sum(false in drawing for drawing in found) <= 50, "four of eleven"
    for selection, is_found in (
        (all_of, True),
        (none_of, False),
        *zip(drawings, (false in f for f in found), strict=True),
    ):
        if not is_found:
            check_commit(RUN, header, signature, selection=selection)
            continue
        with pytest.raises(FalseContributionError, match="its peer's signature") as raised:
            check_commit(RUN, header, signature, selection=selection)
        assert raised.value.proof == WrongMerge(header, signature)


def test_a_commit_is_its_owners_and_names_what_was_given_on_its_parent() -> None:
    """G2a: by anybody, to anybody."""
    header, signature = committed(given(ANN), given(BOB))
    check_commit(RUN, header, signature)
    with pytest.raises(ValueError, match="its owner's signature"):
        check_commit(RUN, header, BOB.sign(messages.signed_commit_bytes(commit_id(header))))
    later = msgspec.structs.replace(header, parent=digest("another"))
    with pytest.raises(ValueError, match="does not bear its peer's signature"):
        check_commit(RUN, later, ANN.sign(messages.signed_commit_bytes(commit_id(later))))


def test_owner_and_givers_are_members() -> None:
    """G2b."""
    header, signature = committed(given(BOB))
    check_commit(RUN, header, signature, Known(ANN, BOB))
    check_commit(RUN, header, signature, Known(ANN, BOB, followers=(ANN,)))
    with pytest.raises(UnknownMemberError, match=f"its owner {ANN.peer_id} is not known as a member"):
        check_commit(RUN, header, signature, Known(BOB))
    with pytest.raises(UnknownMemberError, match=f"^{BOB.peer_id} is not known as a member"):
        check_commit(RUN, header, signature, Known(ANN))
    with pytest.raises(ValueError, match=f"^{BOB.peer_id} is a follower and may not contribute"):
        check_commit(RUN, header, signature, Known(ANN, BOB, followers=(BOB,)))


def test_owner_and_givers_are_no_more_than_their_invite_admits() -> None:
    """G2e: an owner could name any number of keys of its own."""
    header, signature = committed(given(BOB), given(ANN))
    check_commit(RUN, header, signature, Known(ANN, BOB, most=2))
    with pytest.raises(ValueError, match="2 of its peers came with one invite"):
        check_commit(RUN, header, signature, Known(ANN, BOB, most=1))
    alone, signature = committed(given(BOB))
    with pytest.raises(ValueError, match="2 of its peers came with one invite"):
        check_commit(RUN, alone, signature, Known(ANN, BOB, most=1))


def test_who_is_not_known_is_told_from_who_may_not() -> None:
    """G2d: only of the former somebody else is asked (test_peer_signatures.py, and whole peers in test_whole.py)."""
    header, signature = committed(given(BOB))
    with pytest.raises(UnknownMemberError):
        check_contributor(RUN, SHARD, BASE.id, given(BOB), Known(ANN))
    for register, signed_by in ((Known(ANN, BOB, followers=(BOB,)), signature), (Known(ANN, BOB), bytes(64))):
        with pytest.raises(ValueError) as refused:
            check_commit(RUN, header, signed_by, register)
        assert not isinstance(refused.value, UnknownMemberError)


def test_a_commit_names_one_learner_of_a_peer() -> None:
    """G2b: else one peer would weigh as much as it has names."""
    stage = Stage(B, C, has_learner=False)
    twice = (tokens(B, 0, 40), msgspec.structs.replace(tokens(B, 0, 40), learner=life(B, 2)))
    effects = stage.take(stage.commit(*twice))
    assert stage.head().version == 0
    assert "not sorted and distinct" in notes(effects, "commit")[0]
    stage.take(stage.commit(tokens(B, 0, 40), tokens(C, 0, 40)))
    assert stage.head().version == 1


def test_a_commit_is_signed_for_what_the_chain_counts_with_it() -> None:
    """G3a: with another record it is not taken, whoever signed it."""
    stage = Stage(B, C, has_learner=False, blocks=10, log_length=2)
    stage.take(stage.commit(tokens(B, 0, 40)))
    first = Mark(40, 4, 1)
    for marks in (
        {life(B): first},
        {life(C): Mark(40, 4, 2)},
        {life(B): first, life(C): Mark(50, 4, 2)},
        {life(B): first, life(C): Mark(40, 4, 2), life(PeerId("x")): first},
    ):
        effects = stage.take(stage.commit(tokens(C, 0, 40), record=record_of(marks, Trained())))
        assert stage.head().version == 1
        assert "its record is not the one that follows" in notes(effects, "commit")[0]
    mine = msgspec.structs.replace(tokens(C, 0, 40), blocks=(Block(3),))
    without = stage.commit(tokens(C, 0, 40)).record
    assert "record" in notes(stage.take(stage.commit(mine, record=without)), "commit")[0]
    stage.take(stage.commit(mine))
    assert stage.head().version == 2
    state = stage.machine.core.chains[SHARD].state()
    assert record_of(dict(state.marks), state.trained) == stage.machine.core.chains[SHARD].log[-1].record


def test_honest_tokens_are_conserved_beside_liars() -> None:
    """G4: eight peers, of which one or two send whatever is well formed, and sign what they say of themselves."""
    report = simulate(range(3), "liars", jobs=1)
    assert not report.violations
    assert report.tokens_lost == 0
    assert report.versions > 50
