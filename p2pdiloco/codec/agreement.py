"""Agreement between the contributions of a merge.

The owner weighs a contribution less if it points away from what most others found, now and in its peer's past. That
bounds what a few members can do to the model with gradients of ordinary length and weight, and accuses nobody.

For the contributions of a merge, with v their outer gradients:

1. Agreement a_i is the median over the others of cos(v_i, v_j); of two middle values it is the larger. The smaller half
   of the members can therefore not lower the agreement of an honest one.
2. History h_i is the owner's own running mean of a_i for that peer and shard, over its learners: a peer can start a new
   learner at any time, and can be honest in some shards only. It is never sent.
3. The factor of a contribution's weight is max(F(a_i), F(h_i)), where F(x) = min(1, max(``FLOOR``, ``SLOPE`` x / m))
   and m is the lower median of all x. Where m is within the noise of random vectors nothing can be judged, and F is 1.
   A contribution of zeros gets ``FLOOR``: it would make the step shorter. Factors are whole per cent: the commit states
   them, so that everybody can make the same merge again.
4. Fewer than three contributions cannot be compared. There a peer's past decides, over all shards if it has none in
   this one, and a contribution that is alone counts as so much shorter (``merge``).
5. A large shard is judged by a sample of its elements, which the digests of all contributions decide, so that no
   contributor knows where nobody will look.
6. Whoever has the contributions knows F(a_i), and no honest owner states less (``least_factors``).

``benchmarks.hostile.rules`` measures this rule beside others.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Hashable, Sequence
from statistics import median_high, median_low
from typing import Final, NamedTuple

import torch
from torch import Tensor

from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.codec.merge import SHORTEST, Gradient
from p2pdiloco.protocol.config import LEAST_FACTOR

FLOOR: Final = LEAST_FACTOR / 100
"""The least factor. A learner that nobody agrees with may be the only one with its kind of data."""
SLOPE: Final = 4.0
"""A contribution counts in full from a quarter of the usual agreement on."""
DECAY: Final = 0.9
"""Share of a peer's history that each new merge keeps."""
PIECES: Final = 4
PIECE: Final = CHUNK // 4
"""A larger shard is judged by so many pieces of so many elements, each from another chunk."""
REMEMBERED: Final = 1 << 16
"""Records in the history, one for each peer and shard, of some 200 bytes; that of the contribution that was merged
longest ago is forgotten first."""
DISSENTS_AFTER: Final = 12
"""Judged merges after which a peer that still disagrees is named."""
JUDGED: Final = 3
"""Contributions needed: two always agree equally with each other. Also the merges after which a past is one."""
NOISE: Final = 3.0
"""Usual agreement, in standard deviations of that of random vectors, up to which nothing can be judged."""
PROVED_SHARE: Final = 0.5
PROVED_NOISE: Final = 2.0
"""A factor below so much of F(a_i) proves a wrong merge, and up to so much usual agreement F(a_i) is 1 for everybody.
Machines round differently, which moves F by far less than these leave."""


class Judgement(NamedTuple):
    """Result of judging the contributions of one merge, in their order."""

    factors: list[int]
    """Per cent of each weight that counts; empty: all of all."""
    agreements: list[float]
    """a_i, from -1 to 1; empty if there were too few contributions to judge."""


class _Record(NamedTuple):
    """Past agreement of one peer, in one shard."""

    mean: float
    """h_i."""
    usual: float = 0.0
    """Running mean of the usual agreement in the merges that could be judged."""
    judged: int = 0
    """Merges that could be judged."""


