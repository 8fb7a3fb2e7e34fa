"""Commits of its own lie on a peer's disk before anybody hears of them: whole peers on a stage."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from actors import FOUNDER, genesis
from troupe import Member, Stage, act

from p2pdiloco.codec.digests import list_bytes
from p2pdiloco.peer.durable_commits import BARRED, FOLDER, DurableCommits
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.util.files import LocalDisk
from p2pdiloco.wire.control_messages import CommitParts, encode, join_commit, split_commit


def files(member: Member) -> list[str]:
    folder = member.peer.options.folder / FOLDER
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


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
            assert len(files(ann)) == 2
            stage.kill(ann)
            again = await stage.add("ann", genesis(stage.manifest), identity=FOUNDER, has_learner=False)
            await stage.settle()
            assert [chain.head for chain in again.machine.core.chains] == heads

    act(story)


def test_a_commit_is_sent_and_counts_when_it_is_on_the_disk(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            ann.held["own"] = []
            await stage.train(ann, 1.0, 1.0)
            assert (ann.versions, bob.versions, files(ann)) == ([0, 0], [0, 0], [])
            await ann.release("own")
            assert (ann.versions, bob.versions, len(files(ann))) == ([0, 1], [0, 1], 1)

    act(story)


class FullDisk(LocalDisk):
    """Nothing can be written to it."""

    def write(self, path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        raise OSError(28, "No space left on device")


def test_a_disk_that_takes_nothing_does_not_stop_a_run(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            ann.host.disk = FullDisk()
            await stage.train(ann, 1.0, 1.0)
            assert (ann.versions, bob.versions, files(ann)) == ([0, 1], [0, 1], [])

    act(story)


def test_what_checkpoints_hold_is_removed(tmp_path: Path) -> None:
    """When the oldest of those that are kept holds it: a younger one may be torn."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(keep_checkpoints=2)
            await stage.train(ann, 1.0, 1.0, 1.0, 1.0)
            first = files(ann)
            assert await ann.peer.checkpoint_writer.save(is_last=False)
            await stage.settle()
            assert files(ann) == first
            await stage.train(ann, 1.0, 1.0)
            assert await ann.peer.checkpoint_writer.save(is_last=False)
            await stage.settle()
            assert len(files(ann)) == 1
            assert not set(files(ann)) & set(first)

    act(story)


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            ann.driver.own_commits._most_bytes = 1
            await stage.train(ann, *[1.0] * 8)
            assert sum(ann.versions) > 3
            assert len(files(ann)) == 1

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
    told = [record.fields for record in caplog.records if "own commits are sent" in record.message]  # type: ignore[attr-defined]
    assert told == [{"reason": "No space left on device"}] * 2


@pytest.mark.parametrize("spoilt", [b"", b"\x00\x00\x00\xff", b"\x00\x00\x00\x02no"])
def test_what_cannot_be_read_is_left_alone(tmp_path: Path, spoilt: bytes) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            folder = ann.peer.options.folder / FOLDER
            folder.mkdir(parents=True)
            (folder / "0-1-spoilt.commit").write_bytes(spoilt)
            (folder / ".0-2-torn.commit.part").write_bytes(spoilt)
            assert DurableCommits(folder, ann.host, 128).load() == []
            assert files(ann) == ["0-1-spoilt.commit"]

    act(story)


