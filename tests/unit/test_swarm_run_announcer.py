"""How peers say that their run exists; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import pytest
from actors import make_manifest

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.swarm.run_announcer import FEW, PAUSE_MOST_S, PAUSE_S, RunAnnouncer
from p2pdiloco.wire.directory_records import RunRecord
from tests.peer_sim.loop import VirtualLoop

MANIFEST = make_manifest(1000)
HOUR_S = 3600.0


class Board:
    """A directory: what it was told of a run, and until when that lives."""

    def __init__(self) -> None:
        self.lives_until = float("-inf")
        self.published = self.refused = 0
        """Publications to come that fail."""
        self.record = b""

    async def publish_run(self, run: RunId, record: bytes, ttl_s: float) -> None:
        if self.refused:
            self.refused -= 1
            raise DirectoryError("publishing failed")
        self.published += 1
        self.record, self.lives_until = record, max(self.lives_until, asyncio.get_running_loop().time() + ttl_s)

    async def withdraw_run(self, run: RunId) -> None:
        self.lives_until = float("-inf")
        if self.refused:
            raise DirectoryError("publishing failed")

    @property
    def is_known(self) -> bool:
        return self.lives_until > asyncio.get_running_loop().time()


def in_virtual_time(main: Callable[[], Awaitable[None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.ensure_future(main(), loop=loop))
    finally:
        loop.close()


def announcement(board: Board, others: Callable[[], int], access: str = "open") -> RunAnnouncer:
    manifest = msgspec.structs.replace(MANIFEST, config=msgspec.structs.replace(MANIFEST.config, access=access))
    return RunAnnouncer(manifest, cast(Directory, board), others)


@pytest.mark.parametrize("others", [0, FEW - 1, 15, 63, 500])
def test_what_is_said_of_a_run_does_not_grow_with_it_and_never_expires(others: int) -> None:
    async def main() -> None:
        board = Board()
        saying = asyncio.ensure_future(announcement(board, lambda: others).keep())
        for _ in range(int(HOUR_S)):
            await asyncio.sleep(1.0)
            assert board.is_known
        pause_s = min(PAUSE_MOST_S, PAUSE_S * (1 + others) / FEW) if others >= FEW else PAUSE_S
        assert HOUR_S / pause_s <= board.published <= 2 * HOUR_S / pause_s
        assert msgspec.msgpack.decode(board.record, type=RunRecord).name == MANIFEST.config.name
        assert board.lives_until - asyncio.get_running_loop().time() <= 3 * pause_s
        saying.cancel()

    in_virtual_time(main)


def test_a_run_that_grows_stays_known() -> None:
    """All of it begin alone and at once, and would go on together only after what they said has expired."""

    async def main() -> None:
        board, others = Board(), 0
        saying = asyncio.ensure_future(announcement(board, lambda: others).keep())
        await asyncio.sleep(1.0)
        others = 500
        for _ in range(int(HOUR_S)):
            await asyncio.sleep(1.0)
            assert board.is_known
        saying.cancel()

    in_virtual_time(main)


def test_what_the_directory_did_not_take_is_said_again_soon() -> None:
    async def main() -> None:
        board = Board()
        board.refused = 2
        saying = asyncio.ensure_future(announcement(board, lambda: 500).keep())
        await asyncio.sleep(2 * PAUSE_S + 1.0)
        assert board.is_known
        saying.cancel()

    in_virtual_time(main)


@pytest.mark.parametrize("refused", [0, 1])
def test_who_goes_takes_it_back_and_says_it_no_more(refused: int) -> None:
    async def main() -> None:
        board = Board()
        said = announcement(board, lambda: 0)
        saying = asyncio.ensure_future(said.keep())
        await asyncio.sleep(1.0)
        assert board.is_known
        board.refused = refused
        await said.withdraw()
        await asyncio.sleep(HOUR_S)
        assert not board.is_known
        assert board.published == 1
        assert saying.done()

    in_virtual_time(main)


def test_a_private_run_is_not_told_to_strangers() -> None:
    async def main() -> None:
        board = Board()
        await announcement(board, lambda: 0, "invite").keep()
        assert not board.published

    in_virtual_time(main)
