"""Peak memory and disk of two peers with a large model on this machine, from founding to export.

    python -m benchmarks.memory.together [--parameters 1.1e9] [--steps 300] [--step-s 1] [--json FILE]

A script founds a run (``creeping.py``; every fragment is exchanged once in 24 steps); ``p2pdiloco join --follow`` joins
it. When the follower has written two checkpoints and commits since, it gets SIGKILL and is started again. After the run
``p2pdiloco export`` writes both models, which must be equal; otherwise the exit status is 1. "The end" lasts from the
learner's last step until both peers have ended.

Memory is RssAnon and RssShmem of a node, and RssAnon of the script, which shares its node's memory; clean pages of the
page cache count for nobody. If the system runs out of memory, it should kill these processes first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import torch
from safetensors import safe_open

from benchmarks import bench
from benchmarks.memory import residence
from benchmarks.memory.creeping import LOOPBACK, STOPPED
from p2pdiloco.swarm.credentials import MemberFiles

NODE = ("RssAnon", "RssShmem")
LOOK_S = 0.2
PATIENCE_S = 900.0
CHECKPOINTS = 2
COMMITS = 50
"""At least, since the last checkpoint."""
COLUMNS = (("GB", "gb", ".2f"), ("bytes a parameter", "bytes", ".2f"))


class TogetherError(Exception):
    """Somebody ended, or nothing came of it; the message says who, and what it said last."""


class Watch(residence.Peaks):
    """What each of the processes holds, and all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self._least_free = self._free_before = psutil.virtual_memory().available

    @property
    def together(self) -> int:
        """By how much less memory was free than before, at the worst moment, whoever had it."""
        return int(self._free_before - self._least_free)

    def look(self) -> None:
        """Once."""
        super().look()
        self._least_free = min(self._least_free, psutil.virtual_memory().available)


class Program:
    """One of the processes, with its folder."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder.with_suffix(".log")
        self.most_disk = 0
        with open(self._log, "ab") as log:
            command = [sys.executable, "-W", "ignore", "-P", "-m", *words]
            self.process = psutil.Popen(
                command,
                cwd=bench.ROOT,
                env={**os.environ, "PYTHONPATH": str(bench.ROOT)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def told(self) -> str:
        """All that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def events(self, kind: str) -> list[dict[str, object]]:
        """Of one kind, in its event log."""
        found = []
        for path in self.folder.glob("*/metrics.jsonl"):
            for text in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last one is being written
                    found.append(json.loads(text))
        return [one for one in found if one["event"] == kind]

    def measure_disk(self) -> None:
        """What its folder takes."""
        total = 0
        for path in self.folder.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_blocks * 512
        self.most_disk = max(self.most_disk, total)

    def end(self) -> None:
        """At once, with the node of a script."""
        pids = [self.process.pid]
        with contextlib.suppress(OSError, ValueError):
            pids.append(int((self.folder / "node.pid").read_text()))
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                    with contextlib.suppress(psutil.Error):
                        process.kill()
        self.process.wait()


def wait_for(programs: Sequence[Program], what: str, holds: Callable[[], object], *, may_end: bool = False) -> float:
    """Until ``holds``; how long that took.

    Raises:
        TogetherError: one of them has ended, though that is not what is waited for, or failed; or it takes too long.
    """
    began = time.monotonic()
    while not holds():
        for program in programs:
            program.measure_disk()
            status = program.process.poll()
            has_failed = bool(status) if may_end else status is not None
            if has_failed or time.monotonic() - began > PATIENCE_S:
                raise TogetherError(f"waiting for {what}: {program.folder.name} said last\n{program.told()[-2000:]}")
        time.sleep(LOOK_S)
    return time.monotonic() - began


@contextlib.contextmanager
def ended_at_last(*words: str, folder: Path) -> Iterator[Program]:
    """A program that does not outlive this block."""
    program = Program(folder, *words)
    try:
        yield program
    finally:
        program.end()


