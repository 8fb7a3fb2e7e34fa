"""The write-ahead log: own commits lie on a peer's disk before anybody hears of them. Whole peers on a stage."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from actors import FOUNDER, genesis
from troupe import Member, Stage, act

from p2pdiloco.peer import commit_wal
from p2pdiloco.peer.commit_wal import MADE, MAGIC, CommitLog, entries, next_sector, numbers, packed, path_of
from p2pdiloco.peer.host import Buffer
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.protocol.messages import CommitHeader, commit_id
from p2pdiloco.util.files import LOCAL, LocalDisk

MOST_BYTES = 1 << 20


def folder_of(member: Member) -> Path:
    return member.peer.options.folder / "checkpoint"


def logged(folder: Path) -> list[tuple[CommitHeader, bytes]]:
    """The commits of the log in ``folder``, with their data, the oldest first."""
    every = [commit for number in numbers(folder, LOCAL) for commit in logged_in(folder, number) if commit[1]]
    return list({commit_id(header): (header, data) for header, data in every}.values())


def logged_in(folder: Path, number: int) -> list[tuple[CommitHeader, bytes]]:
    found = entries(path_of(folder, number), LOCAL, MOST_BYTES)
    return [(header, entry.read(LOCAL)[1]) for header, entry in found]


def segment_of(*commits: tuple[CommitHeader, bytes]) -> bytes:
    parts = [MAGIC, *(packed(MADE, header, len(data)) + data for header, data in commits)]
    return b"".join(part.ljust(next_sector(len(part)), b"\0") for part in parts)


def commits_of(member: Member) -> list[Digest]:
    return [commit_id(header) for header, _ in logged(folder_of(member))]


def next_life(stage: Stage, member: Member) -> CommitLog:
    return CommitLog(folder_of(member), member.host, member.id, Layout.of(stage.manifest))


async def followed(stage: Stage) -> tuple[Member, Member]:
    """The founder, who owns everything, and a follower."""
    ann = await stage.found()
    bob = await stage.beside(has_learner=False)
    return ann, bob


def test_killed_between_sending_and_saving_a_peer_makes_the_same_commit(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0, 1.0, 1.0)
            heads = [chain.head for chain in ann.machine.core.chains]
            assert ann.versions == [1, 1]
            assert len(commits_of(ann)) == 2
            stage.kill(ann)
            again = await stage.add("ann", genesis(stage.manifest), identity=FOUNDER, has_learner=False)
            await stage.settle()
            assert [chain.head for chain in again.machine.core.chains] == heads

    act(story)


def test_a_commit_is_sent_and_counts_when_it_is_on_the_disk(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            ann.held["log"] = []
            await stage.train(ann, 1.0, 1.0)
            assert (ann.versions, bob.versions, commits_of(ann)) == ([0, 0], [0, 0], [])
            await ann.release("log")
            assert (ann.versions, bob.versions, len(commits_of(ann))) == ([0, 1], [0, 1], 1)

    act(story)


class FullDisk(LocalDisk):
    """Has room for ``room`` bytes more of the log, and for nothing else."""

    def __init__(self, room: int = 0) -> None:
        self.room = room

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        data = b"".join(parts)
        if self.room:
            super().put(path, at, data[: self.room])
        if len(data) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_takes_nothing_does_not_stop_a_run(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            ann.host.disk = FullDisk()
            await stage.train(ann, 1.0, 1.0)
            assert (ann.versions, bob.versions, commits_of(ann)) == ([0, 1], [0, 1], [])

    act(story)


def test_what_a_full_disk_has_torn_is_written_over(tmp_path: Path) -> None:
    """What comes after it can be read."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            disk, segments = ann.host.disk, numbers(folder_of(ann), LOCAL)
            ann.host.disk = FullDisk(100)
            await stage.train(ann, 1.0, 1.0)
            ann.host.disk = disk
            await stage.train(ann, 1.0, 1.0)
            assert sum(ann.versions) == 3
            assert [header.version for header, _ in logged(folder_of(ann))] == [1, 2]
            assert numbers(folder_of(ann), LOCAL) == segments

    act(story)


