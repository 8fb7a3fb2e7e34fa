"""Sweeps that each answer one question about the outer half; ``sweeps`` has those behind the claims.

Cells are what ships, except for the question: Muon, bounded contributions, bias-corrected momentum in short runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def long_languages() -> list[Setting]:
    """The same in 80 rounds, three seeds: data parallel on the mixture, one language a learner, four on the mixture;
    then other rates, H, outer settings and merges, and the curve of a sample as a run's own held-out set is."""
    own: dict[str, Any] = {"data": "languages"}
    three = [
        *(_parallel(data="mixture", seed=seed) for seed in SEEDS),
        *(as_shipped(**own, seed=seed) for seed in SEEDS),
        *(as_shipped(data="mixture", seed=seed) for seed in SEEDS),
    ]
    ways: list[dict[str, Any]] = [
        {"sync_every": 12},
        {"learning_rate": 5.6e-3},
        {"learning_rate": 16e-3},
        {"outer_rate": 0.3},
    ]
    curve = {"curve": 80, "curve_samples": 1024}
    return [
        *three,
        _parallel(data="mixture", learning_rate=16e-3),
        *(as_shipped(**own, **way) for way in ways),
        as_shipped(**own, **curve),
    ]


def few_bytes() -> list[Setting]:
    """80 rounds: up and down together at most 0.4 bytes a parameter, whether owners make up for what they round off, or
    not; coarser early and finer late."""
    pairs = (("int2", "int4@1.6"), ("int2@1.6", "int4@1.6"), ("int2@1.4", "int2@1.4"), ("int2", "int4@1.75"))
    found = [as_shipped(up="int2", down="int4@1.6", seed=seed) for seed in SEEDS]
    found += [as_shipped(up="int2", down="int4@1.6", owed=1.0, owners="drawn", seed=seed) for seed in SEEDS]
    found += [as_shipped(up=up, down=down, owed=1.0, seed=seed) for up, down in pairs for seed in SEEDS]
    first = (("int2", "int4@1.5"), ("int4@2.0", "int4@1.25"), ("int4@2.5>1.5", "int4@2.0>1.0"))
    return [
        *found,
        *(as_shipped(up=up, down=down) for up, down in first),
        as_shipped(up="int2", down="int4@1.5", owed=1.0),
    ]


def dither() -> list[Setting]:
    """A coarse downlink whose rounding is deterministic, or is not."""
    return [_short(down=down, seed=seed) for seed in SEEDS for down in ("int4@1.5", "dither@1.5", "stochastic@1.5")]


def shards() -> list[Setting]:
    """80 rounds with tensors cut in two or three, and with half as many fragments."""
    return [
        *(as_shipped(max_shard=4096, seed=seed) for seed in SEEDS),
        *(as_shipped(fragments=6, seed=seed) for seed in SEEDS),
    ]


def roundings() -> list[Setting]:
    """The outer momentum in bfloat16, as it ships, in 80 rounds."""
    return [as_shipped(momentum_type="bfloat16", seed=seed) for seed in SEEDS]


def rates() -> list[Setting]:
    """Higher inner rates, for data parallel and for learners, in long and in short runs; and what else is tried in
    short ones."""
    long = [_parallel(learning_rate=16e-3, seed=seed) for seed in SEEDS]
    long += [as_shipped(learning_rate=16e-3)]
    short = [_parallel(steps=480, learning_rate=32e-3, seed=seed) for seed in SEEDS]
    short += [_parallel(steps=480, learning_rate=rate) for rate in (24e-3, 48e-3)]
    short += [_short(learning_rate=24e-3, sync_every=12, seed=seed) for seed in SEEDS]
    short += [_short(learning_rate=24e-3), _short(learning_rate=32e-3, sync_every=12)]
    short += [_short(learning_rate=16e-3, outer_rate=rate) for rate in (0.5, 0.6)]
    base: dict[str, Any] = {"learning_rate": 24e-3, "sync_every": 12}
    ways: list[dict[str, Any]] = [
        {"outer_rate": 0.6, "outer_momentum": 0.5},
        {"merge": "direct", "outer_rate": 0.7},
        {"embedding": "rda"},
        {"up": "fp32", "down": "fp32"},
        {"fragments": 6, "overlap": 1},
        {"fragments": 6, "overlap": 1, "sync_every": 6},
    ]
    halved = {"batch": 128, "steps": 960, "sync_every": 12, "overlap": 1, "warmup": 48}
    return [
        *long,
        *short,
        *(_short(**base | way) for way in ways),
        as_shipped(learners=8, **halved, learning_rate=11e-3),
    ]


