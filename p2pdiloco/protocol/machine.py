"""The merge protocol as one deterministic machine: Decoupled DiLoCo (arXiv 2604.21428) without its syncer.

Rules of this file:
1. ``handle(event, now)`` is the only input, its list of effects the only output. There are no clocks, randomness,
   sockets, tensors or logs here or below. The same events at the same times give the same effects, in any process.
2. The driver runs effects in order. Long work (encode, merge, apply, fetch) is an effect that ends in an event.
3. ``next_deadline()`` says when ``Woke`` is due if nothing else happens.
4. No message of another peer can break an assertion. A bad one is refused or ignored, with a reason.

One round, top to bottom: ``Stepped`` -> ``contributions.open`` -> ``Snapshot`` / ``Snapshotted`` -> ``Encode`` /
``Encoded`` -> ``Contribution`` -> ``aggregation.collect`` -> ``aggregation.decide`` -> ``Merge`` / ``Merged`` ->
``Commit`` -> ``replication.on_commit`` -> ``Apply`` / ``Applied`` -> ``on_head_changed``.
"""

from __future__ import annotations

from collections.abc import Container
from typing import assert_never

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.audits import Audits
from p2pdiloco.protocol.barred_owners import BarredOwners
from p2pdiloco.protocol.block_assignment import BlockAssignment
from p2pdiloco.protocol.chain import SizeOf, no_size
from p2pdiloco.protocol.commit_relay import relay_commit
from p2pdiloco.protocol.config import RunEnd, describe_end
from p2pdiloco.protocol.contributions import Contributions, DeltaReconciliation
from p2pdiloco.protocol.effects import Effect, Evaluate, MoveEnd
from p2pdiloco.protocol.evaluation import Evaluations
from p2pdiloco.protocol.going_back import GoingBack
from p2pdiloco.protocol.heartbeat import NEWS, Heartbeats
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.rejected_commits import RejectedCommits
from p2pdiloco.protocol.replication import Repair, Replication
from p2pdiloco.protocol.shutdown import Shutdown
from p2pdiloco.protocol.state import BEAT, LINE_WEIGHTS, Core, LearnerView, ProtocolConfig
from p2pdiloco.protocol.view import MachineView

# -- Invariants of one machine -----------------------------------------------------------------------------------------
# These hold after every event, whatever other peers do. The simulator checks the swarm's invariants
# (``tests/machine_sim/checkers.py``).


def check_chains(core: Core) -> None:
    """Check heads, their combined mark, and logs. Raises AssertionError."""
    assert not core.is_current or all(c.head is not None for c in core.chains)
    mark = 0
    for chain in core.chains:
        if chain.head is None:
            continue
        mark ^= int(chain.head.id[:15], 16)
        assert len(chain.log) == len(chain.log_ids) <= core.config.log_length
        if chain.log:
            assert chain.log_ids[-1] == chain.head.id
            assert chain.log[-1].tokens == chain.head.tokens
    assert mark == core.heads_mark
    if core.learner is not None:
        assert all(0 <= core.learner.unmerged(c.shard) <= core.learner.tokens for c in core.chains)


def check_work(core: Core, aggregation: Aggregation, contributions: Contributions, replication: Replication) -> None:
    """Check rounds, pending contributions and waiting commits. Raises AssertionError."""
    for shard, pending in contributions.pending.items():
        assert pending.contribution.base.id == core.head(shard).id, "a pending contribution's base is the head"
    for sync_round in contributions.rounds:
        for shard, (base, _) in sync_round.open.items():
            assert base == core.head(shard).id, "a round is over when the head moves"
    for waiting in replication.orphans.waiting.values():
        assert len(waiting) <= core.config.log_length
    for chain in core.chains:
        assert chain.shard in replication.asked or ("asked", chain.shard) not in core.alarms
    for chain, early in zip(core.chains, aggregation.early, strict=True):
        assert len(early) <= len(core.membership.peers) + (1 << chain.group_bits)


# -- The state machine -------------------------------------------------------------------------------------------------


ROUNDED_S = 1e-6
"""Upper bound of rounding errors when times are added and subtracted, so that a deadline has passed when it is due."""


