"""Authorizers: decide which peers a handshake lets in, and which certificates are shown to others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.access.members import Members, NotAMemberError
from p2pdiloco.protocol.ids import PeerId

SHOWN_LIMIT = 512


class Authorizer(Protocol):
    """Decides whether a peer is let in."""

    @property
    def is_private(self) -> bool:
        """Whether the run's id is kept from peers that do not know it."""

    @property
    def chain(self) -> bytes:
        """Our certificates, encoded; empty: we have, or need, none."""

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """Let in ``peer``, which has proved its key and shows ``chain``.

        Raises:
            NotAMemberError: it is not let in; the text goes to both sides' people.
        """


class OpenAuthorizer:
    """Lets everybody in and shows nothing: for a peer in no run, or in an open one without bans."""

    is_private = False
    chain = b""

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """See ``Authorizer``."""


class MemberAuthorizer:
    """Lets in the members of a run."""

    def __init__(self, members: Members, chain: bytes, now_s: Callable[[], float]) -> None:
        """``now_s``: seconds since 1970."""
        self.members = members
        self.chain = chain
        self._now_s = now_s

    @property
    def is_private(self) -> bool:
        """See ``Authorizer``."""
        return self.members.is_private

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """See ``Authorizer``."""
        self.members.admit(peer, chain, self._now_s())


class JoinerAuthorizer:
    """For a peer that joins by invite, which cannot judge others before it has the manifest. It goes by the tag, which
    only peers that know the run can make, and keeps the chains that it was shown, to be judged later."""

    is_private = True

    def __init__(self, chain: bytes) -> None:
        self.chain = chain
        self.shown: dict[PeerId, bytes] = {}

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """See ``Authorizer``."""
        if len(self.shown) >= SHOWN_LIMIT:
            raise NotAMemberError("enough peers have answered")
        self.shown[peer] = chain
