"""Authorizers: decide which peers a handshake admits, and which certificates this peer shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.access.members import Members, NotAMemberError
from p2pdiloco.protocol.ids import PeerId

SHOWN_LIMIT = 512


class Authorizer(Protocol):
    """Decides whether a peer is admitted."""

    @property
    def is_private(self) -> bool:
        """True if the run's id is kept from peers that do not know it."""

    @property
    def chain(self) -> bytes:
        """This peer's certificate chain, encoded; empty if it has, or needs, none."""

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """Admit ``peer``, which has proved its key and shows ``chain``.

        Raises:
            NotAMemberError: the peer is not admitted; the text is shown to users on both sides.
        """


class OpenAuthorizer:
    """Admits every peer and shows no certificate: for a peer in no run, or in an open one without bans."""

    is_private = False
    chain = b""

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """See ``Authorizer``."""


class MemberAuthorizer:
    """Admits the members of a run."""

    def __init__(self, members: Members, chain: bytes, now_s: Callable[[], float]) -> None:
        """``now_s`` returns the seconds since 1970."""
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
    """Authorizer of a peer that joins with an invite and cannot verify chains before it has the manifest.

    It trusts the tag, which only peers that know the run can make, and stores the chains for later verification.
    """

    is_private = True

    def __init__(self, chain: bytes) -> None:
        self.chain = chain
        self.shown: dict[PeerId, bytes] = {}

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """See ``Authorizer``."""
        if len(self.shown) >= SHOWN_LIMIT:
            raise NotAMemberError("enough peers have answered")
        self.shown[peer] = chain
