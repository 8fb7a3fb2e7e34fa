"""Speed trial: measures for some seconds how fast a learner on this machine would train the run's model (``doctor``)::

    python -m p2pdiloco.training.speed_trial --manifest PATH [--seconds 8] [--device cpu] [--data PATH] [--tokenizer
                            PATH] [--model PATH] [--threads N]

Rules of this file:
1. Its steps are the learner's (``inner_step``), with the same data, threads and niceness. Nothing is kept.
2. It prints one JSON object and ends with status 0. A problem that the user must repair is in that object, and the
   status is 2.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from p2pdiloco.training import learner_options
from p2pdiloco.training.corpus import DataSupply, load_corpus
from p2pdiloco.training.models import build
from p2pdiloco.training.optimizers import inner_optimizers, inner_step
from p2pdiloco.training.thread_tuning import ThreadChoice

LEAST_STEPS = 3
# Number of last steps that the median is taken of.
LAST = 20


class SpeedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a speed trial."""

    tokens_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    step_s: float = 0.0
    steps: int = 0
    threads: int = 0
    bytes: int = 0
    """Peak memory of the process: model, gradients, optimizer, activations of a step, torch."""
    device_bytes: int = 0
    """Peak memory of the GPU."""
    has_blocks: bool = True
    """True if the data is the run's own, byte for byte, so that its blocks are assigned and none is trained twice."""
    trouble: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the result."""
    parser = learner_options.parser_of_a_learner(
        "python -m p2pdiloco.training.speed_trial", "What a learner would do; doctor asks."
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="steps are made for so long")
    options = parser.parse_args(argv)
    try:
        found = measured(options)
    except (OSError, ValueError, RuntimeError) as error:
        found = SpeedTrial(trouble=str(error)[:2000] or type(error).__name__)
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    return 2 if found.trouble else 0


def measured(options: argparse.Namespace) -> SpeedTrial:
    """Train for ``options.seconds`` and return the measurements.

    Raises:
        OSError, ValueError, RuntimeError: as a learner would fail.
    """
    device, manifest = learner_options.setting(options)
    config = manifest.config
    corpus = load_corpus(config.data, options.data, options.tokenizer, context=config.model.context)
    supply = DataSupply(manifest, corpus, "trial", deque())
    model = build(config.model, config.seed, manifest.tensors, options.model).to(device)
    optimizers = inner_optimizers(model, config.inner)
    choice = ThreadChoice(torch.get_num_threads()) if device.type == "cpu" and not options.threads else None
    learner_options.be_nice()
    times: list[float] = []
    deadline = time.perf_counter() + options.seconds
    while len(times) < LEAST_STEPS or time.perf_counter() < deadline:
        began = time.perf_counter()
        batch = supply.next().to(device)
        inner_step(model, optimizers, config.inner, batch, step=1, inner_steps=len(times), progress=0.0)
        took_s = time.perf_counter() - began
        times.append(took_s)
        if choice is not None and (number := choice.stepped(took_s)) is not None:
            torch.set_num_threads(number)
    step_s = statistics.median(times[1:][-LAST:])
    return SpeedTrial(
        tokens_per_s=config.inner.batch * config.model.context / step_s,
        step_s=step_s,
        steps=len(times),
        threads=torch.get_num_threads(),
        bytes=_most_bytes(),
        device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        has_blocks=supply.has_blocks or not manifest.blocks.number,
    )


def _most_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    sys.exit(main())
