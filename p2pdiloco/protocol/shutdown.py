"""Graceful shutdown, and the end of a run.

Rules of this file:
1. A leaving peer first stops training. It then opens rounds for every fragment that holds unmerged progress, and leaves
   when all of it is merged, and a peer that stays has the commits with it, or the deadline has passed.
2. When the run is complete a peer does the same. It then stays until every live peer has reached that point with the
   same heads, so that no peer is left without the last commits. While there are peers that only others hear, it stays
   until all that it hears say the same of theirs.
3. At the run's end a peer waits for its learner, which may still hold progress.
4. A peer that is alone after others were lost without a goodbye may be the one that was cut off. What it merged
   meanwhile is lost if it leaves and the other fork wins. So it waits for lost peers until its deadline.
5. A run may be prolonged. A peer that has finished and not yet left then trains on.
6. At the run's end, a peer that is apart (``PartitionDetector``) waits, too. If nobody comes back, it warns that there
   may be a second model.
"""

from __future__ import annotations

from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.contributions import Contributions
from p2pdiloco.protocol.effects import Leave, PauseLearner
from p2pdiloco.protocol.ids import FragmentId, PeerId
from p2pdiloco.protocol.messages import Head, Heads, HeadsRequest, Leaving
from p2pdiloco.protocol.replication import Replication
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.suspicion import took_part


