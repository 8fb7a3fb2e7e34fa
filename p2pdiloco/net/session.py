"""Session of one connection after both sides are proved: messages, requests and answers, parts and credit.

Rules of this file:
1. Frames in, frames and events out. net/connection.py handles the connection's life cycle (handshake, retiring,
   closing). A session knows its connection's id, and the sessions of its lanes.
2. A lane's parts belong to its primary's messages and answers. A complete payload is reported as the primary's.
3. Nothing blocks: data without room is refused, and a peer that lets control data pile up is cut off (``is_overrun``).
4. A delivered payload belongs to the user alone: no stream writes into it any more.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

from p2pdiloco.net.bandwidth import Traffic
from p2pdiloco.net.context import Due, EndpointContext
from p2pdiloco.net.events import (
    AnswerReceived,
    ConnectionId,
    IncomingRequest,
    Message,
    Offered,
    OutgoingRequest,
    RequestFailed,
    RequestReceived,
    RequestWithdrawn,
)
from p2pdiloco.net.flow_control import Account, Spending
from p2pdiloco.net.frames import (
    CONTROL_LIMIT,
    STREAM_WRAP,
    FrameError,
    FrameKind,
    Start,
    Use,
    decode_credit,
    decode_request,
    decode_text,
    encode_credit,
    encode_frame,
    encode_request,
    encode_text,
)
from p2pdiloco.net.multipath import Lanes, PayloadState
from p2pdiloco.net.receive_buffer import Aborted, Begun, Completed, Event, Frame, ReceiveBuffer
from p2pdiloco.net.send_queue import SendQueue, Slice
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

# -- Requests ----------------------------------------------------------------------------------------------------------
# Both directions are bounded: this peer's requests that wait, and the other peer's requests that are being answered.
# Every request ends once: answered, refused, too large, timed out, withdrawn, or disconnected.


class OutgoingRequests:
    """This peer's requests over one connection that wait for an answer."""

    def __init__(self, connection: ConnectionId, context: EndpointContext) -> None:
        self._connection = connection
        self._context = context
        self._waiting: dict[int, tuple[int, float]] = {}
        """By number: maximum payload of the answer in bytes, and the timeout in seconds."""
        self._numbers = itertools.count(1)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the requests that wait for an answer."""
        return list(self._waiting)

    def begin(self, max_payload: int, timeout_s: float) -> int:
        """Begin a request and return its number.

        Raises:
            RequestError: too many requests wait.
        """
        if len(self._waiting) >= self._context.limits.requests:
            raise RequestError(f"{len(self._waiting)} requests to this peer already wait for answers")
        number = next(self._numbers) % STREAM_WRAP
        self._waiting[number] = (max_payload, timeout_s)
        self._context.deadlines.set((Due.REQUEST, self._connection, number), self._context.now + timeout_s)
        return number

    def limits_of(self, number: int) -> tuple[int, float] | None:
        """Return the maximum payload of the answer in bytes, and its deadline in seconds; None if the request no longer
        waits."""
        return self._waiting.get(number)

    def end(self, number: int) -> bool:
        """Stop waiting for an answer. Return False if the request did not wait."""
        self._context.deadlines.cancel((Due.REQUEST, self._connection, number))
        self._context.touch(self._connection)
        return self._waiting.pop(number, None) is not None

    def resolve(self, number: int, response: Response) -> None:
        """Report the answer to a request. An unexpected answer is dropped."""
        if self.end(number):
            self._context.emit(AnswerReceived(OutgoingRequest(self._connection, number), response))

    def reject(self, number: int, error: RequestError) -> None:
        """Report that a request gets no answer."""
        if self.end(number):
            self._context.emit(RequestFailed(OutgoingRequest(self._connection, number), error))


class IncomingRequests:
    """The other peer's requests over one connection that are being answered."""

    def __init__(self, connection: ConnectionId, context: EndpointContext) -> None:
        self._connection = connection
        self._context = context
        self._open: dict[int, int] = {}
        """By number: maximum payload of the answer in bytes."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the requests that are being answered."""
        return list(self._open)

    def begin(self, number: int, max_payload: int, body: bytes) -> bool:
        """Report a request of the other peer. Return False if too many are being answered.

        Raises:
            FrameError: the number is in use.
        """
        if number in self._open:
            raise FrameError(f"request number {number} is in use")
        if len(self._open) >= self._context.limits.answers:
            return False
        self._open[number] = max_payload
        self._context.deadlines.set(
            (Due.ANSWER, self._connection, number), self._context.now + self._context.limits.answer_s
        )
        self._context.emit(RequestReceived(IncomingRequest(self._connection, number), body))
        return True

    def end(self, number: int) -> int | None:
        """End a request. Return the answer's maximum payload in bytes; None if the request was withdrawn."""
        self._context.deadlines.cancel((Due.ANSWER, self._connection, number))
        self._context.touch(self._connection)
        return self._open.pop(number, None)

    def withdraw(self, number: int) -> bool:
        """Report that the request was withdrawn. Return False if it had ended."""
        is_open = self.end(number) is not None
        if is_open:
            self._context.emit(RequestWithdrawn(IncomingRequest(self._connection, number)))
        return is_open


