"""Checkpoints that are known to be good: real files, and what a peer goes back to."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from test_peer_checkpoint import make_manifest, proof_of, versions_of, write

from p2pdiloco.codec.digests import state_digest
from p2pdiloco.node.run_folder import RunStore, folder_of
from p2pdiloco.peer.checkpoint import ASIDE, MEMORY, KnownGood, go_back, good_number, load, save
from p2pdiloco.peer.commit_wal import path_of
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util.files import LOCAL, LocalDisk


class Peer:
    """Writes checkpoints whose versions count up, with a loss since the last one."""

    def __init__(self, state: Path) -> None:
        self.manifest = make_manifest()
        self.folder = folder_of(state, self.manifest.run) / "checkpoint"
        self.known = KnownGood(self.folder, LOCAL)
        self.version = 0

    def trains(self, *losses: float | None) -> None:
        for loss in losses:
            self.version += 1
            write(self.folder, (self.version, self.version), self.manifest, keep=2)
            self.known.judge_previous(self.version, loss)

    def versions(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("state-")) for path in self.folder.glob("state-*.json"))


def test_the_last_from_which_training_went_on_stays_however_long_it_goes_wrong(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.trains(3.0, 2.5, 2.2, 2.1)
    assert good_number(peer.folder) == 3
    peer.trains(9.0, 8.0, math.nan, math.inf, 7.0)
    assert peer.versions() == [3, 8, 9]
    own = RunStore(tmp_path).load_state(peer.manifest)
    assert own is not None
    assert [proof.state.head.version for proof in own.shards] == [9, 9], "who is not asked to go back goes on"
    (peer.folder / "learner.safetensors").write_bytes(b"poisoned")
    since = [path_of(peer.folder, number) for number in (3, 9)]
    for path in since:
        path.write_bytes(b"commits")
    assert go_back(peer.folder, LOCAL) == 3
    assert versions_of(load(peer.folder)) == [3, 3]
    assert not (peer.folder / "learner.safetensors").exists()
    assert (peer.folder / f"{ASIDE}state-00000009.safetensors").exists(), "nothing is removed"
    assert not any(path.exists() for path in since), "what was committed since leads to where it went wrong"
    go_back(peer.folder, LOCAL)
    assert versions_of(load(peer.folder)) == [3, 3]
    later = Peer(tmp_path)
    later.version = 3
    later.trains(2.1, 2.1)
    assert versions_of(load(peer.folder)) == [5, 5], "and the run goes on from there"
    before = {path.name: path.read_bytes() for path in peer.folder.glob(f"{ASIDE}*")}
    for _ in range(2):
        later.trains(2.1, 2.1, 9.0, 9.0)
        go_back(peer.folder, LOCAL)
        later = Peer(tmp_path)
        later.version = good_number(peer.folder) or 0
    assert {name: (peer.folder / name).read_bytes() for name in before} == before, "what was put aside stays as it was"
    for aside in (f"{ASIDE}2-", f"{ASIDE}3-"):
        assert list(peer.folder.glob(f"{aside}state-*.json")), "each time is put aside by itself"


def test_what_goes_up_a_little_or_is_not_measured(tmp_path: Path) -> None:
    """A harder passage is no poison; a follower measures nothing; no single bad loss becomes the measure."""
    peer = Peer(tmp_path)
    peer.trains(None, None)
    assert go_back(peer.folder, LOCAL) is None
    peer.trains(2.0, 2.4, 2.9, 2.4)
    assert good_number(peer.folder) == 5
    peer.trains(*[4.5] * MEMORY)
    assert peer.versions()[0] == 5
    peer.trains(2.4)
    go_back(peer.folder, LOCAL)
    assert versions_of(load(peer.folder)) == [peer.version - 1] * 2


def test_a_checkpoint_that_is_not_finite_is_not_loaded(tmp_path: Path) -> None:
    """Whoever signed it, and without being asked to go back."""
    manifest = make_manifest()
    write(tmp_path, (1, 1), manifest)
    theta, momentum = torch.zeros(2 * 64), torch.zeros(2 * 64)
    theta[3] = math.inf
    shards = Layout.of(manifest).shards
    pieces = [slice(shard.start, shard.stop) for shard in shards]
    proofs = [
        proof_of(manifest, shard.shard, 2, state_digest(theta[at], momentum[at]))
        for shard, at in zip(shards, pieces, strict=True)
    ]
    save(tmp_path, manifest, proofs, theta, momentum, keep=2)
    assert versions_of(load(tmp_path)) == [1, 1]


def test_what_is_put_aside_stays_aside_after_a_power_cut(tmp_path: Path) -> None:
    class Watched(LocalDisk):
        def rename(self, old: Path, new: Path) -> None:
            done.append("rename")
            super().rename(old, new)

        def sync_folder(self, folder: Path) -> None:
            done.append("sync")
            super().sync_folder(folder)

    done: list[str] = []
    peer = Peer(tmp_path)
    peer.trains(3.0, 2.5, 9.0)
    assert go_back(peer.folder, Watched()) == 1
    assert done[-1] == "sync"
    assert "rename" in done


def test_a_mark_whose_checkpoint_is_gone_marks_nothing(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.trains(3.0, 2.5)
    (peer.folder / "state-00000009.good").write_bytes(b"")
    assert good_number(peer.folder) == 1
