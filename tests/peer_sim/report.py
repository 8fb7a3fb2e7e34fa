"""Many seeds of whole peers at once: worker processes, and the sum of what came of them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

DRIVEN = ("p2pdiloco.peer.", "p2pdiloco.training.node_link", "p2pdiloco.codec.")
"""Modules beside the protocol that run in simulated worlds as they are."""
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


class BugFound(msgspec.Struct, frozen=True, kw_only=True):
    """One planted bug, and the first seed that finds it."""

    name: str
    seed: int | None
    """None: it survived."""
    sentence: str
    tried: int
    """Seeds."""


async def outcomes(seeds: Sequence[int], *, jobs: int) -> AsyncIterator[Outcome]:
    """Of every seed, as they come, from ``jobs`` processes, which end with whoever reads this.

    Raises:
        RuntimeError: a worker failed; the end of what it said.
    """
    jobs = max(1, min(jobs, len(seeds)))
    parts = [asyncio.create_task(_part(seeds[i::jobs])) for i in range(jobs)]
    try:
        for part in asyncio.as_completed(parts):
            for outcome in await part:
                yield outcome
    finally:
        for task in parts:
            task.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


async def hunt(bugs: Sequence[str], seeds: range, *, jobs: int) -> AsyncIterator[BugFound]:
    """The first seed that finds each of these planted bugs, as they come, from ``jobs`` processes.

    Raises:
        RuntimeError: a hunting process failed; the end of what it said.
    """
    found: asyncio.Queue[BugFound | None] = asyncio.Queue()
    jobs = max(1, min(jobs, len(bugs)))
    hunts = [asyncio.create_task(_hunt(bugs[i::jobs], seeds, found)) for i in range(jobs)]
    try:
        ended = 0
        while ended < jobs:
            bug = await found.get()
            if bug is None:
                ended += 1
            else:
                yield bug
        for one in hunts:
            one.result()
    finally:
        for one in hunts:
            one.cancel()
        await asyncio.gather(*hunts, return_exceptions=True)


async def _hunt(bugs: Sequence[str], seeds: range, found: asyncio.Queue[BugFound | None]) -> None:
    """Of these, one after the other; None at the end."""
    arguments = ("-m", "tests.peer_sim.bug_search", str(seeds.start), str(seeds.stop), *bugs)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                found.put_nowait(msgspec.json.decode(line, type=BugFound))
            if await process.wait():
                raise RuntimeError(f"hunting planted bugs ended with status {process.returncode}")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    finally:
        found.put_nowait(None)


async def _part(seeds: Sequence[int]) -> list[Outcome]:
    """Of ``seeds``, in this order, from a process of their own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.peer_sim.worker",
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
