"""Requests over one connection: the asking half and the answering half.

Rules of this file:
1. Each half is bounded: so many questions of ours wait, so many of the peer's are being answered.
2. Every question ends: answered, refused, too large, timed out, or disconnected. A question that is given up is
   cancelled at the other side, so that no answer travels in vain.
3. A defect in answering is logged here and refused there; the connection stays.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

from msgspec import Struct

from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.wire.answers import Answer, RequestError, RequestRefused, Response
from p2pdiloco.wire.frames import (
    PAYLOAD_LIMIT,
    STREAM_WRAP,
    FrameError,
    Kind,
    encode_frame,
    encode_sized,
    encode_text,
    split_size,
)

__all__ = ["Answer", "Answerer", "Asker", "RequestError", "RequestRefused", "Response"]

Put = Callable[[bytes], bool]
"""Queues a control frame; False: no room."""
PutResponse = Callable[[int, bytes, memoryview, float], bool]
"""Queues the answer with a payload to a request (number, body, payload, priority); False: no room."""


class _Question(Struct):
    done: asyncio.Future[Response]
    max_payload: int


class Asker:
    """Our questions that wait for an answer."""

    def __init__(self, put: Put, *, limit: int, queued: Callable[[], None], given_up: Callable[[int], None]) -> None:
        self._put = put
        self._given_up = given_up
        """Called with the number of a question whose answer is not wanted any more."""
        self._queued = queued
        """Called when something waits to be sent."""
        self._limit = limit
        self._waiting: dict[int, _Question] = {}
        self._numbers = itertools.count(1)

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    async def ask(self, body: bytes, *, timeout_s: float, max_payload: int) -> Response:
        """Ask, and wait for the answer.

        Raises:
            RequestError: no answer; the text says why.
        """
        if len(self._waiting) >= self._limit:
            raise RequestError(f"{len(self._waiting)} requests to this peer wait already")
        number = next(self._numbers) % STREAM_WRAP
        frame = encode_sized(Kind.REQUEST, number, min(max_payload, PAYLOAD_LIMIT), body)
        if not self._put(frame):
            raise RequestError("too much waits to be sent to this peer")
        question = self._waiting[number] = _Question(asyncio.get_running_loop().create_future(), max_payload)
        try:
            self._queued()
            async with asyncio.timeout(timeout_s):
                return await question.done
        except TimeoutError:
            raise RequestError(f"no answer within {timeout_s:g} s") from None
        finally:
            if self._waiting.pop(number, None) is not None:
                self._put(encode_frame(Kind.RESPONSE_CANCEL, number, b""))
                self._given_up(number)
                self._queued()

    def admit(self, number: int, size: int) -> bool:
        """Whether the answer's payload may come."""
        question = self._waiting.get(number)
        if question is None:
            return False
        if size > question.max_payload:
            self.reject(number, RequestError(f"the answer has {size} bytes, more than {question.max_payload}"))
            return False
        return True

    def resolve(self, number: int, response: Response) -> None:
        """The answer is here. One to a question that was given up is dropped."""
        question = self._waiting.pop(number, None)
        if question is not None and not question.done.done():
            question.done.set_result(response)

    def reject(self, number: int, error: RequestError) -> None:
        """There will be no answer."""
        question = self._waiting.pop(number, None)
        if question is not None and not question.done.done():
            question.done.set_exception(error)

    def disconnect(self, reason: str) -> None:
        """No answer will come any more."""
        for number in list(self._waiting):
            self.reject(number, RequestError(f"disconnected: {reason}"))


class Answerer:
    """The peer's questions that are being answered, each in a task of ``tasks``."""

    def __init__(
        self,
        answer: Callable[[bytes], Awaitable[Answer]],
        *,
        put: Put,
        put_response: PutResponse,
        tasks: Tasks,
        limit: int,
        answer_s: float,
        ended: Callable[[], None],
    ) -> None:
        self._answer = answer
        self._put = put
        self._put_response = put_response
        self._tasks = tasks
        self._limit = limit
        self._answer_s = answer_s
        self._ended = ended
        self._running: dict[int, asyncio.Task[None]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._running

    def begin(self, number: int, body: bytes) -> None:
        """The peer asks.

        Raises:
            FrameError: malformed, or a number that is in use.
        """
        max_payload, question = split_size(body)
        if number in self._running:
            raise FrameError(f"request {number} came twice")
        if len(self._running) >= self._limit:
            self._refuse(number, f"busy: {len(self._running)} requests of yours are being answered")
            return
        task = self._tasks.spawn(self._run(number, question, max_payload), name=f"answer {number}")
        self._running[number] = task
        task.add_done_callback(lambda done: self._done(number, done))

    def cancel(self, number: int) -> None:
        """The peer does not want the answer any more."""
        if (task := self._running.pop(number, None)) is not None:
            task.cancel()

    def disconnect(self) -> None:
        """Nobody is there to answer."""
        for task in self._running.values():
            task.cancel()

    async def _run(self, number: int, question: bytes, max_payload: int) -> None:
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await self._answer(question)
            self._reply(number, answer, max_payload)
        except RequestRefused as refusal:
            self._refuse(number, str(refusal))
        except TimeoutError:
            self._refuse(number, f"the answer took longer than {self._answer_s:g} s")
        except Exception:
            self._refuse(number, "an internal error; the peer's log has it")
            raise

    def _reply(self, number: int, answer: Answer, max_payload: int) -> None:
        if answer.payload is None:
            if not self._put(encode_frame(Kind.RESPONSE, number, answer.body)):
                raise RequestRefused("busy: too much waits to be sent to you")
            return
        payload = memoryview(answer.payload).cast("B")
        if len(payload) > max_payload:
            raise RequestRefused(f"the answer has {len(payload)} bytes, more than {max_payload}")
        if not self._put_response(number, answer.body, payload, answer.priority):
            raise RequestRefused("busy: too much waits to be sent to you")

    def _refuse(self, number: int, text: str) -> None:
        """If even that has no room, the asker's own deadline ends its wait."""
        self._put(encode_frame(Kind.REFUSAL, number, encode_text(text)))
        self._ended()

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        if self._running.get(number) is task:
            del self._running[number]
        self._ended()
