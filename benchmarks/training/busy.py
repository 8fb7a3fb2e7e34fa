"""A learner's steps beside other work on the same cores::

    python -m benchmarks.training.busy [--loops 2] [--seconds 15] [--json out/busy.json]

The built-in transformer of `stdlib-tiny` is trained in a process that is as nice as a learner is, beside ``--loops``
processes that only compute: as torch comes, with threads that sleep while they wait (what a node starts its learner
with), and with that and as many threads as measured steps say (``training/threads.py``).

Rules of this file:
1. The machine should do nothing else. Steps of the first second do not count; those in which threads are tried do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.record import append, row
from p2pdiloco.node.learner_process import PASSIVE
from p2pdiloco.protocol.manifest import ModelConfig
from p2pdiloco.training.threads import ThreadChoice
from p2pdiloco.training.transformer import build_model, loss

BATCH = 8
NICENESS = 5
WARM_S = 1.0
SETTINGS = {
    "as torch comes": ({}, False),
    "passive": (PASSIVE, False),
    "passive, threads by steps": (PASSIVE, True),
}


def train(seconds: float, is_choosing: bool) -> float:
    """Steps a second, in this process."""
    os.nice(NICENESS)
    config = ModelConfig()
    model = build_model(config, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    batch: Tensor = torch.randint(0, 256, (BATCH, config.context + 1))
    choice = ThreadChoice(torch.get_num_threads()) if is_choosing else None
    began, steps = time.perf_counter(), 0
    while (now := time.perf_counter()) < began + WARM_S + seconds:
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if choice is not None and (number := choice.stepped(time.perf_counter() - now)) is not None:
            torch.set_num_threads(number)
        steps += now >= began + WARM_S
    return steps / seconds


def measure(name: str, loops: int, seconds: float) -> float:
    """Steps a second of a learner so set, beside so many loops."""
    environment, is_choosing = SETTINGS[name]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        command = [sys.executable, "-m", "benchmarks.training.busy", "--learner", str(int(is_choosing))]
        done = subprocess.run(
            [*command, "--seconds", str(seconds)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        return float(json.loads(done.stdout))
    finally:
        for other in others:
            other.kill()
            other.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("::")[0])
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--learner", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.learner is not None:
        print(train(options.seconds, bool(options.learner)))
        return 0
    idle = measure("as torch comes", 0, options.seconds)
    print(f"{'idle machine':<28}{idle:>8.2f} steps/s")
    for name in SETTINGS:
        found = measure(name, options.loops, options.seconds)
        print(f"{name:<28}{found:>8.2f} steps/s beside {options.loops} loops, {found / idle:.0%} of idle", flush=True)
        if options.json:
            settings = {"loops": options.loops, "seconds": options.seconds, "setting": name}
            append(options.json, [row("busy", settings, {"steps_per_s": found, "idle_steps_per_s": idle})])
    return 0


if __name__ == "__main__":
    sys.exit(main())
