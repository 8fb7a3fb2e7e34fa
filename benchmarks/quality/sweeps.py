"""Which cells are run, by name, in the order of their worth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from benchmarks.quality.settings import Setting

SEEDS = (1, 2, 3)
BASE = Setting()


def _with(**changes: object) -> Setting:
    return msgspec.structs.replace(BASE, **changes)


def _parallel(**changes: object) -> Setting:
    return _with(method="parallel", learners=1, **changes)


def inner() -> list[Setting]:
    """The inner learning rate of data parallel and of four learners; one learner alone with its quarter of a batch."""
    rates = (2e-3, 4e-3, 8e-3, 1e-3)
    alone = _parallel(batch=BASE.batch // 4)
    return [_parallel(learning_rate=rate) for rate in rates] + [alone] + [_with(learning_rate=r) for r in rates[:3]]


def outer() -> list[Setting]:
    """Outer learning rate and momentum, four learners at H = 24."""
    pairs = ((0.7, 0.6), (0.7, 0.3), (0.4, 0.9), (1.0, 0.3), (0.7, 0.9), (1.0, 0.6), (0.4, 0.8), (1.0, 0.0))
    return [_with(outer_rate=rate, outer_momentum=momentum) for rate, momentum in pairs]


def outer_by_learners() -> list[Setting]:
    """The same for two and eight learners."""
    return [_with(learners=m, outer_rate=r, outer_momentum=mu) for m in (8, 2) for r, mu in FEW]


def outer_by_h() -> list[Setting]:
    """The same for shorter and longer turns."""
    return [_with(sync_every=h, outer_rate=r, outer_momentum=mu) for h in (48, 12) for r, mu in FEW]


FEW = ((0.7, 0.3), (0.7, 0.6), (0.4, 0.9), (1.0, 0.3))

SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {
    "inner": inner,
    "outer": outer,
    "outer-m": outer_by_learners,
    "outer-h": outer_by_h,
}


def cells(names: Iterable[str]) -> list[Setting]:
    """All cells of these sweeps, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(SWEEPS[name]() for name in names)))