LINE: dict[str, Any] = {"decay_share": 0.95, "final_share": 0.0}
"""The inner rate falls in a line from the warm-up on, to nothing."""
OFTEN: dict[str, Any] = {"merge": "direct", "learning_rate": 16e-3, **LINE}
"""The plain mean, with a higher inner rate: what pays where turns are frequent."""
EACH_SIX: dict[str, Any] = {"fragments": 6, "sync_every": 6, "overlap": 1, "outer_rate": 1.0, "outer_momentum": 0.0}


def gap() -> list[Setting]:
    """What the gap of eight learners to data parallel comes from: the decay, what the outer step does in it, merged
    matrices made flatter, how often the plain mean is taken. Data parallel has the same decay, and its best rate."""
    eight: dict[str, Any] = {"learners": 8}
    half: dict[str, Any] = {"outer_rate": 0.7, "outer_momentum": 0.6}
    tried: list[dict[str, Any]] = [
        LINE,
        {**LINE, "momentum_unit": "inner"},
        *({**LINE, "outer_end": end} for end in ((0.8, 0.3), (0.1, 0.7), (0.15, 0.85))),
        *({"spectrum": power} for power in (0.5, 0.0)),
        {"spectrum": 0.5, "outer_rate": 0.5},
        {**EACH_SIX, "outer_rate": 0.113, "outer_momentum": 0.915},
        {**OFTEN, **EACH_SIX},
        {**OFTEN, **EACH_SIX, **half},
        {**OFTEN, **EACH_SIX, "learning_rate": 24e-3},
        {**OFTEN, **half, "fragments": 6, "sync_every": 12},
        {**OFTEN, **half},
    ]
    return [
        *(_parallel(**LINE, learning_rate=rate) for rate in (8e-3, 16e-3, 24e-3)),
        *(as_shipped(**eight, **change) for change in tried),
        *(_parallel(**LINE, learning_rate=16e-3, seed=seed) for seed in SEEDS[1:]),
        *(as_shipped(**OFTEN, **EACH_SIX, learners=m, seed=seed) for seed in SEEDS for m in (8, 4, 2)),
    ]


def often() -> list[Setting]:
    """480 steps with the plain mean, as they ship (H = 6, tau = 2); low rates, tau = 1, H = 12, the line."""
    mean: dict[str, Any] = {**EACH_SIX, "merge": "direct", "learning_rate": 32e-3, "correction": False}
    found = [_short(**mean | {"overlap": 2}, seed=seed) for seed in SEEDS]
    found += [_parallel(steps=480, learning_rate=32e-3, seed=seed) for seed in SEEDS]
    found += [_short(**mean | {"overlap": 2}, learners=m) for m in (8, 1)]
    found += [_short(**mean | {"overlap": 2, "learning_rate": rate}) for rate in (8e-3, 16e-3)]
    found += [_short(**mean), _short(**mean | {"fragments": 12, "sync_every": 12, "overlap": 2})]
    return [*found, _short(**mean, **LINE), _parallel(steps=480, learning_rate=32e-3, **LINE)]


EACH_TWELVE: dict[str, Any] = {"fragments": 6, "sync_every": 12, "outer_rate": 1.0, "outer_momentum": 0.0}


def moments() -> list[Setting]:
    """Eight learners, the mean, the line: inner momentum shared, or turned towards the merged steps, at H = 6, 12, 24;
    the same without; other rates and codecs."""
    base: dict[str, Any] = {**OFTEN, "learners": 8}
    half: dict[str, Any] = {"outer_rate": 0.7, "outer_momentum": 0.6}
    shared = {"shares_moments": True}
    fine = {"up": "fp32", "down": "fp32"}
    coarse = {"up": "int2", "down": "int4@1.6", "owed": 1.0, "owners": "drawn"}
    twelve: dict[str, Any] = {**EACH_TWELVE, **half}
    tried: list[dict[str, Any]] = [
        {**EACH_SIX, **shared},
        {**EACH_TWELVE, **shared},
        EACH_TWELVE,
        {**EACH_SIX, "inner_heading": 0.5},
        {**EACH_SIX, "learning_rate": 24e-3},
        {**EACH_SIX, "learning_rate": 32e-3},
        {**twelve, "learning_rate": 24e-3},
        {**EACH_SIX, "learning_rate": 24e-3, "overlap": 2},
        {**twelve, **shared, "learning_rate": 24e-3},
        {**twelve, "learning_rate": 24e-3, "outer_rate": 0.8, "outer_momentum": 0.4},
        {**EACH_SIX, **shared, "learning_rate": 24e-3},
        {**EACH_SIX, **coarse, "learning_rate": 24e-3},
        {**twelve, **coarse, "learning_rate": 24e-3},
        {**EACH_SIX, "learning_rate": 24e-3, **fine},
        {**half, "learning_rate": 24e-3},
        {**half, **shared, "learning_rate": 24e-3},
    ]
    return [as_shipped(**base | change) for change in tried]


