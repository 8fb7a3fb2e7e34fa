"""Looks through this peer's own state in the background: does every chunk have the digest that its owner signed?

Memory without error correction flips a bit now and then. Found out here, the shard is fetched again at its head
(``protocol/replication.py``); not found, it would be in this peer's contributions, commits and checkpoints.

Rules of this file:
1. Every chunk is looked at once for each version of its shard, as far as the share of the worker's time allows, and
   now and then without one.
2. Work that anybody waits for goes first: one chunk at a time, with a pause after it.
"""

from __future__ import annotations

import asyncio

from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import within
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.protocol.ids import ShardId

SHARE = 0.05
"""Of the worker's time."""
LOOK_S = 0.2
AGAIN_S = 600.0
"""What has no new version is looked at again after this time."""
PATIENCE_S = 60.0


class Scrub:
    """Of one peer's global state."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._host = driver.host
        self._began_at = self._host.now()

    async def keep(self) -> None:
        """Until cancelled."""
        state = self._driver.state
        while True:
            took_s = 0.0
            for shard in range(len(state.layout.shards)):
                for chunk in state.integrity.unverified(ShardId(shard)):
                    began = self._host.now()
                    if not await self._is_whole(ShardId(shard), chunk):
                        break
                    took_s = self._host.now() - began
                    await self._host.sleep(took_s / SHARE)
            if self._host.now() - self._began_at > AGAIN_S:
                self._began_at = self._host.now()
                self._driver.job(state.integrity.look_again, lambda _: None)
            await self._host.sleep(max(LOOK_S, took_s / SHARE))

    async def _is_whole(self, shard: ShardId, chunk: int) -> bool:
        """Look at one chunk, after all earlier work."""
        looked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def tell(is_whole: bool) -> None:
            if not looked.done():
                looked.set_result(is_whole)

        def fail(error: Exception) -> None:
            if isinstance(error, SpoiltStateError):
                self._driver.spoilt(error)
            tell(False)

        self._driver.job(lambda: self._driver.state.verify(shard, chunk), lambda _: tell(True), fail, shard=shard)
        try:
            return await within(self._host, looked, PATIENCE_S)
        except TimeoutError:
            return False
