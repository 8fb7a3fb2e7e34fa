"""What goes over one connection once both sides are proved: messages, requests and answers, parts, credit.

Rules of this file:
1. Frames in, frames out; the life of the connection (handshake, retiring, parting) is connection.py's.
2. A lane's parts belong to its primary's messages: what is whole is handled there.
3. Nothing waits: what has no room is refused, and a peer that lets control pile up is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any, Protocol

from p2pdiloco.runtime.crediting import Crediting
from p2pdiloco.runtime.lanes import Lane, Lanes
from p2pdiloco.runtime.limits import ConnectionLimits
from p2pdiloco.runtime.receiving import Receiving
from p2pdiloco.runtime.requests import Answer, Answerer, Asker, RequestError, RequestRefused, Response
from p2pdiloco.runtime.sending import Sending
from p2pdiloco.runtime.shaping import Shaper
from p2pdiloco.runtime.sockets import Path
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.traffic import Traffic
from p2pdiloco.wire.blocks import Blocks
from p2pdiloco.wire.frames import CONTROL_LIMIT, FrameError, Kind, decode_credit, decode_text, encode_frame
from p2pdiloco.wire.inbox import Aborted, Completed, Event, Inbox, Received, Skipped
from p2pdiloco.wire.outbox import START_OF_CANCEL, Outbox
from p2pdiloco.wire.parts import Assembler, Spreader

CANCEL_OF = {start: cancel for cancel, start in START_OF_CANCEL.items()}


class Speaker(Lane, Protocol):
    """The connection that a conversation goes over. All but ``answer`` are called in the event loop's callbacks."""

    def message(self, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """A message came; the future, if any, ends when it is taken."""

    def admit(self, body: bytes, size: int) -> bool:
        """Whether to take a message's payload."""

    async def answer(self, body: bytes) -> Answer:
        """The answer to a request."""

    def path(self) -> Path | None:
        """What the kernel knows of the way to the other side."""

    def progressed(self) -> None:
        """Something ended."""

    def drained(self) -> None:
        """Nothing is left to send."""


class Conversation:
    """See the module's rules."""

    def __init__(
        self,
        speaker: Speaker,
        *,
        limits: ConnectionLimits,
        blocks: Blocks,
        shaper: Shaper,
        crediting: Crediting,
        tasks: Tasks,
    ) -> None:
        self._speaker = speaker
        self.primary = self
        self.lanes = Lanes(
            speaker,
            Spreader(payload_limit=limits.outbox_bytes),
            Assembler(self._admit, allocate=blocks.take, bytes_limit=limits.inbox_bytes),
            speaker.progressed,
        )
        """Ours, or the primary's if we are a lane."""
        self.takes_parts = True
        """Whether this connection carries further parts."""
        self.inbox = Inbox(
            self._admit,
            allocate=blocks.take,
            bytes_limit=limits.inbox_bytes,
            place=lambda body, size: self.lanes.place(body, size),
        )
        self.outbox = Outbox(control_limit=limits.control_bytes, payload_limit=limits.outbox_bytes)
        self.sending = Sending(self.outbox, shaper, refill=self._refill, drained=speaker.drained)
        self.receiving = Receiving(self.inbox, crediting, tell=self.put, path=speaker.path)
        self.asker = Asker(
            self.outbox.put,
            limit=limits.requests,
            queued=self.sending.pump,
            given_up=lambda number: self.lanes.give_up_response(number),
        )
        self.answerer = Answerer(
            speaker.answer,
            put=self.outbox.put,
            put_response=self._put_response,
            tasks=tasks,
            limit=limits.answers,
            answer_s=limits.answer_s,
            ended=speaker.progressed,
        )

    # -- life --------------------------------------------------------------------------------------------------------

    def become_lane_of(self, primary: Conversation) -> bool:
        """False: that has enough."""
        if not primary.lanes.join(self._speaker):
            return False
        self.primary, self.lanes = primary, primary.lanes
        return True

    def open(self, peer: Hashable) -> None:
        """The other side is proved to be ``peer``: bulk may go."""
        self.inbox.open()
        self.sending.open(peer)

    def forget(self) -> None:
        """Nothing that waits is sent any more."""
        self.outbox.clear()
        if self.primary is self:
            self.lanes.forget()

    def end(self, reason: str) -> None:
        """The connection is lost."""
        self.inbox.clear()
        self.sending.stop()
        self.receiving.stop()
        if self.primary is self:
            self.lanes.end(self._speaker, f"its primary connection ended: {reason}")
        else:
            self.lanes.leave(self._speaker)
        self.asker.disconnect(reason)
        self.answerer.disconnect()

    @property
    def is_idle(self) -> bool:
        """Nothing is asked, answered, or on its way in parts."""
        return self.lanes.is_idle and self.asker.is_idle and self.answerer.is_idle

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self.outbox.queued_bytes + (self.lanes.queued_bytes if self.primary is self else 0)

    @property
    def traffic(self) -> Traffic:
        """Bytes so far; a stream that is under way counts with the chunks that are through."""
        return Traffic(
            self.sending.control_bytes, self.sending.bulk_bytes, self.inbox.control_bytes, self.inbox.bulk_bytes
        )

    # -- out ---------------------------------------------------------------------------------------------------------

    def send(self, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None) -> bool:
        """Queue a message. False: no room.

        Raises:
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        if payload is None:
            is_queued = self.outbox.put(encode_frame(Kind.MESSAGE, 0, body))
        elif len(body) > CONTROL_LIMIT:
            raise ValueError(f"a control body of {len(body)} bytes; the limit is {CONTROL_LIMIT}")
        elif self.lanes.takes(len(payload)):
            is_queued = self.lanes.put(Kind.BULK_START, 0, body, payload, priority, topic)
        else:
            is_queued = self.outbox.put_bulk(body, payload, priority, topic)
        self.sending.pump()
        return is_queued

    def put(self, frame: bytes) -> None:
        """A frame that the protocol itself needs. A peer that lets them pile up does not read: cut it off."""
        if not self.outbox.put(frame):
            self._speaker.abort("the peer does not read")
            return
        self.sending.pump()

    def cancel_part(self, stream: int) -> None:
        """Forget this part."""
        self.outbox.cancel(Kind.PART_CANCEL, stream)
        self.sending.pump()

    def _refill(self, credit_bytes: int) -> None:
        if self.takes_parts:
            self.lanes.refill(self._speaker, self.outbox, credit_bytes)

    def _put_response(self, request: int, body: bytes, payload: memoryview, priority: float) -> bool:
        if self.lanes.takes(len(payload)):
            return self.lanes.put(Kind.RESPONSE_START, request, body, payload, priority)
        return self.outbox.put_response(request, body, payload, priority)

    # -- in ----------------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """A frame or a payload came.

        Raises:
            FrameError: it has no place here.
        """
        match event:
            case Received(kind=Kind.MESSAGE):
                self._speaker.message(event.body, None)
            case Received():
                self._received(event.kind, event.stream, event.body)
            case Completed(kind=Kind.BULK_START):
                taken = self._speaker.message(event.body, event.payload)
                if taken is not None:
                    self.lanes.hold(len(event.payload), taken)
            case Completed(kind=Kind.PART_START):
                self.put(encode_frame(Kind.PART_ACK, event.stream, b""))
                if (whole := self.lanes.complete(event.body, len(event.payload))) is not None:
                    self.primary.handle(Completed(*whole))
            case Completed():
                self.asker.resolve(event.stream, Response(event.body, event.payload))
            case Skipped():
                self.put(encode_frame(CANCEL_OF[event.kind], event.stream, b""))
            case Aborted(kind=Kind.PART_START):
                self.lanes.give_up(event.body)
            case Aborted(kind=Kind.RESPONSE_START):
                self.asker.reject(event.stream, RequestError("the peer stopped its answer"))
            case Aborted():
                pass

    def _received(self, kind: Kind, stream: int, body: bytes) -> None:
        match kind:
            case Kind.REQUEST:
                self.answerer.begin(stream, body)
            case Kind.RESPONSE:
                self.asker.resolve(stream, Response(body, None))
            case Kind.REFUSAL:
                self.asker.reject(stream, RequestRefused(decode_text(body)))
            case Kind.BULK_CANCEL | Kind.RESPONSE_CANCEL:
                if kind is Kind.RESPONSE_CANCEL:
                    self.answerer.cancel(stream)
                    self.lanes.cancel_response(stream)
                self.outbox.cancel(kind, stream)
                self.sending.pump()
            case Kind.PART_ACK:
                self.lanes.acknowledge(self._speaker, stream)
            case Kind.PART_CANCEL:
                self.lanes.refuse(self._speaker, stream)
            case Kind.CREDIT:
                self.sending.credit(decode_credit(body))
            case _:
                raise FrameError(f"a {kind.name} frame has no place here")

    def _admit(self, kind: Kind, stream: int, body: bytes, size: int) -> bool:
        if kind is Kind.BULK_START:
            return self._speaker.admit(body, size)
        return self.asker.admit(stream, size)
