"""What is on the disk after a power cut: of a file that was replaced, the old content or the new one, and the new one
once the call has returned. A name can be durable before its bytes are."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
import torch
from test_peer_checkpoint import ELEMENTS, make_manifest, proof_of

from p2pdiloco.codec.digests import state_digest
from p2pdiloco.peer import checkpoint
from p2pdiloco.peer.host import replace
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util import files
from tests.peer_sim.disk import ProcessDied, SimulatedDisk

FILE = Path("/disk/file")
OLD, NEW = b"old" * 1000, b"newer" * 1000
SEEDS = range(40)
"""Power cuts, each of which does something else to what was not synced."""


def test_a_name_is_durable_before_bytes_that_were_not_synced() -> None:
    """The model itself: without it, a sync that is left out is not found."""
    found = set()
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        replace(disk, FILE, [NEW], is_durable=False)
        disk.sync_folder(FILE.parent)
        disk.cut_power()
        found.add(disk.files[str(FILE)])
    assert b"" in found
    assert NEW in found
    assert len(found) > 2, "parts of it"


@pytest.mark.parametrize("dies_in", range(1, 6))
def test_a_replaced_file_is_the_old_one_or_the_new_one(dies_in: int) -> None:
    for seed in SEEDS:
        disk = SimulatedDisk(Random(seed))
        replace(disk, FILE, [OLD])
        disk.dies_in = dies_in
        try:
            replace(disk, FILE, [NEW])
        except ProcessDied:
            is_new = False
        else:
            is_new = True
        disk.cut_power()
        assert disk.files[str(FILE)] in ((NEW,) if is_new else (OLD, NEW)), seed


def saved(disk: SimulatedDisk, version: int) -> None:
    """A checkpoint on ``disk``."""
    manifest = make_manifest()
    theta, momentum = torch.full((2 * ELEMENTS,), float(version)), torch.full((2 * ELEMENTS,), -float(version))
    proofs = [
        proof_of(manifest, piece.shard, version, state_digest(theta[piece.start : piece.stop], momentum[:ELEMENTS]))
        for piece in Layout.of(manifest).shards
    ]
    checkpoint.save(FILE.parent, manifest, proofs, theta, momentum, keep=1, disk=disk)


def test_after_a_power_cut_there_is_the_last_checkpoint_or_the_one_before() -> None:
    dies_in, is_whole = 1, False
    while not is_whole:
        for seed in SEEDS[:12]:
            disk = SimulatedDisk(Random(seed))
            saved(disk, 1)
            disk.dies_in, is_whole = dies_in, True
            try:
                saved(disk, 2)
            except ProcessDied:
                is_whole = False
            disk.dies_in = None
            disk.cut_power()
            found = checkpoint.load(FILE.parent, disk)
            assert found is not None
            assert {proof.state.head.version for proof in found.shards} <= ({2} if is_whole else {1, 2}), (
                dies_in,
                seed,
            )
        dies_in += 1
    assert dies_in > 10, "operations of one checkpoint"


def test_on_a_real_disk_bytes_are_synced_before_their_name_and_the_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    sync, rename = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        done.append(("sync", os.fstat(descriptor).st_ino))

    def replaced(old: Path, new: Path) -> None:
        rename(old, new)
        done.append(("rename", os.stat(new).st_ino))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    folder = tmp_path.stat().st_ino
    files.write_atomically(tmp_path / "one", NEW)
    one = (tmp_path / "one").stat().st_ino
    assert done == [("sync", one), ("rename", one), ("sync", folder)]
    done.clear()
    replace(files.LOCAL, tmp_path / "two", [NEW])
    two = (tmp_path / "two").stat().st_ino
    assert done == [("sync", two), ("rename", two), ("sync", folder)]
