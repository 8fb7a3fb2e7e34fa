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
from p2pdiloco.peer.host import Host, within
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.view import MachineView
from p2pdiloco.util import logs

SHARE = 0.05
"""Of the worker's time."""
LOOK_S = 0.2
AGAIN_S = 600.0
"""What has no new version is looked at again after this time."""
PATIENCE_S = 60.0


class Scrubber:
    """Verifies one peer's global state, chunk by chunk."""

    def __init__(self, driver: Driver, state: ModelState, host: Host) -> None:
        self._driver = driver
        self._state = state
        self._host = host
        self._began_at = self._host.now()

    async def run(self) -> None:
        """Run until cancelled."""
        state = self._state
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
                self._driver.submit(state.integrity.invalidate, lambda _: None)
            await self._host.sleep(max(LOOK_S, took_s / SHARE))

    async def _is_whole(self, shard: ShardId, chunk: int) -> bool:
        """Verify one chunk, after all earlier work."""
        looked: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def tell(is_whole: bool) -> None:
            if not looked.done():
                looked.set_result(is_whole)

        def fail(error: Exception) -> None:
            if isinstance(error, SpoiltStateError):
                self._driver.report_corruption(error)
            tell(False)

        self._driver.submit(lambda: self._state.verify(shard, chunk), lambda _: tell(True), fail, shard=shard)
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
    """Decides when one peer accepts a corrupted shard that nobody else can supply."""

    def __init__(self, driver: Driver, state: ModelState, view: MachineView, host: Host) -> None:
        self._driver = driver
        self._state = state
        self._view = view
        self._host = host
        self._alone_since: dict[ShardId, float] = {}
        """Since when there was nobody to be asked for a spoilt shard."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            for piece in self._state.layout.shards:
                if not self._state.integrity.is_spoilt(piece.shard):
                    self._alone_since.pop(piece.shard, None)
                elif self._view.is_given_up(piece.shard):
                    self._consider_accepting(piece.shard)
            await self._host.sleep(LOOK_S)

    def _consider_accepting(self, shard: ShardId) -> None:
        driver, now, view = self._driver, self._host.now(), self._view
        if view.live and self._alone_since.pop(shard, None) is not None:
            driver.feed(ev.Failed("state", shard, None, "somebody is here again who may have it"))
        elif view.live or not view.missing or now - self._alone_since.setdefault(shard, now) >= ALONE_S:
            log.error("own state is spoilt and nobody else has it: the run goes on with it", shard=shard)
            driver.submit(lambda: self._state.accept(shard), lambda _: None, shard=shard)
