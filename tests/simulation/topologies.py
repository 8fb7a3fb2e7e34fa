"""Who can connect to whom, where not everybody can: pairs that never meet, homes behind routers, groups, changes.

Rules of this file:
1. A mesh is the set of pairs that are apart. One that lasts keeps all peers connected through others: what lies in two
   parts for good is two runs.
2. All chance comes from the ``Random`` that is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from random import Random

from p2pdiloco.protocol.ids import PeerId

Pair = tuple[PeerId, PeerId]
"""Sorted."""
Mesh = frozenset[Pair]
"""The pairs that cannot connect."""
WHOLE: Mesh = frozenset()


def pair_of(a: PeerId, b: PeerId) -> Pair:
    """The two, sorted."""
    return (a, b) if a < b else (b, a)


def share(random: Random, peers: Sequence[PeerId], connected: float) -> Mesh:
    """Each pair is connected with this probability, and as many more as make it one mesh."""
    pairs = list(combinations(sorted(peers), 2))
    apart = {pair for pair in pairs if random.random() >= connected}
    for pair in random.sample(sorted(apart), len(apart)):
        if len(parts(peers, apart)) == 1:
            break
        if any(pair[0] in part and pair[1] not in part for part in parts(peers, apart)):
            apart.discard(pair)
    return frozenset(apart)


def behind_routers(peers: Sequence[PeerId], public: Iterable[PeerId]) -> Mesh:
    """All but the ``public`` ones are behind routers: two of them never meet."""
    hidden = sorted(set(peers) - set(public))
    return frozenset(combinations(hidden, 2))


def groups(random: Random, peers: Sequence[PeerId], count: int, bridges: int) -> Mesh:
    """Groups that see each other; the first ``bridges`` peers see everybody."""
    group = {peer: random.randrange(count) for peer in peers}
    inner = sorted(peers[bridges:])
    return frozenset(pair for pair in combinations(inner, 2) if group[pair[0]] != group[pair[1]])


def drawn(random: Random, peers: Sequence[PeerId]) -> Mesh:
    """Any of these."""
    peers = random.sample(peers, len(peers))
    match random.choice(("share", "share", "public", "groups", "whole")):
        case "share":
            return share(random, peers, random.choice((0.5, 0.7, 0.7, 0.9)))
        case "public":
            return behind_routers(peers, peers[: random.choice((1, 1, 2))])
        case "groups":
            return groups(random, peers, random.choice((2, 3)), random.choice((1, 2)))
        case _:
            return WHOLE


def parts(peers: Iterable[PeerId], apart: Iterable[Pair]) -> list[frozenset[PeerId]]:
    """The peers that are connected, through others if need be."""
    is_apart, left, found = set(apart), set(peers), []
    while left:
        part, edge = set[PeerId](), [min(left)]
        while edge:
            peer = edge.pop()
            if peer in left:
                left.discard(peer)
                part.add(peer)
                edge += [other for other in left if pair_of(peer, other) not in is_apart]
        found.append(frozenset(part))
    return found
