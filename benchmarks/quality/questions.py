"""Sweeps that each answer one question about the outer half; ``sweeps`` has those of what is claimed.

Rules of this file:
1. Cells are what ships, but for what is asked: Muon, contributions bounded, momentum's bias corrected in short runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.quality.bases import SEEDS, as_shipped
from benchmarks.quality.settings import Setting


def _short(**changes: Any) -> Setting:
    return as_shipped(steps=480, **changes)


def _parallel(**changes: Any) -> Setting:
    one = {"method": "parallel", "learners": 1, "bounded": False, "correction": False}
    return as_shipped(**one | changes)


def any_time() -> list[Setting]:
    """Averages on the way of a run whose rate never falls, and runs that end there, where it falls at the end."""
    stable = {"final_share": 1.0, "averages": True, "correction": False}
    decayed = [as_shipped(steps=steps, decay_share=0.2, correction=False) for steps in (480, 960, 1440, 1920)]
    long = as_shipped(steps=1920, curve=2, **stable)
    return [as_shipped(steps=960, curve=2, **stable), *decayed[:2], long, decayed[3], decayed[2]]


def scope() -> list[Setting]:
    """What RDA keeps the length of: shards of several sizes, each tensor."""
    ways: list[dict[str, Any]] = [{}, {"scope": "tensor"}, {"max_shard": 1024}]
    found = [_short(**way, seed=seed) for seed in SEEDS for way in ways]
    return [
        *found,
        *(_short(fragments=6, seed=seed) for seed in SEEDS),
        *(_short(largest=1.5, seed=seed) for seed in SEEDS),
    ]


def languages() -> list[Setting]:
    """One language a learner: merge rules, outer settings, H, and corrections of direction."""
    base = [
        _parallel(steps=480, data="mixture", learning_rate=16e-3),
        _short(data="mixture", learning_rate=16e-3),
        _short(data="mixture"),
    ]
    direct = {"merge": "direct", "correction": False}
    often = {"fragments": 6, "sync_every": 6, "overlap": 1}
    ways: list[dict[str, Any]] = [
        {},
        {**direct, "outer_rate": 0.7, "outer_momentum": 0.7},
        {"heading": "heloco@0.3"},
        {"learning_rate": 16e-3},
        {**often},
        {"heading": "agree@0.5"},
        {"heading": "surgery"},
        {**direct, "outer_rate": 1.0, "outer_momentum": 0.0, **often},
        {"sync_every": 12},
        {"inner": "adamw", "learning_rate": 4e-3},
    ]
    return base + [_short(data="languages", **way) for way in ways]


def few_bytes() -> list[Setting]:
    """Between two bits and four, up and down together at most 0.4 bytes a parameter."""
    pairs = (
        ("int4", "int4"),
        ("int4@2.0", "int4@1.25"),
        ("int2@1.6", "int4@1.5"),
        ("int2@1.6", "int2"),
        ("int4@2.5", "int4@1.25"),
    )
    return [_short(up=up, down=down, seed=seed) for seed in SEEDS for up, down in pairs]


def dither() -> list[Setting]:
    """A coarse downlink whose rounding is deterministic, or is not."""
    return [_short(down=down, seed=seed) for seed in SEEDS for down in ("int4@1.5", "dither@1.5", "stochastic@1.5")]


def worth() -> list[Setting]:
    """The first cells of each question, by what they decide."""
    return [
        *languages()[:6],
        *dither()[:6],
        *languages()[6:9],
        *scope()[:8],
        *any_time()[:3],
        *languages()[9:],
        *few_bytes()[:4],
    ]


SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "any-time": any_time,
    "scope": scope,
    "languages": languages,
    "few-bytes": few_bytes,
    "dither": dither,
    "open": worth,
}
