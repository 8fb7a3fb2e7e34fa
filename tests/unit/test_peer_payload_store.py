"""Payloads beyond the newest lie on the disk: read when they are asked for, whatever the disk does."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import pytest
import torch
from troupe import Member, Stage, act

from p2pdiloco.peer import payload_store
from p2pdiloco.peer.host import Buffer
from p2pdiloco.peer.payload_cache import OWN_WINDOWS, SWEEP_S
from p2pdiloco.peer.payload_store import AGAIN_S, READ_BYTES, Held
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, ShardId, digest_of
from p2pdiloco.util.files import LOCAL, SECTOR_BYTES, LocalDisk


def held_by(member: Member) -> list[Held]:
    return [held for shelf in member.driver.payload_cache.shards for held in shelf.payloads.values()]


def file_of(member: Member) -> Path:
    return member.peer.options.folder / "payloads" / "payloads.bin"


def are_apart(held: list[Held]) -> bool:
    """Whether no two have bytes of the file in common."""
    spans = sorted((one.at, one.at + one.size) for one in held if one.path is not None)
    return all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


async def rested(stage: Stage) -> None:
    await stage.wait(2 * SWEEP_S)
    await stage.wait(2 * SWEEP_S)


async def parted(stage: Stage) -> tuple[Member, Member]:
    """Two of whom one trains on alone, and keeps nothing in memory."""
    ann = await stage.found(payload_memory_bytes=0)
    bob = await stage.beside(has_learner=False)
    stage.disconnect(ann, bob)
    await stage.train(ann, *map(float, range(1, 13)))
    await rested(stage)
    return ann, bob


def test_all_but_the_newest_are_in_a_file_whose_places_are_used_again(tmp_path: Path) -> None:
    """What the machine names is kept, in memory or not; what it does not takes no place."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            await stage.train(ann, *map(float, range(1, 17)))
            await rested(stage)
            held = held_by(ann)
            assert len(held) > 4
            assert all(one.data is None for one in held), "half a byte a parameter holds none of these"
            assert {one.path for one in held} == {file_of(ann)}
            assert are_apart(held)
            for shard, shelf in enumerate(ann.driver.payload_cache.shards):
                assert set(shelf.payloads) == ann.machine.payloads(ShardId(shard))
                assert all(digest_of(one.read(LOCAL)) == one.digest for one in shelf.payloads.values())
            held.clear()  # who holds a payload keeps its place
            await stage.train(ann, *map(float, range(1, 161)))
            await rested(stage)
            held, places = held_by(ann), ann.driver.store.places
            assert are_apart(held)
            assert places.allocated_bytes() == len(held) * SECTOR_BYTES
            assert places.end <= 2 * places.allocated_bytes()
            assert file_of(ann).stat().st_size <= 2 * places.allocated_bytes()

    act(story)


def test_the_newest_stay_in_memory_as_far_as_they_fit(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=10_000_000)
            await stage.train(ann, *map(float, range(1, 17)))
            await rested(stage)
            assert not file_of(ann).exists()
            shelf = ann.driver.payload_cache.shards[0]
            newest = list(shelf.payloads.values())[-2:]
            beyond = shelf.beyond(sum(map(len, newest)))
            assert beyond
            assert {id(one) for one in shelf.payloads.values()} - {id(one) for one in beyond} == set(map(id, newest))

    act(story)


def test_what_is_still_to_be_merged_stays_in_memory(tmp_path: Path) -> None:
    """A disk that loses it would hold up a round."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            bob = await stage.beside(payload_memory_bytes=0)
            ann.held["tensors"] = []  # nothing is merged
            for _ in range(4):
                bob.learner.step(2.0)
            await stage.rest(bob)
            await stage.wait(5 * SWEEP_S)
            pending = bob.machine.contributions.pending
            assert pending
            for shard, one in pending.items():
                for member in (ann, bob):
                    held = member.driver.payload_cache.shards[shard].payloads[one.contribution.payload]
                    assert held.data is not None, member.id

    act(story)


def test_what_comes_again_is_in_memory_again(tmp_path: Path) -> None:
    """And needs no second place."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            store, shelf, digest = ann.driver.store, ann.driver.payload_cache.shards[0], digest_of(b"payload")
            shelf.put(digest, b"payload")
            held = shelf.payloads[digest]
            store.spill(held)
            await stage.wait(0.1)
            assert held.data is None
            shelf.put(digest, b"payload")
            assert shelf.payloads[digest] is held
            assert held.data == b"payload"
            before, written = store.places.allocated_bytes(), held.at
            store.spill(held)
            assert held.data is None
            assert held.at == written
            assert store.places.allocated_bytes() == before

    act(story)