ANY_LENGTH: dict[str, Any] = {**OFTEN, **EACH_SIX, "overlap": 2}
"""The mean every six steps, of which an exchange may take two: what ships from 4 to 8 million parameters."""


EVERY_THREE: dict[str, Any] = {**ANY_LENGTH, "agreement": True, "fragments": 3, "sync_every": 3}
"""The mean every three steps, with the robust merge: what ships for smaller models."""


def decision() -> list[Setting]:
    """What should ship for runs of all lengths."""
    rda: dict[str, Any] = {**LINE, "learning_rate": 8e-3}
    twelve = {**OFTEN, **EACH_TWELVE, "outer_rate": 0.7, "outer_momentum": 0.6}
    short = {**ANY_LENGTH, "learning_rate": 32e-3, "steps": 480}
    return [
        as_shipped(**ANY_LENGTH, learners=4),
        as_shipped(**ANY_LENGTH, learners=8),
        as_shipped(**rda, learners=4),
        as_shipped(**twelve, learners=4),
        _parallel(**LINE, learning_rate=16e-3, seed=3),
        as_shipped(**short, learners=4),
        as_shipped(**short, learners=8),
        as_shipped(**ANY_LENGTH | {"learning_rate": 24e-3}, learners=4),
        as_shipped(**ANY_LENGTH, learners=2),
        *(as_shipped(**short, learners=4, seed=seed) for seed in SEEDS[1:]),
    ]


def low() -> list[Setting]:
    """The same at inner rates that are lower than the best."""
    found = [as_shipped(**ANY_LENGTH | {"learning_rate": 8e-3}, learners=m) for m in (4, 8)]
    found += [
        as_shipped(**ANY_LENGTH | {"learning_rate": 4e-3}, learners=4),
        as_shipped(**LINE | {"learning_rate": 4e-3}),
    ]
    return found


TWELVE: dict[str, Any] = {**OFTEN, **EACH_TWELVE, "outer_rate": 0.7, "outer_momentum": 0.6}


def twelve() -> list[Setting]:
    """The mean every twelve steps: outer settings, inner rates, numbers of learners."""
    ways: list[dict[str, Any]] = [
        {"learners": 1},
        {"learners": 2},
        {"learners": 8, "outer_rate": 0.5, "outer_momentum": 0.7},
        {"learners": 8, "learning_rate": 11e-3},
        {"learners": 4, "learning_rate": 8e-3},
        {"learners": 8, "learning_rate": 8e-3},
        {"learners": 8, "fragments": 12},
        {"learners": 8, "outer_rate": 0.6, "outer_momentum": 0.6},
        {"learners": 8, "overlap": 1},
        {"learners": 8, "merge": "rda", "outer_rate": 0.4, "outer_momentum": 0.7, "learning_rate": 8e-3},
    ]
    return [as_shipped(**TWELVE | way) for way in ways]


FEW_BYTES: dict[str, Any] = {"up": "int2", "down": "int4@1.6", "owed": 1.0, "owners": "drawn"}


def everywhere() -> list[Setting]:
    """The mean every six steps in all lengths: two, four and eight learners, each rate, three seeds; an overlap of one
    step."""
    near: dict[str, Any] = {**OFTEN, **EACH_SIX}
    cells = [(ANY_LENGTH, m, rate) for m, rate in ((8, 16e-3), (4, 16e-3), (4, 24e-3), (2, 16e-3))]
    cells += [(near, m, rate) for m, rate in ((8, 24e-3), (4, 16e-3), (2, 16e-3), (8, 16e-3))]
    ways = [({**way, "learning_rate": rate, "learners": m}, seed) for way, m, rate in cells for seed in SEEDS]
    return [as_shipped(**way, seed=seed) for way, seed in ways]


