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
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from p2pdiloco.node.results import find_result
from p2pdiloco.node.worker_process import WorkerError, WorkerProcess, answer_lines
from p2pdiloco.observability.snapshot import ChatBusyError, ChatReply
from p2pdiloco.peer.checkpoint import places
from p2pdiloco.training.generation import Sampling, text_generator
from p2pdiloco.util.errors import UserError

PROGRAM = "p2pdiloco.node.chat"
# Time for an answer, that for starting the process included.
ANSWER_S = 120.0
# Least time between two checkpoints that are written for questions.
FRESH_S = 30.0
TOKENS = 120
NO_CHECKPOINT = "this peer has no checkpoint of its version: it has not got the whole model yet, or see its log"


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


class TextGenerator:
    """Text generation by the newest version of a run, whose model is kept until there is another one."""

    def __init__(self) -> None:
        self._generate: Callable[[str, Sampling], str] | None = None
        # Where the version was found, and the checkpoints that were there.
        self._folders: tuple[Path, ...] = ()
        self._seen: list[tuple[str, int]] = []
        self._step = 0

    def load(self, question: ChatQuestion) -> int:
        """Load the newest version, if it is another one than before; return its step. Blocks.

        Raises:
            UserError, ValueError: there is none, or its model cannot be built here.
            OSError: a file cannot be read.
        """
        there = _checkpoints(self._folders)  # before they are read: one that comes meanwhile is read next time
        if self._generate is None or there != self._seen:
            result = find_result(question.source, Path(question.state), question.run)
            made, folders = result.checkpoint, {"model": question.model, "tokenizer": question.tokenizer}
            self._generate = text_generator(made.manifest, made.theta, **folders)
            self._seen = there if result.folders == self._folders else _checkpoints(result.folders)
            self._folders, self._step = result.folders, result.step
        return self._step

    def answer(self, question: ChatQuestion) -> ChatReply:
        """Return the continuation, or why there is none. Blocks."""
        try:
            step = self.load(question)
            assert self._generate is not None
            return ChatReply(text=self._generate(question.prompt, question.sampling), step=step)
        except OSError as error:
            return ChatReply(error=f"{error.filename}: {error.strerror}" if error.filename else str(error))
        except (UserError, ValueError) as error:
            return ChatReply(error=str(error))


def _checkpoints(folders: Iterable[Path]) -> list[tuple[str, int]]:
    """Return the checkpoints in these folders, and when each was written."""
    found = []
    for path in (path for place in places(folders) for path in place.glob("state-*.json")):
        with suppress(FileNotFoundError):  # a newer one has replaced it
            found.append((str(path), path.stat().st_mtime_ns))
    return sorted(found)


class Chat:
    """Chat of a node's page with the peer's model."""

    def __init__(self, question: ChatQuestion, log_path: Path, save: Callable[[], Awaitable[bool]]) -> None:
        """
        Args:
            question: one without a text.
            log_path: file for what the process that answers prints.
            save: writes a checkpoint of the peer's state, if that is new; returns False if it could not.
        """
        self._question = question
        self._save = save
        self._process = WorkerProcess(PROGRAM, log_path, ANSWER_S)
        self._one_at_a_time = asyncio.Lock()
        self._saved_at = -FRESH_S
        self._asked = 0

    async def answer(self, prompt: str) -> ChatReply:
        """Continue ``prompt`` with the peer's model.

        Raises:
            ChatBusyError: another text is being continued.
        """
        if self._one_at_a_time.locked():
            raise ChatBusyError
        async with self._one_at_a_time:
            if time.monotonic() - self._saved_at >= FRESH_S:
                if not await self._save():
                    return ChatReply(error=NO_CHECKPOINT)
                self._saved_at = time.monotonic()
            self._asked += 1  # asked again, it writes something else
            how = msgspec.structs.replace(self._question.sampling, seed=self._asked)
            question = msgspec.structs.replace(self._question, prompt=prompt, sampling=how)
            try:
                return msgspec.json.decode(await self._process.ask(msgspec.json.encode(question)), type=ChatReply)
            except WorkerError as error:
                return ChatReply(error=str(error))

    def close(self) -> None:
        """End the process."""
        self._process.kill()


def main() -> None:
    """Answer each line of the standard input, a ``ChatQuestion``, by a line with a ``ChatReply``, until it ends."""
    generator = TextGenerator()
    answer_lines(
        "chat", lambda line: msgspec.json.encode(generator.answer(msgspec.json.decode(line, type=ChatQuestion)))
    )


if __name__ == "__main__":
    main()