def story(options: argparse.Namespace, folder: Path, watch: Watch) -> dict[str, float]:
    """All of it; how long its parts took, and bytes on the disk.

    Raises:
        TogetherError: it did not come to its end.
    """
    found: dict[str, float] = {}
    parameters, steps, step_s = str(options.parameters), str(options.steps), str(options.step_s)
    words = ("benchmarks.memory.creeping", str(folder / "founder"), "--parameters", parameters)
    watch.phase = "founding"
    with ended_at_last(*words, "--steps", steps, "--step-s", step_s, folder=folder / "founder") as founder:
        watch.look_at("script", "RssAnon", pid=founder.process.pid)
        pid = founder.folder / "node.pid"
        found["founding_s"] = wait_for([founder], "its node", lambda: pid.exists() and pid.read_text())
        watch.look_at("founder's node", *NODE, pid=int(pid.read_text()))
        found["founding_s"] += wait_for([founder], "its first step", lambda: founder.events("progress"))
        invite = MemberFiles(next(founder.folder.glob("*/members")).parent).invite()
        join: tuple[str, ...] = (
            "p2pdiloco",
            "join",
            invite,
            "--follow",
            "--no-average",
            "--state",
            str(folder / "follower"),
        )
        join += (
            "--listen",
            LOOPBACK,
            "--directory-listen",
            LOOPBACK,
            "--write-gb",
            "100000",
            "--stay-s",
            "0",
            "--keep-checkpoints",
            "1",
        )
        join += ("--checkpoint-s", str(options.steps * options.step_s / 8))
        watch.phase = "joining"
        with ended_at_last(*join, folder=folder / "follower") as follower:
            watch.look_at("follower", *NODE, pid=follower.process.pid)
            both = (founder, follower)
            found["joining_s"] = wait_for(both, "the state", lambda: follower.events("current"))
            watch.phase = "at work"
            wait_for(both, "two checkpoints and commits since", lambda: is_to_be_killed(follower))
            follower.process.kill()
            follower.process.wait()
        disk = follower.most_disk
        watch.phase = "coming back"
        with ended_at_last(*join, folder=folder / "follower") as follower:
            watch.look_at("follower", *NODE, pid=follower.process.pid)
            both, follower.most_disk = (founder, follower), disk
            found["coming_back_s"] = wait_for(both, "its state", lambda: len(follower.events("current")) > 1)
            watch.phase = "at work again"
            checkpoints = len(follower.events("checkpoint"))
            wait_for(both, "a checkpoint", lambda: len(follower.events("checkpoint")) > checkpoints)
            wait_for(both, "the last step", lambda: STOPPED in founder.told(), may_end=True)
            watch.phase = "the end"
            found["end_s"] = wait_for(
                both, "the end", lambda: all(one.process.poll() == 0 for one in both), may_end=True
            )
            found |= {"founder_disk": founder.most_disk, "follower_disk": follower.most_disk}
    watch.phase = "export"
    for name in ("founder", "follower"):
        out = folder / f"{name}-exported"
        with ended_at_last(
            "p2pdiloco", "export", str(folder / name), "--out", str(out), folder=folder / f"{name}-export"
        ) as export:
            watch.look_at(f"{name}'s", *NODE, pid=export.process.pid)
            done = partial(lambda one: one.process.poll() == 0, export)
            found[f"{name}_export_s"] = wait_for([export], "the export", done, may_end=True)
    check(*(folder / f"{name}-exported" for name in ("founder", "follower")), steps=options.steps)
    return found


def is_to_be_killed(follower: Program) -> bool:
    """Whether it has written checkpoints, and there are commits since."""
    written = follower.events("checkpoint")
    since = [one for one in follower.events("commit") if written and one["time"] > written[-1]["time"]]  # type: ignore[operator]
    return len(written) >= CHECKPOINTS and len(since) >= COMMITS


def check(mine: Path, theirs: Path, *, steps: int) -> None:
    """Both exports are the same, of the run's last step, and finite.

    Raises:
        TogetherError: they are not.
    """
    for folder in (mine, theirs):
        if (step := json.loads((folder / "p2pdiloco.json").read_text())["step"]) != steps:
            raise TogetherError(f"{folder} is of step {step}")
    with safe_open(mine / "model.safetensors", "pt") as ours, safe_open(theirs / "model.safetensors", "pt") as others:
        for name in ours.keys():  # noqa: SIM118 - no mapping
            tensor = ours.get_tensor(name)
            if not torch.equal(tensor, others.get_tensor(name)) or not tensor.isfinite().all():
                raise TogetherError(f"{name} differs, or is not finite")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False, has_keep=True)
    parser.add_argument("--parameters", type=float, default=1.1e9, help="parameters of the model")
    parser.add_argument(
        "--steps", type=int, default=300, help="steps of the run; all fragments are exchanged once in 24"
    )
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds per step")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was seen is told, and nobody stays
    Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pdiloco-together-")))
        watch = stack.enter_context(Watch())
        try:
            times = story(options, folder, watch)
        except TogetherError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            rows = {f"{phase}: {name}": held for (phase, name), held in watch.bytes.items()}
            rows |= {"all together": watch.together}
            shown = {name: {"gb": held / 1e9, "bytes": held / options.parameters} for name, held in rows.items()}
            print(bench.table("at most", COLUMNS, shown))
    print(f"both exports are the same, of step {options.steps}, and finite")
    print("".join(f"{name} {value:.3g}\n" for name, value in times.items()))
    bench.write(options, "memory/together", {}, {**times, **rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
