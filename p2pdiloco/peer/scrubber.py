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
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.util import logs

SHARE = 0.05
"""Of the worker's time."""
LOOK_S = 0.2
AGAIN_S = 600.0
"""What has no new version is looked at again after this time."""
PATIENCE_S = 60.0


class Scrubber:
    """Scrubs one peer's global state."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._host = driver.host
        self._began_at = self._host.now()

    async def run(self) -> None:
        """Verify one chunk after another until cancelled."""
        state = self._driver.state
        while True:
            took_s = 0.0
            for shard in range(len(state.layout.shards)):
                for chunk in state.integrity.unverified(ShardId(shard)):
                    began = self._host.now()
                    if not await self._verify(ShardId(shard), chunk):
                        break
                    took_s = self._host.now() - began
                    await self._host.sleep(took_s / SHARE)
            if self._host.now() - self._began_at > AGAIN_S:
                self._began_at = self._host.now()
                self._driver.job(state.integrity.look_again, lambda _: None)
            await self._host.sleep(max(LOOK_S, took_s / SHARE))

    async def _verify(self, shard: ShardId, chunk: int) -> bool:
        """Verify one chunk, after all earlier work; whether it has its digest."""
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


# -- Corrupted shards that nobody can supply ---------------------------------------------------------------------------
# What becomes of a spoilt shard for which nobody is asked any more.
# Rules of this file:
# 1. It is taken as it is, and the run goes on with it: what this peer signs next stands on it (rule A6c). That is for
#    who has the only copy. A fault of this memory is then everybody's, and who finds that its own state is another
#    cannot know that it was not its own memory.
# 2. So who has just lost others without a word waits for them, since they have the shard; and asks again when somebody
#    is here. Not for ever: they may be dead.


log = logs.get("protocol")

ALONE_S = 45.0
"""Longer than lines and connections mostly take to come back; at a run's end peers wait longer for each other."""


class CorruptShardPolicy:
    """Decides whether a peer asks again for a corrupted shard or accepts it as it is."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._host = driver.host
        self._alone_since: dict[ShardId, float] = {}
        """Since when there was nobody to be asked for a spoilt shard."""

    async def run(self) -> None:
        """Look for corrupted shards that nobody is asked for any more, until cancelled."""
        while True:
            for piece in self._driver.state.layout.shards:
                if not self._driver.state.integrity.is_spoilt(piece.shard):
                    self._alone_since.pop(piece.shard, None)
                elif self._driver.machine.view.is_given_up(piece.shard):
                    self._resolve(piece.shard)
            await self._host.sleep(LOOK_S)

    def _resolve(self, shard: ShardId) -> None:
        driver, now, view = self._driver, self._host.now(), self._driver.machine.view
        if view.live and self._alone_since.pop(shard, None) is not None:
            driver.feed(ev.Failed("state", shard, None, "somebody is here again who may have it"))
        elif view.live or not view.missing or now - self._alone_since.setdefault(shard, now) >= ALONE_S:
            log.error("own state is spoilt and nobody else has it: the run goes on with it", shard=shard)
            driver.job(lambda: driver.state.accept(shard), lambda _: None, shard=shard)
