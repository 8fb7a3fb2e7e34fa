"""Medians by head: each value counts once, whatever its owner declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def lower_median(values: Sequence[Number]) -> Number:
    """The middle one of ``values``, of which there is at least one; of two middle ones the smaller."""
    return sorted(values)[(len(values) - 1) // 2]


def medians_of_others(values: Sequence[Number]) -> list[Number]:
    """For each of ``values``, of which there are at least two, the median of all the others; of two middle ones the
    larger, so that one liar among three does not choose it."""
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 1) // 2
    found = list(values)
    for place, index in enumerate(order):
        found[index] = values[order[middle + (place <= middle)]]
    return found
