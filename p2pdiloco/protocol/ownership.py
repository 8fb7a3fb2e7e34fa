"""Who merges a shard's next version: weighted rendezvous hashing, so that no election and no lease is needed.

Every peer ranks the same candidates alike. Two peers that see different candidates may rank differently; the worst that
follows is a fork, which heals (see ``chain``).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from math import log

from p2pdiloco.protocol.identifiers import PeerId, RunId

Candidates = tuple[tuple[PeerId, float], ...]
"""Peers with their weights, sorted by peer."""

EVALUATION_DUTY = -1
"""Stands in for a shard when the peer that evaluates a version is drawn."""


@lru_cache(maxsize=8192)
def ranked_owners(run: RunId, shard: int, version: int, candidates: Candidates) -> tuple[PeerId, ...]:
    """Candidates in the order in which they may merge ``version`` of ``shard``; the first is the owner.

    The share of versions that a candidate owns is its weight over the sum of weights. Weights must be positive.
    """
    scored = []
    for peer, weight in candidates:
        h = blake2b(f"{run}/{shard}/{version}/{peer}".encode(), digest_size=8)
        uniform = (int.from_bytes(h.digest(), "big") + 1) / (2**64 + 1)
        scored.append((-weight / log(uniform), peer))
    scored.sort(reverse=True)
    return tuple(peer for _, peer in scored)
