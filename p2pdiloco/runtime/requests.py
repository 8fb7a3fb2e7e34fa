"""Requests as whoever waits sees them: a question is a future, the answer to another's question is a task.

What goes over the wire, and what has become of it, the endpoint says (net/session.py).
"""

from __future__ import annotations

import asyncio

from p2pdiloco.net import events as ev
from p2pdiloco.net.endpoint import Endpoint
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.runtime.handler import TransportHandler
from p2pdiloco.runtime.pump import Pump
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.wire.request_reply import RequestRefused, Response


class Requests:
    """Ours and the others'."""

    def __init__(self, endpoint: Endpoint, pump: Pump, tasks: Tasks, handler: TransportHandler) -> None:
        self._endpoint = endpoint
        self._pump = pump
        self._tasks = tasks
        self._handler = handler
        self._asked: dict[ev.Question, asyncio.Future[Response]] = {}
        self._answering: dict[ev.Asking, asyncio.Task[None]] = {}

    async def ask(self, peer: PeerId, body: bytes, timeout_s: float, max_payload: int) -> Response:
        """As ``Transport.request``."""
        question = self._endpoint.ask(peer, body, self._pump.now(), timeout_s=timeout_s, max_payload=max_payload)
        answered: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._asked[question] = answered
        self._pump.turn()
        try:
            return await answered
        finally:
            if self._asked.pop(question, None) is not None:
                self._endpoint.withdraw(question)
                self._pump.turn()

    def tell(self, event: ev.Asked | ev.Withdrawn | ev.Answered | ev.Unanswered) -> None:
        """To whom it concerns."""
        match event:
            case ev.Asked(asking, body):
                task = self._tasks.spawn(self._answer(asking, body), name=f"answer {asking.number}")
                self._answering[asking] = task
                task.add_done_callback(lambda _: self._answering.pop(asking, None))
            case ev.Withdrawn(asking):
                if (running := self._answering.get(asking)) is not None:
                    running.cancel()
            case ev.Answered(question, response):
                if (answered := self._asked.pop(question, None)) is not None and not answered.done():
                    answered.set_result(response)
            case ev.Unanswered(question, error):
                if (answered := self._asked.pop(question, None)) is not None and not answered.done():
                    answered.set_exception(error)

    async def _answer(self, asking: ev.Asking, body: bytes) -> None:
        try:
            self._endpoint.answer(asking, await self._handler.answer(asking.connection.peer, body))
        except RequestRefused as refusal:
            self._endpoint.refuse(asking, str(refusal))
        except Exception:
            self._endpoint.refuse(asking, "an internal error; the peer's log has it")
            raise
        finally:
            self._pump.turn()
