"""Whole peers in simulated worlds: the same seeds each time, worlds that once failed, and a few fresh ones."""

from __future__ import annotations

import asyncio
import os
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import pytest

from tests.peer_sim import report
from tests.peer_sim.faults import FirstKind, FurtherKind, LateKind, RoughKind, ShortKind
from tests.peer_sim.report import DARK, LYING, PRIVATE, ROUGH, SHORT, Outcome
from tests.simulation.command_line import fresh_seeds

JOBS = os.cpu_count() or 1
FIXED = range(30)
ROUGHLY = range(ROUGH, ROUGH + 16)
FRESH = 12
SHORT_SEEDS = (1, 2, 4, 8, 14, 15, 18, 23)
REGRESSIONS = tomllib.loads((Path(__file__).parent / "regressions.toml").read_text()).get("whole", [])
OBVIOUS = ("momentum zeroed on restart", "queued shift overwritten by the next", "a checkpoint's proofs are not taken")
ONCE_FAILED = [row["seed"] for row in REGRESSIONS]


def outcomes(seeds: Sequence[int], *, jobs: int, bug: str = "") -> dict[int, Outcome]:
    async def collect() -> dict[int, Outcome]:
        return {outcome.seed: outcome async for outcome in report.outcomes(seeds, jobs=jobs, bug=bug)}

    return asyncio.run(collect())


@pytest.fixture(scope="session")  # a module's ends whenever a test of another one comes between
def found() -> dict[int, Outcome]:
    """Of all seeds that are looked at here."""
    return outcomes(sorted({*FIXED, *ROUGHLY, *ONCE_FAILED}), jobs=JOBS)


def broken(found: Iterable[Outcome]) -> list[str]:
    return [f"python -m tests.peer_sim --seeds {o.seed}: {o.violations[0]}" for o in found if o.violations]


@pytest.mark.timeout(600)
def test_whole_peers_keep_what_must_hold(found: dict[int, Outcome]) -> None:
    fixed = [found[seed] for seed in FIXED]
    assert not broken(fixed)
    assert sum(o.commits for o in fixed) > 400, "worlds in which nothing happens prove nothing"
    assert sum(o.forks for o in fixed) > 7
    assert sum(o.lives for o in fixed) > 2 * len(fixed)
    happened = {kind for o in fixed for kind in o.happened}
    missing = {*get_args(FirstKind), *get_args(FurtherKind), *get_args(LateKind)} - happened
    assert len(missing) <= 10, f"faults that hit nobody: {sorted(missing)}"
    assert "repeated" in happened


@pytest.mark.timeout(600)
def test_in_rough_worlds_the_same_holds(found: dict[int, Outcome]) -> None:
    """Many faults of all kinds, slow links and copies, machines without a compiler."""
    rough = [found[seed] for seed in ROUGHLY]
    assert not broken(rough)
    assert len({*get_args(RoughKind)} - {kind for o in rough for kind in o.happened}) <= 2


@pytest.mark.timeout(600)
def test_what_once_failed_holds(found: dict[int, Outcome]) -> None:
    assert ONCE_FAILED
    assert not broken(found[seed] for seed in ONCE_FAILED)


@pytest.mark.timeout(600)
def test_fresh_seeds_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """Worlds that nobody has seen; their numbers are printed. One that fails is a fault of the program or of the
    checkers: mend it, and keep the seed in regressions.toml."""
    with capsys.disabled():
        seeds = fresh_seeds(FRESH)
    assert not broken(outcomes(seeds, jobs=JOBS).values())


@pytest.mark.timeout(600)
def test_in_a_private_run_nothing_honest_is_lost_for_want_of_an_introduction() -> None:
    """Rule G2d, as it is: members hear of each other when they meet, and when they ask."""
    found = outcomes([PRIVATE + seed for seed in (5, 6, 11, 18)], jobs=JOBS)
    assert not broken(found.values())
    assert sum(o.happened.get("introduced", 0) for o in found.values()) >= 3


@pytest.mark.timeout(600)
def test_nothing_ends_because_a_machine_lacks_something_for_a_while() -> None:
    """No process, no descriptor, no memory, a folder that cannot be written: also where the learner must be started."""
    found = outcomes([SHORT + seed for seed in SHORT_SEEDS], jobs=JOBS)
    assert not broken(found.values())
    happened = sum((Counter(o.happened) for o in found.values()), Counter[str]())
    assert all(happened[kind] >= 2 for kind in get_args(ShortKind))
    assert happened["learner-not-started"] >= 10


@pytest.mark.timeout(600)
def test_after_a_power_cut_of_all_peers_and_the_bootstrap_they_merge_together() -> None:
    """Within a minute of the last start, in whatever order they come back."""
    found = outcomes([DARK, DARK + 1], jobs=JOBS)
    assert not broken(found.values())
    assert all(o.happened["blackout"] == o.happened["met-again"] == 1 for o in found.values())


@pytest.mark.long  # test_seeds has it for the protocol
@pytest.mark.timeout(600)
def test_whole_peers_find_owners_that_merge_wrongly() -> None:
    """Rules V5: one value, noise of honest length, a contribution that is left out. No honest owner is ever accused."""
    found = outcomes([LYING + seed for seed in range(12)], jobs=JOBS)
    assert not broken(found.values())
    assert sum(len(o.caught) for o in found.values()) >= 4
    assert sum(o.audits for o in found.values()) >= 20


@pytest.mark.timeout(600)
def test_a_seed_is_the_same_world_whoever_runs_it(found: dict[int, Outcome]) -> None:
    """Also after other seeds, in another process."""
    assert outcomes(range(11, 7, -1), jobs=1) == {seed: found[seed] for seed in range(8, 12)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", OBVIOUS)
def test_worlds_find_planted_bugs(bug: str) -> None:
    """A check that cannot fail is a defect."""
    assert broken(outcomes(range(ROUGH, ROUGH + 16), jobs=JOBS, bug=bug).values())
