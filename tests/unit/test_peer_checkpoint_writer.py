"""Checkpoints of a peer that goes on, and what a peer is that comes back from one: real files, a stage around."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from actors import FOUNDER
from troupe import Member, Stage, act

from p2pdiloco.cli.main import _parse
from p2pdiloco.cli.peer_options import peer_options
from p2pdiloco.peer import commit_wal
from p2pdiloco.peer.checkpoint import indices, load
from p2pdiloco.peer.checkpoint_writer import LAST_PAUSE_S, LAST_S
from p2pdiloco.peer.disk_budget import DiskBudget
from p2pdiloco.peer.host import Buffer
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.util.files import SECTOR_BYTES, LocalDisk


def state_of(folder: Path) -> InitialState:
    """What its checkpoint holds."""
    found = load(folder / "checkpoint")
    assert found is not None
    return InitialState(found.shards, found.theta, found.momentum)


def versions_in(folder: Path) -> list[int]:
    """Of its checkpoint; it is checked when it is read."""
    found = load(folder / "checkpoint")
    return [] if found is None else [proof.state.head.version for proof in found.shards]


def copied_in(folder: Path) -> list[int]:
    """Of the newest checkpoint as it was copied, without what was committed since."""
    return [proof.state.head.version for proof in indices(folder / "checkpoint")[0][1].shards]


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
            assert copied_in(tmp_path / "ann") == [1, 3], "each is of the moment of its copy"
            await stage.wait(61.0)
            assert versions_in(tmp_path / "ann") == [3, 3]
            assert copied_in(tmp_path / "ann") == [3, 3], "what was committed meanwhile is not in the first one"

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
            assert copied_in(tmp_path / "ann") == [0, 0], "the copy waits for its turn"
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


class CarefulDisk(LocalDisk):
    """Knows what was forced to it."""

    def __init__(self) -> None:
        self.unforced: set[str] = set()
        self.appended = 0

    def append(self, path: Path, part: Buffer) -> None:
        self.unforced.add(path.name)
        super().append(path, part)

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        self.unforced.add(path.name)
        self.appended += path.name.startswith("since-")
        super().put(path, at, *parts)

    def sync(self, path: Path) -> None:
        self.unforced.discard(path.name)
        super().sync(path)


def test_what_is_committed_is_forced_to_the_disk(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 3000.0))
            disk = ann.host.disk = CarefulDisk()  # type: ignore[misc]
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 8)
            await stage.wait(11.0)
            assert disk.appended == 2 * 4, "each when it was made, and when it was taken"
            assert not disk.unforced

    act(story)


class SlowDisk(LocalDisk):
    """Once a checkpoint is begun, what is asked for waits."""

    def __init__(self, member: Member, *, is_held: bool = True) -> None:
        self._member = member
        self._is_held = is_held
        self.appended = 0
        self.sizes: list[int] = []
        self.places: set[int] = set()

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        super().write(path, parts)
        if self._is_held and ".safetensors" in path.name:
            self._is_held = False
            self._member.held["disk"] = []

    def append(self, path: Path, part: Buffer) -> None:
        if ".safetensors" in path.name:
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

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(path, at, *parts)


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


async def leaves_a_full_disk(stage: Stage, *, full_s: float) -> Member:
    """A peer whose disk takes nothing when it ends, and for so long after that."""
    ann = await stage.found(checkpoint_s=3600.0)
    await stage.wait(1.0)
    disk = ann.host.disk = FullDisk()  # type: ignore[misc]
    disk.is_full = True
    await stage.train(ann, *[1.0] * 4)
    ann.peer.request_leave("asked to")
    for _ in range(5):
        await stage.rest(ann)
        await stage.wait(1.0)
    await stage.wait(full_s)
    assert (ann.ending is None) == (full_s < LAST_S)
    disk.is_full = False
    await stage.wait(2 * LAST_PAUSE_S)
    return ann


def test_the_last_checkpoint_is_tried_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await leaves_a_full_disk(stage, full_s=0.0)
            assert ann.ending is not None
            assert ann.ending.status == 0
            assert versions_in(tmp_path / "ann") == ann.versions != [0, 0]

    act(story)


def test_a_peer_that_cannot_save_its_last_state_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await leaves_a_full_disk(stage, full_s=LAST_S + LAST_PAUSE_S)
            assert ann.ending is not None
            assert ann.ending.status == 1
            assert "the last checkpoint was not written (No space left on device)" in ann.ending.reason
            assert versions_in(tmp_path / "ann") == [0, 0]

    act(story)


def budget_of(stage: Stage, between_s: float) -> float:
    """Bytes a day, with which checkpoints come so often while commits are kept."""
    return 6 * Layout.of(stage.manifest).elements * 86400 / between_s / 0.125


def test_what_is_written_a_day_is_budgeted(tmp_path: Path) -> None:
    """An explicit wish goes before."""

    async def written(between_s: float | None = None) -> int:
        async with Stage(tmp_path / str(between_s)) as stage:
            options: dict[str, Any] = {}
            if between_s is not None:
                options["write_bytes_per_day"] = budget_of(stage, between_s)
            ann = await stage.found(checkpoint_s=20.0, **options)
            await stage.wait(1.0)
            before = ann.metrics.events().count("checkpoint")
            for _ in range(10):
                await stage.train(ann, *[1.0] * 4)
                await stage.wait(30.0)
            return ann.metrics.events().count("checkpoint") - before

    async def story() -> None:
        assert await written() >= 9
        assert 2 <= await written(100.0) <= 4

    act(story)


def test_a_crash_costs_what_was_committed_in_the_last_seconds(tmp_path: Path) -> None:
    """However seldom whole checkpoints are written; with the bits that everybody else has, in all lives."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            options = {"write_bytes_per_day": budget_of(stage, 3000.0)}
            ann = await stage.found(**options)
            bob = await stage.beside(has_learner=False)
            await stage.wait(1.0)
            for _ in range(3):
                await stage.train(ann, *[1.0] * 8)
                await stage.wait(11.0)
                kept = ann.versions
                assert versions_in(tmp_path / "ann") == kept
                assert copied_in(tmp_path / "ann") == [kept[0] - 2] * 2
                await stage.train(ann, *[1.0] * 4)
                assert bob.versions == [kept[0] + 1] * 2
                stage.kill(ann)
                initial = state_of(tmp_path / "ann")
                assert [proof.state.head.version for proof in initial.shards] == kept
                assert all(len(proof.lineage) == kept[0] - 1 for proof in initial.shards)  # type: ignore[attr-defined]
                ann = await stage.add("ann", initial, identity=FOUNDER, **options)
                await stage.ready(ann)
                await stage.wait(3.0)
                assert same(ann, bob)

    act(story)


