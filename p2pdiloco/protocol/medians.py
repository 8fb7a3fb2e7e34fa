"""Medians of the others' values: each value counts once, whatever its owner declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def medians_of_others(values: Sequence[Number]) -> list[Number]:
    """Return for each of ``values``, of which there are at least two, the median of all the others. Of two middle ones
    it is the larger, so that one liar among three does not choose it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 1) // 2
    found = list(values)
    for place, index in enumerate(order):
        found[index] = values[order[middle + (place <= middle)]]
    return found
