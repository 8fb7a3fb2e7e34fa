"""Commits that fewer than nearly all took part in, and owners that are suspected of leaving contributions out, or of
naming keys of their own."""

from __future__ import annotations

from collections import deque

from p2pdiloco.protocol.ids import PeerId, peer_of
from p2pdiloco.protocol.messages import CommitHeader
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support

COMMITS_KEPT, COMMITS_LEAST, OWNERS_REMEMBERED = 24, 6, 1024
"""Commits of an owner that are remembered; those of it, and of the others, that are needed to suspect it; and owners
that are remembered. In one bad round an owner may make several small commits."""


def took_part(header: CommitHeader) -> set[PeerId]:
    """Return the peers that took part: the owner, and the contributors."""
    return {header.owner, *(peer_of(c.learner) for c in header.contributors)}


def is_crowd(core: Core, header: CommitHeader) -> bool:
    """Return whether a commit names contributors that this peer never met, and the others, without its owner, are at
    most half of all. An owner can make keys, whose contributions are then what all are measured by.

    Where some peers hear each other only through others, nobody can tell.
    """
    membership, giving = core.membership, {peer_of(c.learner) for c in header.contributors}
    givers = {peer for peer in giving if core.participation.is_near(header.shard, peer)}
    heard = {peer for peer in givers if peer in membership.met or peer == core.config.peer}
    is_told = not membership.connectivity.indirect and heard < givers
    return is_told and not Support(len(heard - {header.owner}), len(givers)).is_most


class SmallCommits:
    """Shares of each owner's commits that fewer than nearly all took part in.

    An owner need not wait for contributions that are late, and no audit can tell. But what is late is late for all
    owners alike, so only an owner whose commits are small more often than those of the others is suspected.
    """

    def __init__(self) -> None:
        self._latest: dict[PeerId, deque[bool]] = {}
        """For each owner, whether its latest commits were small; the longest silent owner first."""

    def record(self, owner: PeerId, *, is_small: bool) -> None:
        """Record a commit."""
        latest = self._latest.pop(owner, None) or deque(maxlen=COMMITS_KEPT)
        latest.append(is_small)
        self._latest[owner] = latest
        if len(self._latest) > OWNERS_REMEMBERED:
            del self._latest[next(iter(self._latest))]

    def is_unfair(self, owner: PeerId) -> bool:
        """Return whether more than half of the commits of ``owner`` are small, and more than twice as many as of the
        others' commits."""
        latest = self._latest.get(owner, ())
        others = [one for peer, their in self._latest.items() if peer != owner for one in their]
        if min(len(latest), len(others)) < COMMITS_LEAST:
            return False
        return sum(latest) / len(latest) > max(0.5, 2.0 * sum(others) / len(others))
