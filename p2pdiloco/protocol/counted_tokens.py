"""Number of tokens for which each contribution of a merge counts: at most four times those of the others.

Nothing proves how many tokens a learner trained. A chain's tokens decide which of two chains wins and when a run's
budget is spent, so a peer must not be able to declare as many as it likes.

Rules of this file:
1. A contribution counts for at most ``MOST_TIMES`` the median of the merge's other contributions. Each of these has one
   vote, whatever it declares: fewer than half of them cannot move the median beyond what honest peers declare.
2. With one other contribution, or none, the chain's usual contribution stands for the others, because one owner can
   choose both. While a chain is young, the other one counts as well: a newcomer's first contribution is a short one.
   An owner can name keys of its own, too, so no median counts for more than ``MOST_TIMES`` the usual contribution.
3. A contribution that most others disagree with counts for as much less as its weight does (``CommitHeader.factors``).
4. Integers only: every peer computes the same counts, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.config import MAX_COUNT
from p2pdiloco.protocol.medians import medians_of_others
from p2pdiloco.protocol.norm_bound import MEMORY, OCTAVE, octaves, power, running_mean

MOST_TIMES: Final = 4
ALONE_TIMES: Final = 1.125
"""How many usual contributions one that is merged alone counts for at most. An owner can make such commits by itself,
so they must not outweigh those that most peers contributed to."""
GROWTH_TIMES: Final = 2
"""How many usual contributions one that is merged alone may be, as far as it moves the usual one."""
_FEW: Final = 2
"""In a merge of at most this many contributions, each has at most one other, which would choose the median alone."""


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Statistics about the tokens of one shard's contributions, besides the counted sum."""

    versions: Annotated[int, Meta(ge=0, le=MEMORY)] = 0
    """Versions in the mean, at most ``MEMORY``; 0: nothing has been merged."""
    octaves: Annotated[int, Meta(ge=0, le=64 * OCTAVE)] = 0
    """The usual contribution: the mean of the logarithms to base 2, in 1,024ths (see ``norm_bound``)."""
    merged: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """Declared tokens of all contributions. They are displayed only; no decision uses them."""

    def count(self, tokens: Sequence[int], first: int, factors: Sequence[int] = ()) -> tuple[int, TokenCounts]:
        """Return the counted tokens of contributions that declare ``tokens`` (each at least 1), and the next record.

        Args:
            tokens: one number for each contribution.
            first: as in ``counted``.
            factors: how much of each contribution counts, in per cent; empty: all of all.
        """
        counted = self.counted(tokens, first)
        weighed = (
            [max(1, n * factor // 100) for n, factor in zip(counted, factors, strict=True)] if factors else counted
        )
        if len(tokens) == 1 and self.versions:
            counted = [min(tokens[0], GROWTH_TIMES * counted[0])]
        return sum(weighed), self.after(counted, sum(tokens))

    def counted(self, tokens: Sequence[int], first: int) -> list[int]:
        """Return the counted tokens of each contribution, given the declared ``tokens``.

        ``first`` replaces the usual contribution on a chain that has merged nothing yet.
        """
        usual = int(power(self.octaves)) if self.versions else 0
        if len(tokens) == 1:
            return [min(tokens[0], int(ALONE_TIMES * usual) if self.versions else MOST_TIMES * first)]
        is_few, is_young = len(tokens) <= _FEW, self.versions < MEMORY
        most = (1 if is_few and not is_young else MOST_TIMES) * usual if self.versions else first
        references = [min(max(r, usual if is_few else 0), most) for r in medians_of_others(tokens)]
        return [min(t, MOST_TIMES * reference) for t, reference in zip(tokens, references, strict=True)]

    def after(self, counted: Sequence[int], merged: int) -> TokenCounts:
        """Return the record after another version, whose contributions counted for ``counted`` and declared ``merged``.

        The lower median of ``counted`` moves the mean, by a bounded step.
        """
        usual = running_mean(self.versions, self.octaves, octaves(median_low(counted)))
        return TokenCounts(*usual, min(self.merged + merged, MAX_COUNT))


NOTHING_COUNTED = TokenCounts()
