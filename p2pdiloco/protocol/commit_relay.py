"""Relay of commits: a commit goes down a tree of the live peers, so that no peer has to send it to all others.

All peers compute the same tree where they see the same peers. Where they do not, or where a peer keeps a commit to
itself, the heads that peers announce to others lead to it (``Replication.on_head``). Each group (``groups``) has a tree
of its own, whose root is its owner, or the peer that got it from another group.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

from p2pdiloco.protocol.groups import drawn_groups
from p2pdiloco.protocol.head_reports import HeadReports
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import Commit, CommitHeader, Head, Heads
from p2pdiloco.protocol.ownership import Candidates
from p2pdiloco.protocol.state import Core

FAN_OUT = 4
"""Number of peers to which a peer sends a commit. Up to five peers get it from its owner."""
ANNOUNCEMENTS = 3
"""Number of peers to which a peer announces a commit."""
T = TypeVar("T")


@lru_cache(maxsize=64)
def tree_order(commit: Digest, root: PeerId | None, peers: Candidates) -> tuple[PeerId, ...]:
    """Return the peers in the order of a commit's tree: its root, those that weigh at least the upper quartile, the
    others.

    ``peers``: with their weights, sorted by peer. Each commit has an order of its own, so that nobody is always near
    the root. A peer behind a slow line asks for less weight (O1c), and passes on nothing while a quarter of the peers
    have better ones. The largest weight only brings a peer among those that pass on commits.
    """
    strong = sorted(weight for _, weight in peers)[3 * len(peers) // 4]
    keys = (
        (peer != root, weight < strong, blake2b(f"{commit}/{peer}".encode(), digest_size=8).digest(), peer)
        for peer, weight in peers
    )
    return tuple(peer for *_, peer in sorted(keys))


def children(order: tuple[T, ...], place: int) -> tuple[T, ...]:
    """Return the peers, or groups, to which the one at ``place`` of the tree sends the commit."""
    return order[FAN_OUT * place + 1 : FAN_OUT * (place + 1) + 1]


def announcement_ring(commit: Digest, order: tuple[PeerId, ...], place: int) -> tuple[PeerId, ...]:
    """Return the peers of the same level of the tree as ``place``, in another order: each announces the commit to those
    that follow it there.

    They should have the commit by then, so they need not wait long, and few of them have the same parents. The last two
    levels are one ring, since the last may have few. ``place`` is not the root's.
    """
    first, width = 1, FAN_OUT
    while place >= first + width and first + width * (1 + FAN_OUT) < len(order):
        first, width = first + width, width * FAN_OUT
    if first + width * (1 + FAN_OUT) >= len(order):
        width = len(order) - first
    return tuple(sorted(order[first : first + width], key=lambda peer: blake2b(f"{peer}/{commit}".encode()).digest()))


def relay_commit(core: Core, reports: HeadReports, commit: Digest, header: CommitHeader, entry: PeerId | None) -> None:
    """Send a commit that this peer has made or applied to its children in the tree, and announce it to others.

    ``entry``: the peer at which a commit of another group came into this one; None: it was asked for, so all of the
    group may lack it, and are told.
    Newcomers could not apply it, and on a slow link a stream of commits would delay the states that they wait for: they
    are told of the head.
    """
    if not core.is_current:
        return
    me, shard, participation = core.config.peer, header.shard, core.participation
    root = header.owner if participation.is_near(shard, header.owner) else entry
    head, near = Head(shard, header.version, commit, header.tokens), {me, *participation.near(shard)}
    weights = {me: core.weight} | {peer: weight for peer, weight in participation.weights(shard) if peer in near}
    if root is not None:
        weights.setdefault(root, 0.0)
    order = tree_order(head.id, root, tuple(sorted(weights.items())))
    place, bridges = order.index(me), participation.bridges(shard, commit)
    receivers = _inner_first(order, place) if root is not None else []
    entries, listeners = tuple[PeerId, ...](), set[PeerId]()
    if me == root:
        listeners |= participation.newcomers(shard)
        entries = _entries(core, commit, header, bridges)
    elif root is None:
        listeners |= near - {me}
    elif len(order) > FAN_OUT + 1:
        ring = announcement_ring(head.id, order, place)
        after = ring.index(me) + 1
        listeners = {*(ring + ring)[after : after + ANNOUNCEMENTS]}.difference(receivers)
    # Each group hears of the head from all others.
    listeners.update(bridge for group, bridge in bridges.items() if (group + 1) % len(order) == place)
    told = {peer: reports.of(peer, shard) for peer in (*receivers, *entries, *listeners)}
    has_it = {peer for peer, report in told.items() if report is not None and report.head == head.id}
    # Payloads go one after the other: first to groups, then to children that have others below them.
    core.send(tuple(peer for peer in entries if peer not in has_it), Commit(header))
    core.send(
        tuple(peer for peer in receivers if peer not in has_it), Commit(header, None if root == header.owner else root)
    )
    listeners = listeners.difference(entries, has_it)
    for peer in participation.leaving():
        report = reports.of(peer, shard)
        if peer == header.owner or (report is not None and report.head == head.id):
            listeners.add(peer)  # it leaves when somebody else has it
    core.send(tuple(sorted(listeners)), Heads((head,), core.step))


def _inner_first(order: tuple[PeerId, ...], place: int) -> list[PeerId]:
    """Return the children of ``place``, those first that have children themselves."""
    found = children(order, place)
    inner = [peer for peer in found if children(order, order.index(peer))]
    return [*inner, *sorted(set(found) - set(inner))]


def _entries(core: Core, commit: Digest, header: CommitHeader, bridges: Mapping[int, PeerId]) -> tuple[PeerId, ...]:
    """Return the peers at which a commit comes into further groups. These are a tree, too, below that of the owner.

    ``bridges``: a peer of each other group.
    """
    bits, participation = core.chains[header.shard].group_bits, core.participation
    first, own = (participation.group(header.shard, peer) for peer in (header.owner, core.config.peer))
    order = (first, *(group for group in drawn_groups(commit, bits) if group != first))
    return tuple(bridges[group] for group in children(order, order.index(own)) if group in bridges)
