"""Snapshot sources for terminal programs: the page of a live peer, or recorded event logs.

Rules of this file:
1. A page is requested with GET only, with the token in a header. Redirects are not followed. The answer's size is
   limited and its content validated (msgspec). The program that shows it removes unprintable characters.
2. A state folder stands for a live peer if the page named in it answers for that run. Otherwise it is a recording.
"""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import parse_qs, urlsplit

import aiohttp
import msgspec

from p2pdiloco.observability.log_reader import DEPTHS, Player, Recording
from p2pdiloco.observability.snapshot import History, RunSnapshot
from p2pdiloco.util.files import read_regular

PAGE_PORT, PAGE_TOKEN = "page.port", "page.token"
PATIENCE_S = 5.0
# Minimum interval between two requests for the history.
HISTORY_S = 2.0
MOST_BYTES = 16 << 20

Told = TypeVar("Told", RunSnapshot, History)


class UnseenError(ValueError):
    """There is nothing to show. The message says why and what to do."""


class Sighting(NamedTuple):
    """A snapshot and its history."""

    picture: RunSnapshot
    history: History


class Page:
    """The page of a live peer."""

    def __init__(self, address: str) -> None:
        """``address``: as the peer has printed it.

        Raises:
            UnseenError: it is not the address of a page.
        """
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname:
            raise UnseenError(f"{address} is not a page: give the address that a peer prints (look at  http://...)")
        self.address = f"http://{parts.netloc}"
        token = parse_qs(parts.query).get("token", [""])[0]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._history: tuple[float, History] | None = None

    async def look(self) -> Sighting:
        """Request the snapshot, and the history every ``HISTORY_S``.

        Raises:
            UnseenError: there is no answer at the moment.
        """
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            picture = self._decoded(await self._get(session, "picture.json"), RunSnapshot)
            now = time.monotonic()
            if self._history is None or now - self._history[0] >= HISTORY_S:
                self._history = (now, self._decoded(await self._get(session, "history.json"), History))
        return Sighting(picture, self._history[1])

    def _decoded(self, body: bytes, kind: type[Told]) -> Told:
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise UnseenError(f"{self.address} is not a page, or it is of another release ({error})") from error

    async def _get(self, session: aiohttp.ClientSession, name: str) -> bytes:
        body = bytearray()
        try:
            async with session.get(f"{self.address}/{name}", allow_redirects=False) as answer:
                async for piece in answer.content.iter_any():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise UnseenError(f"{self.address} sends more than {MOST_BYTES >> 20} MiB: it is not a page")
                if answer.status != 200:
                    why = bytes(body[:200]).decode(errors="replace").strip()
                    raise UnseenError(f"{self.address} refuses: {why or answer.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnseenError(f"no answer from {self.address}: is the peer running?") from error
        return bytes(body)


class Tape:
    """A recording that is played back."""

    def __init__(self, recording: Recording, speed: float, at: float | None = None) -> None:
        """``at``: Unix time to start from; None: show the end."""
        self.recording = recording
        self.speed = speed
        self._player = Player(recording, recording.ends if at is None else at, speed)

    async def look(self) -> Sighting:
        """Return the snapshot and history of the present moment of the recording."""
        return Sighting(self._player.picture(), self._player.history())

    def go(self, at: float, speed: float) -> None:
        """Continue from another moment, or at another speed (0: paused)."""
        self.speed = speed
        self._player = Player(self.recording, at, speed)


Source = Page | Tape


async def found(place: str, speed: float) -> Source:
    """Return the source that ``place`` names: the address of a page, or a folder.

    Raises:
        UnseenError: there is no such page.
        RecordingError: there are no logs below the folder. (Both are ValueErrors.)
    """
    if "://" in place:
        return Page(place)
    if place.startswith(("/ip4/", "/ip6/", "/dns", "p2pdiloco")):
        raise UnseenError(
            "that is the address of a directory, not of a page. For a table of the run: p2pdiloco status ADDR. To "
            "watch a peer of this machine: p2pdiloco watch, p2pdiloco watch STATE, or p2pdiloco watch http://... (the "
            "peer prints that address)"
        )
    folder = Path(place)
    for address in await asyncio.to_thread(pages_in, folder):
        page = Page(address)
        with suppress(UnseenError):
            if _is_of((await page.look()).picture, folder):
                return page
    recording = await asyncio.to_thread(Recording, folder)
    return Tape(recording, speed, recording.begins if speed else None)


def pages_in(folder: Path) -> list[str]:
    """Return the addresses of pages that peers have written to files below a folder, newest first."""
    named: list[tuple[float, str]] = []
    for path in {path for depth in DEPTHS for path in folder.glob(depth + PAGE_PORT)}:
        with suppress(OSError, ValueError):
            port = int(read_regular(path))
            token = path.with_name(PAGE_TOKEN)
            query = f"/?token={read_regular(token).decode().strip()}" if token.exists() else ""
            named.append((path.stat().st_mtime, f"http://127.0.0.1:{port}{query}"))
    return [address for _, address in sorted(named, reverse=True)]


def _is_of(picture: RunSnapshot, folder: Path) -> bool:
    """Return whether the page shows a run that has a folder here. The port may be used by another peer by now."""
    run = picture.title.run
    here = {path.parent.name for depth in DEPTHS for path in folder.glob(depth + PAGE_PORT)} | {folder.resolve().name}
    return any(name and run.startswith(name) for name in here) and math.isfinite(picture.at)
