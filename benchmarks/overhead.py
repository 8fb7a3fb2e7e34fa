"""Training speed of one peer alone, beside the same loop without p2pdiloco.

    python -m benchmarks.overhead [--rounds 3] [--seconds 40] [--json FILE]

Three ways take turns to train the model of ``stdlib-tiny`` on its data, with one thread: a plain loop, the same loop
with ``DiLoCo`` (and a node of its own), and ``p2pdiloco start``. Steps are counted over wall time once the first
``WARM_S`` seconds are over, so all work of the node is included. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import bench
from p2pdiloco import DiLoCo
from p2pdiloco.demo.local_swarm import Swarm
from p2pdiloco.node.run_creation import find_run, read_config
from p2pdiloco.training.corpus import Batches, load_corpus
from p2pdiloco.training.models import build
from p2pdiloco.training.optimizers import inner_optimizers, inner_step

RUN = "stdlib-tiny"
WARM_S = 15.0
"""Until caches are warm and the first audits are over."""
LIMIT_S = 120.0
ENDLESS = 1_000_000
PLAIN, SCRIPT, SHIPPED = "plain loop", "with DiLoCo", "p2pdiloco start"
COLUMNS: tuple[bench.Column, ...] = (("tokens/s", "tokens_per_s", ",.0f"), ("against the plain loop", "lost", "+.1%"))


def train(way: str, seconds: float, folder: Path) -> float:
    """Train in this process, and return the tokens per second."""
    torch.set_num_threads(1)
    config = read_config(find_run(RUN))
    model, corpus = build(config.model, config.seed), load_corpus(config.data, context=config.model.context)
    optimizers = inner_optimizers(model, config.inner)
    batches = Batches(corpus, config.model.context, config.inner.batch, "overhead")
    tokens = config.inner.batch * config.model.context
    if way == SCRIPT:
        schedule, outer = config.schedule, config.outer
        DiLoCo(
            model,
            optimizers,
            run=RUN,
            tokens_per_step=tokens,
            total_steps=ENDLESS,
            sync_every=schedule.sync_every,
            n_fragments=schedule.fragments,
            fragment_sync_delay=schedule.overlap,
            merge=outer.merge,
            outer_lr=outer.learning_rate,
            outer_momentum=outer.momentum,
            state=folder,
            node_options=("--page", "off", "--listen", "/ip4/127.0.0.1/tcp/0"),
        )
    began, steps, counted_from = time.monotonic(), 0, 0.0
    while not counted_from or time.monotonic() - counted_from < seconds:
        if not counted_from and time.monotonic() - began >= WARM_S:
            counted_from, steps = time.monotonic(), 0
        inner_step(model, optimizers, config.inner, next(batches), 100, 100, 0.0)
        steps += 1
    return steps * tokens / (time.monotonic() - counted_from)


def in_a_process(way: str, seconds: float, folder: Path) -> float:
    """``train`` in a process of its own; its node ends with it."""
    command = [sys.executable, "-m", "benchmarks.overhead", "--seconds", str(seconds), "--way", way]
    command += ["--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT_S + seconds)
    return float(done.stdout.splitlines()[-1])


def shipped(seconds: float, folder: Path) -> float:
    """Tokens per second of a founder, by its event log.

    Raises:
        TimeoutError: it did not train for that long.
    """
    text = find_run(RUN).read_text(encoding="utf-8").replace("steps = 360", f"steps = {ENDLESS}")
    folder.mkdir()
    (folder / "run.toml").write_text(text)
    swarm = Swarm(folder / "swarm")
    try:
        founder = swarm.start_founder("founder", folder / "run.toml", swarm.start_bootstrap())
        view, deadline, first = founder.view, time.monotonic() + LIMIT_S + seconds, (0.0, 0)
        while not first[1] or view.trained_at - first[0] < seconds:
            if time.monotonic() > deadline or not founder.is_running:
                raise TimeoutError(f"the peer did not train for {seconds:g} s; its log: {founder.log_path}")
            time.sleep(0.2)
            founder.refresh()
            if not first[1] and view.began_training_at and view.trained_at - view.began_training_at >= WARM_S:
                first = view.trained_at, view.tokens
        return (view.tokens - first[1]) / (view.trained_at - first[0])
    finally:
        swarm.stop()
        swarm.kill_leftovers()


def main() -> int:
    """Measure, compare."""
    parser = bench.parser(__doc__, rows="way", has_plot=False)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long steps are counted in one turn")
    # This program starts itself with these two, to train in a process of its own.
    parser.add_argument("--way", choices=(PLAIN, SCRIPT), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(train(options.way, options.seconds, options.folder))
        return 0
    found: dict[str, list[float]] = {PLAIN: [], SCRIPT: [], SHIPPED: []}
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-overhead-") as place:
        for number in range(options.rounds):
            for way, speeds in found.items():
                work = shipped if way == SHIPPED else lambda s, f, way=way: in_a_process(way, s, f)
                speeds.append(work(options.seconds, Path(place) / f"{way.split()[-1]}-{number}"))
            print(json.dumps({way: round(speeds[-1]) for way, speeds in found.items()}), file=sys.stderr, flush=True)
    plain = statistics.median(found[PLAIN])
    rows = {
        way: {"tokens_per_s": statistics.median(speeds), "lost": statistics.median(speeds) / plain - 1}
        for way, speeds in found.items()
    }
    for way, figures in rows.items():
        bench.write(options, "overhead", {"way": way}, figures)
    print(bench.table("", COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