class FailingDisk(LocalDisk):
    """Forces nothing to itself."""

    def sync(self, path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")


def test_after_a_failed_sync_another_segment_is_begun(tmp_path: Path) -> None:
    """Nobody knows what of the old one is on the disk."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            disk, segments = ann.host.disk, numbers(folder_of(ann), LOCAL)
            ann.host.disk = FailingDisk()
            await stage.train(ann, 1.0, 1.0)
            ann.host.disk = disk
            await stage.train(ann, 1.0, 1.0)
            assert numbers(folder_of(ann), LOCAL) == [*segments, segments[-1] + 1]
            ((header, _),) = logged_in(folder_of(ann), segments[-1] + 1)
            assert header.version == 2

    act(story)


def test_a_segment_that_cannot_be_begun_is_not_left_behind(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            before = LOCAL.names(folder_of(ann))
            log = next_life(stage, ann)
            ann.host.disk = FailingDisk()
            with pytest.raises(OSError, match="Input/output"):
                await log.begin_segment([None, None], is_bounded=False)
            assert LOCAL.names(folder_of(ann)) == before

    act(story)


def test_what_checkpoints_hold_is_removed(tmp_path: Path) -> None:
    """When the oldest of those that are kept holds it: a younger one may be torn."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(keep_checkpoints=2)
            await stage.train(ann, 1.0, 1.0, 1.0, 1.0)
            first = commits_of(ann)
            assert len(first) == 2
            assert await ann.peer.checkpoint_writer.save(is_last=False)
            assert commits_of(ann) == first
            await stage.train(ann, 1.0, 1.0)
            assert await ann.peer.checkpoint_writer.save(is_last=False)
            assert len(commits_of(ann)) == 1
            assert not set(commits_of(ann)) & set(first)

    act(story)


def test_a_segment_begins_with_own_commits_that_its_checkpoint_may_not_hold(tmp_path: Path) -> None:
    """Such as one that was made, and perhaps sent, and not applied when the checkpoint began."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            before = ann.machine.view.heads()
            await stage.train(ann, 1.0, 1.0, 1.0, 1.0)
            made = logged(folder_of(ann))
            heads = [ann.machine.view.heads()[0], before[1]]
            number = await ann.driver.commit_log.begin_segment(heads, is_bounded=True)
            commit_wal.remove(folder_of(ann), LOCAL, before=number)
            assert logged(folder_of(ann)) == [commit for commit in made if commit[0].shard == 1]

    act(story)


def test_own_commits_that_no_checkpoint_needs_are_bounded(tmp_path: Path) -> None:
    """Where the budget has nothing for others' commits, no replay needs them."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            heads = ann.machine.view.heads()
            ann.driver.commit_log._most_own_bytes = 1
            await ann.driver.commit_log.begin_segment(heads, is_bounded=False)
            await stage.train(ann, *[1.0] * 8)
            assert len(commits_of(ann)) == sum(ann.versions) > 3
            number = await ann.driver.commit_log.begin_segment(ann.machine.view.heads(), is_bounded=True)
            commit_wal.remove(folder_of(ann), LOCAL, before=number)
            await stage.train(ann, *[1.0] * 8)
            assert len(commits_of(ann)) == 2

    act(story)


def test_a_disk_that_takes_none_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Until it takes one again: ten lines a second had hidden all else."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            disk = ann.host.disk
            for _ in range(2):
                ann.host.disk = FullDisk()
                await stage.train(ann, *[1.0] * 8)
                ann.host.disk = disk
                await stage.train(ann, *[1.0] * 8)

    act(story)
    told = [record.fields for record in caplog.records if "cannot write own commits" in record.message]  # type: ignore[attr-defined]
    assert told == [{"reason": "No space left on device"}] * 2


@pytest.mark.parametrize("spoilt", [b"", b"\x00\x00\x00\xff", b"\x00\x00\x00\x02no", MAGIC, MAGIC + bytes(5000)])
def test_what_cannot_be_read_is_left_alone(tmp_path: Path, spoilt: bytes) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            segment = path_of(folder_of(ann), 99)
            segment.parent.mkdir(parents=True, exist_ok=True)
            segment.write_bytes(spoilt)
            assert next_life(stage, ann).load([None, None]) == []
            assert segment.read_bytes() == spoilt

    act(story)


def test_a_commit_of_a_shard_that_is_not_there_is_none(tmp_path: Path) -> None:
    """The next checkpoint, which leaves it behind, found no head of that."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            ((header, data),) = logged(folder_of(ann))
            more = msgspec.structs.replace(header, shard=ShardId(9))
            path_of(folder_of(ann), 1).write_bytes(segment_of((more, data)))
            assert next_life(stage, ann).load([None, None]) == []

    act(story)


def test_an_altered_header_ends_its_segment(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, *[1.0] * 4)
            first, second = logged(folder_of(ann))
            whole = segment_of(first, second)
            at = whole.index(second[0].record.encode())
            other = b"e" if whole[at : at + 1] == b"f" else b"f"
            path_of(folder_of(ann), 1).write_bytes(whole[:at] + other + whole[at + 1 :])
            assert logged(folder_of(ann)) == [first]

    act(story)


def test_a_length_that_no_commit_has_is_not_believed(tmp_path: Path) -> None:
    """No memory suffices for it, and a folder may come from another machine, with a checksum that is right."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            ((header, data),) = logged(folder_of(ann))
            path = path_of(folder_of(ann), 1)
            for length, found in ((len(data), [header]), (len(data) | 1 << 60, [])):
                path.write_bytes(MAGIC.ljust(next_sector(len(MAGIC)), b"\0") + packed(MADE, header, length) + data)
                assert [one for one, _ in entries(path, LOCAL, MOST_BYTES)] == found

    act(story)
