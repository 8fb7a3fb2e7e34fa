"""Publishes the run's model while it trains (``--publish``): when, and what runs afterwards (``--on-publish``).

Rules of this file:
1. A publication is made at most every ``every_s``, from a checkpoint that is written for it, and once more at the end
   of the run. How it is written: ``node/publication.py``.
2. The command runs once for each publication, one at a time, within a limit of time. Its folder is not removed
   meanwhile.
3. What fails is told in the log and in the status, and tried again when the next publication is due.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from p2pdiloco.node.publication import PROGRAM, Order, Published
from p2pdiloco.node.worker_process import WorkerError, WorkerProcess
from p2pdiloco.observability.formatting import duration
from p2pdiloco.util import logs

log = logs.get("publish")

# Time for writing one publication; then the process that writes is killed.
WRITE_S = 3600.0
# Time for the command after a publication; then it is killed.
COMMAND_S = 600.0
# Program that runs the command and ends it, with all that it started, if this process is killed.
GUARD = "p2pdiloco.util.process"
# Interval between two looks whether this peer has a state yet.
LOOK_S = 1.0
# Keys in ``troubles``.
FAILED, COMMAND_FAILED = "publication", "command after a publication"


class Publisher:
    """Publishes one peer's model. ``keep`` does it until it is cancelled."""

    def __init__(
        self,
        order: Order,
        *,
        every_s: float,
        command: str,
        log_path: Path,
        mark: Callable[[], int | None],
        save: Callable[[], Awaitable[bool]],
        troubles: dict[str, str],
        command_s: float = COMMAND_S,
    ) -> None:
        """
        Args:
            order: what to publish, and where.
            every_s: least seconds between two publications.
            command: run with the publication's folder as its last argument; empty: none.
            log_path: file for what the process that writes prints.
            mark: returns the mark of the peer's state; None if it has none yet.
            save: writes a checkpoint of that state, unless it has one; returns False if it could not.
            troubles: where failures stand, for the status.
            command_s: most seconds for the command.
        """
        self._order = order
        self._every_s = every_s
        self._command = shlex.split(command)
        self._mark = mark
        self._save = save
        self._troubles = troubles
        self._command_s = command_s
        self._one_at_a_time = asyncio.Lock()
        self._process = WorkerProcess(PROGRAM, log_path, WRITE_S)
        # Mark of the state that was published last, and its publication.
        self._published_mark: int | None = None
        self._published = Published()
        # Name of the publication after which the command succeeded last.
        self._commanded = ""

    async def keep(self) -> None:
        """Publish until cancelled."""
        now = asyncio.get_running_loop().time
        try:
            while True:
                began = now()
                await self.publish()
                pause_s = LOOK_S if self._mark() is None else self._every_s
                await asyncio.sleep(max(0.0, began + pause_s - now()))
        finally:
            self._process.kill()

    async def publish(self) -> str:
        """Publish the peer's state if it is new, and run the command if it has not succeeded for it.

        Returns why one of them failed; empty if neither did.
        """
        async with self._one_at_a_time:
            mark = self._mark()
            if mark is not None and mark != self._published_mark:
                now = asyncio.get_running_loop().time
                began = now()
                is_saved = await self._save()
                found = (
                    await self._write() if is_saved else Published(error="its checkpoint was not written, see the log")
                )
                self._tell(FAILED, f"the model is not published in {self._order.folder}: {found.error}", found.error)
                if found.error:
                    return found.error
                if found.lacks_tokenizer and not self._published.name:
                    log.warning("the published model has no tokenizer: name the folder with the run's (--tokenizer)")
                self._published_mark, self._published = mark, found
                if found.is_new:
                    log.info("published", folder=found.name, step=found.step, seconds=round(now() - began, 2))
            if self._command and self._published.name not in ("", self._commanded):
                reason = await self._run_command()
                self._tell(COMMAND_FAILED, f"the command after a publication (--on-publish) {reason}", reason)
                self._commanded = "" if reason else self._published.name
                return reason and f"the command {reason}"
        return ""

    def _tell(self, key: str, text: str, reason: str) -> None:
        """Log a failure and show it in the status, or end that if there is no ``reason``."""
        if not reason:
            self._troubles.pop(key, None)
            return
        text += f"; trying again when the next publication is due ({duration(self._every_s)})"
        if self._troubles.get(key) != text:
            log.error(text)
        self._troubles[key] = text

    async def _write(self) -> Published:
        """Have the process write a publication."""
        try:
            return msgspec.json.decode(await self._process.ask(msgspec.json.encode(self._order)), type=Published)
        except WorkerError as error:
            return Published(error=str(error))

    async def _run_command(self) -> str:
        """Run the command for the newest publication; return why it failed, or "" if it did not."""
        folder = str(Path(self._order.folder, self._published.name))
        told = {"P2PDILOCO_FOLDER": folder, "P2PDILOCO_STEP": str(self._published.step)}
        if shutil.which(self._command[0]) is None:
            return f"cannot be started: there is no command {self._command[0]}"
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", GUARD, *self._command, folder),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **told},
                start_new_session=True,  # so that all that it has started can be killed
            )
        except OSError as error:
            return f"cannot be started: {error.strerror or error}"
        try:
            async with asyncio.timeout(self._command_s):
                status = await process.wait()
        except TimeoutError:
            return f"took longer than {duration(self._command_s)} and was killed"
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return f"failed with status {status}" if status else ""
