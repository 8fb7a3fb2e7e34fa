"""Sends alerts to the user: runs a command, or posts to a URL (``--notify``).

Rules of this file:
1. The alert's text is one argument of the command, or JSON for a URL. It never passes through a shell, since it may
   contain text from other peers.
2. Alerts are sent one at a time, each within a time limit. If too many wait, later ones are dropped. A failure is only
   logged.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from contextlib import suppress
from typing import Self

import msgspec

from p2pdiloco.observability.alerts import Alert
from p2pdiloco.util import logs

log = logs.get("alert")

MOST_WAITING = 16
LIMIT_S = 15.0


class Notifier:
    """Sender of alerts. Use as ``async with Notifier(target, peer)``; exit sends waiting alerts within LIMIT_S."""

    def __init__(self, target: str, peer: str) -> None:
        """
        Args:
            target: a command, or a URL with http(s)://; empty: alerts are only logged.
            peer: id of this peer.
        """
        self._target = target
        self._peer = peer
        self._waiting: asyncio.Queue[Alert] = asyncio.Queue(MOST_WAITING)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._target:
            self._task = asyncio.create_task(self._keep(), name="notify")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._waiting.join(), LIMIT_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tell(self, alert: Alert) -> None:
        """Log an alert, and queue it to be sent."""
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
            except Exception as error:  # noqa: BLE001 (the top of a task: the next alert must be sent)
                log.warning(
                    "an alert could not be sent (--notify)", kind=alert.kind, reason=str(error) or "it took too long"
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
            log.warning("the command for alerts (--notify) failed", status=status)

    async def _post(self, alert: Alert) -> None:
        import aiohttp  # imported here, since not every node needs it

        body = {**msgspec.structs.asdict(alert), "peer": self._peer}
        try:
            async with aiohttp.ClientSession() as session, session.post(self._target, json=body) as answer:
                if answer.status >= 400:
                    log.warning("the address for alerts (--notify) answered with an error", status=answer.status)
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error
