"""Held-out losses of the global model: choice of the peer that measures next, and the loss that this peer shows.

An evaluation is the claim of one peer. Each peer shows the newest one that the others support: one wrong figure among
several moves what is shown by no more than ``NEAR`` beyond an honest one.
"""

from __future__ import annotations

import math
from collections import deque

from p2pdiloco.protocol.chain import HeadChange
from p2pdiloco.protocol.effects import Evaluate
from p2pdiloco.protocol.events import Evaluated
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import MOST_LOSS, CommitHeader, Evaluation
from p2pdiloco.protocol.ownership import EVALUATION_DUTY, ranked_owners
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support

RECENT = 16
"""An evaluation is outdated once this many newer ones were due."""
NEAR = 0.05
"""Share by which an evaluation may lie outside of the middle half and is still supported."""
FALL = 3.0
"""Factor by which a loss may fall from one evaluation to the next before the newer of two peers' is doubted."""
FRESH = 2
"""Number of newer ones that may be due until the one shown before makes room for any other that is supported."""
JUMP = 0.5
"""A loss that is so much above a peer's best recent one, in nats or as a share of it (whichever is more), is a jump."""
JUMPS = 2
"""Evaluations in a row that a peer must have found so high."""
JUMPED_LEAST = 2
"""Peers that must have found a jump."""


