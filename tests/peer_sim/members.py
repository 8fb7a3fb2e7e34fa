"""Who is known as a member to a simulated peer of a private run: whom it has met, and of whom it heard on asking."""

from __future__ import annotations

from collections import Counter

from p2pdiloco.peer.host import Links
from p2pdiloco.peer.signatures import OpenRegister
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.control_messages import GetStatements, TellStatements, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused

ASK_S = 10.0
MOST_BYTES = 1 << 16


class Everybody(OpenRegister):
    """Permits everything to every peer."""

    def is_member(self, peer: PeerId) -> bool:
        """Return True: every peer is in good standing."""
        return True

    def observes(self, peer: PeerId) -> bool:
        """Return False: every peer may take part."""
        return False

    def most_weight(self, peer: PeerId) -> float:
        """Return infinity: weights have no limit."""
        return float("inf")

    def admitted(self) -> frozenset[int] | None:
        """Return None: every peer has a place."""

    def connected(self, peer: PeerId) -> None:
        """Do nothing."""

    async def ask(self, peer: PeerId) -> None:
        """Do nothing: there are no members to ask for."""

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """Refuse: this register knows no members."""
        raise RequestRefused("this peer keeps no list of members")


class Acquaintances(Everybody):
    """One life's. Introductions are names here: nobody lies about them."""

    def __init__(self, met: set[PeerId], links: Links, happened: Counter[str]) -> None:
        self._known = met
        self._links = links
        self._happened = happened

    def was_member(self, peer: PeerId) -> bool:
        """As of ``Permissions``."""
        return peer in self._known

    def may_contribute(self, peer: PeerId) -> bool:
        """As of ``Permissions``."""
        return peer in self._known

    def connected(self, peer: PeerId) -> None:
        """As of ``Permissions``."""
        self._known.add(peer)

    async def ask(self, peer: PeerId) -> None:
        """As of ``Permissions``."""
        self._happened["introduced"] += 1
        try:
            told = await self._links.request(peer, encode(GetStatements(b"")), timeout_s=ASK_S, max_payload=MOST_BYTES)
        except RequestError:
            return
        self._known.update(map(PeerId, bytes(told.payload or b"").decode().split()))

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """As of ``Permissions``."""
        return Answer(b"", " ".join(sorted(self._known)).encode())
