"""Choice of the peers that a peer connects to: in a small run all, in a large one those of its group, and one of each
other group (``protocol/groups.py``). It says where peers announce themselves, too.

Rules of this file:
1. Of a group, a peer prefers those whose ids, hashed with its own, are smallest. So two peers prefer each other more
   often than by chance, and nobody is preferred by all.
2. A peer that has more than MOST connections ends those that it needs least. It needs its group, and one peer of each
   other group that is not leaving. The other side then looks for another peer.
3. In a large run, each group has a topic of its own in the directory. Newcomers do not know their group yet: they find
   some ENTRIES peers in the run's topic.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from hashlib import blake2b

from p2pdiloco.protocol.groups import MOST_TOGETHER, group_of
from p2pdiloco.protocol.ids import PeerId, fingerprint

MOST = 96
"""Connections that a peer of a large run keeps, unless its group and one peer of each other group are more."""
ENTRIES = 64
"""Peers that announce themselves to newcomers, on average, as the peers' keys decide."""
_BITS = 64


def topic_of(group: int, bits: int) -> str:
    """Return the name of a group's topic; empty: the run's."""
    return f"{group} of {1 << bits}" if bits else ""


def own_topics(me: PeerId, bits: int) -> list[str]:
    """Return the names of the topics in which this peer announces itself.

    Of a group of half of MOST_TOGETHER to MOST_TOGETHER peers, as many are entries as make some ENTRIES in all groups.
    """
    spare = max(0, bits + MOST_TOGETHER.bit_length() - ENTRIES.bit_length())
    later = fingerprint(me, _BITS // 8) >> (_BITS - bits - spare) & ((1 << spare) - 1)
    return list(dict.fromkeys([topic_of(group_of(me, bits), bits), *([] if later else [""])]))


def wanted(me: PeerId, bits: int, others: Iterable[PeerId], connected: Collection[PeerId]) -> list[PeerId]:
    """Return which of ``others`` this peer should dial, given those that are ``connected``.

    bits: base-2 logarithm of the number of groups.
    """
    own, met = group_of(me, bits), {group_of(peer, bits) for peer in connected}
    found, bridges = list[PeerId](), dict[int, PeerId]()
    for peer in others:
        if (group := group_of(peer, bits)) == own:
            found.append(peer)
        elif group not in met:
            bridges[group] = min(bridges.get(group, peer), peer, key=lambda peer: _distance(me, peer))
    return [*found, *bridges.values()]


def surplus(
    me: PeerId, bits: int, connected: Collection[PeerId], most: int = MOST, leaving: Container[PeerId] = ()
) -> list[PeerId]:
    """Return which of the ``connected`` peers this one can do without, as far as they are more than ``most``: first
    those that are ``leaving``."""
    own, met, spare = group_of(me, bits), set[int](), list[PeerId]()
    for peer in sorted(connected, key=lambda peer: (peer in leaving, _distance(me, peer))):
        if (group := group_of(peer, bits)) != own and group in met:
            spare.append(peer)
        met.add(group)
    return spare[::-1][: max(0, len(connected) - most)] if bits else []


def _distance(one: PeerId, other: PeerId) -> bytes:
    first, second = sorted((one, other))
    return blake2b(f"{first}/{second}".encode(), digest_size=8).digest()
