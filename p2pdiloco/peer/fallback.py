"""What becomes of a spoilt shard for which nobody is asked any more.

Rules of this file:
1. It is taken as it is, and the run goes on with it: what this peer signs next stands on it (rule A6c). That is for who
   has the only copy. A fault of this memory is then everybody's, and who finds that its own state is another cannot
   know that it was not its own memory.
2. So who has just lost others without a word waits for them, since they have the shard; and asks again when somebody
   is here. Not for ever: they may be dead.
"""

from __future__ import annotations

from p2pdiloco.peer.driver import Driver
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.util import logs

log = logs.get("protocol")

LOOK_S = 0.2
ALONE_S = 45.0
"""Longer than lines and connections mostly take to come back; at a run's end peers wait longer for each other."""


class Fallback:
    """Of one peer."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._host = driver.host
        self._alone_since: dict[ShardId, float] = {}
        """Of spoilt shards, since when there was nobody to be asked."""

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            for piece in self._driver.state.layout.shards:
                if not self._driver.state.integrity.is_spoilt(piece.shard):
                    self._alone_since.pop(piece.shard, None)
                elif self._driver.machine.view.is_given_up(piece.shard):
                    self._given_up(piece.shard)
            await self._host.sleep(LOOK_S)

    def _given_up(self, shard: ShardId) -> None:
        driver, now, view = self._driver, self._host.now(), self._driver.machine.view
        if view.live and self._alone_since.pop(shard, None) is not None:
            driver.feed(ev.Failed("state", shard, None, "somebody is here again who may have it"))
        elif view.live or not view.missing or now - self._alone_since.setdefault(shard, now) >= ALONE_S:
            log.error("own state is spoilt and nobody else has it: the run goes on with it", shard=shard)
            driver.job(lambda: driver.state.accept(shard), lambda _: None, shard=shard)