class AgreementHistory:
    """One owner's memory of how far each peer has agreed with the others."""

    def __init__(self) -> None:
        self._records: dict[Hashable, _Record] = {}
        """By peer and shard, ordered by the last contribution, the oldest first."""
        self._peers: dict[Hashable, _Record] = {}
        """By peer, over all shards: for people, and for shards in which a peer has no past."""
        self._lock = threading.Lock()
        """Needed because shards are merged on several threads."""

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def judge(
        self, peers: Sequence[str], gradients: Sequence[Gradient], shard: int = 0, sample: bytes = b""
    ) -> Judgement:
        """Compare the contributions of one merge, and add them to the history.

        Args:
            peers: the id of each contribution's peer.
            gradients: their outer gradients of ``shard``, all with the same number of elements.
            sample: decides which elements of a large shard are compared; the digests of all contributions.
        """
        present, now, noise = _agreements(gradients, sample)
        if not now:
            factors = [round(100 * self._past_factor(peer, shard)) for peer in peers]
            return Judgement(factors if min(factors, default=100) < 100 else [], [])
        factors, agreements = [LEAST_FACTOR] * len(gradients), [0.0] * len(gradients)
        usual = median_low(now) if median_low(now) > NOISE * noise else 0.0
        means = []
        for index, value in zip(present, now, strict=True):
            self._remember(self._peers, peers[index], value, usual)
            means.append(self._remember(self._records, (peers[index], shard), value, usual))
        both = zip(_factors(now, NOISE * noise), _factors(means, noise), strict=True)
        for index, value, pair in zip(present, now, both, strict=True):
            factors[index], agreements[index] = round(100 * max(pair)), value
        return Judgement(factors if min(factors) < 100 else [], agreements)

    def _past_factor(self, peer: str, shard: int) -> float:
        """F by the peer's past alone, where there are too few contributions to compare."""
        with self._lock:
            record = self._records.get((peer, shard), _Record(0.0))
            if record.judged < JUDGED:
                record = self._peers.get(peer, record)
        return 1.0 if record.judged < JUDGED else min(1.0, max(FLOOR, SLOPE * record.mean / record.usual))

    def _remember(self, records: dict[Hashable, _Record], key: Hashable, value: float, usual: float) -> float:
        """Add an agreement to a record; return its new mean. ``usual`` is the merge's, 0 if unknown."""
        with self._lock:
            last = records.pop(key, _Record(value))
            mean = DECAY * last.mean + (1.0 - DECAY) * value
            found = last._replace(mean=mean)
            if usual:
                mean_usual = DECAY * (last.usual or usual) + (1.0 - DECAY) * usual
                found = _Record(mean, mean_usual, last.judged + 1)
            records[key] = found
            if len(records) > REMEMBERED:
                del records[next(iter(records))]
        return mean

    def dissenters(self) -> dict[str, int]:
        """Return peers that have long disagreed with most others, and how many contributions of each were judged.

        Possible reasons are wrong data, a wrong learning rate or a hostile member. The weight of such contributions is
        low already; this result is for people.
        """
        with self._lock:
            records = dict(self._peers)
        return {
            str(peer): record.judged
            for peer, record in records.items()
            if record.judged >= DISSENTS_AFTER and SLOPE * record.mean < record.usual
        }


def least_factors(gradients: Sequence[Gradient], sample: bytes) -> list[int]:
    """Return the least factor that an honest owner can state for each contribution, in per cent, whatever it remembers.

    ``sample`` is that of ``AgreementHistory.judge``. Fewer than three contributions, and zeros, prove nothing.
    """
    least = [LEAST_FACTOR] * len(gradients)
    present, now, noise = _agreements(gradients, sample)
    for index, factor in zip(present, _factors(now, PROVED_NOISE * noise) if now else (), strict=False):
        least[index] = max(LEAST_FACTOR, int(100 * PROVED_SHARE * factor))
    return least


def _agreements(gradients: Sequence[Gradient], sample: bytes) -> tuple[list[int], list[float], float]:
    """Return the places of the contributions that are not zeros, their agreements a_i (empty if they are too few to be
    compared), and the standard deviation of the cosine of random vectors."""
    present = [index for index, gradient in enumerate(gradients) if gradient.norm() >= SHORTEST]
    if len(present) < JUDGED:
        return present, [], 0.0
    cosines, compared = _cosines([gradients[index] for index in present], sample)
    now = [median_high(row[:place] + row[place + 1 :]) for place, row in enumerate(cosines.tolist())]
    return present, now, 1.0 / math.sqrt(compared)


def _cosines(gradients: Sequence[Gradient], sample: bytes) -> tuple[Tensor, int]:
    """Return the cosines between all ``gradients``, float64 [n, n], and the number of elements compared."""
    elements = gradients[0].elements
    pieces = _pieces(elements, sample)
    gram = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    chunk_values = torch.empty(min(CHUNK, elements))
    rows = torch.empty(len(gradients), max(piece.stop - piece.start for _, piece in pieces))
    for chunk, piece in pieces:
        values = chunk_values[: min(CHUNK, elements - chunk * CHUNK)]
        part = rows[:, : piece.stop - piece.start]
        for row, gradient in zip(part, gradients, strict=True):
            gradient.add_to(values.zero_(), chunk, 1.0 / gradient.norm())
            row.copy_(values[piece])
        gram += part @ part.T
    lengths = gram.diagonal().sqrt().clamp(min=1e-30)
    return gram / lengths / lengths[:, None], sum(piece.stop - piece.start for _, piece in pieces)


def _pieces(elements: int, sample: bytes) -> list[tuple[int, slice]]:
    """Return the elements to compare: chunks, and a range in each."""
    chunks, found = -(-elements // CHUNK), list[tuple[int, slice]]()
    if chunks <= 1:
        return [(0, slice(0, elements))]
    drawn = [hashlib.blake2b(chunk.to_bytes(4) + sample, digest_size=16).digest() for chunk in range(chunks)]
    for chunk in sorted(sorted(range(chunks), key=drawn.__getitem__)[:PIECES]):
        size = min(CHUNK, elements - chunk * CHUNK)
        start = int.from_bytes(drawn[chunk][8:]) % max(1, size - PIECE + 1)
        found.append((chunk, slice(start, min(start + PIECE, size))))
    return found


def _factors(values: Sequence[float], noise: float) -> list[float]:
    usual = median_low(values)
    if usual <= noise:
        return [1.0] * len(values)
    return [min(1.0, max(FLOOR, SLOPE * value / usual)) for value in values]
