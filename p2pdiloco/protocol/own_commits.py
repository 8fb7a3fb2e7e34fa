"""Commits that this peer has made: at most one for each parent, also across restarts.

Rules of this file:
1. An owner that merges again on a parent for which it already made a commit reuses that commit. Two different commits
   on one parent would be a proof of equivocation against it (``BarredOwners``).
2. The driver stores a commit before it sends it, and passes the commits of earlier runs of this peer in at the start.
3. A commit that cannot be applied here is tried again later. Only a peer that is alone makes another one, after
   OWN_TRIES attempts.
4. A peer that comes back to a parent whose commit it has dropped merges nothing on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.ids import Digest, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Head, commit_id

OWN_TRIES = 8
"""Attempts to apply an own commit before a peer that is alone makes another."""


def is_left(header: CommitHeader, head: Head) -> bool:
    """Return whether ``head`` holds at least as many tokens as ``header``.

    The head is then heavier than the commit's parent, so a peer at ``head`` does not merge on that parent again.
    """
    return head.tokens >= header.tokens


class Retry(NamedTuple):
    """Schedule for an own commit that could not be applied."""

    tries: int
    at: float
    """Time of the next attempt."""


class OwnCommitLog:
    """Commits that this peer has made, by shard and parent. A commit is dropped once the head has passed it."""

    def __init__(self, shards: int, log_length: int) -> None:
        self._made: list[dict[Digest, CommitHeader]] = [{} for _ in range(shards)]
        self._dropped: list[deque[Digest]] = [deque(maxlen=log_length) for _ in range(shards)]
        """Parents of the latest dropped commits."""
        self._retries: dict[ShardId, Retry] = {}
        """Commits that could not be applied."""
        self._unsure_until: dict[ShardId, float] = {}
        """Shards restored from disk whose newer heads no peer has reported yet, and the time until which to wait."""
        self.starts = [0] * shards
        """Versions with which this life began: what earlier lives committed before is not known."""

    def record(self, header: CommitHeader) -> CommitHeader:
        """Store ``header`` and return it, or return the commit that was made on its parent before."""
        return self._made[header.shard].setdefault(header.parent, header)

    def restore(self, header: CommitHeader, head: Head | None) -> bool:
        """Store a commit of an earlier run of this peer; return False if a peer at ``head`` no longer needs it."""
        if head is not None and is_left(header, head):
            self._dropped[header.shard].append(header.parent)
            return False
        return self.record(header) is header

    def restore_made(self, made: Iterable[tuple[ShardId, Digest]], starts: Sequence[int]) -> None:
        """Remember what earlier lives of this peer may have committed, from which it went back (rule K4)."""
        for shard, parent in made:
            self._dropped[shard].append(parent)
        self.starts = [max(pair) for pair in zip(self.starts, starts, strict=True)]

    def parents(self) -> tuple[tuple[ShardId, Digest], ...]:
        """Return the parents of the latest own commits."""
        return tuple(
            (ShardId(shard), parent)
            for shard, (made, dropped) in enumerate(zip(self._made, self._dropped, strict=True))
            for parent in dict.fromkeys((*dropped, *made))
        )

    def is_dropped(self, head: Head) -> bool:
        """Return whether this peer has made a commit on ``head`` and dropped it, or may have in an earlier life."""
        return head.version < self.starts[head.shard] or head.id in self._dropped[head.shard]

    def is_own(self, header: CommitHeader) -> bool:
        """Return whether this peer made the commit."""
        return self._made[header.shard].get(header.parent) == header

    def retry(self, header: CommitHeader, at: float, *, is_alone: bool) -> None:
        """Apply an own commit that cannot be applied now again at the time ``at``, since other peers may have it.

        A peer that is alone gives up after OWN_TRIES attempts, and forgets the commit.
        """
        again = self._retries.get(header.shard)
        tries = 1 if again is None else again.tries + 1
        if tries >= OWN_TRIES and is_alone:
            self._made[header.shard].pop(header.parent, None)
        self._retries[header.shard] = Retry(tries, at)

    def stop_retrying(self, shard: ShardId) -> None:
        """Allow commits at once: the shard's state is another, or has been repaired."""
        self._retries.pop(shard, None)

    def wait_for_heads(self, shard: ShardId, until: float) -> None:
        """Postpone commits of a shard that was restored from disk.

        The state on disk may be older than this peer's last commit, so this peer may have made the next commit already.
        """
        self._unsure_until[shard] = until

    def is_unsure(self, shard: ShardId) -> bool:
        """Return whether commits of the shard are postponed, as its state may be older than the last of them."""
        return shard in self._unsure_until

    def confirm_head(self, shard: ShardId) -> bool:
        """Allow commits again, as no peer has a later head; return whether they were postponed."""
        return self._unsure_until.pop(shard, None) is not None

    def not_before(self, shard: ShardId) -> float:
        """Return the time before which this peer makes no commit of the shard."""
        again = self._retries.get(shard)
        return max(self._unsure_until.get(shard, 0.0), 0.0 if again is None else again.at)

    def on_head_changed(self, change: HeadChange) -> None:
        """Forget the commits that the head has left behind."""
        self.stop_retrying(change.shard)
        made = self._made[change.shard]
        for parent in [parent for parent, header in made.items() if is_left(header, change.head)]:
            del made[parent]
            self._dropped[change.shard].append(parent)

    def payloads(self, shard: ShardId) -> set[Digest]:
        """Return the payloads that are sent with a shard's own commits."""
        return {header.payload for header in self._made[shard].values()}

    def commits(self, shard: ShardId) -> set[Digest]:
        """Return the ids of a shard's own commits."""
        return {commit_id(header) for header in self._made[shard].values()}
