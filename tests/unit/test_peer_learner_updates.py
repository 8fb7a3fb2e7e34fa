"""Memory of shifts and snapshots is for what is in flight, and goes when it has rested. What shifts are is in
test_peer_model_state.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from p2pdiloco.peer import learner_updates
from p2pdiloco.peer.learner_updates import LearnerUpdates, Moves, Shifts
from p2pdiloco.protocol.ids import FragmentId, LearnerId, ShardId
from p2pdiloco.protocol.manifest import TensorSpec, make_layout
from p2pdiloco.training.shared_memory import SharedVectors

SIZE = 1 << 16
LEARNER = LearnerId("peer/1")
SHARDS = (ShardId(0), ShardId(1))
NO_MOVES = Moves(LEARNER, (), (), is_reset=False)
Stand = tuple[LearnerUpdates, SharedVectors]


def bytes_of(vectors: SharedVectors) -> int:
    """Of shift and snapshot."""
    return os.fstat(vectors.fd).st_blocks * 512 - 2 * 4 * SIZE


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Two shards of a fragment each, with a learner that has taken everything, and a shift of each since."""
    specs = tuple(TensorSpec(name=f"w{i}", shape=(SIZE,), merge="direct", fragment=FragmentId(i)) for i in range(2))
    layout = make_layout(specs, 2, SIZE, "direct")
    with SharedVectors.create(2 * SIZE) as vectors:
        queue = LearnerUpdates(layout, vectors)
        vectors.theta.fill_(1.0)
        queue.load(LEARNER)
        queue.acknowledge(SHARDS)
        assert bytes_of(vectors) == 0
        for shard in SHARDS:
            shift(queue, shard, 1.0)
        queue.acknowledge(SHARDS)
        yield queue, vectors


def shift(queue: LearnerUpdates, shard: ShardId, value: float) -> None:
    handover = queue.begin_shift(shard, NO_MOVES, lambda _: ())
    span = slice(shard * SIZE, (shard + 1) * SIZE)
    handover.take(0, span, torch.zeros(SIZE), torch.full((SIZE,), value))


def test_what_the_learner_has_taken_is_given_back_when_it_has_rested(stand: Stand) -> None:
    queue, vectors = stand
    assert bytes_of(vectors) == 2 * 4 * SIZE
    queue.memory.release_unused()
    assert bytes_of(vectors) == 2 * 4 * SIZE, "it may be wanted again at once"
    queue.memory.release_unused()
    assert bytes_of(vectors) == 0


def test_what_is_used_between_two_rests_stays(stand: Stand) -> None:
    queue, vectors = stand
    queue.memory.release_unused()
    shift(queue, ShardId(1), 2.0)
    queue.acknowledge((ShardId(1),))
    queue.memory.release_unused()
    assert bytes_of(vectors) == 4 * SIZE
    assert torch.equal(vectors.shift[SIZE:], torch.full((SIZE,), 2.0))


