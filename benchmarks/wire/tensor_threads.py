"""Speed of one node's part of an exchange with several merge threads, without a network.

    python -m benchmarks.wire.tensor_threads [--parameters 120e6] [--threads 1 2 4] [--rounds 5] [--json FILE]

Every shard of a model is encoded, merged with another contribution and stepped, as by a peer that owns all of them. A
figure is the median of the rounds after one warm-up; the numbers of threads take turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks import bench
from p2pdiloco.peer.learner_updates import Moves
from p2pdiloco.peer.model_state import MergeResult, ModelState
from p2pdiloco.protocol.ids import FragmentId, LearnerId, PeerId, ShardId, digest_of
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, TensorSpec, make_layout
from p2pdiloco.protocol.messages import CommitHeader, Contributor
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.util.executor import WorkQueue

MINE, OTHER = LearnerId("mine/1"), LearnerId("other/1")
FRAGMENT = FragmentId(0)
COLUMNS = (("ms", "ms", ".0f"), ("times as fast as the first", "ratio", ".2f"))


class Node:
    """One peer's tensors."""

    def __init__(self, parameters: int, threads: int) -> None:
        tensors = (TensorSpec(name="all", shape=(parameters,), merge="rda", fragment=FRAGMENT),)
        self.layout = make_layout(tensors, 1, 2 << 20, "rda")
        self.queue = WorkQueue("tensors", partial(torch.set_num_threads, 1), threads)
        self.vectors = SharedVectors.create(parameters, ring_elements(self.layout))
        self.state = ModelState(
            self.layout, OuterConfig(learning_rate=0.7, momentum=0.9), CodecConfig(), self.vectors, round_steps=24
        )
        for piece in self.layout.shards:
            momentum = torch.zeros(piece.elements, dtype=self.state.form.momentum)
            self.state.put(piece.shard, digest_of(b"version 0"), torch.randn(piece.elements), momentum)
        self.state.shifts.load(MINE)
        while not self.state.shifts.is_empty:
            self.state.shifts.acknowledge([piece.shard for piece in self.layout.shards])
        self.version = 0
        self._moved = 1e-3 * torch.randn(parameters)

    async def round(self) -> float:
        """Seconds from a snapshot of all to the next version of all."""
        state, shards = self.state, [piece.shard for piece in self.layout.shards]
        state.shifts.begin_snapshot(FRAGMENT)
        for piece in self.layout.shards:
            here = slice(piece.start, piece.stop)
            torch.add(state.theta[here], self._moved[here], out=state.shifts.part("snapshot", piece.shard))
        self.version += 1
        began = time.perf_counter()
        self.queue.do(lambda: state.shifts.complete_snapshot(FRAGMENT))
        await asyncio.gather(*(self.queue.do(partial(self._take, shard), shard) for shard in shards))
        seconds = time.perf_counter() - began
        await self.queue.do(lambda: state.shifts.acknowledge(shards))
        return seconds

    def _take(self, shard: ShardId) -> None:
        base = self.state.heads[shard]
        assert base is not None
        mine, _ = self.state.encode(shard, base)
        given = [(Contributor(learner, 0, 1000, 0, 10), mine) for learner in (MINE, OTHER)]
        merged: MergeResult = self.state.merge(shard, base, self.version, given)
        result = digest_of(merged.digests)
        header = CommitHeader(
            shard, self.version, base, 0, PeerId("owner"), (), 0, merged.payload_digest, result, result, merged.length
        )
        moves, head = Moves(MINE, [mine], [], False), digest_of(f"{shard} {self.version}".encode())
        self.state.apply(header, head, merged.payload, merged.digests, moves)


async def measure(parameters: int, numbers: Sequence[int], rounds: int) -> dict[int, float]:
    """Median seconds of a round, by the number of threads."""
    nodes = {threads: Node(parameters, threads) for threads in numbers}
    seconds: dict[int, list[float]] = {threads: [] for threads in numbers}
    for _ in range(rounds + 1):
        for threads, node in nodes.items():
            seconds[threads].append(await node.round())
    for node in nodes.values():
        node.queue.close()
    return {threads: statistics.median(found[1:]) for threads, found in seconds.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--parameters", type=float, default=120e6, help="parameters of the model")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], help="numbers of threads to compare")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one warm-up")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    medians = asyncio.run(measure(int(options.parameters), options.threads, options.rounds))
    first = medians[options.threads[0]]
    shown = {f"{threads} threads": {"ms": 1e3 * s, "ratio": first / s} for threads, s in medians.items()}
    print(bench.table(f"{options.parameters:.3g} parameters", COLUMNS, shown))
    bench.write(options, "wire/tensor_threads", {}, {f"seconds_{threads}": s for threads, s in medians.items()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
