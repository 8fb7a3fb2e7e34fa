"""Bound on the length of a merged step, as a multiple of the chain's earlier steps.

A commit declares the length (Euclidean norm) of its merged outer gradient. The chain keeps a running mean of how long
these were for an inner step, and takes no commit that leaps far beyond it.

Rules of this file:
1. All peers judge alike, to the bit: lengths count as integers, in 1,024ths of an octave, and no logarithm is taken
   (between powers of two it is a straight line, at most 0.09 of an octave below).
2. The mean is one of octaves, and nothing counts in it for more than a leap: an owner in four that leaps as far as it
   may, each time, raises it by less than two octaves.
3. Learners that come back from a cut give many steps at once. Beyond a turn's steps a length grows with their root: a
   walk that goes straight on for 64 turns is 8 times as long as that, which is within a leap.
"""

from __future__ import annotations

import math

import msgspec

OCTAVE = 1024
LEAP = 4 * OCTAVE
"""A merged step is at most 16 times as long as the mean."""
MEMORY = 8
"""Versions; the first ones count in full, since learning rates are warmed up."""
MOST_OCTAVES = 128 * OCTAVE
"""Nothing in float32 is longer, or shorter, by an inner step."""


class NormBound(msgspec.Struct, frozen=True, array_like=True):
    """The running mean of one shard's chain; travels with its state."""

    counted: int = 0
    """Versions, up to ``MEMORY``."""
    octaves: int = 0
    """Of the length for an inner step."""

    def longest(self, steps: int, turn_steps: int, first: float) -> float:
        """What may come next of so many inner steps; ``first`` for each of them where nothing has come yet."""
        reach = _reach(steps, turn_steps)
        return power(self.octaves + LEAP + octaves(reach)) if self.counted else first * reach

    def after(self, length: float, steps: int, turn_steps: int) -> NormBound:
        """With one more, of ``length`` > 0; what has no length does not count."""
        if not length:
            return self
        found = octaves(length) - octaves(_reach(steps, turn_steps))
        counted, found = running_mean(self.counted, self.octaves, found)
        return NormBound(counted, min(max(found, -MOST_OCTAVES), MOST_OCTAVES))

    @property
    def is_sound(self) -> bool:
        """Whether a chain can have it."""
        return 0 <= self.counted <= MEMORY and abs(self.octaves) <= MOST_OCTAVES


NO_NORM = NormBound()


def running_mean(counted: int, mean: int, found: int) -> tuple[int, int]:
    """A mean of ``counted`` octaves with one more, ``found``, which moves it by at most a leap: how many are in it now
    (at most ``MEMORY``), and the mean."""
    if counted:
        found = min(max(found, mean - LEAP), mean + LEAP)
    counted = min(counted + 1, MEMORY)
    return counted, mean + (found - mean) // counted


def octaves(length: float) -> int:
    """The logarithm of ``length`` > 0."""
    fraction, exponent = math.frexp(length)
    return (exponent - 1) * OCTAVE + int((2.0 * fraction - 1.0) * OCTAVE)


def power(count: int) -> float:
    """The least length of so many octaves."""
    return math.ldexp(1.0 + (count % OCTAVE) / OCTAVE, count // OCTAVE)


def _reach(steps: int, turn_steps: int) -> int:
    return steps if steps <= turn_steps else math.isqrt(steps * turn_steps)
