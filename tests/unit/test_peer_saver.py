"""Checkpoints of a peer that goes on, and what a peer is that comes back from one: real files, a stage around."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from actors import FOUNDER
from troupe import Member, Stage, act

from p2pdiloco.peer.checkpoint import load
from p2pdiloco.peer.disk import Buffer
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.peer.saver import shortest_s
from p2pdiloco.protocol.identifiers import ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.runtime.files import LocalDisk


def state_of(folder: Path) -> InitialState:
    """What its checkpoint holds."""
    found = load(folder / "checkpoint")
    assert found is not None
    return InitialState(found.shards, found.theta, found.momentum)


def versions_in(folder: Path) -> list[int]:
    """Of its checkpoint; it is checked when it is read."""
    found = load(folder / "checkpoint")
    return [] if found is None else [proof.state.head.version for proof in found.shards]


def same(one: Member, other: Member) -> bool:
    return (
        one.state.heads == other.state.heads
        and torch.equal(one.state.theta, other.state.theta)
        and torch.equal(one.state.momentum, other.state.momentum)
    )


def test_a_checkpoint_follows_what_is_new(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.wait(1.0)
            assert versions_in(tmp_path / "ann") == [0, 0]
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(1.0)
            assert versions_in(tmp_path / "ann") == [1, 1]
            await stage.wait(300.0)
            assert ann.metrics.events().count("checkpoint") == 2, "nothing was new"

    act(story)


def test_a_shard_is_written_as_it_was_copied_though_the_disk_is_slow(tmp_path: Path) -> None:
    """Versions come while a copy waits for the disk: it is written with the head of when it was copied."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)
            disk = ann.host.disk = SlowDisk(ann)  # type: ignore[misc]
            await stage.wait(1.0)
            assert disk.appended == 0
            assert ann.held["disk"], "the first shard waits, copied"
            await stage.train(ann, *[1.0] * 8)
            assert ann.versions == [3, 3]
            await ann.release("disk")
            await stage.wait(0.1)
            assert versions_in(tmp_path / "ann") == [1, 3], "each shard is of the moment of its copy"
            await stage.wait(61.0)
            assert versions_in(tmp_path / "ann") == [3, 3]

    act(story)


def test_what_is_written_is_copied_between_two_jobs(tmp_path: Path) -> None:
    """Not while the worker is in the middle of one."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            ann.held["tensors"] = []
            await stage.wait(1.0)
            assert versions_in(tmp_path / "ann") == [0, 0], "the copy waits for its turn"
            await ann.release("tensors")
            await stage.wait(1.0)
            assert versions_in(tmp_path / "ann") == [1, 1]

    act(story)


def test_a_checkpoint_needs_memory_for_one_shard(tmp_path: Path) -> None:
    """Whatever the model: one shard is written before the next is copied, in the same place."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)
            disk = ann.host.disk = SlowDisk(ann, is_held=False)  # type: ignore[misc]
            await stage.wait(1.0)
            largest = max(piece.elements for piece in Layout.of(stage.manifest).shards)
            assert len(disk.sizes) == 2
            assert max(disk.sizes) == 6 * largest
            assert len(disk.places) == 1

    act(story)


class SlowDisk(LocalDisk):
    """From the first file that is more than begun, what is asked for waits."""

    def __init__(self, member: Member, *, is_held: bool = True) -> None:
        self._member = member
        self._is_held = is_held
        self.appended = 0
        self.sizes: list[int] = []
        self.places: set[int] = set()

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        super().write(path, parts)
        if self._is_held and path.suffix == ".part" and "state-" in path.name and ".safetensors" in path.name:
            self._is_held = False
            self._member.held["disk"] = []

    def append(self, path: Path, part: Buffer) -> None:
        self.appended += 1
        self.sizes.append(len(part))
        self.places.add(torch.frombuffer(part, dtype=torch.uint8).data_ptr())
        super().append(path, part)


class FullDisk(LocalDisk):
    """Has no room for a while."""

    is_full = False

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(path, parts)

    def append(self, path: Path, part: Buffer) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().append(path, part)


