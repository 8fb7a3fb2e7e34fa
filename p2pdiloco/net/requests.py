"""Requests over one connection: the questions that we asked, and those that we are asked.

Rules of this file:
1. Each half is bounded: so many questions of ours wait, so many of the peer's are being answered.
2. Every question ends once: answered, refused, too large, timed out, withdrawn, or disconnected.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from p2pdiloco.net.agenda import Agenda
from p2pdiloco.net.commons import Due
from p2pdiloco.net.events import Answered, Asked, Asking, Question, Unanswered, Withdrawn
from p2pdiloco.net.frames import STREAM_WRAP, FrameError
from p2pdiloco.wire.request_reply import RequestError, Response

if TYPE_CHECKING:
    from p2pdiloco.net.connection import Connection


class Questions:
    """Ours. ``connection`` is whose they are, for events and deadlines."""

    def __init__(self, connection: Connection, agenda: Agenda, limit: int) -> None:
        self._connection = connection
        self._agenda = agenda
        self._limit = limit
        self._waiting: dict[int, tuple[int, float]] = {}
        """By number: bytes that the answer's payload may have, and the seconds that were given for it."""
        self._numbers = itertools.count(1)

    @property
    def numbers(self) -> list[int]:
        """Of those that wait for an answer."""
        return list(self._waiting)

    def begin(self, max_payload: int, timeout_s: float) -> int:
        """The number of a new question.

        Raises:
            RequestError: too many wait.
        """
        if len(self._waiting) >= self._limit:
            raise RequestError(f"{len(self._waiting)} requests to this peer wait already")
        number = next(self._numbers) % STREAM_WRAP
        self._waiting[number] = (max_payload, timeout_s)
        self._agenda.deadlines.set((Due.QUESTION, self._connection, number), self._agenda.now + timeout_s)
        return number

    def most_bytes(self, number: int) -> int | None:
        """What the answer's payload may have; None: the question does not wait."""
        entry = self._waiting.get(number)
        return entry[0] if entry is not None else None

    def too_late(self, number: int) -> RequestError:
        """What is said at the deadline."""
        return RequestError(f"no answer within {self._waiting[number][1]:g} s")

    def end(self, number: int) -> bool:
        """Nobody waits for the answer any more. False: nobody did."""
        self._agenda.deadlines.cancel((Due.QUESTION, self._connection, number))
        self._agenda.touch(self._connection)
        return self._waiting.pop(number, None) is not None

    def resolve(self, number: int, response: Response) -> None:
        """The answer is here. One to a question that was given up is dropped."""
        if self.end(number):
            self._agenda.tell(Answered(Question(self._connection, number), response))

    def reject(self, number: int, error: RequestError) -> None:
        """There will be no answer."""
        if self.end(number):
            self._agenda.tell(Unanswered(Question(self._connection, number), error))


class Askings:
    """The peer's."""

    def __init__(self, connection: Connection, agenda: Agenda, limit: int) -> None:
        self._connection = connection
        self._agenda = agenda
        self._limit = limit
        self._open: dict[int, int] = {}
        """By number: bytes that the answer's payload may have."""

    @property
    def numbers(self) -> list[int]:
        """Of those that are being answered."""
        return list(self._open)

    def begin(self, number: int, max_payload: int, body: bytes, answer_s: float) -> bool:
        """The peer asks; an answer may take ``answer_s``. False: it asks too much at once.

        Raises:
            FrameError: a number that is in use.
        """
        if number in self._open:
            raise FrameError(f"request {number} came twice")
        if len(self._open) >= self._limit:
            return False
        self._open[number] = max_payload
        self._agenda.deadlines.set((Due.ASKING, self._connection, number), self._agenda.now + answer_s)
        self._agenda.tell(Asked(Asking(self._connection, number), body))
        return True

    def end(self, number: int) -> int | None:
        """It is answered. The bytes that the answer's payload may have; None: nobody wants it."""
        self._agenda.deadlines.cancel((Due.ASKING, self._connection, number))
        self._agenda.touch(self._connection)
        return self._open.pop(number, None)

    def withdraw(self, number: int) -> bool:
        """Nobody wants the answer any more. False: nobody did."""
        is_open = self.end(number) is not None
        if is_open:
            self._agenda.tell(Withdrawn(Asking(self._connection, number)))
        return is_open