def test_a_commit_that_the_disk_has_altered_is_none(tmp_path: Path) -> None:
    """Such as one of a shard that is not there: the next checkpoint, which leaves it behind, found no head of that."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            folder = ann.peer.options.folder / FOLDER
            (name,) = files(ann)
            ((header, data),) = DurableCommits(folder, ann.host, 128).load()
            body = encode(msg.Commit(msgspec.structs.replace(header, shard=ShardId(9))))
            (folder / name).write_bytes(len(body).to_bytes(4, "big") + body + data)
            assert DurableCommits(folder, ann.host, 128).load() == []

    act(story)


def test_a_peer_that_makes_two_commits_of_a_version_owns_no_more(tmp_path: Path) -> None:
    """The founder itself, with a changed program; also where the second comes in a state's lineage."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            cat = await stage.add("cat", genesis(stage.manifest), has_learner=False, weight=0.0)
            await stage.wait(3.0)
            stage.catch = lambda sender, to, message: isinstance(message, msg.Commit)
            await stage.train(ann, 1.0, 1.0)
            caught = next(caught for caught in stage.caught if caught.to == bob.id)
            stage.catch = lambda sender, to, message: False
            assert isinstance(caught.message, msg.Commit)
            header, parts = caught.message.header, split_commit(memoryview(caught.payload), list_bytes(64))
            second = msgspec.structs.replace(header, step=header.step + 1)
            for one in (header, second):
                signature = FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(one)))
                sent = CommitParts(signature, parts.digests, parts.gradient)
                await stage.deliver(bob, ann.id, msg.Commit(one), join_commit(sent))
            assert bob.faults() == {"equivocation": 1}
            await stage.settle()
            assert all(ann.id in member.machine.view.barred for member in (bob, cat)), "cat was told"

    act(story)


def test_a_restart_forgets_no_ban_that_is_running(tmp_path: Path) -> None:
    """Neither what was proved nor what was refused here; what lies there and is no proof counts for nothing."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            await stage.train(ann, 1.0, 1.0)
            header = bob.machine.core.chains[1].log[-1]
            second = msgspec.structs.replace(header, step=header.step + 1)
            genuine = [FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(one))) for one in (header, second)]
            bob.driver.feed(ev.Contradicted(msg.Equivocation(header, second, genuine[0], genuine[1])))
            bob.machine.equivocations.bar(PeerId("eve"), ShardId(0), 1)
            await stage.wait(5.0)
            assert BARRED in files(bob)
            stage.kill(ann)  # who would tell of it again
            for spoilt, barred in ((False, {ann.id, "eve"}), (True, {"eve"})):
                if spoilt:
                    forged = msg.Equivocation(header, second, bytes(64), genuine[1])
                    known = msgspec.structs.replace(bob.machine.view.convictions(), proofs=(forged,))
                    (bob.peer.options.folder / FOLDER / BARRED).write_bytes(encode(known))
                stage.kill(bob)
                bob = await stage.add("bob", genesis(stage.manifest), has_learner=False, weight=0.0)
                assert bob.machine.view.barred == barred
            (bob.peer.options.folder / FOLDER / BARRED).write_bytes(b"nonsense")
            assert bob.driver.own_commits.load_convictions().proofs == ()

    act(story)


def test_a_commit_that_proves_something_is_taken_before_anything_is_swept(tmp_path: Path) -> None:
    """Liars' seeds 70 and 122: its payload was gone before the machine had heard of it."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            stage.catch = lambda sender, to, message: isinstance(message, msg.Commit)
            await stage.train(ann, 1.0, 1.0)
            (caught,) = stage.caught
            assert isinstance(caught.message, msg.Commit)
            header, parts = caught.message.header, split_commit(memoryview(caught.payload), list_bytes(64))
            too_far = msgspec.structs.replace(header, step=10**6)
            for one, version in ((too_far, 0), (header, 1)):
                bob.driver.payload_cache._swept_at = bob.host.now() - 10.0 * version
                signature = FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(one)))
                sent = CommitParts(signature, parts.digests, parts.gradient)
                await stage.deliver(bob, ann.id, msg.Commit(one), join_commit(sent))
                assert bob.versions == [0, version]
            assert ann.id in bob.machine.view.barred
            assert not any(isinstance(event, ev.Failed) for event in bob.events), "no state was fetched instead"

    act(story)


def test_a_proof_that_is_none_is_its_senders_fault(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            await stage.train(ann, 1.0, 1.0)
            header = bob.machine.core.chains[1].log[-1]
            genuine = FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(header)))
            second = msgspec.structs.replace(header, step=header.step + 1)
            for number, signature in enumerate((bytes(64), genuine), 1):
                await stage.deliver(bob, ann.id, msg.Equivocation(header, second, genuine, signature))
                assert bob.faults() == {"payload": number}
                assert not bob.machine.view.barred

    act(story)
