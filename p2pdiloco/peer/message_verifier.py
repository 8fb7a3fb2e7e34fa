"""Message verifier: checks digests, signatures and membership of received messages, off the event loop's thread.

Rules of this file:
1. An invalid message is dropped, and the fault of its sender counted. A few with a wrong digest or signature cost it
   the connection. A message that names an unknown member waits until its sender was asked for members, once.
2. Signed commits are compared with those that are known here. Two commits of one owner on one parent are proof of
   equivocation, and one that names a contribution which was not made proves that as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.payload_cache import Keep
from p2pdiloco.peer.signatures import FalseContributionError, ForgedError, Permissions, UnknownMemberError
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId


class MessageVerifier:
    """Verifies the messages that one peer receives, then feeds them to the machine. Accusations of wrong merges are
    verified by the ``Auditor``."""

    def __init__(self, driver: Driver, permissions: Permissions) -> None:
        self._driver = driver
        self._view = driver.view
        self._payload_cache = driver.payload_cache
        self.permissions = permissions
        self._host = driver.host
        self._metrics = driver.metrics
        # Running requests for members, by the peer that named an unknown one.
        self._asking: dict[PeerId, asyncio.Task[None]] = {}

    def receive(self, peer: PeerId, message: msg.Message, payload: memoryview | None) -> asyncio.Future[Keep] | None:
        """Feed a message to the machine, after its signatures and payload (if any) were verified on a thread.

        The returned future ends when the verification is done. Until then the sender gets no credit for the payload's
        bytes (flow control). None: there was nothing to verify, or the message was dropped.
        """
        if self._driver.is_closed:
            return None
        cache = self._payload_cache
        match message:
            case msg.Contribution() if message.payload:
                return self._verify(peer, message, payload, lambda data: cache.verify_contribution(data, message))
            case msg.Commit(header=header):
                return self._verify(peer, message, payload, lambda data: cache.verify_commit(data, header))
            case msg.Equivocation():
                if any(message.owner == known.owner for known in self._view.convictions().proofs):
                    return None
                return self._verify(peer, message, memoryview(b""), lambda _: cache.verify_equivocation(message))
            case msg.WrongMerge():
                raise AssertionError("a merge is made again before anybody is blamed for it")
            case _:
                self._driver.feed(ev.Received(peer, message))
                return None

    def report_false(self, error: ValueError) -> None:
        """Report the owner of a commit that names a contribution which was not made, if this is the error."""
        if isinstance(error, FalseContributionError):
            self._driver.feed(ev.Contradicted(error.proof))

    def report_contradictions(self) -> None:
        """Report owners that signed two commits on one parent to the machine."""
        for proof in self._payload_cache.take_contradictions():
            if proof.owner not in self._view.barred:
                self._metrics.report_fault(proof.owner, "equivocation", f"two commits of version {proof.version}")
            self._driver.feed(ev.Contradicted(proof))

    def _verify(
        self,
        peer: PeerId,
        message: msg.Contribution | msg.Commit | msg.Equivocation,
        data: memoryview | None,
        check: Callable[[memoryview], Keep],
    ) -> asyncio.Future[Keep] | None:
        """Run ``check`` on a thread, then feed the message. ``check`` returns a function that keeps the payload, or
        raises ValueError."""
        if data is None:
            self._metrics.report_fault(peer, "payload", "the message came without its payload")
            return None

        whole: asyncio.Future[Keep] = asyncio.get_running_loop().create_future()

        def start() -> None:
            self._host.work("checks", lambda: check(data)).add_done_callback(checked)

        def checked(future: asyncio.Future[Keep]) -> None:
            if self._driver.is_closed or future.cancelled() or whole.cancelled():
                whole.cancel()
                return
            error = future.exception()
            if isinstance(error, UnknownMemberError) and not was_asked:
                was_asked.append(peer)
                self.ask_for_members(peer).add_done_callback(lambda _: None if self._driver.is_closed else start())
                return
            if isinstance(error, ValueError):
                self._metrics.report_fault(peer, "payload", str(error))
                self.report_false(error)
                if isinstance(error, ForgedError):
                    self._host.links.blame(peer, is_forged=True)
                whole.cancel()
                if isinstance(message, msg.Commit):
                    self._driver.feed(ev.Failed("commit", message.header.shard, peer, str(error)))
                return
            keep = future.result()
            keep()
            whole.set_result(keep)
            self._driver.feed(ev.Received(peer, message))  # before any other event, which could sweep the new payload
            self.report_contradictions()

        was_asked: list[PeerId] = []
        start()
        return whole

    def ask_for_members(self, peer: PeerId) -> asyncio.Task[None]:
        """Ask ``peer`` for the members that it knows, because it named an unknown one. At most one request per peer
        runs."""
        asking = self._asking.get(peer)
        if asking is None:
            asking = self._asking[peer] = self._host.spawn(self.permissions.ask(peer), name=f"ask {peer} for members")
            asking.add_done_callback(lambda _: self._asking.pop(peer, None))
        return asking
