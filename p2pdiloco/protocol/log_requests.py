"""What a peer hands to those that are behind: commits of its log, or the advice to download the state.

Rules of this file:
1. A peer that is asked while it applies a commit answers when it has: its answer of before would lead nowhere, and who
   asked would wait for its deadline.
"""

from __future__ import annotations

from collections.abc import Container

from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.identifiers import PeerId, ShardId
from p2pdiloco.protocol.messages import Commit, CommitsRequest, FetchAdvised

MAX_COMMITS_SENT = 32


class LogRequests:
    """Requests for what follows a head, and their answers."""

    def __init__(self, core: Core, applying: Container[ShardId]) -> None:
        self.core = core
        self._applying = applying
        """Shards at which work is being done."""
        self._askers: dict[ShardId, dict[PeerId, CommitsRequest]] = {}
        """Who asked meanwhile, and what each asked last."""

    def requested(self, peer: PeerId, request: CommitsRequest) -> None:
        """Send what follows the asker's head, or advise to fetch."""
        if request.shard in self._applying:
            self._askers.setdefault(request.shard, {})[peer] = request
            return
        chain = self.core.chains[request.shard]
        if chain.head is None:
            return
        commits = chain.commits_after(request.head)
        if commits is None:
            self.core.send((peer,), FetchAdvised(request.shard, chain.head))
            return
        for header in commits[:MAX_COMMITS_SENT]:
            self.core.send((peer,), Commit(header))

    def answer(self, shard: ShardId) -> None:
        """The work at ``shard`` is done, or failed."""
        for peer, request in self._askers.pop(shard, {}).items():
            if peer in self.core.membership.peers:
                self.requested(peer, request)
