"""Leaving in order, and the end of a run.

Rules of this file:
1. Who leaves stops training first, then opens turns for every fragment that holds unmerged progress, and goes when all
   of it is merged or the deadline has passed.
2. When the run is complete a peer does the same, and then stays until every live peer is at that point with the same
   heads, so that nobody is left without the last commits.
3. At the run's end a peer waits for its learner, whose last life may hold progress.
4. Who is alone because others were lost without a word may be the one behind a cut: what it merged there is lost if it
   goes and the others' fork wins. It waits for them until its deadline; and when one is back, until that one has its
   heads, or it has theirs.
5. So does, at the run's end, who is apart (``PartitionDetector``). What it says then is not that all is well: there
   may be a second model.
"""

from __future__ import annotations

from p2pdiloco.protocol.contributions import Contributions
from p2pdiloco.protocol.effects import Leave, PauseLearner
from p2pdiloco.protocol.ids import Digest, FragmentId, ShardId
from p2pdiloco.protocol.messages import Leaving
from p2pdiloco.protocol.state import Core


class Shutdown:
    """Leaves the run in order, or ends it."""

    def __init__(self, core: Core, contributions: Contributions) -> None:
        self.core = core
        self.contributions = contributions
        self.reason = ""
        self.is_done = False
        self.is_overdue = False
        """It goes, or has gone, because its time was up."""
        self.solitary: dict[ShardId, Digest] = {}
        """Of each shard the last commit that this peer made when nobody was live."""
        self.flush_at = 0.0
        """When to look again at turns that are open, but to which nothing was given."""

    def start_leaving(self, reason: str) -> None:
        """Start to leave, since the user wants to."""
        core = self.core
        if core.departure == "leaving":
            return
        core.departure = "leaving"
        core.membership.owners.is_leaving = True
        self.reason = reason
        core.note("info", "leave", f"{reason}: contributing what is unmerged, for at most {core.config.leave_s:.0f} s")
        core.alarms.set(("depart", 0), core.now + core.config.leave_s)
        if core.learner is not None and not core.learner.is_paused:
            core.effects.append(PauseLearner())

    def finish_run(self) -> None:
        """Finish: the run is complete."""
        core = self.core
        if not core.departure:
            core.departure = "finished"
            self.reason = "the run is complete"
            last = self.contributions.budget.last_step
            core.note("info", "finish", f"global step {min(core.step, last)} of {last}")
            core.alarms.set(("depart", 0), core.now + core.config.finish_s)

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
        else:
            self._leave_now("info", "all progress is merged; who was lost without a word did not come back")

    def proceed(self) -> None:
        """Do what can be done now; called after every event."""
        core = self.core
        if self.is_done:
            return
        if not core.is_current:
            if core.departure == "leaving":
                self._leave_now("info", "nothing was joined yet")
            return
        if core.learner is not None and not core.learner.is_paused:
            return
        if core.learner is None and core.departure == "finished" and core.config.expects_learner:
            return  # it may have trained on while this node was gone
        if core.unmerged_tokens():
            self._flush()
        elif not self._is_waiting() and (core.departure == "leaving" or self._others_are_done()):
            self._leave_now("info", "all progress is merged")

    def _flush(self) -> None:
        """Turns out of schedule, for fragments that hold unmerged progress."""
        core = self.core
        learner = core.learner
        assert learner is not None
        is_overdue = core.now >= self.flush_at
        is_again = is_overdue and self.flush_at > 0.0
        if is_overdue:
            self.flush_at = core.now + self.contributions.aggregation.takeover_s()
            core.alarms.set(("flush", 0), self.flush_at)
        for fragment, shards in enumerate(core.config.fragments):
            turn = self.contributions.turns[fragment]
            rest = [shard for shard in shards if learner.unmerged(shard) > 0]
            lacking = [shard for shard in rest if not self.contributions.has_given(shard)]
            if any(is_overdue or shard not in turn.open for shard in lacking):
                self.contributions.open(FragmentId(fragment), max(core.step, turn.step + 1), is_mine=True)
            elif rest and is_again:  # somebody is waited for who may have taken it for an older turn
                core.send(core.membership.live, self.contributions.announcement(FragmentId(fragment)))

    def _is_waiting(self) -> bool:
        """Whether nobody is left, or nobody has what was merged here alone, and somebody was lost lately who did not
        say goodbye; or this peer is apart at the run's end."""
        core, detector = self.core, self.core.membership.partition_detector
        if core.departure == "finished" and detector.is_apart:
            return True
        lost_at = detector.silently_lost_at
        is_lately = lost_at is not None and core.now - lost_at < core.config.finish_s
        return is_lately and (not core.membership.live or self._is_solitary())

    def _is_solitary(self) -> bool:
        """Whether a head was made here when nobody was live, and nobody live has the same heads."""
        core = self.core
        if all(core.head(shard).id != commit for shard, commit in self.solitary.items()):
            return False
        beats = [core.membership.peers[peer].beat for peer in core.membership.live]
        return all(beat is None or beat.heads_mark != core.heads_mark for beat in beats)

    def _others_are_done(self) -> bool:
        """Every live peer has finished with our heads."""
        core = self.core
        for peer in core.membership.live:
            beat = core.membership.peers[peer].beat
            if beat is None or beat.phase == "joining":
                continue
            is_at_rest = beat.phase == "finished" and not beat.is_participating
            if not is_at_rest or beat.heads_mark != core.heads_mark:
                return False
        return True

    def _leave_now(self, level: str, how: str) -> None:
        core = self.core
        self.is_done = core.membership.partition_detector.has_left = True
        core.alarms.cancel(("depart", 0))
        core.note("warning" if level == "warning" else "info", "leave", f"{self.reason}; {how}")
        core.send(tuple(sorted(core.membership.peers)), Leaving(self.reason))
        core.effects.append(Leave(self.reason))
