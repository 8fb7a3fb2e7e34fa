"""Many seeds of whole peers at once: worker processes, and the sum of what came of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

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


async def outcomes(seeds: range, *, jobs: int) -> AsyncIterator[Outcome]:
    """Of every seed, as they come, from ``jobs`` processes, which end with whoever reads this.

    Raises:
        RuntimeError: a worker failed; the end of what it said.
    """
    jobs = max(1, min(jobs, len(seeds)))
    parts = [asyncio.create_task(_part(range(seeds.start + i, seeds.stop, jobs), None)) for i in range(jobs)]
    try:
        for part in asyncio.as_completed(parts):
            for outcome in await part:
                yield outcome
    finally:
        for task in parts:
            task.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


async def find(bug: str, seeds: range, *, batch: int = 25) -> BugFound:
    """The first seed that finds a planted bug."""
    for first in range(seeds.start, seeds.stop, batch):
        for outcome in await _part(range(first, min(first + batch, seeds.stop)), bug):
            if outcome.violations:
                return BugFound(name=bug, seed=outcome.seed, sentence=outcome.violations[0])
    return BugFound(name=bug, seed=None, sentence="")


async def _part(seeds: range, bug: str | None) -> list[Outcome]:
    arguments = [str(seeds.start), str(seeds.stop), str(seeds.step), *([bug] if bug else [])]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "p2pdiloco.peersim.worker",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SEED_S + 20.0 * len(seeds)):
            said, complained = await process.communicate()
    except TimeoutError:
        return [Outcome(seed=seeds[0], violations=(f"5: the worker hangs in one of {len(seeds)} seeds from here",))]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found = [msgspec.json.decode(line, type=Outcome) for line in said.splitlines()]
    complaint = complained.decode(errors="replace").strip()
    if process.returncode and bug:  # the bug took the worker with it
        return [*found, Outcome(seed=seeds[len(found)], violations=(f"5: {complaint[-200:]}",))]
    if process.returncode:
        raise RuntimeError(f"seed {seeds[len(found)]}: {complaint[-2000:]}")
    return found
