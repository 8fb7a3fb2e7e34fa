"""Sweeps that each answer one question about the outer half; ``sweeps`` has those behind the claims.

Cells are what ships, except for the question: Muon, bounded contributions, bias-corrected momentum in short runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.quality.bases import SEEDS, as_shipped
from benchmarks.quality.settings import Setting


def _parallel(**changes: Any) -> Setting:
    one = {"method": "parallel", "learners": 1, "bounded": False, "correction": False}
    return as_shipped(**one | changes)


def few_bytes() -> list[Setting]:
    """80 rounds: up and down together at most 0.4 bytes a parameter, whether owners make up for what they round off, or
    not."""
    pairs = (("int2", "int4@1.6"), ("int2@1.6", "int4@1.6"), ("int2@1.4", "int2@1.4"), ("int2", "int4@1.75"))
    found = [as_shipped(up="int2", down="int4@1.6", seed=seed) for seed in SEEDS]
    found += [as_shipped(up="int2", down="int4@1.6", owed=1.0, owners="drawn", seed=seed) for seed in SEEDS]
    found += [as_shipped(up=up, down=down, owed=1.0, seed=seed) for up, down in pairs for seed in SEEDS]
    first = (("int2", "int4@1.5"), ("int4@2.0", "int4@1.25"))
    return [
        *found,
        *(as_shipped(up=up, down=down) for up, down in first),
        as_shipped(up="int2", down="int4@1.5", owed=1.0),
    ]


LINE: dict[str, Any] = {"decay_share": 0.95, "final_share": 0.0}
"""The inner rate falls in a line from the warm-up on, to nothing."""
OFTEN: dict[str, Any] = {"merge": "direct", "learning_rate": 16e-3, **LINE}
"""The plain mean, with a higher inner rate: what pays where turns are frequent."""
EACH_SIX: dict[str, Any] = {"fragments": 6, "sync_every": 6, "overlap": 1, "outer_rate": 1.0, "outer_momentum": 0.0}

EACH_TWELVE: dict[str, Any] = {"fragments": 6, "sync_every": 12, "outer_rate": 1.0, "outer_momentum": 0.0}
ANY_LENGTH: dict[str, Any] = {**OFTEN, **EACH_SIX, "overlap": 2}
"""The mean every six steps, of which an exchange may take two: what ships from 4 to 8 million parameters."""
EVERY_THREE: dict[str, Any] = {**ANY_LENGTH, "agreement": True, "fragments": 3, "sync_every": 3}
"""The mean every three steps, with the robust merge: what ships for smaller models."""
TWELVE: dict[str, Any] = {**OFTEN, **EACH_TWELVE, "outer_rate": 0.7, "outer_momentum": 0.6}
FEW_BYTES: dict[str, Any] = {"up": "int2", "down": "int4@1.6", "owed": 1.0, "owners": "drawn"}


def scripts() -> list[Setting]:
    """Scripts bring AdamW, here with a rate that falls in a line: data parallel, the mean every three and every six
    steps, and RDA every 24, each at three rates."""
    rates, near = (4e-3, 8e-3, 16e-3), {**ANY_LENGTH, "agreement": True}
    return [
        *(_parallel(**LINE, inner="adamw", learning_rate=rate) for rate in rates),
        *(as_shipped(**EVERY_THREE | {"inner": "adamw", "learning_rate": r}, learners=4) for r in (2e-3, *rates[:2])),
        *(as_shipped(**near | {"inner": "adamw", "learning_rate": r}, learners=m) for m in (4, 8) for r in rates),
        *(as_shipped(**LINE, inner="adamw", learning_rate=r, agreement=True, learners=4) for r in rates),
    ]


GOSSIP = {"method": "gossip", "feedback": False, "up": "fp32", "down": "fp32", "bounded": False, "agreement": False}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "as shipped": {},
    "Muon's momentum is sent, too": {"sends_momentum": True},
    "the same every 12 steps": {"sends_momentum": True, "sync_every": 12},
    "singular values all alike (IsoLoCo)": {"spectrum": 0.0},
    "singular values to the power 0.5": {"spectrum": 0.5},
    "primal averaging, 0.5": {"outer": "primal", "outer_momentum": 0.5},
    "primal averaging, 0.8": {"outer": "primal", "outer_momentum": 0.8},
    "long contributions weigh less (EDiT)": {"penalty": True},
    "gossip": GOSSIP,
    "gossip every 3 steps": {**GOSSIP, "sync_every": 3, "fragments": 3},
}
"""Changes to the mean every six steps."""
TURNED = {"heading": "heloco@0.3"}


def corrections(learners: Sequence[int] = (8, 16)) -> list[Setting]:
    """The strongest corrections known from papers, in full length, each at two rates: changes to the mean every six
    steps, and contributions turned towards the outer momentum, which only RDA every 24 has."""
    often, seldom = {**ANY_LENGTH, "agreement": True}, {**LINE, "agreement": True}
    ways = [({**often, **way}, (16e-3, 24e-3)) for way in CORRECTIONS.values()]
    ways += [({**seldom, **way}, (8e-3, 16e-3)) for way in ({}, TURNED)]
    return [
        as_shipped(**way | {"learning_rate": rate}, learners=m)
        for m in learners
        for way, rates in ways
        for rate in rates
    ]


def shorter(learners: Sequence[int] = (8, 4)) -> list[Setting]:
    """The mean more often than every six steps, each at two rates: every three, in as many bits and in half of them,
    and every two."""
    ways = (
        EVERY_THREE,
        {**EVERY_THREE, "overlap": 1},
        {**EVERY_THREE, "up": "int2", "down": "int4@1.6"},
        {**EVERY_THREE, "fragments": 2, "sync_every": 2, "overlap": 1},
    )
    return [
        as_shipped(**way | {"learning_rate": rate}, learners=m)
        for m in learners
        for way in ways
        for rate in (16e-3, 24e-3)
    ]


def defaults() -> list[Setting]:
    """Return the settings that ship, and those that they were chosen among: how often the plain mean is
    taken, how long an exchange is under way, and RDA; data parallel at several rates and lengths, which token
    efficiency is read from."""
    near: dict[str, Any] = {**OFTEN, **EACH_SIX}
    half: dict[str, Any] = {"outer_rate": 0.7, "outer_momentum": 0.6}
    lengths = ((960, 16e-3), (1440, 16e-3), (960, 24e-3), (1440, 24e-3))
    means = [(ANY_LENGTH, m) for m in (8, 4, 2)] + [(near, m) for m in (8, 4, 2)]
    means += [(TWELVE, m) for m in (8, 4, 2)] + [({**OFTEN, **EACH_TWELVE}, 8), ({**OFTEN, **half}, 8)]
    higher = [(ANY_LENGTH, 8), (ANY_LENGTH, 4), (near, 8), (TWELVE, 8), ({**OFTEN, **half}, 8)]
    return [
        *(_parallel(**LINE, learning_rate=rate) for rate in (8e-3, 16e-3, 24e-3)),
        *(_parallel(**LINE, learning_rate=16e-3, seed=seed) for seed in SEEDS[1:]),
        *(_parallel(**LINE, steps=steps, learning_rate=rate) for steps, rate in lengths),
        *(as_shipped(**LINE, learners=m) for m in (8, 4)),
        *(as_shipped(**way, learners=m) for way, m in means),
        *(as_shipped(**way | {"learning_rate": 24e-3}, learners=m) for way, m in higher),
        *(as_shipped(**way, learners=m, seed=seed) for way, m in means[:6] for seed in SEEDS[1:]),
    ]


NODE_KEEPS: dict[str, Any] = {"feedback": False, "kept": 0.95}
PLAIN: dict[str, Any] = {"merge": "direct", "outer_rate": 1.0, "outer_momentum": 0.0}


def few_fragments() -> list[Setting]:
    """Fewer fragments: the whole model at once, every 3, 6 and 24 steps."""
    six, rda = {**ANY_LENGTH, "agreement": True}, {**LINE, "agreement": True}
    numbers = ((EVERY_THREE, (3, 1)), (six, (6, 2, 1)), (rda, (12, 4, 1)))
    cells = [{**base, "fragments": p, "learners": 8} for base, several in numbers for p in several]
    return [as_shipped(**cell, seed=seed) for seed in SEEDS for cell in cells]


def sparse() -> list[Setting]:
    """The largest values only, beside int4 and int2, every 24 steps: what is not sent stays with the learner, or with
    its node (also as published, with the plain mean). Sparse both ways every three steps: fewer bytes a step than int4
    every 24."""
    both = {"up": "top@0.03", "down": "top@0.12"}
    ways: list[dict[str, Any]] = [
        {},
        {"up": "int2"},
        {"up": "top@0.03"},
        {"up": "top@0.01"},
        {"up": "top@0.03", **NODE_KEEPS},
        {"up": "top@0.03", **NODE_KEEPS, **PLAIN},
        {**EVERY_THREE, **both, **NODE_KEEPS},
        {**EVERY_THREE, **both},
        {"up": "top@0.01", **NODE_KEEPS},
        {"up": "top@0.1", **NODE_KEEPS},
        {"up": "top@0.1"},
    ]
    return [as_shipped(**LINE | {"agreement": True, "learners": 4} | way, seed=seed) for seed in SEEDS for way in ways]


TOGETHER: dict[str, Any] = {
    "fragments": 1,
    "sync_every": 1,
    "overlap": 0,
    "up": "fp32",
    "down": "fp32",
    "merge": "direct",
    "outer_rate": 1.0,
    "outer_momentum": 0.0,
    "bounded": False,
}
"""The mean of the weights after every step, at once, without a codec: learners never differ when a step begins."""
CAUSES: dict[str, dict[str, Any]] = {
    "as shipped": EVERY_THREE,
    "no codec, no robust merge": {
        **EVERY_THREE,
        **{k: TOGETHER[k] for k in ("up", "down", "bounded")},
        "agreement": False,
    },
    "and at once": {**TOGETHER, "fragments": 3, "sync_every": 3},
    "every step, at once": TOGETHER,
    "every step, one step late": {**TOGETHER, "overlap": 1},
    "every step, two steps late": {**TOGETHER, "overlap": 2},
    "every step, gradients of matrices shared": {**TOGETHER, "pools": "matrices"},
    "every step, gradients of other parameters shared": {**TOGETHER, "pools": "rest"},
    "every step, momentum shared": {**TOGETHER, "pools": "momentum"},
    "every step, second moments shared": {**TOGETHER, "pools": "moments"},
    "two steps late, momentum shared": {
        **EVERY_THREE,
        **{k: TOGETHER[k] for k in ("up", "down", "bounded")},
        "agreement": False,
        "pools": "momentum",
    },
}
"""Steps from what ships towards data parallel."""
BY_WINDOW = {64: 32, 128: 16}
"""Batches of as many tokens, by window."""


FEWER_CAUSES = (
    "as shipped",
    "every step, at once",
    "and at once",
    "every step, two steps late",
    "every step, momentum shared",
    "every step, second moments shared",
)


def causes() -> list[Setting]:
    """Causes of the gap, in 500 steps: eight learners with Muon, with windows of 64 and 128 bytes, and four with
    AdamW. What ships and the mean after every step have two or three learning rates, all else has the first of them."""
    found = []
    for context, inner, m, warmup, rates, ways in (
        (64, "muon", 8, 25, (0.0346, 0.0202), tuple(CAUSES)),
        (64, "adamw", 4, 150, (8e-3, 4e-3, 16e-3), FEWER_CAUSES),
        (128, "muon", 8, 25, (0.0346, 0.0202), FEWER_CAUSES[:-1]),
    ):
        shape = {
            **LINE,
            "context": context,
            "batch": BY_WINDOW[context],
            "steps": 500,
            "warmup": warmup,
            "inner": inner,
        }
        found += [_parallel(**shape, learning_rate=rate) for rate in rates]
        again = (*tuple(CAUSES)[:4], tuple(CAUSES)[-1]) if ways == tuple(CAUSES) else FEWER_CAUSES[:2]
        for rate in rates:
            some = ways if rate == rates[0] else again
            found += [as_shipped(**shape | CAUSES[way] | {"learning_rate": rate}, learners=m) for way in some]
    return found


CURES: dict[str, dict[str, Any]] = {
    "predicts": {"predicts": 1.0},
    "predicts half": {"predicts": 0.5},
    "Muon's momentum 0.9": {"inner_momentum": 0.9},
    "Muon's momentum 0.98": {"inner_momentum": 0.98},
    "outer momentum": {"outer_rate": 0.7, "outer_momentum": 0.6, "learning_rate": 0.0202},
    "outer rate 1.5": {"outer_rate": 1.5, "learning_rate": 0.0202},
    "outer rate 2": {"outer_rate": 2.0, "learning_rate": 0.0202},
    "three times the warm-up": {"warmup": 75},
    "one learner trains alone for 50 steps": {"alone_until": 50},
    "one learner trains alone for 100 steps": {"alone_until": 100},
    "the first tenth is data parallel": {"pools": "gradients", "pools_until": 0.1},
}
"""Changes to the mean every three steps."""


FULL: dict[str, dict[str, Any]] = {
    "every step, at once": {**TOGETHER, "agreement": False},
    "the same at a higher rate": {**TOGETHER, "agreement": False, "learning_rate": 24e-3},
    "exchange within the step": {"overlap": 0},
    "the first tenth is data parallel": {"pools": "gradients", "pools_until": 0.1},
    "half the batch, twice the steps, every six": {"batch": 32, "steps": 3840, "warmup": 192, **EACH_SIX, "overlap": 2},
    "the same, exchanges as long in time": {"batch": 32, "steps": 3840, "warmup": 192, **EACH_SIX, "overlap": 3},
}
"""Changes to the mean every three steps, in full length; the first one is what is left without age and codec."""


def cures() -> list[Setting]:
    """Cures that cost no bytes, in short runs of eight learners; what is left of them in full length."""
    shape = {**LINE, "context": 64, "batch": BY_WINDOW[64], "steps": 500, "warmup": 25, "learning_rate": 0.0346}
    short = [as_shipped(**EVERY_THREE | shape | way, learners=8) for way in CURES.values()]
    full = [as_shipped(**EVERY_THREE | {"learning_rate": 16e-3, "learners": 8} | way) for way in FULL.values()]
    return [*short, *full, _parallel(**LINE, batch=32, steps=3840, warmup=192, learning_rate=16e-3)]


MORE_CURES: dict[str, dict[str, Any]] = {
    "exchange within one step": {"overlap": 1},
    "every two steps, within one step": {"fragments": 2, "sync_every": 2, "overlap": 1},
    "outer momentum": {"outer_rate": 0.7, "outer_momentum": 0.6},
    "outer rate 1.5": {"outer_rate": 1.5},
    "three times the warm-up": {"warmup": 75},
    "one learner trains alone for 50 steps": {"alone_until": 50},
}
"""Changes to the mean every three steps where it loses most: with AdamW, and with windows of 128."""


def more_cures() -> list[Setting]:
    """Cures in short runs of four learners with AdamW, and of eight with Muon and windows of 128: ``MORE_CURES``, half
    the batch in twice the steps, and a beta1 of 0.95; faster embeddings, head and norms with Muon, and data parallel
    with these."""
    found = []
    for context, inner, m, rate in ((128, "muon", 8, 0.0202), (64, "adamw", 4, 4e-3)):
        shape = {**LINE, "context": context, "batch": BY_WINDOW[context], "steps": 500, "warmup": 25, "inner": inner}
        cell = EVERY_THREE | shape | {"learning_rate": rate, "learners": m}
        found += [as_shipped(**cell | way) for way in MORE_CURES.values()]
        half = {"batch": BY_WINDOW[context] // 2, "steps": 1000, "warmup": 50}
        found.append(as_shipped(**cell | half | {**EACH_SIX, "overlap": 2}))
        found.append(_parallel(**shape | half | {"learning_rate": rate}))
        if inner == "adamw":
            found.append(as_shipped(**cell | {"inner_momentum": 0.95}))
    for context, rate in ((64, 0.0346), (128, 0.0202)):
        shape = {**LINE, "context": context, "batch": BY_WINDOW[context], "steps": 500, "warmup": 25}
        for faster in (2.0, 4.0, 0.5):
            cell = shape | {"learning_rate": rate, "rest_rate": faster}
            found += [as_shipped(**EVERY_THREE | cell, learners=8), _parallel(**cell)]
    return found


def long_windows() -> list[Setting]:
    """Windows of 128 in full length: eight learners as shipped, and with quicker exchanges, each at three rates; data
    parallel, with shorter runs of it from which token efficiency is read."""
    faster = {"overlap": 1}
    ways: list[dict[str, Any]] = [{}, faster, {**faster, "fragments": 2, "sync_every": 2}]
    windows = {**LINE, "context": 128, "batch": BY_WINDOW[128]}
    lengths = [(steps, rate) for rate in (24e-3, 16e-3, 32e-3) for steps in (1920, 1440, 960)] + [(1920, 8e-3)]
    found = [_parallel(**windows, steps=steps, learning_rate=rate) for steps, rate in lengths]
    for rate in (16e-3, 24e-3, 11e-3):
        found += [as_shipped(**EVERY_THREE | windows | way | {"learning_rate": rate}, learners=8) for way in ways]
    return found


def gentle_starts() -> list[Setting]:
    """Gentler starts: a longer warm-up, also of data parallel, and one learner that trains alone at first; AdamW in
    full length and in short runs, and Muon."""
    adamw: dict[str, Any] = {**LINE, "inner": "adamw"}
    short = adamw | {"context": 64, "batch": BY_WINDOW[64], "steps": 500}
    four: dict[str, Any] = {**EVERY_THREE, "inner": "adamw", "learners": 4}
    pairs = ((8e-3, 576), (8e-3, 288), (12e-3, 576), (8e-3, 960), (5.6e-3, 288), (4e-3, 288))
    found = [as_shipped(**four | {"learning_rate": rate, "warmup": warmup}) for rate, warmup in pairs]
    found += [
        as_shipped(**four | {"learning_rate": rate, "alone_until": alone, "warmup": warmup})
        for rate, alone, warmup in ((8e-3, 96, 576), (8e-3, 96, 96), (8e-3, 192, 96), (16e-3, 96, 96), (16e-3, 192, 96))
    ]
    found += [_parallel(**adamw, learning_rate=rate, warmup=warmup) for rate, warmup in ((8e-3, 288), (12e-3, 576))]
    for rate, warmup in ((16e-3, 288), (24e-3, 288), (24e-3, 576)):
        found += [as_shipped(**EVERY_THREE | {"learning_rate": rate, "learners": 8, "warmup": warmup})]
    for warmup, alone in ((75, 50), (150, 50), (75, 0), (150, 0)):
        way = four | short | {"warmup": warmup, "learning_rate": 8e-3, "alone_until": alone}
        found += [as_shipped(**way)] if alone else [as_shipped(**way), as_shipped(**way | {"learning_rate": 4e-3})]
        found += [_parallel(**short, warmup=warmup, learning_rate=rate) for rate in (8e-3, 16e-3, 4e-3)]
    return found


LONG_WARMUP: dict[str, Any] = {**LINE, "inner": "adamw", "learning_rate": 8e-3, "warmup": 576}


def long_warmups() -> list[Setting]:
    """AdamW's long warm-up with three seeds, beside the short one that shipped before and data parallel; also with the
    mean every six and twelve steps, RDA every 24, and eight learners."""
    before: dict[str, Any] = {**EVERY_THREE, "inner": "adamw", "learning_rate": 4e-3}
    found = []
    for seed in (2, 3, 1):
        found += [
            as_shipped(**EVERY_THREE | LONG_WARMUP, seed=seed, learners=4),
            _parallel(**LINE, inner="adamw", learning_rate=8e-3, seed=seed),
            as_shipped(**before, seed=seed, learners=4),
            as_shipped(**EVERY_THREE | LONG_WARMUP, seed=seed, learners=4, alone_until=96),
        ]
    for rate in (8e-3, 5.6e-3, 4e-3):
        way = LONG_WARMUP | {"learning_rate": rate, "agreement": True, "learners": 4}
        found += [as_shipped(**ANY_LENGTH | way), as_shipped(**ANY_LENGTH | way | EACH_TWELVE), as_shipped(**way)]
    found += [as_shipped(**ANY_LENGTH | LONG_WARMUP, agreement=True, learners=8)]
    return [*found, as_shipped(**EVERY_THREE | LONG_WARMUP, learners=8), as_shipped(**before, learners=8)]


SMALLER: dict[str, Any] = {"width": 24, "heads": 2}


def apart() -> list[Setting]:
    """What the law needs to tell learners, steps and windows apart: four and sixteen learners at equal steps, longer
    windows. The last two were predicted before they were run."""
    found = []
    for context, steps, ms, rates, model in (
        (64, 500, (4, 16), (0.0202, 0.0346), {}),
        (128, 500, (8, 4), (0.0346, 0.0202), {}),
        (64, 2000, (4, 16), (0.0286, 0.049), SMALLER),
    ):
        shape = {**model, "context": context, "batch": BY_WINDOW[context], "steps": steps, "warmup": steps // 20}
        cell = {**ANY_LENGTH, "agreement": True} | shape
        found += [as_shipped(**cell | {"learning_rate": rate}, learners=m) for m in ms for rate in rates]
    held_back = {**EVERY_THREE, "context": 64, "batch": BY_WINDOW[64], "steps": 1000, "warmup": 50, "learners": 4}
    return [*found, *(as_shipped(**held_back | {"learning_rate": rate}) for rate in (0.0202, 0.0346))]


SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "defaults": defaults,
    "few-bytes": few_bytes,
    "scripts": scripts,
    "shorter": shorter,
    "corrections": corrections,
    "sparse": sparse,
    "few-fragments": few_fragments,
    "causes": causes,
    "cures": cures,
    "more-cures": more_cures,
    "long-windows": long_windows,
    "gentle-starts": gentle_starts,
    "long-warmups": long_warmups,
    "apart": apart,
}
