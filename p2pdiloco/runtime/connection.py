"""One TLS connection to one peer: drives the handshake, the inbox and the outbox from socket events.

Rules of this file:
1. A BufferedProtocol: bytes are decrypted straight into the place where they belong.
2. Writing is sending.py's; the other side's credit is receiving.py's.
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
from p2pdiloco.runtime.crediting import Crediting
from p2pdiloco.runtime.lanes import Lanes
from p2pdiloco.runtime.limits import ConnectionLimits
from p2pdiloco.runtime.receiving import Receiving
from p2pdiloco.runtime.requests import Answer, Answerer, Asker, RequestError, RequestRefused, Response
from p2pdiloco.runtime.sending import Sending
from p2pdiloco.runtime.shaping import Shaper
from p2pdiloco.runtime.sockets import Path, path_of
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.traffic import Traffic
from p2pdiloco.wire.blocks import Blocks
from p2pdiloco.wire.frames import (
    CONTROL_LIMIT,
    FrameError,
    Kind,
    Parting,
    decode_credit,
    decode_goodbye,
    decode_text,
    encode_frame,
    encode_goodbye,
)
from p2pdiloco.wire.handshake import Handshake, HandshakeError, Hello, MismatchError, Role
from p2pdiloco.wire.inbox import Aborted, Completed, Event, Inbox, Received, Skipped
from p2pdiloco.wire.outbox import START_OF_CANCEL, Outbox
from p2pdiloco.wire.parts import Assembler, Spreader

CANCEL_OF = {start: cancel for cancel, start in START_OF_CANCEL.items()}


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
        self.lanes = Lanes(
            self,
            Spreader(payload_limit=limits.outbox_bytes),
            Assembler(self._admit, allocate=blocks.take, bytes_limit=limits.inbox_bytes),
            self._made_progress,
        )
        """Ours, or the primary's if we are a lane."""
        self.primary = self
        self._inbox = Inbox(
            self._admit,
            allocate=blocks.take,
            bytes_limit=limits.inbox_bytes,
            place=lambda body, size: self.lanes.place(body, size),
        )
        self._outbox = Outbox(control_limit=limits.control_bytes, payload_limit=limits.outbox_bytes)
        self._sending = Sending(self._outbox, shaper, refill=self._refill, drained=self._drained)
        self._receiving = Receiving(self._inbox, crediting, tell=self._put, path=self.path)
        self._asker = Asker(
            self._outbox.put,
            limit=limits.requests,
            queued=self._sending.pump,
            given_up=lambda number: self.lanes.give_up_response(number),
        )
        self._answerer = Answerer(
            self._answer,
            put=self._outbox.put,
            put_response=self._put_response,
            tasks=tasks,
            limit=limits.answers,
            answer_s=limits.answer_s,
            ended=self._made_progress,
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
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self._outbox.queued_bytes + (self.lanes.queued_bytes if self.primary is self else 0)

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
        if not primary.lanes.join(self):
            return False
        self.primary, self.lanes = primary, primary.lanes
        return True

    @property
    def traffic(self) -> Traffic:
        """Bytes so far; a stream that is under way counts with the chunks that are through."""
        sending = self._sending
        return Traffic(sending.control_bytes, sending.bulk_bytes, self._inbox.control_bytes, self._inbox.bulk_bytes)

    def send(self, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None = None) -> bool:
        """Queue a message. False: no room, or not open.

        Raises:
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        if not self.is_open:
            return False
        if payload is None:
            is_queued = self._outbox.put(encode_frame(Kind.MESSAGE, 0, body))
        elif len(body) > CONTROL_LIMIT:
            raise ValueError(f"a control body of {len(body)} bytes; the limit is {CONTROL_LIMIT}")
        elif self.lanes.takes(len(payload)):
            is_queued = self.lanes.put(Kind.BULK_START, 0, body, payload, priority, topic)
        else:
            is_queued = self._outbox.put_bulk(body, payload, priority, topic)
        self._sending.pump()
        return is_queued

    async def request(self, body: bytes, *, timeout_s: float, max_payload: int) -> Response:
        """Ask, and wait for the answer.

        Raises:
            RequestError: no answer; the text says why.
        """
        if not self.is_open:
            raise RequestError("not connected")
        try:
            return await self._asker.ask(body, timeout_s=timeout_s, max_payload=max_payload)
        finally:
            self._made_progress()

    def retire(self) -> None:
        """Another connection took over: finish what is begun, then close. The other side does the same."""
        if self._is_retiring or self._reason is not None:
            return
        self._is_retiring = True
        self._set_timer(self._limits.retire_s, lambda: self.abort("the duplicate connection did not finish in time"))
        self._made_progress()

    def part(self, parting: Parting, reason: str) -> None:
        """Send what is queued, then GOODBYE, then close; all within ``part_s``."""
        if self._reason is not None or self._parting_reason is not None:
            return
        self._parting_reason = reason
        self._set_timer(self._limits.part_s, lambda: self.abort(reason))
        self._goodbye = encode_goodbye(parting, reason)
        self._made_progress()

    def abort(self, reason: str) -> None:
        """Close now; what is queued is lost."""
        self._reason = self._reason or reason
        self._sending.stop()
        if self._transport is not None:
            self._transport.abort()
        elif not self.gone.done():
            self.gone.set_result(self._reason)

    def break_off(self, reason: str) -> None:
        """The peer broke the rules: tell it, and listen no longer."""
        self._is_deaf = True
        self._outbox.clear()
        if self.primary is self:
            self.lanes.forget()
        self.part(Parting.BROKEN, reason)

    def pump(self) -> None:
        """Lane: there may be something to send."""
        if self._reason is None:
            self._sending.pump()

    def hold(self, size: int, taken: asyncio.Future[Any]) -> None:
        """Lane: grant nothing for ``size`` bytes until the handler has taken them."""
        self._receiving.hold(size, taken)

    def cancel_part(self, stream: int) -> None:
        """Lane: forget this part."""
        self._outbox.cancel(Kind.PART_CANCEL, stream)
        self.pump()

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
        self._sending.start(self._transport)
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
        self._inbox.clear()
        self._sending.stop()
        self._receiving.stop()
        if self.primary is self:
            self.lanes.end(self, f"its primary connection ended: {reason}")
        else:
            self.lanes.leave(self)
        self._asker.disconnect(reason)
        self._answerer.disconnect()
        if not self.proved.done():
            self.proved.set_exception(ConnectionError(reason))
        if not self.gone.done():
            self.gone.set_result(reason)
        if self.remote is not None:
            self._owner.closed(self, reason)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._inbox.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_deaf or self._reason is not None:
            return
        try:
            for event in self._inbox.advance(nbytes):
                self._handle(event)
                if self._reason is not None:
                    return
            self._receiving.progressed()
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
        self._sending.pause()

    def resume_writing(self) -> None:
        if self._reason is None:
            self._sending.resume()

    # -- reading -----------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case Received(kind=Kind.MESSAGE):
                self._owner.message(self, event.body, None)
            case Received():
                self._received(event.kind, event.stream, event.body)
            case Completed(kind=Kind.BULK_START):
                taken = self._owner.message(self, event.body, event.payload)
                if taken is not None:
                    self.lanes.hold(len(event.payload), taken)
            case Completed(kind=Kind.PART_START):
                self._put(encode_frame(Kind.PART_ACK, event.stream, b""))
                if (whole := self.lanes.complete(event.body, len(event.payload))) is not None:
                    self.primary._handle(Completed(*whole))
            case Completed():
                self._asker.resolve(event.stream, Response(event.body, event.payload))
            case Skipped():
                self._put(encode_frame(CANCEL_OF[event.kind], event.stream, b""))
            case Aborted(kind=Kind.PART_START):
                self.lanes.give_up(event.body)
            case Aborted(kind=Kind.RESPONSE_START):
                self._asker.reject(event.stream, RequestError("the peer stopped its answer"))
            case Aborted():
                pass

    def _received(self, kind: Kind, stream: int, body: bytes) -> None:
        match kind:
            case Kind.REQUEST:
                self._answerer.begin(stream, body)
            case Kind.RESPONSE:
                self._asker.resolve(stream, Response(body, None))
            case Kind.REFUSAL:
                self._asker.reject(stream, RequestRefused(decode_text(body)))
            case Kind.BULK_CANCEL | Kind.RESPONSE_CANCEL:
                if kind is Kind.RESPONSE_CANCEL:
                    self._answerer.cancel(stream)
                    self.lanes.cancel_response(stream)
                self._outbox.cancel(kind, stream)
                self._sending.pump()
            case Kind.PART_ACK:
                self.lanes.acknowledge(self, stream)
            case Kind.PART_CANCEL:
                self.lanes.refuse(self, stream)
            case Kind.CREDIT:
                self._sending.credit(decode_credit(body))
            case Kind.GOODBYE:
                self._farewell(*decode_goodbye(body))
            case Kind.HELLO:
                assert self._handshake is not None
                self._put(encode_frame(Kind.PROOF, 0, self._handshake.proof_after(body)))
            case Kind.PROOF:
                assert self._handshake is not None
                self._prove(self._handshake.finish(body))
            case _:
                raise FrameError(f"a {kind.name} frame has no place here")

    def _prove(self, remote: Hello) -> None:
        self.remote = remote
        self._set_timer(None)
        self._inbox.open()
        self._sending.open(self.peer)
        self._owner.opened(self)
        if self._reason is None:
            self._receiving.open(self.peer)
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

    def _admit(self, kind: Kind, stream: int, body: bytes, size: int) -> bool:
        if kind is Kind.BULK_START:
            return self._owner.admit(self, body, size)
        return self._asker.admit(stream, size)

    async def _answer(self, question: bytes) -> Answer:
        return await self._owner.answer(self, question)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _put(self, frame: bytes) -> None:
        """A frame that the protocol itself needs. A peer that lets them pile up does not read: cut it off."""
        if self._reason is not None:
            return
        if not self._outbox.put(frame):
            self.abort("the peer does not read")
            return
        self._sending.pump()

    def _refill(self, credit_bytes: int) -> None:
        if self._parting_reason is None or self.primary is self:
            self.lanes.refill(self, self._outbox, credit_bytes)

    def _put_response(self, request: int, body: bytes, payload: memoryview, priority: float) -> bool:
        if self.lanes.takes(len(payload)):
            return self.lanes.put(Kind.RESPONSE_START, request, body, payload, priority)
        return self._outbox.put_response(request, body, payload, priority)

    def _drained(self) -> None:
        """The outbox is empty."""
        if self._reason is not None:
            return
        if self._parting_reason is not None and self._goodbye is None:
            self._reason = self._parting_reason
            self._close()
        else:
            self._made_progress()

    def _close(self) -> None:
        """Let the transport flush and close, within ``part_s``."""
        assert self._transport is not None
        self._sending.stop()
        self._set_timer(self._limits.part_s, self._transport.abort)
        self._transport.close()

    # -- retiring ----------------------------------------------------------------------------------------------------

    def _made_progress(self) -> None:
        """Something ended or was queued: send it; a retiring connection says GOODBYE when it has nothing left to do."""
        if self._reason is not None:
            return
        if self._goodbye is not None and (self.primary is not self or self.lanes.is_idle):
            self._outbox.part(self._goodbye)
            self._goodbye = None
        if not self._outbox.is_empty:
            self._sending.pump()
        elif self._is_retiring and self.lanes.is_idle and self._asker.is_idle and self._answerer.is_idle:
            if not self._has_said_duplicate:
                self._has_said_duplicate = True
                self._put(encode_goodbye(Parting.DUPLICATE, "another connection of ours stays"))
            self._close_if_both_retired()

    def _close_if_both_retired(self) -> None:
        if self._has_said_duplicate and self._has_heard_duplicate and self._reason is None:
            self._reason = "another connection of ours stays"
            self._close()

    def _set_timer(self, delay_s: float | None, action: Callable[[], None] | None = None) -> None:
        """The one deadline that runs; a new one replaces it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay_s is None or action is None else self._loop.call_later(delay_s, action)
