"""Medians over the other values of a list. Each value has one vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Number = TypeVar("Number", int, float)


def medians_of_others(values: Sequence[Number]) -> list[Number]:
    """Return, for each of at least two ``values``, the median of all the others.

    Of two middle values the larger is taken, so that a single liar among three does not choose it.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    middle = (len(values) - 1) // 2
    found = list(values)
    for place, index in enumerate(order):
        found[index] = values[order[middle + (place <= middle)]]
    return found
