"""A run's budget of tokens: how much of it the chains hold, and when it is spent.

Rules of this file:
1. What counts is what is merged, as the chains say: it does not depend on who is fastest, on how many came, or on steps
   that were lost. Shards are merged one after the other; of the run's progress their mean is taken.
2. When a budget ends, learners hold what they made since the last turns. That is half a turn's tokens in the mean,
   which merging will add: the learners stop so much earlier (C7a).
"""

from __future__ import annotations

from typing import Final

from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.effects import AdoptStep, PauseLearner
from p2pdiloco.protocol.identifiers import LearnerId, ShardId

TOLD: Final = 500
"""Parts of the budget in which a learner is told of it: its rate follows."""


class TokenBudget:
    """Of one run; without a limit it only counts."""

    __slots__ = ("_core", "_merged", "_newest", "_paused", "_under_way", "told")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._merged = [0] * len(core.chains)
        """By shard: its chain's tokens."""
        self._newest = [0] * len(core.chains)
        """By shard: those of its last version."""
        self._under_way = 0
        """The sum of these."""
        self.told = 0
        """What the learner knows of ``merged``."""
        self._paused: LearnerId | None = None

    @property
    def merged(self) -> int:
        """Tokens, the mean over the shards."""
        return sum(self._merged) // len(self._merged)

    @property
    def is_spent(self) -> bool:
        """Whether what is merged, and what is on its way, is all that the run is to have."""
        total = self._core.config.sizes.budget
        return 0 < total <= self.merged + self._under_way // (2 * len(self._merged))

    @property
    def last_step(self) -> int:
        """The global step at which the run ends, as far as can be told."""
        core = self._core
        if not core.config.sizes.budget:
            return core.config.total_steps
        if self.is_spent:
            return core.step
        rest = core.config.sizes.budget / max(1, self.merged)
        return min(core.config.total_steps, max(core.step + 1, round(core.step * rest)))

    def moved(self, shard: ShardId) -> None:
        """The shard has a new head."""
        core, tokens = self._core, self._core.head(shard).tokens
        if not core.config.sizes.budget:
            return
        newest = max(0, tokens - self._merged[shard])
        self._under_way += newest - self._newest[shard]
        self._merged[shard], self._newest[shard] = tokens, newest
        merged = self.merged
        if core.learner is not None and abs(merged - self.told) * TOLD >= core.config.sizes.budget:
            self.told = merged
            core.effects.append(AdoptStep(core.step, merged))
        self.look()

    def look(self) -> None:
        """Stop the learner if there is nothing left to train."""
        core = self._core
        learner = core.learner
        if not core.is_current or core.departure or learner is None or learner.is_paused or learner.id == self._paused:
            return
        if self.is_spent:
            self._paused = learner.id
            core.effects.append(PauseLearner())
