"""Small parts of the runtime alone: questions and answers, introductions taken out of them, turns, congestion."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.nat.messages import TICKET_BYTES, Called
from p2pdiloco.nat.request_router import RequestRouter
from p2pdiloco.net import events as ev
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import sockets
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.sockets import Congestion
from p2pdiloco.transport.transport import EndpointDriver, Requests
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

BOB = PeerId("bob")


class Endpoint:
    """What a pump and requests ask of one."""

    def __init__(self) -> None:
        self.happened: list[Any] = []
        self.said: list[tuple[str, object]] = []
        self.deadlines: list[float] = []
        self.woken = 0
        self.has_control = self.has_new_deadline = False

    @property
    def has_events(self) -> bool:
        return bool(self.happened)

    def events(self, now: float) -> list[Any]:
        happened, self.happened = self.happened, []
        return happened

    def to_send(self, now: float, bulk_bytes: int) -> list[Any]:
        self.has_control = False
        return [("connection", bulk_bytes)]

    def next_deadline(self) -> float | None:
        self.has_new_deadline = False
        return self.deadlines.pop(0) if self.deadlines else None

    def wake(self, now: float) -> None:
        self.woken += 1

    def connection(self, connection: int) -> Line:
        return Line()

    def ask(self, peer: PeerId, body: bytes, now: float, **limits: object) -> str:
        return "question"

    def withdraw(self, question: object) -> None:
        self.said.append(("withdrawn", question))

    def answer(self, asking: object, answer: object) -> None:
        self.said.append(("answer", answer))

    def refuse(self, asking: object, reason: str) -> None:
        self.said.append(("refuse", reason))


class Line:
    peer = BOB


class Inner:
    """Answers, refuses, has a defect, or never comes to an end."""

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        match body:
            case b"no":
                raise RequestRefused("not you")
            case b"defect":
                raise KeyError(body)
            case b"long":
                await asyncio.Event().wait()
        return Answer(b"re: " + body)


def made() -> tuple[Endpoint, Requests]:
    endpoint = Endpoint()
    pump: Any = SimpleNamespace(turn=lambda: None, now=lambda: 0.0)
    return endpoint, Requests(endpoint, pump, Tasks(), Inner())  # type: ignore[arg-type]


def test_a_question_gets_its_answer_or_its_error_and_is_withdrawn_by_who_waits_no_more() -> None:
    async def main() -> None:
        endpoint, requests = made()
        for event, expected in (
            (ev.Answered("question", Response(b"yes", None)), b"yes"),  # type: ignore[arg-type]
            (ev.Unanswered("question", RequestError("lost")), None),  # type: ignore[arg-type]
        ):
            asking = asyncio.ensure_future(requests.ask(BOB, b"?", 1.0, 0))
            await asyncio.sleep(0)
            requests.tell(event)
            if expected is None:
                with pytest.raises(RequestError, match="lost"):
                    await asking
            else:
                assert (await asking).body == expected
        assert not endpoint.said
        asking = asyncio.ensure_future(requests.ask(BOB, b"?", 1.0, 0))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert endpoint.said == [("withdrawn", "question")]

    asyncio.run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_anothers_question_is_answered_refused_or_dropped_when_it_is_withdrawn() -> None:
    async def main() -> None:
        endpoint, requests = made()
        asking = ev.Asking(ev.ConnectionId(0), 1)
        for body in (b"hello", b"no", b"defect"):
            requests.tell(ev.Asked(asking, body))
            for _ in range(3):
                await asyncio.sleep(0)
        assert [what for what, _ in endpoint.said] == ["answer", "refuse", "refuse"]
        assert endpoint.said[1][1] == "not you"
        assert "internal error" in str(endpoint.said[2][1]), "what failed here is nobody's business"
        requests.tell(ev.Asked(asking, b"long"))
        await asyncio.sleep(0)
        requests.tell(ev.Withdrawn(asking))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not requests._answering
        assert len(endpoint.said) == 3

    asyncio.run(main())


def test_introductions_go_to_who_introduces_and_all_else_to_the_peer() -> None:
    async def main() -> None:
        handler = RequestRouter(Inner())  # type: ignore[arg-type]
        assert (await handler.answer(BOB, b"hello")).body == b"re: hello"
        call = encode(Called(Identity.ephemeral().peer_id, bytes(TICKET_BYTES), dials=True))
        with pytest.raises(RequestRefused, match="meets nobody"):
            await handler.answer(BOB, call)
        with pytest.raises(RequestRefused, match="malformed"):
            await handler.answer(BOB, call[:-3])

    asyncio.run(main())


def test_a_pump_hands_out_writes_and_comes_back_at_the_deadline() -> None:
    async def main() -> None:
        endpoint, told, written = Endpoint(), list[object](), list[object]()
        pump = EndpointDriver(endpoint, told.append, lambda *piece: written.append(piece))  # type: ignore[arg-type]
        pump.start()
        endpoint.happened, endpoint.has_control = ["first"], True
        endpoint.deadlines = [pump.now() + 0.002]
        pump.turn()
        assert told == ["first"]
        assert written == [("connection", 0)], "control at once, bulk in a turn of its own"
        while not endpoint.woken:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert len(written) > 1
        endpoint.deadlines = [pump.now() + 60.0]
        pump.turn_soon()
        pump.stop()
        woken = endpoint.woken
        await asyncio.sleep(0)
        assert endpoint.woken == woken

    asyncio.run(main())


def test_a_kernel_that_refuses_a_congestion_control_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    paths: list[Any] = [None, SimpleNamespace(congestion="bbr"), SimpleNamespace(congestion="cubic")]
    noted = Congestion("bbr")
    for path in (*paths, *paths):
        noted.note(path)
    assert noted._has_warned
    assert sockets.count(paths) == {"bbr": 1, "cubic": 1}
    quiet = Congestion("")
    quiet.note(paths[2])
    assert not quiet._has_warned
