"""Checkpoints: whole or not at all, checked when read, put together from what several peers left."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from p2pdiloco.codec.digests import StateForm, state_digest
from p2pdiloco.peer import checkpoint
from p2pdiloco.peer.checkpoint import CheckpointError, best_of, load, load_all, save
from p2pdiloco.peer.host import Buffer
from p2pdiloco.peer.signatures import signed
from p2pdiloco.protocol import messages
from p2pdiloco.protocol.chain import genesis_head, record_of
from p2pdiloco.protocol.data_blocks import Trained
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, ShardId
from p2pdiloco.protocol.manifest import (
    Layout,
    Manifest,
    ModelConfig,
    MomentumType,
    OuterConfig,
    RunConfig,
    ScheduleConfig,
    TensorSpec,
)
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Head, commit_id
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import StateProof

OWNER = Identity.ephemeral()
ELEMENTS = 64
TENSORS = tuple(
    TensorSpec(name=name, shape=(ELEMENTS,), merge="direct", fragment=FragmentId(f)) for f, name in enumerate("ab")
)


def make_manifest(seed: int = 0, momentum_type: MomentumType = "float32") -> Manifest:
    outer = OuterConfig(momentum_type=momentum_type)
    config = RunConfig(name="unit", model=ModelConfig(), seed=seed, schedule=ScheduleConfig(fragments=2), outer=outer)
    zero = state_digest(torch.zeros(ELEMENTS), StateForm.of(outer).still(ELEMENTS))
    return Manifest(founder=OWNER.peer_id, config=config, tensors=TENSORS, genesis=(zero, zero))


def write(folder: Path, versions: tuple[int, int], manifest: Manifest | None = None, *, keep: int = 2) -> None:
    """A checkpoint whose shards have these versions; a shard's values are its version, its momentum the
    negative, its tokens ten times that."""
    manifest = manifest or make_manifest()
    theta, momentum = torch.zeros(2 * ELEMENTS), StateForm.of(manifest.config.outer).still(2 * ELEMENTS)
    proofs = []
    for piece, version in zip(Layout.of(manifest).shards, versions, strict=True):
        theta[piece.start : piece.stop] = float(version)
        momentum[piece.start : piece.stop] = 0.0 - version
        result = state_digest(theta[piece.start : piece.stop], momentum[piece.start : piece.stop])
        proofs.append(proof_of(manifest, piece.shard, version, result))
    save(folder, manifest, tuple(proofs), theta, momentum, keep=keep)


def proof_of(manifest: Manifest, shard: ShardId, version: int, result: Digest) -> StateProof:
    if version == 0:
        return StateProof(ShardState(genesis_head(manifest.run, shard, manifest.genesis[shard]), 0, ()), None, b"")
    mine = Contributor(LearnerId(f"{OWNER.peer_id}/1"), 0, 10, 0, 1)
    marks = ((mine.learner, Mark(10, 1, version)),)
    header = CommitHeader(
        shard=shard,
        version=version,
        parent=Digest("0" * 40),
        step=4 * version,
        owner=OWNER.peer_id,
        contributors=(signed(OWNER, manifest.run, shard, Digest("0" * 40), mine, Digest("2" * 40)),),
        tokens=10 * version,
        payload=Digest("1" * 40),
        result=result,
        record=record_of(dict(marks), Trained()),
    )
    head = Head(shard, version, commit_id(header), header.tokens)
    return StateProof(ShardState(head, header.step, marks), header, OWNER.sign(messages.signed_commit_bytes(head.id)))


def versions_of(found: checkpoint.Checkpoint | None) -> list[int]:
    assert found is not None
    return [proof.state.head.version for proof in found.shards]


def test_the_newest_few_stay(tmp_path: Path) -> None:
    for version in range(5):
        write(tmp_path, (version, version), keep=3)
    assert versions_of(load(tmp_path)) == [4, 4]
    assert len(list(tmp_path.glob("state-*.json"))) == len(list(tmp_path.glob("state-*.safetensors"))) == 3


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    assert load(tmp_path / "missing") is None


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_of_a_torn_checkpoint_the_one_before_is_used(tmp_path: Path, suffix: str, damage: str) -> None:
    write(tmp_path, (1, 1))
    write(tmp_path, (2, 2))
    newest = max(tmp_path.glob(f"state-*.{suffix}"))
    data = bytearray(newest.read_bytes())
    if damage == "gone":
        newest.unlink()
    elif damage == "cut":
        newest.write_bytes(data[: len(data) // 2])
    else:
        data[-20] ^= 1
        newest.write_bytes(data)
    assert versions_of(load(tmp_path)) == [1, 1]


def test_when_all_are_torn_it_says_why(tmp_path: Path) -> None:
    write(tmp_path, (1, 1))
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: state-00000001.json: "):
        load(tmp_path)


def test_a_checkpoint_whose_momentum_is_bfloat16_is_a_quarter_smaller_and_comes_back(tmp_path: Path) -> None:
    for kind in ("float32", "bfloat16"):
        write(tmp_path / kind, (1, 3), make_manifest(momentum_type=kind))
    sizes = [next((tmp_path / kind).glob("*.safetensors")).stat().st_size for kind in ("float32", "bfloat16")]
    assert 2 * 2 * ELEMENTS <= sizes[0] - sizes[1] < 2 * 2 * ELEMENTS + 64, "headers differ, too"
    found = load(tmp_path / "bfloat16")
    assert found is not None
    assert found.momentum.dtype == torch.bfloat16
    assert found.theta.tolist() == [1.0] * ELEMENTS + [3.0] * ELEMENTS
    assert found.momentum.tolist() == [-1.0] * ELEMENTS + [-3.0] * ELEMENTS
    tensors = safetensors.torch.load_file(next((tmp_path / "bfloat16").glob("*.safetensors")))
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict.fromkeys(
        ("shard.0", "shard.1"), torch.Size([6 * ELEMENTS])
    )


def test_a_forged_state_is_not_taken(tmp_path: Path) -> None:
    manifest = make_manifest()
    write(tmp_path, (0, 0), manifest)
    path = next(tmp_path.glob("*.safetensors"))
    tensors = safetensors.torch.load_file(path)
    assert {name: tensor.shape for name, tensor in tensors.items()} == dict.fromkeys(
        ("shard.0", "shard.1"), torch.Size([2 * ELEMENTS])
    )
    safetensors.torch.save_file({name: tensor + 1.0 for name, tensor in tensors.items()}, path)
    with pytest.raises(CheckpointError, match="does not have the digest that its owner signed"):
        load(tmp_path)


def test_a_spoilt_state_does_not_take_the_place_of_a_good_one(tmp_path: Path) -> None:
    write(tmp_path, (1, 1))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    manifest = make_manifest()
    theta, momentum = torch.zeros(2 * ELEMENTS), torch.zeros(2 * ELEMENTS)
    proofs = tuple(proof_of(manifest, ShardId(s), 0, manifest.genesis[s]) for s in range(2))
    momentum.view(torch.int32)[-1] ^= 1 << 20
    with pytest.raises(ValueError, match="shard 1 does not have the digest"):
        save(tmp_path, manifest, proofs, theta, momentum, keep=1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, (1, 1))
    before = sorted(tmp_path.iterdir())
    real, calls = LOCAL.write, itertools.count()

    def full(path: Path, parts: Iterable[Buffer]) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, parts)

    monkeypatch.setattr(LOCAL, "write", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, (2, 2))
    assert sorted(tmp_path.iterdir()) == before
    assert versions_of(load(tmp_path)) == [1, 1]


@pytest.mark.parametrize("call", ["sync", "rename", "append"])
def test_a_disk_that_fails_anywhere_leaves_the_last_checkpoint_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, (1, 1))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    real, calls, failures = getattr(LOCAL, call), itertools.count(), 0

    def failing(*arguments: Any) -> None:
        if next(calls) == failures:
            raise OSError(errno.EIO, "Input/output error")
        real(*arguments)

    monkeypatch.setattr(LOCAL, call, failing)
    while True:
        calls = itertools.count()
        try:
            write(tmp_path, (2, 2))
        except OSError:
            assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
            assert versions_of(load(tmp_path)) == [1, 1]
            failures += 1
        else:
            break
    assert failures >= 2, "each of its calls has failed once"
    assert versions_of(load(tmp_path)) == [2, 2]


def test_of_several_peers_each_shards_heaviest_head_is_taken_in_any_order(tmp_path: Path) -> None:
    for name, versions in {"a": (3, 1), "b": (2, 5), "c": (0, 0)}.items():
        write(tmp_path / name / "run" / "checkpoint", versions)
    for order in itertools.permutations("abc"):
        best = best_of(load_all(tmp_path / name for name in order))
        assert versions_of(best) == [3, 5]
        assert best.theta.tolist() == [3.0] * ELEMENTS + [5.0] * ELEMENTS
        assert best.momentum.tolist() == [-3.0] * ELEMENTS + [-5.0] * ELEMENTS


def test_an_unusable_folder_does_not_spoil_the_others(tmp_path: Path) -> None:
    write(tmp_path / "a" / "checkpoint", (1, 1))
    write(tmp_path / "b" / "checkpoint", (2, 2))
    for path in (tmp_path / "b" / "checkpoint").glob("*.safetensors"):
        path.unlink()
    assert [versions_of(c) for c in load_all([tmp_path / "a", tmp_path / "b"])] == [[1, 1]]
    with pytest.raises(CheckpointError, match="can be used"):
        load_all([tmp_path / "b"])
    with pytest.raises(CheckpointError, match="name a state folder"):
        load_all([tmp_path / "nowhere"])


def test_checkpoints_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a", (1, 1))
    write(tmp_path / "b", (1, 1), make_manifest(seed=7))
    with pytest.raises(CheckpointError, match="different runs"):
        best_of(load_all([tmp_path / "a", tmp_path / "b"]))


def test_what_a_crash_left_half_written_is_swept_at_the_next_save(tmp_path: Path) -> None:
    """A model-sized file a crash, and none of them goes by itself. The learner's own is not ours to remove."""
    write(tmp_path, (1, 1))
    left = [".state-00000002.safetensors.part", ".state-00000002.safetensors.a1b2c3.part", ".manifest.msgpack.x.part"]
    for name in [*left, "state-00000007.safetensors", ".learner.safetensors.x.part"]:
        (tmp_path / name).write_bytes(b"half")
    write(tmp_path, (2, 2))
    names = {path.name for path in tmp_path.iterdir()}
    assert not names & {*left, "state-00000007.safetensors"}
    assert ".learner.safetensors.x.part" in names
    assert versions_of(load(tmp_path)) == [2, 2]
