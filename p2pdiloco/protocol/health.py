"""Health warnings for people: the learner contributes nothing usable, does not answer, or no versions are made.

Rules of this file:
1. A warning is logged once when the problem begins and once when it ends. In between it is part of the status.
2. The other peers continue: a learner that cannot contribute does not participate, so no owner waits for it and no
   quorum counts it.
"""

from __future__ import annotations

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.state import Core

POISONED_ROUNDS = 2
"""Consecutive failures to encode one and the same shard after which a learner is reported as poisoned."""
STUCK_PERIODS = 4
"""Periods of H steps without a new version of a shard after which it is stuck, but at least ``stuck_s``."""

SILENT_S = 20.0
"""A learner is silent if it does not answer a request for a snapshot for so long,"""
SILENT_STEPS = 8
"""or for so many of its own steps if that is longer, because it answers between two steps."""
LOOKS = 20
"""Number of checks of progress within ``stuck_s``."""


class HealthWarnings:
    """Health warnings of this peer. An empty string means no warning."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.poisoned = ""
        self.silent = ""
        self.stuck = ""
        self._failed_rounds: dict[ShardId, int] = {}
        """Consecutive rounds that could not be encoded, by shard."""
        self._moved_at = [0.0] * len(core.chains)
        self._idle_at = 0.0
        """Last time at which no learner participated."""
        self._look_at = 0.0

    def sentences(self) -> tuple[str, ...]:
        """Return the current warnings, for the status."""
        return tuple(filter(None, (self.poisoned, self.silent, self.stuck)))

    # -- the learner ---------------------------------------------------------------------------------------------------

    def on_learner_changed(self) -> None:
        """Forget the last learner's failures."""
        self._failed_rounds, self.poisoned, self.silent = {}, "", ""

    def on_encoded(self, shard: ShardId) -> None:
        """Record that an outer gradient could be encoded."""
        self._failed_rounds.pop(shard, None)
        if self.poisoned and max(self._failed_rounds.values(), default=0) < POISONED_ROUNDS:
            self.poisoned = ""
            self._update_ability()
            self.core.note("info", "poisoned", "the learner's outer gradients can be encoded again")

    def on_encode_failed(self, shard: ShardId, reason: str) -> None:
        """Record that an outer gradient could not be encoded although its base is still the head.

        After POISONED_ROUNDS the learner stops participating. Otherwise the shard would stand still while owners wait
        for this learner.
        """
        rounds = self._failed_rounds[shard] = self._failed_rounds.get(shard, 0) + 1
        if rounds >= POISONED_ROUNDS and not self.poisoned:
            self.poisoned = (
                f"the learner's outer gradients cannot be encoded, {rounds} rounds in a row ({reason}): "
                "its progress is not merged, and the others continue without it. Check its loss, and restart it"
            )
            self._update_ability()
            self.core.note("warning", "poisoned", self.poisoned)

    def on_snapshot(self) -> None:
        """Record that the learner has answered."""
        if self.silent:
            self.silent = ""
            self._update_ability()
            self.core.note("info", "silent", "the learner answers again")

    def on_silence(self, since_s: float) -> None:
        """Check a snapshot request that is ``since_s`` seconds old; a silent learner stops participating."""
        learner = self.core.learner
        if learner is None or self.silent or since_s <= max(SILENT_S, SILENT_STEPS * learner.step_time_s):
            return
        self.silent = (
            f"the learner has not answered for {since_s:.0f} s: the others continue without it. If it hangs, this node "
            "starts another one within minutes; restart a training script yourself"
        )
        self._update_ability()
        self.core.note("warning", "silent", self.silent)

    def _update_ability(self) -> None:
        learner = self.core.learner
        if learner is not None:
            learner.is_able = not (self.poisoned or self.silent)

    # -- the swarm -----------------------------------------------------------------------------------------------------

    def on_head_changed(self, change: HeadChange) -> None:
        """Record the time of the shard's new version."""
        self._moved_at[change.shard] = self.core.now

    def check_progress(self) -> None:
        """Check at intervals whether every shard has had a new version recently."""
        core = self.core
        if core.now < self._look_at:
            return
        self._look_at = core.now + core.config.stuck_s / LOOKS
        has_learners = core.step_time_s() > 0.0 or bool(core.participation.participants() - {core.config.peer})
        if not has_learners or not core.is_current or core.departure:
            self._idle_at = core.now
        shard = min(range(len(self._moved_at)), key=self._moved_at.__getitem__)
        since_s = core.now - max(self._moved_at[shard], self._idle_at)
        period_s = core.config.sync_every * core.membership.median_step_s(core.step_time_s())
        if since_s <= max(core.config.stuck_s, STUCK_PERIODS * period_s):
            if self.stuck:
                self.stuck = ""
                core.note("info", "stuck", "new versions are merged again")
        elif not self.stuck:
            able = len(core.participation.participants(ShardId(shard)))
            self.stuck = (
                f"no new version of shard {shard} for {since_s:.0f} s: {able} learners contribute, a merge "
                f"needs {core.config.min_quorum}. Check for learners that contribute nothing, and the links"
            )
            core.note("warning", "stuck", self.stuck)
