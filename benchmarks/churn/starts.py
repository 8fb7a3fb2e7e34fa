"""CPU time of a peer's start, from the command to its learner's first step, by process.

    python -m benchmarks.churn.starts [--rounds 5] [--tree FOLDER ...] [--cold] [--json FILE]

A bootstrap node, a founder (``start``) and a newcomer (``join``) of ``stdlib-tiny`` are started with the commands that
a user types. Counted is the CPU time of node, learner and libp2p daemon; medians of the rounds.

- Trees (worktrees of other commits) take turns, so that a change in the machine's load affects all of them. The
  bootstrap node is always of this tree.
- The first step is the first ``progress`` event in the peer's log.
- With ``--cold`` nothing of the tree is compiled yet: no bytecode, no kernels.
- Imports are also measured apart, in processes that do nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import bench
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import Listening

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
LOOK_S = 0.005
PARTS = ("node", "learner", "daemon")
IMPORTS = {"a node's imports": "p2pdiloco.cli.join", "a learner's imports": "p2pdiloco.learner"}
COLUMNS: tuple[bench.Column, ...] = (
    ("CPU s", "cpu_s", ".2f"),
    *((name, f"{name}_s", ".2f") for name in PARTS),
    ("s by the clock", "clock_s", ".2f"),
)
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class StartError(Exception):
    """Somebody did not start."""


class Command:
    """A command of one tree, running in a session of its own."""

    def __init__(
        self, tree: Path, state: Path, environment: dict[str, str], *words: str, pass_fds: Sequence[int] = ()
    ) -> None:
        self.state = state
        state.mkdir(parents=True)
        self._log = state / "log.txt"
        self.began = time.monotonic()
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "p2pdiloco", *words, "--state", str(state)],
                cwd=tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=pass_fds,
            )

    def told(self) -> str:
        """All that it has printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, files: str) -> None:
        """Until one of its ``files`` has ``text``.

        Raises:
            StartError: it ended, or says nothing.
        """
        while not any(text in file.read_text(encoding="utf-8") for file in self.state.glob(files)):
            if self._process.poll() is not None or time.monotonic() - self.began > PATIENCE_S:
                raise StartError(self.told()[-2000:])
            time.sleep(LOOK_S)

    def spent(self) -> dict[str, float]:
        """Processor time of its processes until now, those that have ended included, by what they are."""
        found = dict.fromkeys(PARTS, 0.0)
        top = psutil.Process(self._process.pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                is_learner = process.name() == "learner" or IMPORTS["a learner's imports"] in process.cmdline()
                part = "daemon" if "p2pd" in process.name() else "learner" if is_learner else "node"
                times = process.cpu_times()
                found[part] += times.user + times.system + times.children_user + times.children_system
        return found

    def end(self) -> None:
        """At once: nothing is worth keeping."""
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(self._process.pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
        self._process.wait()


def starts(tree: Path, *, is_cold: bool) -> Iterator[tuple[str, dict[str, float]]]:
    """What a founder's start and a newcomer's took.

    Raises:
        StartError, StatusPipeError: somebody did not start.
    """
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-starts-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        if is_cold:
            ignored = shutil.ignore_patterns("__pycache__", ".git", ".venv", "out")
            shutil.copytree(tree, folder / "tree", symlinks=True, ignore=ignored)
            tree = folder / "tree"
        own = {**os.environ, "PYTHONPATH": str(ROOT)}
        with status_pipe.opened() as (reports, fd):
            words: tuple[str, ...] = ("bootstrap", "--listen", LOOPBACK, status_pipe.OPTION, str(fd))
            boot = Command(ROOT, folder / "boot", own, *words, pass_fds=(fd,))
        stack.callback(boot.end)
        address = reports.wait_for(Listening, PATIENCE_S).addresses[0]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        places = ("--directory-listen", LOOPBACK, "--listen", LOOPBACK, "--threads", "1")
        for role, words in (
            ("start", ("stdlib-tiny", "--access", "open", "--bootstrap", address)),
            ("join", (address,)),
        ):
            if is_cold:
                for compiled in tree.rglob("__pycache__"):
                    shutil.rmtree(compiled)
            peer = Command(tree, folder / role, environment, role, *words, *places)
            stack.callback(peer.end)
            peer.wait_for('"progress"', "**/metrics.jsonl")
            clock_s, spent = time.monotonic() - peer.began, peer.spent()
            figures = {f"{part}_s": value for part, value in spent.items()}
            yield role, {"cpu_s": sum(spent.values()), **figures, "clock_s": clock_s}


def imports(tree: Path, module: str) -> float:
    """Processor seconds of a process that imports ``module`` and nothing else."""
    before = os.times()
    command = [sys.executable, "-c", f"import gc; gc.disable(); import {module}"]
    subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, rows="tree and role", has_plot=False)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each tree")
    parser.add_argument(
        "--tree",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="tree to measure; may be repeated (default: this one)",
    )
    parser.add_argument("--cold", action="store_true", help="start without compiled files")
    options = parser.parse_args(argv)
    trees: list[Path] = [tree.resolve() for tree in options.tree or [ROOT]]
    runs: dict[str, list[Mapping[str, float | None]]] = {}
    for number in range(options.rounds + (not options.cold)):
        for tree in trees:
            for role, figures in starts(tree, is_cold=options.cold):
                if number or options.cold:  # the first warms the caches
                    runs.setdefault(f"{tree.name}: {role}", []).append(figures)
            for name, module in IMPORTS.items():
                if number:
                    runs.setdefault(f"{tree.name}: {name}", []).append({"cpu_s": imports(tree, module)})
        print(f"round {number}, load {os.getloadavg()[0]:.2f}", file=sys.stderr)
    found = {name: bench.medians(figures) for name, figures in runs.items()}
    for name, medians in found.items():
        bench.write(_settled(options), "churn/starts", {"what": name}, medians)
    print(bench.table("", COLUMNS, found))
    return 0


def _settled(options: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "tree": [str(tree) for tree in options.tree or []]})


if __name__ == "__main__":
    sys.exit(main())
