"""Cells of each sweep by name, the most useful ones first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

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


def outer() -> list[Setting]:
    """Outer learning rate and momentum, four learners at H = 24."""
    pairs = ((0.7, 0.3), (0.7, 0.6), (1.0, 0.0), (1.0, 0.3), (0.4, 0.9), (0.5, 0.0))
    return [_with(outer_rate=r, outer_momentum=mu, learning_rate=lr) for r, mu in pairs for lr in (2e-3, 4e-3)]


def outer_by_learners() -> list[Setting]:
    """The same for two and eight learners."""
    return [_with(learners=m, outer_rate=r, outer_momentum=mu) for m in (8, 2) for r, mu in FEW]


def outer_by_h() -> list[Setting]:
    """The same for shorter and longer rounds."""
    return [_with(sync_every=h, outer_rate=r, outer_momentum=mu) for h in (48, 12) for r, mu in FEW]


def merge() -> list[Setting]:
    """The direct mean, which is shorter than its parts; RDA for the embedding, too."""
    pairs = ((0.7, 0.9), (1.0, 0.3))
    direct = [_with(merge="direct", outer_rate=r, outer_momentum=mu, learning_rate=4e-3) for r, mu in pairs]
    few = [_with(merge="direct", outer_momentum=mu) for mu in (0.3, 0.7, 0.6)]
    return [_with(), _with(embedding="rda"), *direct, *few]


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


def causes() -> list[Setting]:
    """What the gap does not come from: M = 4, 64 windows a step, inner rate 4e-3, one thing changed at a time."""
    shape = {"batch": 64, "learning_rate": 4e-3}
    exact = {"up": "fp32", "down": "fp32", "overlap": 0}
    plain = {"merge": "direct", "outer_rate": 1.0, "outer_momentum": 0.0}
    changes: list[dict[str, object]] = [{}, exact, {"sync_every": 12}, {"embedding": "rda"}, plain, {**plain, **exact}]
    changes += [{"outer_momentum": 0.0}, {"outer_momentum": 0.6}, {**plain, "outer_momentum": 0.3}]
    changes += [{"sync_every": 4, "fragments": 4, "overlap": 1}]
    return [_with(**shape, **change) for change in changes]


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


def memory() -> list[Setting]:
    """Inner optimizers that average over more steps, because a learner's batch is smaller."""
    adamw = {"batch": 64, "learning_rate": 4e-3}
    one = {**RDA, "method": "parallel", "learners": 1}
    long = [_muon(**RDA, memory=4.0), _with(**adamw, memory=4.0), _muon(**one, memory=4.0)]
    tuned = _parallel(batch=64, learning_rate=8e-3, memory=4.0)
    return [*long, tuned, _muon(**RDA, memory=2.0), _muon(**one, memory=2.0)]


def flat() -> list[Setting]:
    """Small batches and a rate that never falls, as in benchmarks.wan.speed: merges and outer rates."""
    shape: dict[str, object] = {"width": 64, "heads": 2, "context": 64, "steps": 400, "warmup": 24, "final_share": 1.0}
    rda = [
        _with(**shape, outer_rate=r, outer_momentum=mu)
        for r, mu in ((0.7, 0.5), (0.7, 0.3), (1.0, 0.0), (1.0, 0.6), (0.4, 0.7), (0.3, 0.7))
    ]
    pairs = ((1.0, 0.0), (0.7, 0.9), (0.7, 0.5))
    direct = [_with(**shape, merge="direct", outer_rate=r, outer_momentum=mu) for r, mu in pairs]
    whole = _with(**shape, merge="direct", outer_rate=1.0, outer_momentum=0.0, fragments=1, overlap=0)
    return [_parallel(**shape), *rda, *direct, whole]


def correction() -> list[Setting]:
    """The bias of the outer momentum, corrected or not, in runs of 20 rounds; where a round goes far, too."""
    short = {"steps": 480}
    pairs = [as_shipped(**short, correction=is_it, seed=seed) for seed in SEEDS for is_it in (True, False)]
    merges = (("direct", 0.7, 0.7), ("rda", 0.7, 0.9), ("direct", 0.7, 0.9))
    far = [
        as_shipped(**short, merge=merge, outer_rate=rate, outer_momentum=mu, correction=is_it)
        for merge, rate, mu in merges
        for is_it in (True, False)
    ]
    return [*pairs, *far]