class LosingDisk(LocalDisk):
    """Fails when it is to force something to itself, and has then lost what was written since the last time."""

    is_failing = True

    def __init__(self) -> None:
        self._sizes: dict[Path, int] = {}

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        self._sizes.setdefault(path, path.stat().st_size)
        super().put(path, at, *parts)

    def sync(self, path: Path) -> None:
        size = self._sizes.pop(path, None)
        if self.is_failing:
            if size is not None:
                os.truncate(path, size)
            raise OSError(errno.EIO, "Input/output error")
        super().sync(path)


def test_what_a_failed_sync_has_lost_is_written_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 3000.0))
            bob = await stage.beside(has_learner=False)
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            disk = ann.host.disk = LosingDisk()  # type: ignore[misc]
            await stage.train(ann, *[1.0] * 4)
            disk.is_failing = False
            await stage.wait(11.0)
            assert versions_in(tmp_path / "ann") == ann.versions == bob.versions

    act(story)


@pytest.mark.parametrize("damage", ["cut", "flipped", "long", "gone"])
def test_what_is_torn_of_the_commits_costs_what_came_after_it(tmp_path: Path, damage: str) -> None:
    """And no more: the end of a file, a bit, a length, a whole segment."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 3000.0))
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(11.0)
            (segment,) = (tmp_path / "ann" / "checkpoint").glob("since-*")
            whole = segment.stat().st_size
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(11.0)
            data = bytearray(segment.read_bytes())
            stage.kill(ann)
            assert versions_in(tmp_path / "ann") == [2, 2]
            if damage == "gone":
                segment.unlink()
            elif damage == "cut":
                segment.write_bytes(data[: whole + 100])
            elif damage == "long":
                data[whole + commit_wal.PREFIX.size - 16] = 255  # the first byte of the two lengths
                segment.write_bytes(data)
            else:
                found = commit_wal.entries(segment, LocalDisk(), 1 << 20)
                *_, last = (entry for _, entry in found if entry.data_bytes)
                data[last.start + last.header_bytes + last.data_bytes - 1] ^= 1
                segment.write_bytes(data)
            expected = {"cut": [1, 1], "long": [1, 1], "flipped": [2, 1], "gone": [0, 0]}[damage]
            assert sorted(versions_in(tmp_path / "ann")) == sorted(expected)

    act(story)


def test_no_flipped_bit_of_what_was_committed_keeps_a_peer_from_its_checkpoint(tmp_path: Path) -> None:
    """All bits of the format and of the first entry's prefix, and some of what follows, others each time."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 3000.0))
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 8)
            await stage.wait(11.0)
            (segment,) = (tmp_path / "ann" / "checkpoint").glob("since-*")
            stage.kill(ann)
            good = segment.read_bytes()
            seed = Random().randrange(1 << 32)
            bits = [
                *range(8 * len(commit_wal.MAGIC)),
                *range(8 * SECTOR_BYTES, 8 * (SECTOR_BYTES + commit_wal.PREFIX.size)),
            ]
            first = [divmod(bit, 8) for bit in bits]
            drawn = [divmod(bit, 8) for bit in Random(seed).sample(range(8 * len(good)), 40)]
            for at, bit in [*first, *drawn]:
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                segment.write_bytes(bad)
                found = versions_in(tmp_path / "ann")
                assert len(found) == 2, (seed, at, bit)
                assert max(found) <= 2, (seed, at, bit)

    act(story)