# -- Session -----------------------------------------------------------------------------------------------------------


class Session:
    """Traffic of one connection after its handshake; see the module's rules.

    The endpoint reads ``inbox``, ``outbox`` and ``account`` and calls the other methods. Events go to ``context``.
    """

    def __init__(self, connection: ConnectionId, context: EndpointContext) -> None:
        limits = context.limits
        self.connection = connection
        """Id in events, deadlines and calls to the context."""
        self.primary = self
        """Session of the primary connection if this is a lane; otherwise this session."""
        self.lanes: Lanes[Session] = Lanes(self, payload_limit=limits.outbox_bytes, allocate=context.blocks.take)
        """All connections of the pair, shared with the primary's session."""
        self.takes_parts = True
        """Whether this connection carries further parts."""
        self.inbox = ReceiveBuffer()
        self.outbox = SendQueue(control_limit=limits.control_bytes, payload_limit=limits.outbox_bytes)
        self.spending = Spending()
        self.account: Account | None = None
        self.outgoing = OutgoingRequests(connection, context)
        self.incoming = IncomingRequests(connection, context)
        self.is_overrun = False
        """Whether the peer does not read: required frames had no room."""
        self.sent = Traffic()
        self._context = context
        self._offer: Offered | None = None

    # -- life cycle --------------------------------------------------------------------------------------------------

    def open(self, peer: Hashable) -> None:
        """Begin, since the other side has proved to be ``peer``."""
        self.inbox.open()
        self.account = Account(peer)

    def become_lane_of(self, primary: Session) -> bool:
        """Carry parts of ``primary``'s payloads from now on. Return False if it has enough lanes."""
        if not primary.lanes.join(self):
            return False
        self.primary, self.lanes = primary, primary.lanes
        self._touch_lanes()
        return True

    def drop_queued(self) -> None:
        """Drop all data that waits to be sent."""
        self.outbox.clear()
        if not self.is_lane:
            self.lanes.splitter.clear()

    def handle_lost(self, reason: str) -> None:
        """End the session, since the connection is lost. Its requests fail."""
        self.inbox.clear()
        self.outbox.clear()
        self._offer = None
        if not self.is_lane:
            self.lanes.clear()
        elif self.lanes.leave(self):
            self._touch_lanes()
        for number in self.outgoing.numbers:
            self.outgoing.reject(number, RequestError(f"disconnected: {reason}"))
        for number in self.incoming.numbers:
            self.incoming.withdraw(number)

    @property
    def is_lane(self) -> bool:
        """True if the connection is a lane of another one."""
        return self.primary is not self

    @property
    def is_idle(self) -> bool:
        """True if no request, answer or payload in parts is under way."""
        return self.lanes.splitter.is_idle and not self.outgoing.numbers and not self.incoming.numbers

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return self.outbox.queued_bytes + (self.lanes.splitter.queued_bytes if not self.is_lane else 0)

    @property
    def traffic(self) -> Traffic:
        """Bytes so far. A stream in progress counts with its complete chunks."""
        return Traffic(self.sent.sent_control, self.sent.sent_bulk, self.inbox.control_bytes, self.inbox.bulk_bytes)

    # -- out ---------------------------------------------------------------------------------------------------------

    def send_frame(self, frame: bytes) -> bool:
        """Queue a frame that the protocol itself requires."""
        is_queued = self.outbox.put(frame)
        self.is_overrun |= not is_queued
        self._context.touch(self.connection)
        return is_queued

    def send_message(self, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None) -> bool:
        """Queue a message. Return False if there is no room.

        Raises:
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        self._context.touch(self.connection)
        if payload is None:
            return self.outbox.put(encode_frame(FrameKind.MESSAGE, 0, body))
        return self._send_payload(Use.MESSAGE, 0, body, payload, priority, topic)

    def send_request(self, body: bytes, timeout_s: float, max_payload: int) -> OutgoingRequest:
        """Queue a request.

        Raises:
            RequestError: there is no room.
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        number = self.outgoing.begin(max_payload, timeout_s)
        try:
            if not self.outbox.put(encode_request(number, max_payload, body)):
                raise RequestError("too much data waits to be sent to this peer")
        except (RequestError, ValueError):
            self.outgoing.end(number)
            raise
        self._context.touch(self.connection)
        return OutgoingRequest(self.connection, number)

    def expire_request(self, number: int) -> None:
        """Fail a request whose answer did not arrive in time."""
        limits = self.outgoing.limits_of(number)
        assert limits is not None
        self.withdraw_request(number)
        error = RequestError(f"no answer within {limits[1]:g} s")
        self._context.emit(RequestFailed(OutgoingRequest(self.connection, number), error))

    def withdraw_request(self, number: int) -> None:
        """Cancel a request and tell the peer."""
        if self.outgoing.end(number):
            self.lanes.reassembler.withdraw(number)
            self.send_frame(encode_frame(FrameKind.WITHDRAW, number))

    def send_answer(self, number: int, answer: Answer) -> None:
        """Answer a request of the other peer. The answer is dropped if the request was withdrawn.

        Raises:
            ValueError: the body is longer than CONTROL_LIMIT.
        """
        if len(answer.body) > CONTROL_LIMIT:
            raise ValueError(f"an answer's body of {len(answer.body)} bytes; the limit is {CONTROL_LIMIT}")
        max_payload = self.incoming.end(number)
        if max_payload is None:
            return
        if answer.payload is None:
            is_queued = self.outbox.put(encode_frame(FrameKind.ANSWER, number, answer.body))
        else:
            payload = memoryview(answer.payload).cast("B")
            if len(payload) > max_payload:
                self._send_refusal(number, f"the answer has {len(payload)} bytes; the maximum is {max_payload}")
                return
            is_queued = self._send_payload(Use.ANSWER, number, answer.body, payload, answer.priority, None)
        if not is_queued:
            self._send_refusal(number, "busy: too much data waits to be sent to you")

    def refuse_request(self, number: int, text: str) -> None:
        """Refuse a request of the other peer; ``text`` is the reason."""
        if self.incoming.end(number) is not None:
            self._send_refusal(number, text)

    def send_credit(self) -> None:
        """Send the account's new credit to the peer."""
        assert self.account is not None
        self.inbox.granted = self.account.granted
        self.send_frame(encode_credit(self.account.granted))

    def next_control(self) -> Slice | None:
        """Return the next control bytes, to be sent at once, or None."""
        piece = self.outbox.next(0)
        if piece is not None:
            self.sent.sent_control += len(piece.head)
        return piece

    def next_bulk(self, most: int) -> Slice | None:
        """Return the next chunk of a payload; None if there is none, or no credit."""
        self.refill()
        if not self.has_waiting_bulk:
            return None
        piece = self.outbox.next(min(most, self.spending.left))
        if piece is not None:
            self.spending.sent += len(piece.chunk)
            self.sent.sent_control += len(piece.head)
            self.sent.sent_bulk += len(piece.chunk)
        return piece

    @property
    def has_waiting_bulk(self) -> bool:
        """True if there is bulk data with credit, so that only the kernel or the budget holds it back."""
        return self.outbox.has_bulk and self.spending.left > 0

    def refill(self) -> None:
        """Queue parts of payloads that are split over the lanes."""
        if self.takes_parts and not self.lanes.splitter.is_idle:
            self.lanes.refill(self, self.outbox, self.spending.left)

    def _send_payload(
        self, use: Use, request: int, body: bytes, payload: memoryview, priority: float, topic: Hashable | None
    ) -> bool:
        start = Start(use, request, len(payload))
        self._context.touch(self.connection)
        if not self.lanes.splits(len(payload)):
            return self.outbox.put_payload(start, body, payload, priority, topic) is not None
        is_queued = self.lanes.splitter.put(use, request, body, payload, priority, topic)
        self._touch_lanes()
        return is_queued

    def _send_refusal(self, number: int, text: str) -> None:
        """Send a refusal. If it has no room, the peer's own deadline ends its request."""
        self.outbox.put(encode_frame(FrameKind.REFUSAL, number, encode_text(text)))
        self._context.touch(self.connection)

    def _touch_lanes(self) -> None:
        for lane in self.lanes.members:
            self._context.touch(lane.connection)

    # -- in ----------------------------------------------------------------------------------------------------------

    def handle_event(self, event: Event) -> None:
        """Handle a frame or a payload.

        Raises:
            FrameError: it is not allowed at this point.
        """
        match event:
            case Frame():
                self._handle_frame(event.kind, event.stream, event.body)
            case Begun():
                self._handle_stream_start(event)
            case Completed(start=start) if start.part is None:
                self.primary.deliver(start, event.body, event.payload)
            case Completed():
                self.send_frame(encode_frame(FrameKind.ACK, event.stream))
                if (whole := self.lanes.reassembler.complete(event.start)) is not None:
                    self._cancel_duplicates(event.start)
                    self.primary.deliver(*whole)
            case Aborted(start=start):
                if start.part is not None:
                    self.lanes.reassembler.refuse(start)
                if start.use is Use.ANSWER:
                    self.primary.outgoing.reject(start.request, RequestError("the peer stopped its answer"))

    def deliver(self, start: Start, body: Any, payload: memoryview) -> None:
        """Report a complete payload."""
        if start.use is Use.MESSAGE:
            self._context.emit(Message(self.connection, body, payload))
        else:
            self.outgoing.resolve(start.request, Response(body, payload))

    @property
    def has_offer(self) -> bool:
        """True if ``decline_offer`` is due once the user has seen the offer."""
        return self._offer is not None

    def decline_offer(self) -> None:
        """Refuse the offered payload if the user has not accepted it."""
        if (offer := self._offer) is not None:
            self._offer = None
            self._decline_stream(offer.stream, offer.start)

    def accept_offer(self, offer: Offered, body: Any) -> None:
        """Accept the offered payload. Its ``Message`` will have ``body``."""
        if self._offer is offer:
            self._offer = None
            self._receive_stream(offer.stream, offer.start, body)

    def _handle_frame(self, kind: FrameKind, number: int, body: bytes) -> None:
        match kind:
            case FrameKind.MESSAGE:
                self._context.emit(Message(self.connection, body, None))
            case FrameKind.REQUEST:
                if not self.incoming.begin(number, *decode_request(body)):
                    busy = f"busy: {len(self.incoming.numbers)} of your requests are being answered"
                    self._send_refusal(number, busy)
            case FrameKind.ANSWER:
                self.outgoing.resolve(number, Response(body, None))
            case FrameKind.REFUSAL:
                self.outgoing.reject(number, RequestRefused(decode_text(body)))
            case FrameKind.WITHDRAW:
                self.incoming.withdraw(number)
                self.outbox.withdraw(number)
                self._cancel_parts(self.lanes.splitter.withdraw(number))
            case FrameKind.CANCEL:
                # The other side does not want this stream, nor the whole payload that it is part of.
                self.outbox.cancel(number)
                self._cancel_parts(self.lanes.splitter.refuse(self, number))
            case FrameKind.ACK:
                self.lanes.splitter.acknowledge(self, number)
                if self.lanes.splitter.is_idle:
                    self._context.touch(self.primary.connection)
            case FrameKind.CREDIT:
                self.spending.extend(decode_credit(body))
                self._context.touch(self.connection)
            case _:
                raise FrameError(f"a {kind.name} frame is not allowed at this point")

    def expire_answer(self, number: int) -> None:
        """Refuse a request that the user did not answer in time."""
        self.incoming.withdraw(number)
        self._send_refusal(number, f"the answer took longer than {self._context.limits.answer_s:g} s")

    def _cancel_parts(self, parts: list[tuple[Session, int]]) -> None:
        for lane, stream in parts:
            lane.outbox.cancel(stream)
            self._context.touch(lane.connection)
        self._context.touch(self.connection)
        self._context.touch(self.primary.connection)

    def _handle_stream_start(self, event: Begun) -> None:
        """Find the place of a beginning stream, or offer it to the user."""
        start = event.start
        known = PayloadState.NEW if start.part is None else self.lanes.reassembler.state_of(start)
        if known is PayloadState.OPEN:
            self.inbox.receive_into(event.stream, self.lanes.reassembler.place_of(start), event.body)
        elif known is PayloadState.OVER or not self._has_room(start):
            self._decline_stream(event.stream, start)
        elif start.use is Use.MESSAGE:
            self._offer = Offered(self.primary.connection, self.connection, event.stream, start, event.body)
            self._context.emit(self._offer)
        elif self.primary._wants_answer(start):
            self._receive_stream(event.stream, start, event.body)
        else:
            self._decline_stream(event.stream, start)

    def _has_room(self, start: Start) -> bool:
        held_bytes = self.inbox.held_bytes if start.part is None else self.lanes.reassembler.held_bytes
        return held_bytes + start.total <= self._context.limits.inbox_bytes

    def _wants_answer(self, start: Start) -> bool:
        """Return whether the payload of an answer is wanted."""
        limits = self.outgoing.limits_of(start.request)
        if limits is not None and start.total > limits[0]:
            error = RequestError(f"the answer has {start.total} bytes; the maximum is {limits[0]}")
            self.outgoing.reject(start.request, error)
            return False
        return limits is not None

    def _receive_stream(self, stream: int, start: Start, body: Any) -> None:
        if start.part is not None:
            self.lanes.reassembler.admit(start, body)
            self.inbox.receive_into(stream, self.lanes.reassembler.place_of(start), body)
        elif start.size:
            self.inbox.receive_into(stream, self._context.blocks.take(start.size), body)
        else:
            self.primary.deliver(start, body, memoryview(bytearray()))

    def _decline_stream(self, stream: int, start: Start) -> None:
        if start.part is not None:
            self.lanes.reassembler.refuse(start)
        self.send_frame(encode_frame(FrameKind.CANCEL, stream))

    def _cancel_duplicates(self, start: Start) -> None:
        """Drop and cancel streams that bring parts of a completed payload again."""
        assert start.part is not None
        for lane in self.lanes.members:
            for stream in lane.inbox.drop(start.part.payload):
                lane.send_frame(encode_frame(FrameKind.CANCEL, stream))
