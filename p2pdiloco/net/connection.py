"""One connection to one peer, without I/O: its life cycle, from the handshake to the goodbye.

Decrypted bytes come in through ``buffer`` and ``advance``; ``handle_next_frame`` handles one frame of them. Events,
deadlines and pending output go into the endpoint's context (net/context.py). net/endpoint.py shows how an endpoint is
driven.

Rules of this file:
1. The session (net/session.py) handles the frames of proved peers. A connection holds its session and knows no other
   connection. The endpoint (net/endpoint.py) does what concerns several connections.
2. A fault of the peer ends its connection with one reason, and disturbs nothing else.
3. States: connecting -> greeting -> open -> (retiring: a duplicate that only finishes what it has begun) -> closed.
   Proved or Failed is reported once.
4. A connection has one deadline at a time, in each state but the open one: connecting, greeting, retiring, parting,
   closing. An open connection relies on the kernel to notice a dead path (keepalive and TCP_USER_TIMEOUT,
   transport/sockets.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

from p2pdiloco.net.context import Due, EndpointContext
from p2pdiloco.net.events import Closing, ConnectionId, Failed, Proved
from p2pdiloco.net.frames import (
    HANDSHAKE_KINDS,
    FrameKind,
    GoodbyeCode,
    decode_goodbye,
    encode_frame,
    encode_goodbye,
)
from p2pdiloco.net.handshake import Dialled, Handshake, HandshakeError, Hello, MismatchError, Role
from p2pdiloco.net.receive_buffer import Frame
from p2pdiloco.net.session import Session
from p2pdiloco.protocol.ids import PeerId

# -- Closing -----------------------------------------------------------------------------------------------------------


class CloseState:
    """Progress of one connection's closing: it parts, retires for another connection, or is over."""

    __slots__ = ("_retired", "goodbye", "has_failed", "is_retiring", "over", "parting")

    def __init__(self) -> None:
        self.over: str | None = None
        """Reason for the end, once nothing is read or sent any more."""
        self.parting: str | None = None
        """Reason for leaving, once this side leaves: queued data is still sent, but nothing new."""
        self.goodbye: bytes | None = None
        """The GOODBYE frame, while it waits for acknowledgements of parts."""
        self.is_retiring = False
        """Whether another connection replaces this one, which finishes what it has begun."""
        self.has_failed = False
        """Whether Failed was reported."""
        self._retired: set[str] = set()
        """Sides ("us", "them") that have announced that another connection stays."""

    @property
    def is_ending(self) -> bool:
        """True if the connection is parting or over."""
        return self.over is not None or self.parting is not None

    @property
    def reason(self) -> str:
        """Reason for the end, or for the coming one; empty if there is none."""
        return self.over or self.parting or ""

    @property
    def have_both_retired(self) -> bool:
        """True if both sides have announced that another connection stays."""
        return len(self._retired) == 2

    def record_retired(self, who: str) -> bool:
        """Record that ``who`` ("us" or "them") announced that another connection stays. Return whether it is news."""
        is_news = who not in self._retired
        self._retired.add(who)
        return is_news


# -- Connection --------------------------------------------------------------------------------------------------------


