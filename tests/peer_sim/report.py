"""Many seeds of whole peers at once: worker processes, and the sum of what came of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

SEED_S = 120.0
"""A worker that needs longer for a seed hangs."""
ROUGH = 10**14
"""From here on seeds are rough worlds: many faults of all kinds, learners whose copies and links take their time, and
machines without a compiler."""
PRIVATE = 10**15
"""From here on seeds are those of before in a private run, in which peers know only the members whom they have met."""
LYING = 10**16
"""From here on seeds are those of before with a peer whose merges are wrong, and longer runs."""

SHORT = 10**17
"""From here on seeds are those of before on machines that at times lack processes, descriptors, memory, or the right
to write."""

DARK = 2 * SHORT
"""From here on seeds are worlds in which all peers and the bootstrap node lose power at once, and nothing else
happens."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a seed."""

    seed: int
    violations: tuple[str, ...]
    commits: int = 0
    contributions: int = 0
    forks: int = 0
    lives: int = 0
    faults: int = 0
    happened: dict[str, int] = {}
    """Faults that hit somebody, by kind, and what came of some (``repeated``, ``refused-release``, ``misled-dial``)."""
    audits: int = 0
    """That ended without a verdict against the owner,"""
    undelivered: int = 0
    """and those among them for which the owner did not deliver."""
    wrong: dict[str, int] = {}
    """Wrong commits of each lying owner that others applied,"""
    caught: dict[str, int] = {}
    """and how many these were when it was found."""
    seconds: float = 0.0
    """Of virtual time."""


async def outcomes(seeds: Sequence[int], *, jobs: int, bug: str = "") -> AsyncIterator[Outcome]:
    """Of every seed, as they come, from ``jobs`` processes, which end with whoever reads this. ``bug``: the name of one
    of ``tests.seeded_bugs.peer`` that is planted in them.

    Raises:
        RuntimeError: a worker failed; the end of what it said.
    """
    jobs = max(1, min(jobs, len(seeds)))
    parts = [asyncio.create_task(_part(seeds[i::jobs], bug)) for i in range(jobs)]
    try:
        for part in asyncio.as_completed(parts):
            for outcome in await part:
                yield outcome
    finally:
        for task in parts:
            task.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


async def _part(seeds: Sequence[int], bug: str) -> list[Outcome]:
    """Of ``seeds``, in this order, from a process of their own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.peer_sim.worker",
        bug,
        *map(str, seeds),
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
    if process.returncode:
        raise RuntimeError(f"seed {seeds[len(found)]}: {complaint[-2000:]}")
    return found