def test_who_was_away_gets_versions_that_lie_on_the_disk(tmp_path: Path) -> None:
    """In the place of a state."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await parted(stage)
            assert all(one.data is None for one in held_by(ann))
            stage.connect(ann, bob)
            await stage.wait(5.0)
            assert bob.versions == ann.versions
            assert not any(isinstance(event, ev.Fetched) for event in bob.events)
            assert torch.equal(bob.state.theta, ann.state.theta)

    act(story)


def spoil_file(member: Member, how: str) -> None:
    path, data = file_of(member), bytearray(file_of(member).read_bytes())
    for one in held_by(member):
        if one.path is not None:
            data[one.at + one.size // 2] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:1] if how == "cut" else data)


@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_what_the_disk_has_lost_is_not_sent(tmp_path: Path, how: str) -> None:
    """Who asked for it fetches the state."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await parted(stage)
            spoil_file(ann, how)
            stage.connect(ann, bob)
            await stage.wait(10.0)
            assert any(isinstance(event, ev.Fetched) for event in bob.events)
            assert bob.versions == ann.versions
            assert torch.equal(bob.state.theta, ann.state.theta)
            assert bob.faults() == ann.faults() == {}

    act(story)


@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "no room"])
def test_a_learner_whose_contribution_is_lost_takes_the_global_parameters(tmp_path: Path, how: str) -> None:
    """Anything else would leave what it gave in its parameters, to be given again."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside(payload_memory_bytes=0)
            lost: list[Held] = []

            def lose(event: ev.Event, effects: list[ef.Effect]) -> None:
                for effect in effects:
                    if isinstance(effect, ef.Apply) and effect.settled:
                        payloads = bob.driver.payload_cache.shards[effect.header.shard].payloads
                        held = payloads[effect.settled[0]]
                        lost.append(held)
                        if how == "no room":
                            del payloads[effect.settled[0]]
                            continue
                        assert held.data is not None
                        data, held.path, held.data = bytearray(held.data), tmp_path / "lost", None
                        if how != "gone":
                            data[0] ^= how == "flipped"
                            held.path.write_bytes(data[: len(data) - (how == "cut")])

            bob.before = lose
            for _ in range(2):
                ann.learner.step(1.0)
                bob.learner.step(4.0)
            for _ in range(2):
                await stage.rest(ann)
                await stage.rest(bob)
            assert len(lost) == 1
            assert ann.versions == bob.versions == [0, 1]
            unmerged = torch.cat((torch.full((64,), 8.0), torch.zeros(64)))
            assert torch.equal(bob.learner.flat(), bob.state.theta + unmerged)

    act(story)


class Full(LocalDisk):
    is_full = True
    tries = 0

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        if self.is_full:
            self.tries += 1
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        super().put(path, at, *parts)


def test_a_full_disk_costs_memory_and_no_payload(tmp_path: Path) -> None:
    """It is tried again after a while, and not before; nothing half-written stays."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            disk = ann.host.disk = Full()  # type: ignore[misc]
            await stage.train(ann, *map(float, range(1, 9)))
            await rested(stage)
            tries = disk.tries
            assert tries
            assert not file_of(ann).exists()
            assert all(one.data is not None for one in held_by(ann))
            assert not any(one.path for one in held_by(ann)), "their places are free, and may become others'"
            await rested(stage)
            assert disk.tries == tries
            disk.is_full = False
            await stage.wait(AGAIN_S + SWEEP_S)
            await rested(stage)
            assert any(one.data is None for one in held_by(ann))

    act(story)


