"""Many seeds of whole peers at once: worker processes, and the sum of what came of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import msgspec

SEED_S = 120.0
"""A worker that needs longer for a seed hangs."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a seed."""

    seed: int
    violations: tuple[str, ...]
    commits: int = 0
    contributions: int = 0
    forks: int = 0
    lives: int = 0
    faults: int = 0
    seconds: float = 0.0
    """Of virtual time."""


class BugFound(msgspec.Struct, frozen=True, kw_only=True):
    """One planted bug, and the first seed that finds it."""

    name: str
    seed: int | None
    """None: it survived."""
    sentence: str


def outcomes(seeds: range, *, jobs: int) -> Iterator[Outcome]:
    """Of every seed, as they come, from ``jobs`` processes.

    Raises:
        RuntimeError: a worker failed; the end of what it said.
    """
    jobs = max(1, min(jobs, len(seeds)))
    with ThreadPoolExecutor(jobs) as threads:
        parts = [threads.submit(_part, range(seeds.start + i, seeds.stop, jobs), None) for i in range(jobs)]
        for part in as_completed(parts):
            yield from part.result()


def find(bug: str, seeds: range, *, batch: int = 25) -> BugFound:
    """The first seed that finds a planted bug."""
    for first in range(seeds.start, seeds.stop, batch):
        for outcome in _part(range(first, min(first + batch, seeds.stop)), bug):
            if outcome.violations:
                return BugFound(name=bug, seed=outcome.seed, sentence=outcome.violations[0])
    return BugFound(name=bug, seed=None, sentence="")


def _part(seeds: range, bug: str | None) -> list[Outcome]:
    arguments = [str(seeds.start), str(seeds.stop), str(seeds.step), *([bug] if bug else [])]
    command = [sys.executable, "-m", "p2pdiloco.peersim.worker", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SEED_S + 20.0 * len(seeds), check=False)
    except subprocess.TimeoutExpired as error:
        seen = len((error.stdout or b"").splitlines())
        return [Outcome(seed=seeds[min(seen, len(seeds) - 1)], violations=("5: the worker hangs",))]
    found = [msgspec.json.decode(line, type=Outcome) for line in done.stdout.splitlines()]
    if done.returncode and bug:  # the bug took the worker with it
        return [*found, Outcome(seed=seeds[len(found)], violations=(f"5: {done.stderr.strip()[-200:]}",))]
    if done.returncode:
        raise RuntimeError(f"seed {seeds[len(found)]}: {done.stderr.strip()[-2000:]}")
    return found
