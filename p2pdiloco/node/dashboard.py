"""The page of a live node: where it is served, and what it shows.

Rules of this file:
1. A page is never a reason for a peer not to run: without a free port there is none, unless its user named the port.
2. The port stays the same over a peer's lives if it can, so that a browser finds the next one.
3. What the event log holds of earlier lives is read before the peer begins, in slices that do not block the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from p2pdiloco.observability.history import RunHistory
from p2pdiloco.observability.log_reader import LOG, lines
from p2pdiloco.observability.snapshot import History, RunSnapshot
from p2pdiloco.util import logs
from p2pdiloco.util.status_pipe import PageAt, Say

if TYPE_CHECKING:
    from p2pdiloco.node.telemetry import Telemetry

log = logs.get("page")

OFF = "off"
AUTO = "auto"
FIRST_PORT, PORTS = 7373, 16
FRESH_S = 0.9
"""How long a snapshot is shown to further visitors."""
READ_BYTES = 8 << 20
"""How much is read of the event log of earlier lives."""
SLICE = 50
"""Lines at once: well under a millisecond."""


class LiveView:
    """The snapshots that all visitors of one node's page see."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float] = time.monotonic) -> None:
        self._lookout = telemetry
        self._clock = clock
        self._made: tuple[float, RunSnapshot] | None = None

    def picture(self) -> RunSnapshot:
        """The snapshot of this second."""
        now = self._clock()
        if self._made is None or now - self._made[0] >= FRESH_S:
            self._made = (now, self._lookout.watched())
        return self._made[1]

    def history(self) -> History:
        """The history that led to it."""
        return self._lookout.chronicle.history()

    @property
    def mark(self) -> int:
        """Changes when the history does."""
        return self._lookout.chronicle.mark


def split_place(place: str) -> tuple[str, int | None]:
    """Host and port of a word of ``--page`` (``7373``, ``0.0.0.0:7373``, ``auto``); port None: any."""
    if place == AUTO:
        return "127.0.0.1", None
    host, _, port = place.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


@asynccontextmanager
async def serve_page(telemetry: Telemetry, folder: Path, place: str, say: Say) -> AsyncIterator[None]:
    """Serve a node's page, and tell the user its address.

    Raises:
        OSError: the port that its user named is taken.
    """
    if place == OFF:
        yield
        return
    from p2pdiloco.observability.web_server import (  # aiohttp, which not every node needs
        PageServer,
        is_loopback,
        kept_token,
    )

    await load_history(telemetry.chronicle, folder)
    host, port = split_place(place)
    view = LiveView(telemetry)
    token = "" if is_loopback(host) else await asyncio.to_thread(kept_token, folder)
    server = PageServer(lambda _: view, host, port or 0, token)
    if port is None:
        server.try_ports([*_port_before(folder), *range(FIRST_PORT, FIRST_PORT + PORTS), 0])
    async with server:
        with suppress(OSError):
            (folder / "page.port").write_text(str(server.port))
        say(PageAt(server.address))
        yield


async def load_history(chronicle: RunHistory, folder: Path) -> None:
    """Read the event log of this peer's earlier lives into ``chronicle``."""
    try:
        for number, line in enumerate(lines(folder / LOG, READ_BYTES)):
            chronicle.take(line)
            if number % SLICE == SLICE - 1:
                await asyncio.sleep(0)
    except OSError as error:
        log.warning("the event log of earlier lives is not shown", reason=error.strerror)


def _port_before(folder: Path) -> list[int]:
    with suppress(OSError, ValueError):
        port = int((folder / "page.port").read_text())
        if 0 < port < 65536:
            return [port]
    return []
