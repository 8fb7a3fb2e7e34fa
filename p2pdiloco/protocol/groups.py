"""Groups: where many learners contribute to a shard, each group's contributions are merged before the groups' merges.

Rules of this file:
1. The number of groups follows from the chain, so that all peers at a head have the same.
2. A peer's key decides its group. Nobody chooses with whom it is merged, and compared.
3. A peer needs connections to its group, and to one peer of each other group: its *bridges*. What goes to another group
   goes over a bridge, which passes it on.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from p2pdiloco.protocol.ids import PeerId, fingerprint

MOST_TOGETHER = 48
"""Contributions that are merged together. With more learners there are groups, of half as many to as many."""
SPARE_MEMBERS = 16
"""Members by which a small group may be larger."""
_BITS = 64


def group_bits(learners: int, most: int = MOST_TOGETHER) -> int:
    """Return the base-2 logarithm of the number of groups; 0: all ``learners`` are merged together."""
    bits = 0
    while learners > most << bits:
        bits += 1
    return bits


def most_members(most: int) -> int:
    """Return how many members a group may have: twice as many as on average, so that keys by chance do not fill it."""
    return 2 * most + SPARE_MEMBERS


@lru_cache(maxsize=1024)
def drawn_groups(text: str, bits: int) -> tuple[int, ...]:
    """Return all groups in an order that depends on ``text``."""
    return tuple(sorted(range(1 << bits), key=lambda group: blake2b(f"{text}/{group}".encode()).digest()))


def group_of(peer: PeerId, bits: int) -> int:
    """Return the group of ``peer``: the first ``bits`` bits of its fingerprint."""
    return group_of_print(fingerprint(peer, _BITS // 8), bits)


def group_of_print(print_of: int, bits: int) -> int:
    """Return the group of the peer with this fingerprint of eight bytes."""
    return print_of >> (_BITS - bits)