def lengths() -> list[Setting]:
    """Data parallel with fewer tokens, which token efficiency is read from."""
    one = {"method": "parallel", "learners": 1, **RDA}
    cells = ((480, 8e-3), (480, 16e-3), (960, 8e-3), (240, 8e-3), (1440, 8e-3), (240, 16e-3), (960, 16e-3))
    curve = [_muon(**one, steps=steps, learning_rate=rate) for steps, rate in cells]
    return [*curve[:2], *(_muon(**one, steps=480, seed=seed) for seed in SEEDS[1:]), *curve[2:]]


def shipped() -> list[Setting]:
    """What ships, M = 1 (the outer optimizer alone) to 8, three seeds, and with the momentum's bias corrected; AdamW
    for eight."""
    cells = [(m, seed) for seed in SEEDS for m in (4, 8, 1, 2)]
    found = [as_shipped(learners=m, seed=seed) for m, seed in cells]
    found += [as_shipped(learners=m, seed=seed, correction=True) for m, seed in cells]
    return [*found[:4], _with(batch=64, learning_rate=4e-3, learners=8, outer_rate=0.4, outer_momentum=0.7), *found[4:]]


def worth() -> list[Setting]:
    """Cells of the claims' table, those first of which most is said; short runs before long ones."""
    first = [*correction()[:6], *lengths()[:4], *hostile()[:2], *brief()[:3]]
    tuned = [as_shipped(steps=480, learning_rate=16e-3, learners=m) for m in (4, 8, 1)]
    return [
        *first[:11],
        *tuned[:1],
        *first[11:],
        *averages()[:2],
        *tuned[1:],
        *shipped()[:5],
        *lengths()[4:7],
        *hostile()[2:],
        *correction()[6:],
        *brief()[3:],
        *shipped()[5:],
    ]


def brief() -> list[Setting]:
    """480 steps: H, outer settings and numbers of learners, where turns are few."""
    short = {"steps": 480}
    found = [
        as_shipped(**short, sync_every=12),
        as_shipped(**short, learners=8),
        as_shipped(**short, learners=8, sync_every=12),
    ]
    pairs = ((0.6, 0.5), (0.7, 0.3), (0.5, 0.7))
    found += [as_shipped(**short, outer_rate=r, outer_momentum=mu) for r, mu in pairs]
    found += [as_shipped(**short, sync_every=12, outer_rate=0.3, outer_momentum=0.8)]
    return [*found, as_shipped(**short, fragments=6, sync_every=6, overlap=1)]


def averages() -> list[Setting]:
    """Running averages of the global model, where the rate falls and where it never does."""
    return [
        as_shipped(averages=True, final_share=share, learning_rate=rate, steps=steps)
        for steps in (480, 1920)
        for share, rate in ((1.0, 8e-3), (0.1, 8e-3), (1.0, 4e-3))
    ]


def hostile() -> list[Setting]:
    """One of four that sends noise; what the bound on lengths does to it, and to the honest."""
    short = {"steps": 480}
    noisy = [as_shipped(**short, noise=noise, bounded=is_it) for noise in (100.0, 1.0) for is_it in (True, False)]
    honest: list[dict[str, object]] = [{"speeds": UNEVEN}, {"absent": 0.5}, {"cut": (0.4, 0.6)}]
    return [*noisy, *(as_shipped(**short, **one, bounded=is_it) for one in honest for is_it in (True, False))]


def headline() -> list[Setting]:
    """492,384 parameters in 24 fragments (H = 24), 20 tokens a parameter: some two core hours on a quiet machine."""
    shape = {"width": 96, "depth": 4, "heads": 6, "context": 64, "batch": 32, "steps": 4800, "warmup": 240}
    tuning = [_parallel(**shape, learning_rate=rate) for rate in (2e-3, 4e-3)]
    runs = [_with(**shape, fragments=24, learners=m, seed=seed) for seed in SEEDS for m in (4, 2, 8)]
    return tuning + runs[:3] + [_parallel(**shape, learning_rate=2e-3, seed=seed) for seed in SEEDS[1:]] + runs[3:]


