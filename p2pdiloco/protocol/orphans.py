"""Commits that came before their parent: a few a shard, the heaviest of each parent."""

from __future__ import annotations

from p2pdiloco.protocol.core import ProtocolConfig
from p2pdiloco.protocol.identifiers import Digest, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Head, commit_id


class Orphans:
    """Of all shards."""

    def __init__(self, config: ProtocolConfig) -> None:
        self._config = config
        self.waiting: dict[ShardId, dict[Digest, CommitHeader]] = {}
        """By parent."""

    def keep(self, header: CommitHeader) -> None:
        """Until its parent is here, or there are too many."""
        waiting = self.waiting.setdefault(header.shard, {})
        if len(waiting) >= self._config.log_length:
            del waiting[min(waiting, key=lambda parent: waiting[parent].version)]
        elif sum(map(len, self.waiting.values())) >= self._config.waiting_most:
            return  # who sent it is asked again, once what waits is applied
        other = waiting.get(header.parent)
        if other is None or (header.tokens, commit_id(header)) > (other.tokens, commit_id(other)):
            waiting[header.parent] = header

    def of(self, shard: ShardId) -> list[CommitHeader]:
        """All of a shard."""
        return list(self.waiting.get(shard, {}).values())

    def is_followed(self, head: Head) -> bool:
        """Whether a child of ``head`` waits."""
        return head.id in self.waiting.get(head.shard, ())

    def follow(self, head: Head) -> tuple[CommitHeader | None, list[CommitHeader]]:
        """The child of ``head``, and those that it leaves behind; neither waits any more."""
        waiting = self.waiting.get(head.shard)
        if not waiting:
            return None, []
        child = waiting.pop(head.id, None)
        return child, [waiting.pop(parent) for parent in [p for p, h in waiting.items() if h.version <= head.version]]
