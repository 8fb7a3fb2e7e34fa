"""Steps of a learner beside other work on the same cores.

    python -m benchmarks.training.busy [--loops 2] [--seconds 15] [--json out/busy.json]

The built-in transformer of ``stdlib-tiny`` trains at a learner's niceness beside ``--loops`` processes that only
compute, in three ways: with torch's defaults, with threads that sleep while they wait (a node starts its learner like
this), and also with the number of threads that measured steps choose (``training/thread_tuning.py``). Steps of the
first second do not count; steps in which thread counts are tried do.

The upper bound is measured in the same minute, so the machine may do other things besides: the CPU time that a plain
loop of the same niceness gets in the learner's place, times the steps per CPU second of a learner with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.record import append, row
from p2pdiloco.protocol.manifest import ModelConfig
from p2pdiloco.training import PASSIVE
from p2pdiloco.training.models import build_model, loss
from p2pdiloco.training.thread_tuning import ThreadChoice

BATCH = 8
NICENESS = 5
WARM_S = 1.0
SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "as torch comes": ({}, "learner"),
    "passive": (PASSIVE, "learner"),
    "passive, threads by steps": (PASSIVE, "choosing"),
}


class Made(NamedTuple):
    """What a process did, each a second."""

    steps: float
    cpu_s: float


def loop(seconds: float) -> Made:
    """As a plain loop: what a learner is compared with."""
    os.nice(NICENESS)
    began, before = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        pass
    return Made(0.0, (time.process_time() - before) / (time.perf_counter() - began))


def train(seconds: float, is_choosing: bool) -> Made:
    """As a learner."""
    os.nice(NICENESS)
    config = ModelConfig()
    model = build_model(config, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    batch: Tensor = torch.randint(0, 256, (BATCH, config.context + 1))
    choice = ThreadChoice(torch.get_num_threads()) if is_choosing else None
    began, steps, before = time.perf_counter(), 0, 0.0
    while (now := time.perf_counter()) < began + WARM_S + seconds:
        before = before or (time.process_time() if now >= began + WARM_S else 0.0)
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if choice is not None and (number := choice.stepped(time.perf_counter() - now)) is not None:
            torch.set_num_threads(number)
        steps += now >= began + WARM_S
    return Made(steps / seconds, (time.process_time() - before) / seconds)


KINDS: dict[str, Callable[[float], Made]] = {
    "loop": loop,
    "learner": partial(train, is_choosing=False),
    "choosing": partial(train, is_choosing=True),
}


def measure(kind: str, environment: Mapping[str, str], loops: int, seconds: float) -> Made:
    """A process of that kind, beside so many loops."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        command = [sys.executable, "-m", "benchmarks.training.busy", "--kind", kind]
        done = subprocess.run(
            [*command, "--seconds", str(seconds)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        return Made(*json.loads(done.stdout))
    finally:
        for other in others:
            other.kill()
            other.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--loops", type=int, default=2, help="processes that only compute (default: 2)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each measurement (default: 15)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the results here")
    parser.add_argument("--kind", choices=sorted(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.kind is not None:
        print(json.dumps(KINDS[options.kind](options.seconds)))
        return 0
    alone = measure("learner", PASSIVE | {"OMP_NUM_THREADS": "1"}, 0, options.seconds)
    plain = measure("loop", {}, options.loops, options.seconds)
    allowed = plain.cpu_s * alone.steps / alone.cpu_s
    print(f"{'one thread, no loops':<28}{alone.steps:>7.2f} steps/s with {alone.cpu_s:.2f} of a core")
    share = f"{plain.cpu_s:.2f} of a core beside {options.loops} loops"
    print(f"{'allowed, by a plain loop':<28}{allowed:>7.2f} steps/s with {share}")
    for name, (environment, kind) in SETTINGS.items():
        found = measure(kind, environment, options.loops, options.seconds)
        of_it = found.steps / allowed
        print(f"{name:<28}{found.steps:>7.2f} steps/s with {found.cpu_s:.2f} of a core, {of_it:.0%} of it", flush=True)
        if options.json:
            settings = {"loops": options.loops, "seconds": options.seconds, "setting": name}
            figures = {"steps_per_s": found.steps, "allowed_steps_per_s": allowed, "share": of_it}
            append(options.json, [row("busy", settings, figures)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
