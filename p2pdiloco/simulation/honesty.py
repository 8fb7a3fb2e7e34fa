"""Rule E1, omniscient: an honest owner makes one commit of a parent, in all its lives; no proof says otherwise."""

from __future__ import annotations

from p2pdiloco.protocol.identifiers import Digest, PeerId
from p2pdiloco.protocol.messages import CommitHeader, Equivocation


class Honesty:
    """Of all peers of a world."""

    def __init__(self) -> None:
        self._made: dict[tuple[PeerId, Digest], CommitHeader] = {}
        """By owner and parent."""
        self._seen: dict[tuple[PeerId, PeerId, Digest], CommitHeader] = {}
        """Signed commits by who has them, owner and parent."""
        self._forgetful: set[PeerId] = set()
        """Peers that lost their disk."""

    def made(self, header: CommitHeader) -> bool:
        """Whether what an honest owner makes now is the only commit of its parent that it has made."""
        return self._made.setdefault((header.owner, header.parent), header) == header

    def forgot(self, peer: PeerId) -> None:
        """Its disk is gone, and what it made with it."""
        self._made = {key: header for key, header in self._made.items() if key[0] != peer}
        self._forgetful.add(peer)

    def compared(self, peer: PeerId, header: CommitHeader) -> Equivocation | None:
        """``peer`` has a signed commit: what it proves with another one that it has."""
        first = self._seen.setdefault((peer, header.owner, header.parent), header)
        return None if first == header else Equivocation(first, header, b"", b"")

    def is_excused(self, peer: PeerId) -> bool:
        """Whether an honest peer may have made two commits of one parent."""
        return peer in self._forgetful
