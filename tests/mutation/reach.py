"""Which test reaches which line: found once by tracing, kept in ``out/`` for as long as nothing changes.

A line that runs when its module is imported (a constant, a default) is reached by every test that reaches the module.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from tests.mutation.workers import ROOT, SEED, Job, judge, run_tests

SLOW_S = 3.0
"""Of computing, its child processes' included: a test that takes longer, traced, is left out."""
SLOWEST_S = 30.0
"""By the clock."""
SUITES = ("tests/unit/**/test_*.py", "tests/property/test_*.py")
SKIPPED = ("tests/unit/test_integrations.py", "tests/unit/test_cli_", "tests/unit/test_training_huggingface.py")
LIMIT_S = 1800.0
IMPORT = "import"
"""What runs when modules are imported, among tests."""


def _used_s() -> float:
    """Seconds of computing so far, of this process and those that it has waited for."""
    return sum(os.times()[:4])


class Reach(NamedTuple):
    """``lines``: by file and line (as ``path:line``) the tests that reach it; ``imported``: by file the lines that run
    at import; ``seconds``: how long each test took."""

    lines: dict[str, list[str]]
    imported: dict[str, list[int]]
    seconds: dict[str, float]

    def tests(self, file: str, lines: range) -> list[str]:
        """Tests for a mutant of these lines, fast ones first, seeds last."""
        found: Iterable[str] = {test for line in lines for test in self.lines.get(f"{file}:{line}", ())}
        if not found and not {*lines}.isdisjoint(self.imported.get(file, ())):
            found = {test for key, tests in self.lines.items() if key.rpartition(":")[0] == file for test in tests}
        return sorted(found, key=lambda test: (test.startswith(SEED), self.seconds.get(test, 0.0), test))


def suites_of(patterns: Sequence[str]) -> list[str]:
    """The files of tests, but for those that are too slow for this."""
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    names = sorted(str(path.relative_to(ROOT)) for path in found)
    return [name for name in names if not name.startswith(SKIPPED)]


def find_reach(files: list[Path], suites: list[str], seeds: range, cache: Path) -> Reach:
    """By tracing, or as it was found before."""
    names = [str(file.relative_to(ROOT)) for file in files]
    everything = [*(ROOT / "p2pdiloco").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    mark = hashlib.sha256(repr((names, suites, seeds, SLOW_S)).encode())
    for path in sorted(everything):
        mark.update(path.read_bytes())
    place = cache / f"reach-{mark.hexdigest()[:16]}.json"
    if not place.exists():
        cache.mkdir(parents=True, exist_ok=True)
        job = Job("reach", lambda: _trace(names, suites, seeds, place), [], LIMIT_S)
        for _, verdict in judge([job], 1):
            if not place.exists():
                raise RuntimeError(f"no test could be traced: {verdict}, see {place.with_suffix('.log')}")
    found = json.loads(place.read_text())
    return Reach(found["lines"], found["imported"], found["seconds"])


def _trace(names: list[str], suites: list[str], seeds: range, place: Path) -> None:
    """In a process of its own."""
    log = open(place.with_suffix(".log"), "w")  # noqa: SIM115
    sys.stdout = sys.stderr = log
    tracer = Tracer(names)
    tracer.begin(IMPORT)
    import tests.machine_sim.seeds  # noqa: F401

    fate = run_tests(suites, tracer)
    if fate[0] != "survived":
        raise RuntimeError(f"the tests must pass before mutants are made: {fate}")
    from tests.machine_sim.seeds import run_seed

    for seed in seeds:
        tracer.begin(f"{SEED}{seed}")
        run_seed(seed)
        tracer.end()
    log.flush()
    place.write_text(json.dumps(tracer.found()))


class Tracer:
    """A plugin of pytest: lines of some files by test."""

    def __init__(self, names: list[str]) -> None:
        self._names = {str(ROOT / name): name for name in names}
        self._by_test: dict[str, set[tuple[str, int]]] = {}
        self._seconds: dict[str, float] = {}
        self._current: set[tuple[str, int]] = set()

    def begin(self, test: str) -> None:
        self._current = self._by_test.setdefault(test, set())
        self._test, self._began_at, self._used_s = test, time.monotonic(), _used_s()
        local = self._local(self._current)

        def enter(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
            return local if frame.f_code.co_filename in self._names else None

        sys.settrace(enter)
        threading.settrace(enter)

    def end(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        used_s, took_s = _used_s() - self._used_s, time.monotonic() - self._began_at
        self._seconds[self._test] = used_s
        is_slow = used_s > SLOW_S or took_s > SLOWEST_S
        if is_slow and self._test != IMPORT and not self._test.startswith(SEED):
            del self._by_test[self._test]

    def _local(self, seen: set[tuple[str, int]]) -> Callable[..., Any]:
        names = self._names

        def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
            seen.add((names[frame.f_code.co_filename], frame.f_lineno))
            return trace

        return trace

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, Any, Any]:
        """Modules are imported here."""
        self.begin(IMPORT)
        try:
            return (yield)
        finally:
            self.end()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """One test with its fixtures."""
        self.begin(item.nodeid)
        try:
            return (yield)
        finally:
            self.end()

    def found(self) -> dict[str, Any]:
        """As JSON."""
        lines: dict[str, list[str]] = {}
        imported: dict[str, list[int]] = {}
        for name, line in sorted(self._by_test.pop(IMPORT, ())):
            imported.setdefault(name, []).append(line)
        for test, seen in self._by_test.items():
            for name, line in seen:
                lines.setdefault(f"{name}:{line}", []).append(test)
        return {"lines": lines, "imported": imported, "seconds": self._seconds}
