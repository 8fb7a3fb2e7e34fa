"""Metrics of a peer: running totals, and an event log with one JSON object per line (``metrics.jsonl``).

A full disk costs lines of the log. It never stops the peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Any, Self, TextIO

from p2pdiloco.util import logs
from p2pdiloco.util.files import make_parent, open_regular, rotate
from p2pdiloco.wire.control_messages import PeerStatus
from p2pdiloco.wire.learner_ipc import Progress

log = logs.get("node")

SMOOTHING = 0.1
# Size at which the event log is rotated.
MOST_BYTES = 12 << 20
# Number of rotated event logs to keep: 48 MiB in all. With the learner's logs, a peer's logs stay below 100 MB however
# long it runs. That covers half a day of a small model's exchanges.
KEPT = 3
# Minimum interval between two ``progress`` events.
PROGRESS_S = 1.0


class Metrics:
    """Running totals of this process, and the event log.

    ``listener`` gets each event too, even if the log cannot be written.
    """

    def __init__(self, path: Path, listener: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._bytes = 0
        self._is_failing = False
        self._progress_at = 0.0
        # Smoothed training loss.
        self.loss: float | None = None
        self.reward: float | None = None
        self.tokens_per_second = 0.0
        self.blocked_s = 0.0
        self.overhead_s = 0.0
        self.compute_s = 0.0
        # CPU time of this process since the learner's first step.
        self.node_cpu_s = 0.0
        self._cpu_began_s = 0.0
        self.steps = 0
        self.tokens = 0
        # Share of ``tokens`` that the present learner process trained.
        self.learner_tokens = 0
        self._listener = listener
        # Protocol violations of other peers, by kind.
        self.faults: Counter[str] = Counter()

    def __enter__(self) -> Self:
        make_parent(self._path)
        self._open()
        return self

    def _open(self) -> None:
        # Closed in __exit__.
        self._file = open(self._path, "a", encoding="utf-8", buffering=1, opener=open_regular)  # noqa: SIM115
        self._bytes = self._file.tell()

    def _rotate(self) -> None:
        """Rotate the event log, which has reached its maximum size."""
        if self._file is not None:
            self._file.close()
        rotate(self._path, keep=KEPT, most_bytes=KEPT * MOST_BYTES)
        self._open()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
                self._file.close()
            self._file = None

    def write(self, event: str, **fields: object) -> None:
        """Append one event. Its ``time`` is Unix time in seconds."""
        told = {"time": round(time.time(), 3), "event": event, **fields}
        self._listener(told)
        if self._file is None:
            return
        line = json.dumps(told) + "\n"
        try:
            if self._bytes + len(line) > MOST_BYTES:
                self._rotate()
            self._bytes += self._file.write(line)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("cannot write the event log", path=self._path, reason=os.strerror(error.errno or 0))
            self._is_failing = True

    def report_fault(self, peer: str, what: str, reason: str) -> None:
        """Count a protocol violation of ``peer``, whose message was dropped.

        The log shows the first, second, fourth, eighth, ... fault of a kind, so that nobody can flood it.
        """
        self.faults[what] += 1
        self.write("fault", peer=peer, what=what)
        times = self.faults[what]
        if times.bit_count() == 1:
            log.warning(f"malformed {what} dropped", peer=peer, reason=reason, times=times)

    def learner_began(self) -> None:
        """Reset the counters of a learner process, because a new one starts at zero."""
        self.learner_tokens = 0

    def progress(self, progress: Progress, *, step: int, sent_bytes: int) -> None:
        """Record one inner step of the learner. ``step`` is the global step, ``sent_bytes`` what this peer has sent so
        far."""
        made = progress.tokens - self.learner_tokens
        self.learner_tokens = progress.tokens
        self.tokens += made
        self.steps += 1
        self.blocked_s += progress.blocked_s
        self.overhead_s += progress.overhead_s
        self.compute_s += progress.step_time_s
        rate = made / max(progress.step_time_s, 1e-9)
        is_first = self.steps == 1
        if is_first:
            self._cpu_began_s = time.process_time()
        self.node_cpu_s = time.process_time() - self._cpu_began_s
        self.reward = progress.reward
        if progress.loss is not None:
            self.loss = progress.loss if self.loss is None else self.loss + SMOOTHING * (progress.loss - self.loss)
        self.tokens_per_second = (
            rate if is_first else self.tokens_per_second + SMOOTHING * (rate - self.tokens_per_second)
        )
        now = time.monotonic()
        if now - self._progress_at >= PROGRESS_S:
            self._progress_at = now
            self.write(
                "progress",
                step=step,
                steps=progress.steps,
                tokens=self.tokens,
                sent_bytes=sent_bytes,
                loss=None if progress.loss is None else round(progress.loss, 4),
                step_time_s=round(progress.step_time_s, 4),
                compute_s=round(self.compute_s, 3),
                overhead_s=round(self.overhead_s, 3),
                blocked_s=self.blocked_s,
                node_cpu_s=round(self.node_cpu_s, 3),
            )


def progress_fields(status: PeerStatus) -> dict[str, object]:
    """Return a peer's progress as fields of one log line."""
    fields: dict[str, object] = {"step": status.step, "of": status.total_steps}
    if status.train_loss is not None:
        fields["loss"] = round(status.train_loss, 3)
    if status.reward is not None:
        fields["reward"] = round(status.reward, 3)
    if status.held_out_loss is not None:
        fields |= {"held_out": round(status.held_out_loss, 3), "held_out_step": status.held_out_step}
    if status.tokens_per_second:
        fields["tokens_per_s"] = round(status.tokens_per_second)
    fields |= {
        "live": status.live,
        "participating": status.participating,
        "versions": f"{status.version_min}-{status.version_max}",
        "up_mb": round(status.bytes_up / 1e6, 1),
    }
    return {**fields, "trouble": status.trouble} if status.trouble else fields


# -- Payload traffic ---------------------------------------------------------------------------------------------------


# Allowance for a message's control body and frame headers.
FRAMING_BYTES = 256


class PayloadTraffic:
    """Counts payload bytes on the wire per parameter, in one direction: of contributions to owners, or of commits from
    owners."""

    def __init__(self, elements: Sequence[int]) -> None:
        """``elements``: number of parameters of each shard."""
        self._elements = elements
        self.bytes = 0
        self._parameters = 0

    def count(self, shard: int, payload: Sized, receivers: int) -> None:
        """Count a payload that was sent to ``receivers`` peers."""
        self.bytes += receivers * (len(payload) + FRAMING_BYTES)
        self._parameters += receivers * self._elements[shard]

    def per_parameter(self) -> float:
        """Return the bytes per parameter that was sent; 0 if there were none."""
        return self.bytes / self._parameters if self._parameters else 0.0