def neighbours() -> list[Setting]:
    """DiLoCo (synchronous, H = 96, 0.7 / 0.9) and Streaming DiLoCo (H = 96, 0.4 / 0.9, blend, tau = 5, E3M0 up)."""
    plain = {"merge": "direct", "sync_every": 96, "outer_momentum": 0.9}
    diloco = _muon(**plain, fragments=1, overlap=0, outer_rate=0.7, up="fp32", down="fp32", adopt="overwrite")
    streaming = _muon(**plain, fragments=4, overlap=5, outer_rate=0.4, up="e3m0", down="fp32", adopt="blend")
    return [_muon(), diloco, streaming, _muon(sync_every=96)]


def learners() -> list[Setting]:
    """Two, four and eight learners that share the same batch."""
    return [_muon(learners=m) for m in (4, 8, 2)]


def rounds() -> list[Setting]:
    """H: steps from one round of a fragment to its next."""
    return [_muon(sync_every=h) for h in (24, 12, 48)]


def codec() -> list[Setting]:
    """The wire: both ways alike, and few bits one way only."""
    both = [_muon(up=name, down=name) for name in ("int4", "fp32", "int4@1.0", "int2", "e3m0", "int8")]
    return [*both, _muon(up="int2"), _muon(down="int2")]


def adopt() -> list[Setting]:
    """How a learner takes a commit, and how long one is under way."""
    rules = [_muon(adopt="overwrite"), _muon(adopt="blend")]
    return [_muon(), rules[0], _muon(overlap=10), rules[1], _muon(overlap=5), _muon(overlap=10, adopt="overwrite")]


def people() -> list[Setting]:
    """Learners of different speeds, with and without waiting for them; absent ones; late ones; other data."""
    waited = [_muon(speeds=UNEVEN, waits=True, seed=seed) for seed in SEEDS]
    speeds = [_muon(speeds=UNEVEN), _muon(speeds=UNEVEN, grace=0.0), _muon(speeds=UNEVEN, quorum=4)]
    rest = [_muon(absent=0.5), _muon(join_at=0.5), _muon(cut=(0.4, 0.6)), _muon(data="parts")]
    return [_muon(), *waited, *speeds[:2], *rest[:1], speeds[2], *rest[1:]]


def others() -> list[Setting]:
    """Momentum restarted every ten rounds, Delayed Nesterov, the embedding by RDA, top-k."""
    topk = _muon(up="topk@0.05", down="topk@0.2")
    return [_muon(restart_every=10), _muon(outer="delayed"), _muon(embedding="rda"), topk]


FEW = ((0.7, 0.3), (0.7, 0.6), (0.4, 0.9), (1.0, 0.3))

SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "inner": inner,
    "outer": outer,
    "seeds": seeds,
    "learners": learners,
    "turns": rounds,
    "merge": merge,
    "codec": codec,
    "adopt": adopt,
    "people": people,
    "others": others,
    "neighbours": neighbours,
    "batches": batches,
    "causes": causes,
    "muon": muon,
    "gain": gain,
    "memory": memory,
    "flat": flat,
    "correction": correction,
    "lengths": lengths,
    "brief": brief,
    "hostile": hostile,
    "averages": averages,
    "shipped": shipped,
    "worth": worth,
    "headline": headline,
    "outer-m": outer_by_learners,
    "outer-h": outer_by_h,
    **questions.SWEEPS,
    "first": lambda: _by_turns(rounds, codec, merge, learners, seeds, people, adopt, outer),
}


def _by_turns(*sweeps: Callable[[], Iterable[Setting]]) -> list[Setting]:
    """The first cell of each, the second of each ..."""
    ranks = itertools.zip_longest(*(sweep() for sweep in sweeps))
    return [cell for rank in ranks for cell in rank if cell is not None]


def cells(names: Iterable[str]) -> list[Setting]:
    """All cells of these sweeps, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(SWEEPS[name]() for name in names)))
