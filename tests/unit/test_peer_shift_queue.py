"""Memory of shifts and snapshots is for what is in flight, and goes when it has rested. What shifts are is in
test_peer_global_state.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from p2pdiloco.peer.shift_queue import Moves, ShiftQueue
from p2pdiloco.protocol.identifiers import FragmentId, LearnerId, ShardId
from p2pdiloco.protocol.manifest import TensorSpec, make_layout
from p2pdiloco.training.shared_memory import SharedVectors

SIZE = 1 << 16
LEARNER = LearnerId("peer/1")
SHARDS = (ShardId(0), ShardId(1))
NO_MOVES = Moves(LEARNER, (), (), is_reset=False)
Stand = tuple[ShiftQueue, SharedVectors]


def bytes_of(vectors: SharedVectors) -> int:
    return os.fstat(vectors.fd).st_blocks * 512


@pytest.fixture
def stand() -> Iterator[Stand]:
    """Two shards of a fragment each, with a learner that has taken everything; the parameters are not written."""
    specs = tuple(TensorSpec(name=f"w{i}", shape=(SIZE,), merge="direct", fragment=FragmentId(i)) for i in range(2))
    layout = make_layout(specs, 2, SIZE, "direct")
    with SharedVectors.create(2 * SIZE) as vectors:
        queue = ShiftQueue(layout, vectors)
        queue.load(LEARNER, torch.ones(2 * SIZE))
        queue.shifted(SHARDS)
        yield queue, vectors


def shift(queue: ShiftQueue, shard: ShardId, value: float) -> None:
    handover = queue.begin(shard, NO_MOVES, lambda _: iter(()))
    span = slice(shard * SIZE, (shard + 1) * SIZE)
    handover.take(span, torch.zeros(SIZE), torch.full((SIZE,), value))


def test_what_the_learner_has_taken_is_given_back_when_it_has_rested(stand: Stand) -> None:
    queue, vectors = stand
    assert bytes_of(vectors) == 2 * 4 * SIZE
    queue.rest()
    assert bytes_of(vectors) == 2 * 4 * SIZE, "it may be wanted again at once"
    queue.rest()
    assert bytes_of(vectors) == 0


def test_what_is_used_between_two_rests_stays(stand: Stand) -> None:
    queue, vectors = stand
    queue.rest()
    shift(queue, ShardId(1), 2.0)
    queue.shifted((ShardId(1),))
    queue.rest()
    assert bytes_of(vectors) == 4 * SIZE
    assert torch.equal(vectors.shift[SIZE:], torch.full((SIZE,), 2.0))


def test_shifts_that_the_learner_has_not_taken_stay(stand: Stand) -> None:
    """In the buffer, and in the queue behind it."""
    queue, vectors = stand
    shift(queue, ShardId(0), 2.0)
    shift(queue, ShardId(0), 3.0)
    for _ in range(3):
        queue.rest()
    assert torch.equal(vectors.shift[:SIZE], torch.full((SIZE,), 2.0))
    assert torch.equal(queue.queued[:SIZE], torch.full((SIZE,), 3.0))
    assert queue.shifted((ShardId(0),)).added == (ShardId(0),)
    for _ in range(3):
        queue.rest()
    assert torch.equal(vectors.shift[:SIZE], torch.full((SIZE,), 3.0))
    assert not queue.queued[:SIZE].any(), "nothing waits there any more"
    queue.shifted((ShardId(0),))
    for _ in range(2):
        queue.rest()
    assert bytes_of(vectors) == 0


def test_a_snapshot_stays_until_it_is_encoded(stand: Stand) -> None:
    queue, vectors = stand
    for _ in range(2):
        queue.rest()
    queue.snapshot_asked(FragmentId(1))
    vectors.snapshot[SIZE:] = 5.0
    for _ in range(3):
        queue.rest()
    assert vectors.snapshot[SIZE:].min() == 5.0, "the learner is writing it"
    queue.snapshot_taken(FragmentId(1))
    for _ in range(3):
        queue.rest()
    assert vectors.snapshot[SIZE:].min() == 5.0, "it is to be encoded"
    queue.snapshot_encoded(ShardId(1))
    for _ in range(2):
        queue.rest()
    assert bytes_of(vectors) == 0


def test_nothing_is_given_back_under_a_device_that_has_locked_it(stand: Stand) -> None:
    """Nor while there is no learner: the next one may have locked it before it says so."""
    queue, vectors = stand
    queue.is_pinned = True
    queue.load(LEARNER, torch.ones(2 * SIZE))
    queue.shifted(SHARDS)
    for _ in range(3):
        queue.rest()
    queue.is_pinned = False
    queue.unload()
    for _ in range(3):
        queue.rest()
    assert bytes_of(vectors) == 2 * 4 * SIZE
