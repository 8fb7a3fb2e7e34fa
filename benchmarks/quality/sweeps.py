"""Cells of each sweep by name, the most useful ones first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from benchmarks.quality import questions
from benchmarks.quality.bases import BASE, MUON, RDA, SEEDS, UNEVEN, as_shipped
from benchmarks.quality.settings import Setting


def _with(**changes: object) -> Setting:
    return msgspec.structs.replace(BASE, **changes)


def _muon(**changes: object) -> Setting:
    return msgspec.structs.replace(MUON, **changes)


def _parallel(**changes: object) -> Setting:
    return _with(method="parallel", learners=1, **changes)


def inner() -> list[Setting]:
    """The inner learning rate of data parallel and of four learners; one learner alone with its quarter of a batch."""
    rates = (2e-3, 4e-3, 8e-3, 1e-3)
    alone = _parallel(batch=BASE.batch // 4)
    return [_parallel(learning_rate=rate) for rate in rates] + [alone] + [_with(learning_rate=r) for r in rates[:3]]


def seeds() -> list[Setting]:
    """What is claimed, with three seeds: data parallel, two to eight learners, codecs, unequal and absent ones."""
    changes: list[dict[str, object]] = [
        {"method": "parallel", "learners": 1, **RDA},
        {},
        {"up": "fp32", "down": "fp32"},
        {"learners": 8},
        {"learners": 2},
        {"up": "int4@1.0", "down": "int4@1.0"},
        {"up": "int2", "down": "int2"},
        {"speeds": UNEVEN},
        {"absent": 0.5},
    ]
    adamw = [_parallel(batch=64, learning_rate=8e-3, seed=seed) for seed in SEEDS]
    return [_muon(**change, seed=seed) for change in changes[:2] for seed in SEEDS] + [
        *adamw,
        *(_muon(**change, seed=seed) for change in changes[2:] for seed in SEEDS),
    ]


def batches() -> list[Setting]:
    """What is left of the gap where learners have larger batches, and with Muon."""
    found = []
    for batch, rates in ((64, (4e-3, 8e-3)), (256, (8e-3, 4e-3))):
        for inner in ("adamw", "muon"):
            shape = {"batch": batch, "inner": inner}
            found += [_parallel(**shape, learning_rate=rate) for rate in (*rates, 16e-3 if batch == 256 else 2e-3)]
            found += [_with(**shape, learning_rate=rate) for rate in rates]
    large = {"batch": 256, "learning_rate": 8e-3}
    return found + [_with(**large, inner=inner, learners=m) for inner in ("muon", "adamw") for m in (2, 8)]


def muon() -> list[Setting]:
    """Muon's own outer settings: the mean and RDA; an inner rate that falls further; batches and learners."""
    rda = (("rda", 0.7, 0.3), ("rda", 0.7, 0.9), ("rda", 0.7, 0.5), ("rda", 0.7, 0.0))
    mean = [("direct", *pair) for pair in ((1.0, 0.0), (1.0, 0.3), (1.0, 0.6), (0.7, 0.6), (0.7, 0.7), (0.7, 0.8))]
    pairs = (*rda, *mean, ("direct", 0.5, 0.8), ("direct", 0.7, 0.9))
    found = [_muon(merge=rule, outer_rate=r, outer_momentum=mu) for rule, r, mu in pairs]
    found += [_muon(**RDA, final_share=0.0), _muon(final_share=0.0, method="parallel", learners=1, **RDA)]
    found += [_muon(**RDA, learning_rate=16e-3)]
    best = {"merge": "direct", "outer_rate": 0.7}
    found += [_muon(**best, outer_momentum=0.6, batch=batch, learners=m) for batch in (64, 256) for m in (4, 8, 2)]
    adamw = {"batch": 64, "learning_rate": 4e-3, **best}
    return [*found, _muon(**best, learners=8, outer_momentum=0.8), _with(**adamw, outer_momentum=0.7)]


def gain() -> list[Setting]:
    """RDA with longer momentum and a rate so much smaller: as far in a round, averaged over more rounds. One learner,
    too, for which there is nothing to average: what suits many must not harm who is left alone."""
    pairs = ((0.3, 0.7), (0.2, 0.8), (0.4, 0.7), (0.5, 0.7), (0.3, 0.8), (0.5, 0.6))
    found = [_muon(outer_rate=rate, outer_momentum=mu) for rate, mu in pairs]
    found += [_muon(learners=m) for m in (8, 2)]
    alone = {"learners": 1, "batch": 16}
    mean = {"merge": "direct", "outer_rate": 0.7, "outer_momentum": 0.7}
    found += [_muon(**alone, **outer) for outer in ({}, RDA, mean)]
    found += [_muon(learners=8, outer_rate=0.3), _muon(learners=8, outer_rate=0.5)]
    new = {"outer_rate": 0.4, "outer_momentum": 0.7}
    found += [_with(batch=64, learning_rate=4e-3, **new), _with(**new)]
    return [*found, *(_muon(batch=256, learners=m) for m in (4, 8, 2))]


