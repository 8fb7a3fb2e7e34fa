"""What proves a shard's state, and each way in which it may not; states that were kept on the disk while joining."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from actors import FOUNDER, make_manifest

from p2pdiloco.codec.digests import StateForm, digest_list, packed
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.peer import state_client
from p2pdiloco.peer.signatures import FalseContributionError, all_of, signed
from p2pdiloco.peer.state_proof import checked_offer, proven_digest
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.chain import genesis_head, record_of
from p2pdiloco.protocol.data_blocks import Block, Trained
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.ids import Digest, LearnerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, commit_id
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import StateOffer, StateProof, encode

ELEMENTS = CHUNK + 100
MANIFEST = make_manifest(ELEMENTS)
LAYOUT = Layout.of(MANIFEST)
SHARD = ShardId(1)
OWNER = Identity.ephemeral()
THETA, MOMENTUM = torch.arange(ELEMENTS, dtype=torch.float32), torch.full((ELEMENTS,), 2.0, dtype=torch.bfloat16)
LISTED = digest_list(THETA, MOMENTUM)
PARENT = Digest("0" * 40)
MINE = Contributor(LearnerId(f"{OWNER.peer_id}/1"), 0, 30, 0, 3, (Block(2), Block(5)))
GIVEN = signed(OWNER, MANIFEST.run, SHARD, PARENT, MINE, Digest("2" * 40))
MARKS = ((MINE.learner, Mark(30, 3, 3)),)
HEADER = CommitHeader(
    shard=SHARD,
    version=3,
    parent=PARENT,
    step=12,
    owner=OWNER.peer_id,
    contributors=(GIVEN,),
    tokens=90,
    payload=Digest("1" * 40),
    result=digest_of(LISTED),
    record=record_of(dict(MARKS), Trained()),
)


def proof_of(header: CommitHeader = HEADER, signer: Identity = OWNER, **head: object) -> StateProof:
    """A sound proof of ``header``, but for changes of its head."""
    named = Head(header.shard, header.version, commit_id(header), header.tokens)
    signature = signer.sign(messages.signed_commit_bytes(named.id))
    return StateProof(ShardState(msgspec.structs.replace(named, **head), header.step, MARKS), header, signature)


def state_of(**changes: object) -> StateProof:
    """A genuine commit with another state beside it."""
    return msgspec.structs.replace(proof_of(), state=msgspec.structs.replace(proof_of().state, **changes))


def given(**changes: object) -> StateProof:
    """A commit that its owner signed, with what its learner's peer did not."""
    return proof_of(msgspec.structs.replace(HEADER, contributors=(msgspec.structs.replace(GIVEN, **changes),)))


def test_a_commits_state_is_proved_by_its_owners_signature() -> None:
    assert proven_digest(MANIFEST, proof_of()) == HEADER.result
    false = "what was saved had been verified"
    assert proven_digest(MANIFEST, given(signature=b"")) == HEADER.result, false


