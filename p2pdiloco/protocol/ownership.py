"""Selection of the peer that merges a shard's next version: weighted rendezvous hashing, without election or lease.

All peers rank the same candidates in the same order. Two peers that see different candidates may rank differently; the
worst result is a fork, which heals (see ``chain``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from math import log

from p2pdiloco.protocol.groups import group_of
from p2pdiloco.protocol.ids import PeerId, RunId

Candidates = tuple[tuple[PeerId, float], ...]
"""Peers with their weights, sorted by peer."""

EVALUATION_DUTY = -1
"""Stands in for a shard in the selection of the peer that evaluates a version."""


@lru_cache(maxsize=8192)
def ranked_owners(run: RunId, shard: int, version: int, candidates: Candidates) -> tuple[PeerId, ...]:
    """Return the candidates in the order in which they may merge ``version`` of ``shard``; the first is the owner.

    The share of versions that a candidate owns is its weight over the sum of weights.
    """
    return ranked(f"{run}/{shard}/{version}", candidates)


def ranked(text: str, candidates: Candidates) -> tuple[PeerId, ...]:
    """Return the candidates in an order that depends on ``text``: each is first with a chance that is its weight over
    the sum of weights. Weights must be positive."""
    scored = []
    for peer, weight in candidates:
        h = blake2b(f"{text}/{peer}".encode(), digest_size=8)
        uniform = (int.from_bytes(h.digest(), "big") + 1) / (2**64 + 1)
        scored.append((-weight / log(uniform), peer))
    scored.sort(reverse=True)
    return tuple(peer for _, peer in scored)


# -- Candidates for ownership, and their order -------------------------------------------------------------------------
# Rules of this file:
# 1. Weights count for at most twice the median. A peer that asks for weight 0 owns only if no other peer may.
# 2. The best connected come first, then peers that hear one of them. Peers that let the takeover time pass come last
#    for a while, which grows each time.
# 3. A peer that is barred owns only if no other peer may, and one that is leaving if no other of its group may. If all
#    of a group leave at once, they still agree on owners: otherwise each would merge alone, one after the other.


MOST_WEIGHT = 2.0
"""Maximum weight, in medians of the candidates' weights."""
LATER = 1e-12
"""Weight of owners that come after all others, as a share of the others' smallest weight."""
LEAST_SPREAD = 1e-24
"""Smallest ratio of the smallest weight to the largest that is taken into account."""
PASSED_OVER = 3
"""Ranks by which a peer that missed a takeover time is put back; the worst connected peers are put back by two."""
MISSES_COUNTED = 4
MISSES_REMEMBERED = 1024
"""Peers whose missed takeover times are remembered."""


def capped(candidates: list[tuple[PeerId, float]]) -> Candidates:
    """Limit the weights of ``candidates`` (sorted) to twice the median; leave out weight 0 unless all have it."""
    willing = [c for c in candidates if c[1] > 0.0]
    if not willing:
        return tuple((peer, 1.0) for peer, _ in candidates)
    weights = sorted(weight for _, weight in willing)
    most = MOST_WEIGHT * weights[(len(weights) - 1) // 2]
    return tuple((peer, min(weight, most)) for peer, weight in willing)


class Owners:
    """Candidates for ownership, as the peer ``me`` sees them."""

    __slots__ = (
        "_asked_weights",
        "_me",
        "_missed",
        "barred",
        "candidates",
        "is_leaving",
        "own_weight",
        "willing",
        "withholding",
    )

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self.own_weight: float | None = None
        """Weight that this peer asks for; None until it has all states."""
        self.is_leaving = False
        """This peer is leaving, so it owns nothing new unless all of its group leave."""
        self.barred: frozenset[PeerId] = frozenset()
        """Peers that own nothing if another peer can: they equivocated or made a rejected commit."""
        self.willing: Candidates = ()
        """Peers that may own, this one included, with capped weights."""
        self.candidates: Candidates = ()
        """The same peers; badly connected ones and those that missed a takeover time have tiny weights."""
        self.withholding: set[PeerId] = set()
        """Peers that do not deliver what they merged to auditors (``Audits``): no commit of theirs is forgiveness."""
        self._asked_weights: list[tuple[PeerId, float]] = []
        """Peers that may own, with the weights that they ask for."""
        self._missed: dict[PeerId, tuple[int, float]] = {}
        """Consecutive takeover times that a peer missed as an owner, and until when it owns last. Only a commit of its
        own ends that: a peer that reconnects must not start over. The peer that missed last comes last."""

    @property
    def may_own(self) -> bool:
        """True if this peer merges at all. A leaving peer merges only if no other one of its group may.

        Its contributors turn to another owner at once, so a merge here would be a fork.
        """
        return not self.is_leaving or any(peer == self._me for peer, _ in self.candidates)

    def is_excluded(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is barred and another peer can own."""
        return peer in self.barred and all(peer != other for other, _ in self.willing)

    def set_candidates(
        self, staying: list[tuple[PeerId, float]], leaving: list[tuple[PeerId, float]], group_bits: int = 0
    ) -> None:
        """Set the other peers that may own, with the weights that they ask for.

        ``leaving`` may own where all of their group leave. ``group_bits``: base-2 logarithm of the number of groups.
        """
        if self.own_weight is not None:
            (leaving if self.is_leaving else staying).append((self._me, self.own_weight))
        kept = {group_of(peer, group_bits) for peer, _ in staying}
        candidates = staying + [one for one in leaving if group_of(one[0], group_bits) not in kept]
        if self.barred:
            others = [candidate for candidate in candidates if candidate[0] not in self.barred]
            candidates = others or candidates
        candidates.sort()
        if candidates != self._asked_weights:
            self._asked_weights = candidates
            self.willing = capped(candidates)

    def rank(self, now: float, tiers: Mapping[PeerId, int]) -> None:
        """Compute ``candidates``: peers in ``tiers`` and peers that missed a takeover time come after all others."""
        late = dict(tiers)
        for peer, (_, until) in self._missed.items():
            if now < until:
                late[peer] = late.get(peer, 0) + PASSED_OVER
        if not late:
            self.candidates = self.willing
            return
        weights = [weight for _, weight in self.willing]
        share = LATER * max(LEAST_SPREAD, min(weights, default=1.0) / max(weights, default=1.0))
        self.candidates = tuple((peer, weight * share ** late.get(peer, 0)) for peer, weight in self.willing)

    def on_turn_missed(self, peer: PeerId, now: float, lap_s: float, tiers: Mapping[PeerId, int]) -> None:
        """Record that ``peer`` did not merge when it was its turn.

        It then owns last for four times ``lap_s``, which a pass over all owners takes, and four times as long each
        further time.
        """
        times, until = self._missed.get(peer, (0, 0.0))
        if now >= until:
            times = min(times + 1, MISSES_COUNTED)
            self._missed.pop(peer, None)
            self._missed[peer] = times, now + lap_s * 4.0**times
            if len(self._missed) > MISSES_REMEMBERED:
                del self._missed[next(iter(self._missed))]
            self.rank(now, tiers)

    def forgive(self, peer: PeerId) -> None:
        """Forget the missed takeover times of ``peer``: it has made a commit."""
        if peer not in self.withholding:
            self._missed.pop(peer, None)