class Shutdown:
    """Leaves the run in order, on request or at its end."""

    def __init__(self, core: Core, contributions: Contributions, replication: Replication) -> None:
        self.core = core
        self.contributions = contributions
        self.replication = replication
        self.reason = ""
        self.is_done = False
        self.is_overdue = False
        """Whether this peer leaves, or has left, because its deadline passed."""
        self.told: list[Head] = []
        """The heads that peers which stay were told of, since they lack them."""
        self.flush_at = 0.0
        """Time of the next check of rounds that are open but have no contribution."""

    def start_leaving(self, reason: str) -> None:
        """Start to leave at the user's request."""
        core = self.core
        if core.departure == "leaving":
            return
        core.departure = "leaving"
        core.membership.owners.is_leaving = True
        self.reason = reason
        core.note("info", "leave", f"{reason}: contributing unmerged progress, for at most {core.config.leave_s:.0f} s")
        core.alarms.set(("depart", 0), core.now + core.config.leave_s)
        if core.learner is not None and not core.learner.is_paused:
            core.effects.append(PauseLearner())

    def finish_run(self) -> None:
        """Start to finish, since the run is complete."""
        core = self.core
        if not core.departure:
            core.departure = "finished"
            self.reason = "the run is complete"
            last = self.contributions.budget.last_step
            core.note("info", "finish", f"global step {min(core.step, last)} of {last}")
            core.alarms.set(("depart", 0), core.now + core.config.finish_s)

    def go_on(self) -> None:
        """Take part again: the run was prolonged after this peer had finished, and before it has left."""
        core = self.core
        core.departure = ""
        core.membership.partition_detector.at_rest.clear()
        self.reason = ""
        self.flush_at = 0.0
        core.alarms.cancel(("depart", 0))
        core.alarms.cancel(("flush", 0))

    def on_connected(self, peer: PeerId) -> None:
        """Say goodbye to a peer that connects after this one has left: it would take the end for a failure."""
        if self.is_done:
            self.core.send((peer,), Leaving(self.reason))

    def on_deadline(self) -> None:
        """Leave now, since the deadline has passed."""
        self.is_overdue = True
        tokens = self.core.unmerged_tokens()
        if tokens:
            self._leave_now("warning", f"the deadline passed with {tokens} tokens unmerged")
        elif self.core.membership.partition_detector.is_apart:
            missing = len(self.core.membership.partition_detector.missing)
            self._leave_now(
                "warning", f"{missing} peers that were lost at once did not come back: they may have another model"
            )
        elif self.core.learner is not None and not self.core.learner.is_paused:
            self._leave_now("warning", "the learner did not stop in time: the step that it was in is lost")
        elif self._held_alone():
            self._leave_now("warning", "no peer that stays has told that it has the commits with this one's progress")
        elif self._is_working():
            self._leave_now("info", "all of this peer's progress is merged; what it was merging or taking is dropped")
        else:
            self._leave_now("info", "all progress is merged; peers that were lost without a goodbye did not come back")

    def proceed(self) -> None:
        """Take the next step of leaving, if it is possible now. Called after every event."""
        core = self.core
        if self.is_done:
            return
        core.are_others_at_rest = False
        if not core.is_current:
            if core.departure == "leaving":
                self._leave_now("info", "the run was not joined yet")
            return
        if core.learner is not None and not core.learner.is_paused:
            return
        if core.learner is None and core.departure == "finished" and core.config.expects_learner:
            return  # the learner may have trained on while this node was gone
        if core.unmerged_tokens():
            self._flush()
        elif alone := self._held_alone():
            self._tell(alone)
        elif not self._is_waiting() and (core.departure == "leaving" or self._are_others_done()):
            self._leave_now("info", "all progress is merged")

    def _flush(self) -> None:
        """Open rounds outside the schedule for fragments that hold unmerged progress."""
        core = self.core
        learner = core.learner
        assert learner is not None
        is_overdue = core.now >= self.flush_at
        is_again = is_overdue and self.flush_at > 0.0
        if is_overdue:
            self.flush_at = core.now + self.contributions.aggregation.waits().takeover_s
            core.alarms.set(("flush", 0), self.flush_at)
        for fragment, shards in enumerate(core.config.fragments):
            sync_round = self.contributions.rounds[fragment]
            rest = [shard for shard in shards if learner.unmerged(shard) > 0]
            lacking = [shard for shard in rest if not self.contributions.has_given(shard)]
            if any(is_overdue or shard not in sync_round.open for shard in lacking):
                self.contributions.open(FragmentId(fragment), max(core.step, sync_round.step + 1), is_mine=True)
            elif rest and is_again:  # a peer that the owner waits for may have taken this for an older round
                core.send(core.membership.live, self.contributions.announcement(FragmentId(fragment)))

    def _is_working(self) -> bool:
        """Return whether this peer merges something for others, or is taking a commit or a state."""
        return bool(self.contributions.aggregation.jobs or self.replication.applying)

    def _is_waiting(self) -> bool:
        """Return whether to wait: until what is under way has ended; for other peers if all were lost, the last
        recently and without a goodbye, unless others left at the run's end with the same heads; or if this peer is
        apart at the run's end.
        """
        core, detector = self.core, self.core.membership.partition_detector
        if self._is_working() or (core.departure == "finished" and detector.is_apart):
            return True
        lost_at = detector.silently_lost_at
        is_lately = lost_at is not None and core.now - lost_at < core.config.finish_s
        return is_lately and not core.participation.peers() and not detector.at_rest

    def _keepers(self) -> list[PeerId]:
        """Return the live peers that stay and have the states; if all leave, those that leave."""
        donors = self.core.participation.donors()
        return sorted(set(donors) - self.core.participation.leaving()) or list(donors)

    def _held_alone(self) -> list[Head]:
        """Return the heads that hold what this peer made or contributed, and that no keeper has, if there are any."""
        core, keepers, stands_by = self.core, self._keepers(), self.replication.reports.stands_by
        beats = [core.membership.peers[peer].beat for peer in keepers]
        if not keepers or any(beat is not None and beat.heads_mark == core.heads_mark for beat in beats):
            return []

        def is_alone(chain: Chain) -> bool:
            if not chain.log or chain.log[-1].owner in keepers:
                return False
            is_there = any(stands_by(peer, chain.shard, (core.head(chain.shard).id,)) for peer in keepers)
            return not is_there and core.config.peer in took_part(chain.log[-1])

        return [core.head(chain.shard) for chain in core.chains if is_alone(chain)]

    def _tell(self, heads: list[Head]) -> None:
        """Tell the keepers of these heads, and ask for theirs, once for the same heads."""
        if heads != self.told:
            self.told, keepers = heads, tuple(self._keepers())
            self.core.send(keepers, Heads(tuple(heads), self.core.step))
            self.core.send(keepers, HeadsRequest())

    def _are_others_done(self) -> bool:
        """Return whether all live peers have finished with this peer's heads, and so, while there are indirect peers,
        have all that these hear."""
        core = self.core
        beats = [core.membership.peers[peer].beat for peer in core.participation.donors()]
        core.are_others_at_rest = all(
            beat is not None
            and beat.phase in ("finished", "done")
            and not beat.is_participating
            and beat.heads_mark == core.heads_mark
            for beat in beats
        )
        is_enough = not core.membership.connectivity.indirect
        return core.are_others_at_rest and (is_enough or all(beat.phase == "done" for beat in beats if beat))

    def _leave_now(self, level: str, how: str) -> None:
        core = self.core
        self.is_done = core.membership.partition_detector.has_left = True
        for shard in list(self.contributions.aggregation.jobs):
            self.contributions.aggregation.drop_job(shard)  # nobody would get the commit
        core.alarms.cancel(("depart", 0))
        core.note("warning" if level == "warning" else "info", "leave", f"{self.reason}; {how}")
        core.send(tuple(sorted(core.membership.peers)), Leaving(self.reason))
        core.effects.append(Leave(self.reason))
