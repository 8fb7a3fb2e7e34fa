"""Serves the web page of a running node.

Rules of this file:
1. The page never keeps a peer from running: without a free port there is no page, unless the user named the port.
2. The port stays the same over restarts if possible, so that an open browser tab keeps working.
3. The event log of earlier processes is read before the peer begins, in slices that do not block the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.observability.history import RunHistory
from p2pdiloco.observability.log_reader import LOG, lines
from p2pdiloco.observability.snapshot import ChatReply, History, RunSnapshot
from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular, write_atomically
from p2pdiloco.util.status_pipe import PageAt, Say

if TYPE_CHECKING:
    from p2pdiloco.node.telemetry import Telemetry

log = logs.get("page")

OFF = "off"
AUTO = "auto"
FIRST_PORT, PORTS = 7373, 16
# Time for which one snapshot serves all visitors.
FRESH_S = 0.9
# Maximum number of bytes to read from the event log of earlier processes.
READ_BYTES = 8 << 20
# Lines to read at a time; they take well under a millisecond.
SLICE = 50


class LiveView:
    """Cache of snapshots, shared by all visitors of one node's page."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._made: tuple[float, RunSnapshot] | None = None

    def picture(self) -> RunSnapshot:
        """Return a snapshot that is at most FRESH_S old."""
        now = time.monotonic()
        if self._made is None or now - self._made[0] >= FRESH_S:
            self._made = (now, self._telemetry.picture_for_viewer())
        return self._made[1]

    def history(self) -> History:
        """Return the history of the run up to now."""
        return self._telemetry.history.history()

    @property
    def mark(self) -> int:
        """Number that changes when the history changes."""
        return self._telemetry.history.mark


def split_place(place: str) -> tuple[str, int | None]:
    """Split the value of ``--page`` (``7373``, ``0.0.0.0:7373``, ``auto``) into host and port; port None: any."""
    if place == AUTO:
        return "127.0.0.1", None
    host, _, port = place.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


@asynccontextmanager
async def serve_page(
    telemetry: Telemetry, folder: Path, place: str, say: Say, chat: Callable[[str], Awaitable[ChatReply]] | None = None
) -> AsyncIterator[None]:
    """Serve a node's page while entered, with a ``chat``, if any, and tell the user its address.

    Raises:
        OSError: the port that the user named is taken.
    """
    if place == OFF:
        yield
        return
    from p2pdiloco.observability.web_server import (  # imports aiohttp, which not every node needs
        PageServer,
        is_loopback,
        kept_token,
    )

    await load_history(telemetry.history, folder)
    host, port = split_place(place)
    view = LiveView(telemetry)
    is_free = is_loopback(host) and chat is None
    token = "" if is_free else await asyncio.to_thread(kept_token, folder)
    server = PageServer(lambda _: view, host, port or 0, token, chat=chat)
    if port is None:
        server.try_ports([*_port_before(folder), *range(FIRST_PORT, FIRST_PORT + PORTS), 0])
    async with server:
        with suppress(OSError):
            write_atomically(folder / "page.port", str(server.port).encode())
        say(PageAt(server.address, str(folder / "page.token") if token else ""))
        yield


async def load_history(history: RunHistory, folder: Path) -> None:
    """Read the event log of this peer's earlier processes into ``history``."""
    try:
        for number, line in enumerate(lines(folder / LOG, READ_BYTES)):
            history.take(line)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
    except OSError as error:
        log.warning("the earlier event log cannot be read, so the page does not show it", reason=error.strerror)


def _port_before(folder: Path) -> list[int]:
    with suppress(OSError, ValueError):
        port = int(read_regular(folder / "page.port"))
        if 0 < port < 65536:
            return [port]
    return []