def test_of_what_is_not_in_use_little_is_kept(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in use; and what was used last is kept."""
    monkeypatch.setattr(learner_updates, "KEPT", SIZE)
    queue, vectors = stand
    for last in (1, 0, 1, 1):
        for shard in SHARDS:
            shift(queue, shard, 2.0)
        assert bytes_of(vectors) == 2 * 4 * SIZE
        queue.acknowledge((SHARDS[1 - last],))
        assert bytes_of(vectors) == 2 * 4 * SIZE
        queue.acknowledge((SHARDS[last],))
        assert bytes_of(vectors) == 4 * SIZE
        assert vectors.shift[last * SIZE : (last + 1) * SIZE].min() == 2.0
        vectors.give_back("shift", (1 - last) * SIZE, (2 - last) * SIZE)  # to read a page takes one
        for _ in range(3):  # there is still one alone that is not in use
            shift(queue, SHARDS[last], 2.0)
            queue.acknowledge((SHARDS[last],))
            assert bytes_of(vectors) == 4 * SIZE


def test_a_snapshot_that_is_asked_for_again_stays(stand: Stand) -> None:
    """What was over comes late: the learner writes the next one."""
    queue, vectors = stand
    queue.begin_snapshot(FragmentId(1))
    queue.complete_snapshot(FragmentId(1))
    queue.begin_snapshot(FragmentId(1))
    vectors.snapshot[SIZE:] = 5.0
    queue.end_snapshot(FragmentId(1))
    for _ in range(3):
        queue.memory.release_unused()
    assert vectors.snapshot[SIZE:].min() == 5.0


def test_shifts_that_the_learner_has_not_taken_stay(stand: Stand) -> None:
    """In the buffer, and in the queue behind it."""
    queue, vectors = stand
    shift(queue, ShardId(0), 2.0)
    shift(queue, ShardId(0), 3.0)
    for _ in range(3):
        queue.memory.release_unused()
    assert torch.equal(vectors.shift[:SIZE], torch.full((SIZE,), 2.0))
    assert torch.equal(queue.queued[:SIZE], torch.full((SIZE,), 3.0))
    assert queue.acknowledge((ShardId(0),)).added == (ShardId(0),)
    for _ in range(3):
        queue.memory.release_unused()
    assert torch.equal(vectors.shift[:SIZE], torch.full((SIZE,), 3.0))
    assert not queue.queued[:SIZE].any(), "nothing waits there any more"
    queue.acknowledge((ShardId(0),))
    for _ in range(2):
        queue.memory.release_unused()
    assert bytes_of(vectors) == 0


def test_a_snapshot_stays_until_it_is_encoded(stand: Stand) -> None:
    queue, vectors = stand
    for _ in range(2):
        queue.memory.release_unused()
    queue.begin_snapshot(FragmentId(1))
    vectors.snapshot[SIZE:] = 5.0
    for _ in range(3):
        queue.memory.release_unused()
    assert vectors.snapshot[SIZE:].min() == 5.0, "the learner is writing it"
    queue.complete_snapshot(FragmentId(1))
    for _ in range(3):
        queue.memory.release_unused()
    assert vectors.snapshot[SIZE:].min() == 5.0, "it is to be encoded"
    queue.release_snapshot(ShardId(1))
    queue.end_snapshot(FragmentId(1))
    for _ in range(2):
        queue.memory.release_unused()
    assert bytes_of(vectors) == 0


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
    assert bytes_of(vectors) == 2 * 4 * SIZE


def test_a_new_learner_is_given_the_parameters_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each when it has taken the one before, whose memory has gone by then; what changes meanwhile comes once."""
    monkeypatch.setattr(learner_updates, "PIECE", SIZE)
    specs = tuple(TensorSpec(name=f"w{i}", shape=(SIZE,), merge="direct", fragment=FragmentId(i)) for i in range(3))
    first, second, third = (ShardId(i) for i in range(3))
    with SharedVectors.create(3 * SIZE) as vectors:
        queue = LearnerUpdates(make_layout(specs, 3, SIZE, "direct"), vectors)
        vectors.theta.copy_(torch.arange(3.0 * SIZE))

        def held() -> int:
            return os.fstat(vectors.fd).st_blocks * 512 - 3 * 4 * SIZE

        assert queue.load(LEARNER) == Shifts((), (first,))
        assert held() == 4 * SIZE
        assert torch.equal(vectors.shift[:SIZE], vectors.theta[:SIZE])
        for shard in (first, third):  # a commit
            vectors.theta[shard * SIZE : (shard + 1) * SIZE] += 2.0
            assert queue.begin_shift(shard, NO_MOVES, lambda _: ()).shifts == Shifts((), ())
        queue.queued[:SIZE] = 2.0  # of the shard that is on its way; the last one's is in the parameters
        assert not queue.is_empty
        told = queue.acknowledge((first,))
        assert told == Shifts((first,), (second,))
        assert held() == 2 * 4 * SIZE
        assert torch.equal(vectors.shift[:SIZE], torch.full((SIZE,), 2.0))
        assert queue.acknowledge((first,)) == Shifts((), ()), "the second is not taken yet"
        assert queue.acknowledge((second,)) == Shifts((), (third,), is_last_piece=True)
        assert torch.equal(vectors.shift[2 * SIZE :], vectors.theta[2 * SIZE :])
        assert held() == 2 * 4 * SIZE, "the second's has gone"
        assert queue.acknowledge((third,)) == Shifts((), ())
        assert queue.is_empty


def test_a_learner_that_dies_before_it_has_everything_leaves_nothing_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_updates, "PIECE", 1)
    specs = tuple(TensorSpec(name=f"w{i}", shape=(SIZE,), merge="direct", fragment=FragmentId(i)) for i in range(2))
    with SharedVectors.create(2 * SIZE) as vectors:
        queue = LearnerUpdates(make_layout(specs, 2, SIZE, "direct"), vectors)
        queue.load(LEARNER)
        queue.unload()
        assert queue.load(LearnerId("peer/2")) == Shifts((), (ShardId(0),))
        assert queue.acknowledge((ShardId(0),)) == Shifts((), (ShardId(1),), is_last_piece=True)
        assert queue.acknowledge((ShardId(1),)) == Shifts((), ())
