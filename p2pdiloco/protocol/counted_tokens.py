"""Number of tokens for which the contributions of a merge count: one usual contribution each, for each version waited.

Nothing proves how many tokens a learner trained. A chain's tokens decide which of two chains wins and when a run's
budget is spent, so a peer must not be able to declare as many as it likes. A fast machine looks like a liar, so it
counts for no more than a usual one here, as its weight in a merge does.

Rules of this file:
1. A merge counts for at most one usual contribution for each of its contributors, and each version since this one was
   last merged: whom an owner leaves out has more the next time. What one has less, others may have more.
2. A contribution that most others disagree with counts for as much less as its weight does (``CommitHeader.factors``).
3. The usual contribution, in tokens per version, moves only as far as both middle ones of a merge lie beyond it, so
   that half of them cannot move it, and a merge of few does not move it at all. An owner chooses whom it merges; of
   nearly all *usual contributors*, liars that are fewer than three eighths are not the majority.
4. Integers only: every peer computes the same counts, to the bit, from a commit and its parent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from statistics import median_high, median_low
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.config import MAX_COUNT
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.protocol.norm_bound import MEMORY, OCTAVE, octaves, power, running_mean
from p2pdiloco.protocol.support import Support

MOST_TIMES: Final = 2
"""How many usual contributions one may be as far as it moves the usual one, and in the first version: while a chain is
young, contributions grow."""
USUAL_VERSIONS: Final = 16
"""A *usual contributor* of a chain has contributed to one of so many versions. An owner that leaves others out must own
all of them to change that: with four sevenths of the weight, one time in 8,000."""
_PRINT_BYTES: Final = 8
"""Size of a fingerprint here. In four bytes, as in heartbeats, a liar could find keys that pass for other peers."""


class TokenCounts(msgspec.Struct, frozen=True, array_like=True):
    """Statistics about one shard's contributions, besides the counted sum of their tokens."""

    versions: Annotated[int, Meta(ge=0, le=MEMORY)] = 0
    """Versions in the mean, at most ``MEMORY``; 0: nothing has been merged."""
    octaves: Annotated[int, Meta(ge=0, le=64 * OCTAVE)] = 0
    """The usual contribution per version: the mean of the logarithms to base 2, in 1,024ths (see ``norm_bound``)."""
    merged: Annotated[int, Meta(ge=0, le=MAX_COUNT)] = 0
    """Declared tokens of all contributions. They are displayed only; no decision uses them."""
    usual: Annotated[tuple[tuple[int, int], ...], Meta(max_length=1 << 16)] = ()
    """The usual contributors, sorted: for each peer's fingerprint the version that merged it last."""

    def is_few(self, givers: Iterable[PeerId]) -> bool:
        """Return whether a merge of what these peers give lacks so many usual contributors that it proves little."""
        here = dict(self.usual).keys() & set(usual_prints(givers))
        return not Support(len(here), len(self.usual)).is_nearly_all

    def count(
        self, version: int, given: Mapping[PeerId, int], first: int, factors: Sequence[int] = ()
    ) -> tuple[int, TokenCounts]:
        """Return the counted tokens of the contributions to ``version``, and the next record.

        Args:
            given: tokens that each peer declares, at least 1.
            first: stands in for the usual contribution on a chain that has merged nothing yet.
            factors: how much of each contribution counts, in per cent; empty: all of all.
        """
        tokens, usual = list(given.values()), int(power(self.octaves)) if self.versions else first
        prints, last = usual_prints(given), dict(self.usual)
        # A record from elsewhere may name versions that are still to come.
        waited = [min(max(1, version - last.get(one, version - 1)), USUAL_VERSIONS) for one in prints]
        per_cent = factors or [100] * len(tokens)
        weighed = sum(max(1, n * factor // 100) for n, factor in zip(tokens, per_cent, strict=True))
        most = (usual if self.versions else MOST_TIMES * first) * sum(map(mul, per_cent, waited)) // 100
        paces = [max(1, n // since) for n, since in zip(tokens, waited, strict=True)]
        seen = {one: at for one, at in self.usual if version - USUAL_VERSIONS < at < version}
        after = TokenCounts(
            *(self.versions, self.octaves) if self.is_few(given) else self._mean_after(paces, usual),
            min(self.merged + sum(tokens), MAX_COUNT),
            tuple(sorted((seen | dict.fromkeys(prints, version)).items())),
        )
        return max(len(tokens), min(weighed, most)), after

    def _mean_after(self, paces: Sequence[int], usual: int) -> tuple[int, int]:
        low, high = median_low(paces), median_high(paces)
        if self.versions == MEMORY and low <= usual <= high:
            return self.versions, self.octaves
        return running_mean(self.versions, self.octaves, octaves(min(max(usual, low), high, MOST_TIMES * usual)))


def usual_print(peer: PeerId) -> int:
    """Return the fingerprint by which ``TokenCounts`` knows this peer."""
    return fingerprint(peer, _PRINT_BYTES)


def usual_prints(peers: Iterable[PeerId]) -> list[int]:
    """Return the fingerprints by which ``TokenCounts`` knows these peers."""
    return list(map(usual_print, peers))


NOTHING_COUNTED = TokenCounts()
