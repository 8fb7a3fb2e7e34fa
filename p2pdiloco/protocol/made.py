"""The commits that this peer has made as an owner: one of each parent, in all its lives.

Rules of this file:
1. An owner that comes to merge on a parent of which it has made a commit before makes the same commit again. Two would
   be a proof against it (``equivocations``).
2. What was made in earlier lives is told at the start: the driver keeps it before it is sent.
3. One that cannot be applied here is tried again later; only who is alone makes another, after OWN_TRIES.
"""

from __future__ import annotations

from p2pdiloco.protocol.identifiers import Digest, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Head, commit_id


def is_left(header: CommitHeader, head: Head) -> bool:
    """Whether ``head`` is as heavy as ``header``, and so heavier than its parent: whoever has it does not merge there
    again."""
    return head.tokens >= header.tokens


class Made:
    """By shard and parent; what a head has left behind is forgotten, since heads only become heavier."""

    def __init__(self, shards: int) -> None:
        self._made: list[dict[Digest, CommitHeader]] = [{} for _ in range(shards)]

    def once(self, header: CommitHeader) -> CommitHeader:
        """``header``, or what was made on its parent before."""
        return self._made[header.shard].setdefault(header.parent, header)

    def brought(self, header: CommitHeader, head: Head | None) -> bool:
        """Whether ``header``, made in an earlier life, still matters to whoever is at ``head``."""
        if head is not None and is_left(header, head):
            return False
        return self.once(header) is header

    def is_own(self, header: CommitHeader) -> bool:
        """Whether it was made here."""
        return self._made[header.shard].get(header.parent) == header

    def forget(self, header: CommitHeader) -> None:
        """Nobody else has it, and it is of no use."""
        self._made[header.shard].pop(header.parent, None)

    def moved(self, head: Head) -> None:
        """The shard has another head."""
        made = self._made[head.shard]
        for parent in [parent for parent, header in made.items() if is_left(header, head)]:
            del made[parent]

    def payloads(self, shard: ShardId) -> set[Digest]:
        """What is sent with them."""
        return {header.payload for header in self._made[shard].values()}

    def commits(self, shard: ShardId) -> set[Digest]:
        """Their ids."""
        return {commit_id(header) for header in self._made[shard].values()}