class Machine:
    """Protocol state machine of one peer."""

    def __init__(self, config: ProtocolConfig) -> None:
        self.core = Core(config)
        self.aggregation = Aggregation(self.core)
        self.block_assignment = BlockAssignment(self.core)
        self.contributions = Contributions(self.core, self.aggregation, self.block_assignment)
        self.evaluations = Evaluations(self.core)
        self.audits = Audits(self.core, self.aggregation)
        self.barred_owners = BarredOwners(self.core)
        refusals = RejectedCommits(self.core, self.barred_owners)
        delta = DeltaReconciliation(self.core, self.contributions)
        # Components that follow the heads of shards. The order matters. The learner's marks come first, because they
        # decide whether this peer participates. A new collection must exist before a postponed round opens in it. And a
        # learner that has spent the budget must be stopped before that round asks it for a snapshot.
        listeners = (
            delta,
            self.contributions.health,
            self.aggregation.own_commits,
            self.aggregation,
            self.contributions.budget,
            self.contributions,
            self.evaluations,
            self.audits,
        )
        self.replication = Replication(self.core, self.aggregation, self.contributions, delta, refusals, listeners)
        self.going_back = GoingBack(self.core, self.replication, self.aggregation, self.evaluations)
        self.repair = Repair(self.core, self.replication, self.aggregation)
        self.heartbeats = Heartbeats(
            self.core, self.aggregation, self.contributions, self.replication, self.block_assignment
        )
        self.shutdown = Shutdown(self.core, self.contributions, self.replication)
        self.view = MachineView(self.core, self.replication, self.evaluations, self.contributions, self.going_back)
        self.is_alone = False

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Handle one event at time ``now`` (seconds, never decreasing) and return the effects, in order."""
        core = self.core
        core.effects = []
        core.pass_time(now)
        if core.alarms.pop_if_due(NEWS, core.now):
            self.heartbeats.refresh("silent")  # before the event: contributions are judged by current membership
        if isinstance(event, ev.Received):  # most events
            self._on_message(event.peer, event.message)
        else:
            self._dispatch(event)
        while (key := core.alarms.pop_due(core.now)) is not None:
            self._on_alarm(*key)
        if core.departure:
            self.shutdown.proceed()
        return core.effects

    def next_deadline(self) -> float | None:
        """Return the latest time at which the driver must send ``Woke``, or None."""
        due = self.core.alarms.next()
        behind_s = self.core.stalled_s
        return due if due is None or not behind_s else due + behind_s + ROUNDED_S

    # -- events --------------------------------------------------------------------------------------------------------

    def _dispatch(self, event: ev.OwnEvent) -> None:
        match event:
            case ev.Woke():
                pass
            case ev.Stepped():
                self._on_steps(event)
            case ev.BlockFinished():
                self.block_assignment.on_block_finished(event.block, event.tokens)
            case ev.Applied():
                was_current = self.core.is_current
                self._on_applied(event.shard, event.head)
                if self.core.is_current and not was_current:
                    self._beat()  # the heartbeat's new phase makes other peers send commits here
            case ev.Snapshotted():
                self.contributions.on_snapshot(event)
            case ev.Encoded():
                self.contributions.on_encoded(event)
            case ev.Merged():
                self._on_merged(event)
            case ev.GroupMerged():
                self.aggregation.groups.on_merged(event)
            case ev.StateOffered():
                self.replication.acceptance.judge(event.peer, event.head, event.lineage, event.owner)
            case ev.Fetched():
                self.replication.on_fetched(event)
            case ev.Restored():
                self.going_back.on_restored(event)
            case ev.CheckpointGood():
                self.going_back.good = event.heads
            case ev.Failed():
                self._on_failed(event)
            case ev.PeerConnected():
                self.heartbeats.on_connected(event.peer)
                self.barred_owners.send_proofs(event.peer)
                self.going_back.send_vote(event.peer)
                self.shutdown.on_connected(event.peer)
            case ev.PeerDisconnected():
                self.heartbeats.on_lost(event.peer, event.reason, is_shut_out=event.is_shut_out)
                self.contributions.on_disconnected(event.peer)
            case ev.Admitted():
                self.core.membership.connectivity.admitted = event.prints
            case ev.LineChanged():
                self._on_line_changed(event)
            case ev.LearnerStarted():
                self._on_learner_started(event)
            case ev.LearnerStopped():
                self._on_learner_stopped(event.reason)
            case ev.LearnerPaused():
                self._on_learner_paused(event)
            case ev.LearnerRested():
                self._on_learner_rested()
            case ev.LeaveRequested():
                self.shutdown.start_leaving(event.reason)
            case ev.EndMoved():
                self._on_end_moved(event.end)
            case ev.Evaluated():
                self.evaluations.on_evaluated(event)
                self.going_back.vote_if_due()
            case ev.Contradicted():
                self.barred_owners.add_proof(event.proof)
            case ev.Audited():
                self.audits.on_audited(event)
            case ev.Started():
                self._on_started(event)
            case _:
                assert_never(event)

    def _on_started(self, event: ev.Started) -> None:
        self.barred_owners.restore(event.convictions)
        self.going_back.restore(event.convictions, event.shards)
        lineages = event.lineages or ((),) * len(event.shards)
        for state, lineage in zip(event.shards, lineages, strict=True):
            self.replication.acceptance.restore(state.head, lineage)
            self.replication.applying[state.head.shard] = (state.head.id, state)
            self._on_applied(state.head.shard, state.head.id)
            if state.head.version:
                self.aggregation.own_commits.wait_for_heads(
                    state.head.shard, self.core.now + self.core.config.request_s
                )
        for header in event.own:
            if self.aggregation.own_commits.restore(header, self.core.chains[header.shard].head):
                self.replication.on_commit(self.core.config.peer, header)
        self._beat()

    def _on_applied(self, shard: ShardId, head: Digest) -> None:
        self.replication.on_applied(shard, head)
        if not self.core.is_current:
            self.replication.become_current()
            self.replication.fetch_missing()

    def _on_merged(self, event: ev.Merged) -> None:
        header = self.aggregation.commit(event)
        if header is None or event.shard in self.replication.applying:
            return
        core, commit = self.core, msg.commit_id(header)
        self.replication.apply(header, commit)
        relay_commit(core, self.replication.reports, commit, header, None)
        is_alone = not core.participation.peers(event.shard)
        if is_alone and not self.is_alone:
            told = f"shard {event.shard} version {header.version}: no other peer is live, so this peer merges alone"
            core.note("warning", "alone", told)
        self.is_alone = is_alone

    def _on_line_changed(self, event: ev.LineChanged) -> None:
        core = self.core
        core.line_speed = event.speed
        if core.is_current:
            core.membership.owners.own_weight = core.weight
        times = LINE_WEIGHTS[event.speed]
        told = f"the line is {event.speed} for what this peer has to send: it asks for {times:g} times its weight"
        core.note("info", "line", told)

    def _on_failed(self, event: ev.Failed) -> None:
        match event.work:
            case "encode":
                self.contributions.on_encode_failed(event.shard, event.reason)
            case "merge":
                self.aggregation.on_merge_failed(event.shard, event.peer, event.reason)
            case "group":
                self.aggregation.groups.on_merge_failed(event.shard, event.peer, event.reason)
            case "give":
                self.contributions.on_payload_lost(event.shard)
            case "state":
                self.repair.start(event.shard, event.reason)
            case "owner":
                self.repair.blame_owner(event.shard, event.peer)
            case "values":
                self.replication.reject(event.shard, event.reason)
            case "apply" | "install":
                self.replication.on_apply_failed(event.shard, event.reason)
            case "fetch":
                self.replication.on_fetch_failed(event.shard, event.peer, event.reason)
            case "commit":
                self.replication.on_bad_commit(event.shard, event.peer)
            case other:
                raise AssertionError(f"unknown work {other!r}")

    def _on_end_moved(self, end: RunEnd) -> None:
        """Train on until another end (rule C8)."""
        core = self.core
        if end == core.end:
            return
        core.end = end
        self.contributions.on_end_moved()
        core.note("info", "end", f"the run now ends at {describe_end(end)}")
        if self.shutdown.is_done or core.departure == "leaving":
            return
        is_over = self.contributions.budget.is_over
        if not is_over and core.departure == "finished":
            self.shutdown.go_on()
            if core.learner is not None:
                core.learner.is_paused = False
                self.block_assignment.go_on()
        if core.learner is not None and not core.learner.is_paused:
            core.effects.append(MoveEnd(end))
        if core.is_current:
            self._beat()

    # -- the learner ---------------------------------------------------------------------------------------------------

    def _on_learner_started(self, event: ev.LearnerStarted) -> None:
        core = self.core
        core.learner = LearnerView(event.learner, len(core.chains), core.step)
        self.contributions.on_learner_changed()
        self.block_assignment.start(has_blocks=event.has_blocks)
        is_first = not core.participation.participants() - {core.config.peer}
        if core.config.evaluation_every and core.head(ShardId(0)).version == 0 and is_first:
            core.effects.append(Evaluate(0))
        if core.departure == "leaving":
            self.shutdown.start_leaving(self.shutdown.reason)
        self._beat()

    def _on_learner_stopped(self, reason: str) -> None:
        self.core.note("warning", "learner", reason)
        self.core.learner = None
        self.contributions.on_learner_changed()
        self.block_assignment.reset()
        self._beat()

    def _on_learner_paused(self, event: ev.LearnerPaused) -> None:
        core, learner = self.core, self.core.learner
        if learner is not None:
            learner.steps, learner.tokens = event.steps, event.tokens
            is_asked = core.departure == "leaving" or self.contributions.budget.has_stopped(learner.id)
            if not is_asked and event.step < core.end.steps:
                return  # it stopped at an earlier end, and the news that it goes on is on its way
            learner.is_paused = True
            self.block_assignment.stop()
            self.shutdown.finish_run()
            self._beat()

    def _on_learner_rested(self) -> None:
        learner = self.core.learner
        if learner is not None and not learner.is_resting:
            learner.is_resting = True
            self._beat()

    def _on_steps(self, event: ev.Stepped) -> None:
        learner = self.core.learner
        if learner is None or event.steps <= learner.steps:
            return
        if learner.is_resting:
            learner.is_resting = False
            self._beat()
        made = event.steps - learner.steps
        learner.steps, learner.tokens = event.steps, event.tokens
        before = learner.step_time_s
        learner.step_time_s = event.step_time_s if before == 0.0 else before + 0.1 * (event.step_time_s - before)
        self.contributions.on_steps(learner, made)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _on_message(self, peer: PeerId, message: msg.Message) -> None:
        core = self.core
        if peer not in core.membership.peers and not isinstance(message, msg.Commit):
            return
        match message:
            case msg.Heartbeat():  # most messages
                self.heartbeats.on_heartbeat(peer, message)
            case msg.Commit():
                if message.header.shard < len(core.chains):
                    self.replication.on_commit(peer, message.header, message.entry)
            case msg.Round() | msg.Contribution() | msg.Refused():
                self._on_round_message(peer, message)
            case msg.HeadsRequest():
                if core.is_current:
                    core.send((peer,), self.replication.heads())
            case msg.Heads():
                if self._are_heads(message.heads, range(len(core.chains))):
                    self.replication.on_heads(peer, message)
            case msg.CommitsRequest():
                if message.shard < len(core.chains):
                    self.replication.log_requests.on_request(peer, message)
            case msg.FetchAdvised():
                if message.shard < len(core.chains):
                    self.replication.on_fetch_advised(peer, message)
            case msg.Evaluation():
                self.evaluations.on_evaluation(peer, message)
                self.going_back.vote_if_due()
            case msg.AbandonVote():
                self.going_back.on_vote(peer, message)
            case msg.Equivocation() | msg.WrongMerge():
                self.barred_owners.add_proof(message, peer)
            case msg.Leaving():
                self.heartbeats.on_goodbye(peer, message.reason)
            case _:
                assert_never(message)

    def _are_heads(self, heads: tuple[msg.Head, ...], shards: Container[int]) -> bool:
        """Return whether ``heads`` belong to ``shards``, at most one each."""
        return len({h.shard for h in heads}) == len(heads) and all(h.shard in shards for h in heads)

    def _on_round_message(self, peer: PeerId, message: msg.Round | msg.Contribution | msg.Refused) -> None:
        """Handle a message that only a peer with all states can act on."""
        core = self.core
        if not core.is_current:
            return
        match message:
            case msg.Round():
                fragments = core.config.fragments
                if message.fragment < len(fragments) and self._are_heads(message.heads, fragments[message.fragment]):
                    for theirs in message.heads:
                        self.replication.on_head(peer, theirs)
                    self.contributions.on_round(peer, message)
            case msg.Contribution():
                if message.shard < len(core.chains) and message.base.shard == message.shard:
                    self.aggregation.collect(peer, message)
                    if peer in self.aggregation.early[message.shard]:
                        self.replication.on_head(peer, message.base)
            case msg.Refused():
                if message.shard < len(core.chains) and message.head.shard == message.shard:
                    self.contributions.on_refused(peer, message.shard, message.base, message.head, message.reason)
                    self.replication.on_head(peer, message.head)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send heartbeats to all connected peers, and ask one whose heads differ for its heads."""
        core = self.core
        membership = core.membership
        core.alarms.set(BEAT, core.now + membership.beat_s())
        self.heartbeats.send_heartbeats(membership.peers.values())
        self.barred_owners.expire()
        self.heartbeats.refresh("silent")
        self.block_assignment.assign()
        self.repair.retry()
        self.replication.acceptance.compare()
        self.going_back.check()
        if not core.is_current:
            self.replication.find_donors()
            return
        differing = sorted(p for p in membership.live if membership.peers[p].mismatches >= 2)
        if differing:
            peer = differing[membership.sequence % len(differing)]
            membership.peers[peer].mismatches = 0
            core.send((peer,), msg.HeadsRequest())
        if core.learner is None or core.learner.is_idle:
            self.contributions.adopt_step(membership.furthest_step())
        self.contributions.check_health()
        budget = self.contributions.budget
        budget.stop_if_spent()
        is_over = budget.is_over and not core.participation.participants()
        if core.learner is None and not core.departure and is_over:
            self.shutdown.finish_run()
            self._beat()  # newcomers must know it before this peer says goodbye

    def _on_alarm(self, topic: str, shard: int) -> None:
        match topic:
            case "beat":
                self._beat()
            case "close":
                self.aggregation.merge_if_due(ShardId(shard))
            case "group":
                self.aggregation.groups.merge_if_due(ShardId(shard))
            case "takeover":
                self.contributions.on_takeover_due(ShardId(shard))
            case "turn":
                self.replication.on_turn(ShardId(shard))
            case "want":
                self.replication.request_wanted(ShardId(shard))
            case "asked":
                self.replication.on_request_timeout(ShardId(shard))
            case "other":
                self.replication.ask_another(ShardId(shard))
            case "flush":
                pass  # ``proceed`` runs after every event
            case "depart":
                self.shutdown.on_deadline()
            case other:
                raise AssertionError(f"unknown alarm {other!r}")

    # -- for the driver ------------------------------------------------------------------------------------------------

    def wants(self, peer: PeerId, contribution: msg.Contribution) -> bool:
        """Return whether the driver may allocate memory for the contribution's payload."""
        core = self.core
        is_known = core.is_current and peer in core.membership.peers
        is_fitting = contribution.shard < len(core.chains) and contribution.base.shard == contribution.shard
        return is_known and is_fitting and self.aggregation.wants(peer, contribution)

    def payloads(
        self, shard: ShardId, size_of: SizeOf = no_size, most_bytes: int = 0, own_bytes: float = float("inf")
    ) -> set[Digest]:
        """Return the shard's payloads that this machine may still send, merge, apply, undo or show to auditors.

        The driver may drop all others. Log payloads, and what this peer merged, are each limited to ``most_bytes``, and
        own contributions to ``own_bytes``, the newest first. Payloads still to be merged or applied are kept regardless
        of size.
        """
        held = self.aggregation.payloads(shard) | self.replication.payloads(shard)
        held |= self.contributions.payloads(shard, size_of, own_bytes)
        held |= self.barred_owners.payloads(shard) | self.audits.payloads(shard, size_of, most_bytes)
        return held | self.core.chains[shard].payloads(size_of, most_bytes)

    def at_work(self, shard: ShardId) -> set[Digest]:
        """Return those of the shard's ``payloads`` that are still to be merged or applied, here or elsewhere.

        If one of them is lost, its tokens wait for the next round. The other payloads only serve peers that lag, or
        undo commits.
        """
        held = self.aggregation.payloads(shard) | self.replication.payloads(shard)
        return held | self.contributions.payloads(shard, lambda _: 1, 0)

    def commits(self, shard: ShardId) -> set[Digest]:
        """Return the ids of the shard's commits whose signatures this machine may still have to show."""
        return (
            self.replication.commits(shard)
            | self.aggregation.own_commits.commits(shard)
            | self.barred_owners.commits(shard)
            | self.core.chains[shard].commits()
        )

    def check_invariants(self) -> None:
        """Check what must hold after every event, whatever other peers do. For tests and the simulator.

        Raises:
            AssertionError: This machine has a bug.
        """
        check_chains(self.core)
        check_work(self.core, self.aggregation, self.contributions, self.replication)
