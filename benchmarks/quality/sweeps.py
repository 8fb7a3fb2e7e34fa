"""Which cells are run, by name, in the order of their worth."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import msgspec

from benchmarks.quality.settings import Setting

SEEDS = (1, 2, 3)
BASE = Setting()


def _with(base: Setting = BASE, **changes: object) -> Setting:
    return msgspec.structs.replace(base, **changes)


def inner() -> list[Setting]:
    """The inner learning rate: of data parallel, and of four learners."""
    rates = (2e-3, 4e-3, 8e-3, 1.6e-2)
    parallel = [_with(method="parallel", learners=1, learning_rate=rate) for rate in rates]
    return parallel + [_with(learning_rate=rate) for rate in rates[:3]]


SWEEPS: dict[str, Callable[[], Iterable[Setting]]] = {"inner": inner}


def cells(names: Iterable[str]) -> list[Setting]:
    """All cells of these sweeps, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(SWEEPS[name]() for name in names)))
