"""The learner's side of a turn: snapshot, encode, offer to the owner, and to the next owner if that one fails.

Rules of this file:
1. A fragment has at most one open turn, and at most one snapshot being encoded. A turn that comes while the last is
   open is skipped, never queued.
2. A turn is closed once every shard of the fragment has moved past the head it had when the turn opened.
3. A contribution covers all of the learner's tokens that the base's chain has not merged.
"""

from __future__ import annotations

from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.effects import AdoptStep, Encode, Snapshot
from p2pdiloco.protocol.events import Encoded, Snapshotted
from p2pdiloco.protocol.identifiers import Digest, FragmentId, PeerId, ShardId
from p2pdiloco.protocol.ledger import Ledger
from p2pdiloco.protocol.merging import Merging
from p2pdiloco.protocol.messages import Contribution, Contributor, Head, Turn
from p2pdiloco.protocol.ownership import ranked_owners

NO_PAYLOAD = Digest("")


class FragmentTurn:
    """One fragment's turn."""

    __slots__ = ("announced", "bases", "encoding", "is_open", "is_snapshotting", "opened_at", "step", "steps", "tokens")

    def __init__(self) -> None:
        self.is_open = False
        self.step = 0
        """Of the open turn, or the last one."""
        self.bases: dict[ShardId, Digest] = {}
        """Shards that have not moved since the turn opened, with the heads they had."""
        self.opened_at = 0.0
        self.announced = 0
        """A later turn that was announced while this one was open here."""
        self.is_snapshotting = False
        self.encoding: set[ShardId] = set()
        self.steps = 0
        """The learner's counters at the last snapshot."""
        self.tokens = 0


class Pending:
    """A contribution that has not been merged or superseded."""

    __slots__ = ("contribution", "rank", "target")

    def __init__(self, contribution: Contribution) -> None:
        self.contribution = contribution
        self.rank = 0
        self.target = PeerId("")