@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        (msgspec.structs.replace(proof_of(), header=None), "not the commit that came with it"),
        (proof_of(shard=ShardId(0)), "not the commit that came with it"),
        (proof_of(tokens=91), "not the commit that came with it"),
        (proof_of(id=Digest("2" * 40)), "not the commit that came with it"),
        (proof_of(version=4), "another version"),
        (proof_of(signer=FOUNDER), "signature"),
        (msgspec.structs.replace(proof_of(), signature=b""), "signature"),
        (state_of(step=13), "another step"),
        (state_of(marks=()), "counts other tokens"),
        (state_of(marks=((MINE.learner, Mark(31, 3, 3)),)), "counts other tokens"),
        (state_of(marks=(*MARKS, (LearnerId("x/1"), Mark(1, 1, 1)))), "counts other tokens"),
        (state_of(trained=Trained(1)), "counts other tokens or blocks"),
        (given(tokens_to=40), "its peer's signature"),
        (given(steps_from=1), "its peer's signature"),
        (given(blocks=(Block(2),)), "its peer's signature"),
        (given(payload=bytes(20)), "its peer's signature"),
        (given(signature=b""), "its peer's signature"),
        (given(learner=LearnerId(f"{FOUNDER.peer_id}/1")), "its peer's signature"),
        (given(learner=LearnerId("nobody/1")), "its peer's signature"),
    ],
)
def test_what_does_not_prove_its_head_is_refused(proof: StateProof, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        proven_digest(MANIFEST, proof, selection=all_of)


def test_version_0_is_the_manifests() -> None:
    sound = genesis_head(MANIFEST.run, SHARD, MANIFEST.genesis[SHARD])
    assert proven_digest(MANIFEST, StateProof(ShardState(sound, 0, ()), None, b"")) == MANIFEST.genesis[SHARD]
    for wrong in (msgspec.structs.replace(sound, tokens=1), msgspec.structs.replace(sound, id=Digest("3" * 40))):
        with pytest.raises(ValueError, match="belongs to another run"):
            proven_digest(MANIFEST, StateProof(ShardState(wrong, 0, ()), None, b""))
    for counted in (ShardState(sound, 1, ()), ShardState(sound, 0, MARKS), ShardState(sound, 0, (), Trained(1))):
        with pytest.raises(ValueError, match="nobody has trained"):
            proven_digest(MANIFEST, StateProof(counted, None, b""))


def test_an_offer_is_of_the_shard_that_was_asked_for_and_lists_what_was_signed() -> None:
    sound = StateOffer(proof_of(), LISTED)
    assert checked_offer(MANIFEST, LAYOUT, SHARD, encode(sound)) == sound
    with pytest.raises(ValueError, match="not of shard 0"):
        checked_offer(MANIFEST, LAYOUT, ShardId(0), encode(sound))
    for listed in (LISTED[:-20], LISTED[::-1], LISTED + LISTED, b""):
        with pytest.raises(ValueError, match="not those that its owner signed"):
            checked_offer(MANIFEST, LAYOUT, SHARD, encode(StateOffer(proof_of(), listed)))
    with pytest.raises(ValueError):
        checked_offer(MANIFEST, LAYOUT, SHARD, b"no offer")
    false = encode(StateOffer(given(signature=b""), LISTED))
    with pytest.raises(FalseContributionError):
        checked_offer(MANIFEST, LAYOUT, SHARD, false, draws=Random(0))
    checked_offer(MANIFEST, LAYOUT, SHARD, false)


def test_a_state_of_another_length_is_not_proved_by_a_list_that_is_signed() -> None:
    """Signed by whoever makes a commit of fewer chunks than the shard has."""
    short = msgspec.structs.replace(HEADER, result=digest_of(LISTED[:20]))
    with pytest.raises(ValueError, match="not those that its owner signed"):
        checked_offer(MANIFEST, LAYOUT, SHARD, encode(StateOffer(proof_of(short), LISTED[:20])))


# -- kept on the disk --------------------------------------------------------------------------------------------------


def keep(folder: Path) -> Path:
    """Shard 1 as it travelled; its file."""
    chunks, at, data = [], 0, packed(THETA, MOMENTUM)
    for size in StateForm.of(MANIFEST.config.outer).chunk_sizes(ELEMENTS):
        chunks.append(data[at : at + size])
        at += size
    state_client.keep(folder, StateOffer(proof_of(), LISTED), chunks)
    (path,) = folder.iterdir()
    return path


def test_what_was_kept_is_read_back_in_its_place(tmp_path: Path) -> None:
    keep(tmp_path)
    found = state_client.load(tmp_path, MANIFEST)
    assert found is not None
    assert found.shards == (proof_of(),)
    piece = LAYOUT.shards[SHARD]
    assert torch.equal(found.theta[piece.start : piece.stop], THETA)
    assert torch.equal(found.momentum[piece.start : piece.stop], MOMENTUM)
    assert not found.theta[: piece.start].any()
    assert not found.momentum[: piece.start].any()
    LOCAL.remove_folder(tmp_path)
    assert state_client.load(tmp_path, MANIFEST) is None


@pytest.mark.parametrize("damage", ["first bit", "last bit", "cut", "empty", "length", "other shard", "no such shard"])
def test_what_was_spoilt_on_the_disk_is_removed_and_not_used(tmp_path: Path, damage: str) -> None:
    path = keep(tmp_path)
    data = bytearray(path.read_bytes())
    match damage:
        case "first bit":
            data[-6 * 100 - 4] ^= 1
        case "last bit":
            data[-1] ^= 1
        case "cut":
            data = data[:-4]
        case "empty":
            data = bytearray()
        case "length":
            data[0] = 255
        case "other shard":
            path = path.rename(path.with_name(path.name.replace("1", "0")))
        case "no such shard":
            path = path.rename(path.with_name(path.name.replace("1", "2")))
    path.write_bytes(data)
    assert state_client.load(tmp_path, MANIFEST) is None
    assert list(tmp_path.iterdir()) == []


def test_what_a_crash_left_half_written_is_swept_and_the_rest_is_used(tmp_path: Path) -> None:
    path = keep(tmp_path)
    (tmp_path / ".shard-00000000.state.part").write_bytes(b"half")
    (tmp_path / "shard-x.state").write_bytes(b"")
    assert state_client.load(tmp_path, MANIFEST) is not None
    assert list(tmp_path.iterdir()) == [path]
