"""Comparison of the fine-tuning in the laboratory with scripts that call ``p2pdiloco.DiLoCo``, as real processes.

    python -m benchmarks.quality.script_tie [--ways lora whole] [--texts english] [--learners 2] [--seeds 1 2 3]

Each learner is a training loop as in README: the model, the batches and the AdamW of the laboratory's cell
(``fine_tuning``), at the rate that was best there, and the run's arguments of ``peers/lora.py`` or
``peers/pretrain.py``. A step takes ``--step-ms`` at least, because the laboratory counts with exchanges that end two
steps later; with 0, steps are shorter than an exchange. The laboratory's rows must be there
(``python -m benchmarks.quality fine-tune``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

import p2pdiloco
from benchmarks import bench
from benchmarks.quality import fine_tuning, hf_learners, runner
from benchmarks.quality.claims import halves, tuned
from benchmarks.quality.data import Stream, held_out_losses, text_of
from benchmarks.quality.report import by_seed, seedless
from benchmarks.quality.settings import Setting
from p2pdiloco.swarm.credentials import MemberFiles
from p2pdiloco.training.models import loss
from p2pdiloco.training.optimizers import learning_rate

START_S = 120.0
COLUMNS: tuple[bench.Column, ...] = (
    ("scripts, test loss", "scripts", ".4f"),
    ("laboratory, test loss", "laboratory", ".4f"),
    ("difference, %", "difference", "+.2f"),
    ("tokens merged, %", "merged", ".1f"),
)


class Job(msgspec.Struct, frozen=True):
    """One learner of a run."""

    setting: Setting
    index: int
    invite: str
    step_s: float


class Found(msgspec.Struct, frozen=True):
    """What a learner ended with."""

    loss: float
    """Of the run's model, test half of the held-out windows."""
    steps: int


def learn(job: Job, folder: Path) -> Found:
    """Train to the end of the run.

    Raises:
        p2pdiloco.DiLoCoError: the run cannot be founded or joined.
    """
    torch.set_num_threads(1)
    setting, inner = job.setting, job.setting.inner_config
    model, text = hf_learners.build(setting.base, setting.seed), text_of(setting.data, setting.vocabulary)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = hf_learners.adamw(setting, parameters)
    stream = Stream(
        text.train,
        seed=setting.seed,
        batch=setting.batch,
        context=setting.context,
        learners=setting.learners,
        first=job.index,
        k=1,
        is_parted=False,
    )
    tokens, steps = setting.step_tokens // setting.learners, 0
    with p2pdiloco.DiLoCo(
        model,
        optimizer,
        run="tie",
        initial_peers=[job.invite] if job.invite else [],
        tokens_per_step=tokens,
        total_steps=setting.steps,
        state=folder / "state",
        wait_for_peers=setting.learners,
        **fine_tuning.SCRIPTS[setting.base],
    ) as outer:
        due = time.monotonic()
        while not outer.is_complete:
            done = outer.global_step
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(inner, done, steps, done * setting.step_tokens)
            loss(model, stream.next()[0]).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, inner.clip)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            due = max(due, time.monotonic() - job.step_s) + job.step_s
            time.sleep(max(0.0, due - time.monotonic()))
    outer.load_global()
    windows = held_out_losses(model, text, setting.context).tolist()
    return Found(halves({"by_window": windows})[1], steps)


def swarm(setting: Setting, folder: Path, step_s: float) -> list[Found]:
    """Return what all learners of one run ended with.

    Raises:
        RuntimeError: one of them failed.
    """
    processes, invite = list[subprocess.Popen[bytes]](), ""
    for index in range(setting.learners):
        own = folder / str(index)
        own.mkdir(parents=True)
        (own / "job").write_bytes(msgspec.json.encode(Job(setting, index, invite, step_s)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(own / "log", "wb") as log:
            command = [sys.executable, "-m", "benchmarks.quality.script_tie", "--learner", str(own)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + START_S
        while not index and not invite and time.monotonic() < deadline and processes[0].poll() is None:
            members = next((own / "state").glob("*/members"), None)
            invite = "" if members is None else MemberFiles(members.parent).invite()
            time.sleep(0.2)
    if any(process.wait() for process in processes):
        raise RuntimeError(f"a learner failed: see {folder}/*/log")
    return [msgspec.json.decode((folder / str(i) / "found").read_bytes(), type=Found) for i in range(setting.learners)]


def measure(way: str, text: str, learners: int, seeds: Sequence[int], step_s: float, folder: Path) -> bench.Figures:
    """Return the means over ``seeds``, of scripts and of the laboratory.

    Raises:
        RuntimeError: a learner failed, or the laboratory has no such row.
    """
    rows = by_seed(runner.rows())
    best = tuned(rows, seedless(fine_tuning.together(text, way, learners).setting))
    known = rows.get(best, {})
    if missing := [seed for seed in seeds if seed not in known]:
        raise RuntimeError(f"the laboratory has no row of {way}, {text}, M = {learners}, seeds {missing}")
    real, merged = [], []
    for seed in seeds:
        found = swarm(msgspec.structs.replace(best, seed=seed), folder / f"{way}-{text}-{seed}", step_s)
        real.append(statistics.fmean(one.loss for one in found))
        merged.append(sum(one.steps for one in found) / learners / best.steps)
        print(f"{way}, {text}, seed {seed}: {real[-1]:.4f}", flush=True)
    laboratory = [halves(known[seed])[1] for seed in seeds]
    gaps = [100.0 * (mine / other - 1.0) for mine, other in zip(real, laboratory, strict=True)]
    return {
        "scripts": statistics.fmean(real),
        "laboratory": statistics.fmean(laboratory),
        "difference": statistics.fmean(gaps),
        "deviation": statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
        "merged": 100.0 * statistics.fmean(merged),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 if a difference is more than 1 %."""
    parser = bench.parser(__doc__, rows="way and text", has_plot=False, has_keep=True)
    parser.add_argument("--ways", nargs="+", choices=list(fine_tuning.SCRIPTS), default=list(fine_tuning.SCRIPTS))
    parser.add_argument("--texts", nargs="+", choices=fine_tuning.TEXTS, default=list(fine_tuning.TEXTS))
    parser.add_argument("--learners", type=int, choices=fine_tuning.LEARNERS, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(fine_tuning.SEEDS))
    parser.add_argument("--step-ms", type=float, default=100.0, help="least duration of a step (default: %(default)s)")
    parser.add_argument("--learner", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.learner:
        job = msgspec.json.decode((options.learner / "job").read_bytes(), type=Job)
        (options.learner / "found").write_bytes(msgspec.json.encode(learn(job, options.learner)))
        return 0
    found: dict[str, bench.Figures] = {}
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-tie-") as temporary:
        folder = Path(options.keep or temporary)
        for way in options.ways:
            for text in options.texts:
                figures = measure(way, text, options.learners, options.seeds, options.step_ms / 1e3, folder)
                cell = {"way": way, "text": text, "learners": options.learners, "step_ms": options.step_ms}
                bench.write(options, "quality/script-tie", cell, figures)
                found[f"{way}, {text}"] = figures
    print(bench.table(f"M = {options.learners}, {len(options.seeds)} seeds", COLUMNS, found))
    return int(any(abs(figures["difference"]) > 1.0 for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