class Contributing:
    """Turns of all fragments, and this learner's contributions."""

    def __init__(self, core: Core, merging: Merging) -> None:
        self.core = core
        self.merging = merging
        self.turns = [FragmentTurn() for _ in core.config.fragments]
        self.ledgers = [Ledger(core.config.log_length) for _ in core.chains]
        self.pending: dict[ShardId, Pending] = {}

    def learner_changed(self) -> None:
        """Another learner, or none: what the last one left unfinished is void."""
        self.pending.clear()
        for ledger in self.ledgers:
            ledger.edges.clear()
        for turn in self.turns:
            turn.is_snapshotting = False
            turn.encoding.clear()

    # -- turns ---------------------------------------------------------------------------------------------------------

    def stepped(self, steps: int) -> None:
        """The learner made ``steps`` more inner steps: announce the turns that became due."""
        config = self.core.config
        first = self.core.step + 1
        self.core.step += steps
        if not self.core.is_current:
            return
        for fragment in range(len(self.turns)):
            since = (self.core.step - config.offset(FragmentId(fragment))) % config.sync_every
            due = self.core.step - since
            if due >= first and due > 0:
                self.open(FragmentId(fragment), due, is_mine=True)

    def adopt_step(self, step: int) -> None:
        """Another peer is at ``step``: this one is, too."""
        if step > self.core.step:
            self.core.step = step
            if self.core.learner is not None:
                self.core.effects.append(AdoptStep(step))

    def heard(self, message: Turn) -> None:
        """Another peer announces a turn."""
        self.adopt_step(message.step)
        self.open(message.fragment, message.step, is_mine=False)

    def open(self, fragment: FragmentId, step: int, *, is_mine: bool) -> None:
        """Open a turn unless the fragment's last one is still open or this one is old."""
        turn, core = self.turns[fragment], self.core
        if step <= turn.step:
            return
        if turn.is_open:
            core.note("debug", "turn", f"fragment {fragment} step {step} skipped: turn {turn.step} is still open")
            if not is_mine:
                turn.announced = max(turn.announced, step)
            if any(not self._has_given(shard) for shard in turn.bases):
                self._ask_for_snapshot(fragment)
            return
        turn.is_open = True
        turn.step = step
        turn.opened_at = core.now
        turn.bases = {shard: core.head(shard).id for shard in core.config.fragments[fragment]}
        if is_mine:
            core.send(core.membership.live, self.announcement(fragment))
        for shard in turn.bases:
            self.merging.open(shard, step)
        self._ask_for_snapshot(fragment)

    def announcement(self, fragment: FragmentId) -> Turn:
        """The open turn as others hear it."""
        heads = tuple(self.core.head(shard) for shard in self.core.config.fragments[fragment])
        return Turn(fragment, self.turns[fragment].step, heads)

    def moved(self, shard: ShardId) -> None:
        """The shard has a new head: what was pending is merged or stale, and its turn may be over."""
        core = self.core
        self.pending.pop(shard, None)
        core.alarms.cancel(("takeover", shard))
        fragment = core.fragment_of[shard]
        turn = self.turns[fragment]
        turn.step = max(turn.step, core.chains[shard].step)
        turn.bases.pop(shard, None)
        if turn.is_open and not turn.bases:
            turn.is_open = False
            self.merging.measured_turn(core.now - turn.opened_at)
            if turn.announced > turn.step:
                self.open(fragment, turn.announced, is_mine=False)

    # -- snapshot and encode -------------------------------------------------------------------------------------------

    def _ask_for_snapshot(self, fragment: FragmentId) -> None:
        turn = self.turns[fragment]
        if self.core.learner is not None and not turn.is_snapshotting and not turn.encoding:
            turn.is_snapshotting = True
            self.core.effects.append(Snapshot(fragment, turn.step))

    def snapshotted(self, event: Snapshotted) -> None:
        """The learner copied a fragment: encode its shards, or say that there is nothing to give."""
        turn, core = self.turns[event.fragment], self.core
        if core.learner is None or not turn.is_snapshotting:
            return
        turn.is_snapshotting = False
        turn.steps, turn.tokens = event.steps, event.tokens
        if event.step != turn.step:
            if turn.is_open:
                self._ask_for_snapshot(event.fragment)
            return
        for shard in turn.bases:
            if self._has_given(shard):
                continue
            if turn.tokens > core.learner.marks[shard].tokens:
                turn.encoding.add(shard)
                core.effects.append(Encode(shard, core.head(shard)))
            else:
                self._contribute(shard, NO_PAYLOAD, 0)

    def _has_given(self, shard: ShardId) -> bool:
        """Whether tokens of ours are on offer for the shard's next version."""
        pending = self.pending.get(shard)
        return pending is not None and pending.contribution.contributor.tokens > 0

    def encoded(self, event: Encoded) -> None:
        """A shard's outer gradient is ready: offer it, unless its base is history."""
        turn = self.turns[self.core.fragment_of[event.shard]]
        if event.shard in turn.encoding:
            if turn.bases.get(event.shard) == event.base == self.core.head(event.shard).id:
                self._contribute(event.shard, event.payload, event.payload_bytes)
            self._finished_encoding(turn, event.shard)

    def encode_failed(self, shard: ShardId, reason: str) -> None:
        """Nothing to offer this time; the learner keeps its progress, and says so, that nobody waits for it."""
        turn = self.turns[self.core.fragment_of[shard]]
        if shard in turn.encoding:
            self.core.note("debug", "contribution", f"shard {shard} not encoded: {reason}")
            if turn.bases.get(shard) == self.core.head(shard).id:
                self._contribute(shard, NO_PAYLOAD, 0)
            self._finished_encoding(turn, shard)

    def _finished_encoding(self, turn: FragmentTurn, shard: ShardId) -> None:
        turn.encoding.discard(shard)
        is_answered = any(s in self.pending for s in turn.bases)
        if turn.is_open and not turn.encoding and not is_answered:
            self._ask_for_snapshot(self.core.fragment_of[shard])

    # -- offer ---------------------------------------------------------------------------------------------------------

    def _contribute(self, shard: ShardId, payload: Digest, payload_bytes: int) -> None:
        core = self.core
        turn, learner = self.turns[core.fragment_of[shard]], core.learner
        assert learner is not None
        mark = learner.marks[shard]
        if payload:
            contributor = Contributor(learner.id, mark.tokens, turn.tokens, mark.steps, turn.steps)
            self.ledgers[shard].record(mark.tokens, turn.tokens, payload)
        else:
            contributor = Contributor(learner.id, mark.tokens, mark.tokens, mark.steps, mark.steps)
        base = core.head(shard)
        self.pending[shard] = Pending(Contribution(shard, base, turn.step, contributor, payload, payload_bytes))
        self._offer(shard)

    def _offer(self, shard: ShardId) -> None:
        """Give the pending contribution to the owner of its rank."""
        core, pending = self.core, self.pending[shard]
        version = pending.contribution.base.version + 1
        ranked = ranked_owners(core.config.run, shard, version, core.membership.candidates)
        pending.target = ranked[pending.rank % len(ranked)]
        if pending.contribution.contributor.tokens:
            core.alarms.set(("takeover", shard), core.now + self.merging.takeover_s())
        if pending.target == core.config.peer:
            self.merging.collect(pending.target, pending.contribution)
        else:
            core.send((pending.target,), pending.contribution)

    def takeover_due(self, shard: ShardId) -> None:
        """The owner did not commit in time: the next one gets the contribution, too."""
        pending = self.pending.get(shard)
        if pending is not None:
            pending.rank += 1
            self.core.note(
                "info",
                "takeover",
                f"shard {shard}: no commit from {pending.target} in time, offering to rank {pending.rank}",
            )
            self._offer(shard)

    def candidates_changed(self) -> None:
        """Owners that are gone, or on their way out: their contributions go to the new owners at once."""
        able = {peer for peer, _ in self.core.membership.candidates}
        for shard in [s for s, p in self.pending.items() if p.target not in able]:
            pending = self.pending[shard]
            self.core.note("info", "takeover", f"shard {shard}: owner {pending.target} is gone, offering again")
            pending.rank = 0
            self._offer(shard)

    def refused(self, shard: ShardId, base: Digest, head: Head, reason: str) -> None:
        """An owner refused: the learner keeps its progress and contributes it on the next turn."""
        pending = self.pending.get(shard)
        if pending is not None and pending.contribution.base.id == base:
            self.core.note(
                "debug", "contribution", f"shard {shard} refused ({reason}), their version is {head.version}"
            )
