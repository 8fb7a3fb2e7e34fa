"""Many seeds at once, and what came of them: the interface for the command line, the tests and the benchmarks."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

import msgspec

from tests.machine_sim.seed_world import MIXED, SCENARIOS
from tests.machine_sim.seeds import Outcome, run_seed
from tests.seeded_bugs.mutants import MUTANTS, planted

_Given = TypeVar("_Given")
_Found = TypeVar("_Found")

CHUNK = 20
"""Seeds given to a worker process at once."""


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that failed."""

    seed: int
    sentence: str
    command: str
    """Repeats it."""


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The sum over all seeds."""

    seeds: int
    events: int
    violations: tuple[Violation, ...]
    tokens_lost: int
    tokens_merged: int
    versions: int
    forks: int
    seconds: float
    wrong: int = 0
    """Wrong commits of lying owners,"""
    found: int = 0
    """and how many of these owners were found."""

    def summary(self) -> dict[str, float]:
        """What the last line of ``python -m tests.machine_sim`` holds."""
        return {
            "seeds": self.seeds,
            "events": self.events,
            "violations": len(self.violations),
            "tokens_lost": self.tokens_lost,
            **({"wrong_commits": self.wrong, "owners_found": self.found} if self.wrong else {}),
        }


class MutantFound(msgspec.Struct, frozen=True, kw_only=True):
    """One planted bug, and the first seed that finds it."""

    mutant: str
    seed: int | None
    """None: it survived."""
    sentence: str


def option(scenario: str) -> str:
    """The option with which a seed of ``scenario`` is repeated."""
    return "" if scenario == MIXED else f" --scenario {scenario}"


def command_for(seed: int, scenario: str = MIXED) -> str:
    """The one command that repeats a seed."""
    return f"python -m tests.machine_sim --seeds {seed}{option(scenario)}"


def simulate(seeds: Sequence[int], scenario: str | None = None, *, jobs: int = 1) -> SimulationReport:
    """Run every seed, in ``jobs`` processes; ``scenario`` is one of ``seeds.SCENARIOS``, or None for mixed faults.

    Raises:
        ValueError: ``jobs`` is less than 1, or there is no such scenario.
    """
    if jobs < 1:
        raise ValueError(f"jobs = {jobs} must be at least 1")
    name = scenario or MIXED
    if name != MIXED and name not in SCENARIOS:
        raise ValueError(f"scenario = {scenario!r} must be one of {', '.join((MIXED, *SCENARIOS))}")
    began = time.perf_counter()
    return _sum(_outcomes(seeds, name, jobs), name, began)


def _outcomes(seeds: Sequence[int], scenario: str, jobs: int) -> Iterator[Outcome]:
    run = partial(run_seed, scenario=scenario)
    if jobs == 1 or len(seeds) <= 1:
        yield from map(run, seeds)
        return
    yield from _map(run, seeds, jobs, chunksize=max(1, min(CHUNK, len(seeds) // jobs)))


def _sum(outcomes: Iterable[Outcome], scenario: str, began: float) -> SimulationReport:
    violations = []
    seeds = events = tokens_lost = tokens_merged = versions = forks = wrong = found = 0
    for outcome in outcomes:
        seeds += 1
        events += outcome.events
        tokens_lost += outcome.tokens_lost
        tokens_merged += outcome.tokens_merged
        versions += outcome.versions
        forks += outcome.forks
        wrong += sum(outcome.caught.get(owner, count) for owner, count in outcome.wrong.items())
        found += len(outcome.caught)
        if outcome.violations:
            violations.append(
                Violation(
                    seed=outcome.seed,
                    sentence=outcome.violations[0],
                    command=command_for(outcome.seed, scenario),
                )
            )
    return SimulationReport(
        seeds=seeds,
        events=events,
        violations=tuple(violations),
        tokens_lost=tokens_lost,
        tokens_merged=tokens_merged,
        versions=versions,
        forks=forks,
        seconds=time.perf_counter() - began,
        wrong=wrong,
        found=found,
    )


def find_mutants(seeds: Sequence[int], *, first: Mapping[str, int] | None = None, jobs: int = 1) -> list[MutantFound]:
    """For each planted bug the first of ``seeds`` that finds it. ``first`` has seeds, by bugs' names, that are tried
    before all others."""
    known = first or {}
    searches = [(name, (*([known[name]] if name in known else []), *seeds)) for name in MUTANTS]
    if jobs == 1:
        return [find_mutant(*search) for search in searches]
    return list(_map(_search, searches, jobs))


def _map(work: Callable[[_Given], _Found], given: Iterable[_Given], jobs: int, chunksize: int = 1) -> Iterator[_Found]:
    """In worker processes. A terminal's Ctrl+C is for whoever started them: they begin with it blocked, since one that
    still imports would tell of it."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=look_for_garbage_seldom) as pool:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            found = pool.map(work, given, chunksize=chunksize)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield from found


def look_for_garbage_seldom() -> None:
    """In this process from now on. A world is thrown away as a whole: looking for garbage while it lasts is a tenth of
    its time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _search(search: tuple[str, tuple[int, ...]]) -> MutantFound:
    return find_mutant(*search)


def find_mutant(name: str, seeds: Sequence[int]) -> MutantFound:
    """The first of ``seeds`` that finds the planted bug ``name``; a crash counts, too."""
    with planted(name):
        for seed in seeds:
            try:
                outcome = run_seed(seed)
            except Exception as error:  # noqa: BLE001 - whatever a planted bug breaks is found
                return MutantFound(mutant=name, seed=seed, sentence=repr(error))
            if outcome.violations:
                return MutantFound(mutant=name, seed=seed, sentence=outcome.violations[0])
    return MutantFound(mutant=name, seed=None, sentence="survived")
