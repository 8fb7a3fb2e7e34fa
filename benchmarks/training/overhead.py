"""Cost of ``p2pdiloco.DiLoCo`` to a training loop, with a model of 10 million parameters or more.

    python -m benchmarks.training.overhead [--steps 40] [--batch 4] [--fragments 24] [--threads 2]
                                           [--width 384] [--json out/overhead.json] [--plot out/overhead.png]

The wrapper has joined a run of its own, with a real node beside it and no exchange due. Every other step's optimizer is
hooked, so that other work on the machine affects both kinds alike; the cost is the median difference of neighbours.
Then each fragment's snapshot and shift are done, round after round, in the memory that the node's ``LearnerUpdates``
chooses, and compared with the median step. Nothing is touched before; the first round does not count. On a busy machine
trust the CPU time of this thread, which stands beside wall time, and ``--threads 1``. The two collectives per step of
an island of several ranks are not included.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

import p2pdiloco
from benchmarks import bench
from benchmarks.plots import bars, figure
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.peer.learner_updates import LearnerUpdates
from p2pdiloco.protocol.ids import FragmentId
from p2pdiloco.protocol.manifest import ModelConfig, make_layout
from p2pdiloco.training.models import build_model, loss
from p2pdiloco.training.parameters import FlatParameters, trainable
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements

MODEL = ModelConfig(width=384, depth=6, heads=6, context=256)
"""10.8 million parameters: that of stdlib-10m.toml."""
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
REPEATS = 5


class Took(NamedTuple):
    """One call."""

    wall_s: float
    cpu_s: float
    faults: int


def clocked(call: Callable[[], object]) -> Took:
    """Time of ``call``, and of this thread in it, and this process's page faults."""
    faults, wall, cpu = page_faults(), time.perf_counter(), time.thread_time()
    call()
    return Took(time.perf_counter() - wall, time.thread_time() - cpu, page_faults() - faults)


