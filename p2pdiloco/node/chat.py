"""Continues texts with a run's newest model while it trains: for the page (``--chat``) and ``p2pdiloco chat``.

Rules of this file:
1. A version that the page answers with is at most ``FRESH_S`` older than the peer's: if the last checkpoint is older,
   one is written first.
2. A process of its own (``main``) builds the model and samples. It keeps the model until there is another version.
3. One question at a time. Its length, its answer's, and the time for it are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from p2pdiloco.node.answering_process import AnsweringProcess, NoAnswerError, answer_lines
from p2pdiloco.node.results import find_result
from p2pdiloco.observability.snapshot import BusyError, Reply
from p2pdiloco.peer.checkpoint import places
from p2pdiloco.training.generation import Sampling, writer
from p2pdiloco.util.errors import UserError

PROGRAM = "p2pdiloco.node.chat"
# Time for an answer, that for starting the process included.
ANSWER_S = 120.0
# Least time between two checkpoints that are written for questions.
FRESH_S = 30.0
TOKENS = 120


class ChatQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A text to continue, with the run whose model does it."""

    source: str
    """A run's name or a folder with its state, as of ``find_result``; ``state`` and ``run`` likewise."""
    state: str
    run: str | None = None
    prompt: str = ""
    sampling: Sampling = Sampling(tokens=TOKENS)
    model: str | None = None
    """Folder with the weights that the run's adapters are for."""
    tokenizer: str | None = None


class Narrator:
    """Continues texts. Keeps the model of the newest version."""

    def __init__(self) -> None:
        self._write: Callable[[str, Sampling], str] | None = None
        self._seen: object = None
        self._step = 0

    def answer(self, question: ChatQuestion) -> Reply:
        """Return the continuation, or why there is none. Blocks."""
        try:
            seen = (question.source, question.run, _written(Path(question.source)), _written(Path(question.state)))
            if self._write is None or seen != self._seen:
                result = find_result(question.source, Path(question.state), question.run)
                made = result.checkpoint
                self._write = writer(made.manifest, made.theta, model=question.model, tokenizer=question.tokenizer)
                self._seen, self._step = seen, result.step
            return Reply(text=self._write(question.prompt, question.sampling), step=self._step)
        except OSError as error:
            return Reply(error=f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (UserError, ValueError) as error:
            return Reply(error=str(error))


def _written(folder: Path) -> list[tuple[str, int]]:
    """Return the checkpoints in ``folder``, and when each was written."""
    found = []
    for path in (path for place in places([folder]) for path in place.glob("state-*.json")):
        with suppress(FileNotFoundError):  # a newer one has replaced it
            found.append((str(path), path.stat().st_mtime_ns))
    return sorted(found)


class Chat:
    """Answers the page of a node."""

    def __init__(self, question: ChatQuestion, log_path: Path, save: Callable[[], Awaitable[bool]]) -> None:
        """
        Args:
            question: one without a text.
            log_path: file for what the process that answers prints.
            save: writes a checkpoint of the peer's state, if that is new.
        """
        self._question = question
        self._save = save
        self._process = AnsweringProcess(PROGRAM, log_path, ANSWER_S)
        self._one_at_a_time = asyncio.Lock()
        self._saved_at = -FRESH_S
        self._asked = 0

    async def answer(self, prompt: str) -> Reply:
        """Continue ``prompt`` with the peer's model.

        Raises:
            BusyError: another text is being continued.
        """
        if self._one_at_a_time.locked():
            raise BusyError
        async with self._one_at_a_time:
            if time.monotonic() - self._saved_at >= FRESH_S:
                self._saved_at = time.monotonic()
                await self._save()
            self._asked += 1  # asked again, it writes something else
            how = msgspec.structs.replace(self._question.sampling, seed=self._asked)
            question = msgspec.structs.replace(self._question, prompt=prompt, sampling=how)
            try:
                return msgspec.json.decode(await self._process.ask(msgspec.json.encode(question)), type=Reply)
            except NoAnswerError as error:
                return Reply(error=str(error))

    def close(self) -> None:
        """End the process."""
        self._process.kill()


def main() -> None:
    """Answer each line of the standard input, a ``ChatQuestion``, by a line with a ``Reply``, until the input ends."""
    narrator = Narrator()
    answer_lines(
        "chat", lambda line: msgspec.json.encode(narrator.answer(msgspec.json.decode(line, type=ChatQuestion)))
    )


if __name__ == "__main__":
    main()
