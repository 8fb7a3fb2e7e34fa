"""Who is let in by a handshake, and what is shown at others' doors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from p2pdiloco.access.members import Members, NotAMemberError
from p2pdiloco.protocol.ids import PeerId

SHOWN_LIMIT = 512


class Authorizer(Protocol):
    """As of the module."""

    @property
    def is_private(self) -> bool:
        """The run is named to nobody."""

    @property
    def chain(self) -> bytes:
        """Our certificates, encoded; empty: we have, or need, none."""

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """``peer``, which has proved its key, shows ``chain``.

        Raises:
            NotAMemberError: it is not let in; the text goes to both sides' people.
        """


class OpenAuthorizer:
    """Everybody is let in, and nothing shown: who takes part in no run, or an open one that knows of no bans."""

    is_private = False
    chain = b""

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """As of ``Authorizer``."""


class MemberAuthorizer:
    """A run's members are let in."""

    def __init__(self, members: Members, chain: bytes, now_s: Callable[[], float]) -> None:
        """``now_s``: seconds since 1970."""
        self.members = members
        self.chain = chain
        self._now_s = now_s

    @property
    def is_private(self) -> bool:
        """As of ``Authorizer``."""
        return self.members.is_private

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """As of ``Authorizer``."""
        self.members.admit(peer, chain, self._now_s())


class JoinerAuthorizer:
    """Who joins by invite cannot judge anybody before it has the manifest. It goes by the tag, which only those make
    who know the run, and remembers what it was shown, to be judged then."""

    is_private = True

    def __init__(self, chain: bytes) -> None:
        self.chain = chain
        self.shown: dict[PeerId, bytes] = {}

    def admit(self, peer: PeerId, chain: bytes) -> None:
        """As of ``Authorizer``."""
        if len(self.shown) >= SHOWN_LIMIT:
            raise NotAMemberError("enough peers have answered")
        self.shown[peer] = chain
