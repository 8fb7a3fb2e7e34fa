"""Commits that this peer has rejected.

Rules of this file:
1. Whether a commit is invalid (counts, record, length, values) follows from its parent's state alone. So every peer
   with that state rejects it permanently. Its id is remembered, and so are its children. No state with one of them in
   its lineage is accepted.
2. If more than half of all peers build on it all the same, this peer is the one in error (its arithmetic or its
   release), and it takes their state (``state_acceptance``).
3. The owner signed the commit, so here it owns nothing for ``TERM`` versions, as if equivocation had been proved. A
   peer that built on the commit is not blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pdiloco.protocol.barred_owners import BarredOwners
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.messages import CommitHeader
from p2pdiloco.protocol.state import Core

REFUSED_MOST = 4096
"""Maximum number of remembered ids over all shards; the latest stay."""


class RejectedCommits:
    """Commits that this peer has rejected, by id."""

    def __init__(self, core: Core, barred_owners: BarredOwners) -> None:
        self.core = core
        self.barred_owners = barred_owners
        self.ids: dict[Digest, None] = {}
        """Commits that were rejected for their values or header, and not only abandoned (``going_back``), oldest first;
        the dict serves as an ordered set."""

    def add(self, header: CommitHeader, commit: Digest, sender: PeerId | None, reason: str) -> None:
        """Reject ``header``, which extends the head here, and exclude its owner."""
        self.note(header, sender, reason)
        self.remember(commit)
        if header.owner != self.core.config.peer:
            self.barred_owners.bar(header.owner, header.shard, header.version)

    def note(self, header: CommitHeader, sender: PeerId | None, reason: str) -> None:
        """Log that a commit was rejected."""
        origin = sender or header.owner
        self.core.note("warning", "commit", f"shard {header.shard} commit of {origin} rejected: {reason}")

    def is_refused(self, header: CommitHeader, commit: Digest) -> bool:
        """Return whether the commit or its parent was rejected or abandoned."""
        if header.parent in self.core.abandoned:
            self.core.abandon(commit)
        if commit in self.core.abandoned:
            return True
        if not self.ids:
            return False
        if commit not in self.ids and header.parent in self.ids:
            self.remember(commit)
        return commit in self.ids

    def follow(self, lineage: Sequence[Digest], head: Digest) -> None:
        """Remember the commits after a rejected one in ``lineage``, oldest first, which is proved and ends at ``head``.
        This peer may not have heard them: it drops what a barred owner sends."""
        if self.ids:
            chain = (*lineage, head)
            first = next((at for at, commit in enumerate(chain) if commit in self.ids), len(chain))
            for commit in chain[first + 1 :]:
                self.remember(commit)

    def holds(self, head: Digest, lineage: Iterable[Digest] = ()) -> bool:
        """Return whether a chain contains a rejected or abandoned commit."""
        return any(
            bool(ids) and (head in ids or not ids.keys().isdisjoint(lineage)) for ids in (self.ids, self.core.abandoned)
        )

    def forget(self, head: Digest, lineage: Iterable[Digest]) -> None:
        """Forget rejected commits that were accepted after all because most peers stand by them."""
        if self.ids:
            for commit in (head, *lineage):
                self.ids.pop(commit, None)

    def remember(self, commit: Digest) -> None:
        """Remember a rejected commit, so that its descendants are rejected, too."""
        while len(self.ids) >= REFUSED_MOST:
            del self.ids[next(iter(self.ids))]
        self.ids[commit] = None