def test_a_checkpoint_that_a_full_disk_refused_is_written_later(tmp_path: Path) -> None:
    """Though nothing is new since."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(checkpoint_s=5.0)
            await stage.wait(1.0)
            disk = ann.host.disk = FullDisk()  # type: ignore[misc]
            disk.is_full = True
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(1.0)
            assert "checkpoint-failed" in ann.metrics.events()
            assert versions_in(tmp_path / "ann") == [0, 0]
            disk.is_full = False
            await stage.wait(6.0)
            assert versions_in(tmp_path / "ann") == [1, 1]

    act(story)


def test_what_is_written_a_day_is_budgeted(tmp_path: Path) -> None:
    """A checkpoint and the learner's own state are 16 bytes a parameter; an explicit wish goes before."""

    async def written(**options: Any) -> int:
        async with Stage(tmp_path / str(len(options))) as stage:
            elements = Layout.of(stage.manifest).elements
            if options:
                options["write_bytes_per_day"] = 14 * elements * 86400 / 100.0
            ann = await stage.found(checkpoint_s=20.0, **options)
            await stage.wait(1.0)
            before = ann.metrics.events().count("checkpoint")
            for _ in range(10):
                await stage.train(ann, *[1.0] * 4)
                await stage.wait(30.0)
            return ann.metrics.events().count("checkpoint") - before

    async def story() -> None:
        assert await written() >= 9
        assert 2 <= await written(write_bytes_per_day=1.0) <= 4

    act(story)


def test_the_budget_of_writes_is_kept_at_defaults_up_to_ten_million_parameters() -> None:
    assert shortest_s(10_000_000, 6, None) == 0.0
    between_s = shortest_s(10_000_000, 6, 19e9)
    assert (6 + 8) * 10_000_000 * 86400 / between_s == pytest.approx(19e9)
    assert shortest_s(10_000_000_000, 6, 19e9) == 3600.0, "no more than an hour is lost, whatever it writes"


def test_a_copy_that_is_held_up_for_minutes_costs_one_checkpoint_and_not_all_that_follow(tmp_path: Path) -> None:
    """The machine swaps, or a merge is very large."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(checkpoint_s=30.0)
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            ann.held["tensors"] = []
            await stage.wait(200.0)
            assert versions_in(tmp_path / "ann") == [0, 0]
            await ann.release("tensors")
            await stage.wait(100.0)
            assert versions_in(tmp_path / "ann") == [1, 1]

    act(story)


def test_who_comes_back_from_a_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """Parameters and momentum: the next versions are those that everybody else computes."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside(has_learner=False)
            await stage.train(ann, *[1.0] * 8)
            await stage.wait(1.0)
            assert same(ann, bob)
            stage.kill(ann)
            again = await stage.add("ann", state_of(tmp_path / "ann"), identity=FOUNDER)
            assert same(again, bob)
            for shard in (ShardId(s) for s in range(len(again.versions))):
                led = tuple(again.peer.machine.view.ancestry(shard))
                assert led
                assert led == tuple(bob.peer.machine.view.ancestry(shard))
                assert set(led[1:]) <= set(again.peer.driver.cargo.shelves[shard].proofs)
            await stage.ready(again)
            await stage.wait(3.0)
            await stage.train(again, *[1.0] * 8)
            assert same(again, bob)
            assert min(again.versions) >= 3
            assert again.faults() == bob.faults() == {}

    act(story)


def test_what_is_left_in_order_is_saved(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.wait(1.0)
            await stage.train(ann, 1.0, 1.0, 1.0)
            ann.peer.request_leave("asked to")
            for _ in range(5):
                await stage.rest(ann)
                await stage.wait(1.0)
            assert ann.ending is not None
            assert (ann.ending.status, ann.ending.reason) == (0, "asked to")
            assert versions_in(tmp_path / "ann") == ann.versions
            found = load(tmp_path / "ann" / "checkpoint")
            assert found is not None
            assert torch.equal(found.theta, ann.state.theta)
            assert torch.equal(found.momentum, ann.state.momentum)
            assert all(dict(proof.state.marks)[ann.peer.supervision.learner].steps == 3 for proof in found.shards)  # type: ignore[index]

    act(story)