class Connection:
    """One connection to one peer, from the handshake to the goodbye; see the module's rules."""

    def __init__(
        self,
        id: ConnectionId,
        context: EndpointContext,
        *,
        role: Role,
        host: str,
        dialled: Dialled,
    ) -> None:
        self.id = id
        self.role = role
        self.host = host
        """Numeric address of the other side's machine."""
        self.received_at = context.now
        """Time at which bytes were last received."""
        self.local: Hello | None = None
        """This peer's HELLO, once TLS is established."""
        self.remote: Hello | None = None
        """The other side's HELLO, once it is proved."""
        self.session = Session(id, context)
        self.is_paused = True
        """Whether the socket does not exist yet, or accepts no more data at present."""
        self.is_lost = False
        """Whether the socket is closed."""
        self._copied: deque[memoryview] = deque()
        """Data from ``receive_data`` that has not been parsed yet."""
        self._context = context
        self._dialled = dialled
        self._handshake: Handshake | None = None
        self._end = CloseState()
        self._ignores_input = False
        """Whether input is discarded, because the peer was refused or broke the rules."""
        self._overdue_reason = "no connection was established in time"
        self._set_deadline(context.limits.handshake_s, self._overdue_reason)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def peer(self) -> PeerId:
        """The peer at the other end. Only after the handshake."""
        assert self.remote is not None
        return PeerId(self.remote.peer)

    @property
    def is_proved(self) -> bool:
        return self.remote is not None

    @property
    def is_open(self) -> bool:
        """True if the peer is proved and the connection is not ending."""
        return self.remote is not None and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """True if the connection is parting or over."""
        return self._end.is_ending

    @property
    def is_over(self) -> bool:
        """True if nothing is read or sent any more."""
        return self._end.over is not None

    @property
    def reason(self) -> str:
        """Reason for the end, or for the coming one; empty if there is none."""
        return self._end.reason

    @property
    def has_waiting_bulk(self) -> bool:
        """True if there is bulk data with credit, so that only the kernel or the budget holds it back."""
        return self._end.over is None and self.session.has_waiting_bulk

    @property
    def greeting(self) -> Hello:
        """The dialler's HELLO, which names lane, bond and attempt. Only after the handshake."""
        hello = self.local if self.role is Role.DIALLER else self.remote
        assert hello is not None
        return hello

    # -- called by the endpoint --------------------------------------------------------------------------------------

    def handle_tls_established(self, fingerprint: bytes) -> None:
        """Send HELLO, since TLS is established. ``fingerprint`` is that of the listener's certificate."""
        if self._end.over is not None:
            return
        self.is_paused = False
        self._handshake = self._context.handshake_factory.handshake(self.role, fingerprint, self._dialled)
        self.local = self._handshake.hello
        self._set_deadline(self._context.limits.handshake_s, "the handshake took too long")
        self.session.send_frame(encode_frame(FrameKind.HELLO, 0, self._handshake.hello_body))

    def handle_lost(self, reason: str) -> None:
        """End the connection, since its socket is closed."""
        self.is_lost = True
        reason = self._end.over = self._end.reason or reason
        self._set_deadline(None)
        self._fail_handshake(ConnectionError(reason))
        self._release()
        self.session.handle_lost(reason)

    def handle_deadline(self) -> None:
        """Close at once, since the deadline has passed."""
        if self._end.over is not None:
            self._context.emit(Closing(self.id, is_flushed=False))
        self.abort(self._overdue_reason)

    def send(self, body: bytes, payload: memoryview | None, priority: float, topic: Hashable | None = None) -> bool:
        """Queue a message. Return False if there is no room or the connection is not open.

        Raises:
            ValueError: ``body`` is longer than CONTROL_LIMIT.
        """
        return self.is_open and self.session.send_message(body, payload, priority, topic)

    def retire(self) -> None:
        """Finish what has begun, then close: another connection serves. The other side does the same."""
        if self._end.is_retiring or self._end.over is not None:
            return
        self._end.is_retiring = True
        self._set_deadline(self._context.limits.retire_s, "the duplicate connection did not finish in time")
        self._context.touch(self.id)

    def close(self, code: GoodbyeCode, reason: str) -> None:
        """Send queued data, then GOODBYE, then close; all within ``part_s``."""
        if self.is_ending:
            return
        self._end.parting = reason
        self._set_deadline(self._context.limits.part_s, reason)
        self._end.goodbye = encode_goodbye(code, reason)
        self.session.takes_parts = not self.session.is_lane
        self._context.touch(self.id)

    def abort(self, reason: str) -> None:
        """Close now; queued data is lost."""
        if self._end.over is None:
            self._end.over = reason
            self._release()
            self._set_deadline(None)
            self._context.emit(Closing(self.id, is_flushed=False))

    def turn_away(self, code: GoodbyeCode, reason: str) -> None:
        """Refuse a connection that has not served yet: send the reason and read nothing more."""
        self._stop_listening()
        self.close(code, reason)

    def break_off(self, reason: str) -> None:
        """Close because the peer broke the rules: send the reason, drop queued data, and read nothing more."""
        self.session.drop_queued()
        self.turn_away(GoodbyeCode.BROKEN, reason)

    def buffer(self) -> memoryview:
        """Return memory for the next received bytes. It is never empty and valid until ``advance``."""
        return self.session.inbox.buffer()

    def advance(self, count: int) -> bool:
        """Take ``count`` bytes that were read into ``buffer()``.

        Return whether there may be something to do; the caller then goes through the endpoint's events.
        """
        if self._ignores_input or self._end.over is not None:
            return False
        if not self.session.inbox.advance(count) and self._context.grants.bytes_per_s is None:
            return False
        self._context.unread[self.id] = None
        return True

    def receive_data(self, data: bytes) -> None:
        """Take received data, as ``buffer`` and ``advance`` do, but with a copy."""
        if not self._ignores_input and self._end.over is None:
            self._copied.append(memoryview(data))
            self._context.unread[self.id] = None

    def handle_next_frame(self) -> bool:
        """Handle the next received frame. Return whether there may be another one.

        Raises:
            FrameError: the peer broke the format, or a rule of the session. The endpoint breaks off the connection,
                and for a lane also its primary.
        """
        self.received_at = self._context.now
        self.session.decline_offer()
        if self._ignores_input or self._end.over is not None:
            return False
        try:
            event = self.session.inbox.next_event()
            if event is None:
                return self._read_copied()
            if isinstance(event, Frame) and event.kind in HANDSHAKE_KINDS:
                self._handle_handshake_frame(event.kind, event.body)
            else:
                self.session.handle_event(event)
        except HandshakeError as error:
            self._fail_handshake(error)
            self._stop_listening()
            self.close(GoodbyeCode.REFUSED, str(error))
        return self.has_unread

    @property
    def has_unread(self) -> bool:
        """True if ``handle_next_frame`` has something to do."""
        return self.session.inbox.has_more or self.session.has_offer or bool(self._copied)

    def advance_closing(self) -> None:
        """Take the next step of closing: send GOODBYE after all other data, and close once it has been written."""
        session, end = self.session, self._end
        if end.over is not None or not (end.parting is not None or end.is_retiring or session.is_overrun):
            return
        if session.is_overrun:
            self.abort("the peer does not read")
            return
        if end.goodbye is not None and (session.is_lane or session.lanes.splitter.is_idle):
            session.outbox.put_goodbye(end.goodbye)
            end.goodbye = None
        if not session.outbox.is_empty or self.is_paused:
            return
        if end.parting is not None and end.goodbye is None:  # GOODBYE has been sent or queued
            self._close_socket(end.reason)
        elif end.is_retiring and session.is_idle:
            if end.record_retired("us"):
                session.send_frame(encode_goodbye(GoodbyeCode.DUPLICATE, "another connection of the two peers stays"))
            else:
                self._close_if_both_retired()

    def _read_copied(self) -> bool:
        if not self._copied:
            return False
        buffer, data = self.buffer(), self._copied.popleft()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        if count < len(data):
            self._copied.appendleft(data[count:])
        self.session.inbox.advance(count)
        return True

    # -- reading -----------------------------------------------------------------------------------------------------

    def _handle_handshake_frame(self, kind: FrameKind, body: bytes) -> None:
        assert self._handshake is not None
        match kind:
            case FrameKind.HELLO:
                proof = self._handshake.proof_after(body)
                if self.role is Role.DIALLER:
                    self.session.send_frame(encode_frame(FrameKind.PROOF, 0, proof))
            case FrameKind.PROOF:
                self.remote = self._handshake.finish(body)
                if self.role is Role.LISTENER:
                    self.session.send_frame(encode_frame(FrameKind.PROOF, 0, self._handshake.proof))
                self._set_deadline(None)
                self.session.open(self.peer)
                self._context.shaper.open(self.peer, self.id)
                self._context.touch(self.id)
                self._context.emit(Proved(self.id))
            case _:
                self._handle_goodbye(*decode_goodbye(body))

    def _handle_goodbye(self, code: GoodbyeCode, reason: str) -> None:
        if code is GoodbyeCode.DUPLICATE and self.remote is not None:
            self._end.record_retired("them")
            if not self._end.is_retiring:
                # The other connection may still be on its way here. Until it arrives, this one serves.
                self._set_deadline(self._context.limits.retire_s, "no other connection was established")
            self._close_if_both_retired()
            return
        self._fail_handshake(MismatchError(reason or "the peer left"))
        self._close_socket(reason or "the peer left")

    def _stop_listening(self) -> None:
        self._ignores_input = True
        self.session.inbox.clear()

    # -- parting -----------------------------------------------------------------------------------------------------

    def _fail_handshake(self, error: Exception) -> None:
        """Report that the handshake has failed, unless the peer is proved."""
        if self.remote is None and not self._end.has_failed:
            self._end.has_failed = True
            self._context.emit(Failed(self.id, error))

    def _release(self) -> None:
        """Drop queued data and leave the budgets."""
        self._context.shaper.close(self.id)
        if self.session.account is not None:
            self._context.grants.close(self.session.account)
        self.session.outbox.clear()
        self.session.inbox.clear()

    def _close_socket(self, reason: str) -> None:
        """Close the socket once written data has been flushed, within ``part_s``."""
        self._end.over = reason
        self._release()
        self._set_deadline(self._context.limits.part_s, reason)
        self._context.emit(Closing(self.id, is_flushed=True))

    def _close_if_both_retired(self) -> None:
        if self._end.have_both_retired and self._end.over is None:
            self._close_socket("another connection of the two peers stays")

    def _set_deadline(self, delay_s: float | None, reason: str = "") -> None:
        """Set the connection's only deadline; None removes it."""
        self._overdue_reason = reason
        if delay_s is None:
            self._context.deadlines.cancel((Due.CONNECTION, self.id))
        else:
            self._context.deadlines.set((Due.CONNECTION, self.id), self._context.now + delay_s)
