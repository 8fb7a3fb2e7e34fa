"""Detects a line that is too thin for the run's exchanges: what rounds need, against what the line has carried. Pure.

Rules of this file:
1. The line is short in a window (a round of this peer's learner, at least LEAST_S) if payloads waited for it much of
   the time, and it carried them at less than SHORT of the rate that rounds need.
2. It is too thin if it is short in two windows in a row, and a shard has merged nothing of what this peer has trained
   in them, or nothing of others: peers that lose each other for want of heartbeats merge alone. So one late round, a
   swarm that stands still, an idle line or a distant one raises nothing.
3. It is so until a window in which it is not short, and progress is merged.
"""

from __future__ import annotations

from p2pdiloco.observability.formatting import volume

LEAST_S = 10.0
# Shares: of a window, in which payloads wait; of the rate that rounds need; of progress that is not merged.
WAITED, SHORT, UNMERGED = 0.25, 0.5, 0.9


class ThinLine:
    """The verdict on the line of one peer. ``sync_every``: steps of a round."""

    def __init__(self, sync_every: int) -> None:
        self._sync_every = sync_every
        # Time, steps, carried bytes, versions of others at the start of the window; None: the learner does not train.
        self._start: tuple[float, int, tuple[int, int], int] | None = None
        self._looks, self._waited = 0, (0, 0)
        # The learner's steps when the line became short; None: it was not short in the last window.
        self._short_from: int | None = None
        # Versions of others when the line became short; what a round needed when this peer was last not alone.
        self._others_from, self._need = 0, 0.0
        # What people are told; empty if the line is not known to be too thin.
        self.sentence = ""

    def look(
        self,
        now: float,
        steps: int | None,
        unmerged_steps: float,
        others: int,
        round_bytes: float,
        carried: tuple[int, int],
        is_waiting: tuple[bool, bool],
    ) -> None:
        """Take a measurement, every second or so. Pairs are for sending and receiving.

        Args:
            steps: steps of this peer's learner so far; None: it does not train now.
            unmerged_steps: those of them that are not merged.
            others: versions so far that hold other learners' progress.
            round_bytes: payload bytes that a peer sends, and receives, in a round of the whole model; 0: it is alone.
            carried: payload bytes so far.
            is_waiting: whether payloads wait for the line.
        """
        self._need = round_bytes or self._need
        if steps is None or self._start is None:
            self._short_from = None
            self._begin(None if steps is None else (now, steps, carried, others))
            return
        self._looks += 1
        self._waited = (self._waited[0] + is_waiting[0], self._waited[1] + is_waiting[1])
        began, first, before, others_before = self._start
        rounds = (steps - first) / self._sync_every
        if rounds < 1.0 or now - began < LEAST_S:
            return
        round_s, told = (now - began) / rounds, []
        for way, waited, old, new in zip(("sent", "received"), self._waited, before, carried, strict=True):
            a_round = (new - old) / rounds
            if waited >= WAITED * self._looks and a_round * self._looks < SHORT * self._need * waited:
                told.append(f"{volume(a_round)} {way} ({_rate(a_round / round_s)})")
        if not told:
            self._short_from = None
            if unmerged_steps < 2 * (steps - first):
                self.sentence = ""
        elif self._short_from is None:
            self._short_from, self._others_from = first, others_before
        else:
            is_unmerged = unmerged_steps >= UNMERGED * (steps - self._short_from)
            if self.sentence or is_unmerged or others == self._others_from:
                own = f"{unmerged_steps:,.0f} steps of this peer are not merged"
                sent = "" if "sent" in told[0] else ", or that of the peers that send"
                self.sentence = (
                    f"the line is too thin for this run{sent}: a round ({self._sync_every} steps, {round_s:.0f} s) "
                    f"needs {volume(self._need)} each way ({_rate(self._need / round_s)}), and it carried "
                    f"{' and '.join(told)}; {own if is_unmerged else 'nothing of other peers is merged here'}. Raise "
                    "--up or --down if they limit it; a new run needs less with fewer exchanges "
                    "(schedule.sync_every), adapters (model.lora) or a thinner codec (codec.up, codec.down): "
                    "p2pdiloco plan tells what fits"
                )
        self._begin((now, steps, carried, others))

    def _begin(self, start: tuple[float, int, tuple[int, int], int] | None) -> None:
        self._start, self._looks, self._waited = start, 0, (0, 0)


def _rate(bytes_per_s: float) -> str:
    return f"{8e-3 * bytes_per_s:,.0f} kbit/s"
