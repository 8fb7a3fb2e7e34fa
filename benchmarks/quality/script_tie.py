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
from benchmarks.quality.settings import Setting, learning_rate
from p2pdiloco.swarm.credentials import MemberFiles
from p2pdiloco.training.models import loss

START_S, STEP_LIMIT_S = 120.0, 2.0
"""Time limits: until a founder has an invite, and for each step on average."""
COLUMNS: tuple[bench.Column, ...] = (
    ("scripts, test loss", "scripts", ".4f"),
    ("laboratory, test loss", "laboratory", ".4f"),
    ("difference, %", "difference", "+.2f"),
    ("tokens trained, %", "trained", ".1f"),
    ("versions with all learners, %", "joint", ".1f"),
)


class Job(msgspec.Struct, frozen=True):
    """One learner of a run."""

    setting: Setting
    index: int
    invite: str
    step_s: float


class Result(msgspec.Struct, frozen=True):
    """The run's model and the steps of one learner at the end."""

    loss: float
    """Loss of the run's model on the test half of the held-out windows."""
    steps: int
    """Steps that this learner made."""


def learn(job: Job, folder: Path) -> Result:
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
    return Result(halves({"by_window": windows})[1], steps)


def swarm(setting: Setting, folder: Path, step_s: float) -> tuple[list[Result], float]:
    """Return the results of all learners of one run, and the share of its versions that hold all of them.

    Raises:
        RuntimeError: a learner failed or took too long, or the run has no versions.
    """
    processes = list[subprocess.Popen[bytes]]()
    try:
        invite = ""
        for index in range(setting.learners):
            processes.append(_start(Job(setting, index, invite, step_s), folder / str(index)))
            invite = invite or _invite(folder / "0" / "state", processes[0])
        deadline = time.monotonic() + START_S + setting.steps * (step_s + STEP_LIMIT_S)
        for process in processes:
            if process.wait(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"a learner failed: see {folder}/*/log")
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a learner took too long: see {folder}/*/log") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = [(folder / str(index) / "result").read_bytes() for index in range(setting.learners)]
    return [msgspec.json.decode(each, type=Result) for each in results], joint_share(folder / "0", setting.learners)


def _start(job: Job, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    (folder / "job").write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "benchmarks.quality.script_tie", "--learner", str(folder)]
    with open(folder / "log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _invite(state: Path, founder: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and founder.poll() is None:
        members = next(state.glob("*/members"), None)
        if members is not None and (invite := MemberFiles(members.parent).invite()):
            return invite
        time.sleep(0.2)
    raise RuntimeError(f"the first learner founded no run: see {state.parent}/log")


def joint_share(folder: Path, learners: int) -> float:
    """Return the share of a run's versions that all learners contributed to, from the event log below ``folder``.

    Raises:
        RuntimeError: there are no versions, because the learners trained alone.
    """
    lines = (line for path in folder.glob("state/*/metrics.jsonl") for line in path.read_bytes().splitlines())
    events = (msgspec.json.decode(line) for line in lines)
    joint = [len(event["contributors"]) == learners for event in events if event.get("event") == "commit"]
    if not joint:
        raise RuntimeError(f"the run has no versions: its learners trained alone, see {folder.parent}/*/log")
    return statistics.fmean(joint)


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
    real, trained, joint = [], [], []
    for seed in seeds:
        found, share = swarm(msgspec.structs.replace(best, seed=seed), folder / f"{way}-{text}-{seed}", step_s)
        real.append(statistics.fmean(one.loss for one in found))
        trained.append(sum(one.steps for one in found) / learners / best.steps)
        joint.append(share)
        print(f"{way}, {text}, seed {seed}: {real[-1]:.4f}", flush=True)
    laboratory = [halves(known[seed])[1] for seed in seeds]
    gaps = [100.0 * (mine / other - 1.0) for mine, other in zip(real, laboratory, strict=True)]
    return {
        "scripts": statistics.fmean(real),
        "laboratory": statistics.fmean(laboratory),
        "difference": statistics.fmean(gaps),
        "deviation": statistics.stdev(gaps) if len(gaps) > 1 else 0.0,
        "trained": 100.0 * statistics.fmean(trained),
        "joint": 100.0 * statistics.fmean(joint),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; exit status 1 if a difference is more than 1 %."""
    parser = bench.parser(__doc__, rows="way and text", has_plot=False, has_keep=True)
    parser.add_argument("--ways", nargs="+", choices=fine_tuning.WAYS, default=list(fine_tuning.WAYS))
    parser.add_argument("--texts", nargs="+", choices=fine_tuning.TEXTS, default=list(fine_tuning.TEXTS))
    parser.add_argument("--learners", type=int, choices=fine_tuning.LEARNERS, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(fine_tuning.SEEDS))
    parser.add_argument("--step-ms", type=float, default=100.0, help="least duration of a step (default: %(default)s)")
    parser.add_argument("--learner", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.learner:
        job = msgspec.json.decode((options.learner / "job").read_bytes(), type=Job)
        (options.learner / "result").write_bytes(msgspec.json.encode(learn(job, options.learner)))
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
