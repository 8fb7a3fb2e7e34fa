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


SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "defaults": defaults,
    "few-bytes": few_bytes,
    "scripts": scripts,
    "shorter": shorter,
    "corrections": corrections,
    "sparse": sparse,
    "few-fragments": few_fragments,
}
