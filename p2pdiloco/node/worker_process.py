"""A worker process beside a node: answers one line after the other, by work with the whole model.

The node does not wait for it, and a lack of memory, or a library that fails, ends the worker and not the node. The next
line starts another one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from p2pdiloco.observability.formatting import duration
from p2pdiloco.training import PASSIVE
from p2pdiloco.util.files import open_regular, rotate
from p2pdiloco.util.process import be_called, die_with_parent

NICE = 10
# Longest answer.
ANSWER_BYTES = 1 << 20
# Size of the process's log from which a new file begins.
LOG_BYTES = 4 << 20


class WorkerError(Exception):
    """A worker gave no answer. The message says why."""


class WorkerProcess:
    """A worker process, as its node uses it. One line may be asked at a time."""

    def __init__(self, program: str, log_path: Path, most_s: float) -> None:
        """
        Args:
            program: module that calls ``answer_lines``.
            log_path: file for what the process prints.
            most_s: most seconds for an answer; then the process is killed.
        """
        self._program = program
        self._log_path = log_path
        self._most_s = most_s
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, line: bytes) -> bytes:
        """Return the answer to ``line``; start the process first if there is none.

        Raises:
            WorkerError: it ended, took too long, or cannot be started.
        """
        try:
            async with asyncio.timeout(self._most_s):
                process = self._process = self._process or await self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
                answer = await process.stdout.readline()
                if answer:
                    return answer
                status = await process.wait()
            reason = f"its process ended with status {status}, see {self._log_path}"
        except asyncio.CancelledError:
            self.kill()  # its answer would be taken for the next one
            raise
        except TimeoutError:
            reason = f"it took longer than {duration(self._most_s)}"
        except OSError as error:
            reason = f"its process cannot be used: {error.strerror or error}"
        self.kill()
        raise WorkerError(reason)

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the process.

        Raises:
            OSError: it cannot be started.
        """
        with suppress(FileNotFoundError):
            if self._log_path.stat().st_size > LOG_BYTES:
                rotate(self._log_path, keep=1, most_bytes=LOG_BYTES)
        output = open_regular(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", self._program),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=output,
                env=PASSIVE | os.environ,
                limit=ANSWER_BYTES,
                start_new_session=True,  # Ctrl+C must reach only the node
            )
        finally:
            os.close(output)

    def kill(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()


def answer_lines(name: str, answer: Callable[[bytes], bytes]) -> None:
    """Answer each line of the standard input by one line, until the input ends. ``name``: of this process."""
    die_with_parent(signal.SIGKILL)
    be_called(name)
    os.nice(NICE)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # libraries may print
    for line in sys.stdin.buffer:
        answers.write(answer(line) + b"\n")
