"""One TLS connection to one peer: its life, from the handshake to the goodbye, driven by socket events.

Rules of this file:
1. A BufferedProtocol: bytes are decrypted straight into the place where they belong.
2. What is said between proved peers is conversation.py's.
3. The peer's faults end its connection with one reason; nothing else is disturbed.
4. Life: handshaking -> open -> (retiring: a duplicate that only finishes what it has begun) -> closed. The owner's
   ``opened`` and ``closed`` are called at most once each, ``closed`` only after ``opened``.
5. Everything that waits has a deadline: handshake, requests, retiring, parting.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Hashable
from typing import Any, Protocol, cast

from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.runtime.addresses import Address
from p2pdiloco.runtime.conversation import Conversation
from p2pdiloco.runtime.crediting import Crediting
from p2pdiloco.runtime.lanes import Lanes
from p2pdiloco.runtime.limits import ConnectionLimits
from p2pdiloco.runtime.requests import Answer, RequestError, Response
from p2pdiloco.runtime.shaping import Shaper
from p2pdiloco.runtime.sockets import Path, path_of
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.traffic import Traffic
from p2pdiloco.wire.blocks import Blocks
from p2pdiloco.wire.frames import (
    FrameError,
    Kind,
    Parting,
    decode_goodbye,
    encode_frame,
    encode_goodbye,
)
from p2pdiloco.wire.handshake import Handshake, HandshakeError, Hello, MismatchError, Role
from p2pdiloco.wire.inbox import Event, Received


class ConnectionOwner(Protocol):
    """What a connection tells and asks. All but ``answer`` run inside the event loop's callbacks: be quick."""

    def opened(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection, reason: str) -> None: ...

    def message(
        self, connection: Connection, body: bytes, payload: memoryview | None
    ) -> asyncio.Future[Any] | None: ...

    def admit(self, connection: Connection, body: bytes, size: int) -> bool: ...

    async def answer(self, connection: Connection, body: bytes) -> Answer: ...