def beside() -> list[Setting]:
    """The same with languages and few bytes; data parallel of several lengths and on all languages."""
    own: dict[str, Any] = {**ANY_LENGTH, "data": "languages"}
    lengths = ((960, 16e-3), (1440, 16e-3), (960, 24e-3), (1440, 24e-3))
    return [
        as_shipped(**own),
        _parallel(**LINE, data="mixture", learning_rate=16e-3),
        *(_parallel(**LINE, steps=steps, learning_rate=rate) for steps, rate in lengths[:2]),
        *(_parallel(**LINE, steps=480, learning_rate=32e-3, seed=seed) for seed in SEEDS[1:]),
        *(as_shipped(**ANY_LENGTH, **FEW_BYTES, seed=seed) for seed in SEEDS),
        as_shipped(**own | {"learning_rate": 8e-3}),
        *(_parallel(**LINE, data="mixture", learning_rate=16e-3, seed=seed) for seed in SEEDS[1:]),
        *(as_shipped(**own, seed=seed) for seed in SEEDS[1:]),
        *(_parallel(**LINE, steps=steps, learning_rate=rate) for steps, rate in lengths[2:]),
        *(as_shipped(**ANY_LENGTH, data="mixture", seed=seed) for seed in SEEDS),
        as_shipped(**ANY_LENGTH, learners=1),
    ]


LARGER: dict[str, Any] = {"width": 96, "depth": 4, "heads": 6, "context": 64, "batch": 32, "steps": 960, "warmup": 48}
"""492,384 parameters."""


def large() -> list[Setting]:
    """492,384 parameters, 960 steps: data parallel's rate, then the mean every six steps and RDA every 24."""
    shape = LARGER
    near: dict[str, Any] = {**OFTEN, **EACH_SIX, **shape}
    return [
        *(_parallel(**LINE, **shape, learning_rate=rate) for rate in (8e-3, 16e-3)),
        as_shipped(**near | {"learning_rate": 8e-3, "overlap": 2}, learners=8),
        as_shipped(**LINE, **shape, learning_rate=8e-3, learners=8),
        as_shipped(**near | {"learning_rate": 16e-3, "overlap": 2}, learners=8),
        as_shipped(**near | {"learning_rate": 8e-3, "overlap": 2}, learners=4),
        as_shipped(**LINE, **shape, learning_rate=8e-3, learners=4),
        _parallel(**LINE, **shape, learning_rate=4e-3),
    ]


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


def others() -> list[Setting]:
    """Four learners by DiLoCo and Streaming DiLoCo (H = 96) with the line, each over the same small grid of inner rates
    and outer settings."""
    plain: dict[str, Any] = {**LINE, "merge": "direct", "sync_every": 96, "bounded": False, "correction": False}
    diloco = {**plain, "fragments": 1, "overlap": 0, "up": "fp32", "down": "fp32", "adopt": "overwrite"}
    streaming = {**plain, "fragments": 4, "overlap": 5, "up": "e3m0", "down": "fp32", "adopt": "blend"}
    grid = ((8e-3, 0.7, 0.6), (8e-3, 0.7, 0.9), (16e-3, 0.7, 0.6), (8e-3, 0.4, 0.9))
    ways = [(way, *point) for point in grid for way in (diloco, streaming)]
    return [as_shipped(**way, learning_rate=lr, outer_rate=r, outer_momentum=mu) for way, lr, r, mu in ways]


def stays() -> list[Setting]:
    """What an owner makes up for, where the same one makes two, four or eight of a shard's steps in a row."""
    coarse: dict[str, Any] = {"up": "int2", "down": "int4@1.6", "owed": 1.0}
    return [as_shipped(**coarse, owners=f"drawn@{spell}", seed=seed) for spell in (4, 2, 8) for seed in SEEDS]


def worth() -> list[Setting]:
    """The first cells of each question, by what they decide."""
    return [
        *languages()[:6],
        *dither()[:6],
        *languages()[6:9],
        *scope()[:8],
        *any_time()[:3],
        *languages()[9:],
    ]


SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "any-time": any_time,
    "scope": scope,
    "languages": languages,
    "long-languages": long_languages,
    "few-bytes": few_bytes,
    "shards": shards,
    "roundings": roundings,
    "rates": rates,
    "dither": dither,
    "gap": gap,
    "often": often,
    "stays": stays,
    "moments": moments,
    "decision": decision,
    "low": low,
    "others-line": others,
    "large": large,
    "scripts": scripts,
    "everywhere": everywhere,
    "beside": beside,
    "twelve": twelve,
    "corrections": corrections,
    "shorter": shorter,
    "open": worth,
}