def page_faults() -> int:
    """Those so far that the kernel answered without a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps to measure")
    parser.add_argument("--batch", type=int, default=4, help="samples per step")
    parser.add_argument("--fragments", type=int, default=24, help="number of fragments")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--width", type=int, default=MODEL.width, help="width of the model; 704: 36M parameters")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = build_model(msgspec.structs.replace(MODEL, width=options.width, heads=options.width // 64), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batch = torch.randint(0, 256, (options.batch, MODEL.context + 1))

    def step() -> None:
        value: Tensor = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    def hooks() -> None:
        outer._before_step(optimizer, (), {})
        outer._on_step(optimizer, (), {})

    for _ in range(2):
        step()
    with (
        tempfile.TemporaryDirectory() as folder,
        p2pdiloco.DiLoCo(
            model,
            optimizer,
            run="overhead",
            found=True,
            access="open",
            tokens_per_step=options.batch * MODEL.context,
            sync_every=10**9,
            state=folder,
            node_options=LOOPBACK,
        ) as outer,
    ):
        hooked: list[Took] = []
        plain: list[Took] = []
        calls: list[Took] = []
        for index in range(options.steps):
            show_progress(index, options.steps)
            with_hook = clocked(step)
            hooked.append(with_hook)
            outer._unhook()  # the next step is the script's alone
            plain.append(clocked(step))
            calls.append(clocked(hooks))
            outer._hook_steps()
    copies = time_copies(model, options.fragments)
    parameters = sum(p.numel() for p in model.parameters())
    figures = summarize(hooked, plain, calls, *copies, parameters)
    show(figures)
    bench.write(options, "training.overhead", {"parameters": parameters}, figures)
    if options.plot:
        draw(figures, options.plot)
    return 0


def show_progress(done: int, steps: int) -> None:
    """One line, written over, on a terminal."""
    if sys.stderr.isatty():
        print(
            f"\r{done + 1} of {steps} pairs of steps",
            end="\n" if done + 1 == steps else "",
            file=sys.stderr,
            flush=True,
        )


def time_copies(model: torch.nn.Module, fragments: int) -> tuple[list[Took], list[Took]]:
    """A snapshot of each fragment, and a shift of each, several times; between two of them the peer has rested."""
    named = trainable(model)
    tensors = tensor_specs([(name, p.shape, False) for name, p in named], fragments)
    layout = make_layout(tensors, fragments, 262144, "rda")
    snapshots: list[Took] = []
    shifts: list[Took] = []
    with SharedVectors.create(layout.elements, ring_elements(layout)) as vectors:
        flat = FlatParameters(named, tensors, layout)
        updates = LearnerUpdates(layout, vectors, fragments)
        memory = updates.memory

        def copy(fragment: FragmentId) -> None:
            shards = flat.of_fragment(fragment)
            flat.copy_to(vectors.snapshot, shards, memory.starts("snapshot", shards) or ())

        def shift(fragment: FragmentId) -> None:
            shards = flat.of_fragment(fragment)
            for shard in shards:  # as the node
                memory.acquire("shift", shard)
                updates.part("shift", shard).zero_()
            flat.add_from(vectors.shift, shards, memory.starts("shift", shards) or ())
            for shard in shards:
                memory.release("shift", shard)

        for fragment in (FragmentId(i) for _ in range(1 + REPEATS) for i in range(fragments)):
            updates.begin_snapshot(fragment)
            snapshots.append(clocked(partial(copy, fragment)))
            updates.end_snapshot(fragment)
            shifts.append(clocked(partial(shift, fragment)))
            for _ in range(2):
                memory.release_unused()
    return snapshots, shifts


def summarize(
    hooked: Sequence[Took],
    plain: Sequence[Took],
    calls: Sequence[Took],
    snapshots: Sequence[Took],
    shifts: Sequence[Took],
    parameters: int,
) -> dict[str, float]:
    """Medians, in seconds and as shares of the plain step. Page faults: per 1,000 parameters and round."""
    first = len(shifts) // (1 + REPEATS)
    faults = [s.faults + a.faults for s, a in zip(snapshots, shifts, strict=True)]
    snapshots, shifts = snapshots[first:], shifts[first:]
    step_s = statistics.median(took.wall_s for took in plain)
    step_cpu_s = statistics.median(took.cpu_s for took in plain)
    pairs = [(h.wall_s - p.wall_s) / p.wall_s for h, p in zip(hooked, plain, strict=True)]
    idle_s = statistics.median(took.wall_s for took in calls)
    idle_cpu_s = statistics.median(took.cpu_s for took in calls)
    both = [(s.wall_s + a.wall_s, s.cpu_s + a.cpu_s) for s, a in zip(snapshots, shifts, strict=True)]
    exchange_s = statistics.median(wall for wall, _ in both)
    exchange_cpu_s = statistics.median(cpu for _, cpu in both)
    return {
        "step_s": step_s,
        "step_cpu_s": step_cpu_s,
        "idle_s": idle_s,
        "idle_cpu_s": idle_cpu_s,
        "idle_share": idle_s / step_s,
        "idle_cpu_share": idle_cpu_s / step_cpu_s,
        "idle_share_of_pairs": statistics.median(pairs),
        "idle_share_of_pairs_spread": statistics.quantiles(pairs, n=4)[2] - statistics.quantiles(pairs, n=4)[0],
        "exchange_s": exchange_s,
        "exchange_cpu_s": exchange_cpu_s,
        "exchange_share": exchange_s / step_s,
        "exchange_cpu_share": exchange_cpu_s / step_cpu_s,
        "exchange_largest_share": max(wall for wall, _ in both) / step_s,
        "turn_faults": 1e3 * sum(faults[first:]) / REPEATS / parameters,
        "snapshot_ns": 1e9 * sum(s.cpu_s for s in snapshots) / REPEATS / parameters,
        "shift_ns": 1e9 * sum(a.cpu_s for a in shifts) / REPEATS / parameters,
    }


def show(figures: dict[str, float]) -> None:
    """One table, and whether the limits hold."""
    print(f"a step of the loop        {figures['step_s'] * 1e3:9.2f} ms wall")
    print(
        f"nothing due, the hook     {figures['idle_s'] * 1e3:9.3f} ms wall {figures['idle_cpu_s'] * 1e3:9.3f} ms CPU "
        f"{figures['idle_share']:8.3%} of a step, by CPU time {figures['idle_cpu_share']:.3%} (limit 1 %)"
    )
    print(
        f"  by pairs of steps       {figures['idle_share_of_pairs']:8.2%}, "
        f"quartiles {figures['idle_share_of_pairs_spread']:.2%} apart"
    )
    print(
        f"snapshot + shift, median  {figures['exchange_s'] * 1e3:9.3f} ms wall "
        f"{figures['exchange_cpu_s'] * 1e3:9.3f} ms CPU {figures['exchange_share']:8.3%} of a step, "
        f"by CPU time {figures['exchange_cpu_share']:.3%} (limit 5 %)"
    )
    print(f"  the largest of them     {figures['exchange_largest_share']:8.2%}")
    print(
        f"  CPU time a parameter    {figures['snapshot_ns']:9.2f} ns snapshot {figures['shift_ns']:9.2f} ns shift, "
        f"written by the node and added"
    )
    print(f"  page faults a round      {figures['round_faults']:9.3f} per 1,000 parameters (limit 0.01)")


def draw(figures: dict[str, float], path: Path) -> None:
    """Two bars against their limits."""
    with figure(path, size=(6, 3)) as axes:
        names = ["nothing due", "snapshot + shift of a fragment"]
        shares = [100 * figures["idle_share"], 100 * figures["exchange_share"]]
        bars(axes, names, {"": shares}, "percent of a training step (red: the limit)")
        for index, limit in enumerate((1.0, 5.0)):
            axes.plot([limit, limit], [index - 0.4, index + 0.4], color="red")


if __name__ == "__main__":
    raise SystemExit(main())
