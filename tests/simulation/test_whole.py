"""Whole peers in simulated worlds: the same seeds each time, worlds that once failed (fresh ones: `make simulate`)."""

from __future__ import annotations

import asyncio
import os
import tomllib
from pathlib import Path

import pytest

from p2pdiloco.peersim import report
from p2pdiloco.peersim.report import Outcome

JOBS = os.cpu_count() or 1
FIXED = range(100)
REGRESSIONS = tomllib.loads((Path(__file__).parent / "regressions.toml").read_text()).get("whole", [])


def outcomes(seeds: range, *, jobs: int) -> list[Outcome]:
    async def collect() -> list[Outcome]:
        return [outcome async for outcome in report.outcomes(seeds, jobs=jobs)]

    return asyncio.run(collect())


def broken(found: list[Outcome]) -> list[str]:
    return [f"p2pdiloco simulate --whole --seeds {o.seed}: {o.violations[0]}" for o in found if o.violations]


@pytest.mark.timeout(600)
def test_whole_peers_keep_what_must_hold() -> None:
    found = outcomes(FIXED, jobs=JOBS)
    assert len(found) == len(FIXED)
    assert not broken(found)
    assert sum(o.commits for o in found) > 1000, "worlds in which nothing happens prove nothing"
    assert sum(o.forks for o in found) > 20
    assert sum(o.lives for o in found) > 2 * len(FIXED)


@pytest.mark.timeout(600)
def test_what_once_failed_holds() -> None:
    found = [outcome for row in REGRESSIONS for outcome in outcomes(range(row["seed"], row["seed"] + 1), jobs=1)]
    assert len(found) == len(REGRESSIONS) > 0
    assert not broken(found)


def test_a_seed_is_the_same_world_whoever_runs_it() -> None:
    one, other = (outcomes(range(8, 12), jobs=jobs) for jobs in (1, 2))
    assert sorted(one, key=lambda o: o.seed) == sorted(other, key=lambda o: o.seed)
