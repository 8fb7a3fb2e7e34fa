"""The codec of each payload, where the run leaves it to the sender: from the budget, the overlap and who is live; and
of any codec whether its symbols are Huffman-coded.

What is reckoned for one turn of a fragment, with n live peers that own about as much each:

    up      our contribution: (n - 1)/n of the fragment leaves us, each part once
    down    our commits: 1/n of the fragment leaves us, to n - 1 peers

Rules of this file:
1. Each direction has half of the overlap's time (tau steps), and the rate is shared by the turns that overlap.
2. Where the step's time or the rate is not known yet, nothing is known to be too slow: the finest codec.
3. Huffman codes are left out only where the line is known to carry ``ladder.FAST_BYTES_PER_S`` to each of the others:
   then processors are what an exchange waits for. By the share of each, since a commit leaves us as often, and since
   what is seen to be delivered to many may be slow for each of them. They are left out, too, of what this peer gives to
   itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from p2pdiloco.codec.bitrate_ladder import FAST_BYTES_PER_S, Rung, choose, downward
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout, RunConfig
from p2pdiloco.protocol.view import MachineView

Direction = Literal["up", "down"]


class CodecChoice:
    """``rate``: bytes per second that we may send at, budgeted or measured; None: no limit is known. ``line``: that the
    line carries; None: not known."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        view: MachineView,
        metrics: Metrics,
        rate: Callable[[], float | None],
        line: Callable[[], float | None],
    ) -> None:
        self._codec, self._schedule = config.codec, config.schedule
        self._layout = layout
        self._view = view
        self._metrics = metrics
        self._rate = rate
        self._line = line

    def choose(self, direction: Direction, shard: ShardId) -> Rung | None:
        """Choose the codec of the next payload of ``shard``; None: the run fixes it."""
        if (self._codec.up if direction == "up" else self._codec.down) != "auto":
            return None
        step_s, rate = self._view.fastest_step_time_s(), self._rate()
        rung = choose(
            self._parameters(shard),
            bytes_per_s=rate / self._turns_at_once() if rate is not None and step_s > 0.0 else None,
            time_s=self._schedule.overlap * step_s / 2,
            coarsest=self._codec.coarsest,
        )
        return rung if direction == "up" else downward(rung)

    def is_coded(self, direction: Direction, shard: ShardId) -> bool:
        """Whether the symbols of the next payload of ``shard`` are Huffman-coded."""
        if direction == "up" and self._view.next_owner(shard) == self._view.me:
            return False
        line, others = self._line(), max(1, len(self._view.live))
        return line is None or line / others < FAST_BYTES_PER_S

    def record(self, direction: Direction, shard: ShardId, rung: Rung, size: int, error: float) -> None:
        """Write down a payload that was made: its bytes, and the relative error of its first chunk."""
        self._metrics.write(
            "codec", direction=direction, shard=shard, codec=rung.name, bytes=size, error=round(error, 5)
        )

    def _parameters(self, shard: ShardId) -> float:
        """That leave us in a turn of this shard's fragment, in one direction."""
        fragment = self._layout.fragments[self._layout.shards[shard].fragment]
        peers = 1 + len(self._view.live)
        return sum(self._layout.shards[s].elements for s in fragment) * (peers - 1) / peers

    def _turns_at_once(self) -> float:
        schedule = self._schedule
        return max(1.0, schedule.overlap * schedule.fragments / schedule.sync_every)
