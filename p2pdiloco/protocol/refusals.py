"""Commits that this peer has judged and not taken, so that they do not come back as states.

Rules of this file:
1. What makes a commit unfit (counts, record, length, values) follows from its parent's state alone, so everybody who
   has that state refuses it, and for good. It is remembered by its id, and so are its children: nothing that has one
   of them in its lineage is taken.
2. If more than half of all go on from it all the same, it is this peer that errs (its arithmetic, its release), and it
   takes their state.
3. Its owner signed it: here it owns nothing for ``TERM`` versions, as if it were proved to all. Whoever built on it is
   not blamed.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.equivocations import Equivocations
from p2pdiloco.protocol.identifiers import Digest, PeerId
from p2pdiloco.protocol.messages import CommitHeader

REFUSED_MOST = 4096
"""The latest, over all shards."""


class Refusals:
    """Of one peer."""

    def __init__(self, core: Core, equivocations: Equivocations) -> None:
        self.core = core
        self.equivocations = equivocations
        self._ids: dict[Digest, None] = {}
        """The oldest first."""

    def add(self, header: CommitHeader, commit: Digest, sender: PeerId | None, reason: str) -> None:
        """``header`` extends the head here, and is not taken."""
        self.note(header, sender, reason)
        self.remember(commit)
        if header.owner != self.core.config.peer:
            self.equivocations.bar(header.owner, header.shard, header.version)

    def note(self, header: CommitHeader, sender: PeerId | None, reason: str) -> None:
        """Say that it is not taken."""
        origin = sender or header.owner
        self.core.note("warning", "commit", f"shard {header.shard} commit of {origin} not taken: {reason}")

    def is_refused(self, header: CommitHeader, commit: Digest) -> bool:
        """Whether it, or what it extends, was not taken."""
        if not self._ids:
            return False
        if commit not in self._ids and header.parent in self._ids:
            self.remember(commit)
        return commit in self._ids

    def holds(self, head: Digest, lineage: Iterable[Digest] = ()) -> bool:
        """Whether a chain has a commit in it that was not taken."""
        return bool(self._ids) and (head in self._ids or not self._ids.keys().isdisjoint(lineage))

    def forget(self, head: Digest, lineage: Iterable[Digest]) -> None:
        """What most stand by was taken all the same."""
        if self._ids:
            for commit in (head, *lineage):
                self._ids.pop(commit, None)

    def remember(self, commit: Digest) -> None:
        """What goes on from it is not taken either."""
        while len(self._ids) >= REFUSED_MOST:
            del self._ids[next(iter(self._ids))]
        self._ids[commit] = None
