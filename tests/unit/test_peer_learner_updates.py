"""Shifts and snapshots use few slots, whose memory stays; other memory goes when it has rested. What shifts are is in
test_peer_model_state.py."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest
import torch

from p2pdiloco.peer import learner_updates
from p2pdiloco.peer.learner_updates import LearnerUpdates, Moves, Shifts
from p2pdiloco.protocol.ids import FragmentId, LearnerId, ShardId
from p2pdiloco.protocol.manifest import Layout, TensorSpec, make_layout
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors

SIZE = 1 << 16
LEARNER = LearnerId("peer/1")
FRAGMENTS = 6
SHARDS = tuple(ShardId(i) for i in range(FRAGMENTS))
PAGES = 4 * SIZE // resource.getpagesize()
"""Pages of memory that a shard fills."""
LASTING = 2
"""Slots that keep their memory, with a fragment's round at each step."""
NO_MOVES = Moves(LEARNER, (), (), is_reset=False)
Stand = tuple[LearnerUpdates, SharedVectors]


def specs_of(fragments: int) -> tuple[TensorSpec, ...]:
    """A tensor each."""
    return tuple(
        TensorSpec(name=f"w{i}", shape=(SIZE,), merge="direct", fragment=FragmentId(i)) for i in range(fragments)
    )


def layout_of(fragments: int) -> Layout:
    """A shard each."""
    return make_layout(specs_of(fragments), fragments, SIZE, "direct")


def slots_of(vectors: SharedVectors) -> int:
    """Slots of shift and snapshot that have memory."""
    return (os.fstat(vectors.fd).st_blocks * 512 - 4 * FRAGMENTS * SIZE) // (4 * SIZE)


@pytest.fixture
def stand() -> Iterator[Stand]:
    """A learner that took everything a while ago."""
    with SharedVectors.create(FRAGMENTS * SIZE) as vectors:
        queue = LearnerUpdates(layout_of(FRAGMENTS), vectors, FRAGMENTS)
        vectors.theta.fill_(1.0)
        queue.load(LEARNER)
        queue.acknowledge(SHARDS)
        for _ in range(2):
            queue.memory.release_unused()
        yield queue, vectors


def shift(queue: LearnerUpdates, shard: ShardId, value: float) -> None:
    handover = queue.begin_shift(shard, NO_MOVES, lambda _: ())
    span = slice(shard * SIZE, (shard + 1) * SIZE)  # in the flat layout
    handover.take(0, span, torch.zeros(SIZE), torch.full((SIZE,), value))


def test_rounds_use_the_same_memory_again(stand: Stand) -> None:
    """The kernel's pages are not fetched anew, however long the peer rests between two rounds. A count of faults over
    four rounds of all fragments: none; twice 6 x 64 pages a round where memory is given back."""
    queue, vectors = stand
    flat = FlatParameters(
        [(spec.name, torch.ones(SIZE)) for spec in specs_of(FRAGMENTS)], specs_of(FRAGMENTS), layout_of(FRAGMENTS)
    )
    faults = []
    for _ in range(6):
        for shard in SHARDS:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            queue.begin_snapshot(FragmentId(shard))
            at = queue.memory.starts("snapshot", (shard,))
            assert at is not None
            flat.copy_to(vectors.snapshot, (shard,), at)
            queue.complete_snapshot(FragmentId(shard))
            queue.end_snapshot(FragmentId(shard))
            shift(queue, shard, 2.0)
            queue.acknowledge((shard,))
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            for _ in range(3):
                queue.memory.release_unused()
    assert sum(faults[2 * FRAGMENTS :]) < 4 * FRAGMENTS * PAGES / 4, faults
    assert slots_of(vectors) <= 2 * LASTING


