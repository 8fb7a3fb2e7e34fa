"""Judging in processes of their own: each is forked from one that has imported what is slow (torch, pytest) and nothing
of ours, plants its change, and runs tests until the first fails.

Rules of this file:
1. A process that does not end within its time is killed, with all that it started; that is found, too: a program that
   hangs is no program.
2. No file of the working tree is written: no bytecode of bugs, no examples of hypothesis, no caches.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

ROOT = Path(__file__).parents[2]
LOOK_S = 0.01
STARVED = 6.0
"""Times its limit, by the clock, that a process may take which does not compute for that long."""


class Verdict(NamedTuple):
    """What came of one bug."""

    fate: str
    """killed, survived, timeout, or broken (no test ran: the tool's fault, or the tests')."""
    by: str
    """The test that failed first."""
    seconds: float


class Job(NamedTuple):
    """One bug to judge."""

    name: str
    plant: Callable[[], None]
    tests: Sequence[str]
    """Ids of pytest's."""
    limit_s: float
    """Of computing."""


SLOW = (
    *("anyio.pytest_plugin", "xdist.plugin", "xdist.looponfail", "pytest_timeout", "_hypothesis_pytestplugin"),
    *("_pytest.junitxml", "hypothesis", "torch", "zstandard", "safetensors.torch", "blake3"),
    *("cryptography.hazmat.primitives.asymmetric.ed25519", "msgspec.json", "msgspec.msgpack", "msgspec.toml", "uvloop"),
)
"""What the fast tests import that is not ours: a second and a half of each process that does it itself."""


PLUGINS = ("pytest_timeout", "_hypothesis_pytestplugin")
"""Those that tests need, of what is installed: to find out what is takes pytest a tenth of a second."""


def import_slow() -> None:
    """What every process needs and few change. To be called once, before ``judge``."""
    for name in SLOW:
        with contextlib.suppress(ImportError):
            import_module(name)
    import_module("torch").set_num_threads(1)
    ours = [name for name in sys.modules if name.startswith("p2pdiloco.") and "simulation" not in name]
    assert not ours, f"imported too early: {ours}"
    gc.freeze()  # what is there is nobody's garbage, and no child copies it to look
    gc.disable()


def judge(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Verdict]]:
    """Verdicts as they come, ``processes`` at a time."""
    waiting = list(reversed(jobs))
    running: dict[int, _Child] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                child = _Child(waiting.pop())
                running[child.pid] = child
            for child in list(running.values()):
                verdict = child.look()
                if verdict is not None:
                    del running[child.pid]
                    yield child.job, verdict
            time.sleep(LOOK_S)
    finally:
        for child in running.values():
            child.kill()


class _Child:
    """One forked process."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._began = time.monotonic()
        self._result = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the child is gone
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(job, self._result)

    def look(self) -> Verdict | None:
        """Its verdict, once it is there."""
        seconds = time.monotonic() - self._began
        done, _ = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            if not self._is_late(seconds):
                return None
            self.kill()
            return Verdict("timeout", "", seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it started and left behind
        self._result.seek(0)
        text = self._result.read()
        self._result.close()
        fate, by = json.loads(text) if text else ("killed", "the process's end")
        return Verdict(fate, by, seconds)

    def _is_late(self, seconds: float) -> bool:
        """By the processor's time: a busy machine finds no bugs."""
        if seconds <= self.job.limit_s:
            return False
        used = psutil.Process(self.pid).cpu_times()
        return used.user + used.system > self.job.limit_s or seconds > STARVED * self.job.limit_s

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self._result.close()


def _be_child(job: Job, result: Any) -> None:
    """Never returns."""
    try:
        os.setsid()
        with open(os.devnull, "r+b") as nothing:
            for descriptor in (0, 1, 2):
                os.dup2(nothing.fileno(), descriptor)
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-bug-") as folder:
            isolate(Path(folder))
            job.plant()
            verdict = run_tests(job.tests)
            json.dump(verdict, result)
            result.flush()
    finally:
        os._exit(0)


def isolate(folder: Path) -> None:
    """Caches of tests go to ``folder``."""
    sys.dont_write_bytecode = True
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["PYTHONPATH"] = str(ROOT)
    for name in ("CI", "BUILD_NUMBER"):  # where they are set, pytest tells each difference of two payloads: for minutes
        os.environ.pop(name, None)


def run_tests(tests: Sequence[str]) -> tuple[str, str]:
    """Fate and killer; stops at the first failure."""
    first = _First()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=0"]
    options += [word for plugin in PLUGINS for word in ("-p", plugin)]
    status = pytest.main([*options, *(f"{ROOT}/{test}" for test in tests)], plugins=[first])
    if status == pytest.ExitCode.TESTS_FAILED:
        return "killed", first.failed or "?"
    if status in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR) and first.failed.startswith("import"):
        return "killed", first.failed
    if status != pytest.ExitCode.OK:
        return "broken", f"pytest ended with status {status}: {first.failed}"
    return "survived", ""


class _First:
    """Remembers the first test that failed, or the module that could not be imported."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"import of {report.nodeid}"