def test_a_commit_that_does_not_fit_its_chain_is_not_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything counts it."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 3000.0))
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(11.0)
            (segment,) = (tmp_path / "ann" / "checkpoint").glob("since-*")
            stage.kill(ann)
            disk, altered = LocalDisk(), segment.read_bytes()[:SECTOR_BYTES]
            for header, entry in commit_wal.entries(segment, disk, 1 << 20):
                more = msgspec.structs.replace(header, tokens=header.tokens + 1)
                _, data = entry.read(disk)
                new = commit_wal.packed(entry.kind, more, len(data)) + data
                altered += new.ljust(commit_wal.next_sector(len(new)), b"\0")
            segment.write_bytes(altered)
            assert versions_in(tmp_path / "ann") == [0, 0]
            reasons = [
                record.fields["reason"] for record in caplog.records if "cannot replay a commit" in record.message
            ]  # type: ignore[attr-defined]
            assert reasons == ["its cumulative tokens are wrong"] * 2

    act(story)


def test_of_a_torn_checkpoint_nothing_is_lost_while_the_one_before_is_led_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 40.0))
            await stage.wait(1.0)
            for _ in range(6):
                await stage.train(ann, *[1.0] * 4)
                await stage.wait(15.0)
            folder = tmp_path / "ann" / "checkpoint"
            assert ann.metrics.events().count("checkpoint") > 2
            assert len(list(folder.glob("since-*"))) == len(list(folder.glob("state-*.json"))) == 2
            stage.kill(ann)
            assert versions_in(tmp_path / "ann") == ann.versions == [6, 6]
            newest = max(folder.glob("state-*.safetensors"))
            newest.write_bytes(newest.read_bytes()[:-1])
            assert versions_in(tmp_path / "ann") == [6, 6]

    act(story)


