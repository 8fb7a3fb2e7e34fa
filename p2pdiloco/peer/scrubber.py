"""Scrubber: verifies this peer's own state in the background, chunk by chunk, against the digests that owners signed.

Memory without error correction flips a bit now and then. If the scrubber finds it, the shard is fetched again at its
head (``protocol/replication.py``). Otherwise it would spread into this peer's contributions, commits and checkpoints.

Rules of this file:
1. Every chunk is verified once per version of its shard, as far as its share of the worker's time allows, and every
   ``AGAIN_S`` without a new version.
2. Other work goes first: one chunk at a time is verified, with a pause after it.
"""

from __future__ import annotations

import asyncio

from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import within
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.util import logs

# Share of the worker's time.
SHARE = 0.05
LOOK_S = 0.2
# Interval after which everything is verified again, with or without new versions.
AGAIN_S = 600.0
PATIENCE_S = 60.0


class Scrubber:
    """Verifies one peer's global state, chunk by chunk."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._state = driver.state
        self._host = driver.host
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
        """Verify one chunk, after all earlier jobs of the shard."""
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
# Policy for a corrupted shard that no other peer can supply.
# Rules of this section:
# 1. The shard is accepted as it is, and the run goes on with it: this peer's next commit builds on it (rule A6c). That
#    is meant for the peer with the only copy. This memory error then spreads to all peers, and a peer whose own state
#    differs cannot tell that its own memory was right.
# 2. So a peer that has just lost other peers without a goodbye waits ``ALONE_S`` for them, since they have the shard.
#    When a peer is connected again, the shard is requested again.


log = logs.get("protocol")

# Longer than most network outages. At the end of a run, peers wait longer for each other.
ALONE_S = 45.0


class CorruptShardPolicy:
    """Decides when one peer accepts a corrupted shard that nobody else can supply."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._state = driver.state
        self._view = driver.view
        self._host = driver.host
        # When the last peer that could supply a corrupted shard was lost, by shard.
        self._alone_since: dict[ShardId, float] = {}

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
            driver.feed(ev.Failed("state", shard, None, "a peer that may have it is connected again"))
        elif view.live or not view.missing or now - self._alone_since.setdefault(shard, now) >= ALONE_S:
            log.error("this peer's state is corrupted and no other peer has it; continuing with it", shard=shard)
            driver.submit(lambda: self._state.accept(shard), lambda _: None, shard=shard)
