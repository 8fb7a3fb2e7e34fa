"""Relay of commits: a commit goes down a tree of the live peers, so that no peer has to send it to all others.

All peers compute the same tree where they see the same peers. Where they do not, or where a peer keeps a commit to
itself, the heads that peers announce to others lead to it (``Replication.on_head``).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

from p2pdiloco.protocol.head_reports import HeadReports
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import Commit, CommitHeader, Head, Heads
from p2pdiloco.protocol.ownership import Candidates
from p2pdiloco.protocol.state import Core

FAN_OUT = 4
"""Number of peers to which a peer sends a commit. Up to five peers get it from its owner."""
ANNOUNCEMENTS = 3
"""Number of peers to which a peer announces a commit."""


@lru_cache(maxsize=64)
def tree_order(commit: Digest, owner: PeerId, peers: Candidates) -> tuple[PeerId, ...]:
    """Return the peers in the order of a commit's tree: its owner, those that weigh at least the upper quartile, the
    others.

    ``peers``: with their weights, sorted by peer. Each commit has an order of its own, so that nobody is always near
    the owner. A peer behind a slow line asks for less weight (O1c), and passes on nothing while a quarter of the peers
    have better ones. The largest weight only brings a peer among those that pass on commits.
    """
    strong = sorted(weight for _, weight in peers)[3 * len(peers) // 4]
    keys = (
        (peer != owner, weight < strong, blake2b(f"{commit}/{peer}".encode(), digest_size=8).digest(), peer)
        for peer, weight in peers
    )
    return tuple(peer for *_, peer in sorted(keys))


def children(order: tuple[PeerId, ...], place: int) -> tuple[PeerId, ...]:
    """Return the peers to which the one at ``place`` of the tree sends the commit."""
    return order[FAN_OUT * place + 1 : FAN_OUT * (place + 1) + 1]


def announcement_ring(commit: Digest, order: tuple[PeerId, ...], place: int) -> tuple[PeerId, ...]:
    """Return the peers of the same level of the tree as ``place``, in another order: each announces the commit to those
    that follow it there.

    They should have the commit by then, so they need not wait long, and few of them have the same parents. The last two
    levels are one ring, since the last may have few. ``place`` is not the owner's.
    """
    first, width = 1, FAN_OUT
    while place >= first + width and first + width * (1 + FAN_OUT) < len(order):
        first, width = first + width, width * FAN_OUT
    if first + width * (1 + FAN_OUT) >= len(order):
        width = len(order) - first
    return tuple(sorted(order[first : first + width], key=lambda peer: blake2b(f"{peer}/{commit}".encode()).digest()))


def relay_commit(core: Core, reports: HeadReports, commit: Digest, header: CommitHeader) -> None:
    """Send a commit that this peer has made or applied to its children in the tree, and announce it to others.

    Newcomers could not apply it, and on a slow link a stream of commits would delay the states that they wait for: its
    owner tells them of the head.
    """
    if not core.is_current:
        return
    me, owner, shard, participation = core.config.peer, header.owner, header.shard, core.participation
    head = Head(shard, header.version, commit, header.tokens)
    weights = {me: core.weight, owner: 0.0} | dict(participation.weights(shard))
    order = tree_order(head.id, owner, tuple(sorted(weights.items())))
    place = order.index(me)
    receivers, listeners = set(children(order, place)), set[PeerId]()
    if me == owner:
        listeners |= participation.newcomers(shard)
    elif len(order) > FAN_OUT + 1:
        ring = announcement_ring(head.id, order, place)
        after = ring.index(me) + 1
        listeners = {*(ring + ring)[after : after + ANNOUNCEMENTS]} - receivers
    told = {peer: reports.of(peer, shard) for peer in (receivers | listeners) & weights.keys()}
    has_it = {peer for peer, report in told.items() if report is not None and report.head == head.id}
    core.send(tuple(sorted(receivers - has_it)), Commit(header))
    core.send(tuple(sorted(listeners - has_it)), Heads((head,), core.step))
