"""Held-out losses of the global model: who measures the next one, and the newest that is known."""

from __future__ import annotations

from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.effects import Evaluate
from p2pdiloco.protocol.events import Evaluated
from p2pdiloco.protocol.messages import Evaluation
from p2pdiloco.protocol.ownership import EVALUATION_DUTY, ranked_owners


class Evaluations:
    """Of one run."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.newest: Evaluation | None = None

    def consider(self, version: int) -> None:
        """Shard 0 is at ``version``: if one is due, one of those who can measures it."""
        core = self.core
        every = core.config.evaluation_every
        if not every or version % every or core.learner is None or core.learner.is_idle:
            return
        able = {*core.membership.participating, core.config.peer}
        candidates = tuple((peer, 1.0) for peer in sorted(able))
        if ranked_owners(core.config.run, EVALUATION_DUTY, version, candidates)[0] == core.config.peer:
            core.effects.append(Evaluate(version))

    def made(self, event: Evaluated) -> None:
        """This peer's learner has measured: tell all."""
        core = self.core
        tokens = max((c.head.tokens for c in core.chains if c.head is not None), default=0)
        self.newest = Evaluation(event.version, tokens, core.step, event.loss)
        core.send(core.membership.live, self.newest)

    def heard(self, evaluation: Evaluation) -> None:
        """Another peer's (rule S3)."""
        is_newer = self.newest is None or evaluation.step > self.newest.step
        if is_newer and self.core.plausible(evaluation.step) == evaluation.step:
            self.newest = evaluation
