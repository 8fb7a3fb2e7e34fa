"""What another head means for this peer's learner: which of its contributions leave its delta, and which return to it.

Rules of this file:
1. The learner's own marks decide, by the edges of its ledger.
2. Nobody can speak in a learner's name: a chain that holds tokens which it never gave is not taken.
"""

from __future__ import annotations

from p2pdiloco.protocol.chain import MARK_LIFE_LOGS, NO_MARK
from p2pdiloco.protocol.contributions import Contributions
from p2pdiloco.protocol.core import Core, LearnerView
from p2pdiloco.protocol.events import Mark, ShardState
from p2pdiloco.protocol.identifiers import Digest, LearnerId, ShardId
from p2pdiloco.protocol.ledger import STAY, Walk
from p2pdiloco.protocol.messages import CommitHeader


class Carry:
    """Between chains and the learner."""

    def __init__(self, core: Core, contributions: Contributions) -> None:
        self.core = core
        self.contributions = contributions

    def problem(self, target: CommitHeader | ShardState) -> str | None:
        """Why what a commit or a state says of this peer's learner is not so, or None."""
        learner = self.core.learner
        if learner is None:
            return None
        if isinstance(target, ShardState):
            shard, to_tokens = target.head.shard, self.mark_in(learner, target).tokens
        else:
            shard = target.shard
            to_tokens = max((c.tokens_to for c in target.contributors if c.learner == learner.id), default=0)
        if to_tokens <= max(learner.marks[shard].tokens, self.contributions.ledgers[shard].last):
            return None
        return f"it holds tokens of this peer's learner that it has not given, up to {to_tokens}"

    def moves(
        self, shard: ShardId, to_tokens: int | None
    ) -> tuple[LearnerId | None, tuple[Digest, ...], tuple[Digest, ...], bool]:
        """What ``Apply`` and ``Install`` say of the learner, when the shard's chain comes to count its tokens up to
        ``to_tokens`` (None: as before): whose delta it is, what is settled, what is restored, whether it is reset."""
        core, learner = self.core, self.core.learner
        walk: Walk | None = STAY
        if learner is not None and to_tokens is not None and not core.config.is_overwrite:
            walk = self.walk(shard, to_tokens)
        who = None if learner is None else learner.id
        return (who, (), (), True) if walk is None else (who, walk.settled, walk.restored, core.config.is_overwrite)

    def walk(self, shard: ShardId, to_tokens: int) -> Walk | None:
        """What leaves the learner's delta, and what returns to it, when the shard's chain counts its tokens up to
        ``to_tokens``; None if that cannot be told."""
        learner = self.core.learner
        assert learner is not None
        ledger = self.contributions.ledgers[shard]
        walk = ledger.walk(learner.marks[shard].tokens, to_tokens)
        if walk is None:
            self.core.note(
                "warning",
                "carry",
                f"shard {shard}: contributions between own tokens {learner.marks[shard].tokens} and {to_tokens} are "
                "forgotten, the learner takes the global parameters and loses its unmerged progress",
            )
        return walk

    def move_mark(self, shard: ShardId, target: CommitHeader | ShardState) -> None:
        """The shard's chain has become ``target``'s: how far it has merged the learner."""
        learner = self.core.learner
        if learner is None:
            return
        mark = self.core.chains[shard].marks.get(learner.id)
        if isinstance(target, ShardState):
            own = self.mark_in(learner, target)
        else:
            own = learner.marks[shard] if mark is None else mark
        learner.marks[shard] = own
        if self.core.config.is_overwrite:
            learner.threw_away(shard)

    def mark_in(self, learner: LearnerView, state: ShardState) -> Mark:
        """How far a state's chain has merged the learner. What it may have forgotten for its age stays merged."""
        own = learner.marks[state.head.shard]
        is_forgotten = state.head.version - own.version > MARK_LIFE_LOGS * self.core.config.log_length
        return dict(state.marks).get(learner.id, own if is_forgotten else NO_MARK)
