"""Who passes a commit on to whom: a tree over the live peers, so that no peer has to send it to all others.

All peers compute the same tree where they see the same peers. Where they do not, or where a peer keeps a commit to
itself, the heads that peers announce across the tree lead to it (``Replication.on_head``).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from p2pdiloco.protocol.head_reports import HeadReports
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import Commit, CommitHeader, Head, Heads, commit_id
from p2pdiloco.protocol.ownership import Candidates
from p2pdiloco.protocol.state import Core

FAN_OUT = 4
"""Number of peers to which a peer passes a commit on. Up to five peers get it from its owner."""
TOLD = 2
"""Number of peers to which a peer announces a commit."""


@lru_cache(maxsize=64)
def places(commit: Digest, owner: PeerId, peers: Candidates) -> tuple[PeerId, ...]:
    """Return the peers in the order of a commit's tree: its owner, those with at least the median weight, the others.

    ``peers``: with their weights, sorted by peer. Each part has an order of this commit, which nobody can choose.
    """
    middle = sorted(weight for _, weight in peers)[len(peers) // 2]
    shuffled = (
        (peer != owner, weight < middle, blake2b(f"{commit}/{peer}".encode(), digest_size=8).digest(), peer)
        for peer, weight in peers
    )
    return tuple(peer for *_, peer in sorted(shuffled))


def below(order: tuple[PeerId, ...], place: int) -> tuple[PeerId, ...]:
    """Return the peers to which the one at ``place`` passes the commit on."""
    return order[FAN_OUT * place + 1 : FAN_OUT * (place + 1) + 1]


def circle(commit: Digest, order: tuple[PeerId, ...], place: int) -> tuple[PeerId, ...]:
    """Return those among whom the peer at ``place`` announces the commit to the next: its level, in another order.

    They should have the commit by then, so they need not wait long, and few are below the same peer. The last two
    levels are one, since the last may have few.
    """
    first, width = 1, FAN_OUT
    while place >= first + width and first + width * (1 + FAN_OUT) < len(order):
        first, width = first + width, width * FAN_OUT
    if first + width * (1 + FAN_OUT) >= len(order):
        width = len(order) - first
    return tuple(sorted(order[first : first + width], key=lambda peer: blake2b(f"{peer}/{commit}".encode()).digest()))


def relay(core: Core, reports: HeadReports, header: CommitHeader) -> None:
    """Send a commit that this peer has made or applied to the peers below it, and announce it to others.

    Newcomers could not apply it, and on a slow link a stream of commits would delay the states that they wait for: its
    owner tells them of the head.
    """
    if not core.is_current:
        return
    me, owner, shard, participation = core.config.peer, header.owner, header.shard, core.participation
    head = Head(shard, header.version, commit_id(header), header.tokens)
    newcomers = {peer for peer in participation.peers(shard) if participation.is_newcomer(peer, shard)}
    weights = {me: core.config.weight, owner: 0.0}
    for peer in participation.peers(shard):
        if peer not in newcomers and (beat := core.membership.peers[peer].beat) is not None:
            weights[peer] = beat.weight
    order = places(head.id, owner, tuple(sorted(weights.items())))
    place = order.index(me)
    children, told = below(order, place), newcomers if me == owner else set()
    if place and len(order) > FAN_OUT + 1:
        level = circle(head.id, order, place)
        at = level.index(me) + 1
        told = {*(level + level)[at : at + TOLD]} - set(children)
    there = {peer for peer in order if (one := reports.of(peer, shard)) is not None and one.head == head.id}
    core.send(tuple(sorted(set(children) - there)), Commit(header))
    core.send(tuple(sorted(told - there)), Heads((head,), core.step))
