"""Heartbeats, and handling of peers that connect, answer and disappear.

``membership`` decides which peers are live.

Rules of this file:
1. Changes in several heartbeats are evaluated together (rule W1a); the end of a connection is evaluated immediately.
2. While rounds go on, their announcements compare heads. Heads that stand still and differ mean a fork or a lost
   message. Such heartbeats are counted, and one of their senders is asked for its heads at the next beat (rule W1a).
3. A connection that works in one direction only is closed by the peer that is not heard: no other peer can know
   (rule L4).
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.block_assignment import BlockAssignment
from p2pdiloco.protocol.contributions import Contributions
from p2pdiloco.protocol.effects import HangUp, Send
from p2pdiloco.protocol.ids import FragmentId, PeerId, fingerprint
from p2pdiloco.protocol.membership import DEAF_BEATS, PartitionDetector, PeerView
from p2pdiloco.protocol.messages import Heartbeat
from p2pdiloco.protocol.replication import Replication
from p2pdiloco.protocol.state import Core, Key

NEWS_SHARE = 1 / 16
"""Share of a heartbeat's interval after which changes in several heartbeats are evaluated together. Evaluating each of
N first heartbeats would cost N^2 at the start of a large run. The end of a connection is evaluated immediately."""
NEWS: Key = ("news", 0)
NOBODY = frozenset[int]()


class Heartbeats:
    """Sends this peer's heartbeats and handles those of others."""

    def __init__(
        self,
        core: Core,
        aggregation: Aggregation,
        contributions: Contributions,
        replication: Replication,
        block_assignment: BlockAssignment,
    ) -> None:
        self.core = core
        self.aggregation = aggregation
        self.contributions = contributions
        self.replication = replication
        self.block_assignment = block_assignment
        self._serving: set[PeerId] = set()
        """Finished peers that have said goodbye and are still connected."""

    def on_connected(self, peer: PeerId) -> None:
        """Register a new connection and send a first heartbeat."""
        self._serving.discard(peer)
        if self.core.membership.connect(peer, self.core.now):
            self.send_heartbeats((self.core.membership.peers[peer],))

    def on_goodbye(self, peer: PeerId, reason: str) -> None:
        """Handle a peer's goodbye. To a newcomer, a finished peer may still serve its states (rule S2)."""
        if not self.core.is_current and self.core.membership.has_finished(peer):
            self._serving.add(peer)
        else:
            self.on_lost(peer, f"{peer} left: {reason}", said_goodbye=True)

    def on_lost(self, peer: PeerId, why: str, *, said_goodbye: bool = False, is_shut_out: bool = False) -> None:
        """Handle the end of a connection, or a peer's goodbye. A peer that is shut out was not cut off, either."""
        membership, said_goodbye = self.core.membership, said_goodbye or peer in self._serving
        self._serving.discard(peer)
        if said_goodbye and self.core.departure == "finished" and self._is_at_rest(peer):
            membership.partition_detector.at_rest.add(fingerprint(peer))
        parted = membership.connectivity.on_goodbye(peer) if said_goodbye else NOBODY
        if is_shut_out:
            parted = frozenset((fingerprint(peer),))
        membership.disconnect(peer, has_left=said_goodbye)
        self.aggregation.forget(peer)
        self.replication.on_peers_lost((peer,))  # ``refresh`` reports only peers that were still live
        self.refresh(why, parted=parted)

    def _is_at_rest(self, peer: PeerId) -> bool:
        """Return whether a live peer reports that it has finished with this peer's heads."""
        membership = self.core.membership
        view = membership.peers.get(peer)
        has_same = view is not None and view.beat is not None and view.beat.heads_mark == self.core.heads_mark
        return has_same and peer in membership.live and membership.has_finished(peer)

    def on_heartbeat(self, peer: PeerId, beat: Heartbeat) -> None:
        """Handle a connected peer's heartbeat."""
        core = self.core
        view = core.membership.peers[peer]
        before = view.beat
        is_news = core.membership.record_heartbeat(peer, beat, core.now)
        core.has_heard_end |= beat.phase in ("finished", "done")
        if beat.phase != "joining":
            is_still = before is not None and before.heads_mark == beat.heads_mark
            view.mismatches = view.mismatches + 1 if is_still and beat.heads_mark != core.heads_mark else 0
            if not core.is_current and before is not None and before.phase == "joining":
                self.replication.request_heads((peer,))
        deaf_s = core.now - view.deaf_since
        if deaf_s > 0.0 and deaf_s >= DEAF_BEATS * view.interval_s(core.membership.beat_s()):
            view.deaf_since = core.now
            why = f"it has received nothing from this peer for {core.now - view.acked_at:.1f} s, but is heard here"
            core.note("warning", "connection", f"to {peer} works in one direction only: {why}; reconnecting")
            core.effects.append(HangUp(peer, why))
        if is_news and NEWS not in core.alarms:
            core.alarms.set(NEWS, core.now + NEWS_SHARE * core.membership.beat_s())

    def refresh(self, why_lost: str, *, parted: frozenset[int] = NOBODY) -> None:
        """Evaluate liveness again. ``parted``: a peer that says goodbye and the peers it heard, as fingerprints."""
        core, chain = self.core, self.core.chains[0]
        core.membership.group_bits = chain.group_bits
        if chain.head is not None:
            core.membership.connectivity.update_givers(chain.head.version, chain.marks)
        appeared, lost = core.membership.refresh(core.now)
        detector = core.membership.partition_detector
        was_apart = detector.is_apart
        core.membership.detect_partition(core.now, is_silent=bool(lost) and not parted)
        detector.on_goodbye(parted)
        if lost:
            core.note("info", "peers", f"lost {', '.join(lost)}: {why_lost}; {len(core.membership.live)} live")
            self.replication.on_peers_lost(lost)
        if detector.is_apart != was_apart:
            self._note_partition(detector)
        if appeared:
            core.note("info", "peers", f"found {', '.join(appeared)}; {len(core.membership.live)} live")
            self.replication.request_heads(appeared)
            for fragment, sync_round in enumerate(self.contributions.rounds):
                if sync_round.open:
                    core.send(appeared, self.contributions.announcement(FragmentId(fragment)))
        self.contributions.on_candidates_changed()
        self.aggregation.merge_all_due()
        self.aggregation.groups.merge_all_due()

    def _note_partition(self, detector: PartitionDetector) -> None:
        if detector.is_apart:
            told = f"lost {len(detector.missing)} peers at once: they may continue with a model of their own"
            self.core.note("warning", "apart", told)
        else:
            self.core.note("info", "apart", "most of the lost peers are connected again")

    def send_heartbeats(self, views: Iterable[PeerView]) -> None:
        """Send a heartbeat to each of these peers."""
        core, learner = self.core, self.core.learner
        sequence = core.membership.next_sequence(core.now)
        phase, is_participating = core.phase(), core.is_participating()
        step_time_s = 0.0 if learner is None else learner.step_time_s
        mark, weight, claims = core.heads_mark, core.weight, self.block_assignment.claims()
        interval_s = core.membership.beat_s()
        for view in views:
            held_s = core.membership.held_s(view, core.now)
            hears = core.membership.connectivity.list_for(view.echoed)
            told = (phase, is_participating, core.step, step_time_s, mark, weight, claims, interval_s, hears)
            core.effects.append(Send((view.peer,), Heartbeat(sequence, view.sequence, held_s, *told)))