def test_no_more_is_written_than_a_day_allows(tmp_path: Path) -> None:
    """The last own contributions stay in memory then; older ones, and of the log what has no room there, go: memory
    does not grow with the rounds."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0, write_bytes_per_day=24.0)
            await stage.train(ann, *map(float, range(1, 25)))
            await rested(stage)
            assert ann.driver.store.places.allocated_bytes() <= 2 * SECTOR_BYTES, (
                "what an hour allows, and the one that went beyond"
            )
            ledgers = ann.machine.contributions.ledgers
            for shard, shelf in enumerate(ann.driver.payload_cache.shards):
                edges, window = (
                    ledgers[shard].edges,
                    ann.driver.store.window_bytes(ann.state.layout.shards[shard].elements, 0.0),
                )
                own = {edge.payload for edge in edges}
                assert len(own) > 4
                held = sum(one.size for digest, one in shelf.payloads.items() if digest in own and one.data is not None)
                assert held <= OWN_WINDOWS * window

    act(story)


def test_what_an_earlier_life_left_goes_first(tmp_path: Path) -> None:
    left = tmp_path / "ann" / "payloads" / "00000000-000000000001"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"left")

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            await stage.found()
            await stage.wait(0.1)
            assert not left.exists()

    act(story)


def test_a_payload_that_is_being_read_keeps_its_place(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            store = ann.driver.store
            held = Held(digest_of(b"payload"), b"payload")
            store.spill(held)
            await stage.wait(0.1)
            assert held.data is None
            store.drop([held])
            store.sweep()
            await stage.wait(0.1)
            assert held.read(LOCAL) == b"payload"
            store.spill(other := Held(digest_of(b"other"), b"other"))
            await stage.wait(0.1)
            assert held.read(LOCAL) == b"payload"
            assert other.read(LOCAL) == b"other"
            at = held.at
            del held
            store.sweep()
            store.spill(third := Held(digest_of(b"third"), b"third"))
            await stage.wait(0.1)
            assert third.at == at
            store.drop([other, third])
            del other, third
            store.sweep()
            await stage.wait(0.1)
            assert not file_of(ann).exists(), "of which nothing is needed"

    act(story)


def test_what_was_dropped_while_it_could_not_be_written_frees_its_place_once(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            store, disk = ann.driver.store, Full()
            ann.host.disk = disk  # type: ignore[misc]
            held = Held(digest_of(b"payload"), b"payload")
            store.spill(held)
            store.drop([held])
            await stage.wait(0.1)
            assert disk.tries == 1
            del held
            store.sweep()
            assert (store.places.end, store.places.allocated_bytes()) == (0, 0)

    act(story)


def test_what_is_read_at_once_is_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            store, data = ann.driver.store, bytes(READ_BYTES // 4)
            large = [Held(Digest(digest_of(data)), data) for _ in range(6)]
            for held in large:
                store.spill(held)
            await stage.wait(0.1)
            came, failed = list[int](), list[bool]()
            for held in large:
                store.fetch(held, lambda data: came.append(len(data)), lambda: failed.append(True))
            await stage.wait(0.1)
            assert (len(came), len(failed)) == (4, 2)
            store.fetch(large[0], lambda data: came.append(len(data)), lambda: failed.append(True))
            await stage.wait(0.1)
            assert (len(came), len(failed)) == (5, 2)

    act(story)


def test_reads_that_failed_leave_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_store, "READ_BYTES", 4)

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            store, came, failed = ann.driver.store, list[bytes](), list[bool]()
            lost, kept = (Held(digest_of(data), data) for data in (b"lost", b"kept"))
            for one in (lost, kept):
                store.spill(one)
            await stage.wait(0.1)
            lost.path = tmp_path / "gone"
            for one in (lost, kept):
                store.fetch(one, lambda data: came.append(bytes(data)), lambda: failed.append(True))
                await stage.wait(0.1)
            assert (came, failed) == ([b"kept"], [True])

    act(story)


def test_a_payload_that_is_larger_than_what_is_read_at_once_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have shards of any size, and so payloads."""
    monkeypatch.setattr(payload_store, "READ_BYTES", 1000)

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(payload_memory_bytes=0)
            store, came, failed = ann.driver.store, list[int](), list[bool]()
            held = [Held(digest_of(data), data) for data in (b"a" * 1001, b"b")]
            for one in held:
                store.spill(one)
            await stage.wait(0.1)
            for one in held:
                store.fetch(one, lambda data: came.append(len(data)), lambda: failed.append(True))
            await stage.wait(0.1)
            assert (came, failed) == ([1001], [True])

    act(story)
