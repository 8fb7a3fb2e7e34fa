"""Codec selection: picks the codec of each payload, if the run leaves it to the sender, and decides on Huffman coding.

The choice depends on the upload budget, the overlap, and the number of live peers. Bytes that leave this peer in one
exchange of a fragment, with n live peers that own about equal shares:

    up      our contribution: (n - 1)/n of the fragment, each part once
    down    our commits: 1/n of the fragment, to n - 1 peers

Rules of this file:
1. Each direction gets half of the overlap's time (tau steps). The rate is shared by the exchanges that overlap.
2. While the step time or the rate is unknown, the finest codec is used.
3. Huffman coding is skipped only if the link is known to carry ``FAST_BYTES_PER_S`` (``codec.bitrate_ladder``) to each
   receiver of a commit, because then the CPU limits an exchange. The link's rate is divided by their number, since each
   may be slow. Huffman coding is also skipped for contributions of this peer to itself, and while no other is live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from p2pdiloco.codec.bitrate_ladder import FAST_BYTES_PER_S, Rung, choose, downward
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.protocol.commit_relay import FAN_OUT
from p2pdiloco.protocol.events import LineSpeed
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import Layout, RunConfig
from p2pdiloco.protocol.view import MachineView

Direction = Literal["up", "down"]

SLOW, STILL_SLOW, STILL_FAST, FAST = 1 / 2, 1 / 3, 1 / 6, 1 / 8
"""Shares of the line above which it is slow, and remains so; below which it remains fast, and is."""


def line_speed(share: float, before: LineSpeed = "usual") -> LineSpeed:
    """Return how fast a line is of which payloads fill this share.

    A slow one delays the commits that its peer passes on."""
    if share > (STILL_SLOW if before == "slow" else SLOW):
        return "slow"
    return "fast" if share < (STILL_FAST if before == "fast" else FAST) else "usual"


class CodecChoice:
    """Chooses the codec of each payload that this peer sends.

    ``rate`` returns the bytes per second that this peer may send, budgeted or measured; None: no limit is known.
    ``line`` returns the bytes per second that the link carries; None: not known.
    """

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
        self.line_speed: LineSpeed = "usual"
        """Result of ``judge_line``."""

    def choose(self, direction: Direction, shard: ShardId) -> Rung | None:
        """Choose the codec of the next payload of ``shard``; None if the run fixes it."""
        if (self._codec.up if direction == "up" else self._codec.down) != "auto":
            return None
        schedule, step_s, rate = self._schedule, self._view.fastest_step_time_s(), self._rate()
        rounds_at_once = max(1.0, schedule.overlap * schedule.fragments / schedule.sync_every)
        rung = choose(
            self._parameters(shard),
            bytes_per_s=rate / rounds_at_once if rate is not None and step_s > 0.0 else None,
            time_s=schedule.overlap * step_s / 2,
            coarsest=self._codec.coarsest,
        )
        return rung if direction == "up" else downward(rung)

    def is_coded(self, direction: Direction, shard: ShardId) -> bool:
        """Return whether the next payload of ``shard`` is Huffman-coded."""
        if direction == "up" and self._view.next_owner(shard) == self._view.me:
            return False
        line, receivers = self._line(), min(FAN_OUT, len(self._view.live))
        return receivers > 0 and (line is None or line / receivers < FAST_BYTES_PER_S)

    def round_s(self) -> float:
        """Return the seconds of a round of the whole model; 0 while no step time is known."""
        return self._schedule.sync_every * self._view.fastest_step_time_s()

    def judge_line(self, need: float) -> bool:
        """Judge how fast the line is. Return whether that changed.

        ``need``: bytes per second of payloads that a peer sends; 0: not known.
        """
        line = self._line()
        if line is None or not need:
            return False
        before, self.line_speed = self.line_speed, line_speed(need / line, self.line_speed)
        return self.line_speed != before

    def record(self, direction: Direction, shard: ShardId, rung: Rung, size: int, error: float) -> None:
        """Log a payload that was made: its bytes, and the relative error of its first chunk."""
        self._metrics.write(
            "codec", direction=direction, shard=shard, codec=rung.name, bytes=size, error=round(error, 5)
        )

    def _parameters(self, shard: ShardId) -> float:
        """Return the number of parameters that this peer sends, in one direction, in one exchange of this shard's
        fragment."""
        fragment = self._layout.fragments[self._layout.shards[shard].fragment]
        peers = 1 + len(self._view.live)
        return sum(self._layout.shards[s].elements for s in fragment) * (peers - 1) / peers
