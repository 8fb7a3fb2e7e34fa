"""Tells somebody of an alert: runs a command of the user's, or posts to an address of theirs (``--notify``).

Rules of this file:
1. What happened is one argument of the command, and in JSON for an address: it is never read by a shell, since others'
   words may be in it.
2. One at a time, each for a bounded time; of too many the later ones are dropped. A failure is logged, and no more.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from p2pdiloco.observability.alerts import Alert
from p2pdiloco.util import logs

log = logs.get("alert")

MOST_WAITING = 16
LIMIT_S = 15.0


class Notifier:
    """``async with Notifier(target, peer)``; on leaving it, what waits is told, for a bounded time."""

    def __init__(self, target: str, peer: str) -> None:
        """``target``: a command, or an address with http(s)://; empty: nobody is told."""
        self._target = target
        self._peer = peer
        self._waiting: asyncio.Queue[Alert] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._target:
            self._task = asyncio.create_task(self._keep(), name="notify")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._waiting.join(), LIMIT_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tell(self, alert: Alert) -> None:
        """Soon."""
        log.info(f"{alert.kind}", text=alert.text, is_over=alert.is_over)
        if self._task is not None:
            with suppress(asyncio.QueueFull):
                self._waiting.put_nowait(alert)

    async def _keep(self) -> None:
        while True:
            alert = await self._waiting.get()
            try:
                async with asyncio.timeout(LIMIT_S):
                    if self._target.startswith(("http://", "https://")):
                        await self._post(alert)
                    else:
                        await self._run(alert)
            except Exception as error:  # noqa: BLE001 (the top of a task: the next alert must be told)
                log.warning(
                    "nobody could be told of an alert", kind=alert.kind, reason=str(error) or "it took too long"
                )
            finally:
                self._waiting.task_done()

    async def _run(self, alert: Alert) -> None:
        state = "over" if alert.is_over else "now"
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._target),
            alert.text,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "P2PDILOCO_ALERT": alert.kind, "P2PDILOCO_STATE": state, "P2PDILOCO_PEER": self._peer},
        )
        try:
            status = await process.wait()
        except asyncio.CancelledError:
            process.kill()
            raise
        if status:
            log.warning("the command that tells of alerts failed", status=status)

    async def _post(self, alert: Alert) -> None:
        import aiohttp  # which not every node needs

        body = {**msgspec.structs.asdict(alert), "peer": self._peer}
        try:
            async with aiohttp.ClientSession() as session, session.post(self._target, json=body) as answer:
                if answer.status >= 400:
                    log.warning("the address that is told of alerts refused", status=answer.status)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