def learners() -> list[Setting]:
    """Two, four and eight learners that share the same batch."""
    return [_muon(learners=m) for m in (4, 8, 2)]


def codec() -> list[Setting]:
    """The wire: both ways alike, and few bits one way only."""
    both = [_muon(up=name, down=name) for name in ("int4", "fp32", "int4@1.0", "int2", "e3m0", "int8")]
    return [*both, _muon(up="int2"), _muon(down="int2")]


def adopt() -> list[Setting]:
    """How a learner takes a commit, and how long one is under way."""
    later = [_muon(adopt=rule, overlap=10) for rule in ("carry", "overwrite")]
    return [_muon(), _muon(adopt="overwrite"), _muon(overlap=5), *later]


def people() -> list[Setting]:
    """Learners of different speeds, with and without waiting for them; absent ones; late ones; other data."""
    waited = [_muon(speeds=UNEVEN, waits=True, seed=seed) for seed in SEEDS]
    speeds = [_muon(speeds=UNEVEN), _muon(speeds=UNEVEN, grace=0.0), _muon(speeds=UNEVEN, quorum=4)]
    rest = [_muon(absent=0.5), _muon(join_at=0.5), _muon(cut=(0.4, 0.6)), _muon(data="parts")]
    return [_muon(), *waited, *speeds[:2], *rest[:1], speeds[2], *rest[1:]]


ALONE: dict[str, Any] = {"method": "parallel", "learners": 1, "bounded": False, "correction": False}
CROWD_STEPS = 480
"""The longest run for which the mean every three steps ships."""
CROWD_SEEDS = tuple(range(1, 13))
"""Seeds of the cells with RDA: so many, because the first three differed by a per cent."""


def crowd() -> list[Setting]:
    """Many learners in one merge, and in groups whose merges are merged: with 64 windows a step however many learners
    there are, and with four windows for each learner; data parallel with as many windows, also in fewer steps, from
    which token efficiency is read. RDA every 24 steps in twice the steps."""

    def parallel(batch: int) -> list[Setting]:
        shape = {**questions.LINE, **ALONE, "batch": batch}
        return [
            as_shipped(**shape, steps=steps, learning_rate=rate, warmup=min(96, steps // 5))
            for steps in (CROWD_STEPS, CROWD_STEPS // 2, CROWD_STEPS // 4, CROWD_STEPS // 8)
            for rate in (16e-3, 32e-3, 24e-3)
        ]

    def learners(batch: int, m: int, groups: Sequence[int], seed: int = 1) -> list[Setting]:
        shape = {"batch": batch, "steps": CROWD_STEPS, "learners": m, "seed": seed}
        return [as_shipped(**questions.EVERY_THREE, **shape, groups=g) for g in groups]

    def seldom(m: int, groups: Sequence[int], seed: int = 1) -> list[Setting]:
        shape = {**questions.LINE, "agreement": True, "steps": 2 * CROWD_STEPS, "learners": m, "seed": seed}
        return [as_shipped(**shape, groups=g) for g in groups]

    return [
        *learners(64, 16, (1, 4)),
        *parallel(64),
        *learners(64, 64, (1, 8)),
        *learners(64, 32, (1, 4)),
        *(cell for seed in SEEDS[1:] for cell in learners(64, 16, (1, 4), seed)),
        *seldom(16, (1, 4)),
        *learners(256, 64, (1,)),
        *parallel(256),
        *learners(128, 32, (1,)),
        *parallel(128),
        *(cell for seed in CROWD_SEEDS[1:] for cell in seldom(16, (1, 4), seed)),
        *(cell for seed in SEEDS[1:] for cell in learners(64, 32, (1, 4), seed)),
        *(cell for seed in SEEDS[1:] for cell in learners(64, 64, (1, 8), seed)),
    ]


SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "inner": inner,
    "seeds": seeds,
    "learners": learners,
    "codec": codec,
    "adopt": adopt,
    "people": people,
    "batches": batches,
    "muon": muon,
    "gain": gain,
    "crowd": crowd,
    **questions.SWEEPS,
}


def cells(names: Iterable[str]) -> list[Setting]:
    """All cells of these sweeps, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(SWEEPS[name]() for name in names)))