def test_what_the_learner_has_taken_is_given_back_when_it_has_rested(stand: Stand) -> None:
    queue, vectors = stand
    for shard in SHARDS:
        shift(queue, shard, 1.0)
    queue.acknowledge(SHARDS)
    assert slots_of(vectors) == FRAGMENTS
    queue.memory.release_unused()
    assert slots_of(vectors) == FRAGMENTS, "it may be wanted again at once"
    queue.memory.release_unused()
    assert slots_of(vectors) == LASTING


def test_what_is_used_between_two_rests_stays(stand: Stand) -> None:
    queue, vectors = stand
    for _ in range(3):
        for shard in SHARDS[: LASTING + 1]:
            shift(queue, shard, 2.0)
        queue.acknowledge(SHARDS[: LASTING + 1])
        assert slots_of(vectors) == LASTING + 1
        queue.memory.release_unused()
        assert slots_of(vectors) == LASTING + 1


def test_of_what_is_not_in_use_little_is_kept(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in use; and the first slots."""
    monkeypatch.setattr(learner_updates, "KEPT", SIZE)
    queue, vectors = stand
    for _ in range(3):
        for shard in SHARDS:
            shift(queue, shard, 2.0)
        assert slots_of(vectors) == FRAGMENTS
        queue.acknowledge(SHARDS[1:])
        assert slots_of(vectors) == LASTING + 1
        queue.acknowledge(SHARDS[:1])
        assert slots_of(vectors) == LASTING + 1


def test_memory_that_a_device_locks_is_that_of_what_was_in_flight(stand: Stand) -> None:
    queue, vectors = stand
    queue.memory.is_pinned = True
    for _ in range(3):
        for shard in SHARDS:
            queue.begin_snapshot(FragmentId(shard))
            queue.part("snapshot", shard).fill_(5.0)
            queue.complete_snapshot(FragmentId(shard))
            queue.end_snapshot(FragmentId(shard))
            shift(queue, shard, 2.0)
            queue.acknowledge((shard,))
    assert slots_of(vectors) <= 2 * LASTING


def test_a_snapshot_that_is_asked_for_again_stays(stand: Stand) -> None:
    """What was over comes late: the learner writes the next one."""
    queue, _ = stand
    for shard in SHARDS:
        queue.begin_snapshot(FragmentId(shard))
    last = SHARDS[-1]
    queue.complete_snapshot(FragmentId(last))
    queue.begin_snapshot(FragmentId(last))
    queue.part("snapshot", last).fill_(5.0)
    queue.end_snapshot(FragmentId(last))
    for _ in range(3):
        queue.memory.release_unused()
    assert queue.part("snapshot", last).min() == 5.0


def test_shifts_that_the_learner_has_not_taken_stay(stand: Stand) -> None:
    """In their slots, and in the queue behind them."""
    queue, vectors = stand
    for shard in SHARDS:
        shift(queue, shard, 1.0)
    queue.acknowledge(SHARDS)
    for shard in SHARDS:
        shift(queue, shard, 2.0)
        shift(queue, shard, 3.0)
    for _ in range(3):
        queue.memory.release_unused()
    last = SHARDS[-1]
    assert torch.equal(queue.part("shift", last), torch.full((SIZE,), 2.0))
    assert torch.equal(queue.part("queued", last), torch.full((SIZE,), 3.0))
    assert queue.acknowledge(SHARDS).added == SHARDS
    for _ in range(3):
        queue.memory.release_unused()
    assert torch.equal(queue.part("shift", last), torch.full((SIZE,), 3.0))
    assert not queue.memory.spare.values.any(), "nothing waits there any more"
    queue.acknowledge(SHARDS)
    for _ in range(2):
        queue.memory.release_unused()
    assert slots_of(vectors) == LASTING


def test_a_snapshot_stays_until_it_is_encoded(stand: Stand) -> None:
    queue, vectors = stand
    for shard in SHARDS:
        queue.begin_snapshot(FragmentId(shard))
    last = SHARDS[-1]
    queue.part("snapshot", last).fill_(5.0)
    for _ in range(3):
        queue.memory.release_unused()
    assert queue.part("snapshot", last).min() == 5.0, "the learner is writing it"
    queue.complete_snapshot(FragmentId(last))
    for _ in range(3):
        queue.memory.release_unused()
    assert queue.part("snapshot", last).min() == 5.0, "it is to be encoded"
    queue.release_snapshot(last)
    queue.end_snapshot(FragmentId(last))
    held = slots_of(vectors)
    for _ in range(2):
        queue.memory.release_unused()
    assert slots_of(vectors) == held - 1


def test_nothing_is_given_back_under_a_device_that_has_locked_it(stand: Stand) -> None:
    """Nor while there is no learner: the next one may have locked it before it says so."""
    queue, vectors = stand
    queue.memory.is_pinned = True
    queue.load(LEARNER)
    queue.acknowledge(SHARDS)
    for _ in range(3):
        queue.memory.release_unused()
    queue.memory.is_pinned = False
    queue.unload()
    for _ in range(3):
        queue.memory.release_unused()
    assert slots_of(vectors) == FRAGMENTS


def test_memory_for_shards_of_one_size_is_refused_where_they_differ() -> None:
    specs = (
        TensorSpec(name="small", shape=(SIZE // 2,), merge="direct", fragment=FragmentId(0)),
        TensorSpec(name="large", shape=(SIZE,), merge="direct", fragment=FragmentId(1)),
    )
    layout = make_layout(specs, 2, SIZE, "direct")
    with SharedVectors.create(layout.elements) as vectors, pytest.raises(ValueError, match="ring_elements"):
        LearnerUpdates(layout, vectors, 24)


def test_a_new_learner_is_given_the_parameters_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each when it has taken the one before, in the same slots; what changes meanwhile comes once."""
    monkeypatch.setattr(learner_updates, "PIECE", SIZE)
    first, second, third = (ShardId(i) for i in range(3))
    with SharedVectors.create(3 * SIZE) as vectors:
        queue = LearnerUpdates(layout_of(3), vectors, 24)
        vectors.theta.copy_(torch.arange(3.0 * SIZE))

        def held() -> int:
            return os.fstat(vectors.fd).st_blocks * 512 - 3 * 4 * SIZE

        assert queue.load(LEARNER) == Shifts((), (first,))
        assert held() == 4 * SIZE
        assert torch.equal(queue.part("shift", first), vectors.theta[:SIZE])
        for shard in (first, third):  # a commit
            vectors.theta[shard * SIZE : (shard + 1) * SIZE] += 2.0
            assert queue.begin_shift(shard, NO_MOVES, lambda _: ()).shifts == Shifts((), ())
        queue.part("queued", first).fill_(2.0)  # of the shard that is on its way; the last one's is in the parameters
        assert not queue.is_empty
        told = queue.acknowledge((first,))
        assert told == Shifts((first,), (second,))
        assert held() == 2 * 4 * SIZE
        assert torch.equal(queue.part("shift", first), torch.full((SIZE,), 2.0))
        assert queue.acknowledge((first,)) == Shifts((), ()), "the second is not taken yet"
        assert queue.acknowledge((second,)) == Shifts((), (third,), is_last_piece=True)
        assert torch.equal(queue.part("shift", third), vectors.theta[2 * SIZE :])
        assert held() == 2 * 4 * SIZE
        assert queue.acknowledge((third,)) == Shifts((), ())
        assert queue.is_empty


def test_a_learner_that_dies_before_it_has_everything_leaves_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_updates, "PIECE", 1)
    with SharedVectors.create(2 * SIZE) as vectors:
        queue = LearnerUpdates(layout_of(2), vectors, 24)
        queue.load(LEARNER)
        queue.unload()
        assert queue.load(LearnerId("peer/2")) == Shifts((), (ShardId(0),))
        assert queue.acknowledge((ShardId(0),)) == Shifts((), (ShardId(1),), is_last_piece=True)
        assert queue.acknowledge((ShardId(1),)) == Shifts((), ())