class Connection(asyncio.BufferedProtocol):
    """See the module's rules."""

    def __init__(
        self,
        *,
        role: Role,
        address: Address,
        owner: ConnectionOwner,
        handshake: Callable[[ssl.SSLObject], Handshake],
        limits: ConnectionLimits,
        blocks: Blocks,
        shaper: Shaper,
        crediting: Crediting,
        tasks: Tasks,
    ) -> None:
        self.role = role
        self.address = address
        """Of the other side's socket."""
        self.local: Hello | None = None
        """What we said; set once TLS is up."""
        self.remote: Hello | None = None
        """What the other side said; set once proved."""
        self._loop = asyncio.get_running_loop()
        self.proved: asyncio.Future[PeerId] = self._loop.create_future()
        """The peer's id after the handshake; HandshakeError or ConnectionError if it failed."""
        self.gone: asyncio.Future[str] = self._loop.create_future()
        """The reason, once the connection is lost."""
        # A failure that nobody awaits is not an error of the event loop's.
        self.proved.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._owner = owner
        self._make_handshake = handshake
        self._handshake: Handshake | None = None
        self._limits = limits
        self._transport: asyncio.Transport | None = None
        self.primary = self
        """The one whose lane we are; ourselves if we are none."""
        self._conversation = Conversation(
            self, limits=limits, blocks=blocks, shaper=shaper, crediting=crediting, tasks=tasks
        )
        self._timer: asyncio.TimerHandle | None = None
        self._reason: str | None = None
        """Set when the connection is over: nothing is read or sent from then on."""
        self._parting_reason: str | None = None
        """Set when we are leaving: nothing new is sent; what is queued is."""
        self._goodbye: bytes | None = None
        """Waits until everything that is sent in parts is acknowledged."""
        self._is_deaf = False
        """Set when the peer broke the rules: it is told so, and no longer listened to."""
        self._is_retiring = False
        self._has_said_duplicate = False
        self._has_heard_duplicate = False

    # -- what the transport calls ------------------------------------------------------------------------------------

    @property
    def peer(self) -> PeerId:
        """Whose connection this is; only after the handshake."""
        assert self.remote is not None
        return PeerId(self.remote.peer)

    @property
    def is_open(self) -> bool:
        """Proved, and neither lost nor parting."""
        return self.remote is not None and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Saying or having said goodbye, or lost."""
        return self._reason is not None or self._parting_reason is not None

    @property
    def lanes(self) -> Lanes:
        """Ours, or the primary's if we are a lane."""
        return self._conversation.lanes

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._conversation.queued_bytes

    @property
    def has_waiting_bulk(self) -> bool:
        """There is bulk, and the other side takes it."""
        return self._conversation.sending.has_waiting_bulk

    @property
    def traffic(self) -> Traffic:
        """Bytes so far."""
        return self._conversation.traffic

    @property
    def lane(self) -> int:
        """The number of this lane; 0: a connection of its own right. Only after the handshake."""
        dialler = self.local if self.role is Role.DIALLER else self.remote
        assert dialler is not None
        return dialler.lane

    @property
    def bond(self) -> bytes:
        """What lanes of this connection name. Only after the handshake."""
        dialler = self.local if self.role is Role.DIALLER else self.remote
        assert dialler is not None
        return dialler.nonce

    def become_lane_of(self, primary: Connection) -> bool:
        """Proved, and bound to ``primary``. False: that has enough."""
        is_bound = self._conversation.become_lane_of(primary._conversation)
        if is_bound:
            self.primary = primary
        return is_bound

    def send(self, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None = None) -> bool:
        """Queue a message. False: no room, or not open.

        Raises:
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        if not self.is_open:
            return False
        return self._conversation.send(body, payload, priority, topic)

    async def request(self, body: bytes, *, timeout_s: float, max_payload: int) -> Response:
        """Ask, and wait for the answer.

        Raises:
            RequestError: no answer; the text says why.
        """
        if not self.is_open:
            raise RequestError("not connected")
        try:
            return await self._conversation.asker.ask(body, timeout_s=timeout_s, max_payload=max_payload)
        finally:
            self.progressed()

    def retire(self) -> None:
        """Another connection took over: finish what is begun, then close. The other side does the same."""
        if self._is_retiring or self._reason is not None:
            return
        self._is_retiring = True
        self._set_timer(self._limits.retire_s, lambda: self.abort("the duplicate connection did not finish in time"))
        self.progressed()

    def part(self, parting: Parting, reason: str) -> None:
        """Send what is queued, then GOODBYE, then close; all within ``part_s``."""
        if self._reason is not None or self._parting_reason is not None:
            return
        self._parting_reason = reason
        self._set_timer(self._limits.part_s, lambda: self.abort(reason))
        self._goodbye = encode_goodbye(parting, reason)
        self._conversation.takes_parts = self.primary is self
        self.progressed()

    def abort(self, reason: str) -> None:
        """Close now; what is queued is lost."""
        self._reason = self._reason or reason
        self._conversation.sending.stop()
        if self._transport is not None:
            self._transport.abort()
        elif not self.gone.done():
            self.gone.set_result(self._reason)

    def break_off(self, reason: str) -> None:
        """The peer broke the rules: tell it, and listen no longer."""
        self._is_deaf = True
        self._conversation.forget()
        self.part(Parting.BROKEN, reason)

    def path(self) -> Path | None:
        """What the kernel knows of the way to the other side; None if the connection is lost, or it does not tell."""
        raw = self._transport.get_extra_info("socket") if self._transport is not None else None
        return path_of(raw) if raw is not None and self._reason is None else None

    # -- what the event loop calls -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._reason is not None:
            self._transport.abort()
            return
        self._conversation.sending.start(self._transport)
        try:
            self._handshake = self._make_handshake(self._transport.get_extra_info("ssl_object"))
        except ssl.SSLError as error:
            self.abort(str(error))
            return
        self._set_timer(self._limits.handshake_s, lambda: self.abort("the handshake took too long"))
        self.local = self._handshake.hello
        self._put(encode_frame(Kind.HELLO, 0, self._handshake.hello_body))

    def connection_lost(self, exc: Exception | None) -> None:
        lost = f"connection lost: {exc}" if exc else "the other side closed the connection"
        reason = self._reason = self._reason or self._parting_reason or lost
        self._set_timer(None)
        self._conversation.end(reason)
        if not self.proved.done():
            self.proved.set_exception(ConnectionError(reason))
        if not self.gone.done():
            self.gone.set_result(reason)
        if self.remote is not None:
            self._owner.closed(self, reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._conversation.inbox.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_deaf or self._reason is not None:
            return
        try:
            for event in self._conversation.inbox.advance(nbytes):
                self._handle(event)
                if self._reason is not None:
                    return
            self._conversation.receiving.progressed()
        except HandshakeError as error:
            if not self.proved.done():
                self.proved.set_exception(error)
            self._is_deaf = True
            self.part(Parting.REFUSED, str(error))
        except FrameError as error:
            for connection in {self, self.primary}:
                connection.break_off(f"broken frames: {error}")

    def eof_received(self) -> None:
        """TLS has no half-open connections: the transport closes."""

    def pause_writing(self) -> None:
        self._conversation.sending.pause()

    def resume_writing(self) -> None:
        if self._reason is None:
            self._conversation.sending.resume()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case Received(kind=Kind.GOODBYE):
                self._farewell(*decode_goodbye(event.body))
            case Received(kind=Kind.HELLO):
                assert self._handshake is not None
                self._put(encode_frame(Kind.PROOF, 0, self._handshake.proof_after(event.body)))
            case Received(kind=Kind.PROOF):
                assert self._handshake is not None
                self._prove(self._handshake.finish(event.body))
            case _:
                self._conversation.handle(event)

    def _prove(self, remote: Hello) -> None:
        self.remote = remote
        self._set_timer(None)
        self._conversation.open(self.peer)
        self._owner.opened(self)
        if self._reason is None:
            self._conversation.receiving.open(self.peer)
        if not self.proved.done():
            self.proved.set_result(self.peer)

    def _farewell(self, parting: Parting, reason: str) -> None:
        if parting is Parting.DUPLICATE and self.remote is not None:
            self._has_heard_duplicate = True
            if not self._is_retiring:
                # The other connection may still be on its way to us. Until it is here, this one serves.
                self._set_timer(self._limits.retire_s, lambda: self.abort("no other connection came"))
            self._close_if_both_retired()
            return
        self._reason = reason or "the peer left"
        if not self.proved.done():
            self.proved.set_exception(MismatchError(self._reason))
        self._close()

    # -- what the conversation asks and tells (Speaker) --------------------------------------------------------------

    def message(self, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        return self._owner.message(self, body, payload)

    def admit(self, body: bytes, size: int) -> bool:
        return self._owner.admit(self, body, size)

    async def answer(self, body: bytes) -> Answer:
        return await self._owner.answer(self, body)

    def pump(self) -> None:
        if self._reason is None:
            self._conversation.sending.pump()

    def hold(self, size: int, taken: asyncio.Future[Any]) -> None:
        self._conversation.receiving.hold(size, taken)

    def cancel_part(self, stream: int) -> None:
        self._conversation.cancel_part(stream)

    def drained(self) -> None:
        """The outbox is empty."""
        if self._reason is not None:
            return
        if self._parting_reason is not None and self._goodbye is None:
            self._reason = self._parting_reason
            self._close()
        else:
            self.progressed()

    def progressed(self) -> None:
        """Something ended or was queued: send it; a retiring connection says GOODBYE when it has nothing left to do."""
        if self._reason is not None:
            return
        if self._goodbye is not None and (self.primary is not self or self.lanes.is_idle):
            self._conversation.outbox.part(self._goodbye)
            self._goodbye = None
        if not self._conversation.outbox.is_empty:
            self._conversation.sending.pump()
        elif self._is_retiring and self._conversation.is_idle:
            if not self._has_said_duplicate:
                self._has_said_duplicate = True
                self._put(encode_goodbye(Parting.DUPLICATE, "another connection of ours stays"))
            self._close_if_both_retired()

    # -- parting -----------------------------------------------------------------------------------------------------

    def _put(self, frame: bytes) -> None:
        if self._reason is None:
            self._conversation.put(frame)

    def _close(self) -> None:
        """Let the transport flush and close, within ``part_s``."""
        assert self._transport is not None
        self._conversation.sending.stop()
        self._set_timer(self._limits.part_s, self._transport.abort)
        self._transport.close()

    def _close_if_both_retired(self) -> None:
        if self._has_said_duplicate and self._has_heard_duplicate and self._reason is None:
            self._reason = "another connection of ours stays"
            self._close()

    def _set_timer(self, delay_s: float | None, action: Callable[[], None] | None = None) -> None:
        """The one deadline that runs; a new one replaces it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None or action is None else self._loop.call_later(delay_s, action)
