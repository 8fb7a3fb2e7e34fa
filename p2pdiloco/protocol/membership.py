"""Liveness of peers, decided from direct connections only. The directory's hints never make a peer live.

Rules of this file:
1. A peer is live while it is connected, was heard within its deadline, and echoes this peer's heartbeats. A peer that
   is heard but does not hear this one is not live, so a one-way cut looks the same from both ends.
2. Deadlines follow from measured round trips (RFC 6298's estimator) and the heartbeat interval; no other constant.
   The interval grows with the number of connected peers, so that the total cost of heartbeats does not.
3. Live does not mean participating: a peer participates while its learner can contribute.
4. Among owner candidates, the best connected come first (``connectivity``, ``ownership``).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from p2pdiloco.protocol.connectivity import SETTLING_BEATS, Connectivity
from p2pdiloco.protocol.counted_tokens import usual_print
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.groups import group_of
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.protocol.messages import Heartbeat
from p2pdiloco.protocol.ownership import Owners

# -- Partition detector ------------------------------------------------------------------------------------------------
# A peer that dies looks the same as a peer behind a network partition.
#
# Rules of this file:
# 1. Peers that are lost one by one while most stay are dead, or will themselves find that they are the minority. If
#    within a short time at least as many peers are lost as stay, this one included, this peer may be the one that was
#    cut off. The lost peers are then *missing*, and may have continued without it.
# 2. A peer that only others heard is lost with the last of them, if that one was silent. If that one said goodbye, the
#    peer has left, too.
# 3. A lost peer that says goodbye later was not cut off: it stood still. It has left, and so have the peers it heard.
# 4. This peer is apart until most of the peers it knew are back, or until it is in the majority together with others.


MOST_LOST = 4096
"""Maximum number of lost peers that are remembered; the latest stay."""
WINDOW_BEATS = 32
"""Own heartbeats within which the losses of one network cut are noticed: paths time out one after the other."""


class PartitionDetector:
    """Detects the loss of many peers at once. Peers are represented by fingerprints (``connectivity``)."""

    def __init__(self) -> None:
        self.silently_lost_at: float | None = None
        """Time of the last loss of a live peer without a goodbye; None once all lost peers are back or said goodbye."""
        self.missing: set[int] = set()
        self.has_left = False
        """This peer has left in order, so later departures do not count as losses."""
        self.at_rest: set[int] = set()
        """Peers that left at the run's end with this peer's heads: they count as here."""
        self._here: frozenset[int] = frozenset()
        """Peers that are heard here, or by a peer that is."""
        self._lost: dict[int, float] = {}
        """Peers lost without a goodbye that have not come back, with the time of the loss."""

    @property
    def is_apart(self) -> bool:
        """True if at least as many peers are missing as are here, this one included; they may have another model."""
        return bool(self.missing)

    def update(self, now: float, here: frozenset[int], window_s: float, *, is_silent: bool) -> None:
        """Update the set of peers that are ``here``. ``is_silent``: one was lost without a goodbye."""
        if here == self._here and not (is_silent or self._lost or self.missing):
            return
        gone, self._here = self._here - here, here
        if is_silent and not self.has_left:
            self.silently_lost_at = now
            self._lost.update(dict.fromkeys(gone, now))
        self._found(here)
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        if not self.has_left:
            self.missing.update(one for one, at in self._lost.items() if now - at <= window_s)
        self._compare()

    def on_goodbye(self, those: frozenset[int]) -> None:
        """Handle a goodbye: ``those`` are the peer that sent it and the peers it heard."""
        if those:
            self._found(those)
            self._compare()
            if not self._lost:
                self.silently_lost_at = None

    def _found(self, those: frozenset[int]) -> None:
        for one in those & self._lost.keys():
            del self._lost[one]
        self.missing -= those

    def _compare(self) -> None:
        if len(self.missing) <= len(self._here | self.at_rest):
            self.missing.clear()


# -- Estimates of times (RFC 6298) -------------------------------------------------------------------------------------


def smoothed(mean_s: float, variation_s: float, sample_s: float) -> tuple[float, float]:
    """Return mean and variation after one more sample (RFC 6298's estimator). A mean of 0 marks the first sample."""
    if mean_s == 0.0:
        return sample_s, sample_s / 2
    variation_s += 0.25 * (abs(sample_s - mean_s) - variation_s)
    return mean_s + 0.125 * (sample_s - mean_s), variation_s


# -- Membership --------------------------------------------------------------------------------------------------------


SENT_KEPT = 64
MAX_PEERS = 4096
BEAT_PEERS = 24
"""Number of connected peers beyond which a peer sends heartbeats more slowly, in proportion. 16 heartbeats a second and
their acknowledgements were 3.3 kB/s, most of an idle peer's traffic (benchmarks/notes.md, idle traffic); with 24, the
91 connections of a peer in a run of 1,024 get one every 3.8 s."""
SLOWER = 4.0
"""Factor by which another peer's interval may exceed this one's: it may know of more peers."""

MAX_HELD = 64
"""Maximum number of claimed blocks of a peer: those in its learner's hands, or trained and not seen merged."""
SLOW_TRIPS = 8
"""Limit on the slowest round trip, in median round trips beyond a heartbeat, against peers that are late on purpose."""
DEAF_BEATS = 2
"""Heartbeat intervals for which a peer may report that it does not hear this one before the connection is closed.
Echoes that were delayed on the way, or sent before the peer had read its input, are followed at once by newer ones."""

IGNORED_MOST = 8
"""Longest time for which a peer's heads are ignored, as a multiple of the first."""


class PeerView:
    """State of one connected peer."""

    __slots__ = (
        "acked_at",
        "beat",
        "deaf_since",
        "echoed",
        "heard_at",
        "ignored_s",
        "ignored_until",
        "is_behind",
        "mismatches",
        "peer",
        "round_trip_s",
        "sequence",
        "variation_s",
    )

    def __init__(self, peer: PeerId, now: float) -> None:
        self.peer = peer
        self.heard_at = now
        self.acked_at = now
        """Send time of the newest own heartbeat that the peer has echoed."""
        self.beat: Heartbeat | None = None
        self.sequence = 0
        self.echoed = 0
        """Sequence number of the newest own heartbeat that the peer has seen."""
        self.round_trip_s = 0.0
        self.variation_s = 0.0
        self.mismatches = 0
        """Consecutive heartbeats whose summary of heads differs from this peer's."""
        self.deaf_since = float("inf")
        """Arrival of the first in the current series of heartbeats whose echoes are too old for the peer to be live."""
        self.is_behind = False
        """Whether its messages may still be ones that had waited while this peer stood still."""
        self.ignored_until = 0.0
        """Until then its reports of heavier heads are ignored, because it did not deliver what leads to one."""
        self.ignored_s = 0.0
        """For how long they were ignored last; 0: it has delivered since."""

    def ignore_heads(self, now: float, least_s: float) -> None:
        """Ignore its reports of heavier heads for ``least_s``, and twice as long each time, until it delivers."""
        if now < self.ignored_until:
            return
        self.ignored_s = min(max(least_s, 2.0 * self.ignored_s), IGNORED_MOST * least_s)
        self.ignored_until = now + self.ignored_s

    def record_round_trip(self, sample_s: float) -> None:
        """Add a round-trip sample to the mean."""
        self.round_trip_s, self.variation_s = smoothed(self.round_trip_s, self.variation_s, sample_s)

    def interval_s(self, own_s: float) -> float:
        """Return the time between two heartbeats of this peer, given the own interval ``own_s``."""
        if self.beat is None or self.beat.interval_s <= own_s:
            return own_s
        return min(self.beat.interval_s, SLOWER * own_s)

    def deadline_s(self, own_s: float) -> float:
        """Return how long this peer may be silent before it stops being live, in seconds."""
        return 3 * self.interval_s(own_s) + 2 * self.round_trip_s + 4 * self.variation_s


class Roles(NamedTuple):
    """Roles of the live peers, as they report them, each sorted by peer."""

    donors: tuple[PeerId, ...]
    """Peers that report to have all states."""
    newcomers: frozenset[PeerId]
    """Peers that report to lack some."""
    weights: tuple[tuple[PeerId, float], ...]
    """The donors with the weights that they ask for."""
    finished: frozenset[PeerId]
    """Peers that have reached the end of the run."""
    leaving: frozenset[PeerId]
    """Those that leave before the run's end."""


class Membership:
    """All connected peers and their liveness."""

    __slots__ = (
        "_roles",
        "_step_times_s",
        "connectivity",
        "fastest_step_s",
        "group_bits",
        "interval_s",
        "left",
        "live",
        "me",
        "met",
        "near",
        "owners",
        "participating",
        "partition_detector",
        "peers",
        "sent_at",
        "sequence",
        "slowest_round_trip_s",
        "stall",
        "usual_round_trip_s",
    )

    def __init__(self, me: PeerId, interval_s: float) -> None:
        self.me = me
        self.connectivity = Connectivity(me)
        self.group_bits = 0
        """Base-2 logarithm of the number of groups: heartbeats list only peers of the own one."""
        self.interval_s = interval_s
        """Seconds between two heartbeats in a small swarm."""
        self.peers: dict[PeerId, PeerView] = {}
        self.met: dict[PeerId, float] = {}
        """When each peer was first connected, the first ones first."""
        self.left: dict[int, None] = {}
        """Who said goodbye and has not come back, by the fingerprints of ``TokenCounts``, the first ones first."""
        self.sequence = 0
        self.sent_at: deque[float] = deque(maxlen=SENT_KEPT)
        """Send times of the last heartbeats; the newest has number ``sequence``."""
        self.owners = Owners(me)
        self.partition_detector = PartitionDetector()
        self.stall = (0.0, 0.0)
        """End and duration of the last period in which this peer stood still."""
        self.live: tuple[PeerId, ...] = ()
        """Live peers, sorted, without this one."""
        self.near: tuple[PeerId, ...] = ()
        """Those of them that are of this peer's group (``groups``)."""
        self.participating: frozenset[PeerId] = frozenset()
        """Live peers that participate, without this one."""
        self._step_times_s: list[float] = []
        """Step times that live participating peers report, sorted. It is updated by ``refresh``, too."""
        self._roles: Roles | None = None
        """None: a heartbeat has changed them, or who is live. Counted anew for each question, they would take N^2 steps
        for a version."""
        self.slowest_round_trip_s = 0.0
        """Largest smoothed round trip to a live peer. Like the fields above, it is updated by ``refresh``."""
        self.usual_round_trip_s = 0.0
        """Median of the smoothed round trips to live peers, the lower one of two."""
        self.fastest_step_s = 0.0
        """Smallest step time that a live participating peer reports; 0 if there is none."""

    def beat_s(self) -> float:
        """Return the current time between two of this peer's heartbeats."""
        peers = len(self.peers)
        return self.interval_s if peers <= BEAT_PEERS else self.interval_s * (peers / BEAT_PEERS)

    def connect(self, peer: PeerId, now: float) -> bool:
        """Register a connection. Return False if there are too many."""
        if peer not in self.peers and len(self.peers) >= MAX_PEERS:
            return False
        self.peers[peer] = PeerView(peer, now)
        self._roles = None
        self.met.setdefault(peer, now)
        self.left.pop(usual_print(peer), None)
        if len(self.met) > 2 * MAX_PEERS:
            del self.met[next(iter(self.met))]
        return True

    def disconnect(self, peer: PeerId, *, has_left: bool = False) -> None:
        """Remove a connection. ``has_left``: the peer said goodbye."""
        self.peers.pop(peer, None)
        if has_left:
            self.left[usual_print(peer)] = None
            if len(self.left) > MOST_LOST:
                del self.left[next(iter(self.left))]
        self._roles = None
        self.connectivity.forget(peer)

    def record_heartbeat(self, peer: PeerId, beat: Heartbeat, now: float) -> bool:
        """Record a heartbeat. Return True if it may change which peers are live, or their roles."""
        view = self.peers.get(peer)
        if view is None:
            return False
        previous = view.beat
        if previous is not None and beat.sequence <= view.sequence:
            return False
        own_s = self.beat_s()
        was_quiet = now - view.heard_at > 2 * view.interval_s(own_s)
        view.heard_at = now
        view.sequence = beat.sequence
        view.beat = beat
        if beat.echo:
            self._measure(view, beat, now, was_quiet=was_quiet)
        is_other_list = self.connectivity.update_list(peer, beat.hears)
        is_deaf = now - view.acked_at > view.deadline_s(own_s) + own_s
        view.deaf_since = min(view.deaf_since, now) if is_deaf else float("inf")
        is_other_role = (
            previous is None
            or previous.phase != beat.phase
            or previous.is_participating != beat.is_participating
            or previous.weight != beat.weight
        )
        if is_other_role:
            self._roles = None
        return is_other_list or was_quiet or is_other_role

    def median_step_s(self, own_s: float) -> float:
        """Return the median step time of all participating peers and ``own_s`` (0: none), the larger of two; 0 if none
        is known."""
        times = sorted((*self._step_times_s, own_s)) if own_s > 0.0 else self._step_times_s
        return times[len(times) // 2] if times else 0.0

    def majority_step(self, own: int) -> int:
        """Return the step that most live peers, this one (at ``own``) included, report to have reached."""
        steps = sorted((own, *(beat.step for beat in self._beats())))
        return steps[(len(steps) - 1) // 2]

    def furthest_step(self) -> int:
        """Return the largest step that a live peer reports to have reached."""
        return max((beat.step for beat in self._beats()), default=0)

    def _beats(self) -> list[Heartbeat]:
        """Return the newest heartbeats of all live peers."""
        views = (self.peers.get(peer) for peer in self.live)
        return [view.beat for view in views if view is not None and view.beat is not None]

    def _measure(self, view: PeerView, beat: Heartbeat, now: float, *, was_quiet: bool) -> None:
        age = self.sequence - beat.echo
        if not 0 <= age < len(self.sent_at):
            return
        is_news = beat.echo > view.echoed
        view.echoed = max(view.echoed, beat.echo)
        at = self.sent_at[-1 - age]
        if at > view.acked_at:
            view.acked_at = at
        if at < self.stall[0] or not is_news or (was_quiet and view.round_trip_s > 0.0):
            return  # this peer read it late, it repeats an earlier echo, or it was queued during an outage
        view.is_behind = False
        sample_s = now - at - beat.echo_held_s
        if sample_s > -self.interval_s:  # far below 0, the peer reports that it stood still itself
            view.record_round_trip(max(0.0, sample_s))

    def on_stall(self, now: float, seconds: float) -> None:
        """Record that this peer stood still for ``seconds`` until now.

        Round trips that span this time are not used as samples, at either end.
        """
        self.stall = now, seconds
        for view in self.peers.values():
            view.is_behind = True

    def held_s(self, view: PeerView, now: float) -> float:
        """Return the age of the heartbeat that is echoed to a peer; too large a value if the age is not known."""
        return now - view.heard_at + (self.stall[1] + 2 * self.interval_s if view.is_behind else 0.0)

    def next_sequence(self, now: float) -> int:
        """Return the number of the next heartbeat, which is about to be sent to all peers."""
        self.sequence += 1
        self.sent_at.append(now)
        return self.sequence

    def refresh(self, now: float) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """Determine the live peers again. Return the peers that appeared and those that were lost, both sorted."""
        live = []
        participating = []
        candidates = []
        leaving = []
        slowest_s = 0.0
        step_times_s = []
        interval_s, beat_s = self.interval_s, self.beat_s()
        for peer, view in self.peers.items():
            beat = view.beat
            if beat is None:
                continue
            allowed_s = view.deadline_s(beat_s)
            if now - view.heard_at > allowed_s or now - view.acked_at > allowed_s + beat_s:
                continue
            live.append(peer)
            if view.round_trip_s > slowest_s:
                slowest_s = view.round_trip_s
            if beat.is_participating:
                participating.append(peer)
                if beat.step_time_s > 0.0:
                    step_times_s.append(beat.step_time_s)
            if beat.phase == "leaving":
                leaving.append((peer, beat.weight))
            elif beat.phase != "joining":
                candidates.append((peer, beat.weight))
        trips = sorted(self.peers[peer].round_trip_s for peer in live)
        self.usual_round_trip_s = trips[(len(trips) - 1) // 2] if trips else 0.0
        if slowest_s > interval_s:
            slowest_s = min(slowest_s, interval_s + SLOW_TRIPS * self.usual_round_trip_s)
        self.slowest_round_trip_s = slowest_s
        self._step_times_s = sorted(step_times_s)
        self.fastest_step_s = min(step_times_s, default=0.0)
        before = self.live
        live.sort()
        near = tuple(filter(self.is_near, live))
        if near != self.near:
            self.near = near
            self.connectivity.update_own_list(near, self.sequence)
        if live != list(before):
            self.live = tuple(live)
            self._roles = None
        self.participating = frozenset(participating)
        self.owners.set_candidates(candidates, leaving, self.group_bits)
        willing = tuple(one for one in self.owners.willing if self.is_near(one[0]))
        far = [peer for peer in live if not self.is_near(peer)]
        self.connectivity.judge(now, near, willing, SETTLING_BEATS * beat_s, far)
        self.owners.rank(now, self.connectivity.tiers)
        if self.live == before:
            return (), ()
        old, new = set(before), set(self.live)
        return tuple(sorted(new - old)), tuple(sorted(old - new))

    def is_near(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is of this peer's group."""
        return not self.group_bits or group_of(peer, self.group_bits) == group_of(self.me, self.group_bits)

    def detect_partition(self, now: float, *, is_silent: bool) -> None:
        """Update the partition detector from the last ``refresh``. ``is_silent``: a peer was lost without a goodbye."""
        here = self.connectivity.indirect | set(map(fingerprint, self.live))
        self.partition_detector.update(now, here, WINDOW_BEATS * self.beat_s(), is_silent=is_silent)

    def on_takeover_missed(self, peer: PeerId, now: float, takeover_s: float) -> None:
        """Record that ``peer`` as an owner let ``takeover_s`` seconds pass."""
        if peer in self.peers:
            lap_s = len(self.owners.candidates) * takeover_s
            self.owners.on_turn_missed(peer, now, lap_s, self.connectivity.tiers)

    def claims_of(self, peer: PeerId) -> tuple[Block, ...]:
        """Return the blocks of data that ``peer`` has taken, at most MAX_HELD."""
        beat = self.peers[peer].beat
        return () if beat is None else beat.claims[:MAX_HELD]

    def roles(self) -> Roles:
        """Return the roles of the live peers that are connected, as their newest heartbeats say."""
        if self._roles is None:
            beats = [(peer, beat) for peer in self.live if (view := self.peers.get(peer)) and (beat := view.beat)]
            weights = tuple((peer, beat.weight) for peer, beat in beats if beat.phase != "joining")
            self._roles = Roles(
                donors=tuple(peer for peer, _ in weights),
                newcomers=frozenset(peer for peer, beat in beats if beat.phase == "joining"),
                weights=weights,
                finished=frozenset(peer for peer, beat in beats if beat.phase in ("finished", "done")),
                leaving=frozenset(peer for peer, beat in beats if beat.phase == "leaving"),
            )
        return self._roles

    def has_finished(self, peer: PeerId) -> bool:
        """Return whether this live peer has reached the end of the run."""
        view = self.peers.get(peer)
        return view is not None and view.beat is not None and view.beat.phase in ("finished", "done")

    def is_departing(self, peer: PeerId) -> bool:
        """Return whether this live peer is leaving."""
        view = self.peers.get(peer)
        return view is not None and view.beat is not None and view.beat.phase in ("leaving", "finished", "done")
