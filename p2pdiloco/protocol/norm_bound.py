"""Bound on the length of a merged update, as a multiple of the chain's earlier updates.

A commit declares the length (Euclidean norm) of its merged outer gradient. The chain keeps a running mean of these
lengths per inner step, and rejects a commit that leaps far beyond it.

Rules of this file:
1. All peers come to the same verdict, to the bit. Lengths are integers, in 1,024ths of an octave, and no logarithm is
   computed: between powers of two it is a straight line, at most 0.09 of an octave below the logarithm.
2. The mean is taken over octaves, and no version counts for more than one leap. If one version in four leaps as far as
   allowed, every time, the mean rises by less than two octaves.
3. Learners that return after a partition contribute many steps at once. Beyond one round's steps the bound grows with
   the square root of the steps. An update that goes straight on for 64 rounds is 8 times as long as that bound, which
   is within a leap. Steps beyond one round's count only if more than half of the contributors declare them, because
   nothing proves a declared number.
4. An update of few contributions (``Chain.is_few``) may be as long as the mean, and does not move it. Liars that own a
   version choose whom they leave out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

OCTAVE = 1024
LEAP = 5 * OCTAVE // 2
"""Maximum leap: a merged update is at most 6 times as long as the mean. While a rate warms up it becomes 4.7 times as
long after eight versions, and 2.8 times when one learner of eight stays."""
EARLY_LEAP = 4 * OCTAVE
"""The same while the mean counts few versions: after a first contribution of one step, the next may be 12 times longer.
"""
MOST_CHANGE = 4 * OCTAVE
"""Maximum difference from the mean for which a version counts in it."""
MEMORY = 8
"""Maximum number of versions in the mean; the first ones count in full, because learning rates are warmed up."""
MOST_OCTAVES = 128 * OCTAVE
"""Bound of a float32 update's length per inner step, in both directions."""


class NormBound(msgspec.Struct, frozen=True, array_like=True):
    """Running mean of one shard's chain. It travels with the shard's state."""

    counted: int = 0
    """Number of versions in the mean, at most ``MEMORY``."""
    octaves: int = 0
    """Mean length per inner step, in octaves."""

    def longest(self, steps: int, round_steps: int, first: float, *, is_few: bool = False) -> float:
        """Return the maximum length of an update of ``steps`` inner steps.

        ``first`` is the maximum per step for the first update of a chain. ``is_few``: few contributions were merged.
        """
        if not self.counted:
            return first * _reach(steps, round_steps)
        if is_few:
            return power(self.octaves + octaves(min(steps, round_steps)))
        leap = EARLY_LEAP if self.is_young else LEAP
        return power(self.octaves + leap + octaves(_reach(steps, round_steps)))

    def after(self, length: float, steps: int, round_steps: int, *, is_few: bool = False) -> NormBound:
        """Return the bound after an update of the given length. A length of 0, or of few, does not count."""
        if is_few or not length:
            return self
        found = octaves(length) - octaves(_reach(steps, round_steps))
        counted, found = running_mean(self.counted, self.octaves, found)
        return NormBound(counted, min(max(found, -MOST_OCTAVES), MOST_OCTAVES))

    @property
    def is_young(self) -> bool:
        """True while the mean holds too few versions to say how long updates usually are."""
        return self.counted < MEMORY

    @property
    def is_sound(self) -> bool:
        """True if a chain can have these values."""
        return 0 <= self.counted <= MEMORY and abs(self.octaves) <= MOST_OCTAVES


NO_NORM = NormBound()


def counted_steps(steps: Sequence[int], round_steps: int) -> int:
    """Return the inner steps from which the bound of an update follows, given the ``steps`` that contributors declare:
    the most, but beyond ``round_steps`` only as many as more than half of the contributors declare."""
    return min(max(steps), max(round_steps, sorted(steps)[(len(steps) - 1) // 2]))


def running_mean(counted: int, mean: int, found: int) -> tuple[int, int]:
    """Add ``found`` to a mean of ``counted`` octaves, which moves by at most a leap.

    Return the number of values in the mean now (at most ``MEMORY``), and the mean.
    """
    if counted:
        found = min(max(found, mean - MOST_CHANGE), mean + MOST_CHANGE)
    counted = min(counted + 1, MEMORY)
    return counted, mean + (found - mean) // counted


def octaves(length: float) -> int:
    """Return the logarithm of ``length`` > 0 to base 2, in 1,024ths (piecewise linear)."""
    fraction, exponent = math.frexp(length)
    return (exponent - 1) * OCTAVE + int((2.0 * fraction - 1.0) * OCTAVE)


def power(count: int) -> float:
    """Return the smallest length whose ``octaves`` are ``count``."""
    return math.ldexp(1.0 + (count % OCTAVE) / OCTAVE, count // OCTAVE)


def _reach(steps: int, round_steps: int) -> int:
    return steps if steps <= round_steps else math.isqrt(steps * round_steps)
