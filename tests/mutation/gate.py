"""Which mutants are judged, by which tests, and what the score is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.mutation.operators import Mutant, mutants_of, mutated
from tests.mutation.reach import SUITES, Reach, find_reach, suites_of
from tests.mutation.workers import ROOT, SEED, Job, Verdict, judge
from tests.seeded_bugs.inject import change_on_import

PACKAGES = {
    "protocol": ("p2pdiloco/protocol/*.py",),
    "node": ("p2pdiloco/node/*.py", "p2pdiloco/swarm/*.py"),
    "peer": ("p2pdiloco/peer/*.py",),
    "codec": ("p2pdiloco/codec/*.py",),
    "link": (
        "p2pdiloco/training/node_link.py",
        "p2pdiloco/training/node_reconnect.py",
        "p2pdiloco/training/ipc_channel.py",
    ),
}
CACHE = ROOT / "out" / "mutation"
TESTS_MOST = 150
"""For one mutant: the fastest of those that reach it."""
LIMIT_S = 20.0
SEED_LIMIT_S = 1.0
"""For each seed of the simulator, beyond LIMIT_S."""
SLOWER = 5.0
"""How much longer than when it was traced a test may take."""


class Result(NamedTuple):
    """One mutant's fate."""

    file: str
    mutant: Mutant
    verdict: Verdict

    @property
    def is_killed(self) -> bool:
        """Or hangs."""
        return self.verdict.fate in ("killed", "timeout")


class ScoreCard(NamedTuple):
    """A package's sample. ``reached`` of its ``total`` mutants are on lines that fast tests reach."""

    package: str
    results: list[Result]
    reached: int
    total: int

    @property
    def killed(self) -> int:
        """Of the sample."""
        return sum(result.is_killed for result in self.results)

    @property
    def score(self) -> float:
        """Killed of those judged."""
        return self.killed / max(1, len(self.results))

    @property
    def covered(self) -> float:
        """Share of all mutants that any test can find."""
        return self.reached / max(1, self.total)

    def as_json(self) -> dict[str, Any]:
        """For ``accept``."""
        return {
            "package": self.package,
            "reached": self.reached,
            "total": self.total,
            "killed": {r.mutant.id: r.verdict.by or r.verdict.fate for r in self.results if r.is_killed},
            "survived": {r.mutant.id: r.mutant.lines.start for r in self.results if not r.is_killed},
        }


def reach_of(packages: Sequence[str], tests: Sequence[str], simulator_seeds: int) -> Reach:
    """What tests (patterns of files), and so many seeds, reach of these packages."""
    files = [file for package in packages for file in _files(package)]
    return find_reach(files, suites_of(tests), range(simulator_seeds), CACHE)


def judge_sample(
    package: str,
    reach: Reach,
    *,
    is_wanted: Callable[[str], bool],
    sample: int,
    random: Random,
    processes: int,
    say: Callable[[Result], None],
) -> ScoreCard:
    """Judge ``sample`` mutants of ``package`` (0: all) that tests reach and whose ids are wanted; ``say`` hears of
    each."""
    files = _files(package)
    everything = [(str(f.relative_to(ROOT)), f.read_text()) for f in files]
    named = [(file, source, m) for file, source in everything for m in mutants_of(module_of(file), source)]
    named = [one for one in named if is_wanted(one[2].id)]
    reached = [one for one in named if reach.tests(one[0], one[2].lines)]
    chosen = random.sample(reached, sample) if 0 < sample < len(reached) else reached
    by_id = {mutant.id: (file, mutant) for file, _, mutant in chosen}
    results = []
    for job, verdict in judge([_job(file, source, m, reach) for file, source, m in chosen], processes):
        file, mutant = by_id[job.name]
        results.append(Result(file, mutant, verdict))
        say(results[-1])
    return ScoreCard(package, results, len(reached), len(named))


def _files(package: str) -> list[Path]:
    found = [path for pattern in PACKAGES[package] for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if path.name != "__init__.py"]


def module_of(file: str) -> str:
    """Of a file of ours."""
    return file.removesuffix(".py").replace("/", ".")


def _job(file: str, source: str, mutant: Mutant, reach: Reach) -> Job:
    tests = reach.tests(file, mutant.lines)
    seeds = [] if not file.startswith("p2pdiloco/protocol/") else [test for test in tests if test.startswith(SEED)]
    fast = [test for test in tests if not test.startswith(SEED)][:TESTS_MOST]
    took_s = sum(reach.seconds.get(test, 0.0) for test in fast)
    limit_s = LIMIT_S + SLOWER * took_s + SEED_LIMIT_S * len(seeds)
    return Job(mutant.id, planting(mutant, source), [*fast, *seeds], limit_s)


def planting(mutant: Mutant, source: str) -> Callable[[], None]:
    """What plants it in a process."""

    def plant() -> None:
        change_on_import(mutant.module, lambda _: mutated(source, mutant.number))

    return plant


def judge_again(
    killed: Mapping[str, str], number: int, random: Random, processes: int
) -> tuple[list[Result], int, int]:
    """Mutants that a test once killed, a sample of them: those that live now, how many were judged, and how many are
    not in the code any more."""
    names = sorted(name for name, by in killed.items() if _is_certain(by))
    sources = {name.partition(":")[0]: "" for name in names}
    found: dict[str, tuple[str, Mutant, str]] = {}
    for module in sources:
        path = ROOT / (module.replace(".", "/") + ".py")
        source = path.read_text() if path.exists() else ""
        for mutant in mutants_of(module, source):
            found[mutant.id] = (str(path.relative_to(ROOT)), mutant, source)
    there = [name for name in names if name in found]
    chosen = random.sample(there, min(number, len(there)))
    jobs = [Job(n, planting(found[n][1], found[n][2]), _killers(n, killed[n]), LIMIT_S * 3) for n in chosen]
    alive = []
    for job, verdict in judge(jobs, processes):
        result = Result(found[job.name][0], found[job.name][1], verdict)
        if not result.is_killed:
            alive.append(result)
    return alive, len(chosen), len(names) - len(there)


def _is_certain(by: str) -> bool:
    """Not a test that draws its cases anew, nor a matter of time."""
    return by.startswith(("tests/unit", SEED))


def _killers(name: str, by: str) -> list[str]:
    """The test that killed it; if that is gone, what else may."""
    if by.startswith(SEED):
        return [by]
    path = by.partition("::")[0]
    if (ROOT / path).exists():
        wanted = by.partition("::")[2].partition("[")[0]
        if wanted and f"def {wanted.rpartition('::')[2]}(" in (ROOT / path).read_text():
            return [by]
        return [path]
    package = name.split(".")[1]
    return [suite for suite in suites_of(SUITES) if package in suite]
