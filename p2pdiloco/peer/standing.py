"""What a connected peer may do, as a peer asks whoever knows the members of its run."""

from __future__ import annotations

from typing import Protocol

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.control_messages import GetStatements, TellStatements
from p2pdiloco.wire.request_reply import Answer, RequestRefused


class Standing(Protocol):
    """Of other peers."""

    def is_member(self, peer: PeerId) -> bool:
        """It is in good standing now."""

    def was_member(self, peer: PeerId) -> bool:
        """It is a member, or was one."""

    def observes(self, peer: PeerId) -> bool:
        """It may only ask."""

    def may_contribute(self, peer: PeerId) -> bool:
        """What it trained may be merged."""

    def most_weight(self, peer: PeerId) -> float:
        """Of ownership."""

    def connected(self, peer: PeerId) -> None:
        """It takes part."""

    async def ask(self, peer: PeerId) -> None:
        """Hear from ``peer`` of the members that it knows."""

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """A request about members."""


class Everybody:
    """Where nobody is asked who it is: in simulated worlds."""

    def is_member(self, peer: PeerId) -> bool:
        """As of ``Standing``."""
        return True

    def was_member(self, peer: PeerId) -> bool:
        """As of ``Standing``."""
        return True

    def observes(self, peer: PeerId) -> bool:
        """As of ``Standing``."""
        return False

    def may_contribute(self, peer: PeerId) -> bool:
        """As of ``Standing``."""
        return True

    def most_weight(self, peer: PeerId) -> float:
        """As of ``Standing``."""
        return float("inf")

    def connected(self, peer: PeerId) -> None:
        """As of ``Standing``."""

    async def ask(self, peer: PeerId) -> None:
        """As of ``Standing``."""

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """As of ``Standing``."""
        raise RequestRefused("nothing is known of members here")
