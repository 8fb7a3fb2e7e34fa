"""Number of tokens for which each contribution of a merge counts: at most four times those of the others.

Nothing proves how many tokens a learner trained. A chain's tokens decide which of two chains wins and when a run's
budget is spent, so a peer must not be able to declare as many as it likes.

Rules of this file:
1. A contribution counts for at most ``MOST_TIMES`` the median of the merge's other contributions. Each of these has one
   vote, whatever it declares: fewer than half of them cannot move the median beyond what honest peers declare.
2. With one other contribution, or none, the chain's usual contribution counts as well: a newcomer's first contribution
   is a short one, and an owner may merge its own alone.
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

        ``first`` replaces the usual contribution for one that is merged alone on a chain that has merged nothing yet.
        """
        usual = int(power(self.octaves)) if self.versions else 0
        if len(tokens) == 1:
            return [min(tokens[0], int(ALONE_TIMES * usual) if self.versions else MOST_TIMES * first)]
        references = medians_of_others(tokens)
        if len(tokens) <= _FEW:
            references = [max(reference, usual) for reference in references]
        return [min(t, MOST_TIMES * reference) for t, reference in zip(tokens, references, strict=True)]

    def after(self, counted: Sequence[int], merged: int) -> TokenCounts:
        """Return the record after another version, whose contributions counted for ``counted`` and declared ``merged``.

        The lower median of ``counted`` moves the mean, by a bounded step.
        """
        usual = running_mean(self.versions, self.octaves, octaves(median_low(counted)))
        return TokenCounts(*usual, min(self.merged + merged, MAX_COUNT))


NOTHING_COUNTED = TokenCounts()
