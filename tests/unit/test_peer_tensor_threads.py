"""Shards that several threads work on at the same time: the same bits as by one."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import torch

from p2pdiloco.codec import quantization
from p2pdiloco.peer import learner_updates
from p2pdiloco.peer.learner_updates import Moves
from p2pdiloco.peer.model_state import MergeResult, ModelState
from p2pdiloco.protocol.ids import FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.util.executor import WorkQueue

SHARDS = 9
SIZE = quantization.CHUNK + 3000
ME = LearnerId("me/1")
FRAGMENT = FragmentId(0)
ROUNDS = 4


class Node:
    """One peer's tensors, and a learner that answers when it is told to."""

    def __init__(self, threads: int) -> None:
        tensors = tuple(TensorSpec(name=f"t{i}", shape=(SIZE,), merge="rda", fragment=FRAGMENT) for i in range(SHARDS))
        self.layout = make_layout(tensors, 1, SIZE, "rda")
        self.queue = WorkQueue("tensors", partial(torch.set_num_threads, 1), threads)
        self.vectors = SharedVectors.create(self.layout.elements, ring_elements(self.layout))
        outer = OuterConfig(learning_rate=0.7, momentum=0.9)
        self.state = ModelState(self.layout, outer, CodecConfig(), self.vectors, round_steps=24)
        random = torch.Generator().manual_seed(3)
        for piece in self.layout.shards:
            theta = torch.randn(piece.elements, generator=random)
            momentum = torch.zeros(piece.elements, dtype=self.state.form.momentum)
            self.state.put(piece.shard, digest_of(b"version 0"), theta, momentum)
        self.state.shifts.load(ME)
        while not self.state.shifts.is_empty:
            self.state.shifts.acknowledge([piece.shard for piece in self.layout.shards])

    async def sync_round(self, version: int) -> None:
        """Every shard is given, merged and applied; what one needs of another's result is waited for."""
        state, do, shards = self.state, self.queue.do, [piece.shard for piece in self.layout.shards]
        await do(lambda: state.shifts.begin_snapshot(FRAGMENT))
        moved = torch.randn(self.layout.elements, generator=torch.Generator().manual_seed(version))
        torch.add(state.theta, moved, alpha=1e-3, out=moved)
        for piece in self.layout.shards:
            state.shifts.part("snapshot", piece.shard).copy_(moved[piece.start : piece.stop])
        do(lambda: state.shifts.complete_snapshot(FRAGMENT))
        bases = {shard: state.heads[shard] for shard in shards}
        encoded = {shard: do(partial(state.encode, shard, bases[shard]), shard) for shard in shards}
        do(lambda: state.shifts.end_snapshot(FRAGMENT))
        contributor, merged = Contributor(ME, 0, 1000, 0, 10), dict[ShardId, asyncio.Future[MergeResult]]()
        for shard in shards:
            given = [(contributor, (await encoded[shard])[0])]
            merged[shard] = do(partial(state.merge, shard, bases[shard], version, given), shard)
        for shard in shards:
            self.apply(shard, version, await merged[shard], (await encoded[shard])[0])
        await do(lambda: self.take(shards))

    def take(self, shards: list[ShardId]) -> None:
        """The learner takes its shifts."""
        self.shifts = [self.state.shifts.part("shift", shard).clone() for shard in shards]
        self.state.shifts.acknowledge(shards)

    def apply(self, shard: ShardId, version: int, merged: MergeResult, mine: bytes) -> None:
        parent, result = self.state.heads[shard], digest_of(merged.digests)
        assert parent is not None
        header = CommitHeader(
            shard, version, parent, 0, PeerId("owner"), (), 0, merged.payload_digest, result, result, merged.length
        )
        moves, head = Moves(ME, [mine], [], False), digest_of(f"{shard} {version}".encode())
        self.queue.do(partial(self.state.apply, header, head, merged.payload, merged.digests, moves), shard)


@pytest.mark.parametrize("kept", [0, learner_updates.KEPT])
def test_several_threads_make_the_bits_of_one(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while memory of one shard is given back beside work on another."""
    monkeypatch.setattr(learner_updates, "KEPT", kept)

    async def story() -> None:
        one, several = Node(1), Node(4)
        for version in range(1, ROUNDS + 1):
            for node in (one, several):
                await node.sync_round(version)
            assert one.state.heads == several.state.heads
            for piece in one.layout.shards:
                assert one.state.digest(piece.shard) == several.state.digest(piece.shard), piece.shard
            assert all(map(torch.equal, one.shifts, several.shifts))
        assert bool(one.state.momentum.any())
        for node in (one, several):
            assert not node.state.shifts.memory._used
            node.queue.close()

    asyncio.run(story())