def test_after_a_fetched_state_the_next_checkpoint_comes_sooner(tmp_path: Path) -> None:
    """Commits lead nowhere where one is missing."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=budget_of(stage, 400.0))
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            for shelf in ann.driver.payload_cache.shards[:1]:
                shelf.payloads.clear()
            await stage.wait(11.0)
            assert sorted(versions_in(tmp_path / "ann")) == [0, 1]
            await stage.wait(100.0)
            assert copied_in(tmp_path / "ann") == [1, 1]
            await stage.wait(100.0)
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(100.0)
            assert copied_in(tmp_path / "ann") == [1, 1], "commits lead on from it"
            assert versions_in(tmp_path / "ann") == [2, 2]

    act(story)


def test_more_commits_than_the_budget_has_are_not_written(tmp_path: Path) -> None:
    """They would leave nothing for checkpoints, which come every hour then; until they are fewer."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(write_bytes_per_day=1000.0)
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 16)
            await stage.wait(20.0)
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(20.0)
            assert versions_in(tmp_path / "ann")[0] < 5
            await stage.wait(3600.0)
            assert copied_in(tmp_path / "ann") == [5, 5]

    act(story)


def test_checkpoints_by_the_users_clock_leave_the_rest_a_budget() -> None:
    timed = DiskBudget(19e9, 100_000_000, 6, are_timed=True)
    assert timed.checkpoint_s() == timed.learner_s() == 0.0
    assert timed.most_log_bytes_per_day == DiskBudget(19e9, 100_000_000, 6).most_log_bytes_per_day
    timed.log_bytes_per_day = 9e9
    assert timed.spare_bytes_per_s() == pytest.approx(10e9 / 86400.0)
    arguments = _parse(["join", "ADDR", "--checkpoint-s", "30", "--write-gb", "5"])
    options = peer_options(arguments, Path("state"))
    assert (options.checkpoint_s, options.write_bytes_per_day, options.are_checkpoints_timed) == (30.0, 5e9, True)
    assert not peer_options(_parse(["join", "ADDR"]), Path("state")).are_checkpoints_timed


def test_the_budget_of_writes_is_kept_at_defaults_up_to_a_hundred_million_parameters() -> None:
    day_s, most = 86400.0, 20e9
    for elements in (1_000_000, 10_000_000, 100_000_000):
        for log_bytes in (0.0, 6e9, 9.5e9):
            budget = DiskBudget(19e9, elements, 6)
            budget.is_logged, budget.log_bytes_per_day = log_bytes > 0, log_bytes
            checkpoints = 6 * elements * day_s / budget.checkpoint_s()
            learner = 8 * elements * day_s / budget.learner_s()
            assert log_bytes <= budget.most_log_bytes_per_day
            assert checkpoints + learner + log_bytes + budget.spare_bytes_per_s() * day_s < most  # type: ignore[operator]
    large = DiskBudget(19e9, 10_000_000_000, 6)
    assert large.checkpoint_s() == 3600.0, "no more than an hour is lost, whatever it writes"
    assert DiskBudget(None, 10_000_000, 6).checkpoint_s() == 0.0


def test_a_copy_that_is_held_up_for_minutes_costs_one_checkpoint_and_not_all_that_follow(tmp_path: Path) -> None:
    """The machine swaps, or a merge is very large."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(checkpoint_s=30.0)
            await stage.wait(1.0)
            await stage.train(ann, *[1.0] * 4)
            ann.held["tensors"] = []
            await stage.wait(200.0)
            assert copied_in(tmp_path / "ann") == [0, 0]
            await ann.release("tensors")
            await stage.wait(100.0)
            assert copied_in(tmp_path / "ann") == [1, 1]

    act(story)


def test_a_checkpoint_that_takes_long_is_written_less_often(tmp_path: Path) -> None:
    """Writing takes at most ``COST_SHARE`` of the time, or of the interval that the user wants."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(checkpoint_s=120.0)
            await stage.wait(1.0)
            ann.held["disk"] = []
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(125.0)
            await ann.release("disk")
            await stage.wait(1.0)
            written = copied_in(tmp_path / "ann")
            await stage.train(ann, *[1.0] * 4)
            await stage.wait(60.0)
            assert copied_in(tmp_path / "ann") == written
            await stage.wait(120.0)
            assert copied_in(tmp_path / "ann") != written

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
                assert set(led[1:]) <= set(again.peer.driver.payload_cache.shards[shard].proofs)
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