class Evaluations:
    """Evaluations of one run."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.shown: Evaluation | None = None
        """The newest evaluation that is supported, as of the last one that was recorded."""
        self._latest: dict[PeerId, Evaluation] = {}
        """The latest evaluation of each connected peer and of this one."""
        self._usual: dict[PeerId, deque[float]] = {}
        """The latest losses of each peer that were no jumps."""
        self._jumps: dict[PeerId, int] = {}
        """How many evaluations of a peer in a row are far above its usual ones."""
        self._rounds = 0
        """Rounds of H steps that shard 0 has made."""
        self._alarms: dict[PeerId, int] = {}
        """Versions at which peers have first found a jump, until most others have measured, too."""
        self._muted: dict[PeerId, int] = {}
        """Peers whose jump most others have not found, and the version until which theirs alarm nobody. It survives the
        end of a connection."""

    def on_head_changed(self, change: HeadChange) -> None:
        """Have the learner measure shard 0's new version, if an evaluation is due and this peer is selected."""
        core, version, every = self.core, change.head.version, self.core.config.evaluation_every
        if change.shard != 0 or not every:
            return
        # An owner may state a step far ahead: only what is believed counts, or each of its commits would be measured.
        before, self._rounds = self._rounds, min(core.chains[0].step, core.step) // core.config.sync_every
        is_due = self._rounds // every > before // every and isinstance(change.taken, CommitHeader)
        if not is_due or core.learner is None or core.learner.is_idle:
            return
        able = core.participation.participants(change.shard) | {core.config.peer}
        candidates = tuple((peer, 1.0) for peer in sorted(able))
        is_drawn = ranked_owners(core.config.run, EVALUATION_DUTY, version, candidates)[0] == core.config.peer
        if is_drawn or self.is_alarmed or core.config.peer not in self._usual:
            core.effects.append(Evaluate(version))

    def on_evaluated(self, event: Evaluated) -> None:
        """Send the loss that this peer's learner has measured to all peers."""
        core = self.core
        if not is_loss(event.loss):
            core.note(
                "warning",
                "evaluation",
                f"the held-out loss measured here is {event.loss} and is not sent to other peers: the model has "
                "diverged, or this learner's data cannot be read",
            )
            return
        evaluation = Evaluation(event.version, self._merged_tokens(), core.step, event.loss)
        self._record(core.config.peer, evaluation)
        core.send(core.membership.live, evaluation)

    def on_evaluation(self, peer: PeerId, evaluation: Evaluation) -> None:
        """Record a loss that another peer has measured (rule S3)."""
        before = self._latest.get(peer)
        is_newer = before is None or evaluation.step > before.step
        if is_newer and is_loss(evaluation.loss) and self.core.plausible(evaluation.step) == evaluation.step:
            self._record(peer, evaluation)

    def _record(self, peer: PeerId, evaluation: Evaluation) -> None:
        """Take a new evaluation, and count whether it is a jump (rule K1): each peer is compared with itself."""
        self._latest[peer] = evaluation
        usual = self._usual.setdefault(peer, deque(maxlen=RECENT))
        best = min(usual, default=math.inf)
        if evaluation.loss > best + max(JUMP, JUMP * best) and self._jumps.get(peer, 0) < RECENT:
            self._jumps[peer] = self._jumps.get(peer, 0) + 1
            self._alarms.setdefault(peer, evaluation.version)
        else:
            if self._jumps.pop(peer, 0) >= RECENT:
                usual.clear()  # it stays: this is the usual loss now
            usual.append(evaluation.loss)
        self._show()
        self._mute()

    def _mute(self) -> None:
        """Mute peers whose jump most others that measured that version, or a later one, have not found."""
        for author, version in [*self._alarms.items()]:
            others = [peer for peer, one in self._latest.items() if peer != author and one.version >= version]
            confirming, total = sum(peer in self._jumps for peer in others), len(self._latest) - 1
            is_refuted = Support(len(others) - confirming, total).is_most
            if is_refuted:
                self._muted[author] = version + RECENT * self.core.config.evaluation_every
            if is_refuted or Support(confirming, total).is_most or author not in self._latest:
                del self._alarms[author]

    @property
    def is_alarmed(self) -> bool:
        """Whether the newest evaluation of some peer that is not muted is a jump."""
        head = self.core.chains[0].head
        version = 0 if head is None else head.version
        self._muted = {peer: until for peer, until in self._muted.items() if until > version}
        return not self._jumps.keys() <= self._muted.keys()

    @property
    def is_doubtful(self) -> bool:
        """Whether the newest evaluation of this peer, or those of most peers, are jumps. One member alone must not keep
        the others' checkpoints from being known as good."""
        return self.core.config.peer in self._jumps or Support(len(self._jumps), len(self._latest)).is_most

    @property
    def has_jumped(self) -> bool:
        """Whether this peer and more than half of the members that measure lately have found a jump of the loss, twice
        in a row."""
        found = [peer for peer in self._latest if self._jumps.get(peer, 0) >= JUMPS]
        is_most = Support(len(found), len(self._latest)).is_most
        return is_most and len(found) >= JUMPED_LEAST and self.core.config.peer in found

    def forget_jump(self) -> None:
        """Forget the evaluations of a model that the run has left."""
        self.shown = None
        self._latest.clear()
        self._jumps.clear()
        self._alarms.clear()

    def _show(self) -> None:
        """Recompute the evaluation that is shown (rule S3b)."""
        core = self.core
        here = core.membership.peers.keys() | {core.config.peer}
        self._latest = {peer: one for peer, one in self._latest.items() if peer in here}
        self._usual = {peer: usual for peer, usual in self._usual.items() if peer in here}
        self._jumps = {peer: count for peer, count in self._jumps.items() if peer in here}
        head = core.chains[0].head
        version, every = 0 if head is None else head.version, core.config.evaluation_every
        recent = [one for one in self._latest.values() if one.version >= version - RECENT * every]
        losses = sorted(one.loss for one in recent)
        if not losses:
            return
        cut = max(1, len(losses) // 4) if len(losses) > 2 else 0
        low, high = losses[cut] * (1.0 - NEAR), losses[-1 - cut] * (1.0 + NEAR)
        newest = max((one for one in recent if low <= one.loss <= high), key=lambda one: one.step)
        before = self.shown
        if before is not None and before.version >= version - FRESH * every:
            if newest.step < before.step:
                return  # the author of the one before has measured again, and the others have yet to support that
            if (
                len(recent) == 2
                and newest != self._latest.get(core.config.peer)
                and not before.loss / FALL <= newest.loss <= before.loss + max(JUMP, JUMP * before.loss)
            ):
                return
        if head is not None:  # nobody claims more for the figure than is merged here
            newest = Evaluation(
                min(newest.version, version), min(newest.tokens, self._merged_tokens()), newest.step, newest.loss
            )
        self.shown = newest

    def _merged_tokens(self) -> int:
        """Return the tokens that this peer's chains have merged."""
        return max((chain.counts.merged for chain in self.core.chains if chain.head is not None), default=0)


def is_loss(value: float) -> bool:
    """Return whether ``value`` can be a held-out loss."""
    return math.isfinite(value) and 0.0 <= value <= MOST_LOSS
