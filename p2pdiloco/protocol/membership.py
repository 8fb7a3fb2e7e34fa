"""Liveness of peers, decided from direct connections only. The directory's hints never make a peer live.

Rules of this file:
1. A peer is live while it is connected, was heard within its deadline, and echoes what we sent: a peer that we hear but
   that does not hear us is not live, so a one-way cut looks the same from both ends.
2. Deadlines follow from measured round trips (RFC 6298's estimator) and the heartbeat interval; no other constant.
   That interval grows with the number of connected peers, so that what heartbeats cost a peer does not.
3. Live is not participating: a peer participates while its learner can contribute.
4. Of those who may own, the best connected come first (``connectivity``, ``ownership``).
"""

from __future__ import annotations

from collections import deque

from p2pdiloco.protocol.connectivity import SETTLING_BEATS, Connectivity
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import Heartbeat
from p2pdiloco.protocol.ownership import Owners

# -- Partition detector ------------------------------------------------------------------------------------------------
# A peer that dies and a cut that takes it away look the same. Rules of this file:
# 1. Those who are lost one after the other while most stay are dead, or will find out themselves that they are the
#    fewer. If within a while as many are lost as stay, this peer included, it may be this one that was cut off: those
#    are *missing*, and may have gone on without it.
# 2. Whom only others heard is lost with the last of them, if that one said nothing; else it has left.
# 3. Who was lost and says goodbye has not been cut off: it stood still, and so have left those whom it heard.
# 4. This peer is apart until most of those whom it knew are back, or others with whom they are most.


MOST_LOST = 4096
"""Remembered; the last."""
WINDOW_BEATS = 32
"""Own heartbeats within which the losses of one cut are noticed: paths time out one after the other."""


class PartitionDetector:
    """Detects that many peers were lost at once. Peers are fingerprints (``connectivity``)."""

    def __init__(self) -> None:
        self.silently_lost_at: float | None = None
        """When a live peer was last lost that had not said goodbye; None again once nobody is lost but who has."""
        self.missing: set[int] = set()
        self.has_left = False
        """This peer has gone in order: who goes after it is not lost."""
        self._here: frozenset[int] = frozenset()
        """Heard by this peer, or by one that it hears."""
        self._lost: dict[int, float] = {}
        """Without a word, and not here again; and when."""

    @property
    def is_apart(self) -> bool:
        """As many are missing as are here, this peer included: they may have another model by now."""
        return bool(self.missing)

    def update(self, now: float, here: frozenset[int], window_s: float, *, is_silent: bool) -> None:
        """Those are ``here`` now; ``is_silent``: one was lost that had not said goodbye."""
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
        """One says goodbye, who has heard the others of ``those``."""
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
        if len(self.missing) <= len(self._here):
            self.missing.clear()


# -- Estimates of times (RFC 6298) -------------------------------------------------------------------------------------


def smoothed(mean_s: float, variation_s: float, sample_s: float) -> tuple[float, float]:
    """The new mean and variation after one more sample (RFC 6298's estimator). A mean of 0: it is the first."""
    if mean_s == 0.0:
        return sample_s, sample_s / 2
    variation_s += 0.25 * (abs(sample_s - mean_s) - variation_s)
    return mean_s + 0.125 * (sample_s - mean_s), variation_s


# -- Membership --------------------------------------------------------------------------------------------------------


SENT_KEPT = 64
MAX_PEERS = 4096
BEAT_PEERS = 16
"""Connected peers; with more, a peer beats more slowly in proportion. 16 heartbeats a second and their acknowledgements
are 3.3 kB/s, most of what an idle peer says (benchmarks/notes.md, idle traffic)."""
SLOWER = 4.0
"""Times our own interval that another's may be: it may know of peers that we do not."""

MAX_HELD = 64
"""Blocks of data that a learner has in hand, or trained and not seen merged."""
SLOW_TRIPS = 8
"""Median round trips that the slowest one may count for, beside a heartbeat: a peer that answers late on purpose."""
DEAF_BEATS = 2
"""Of its intervals, for which a peer's heartbeats say that it hears us no more: what was held up on the way, or said
before it read what had come, comes at once."""


class PeerView:
    """What is known of one connected peer."""

    __slots__ = (
        "acked_at",
        "beat",
        "deaf_since",
        "echoed",
        "heard_at",
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
        """When we sent the newest heartbeat that the peer has echoed."""
        self.beat: Heartbeat | None = None
        self.sequence = 0
        self.echoed = 0
        """The newest of our heartbeats that it has seen."""
        self.round_trip_s = 0.0
        self.variation_s = 0.0
        self.mismatches = 0
        """Heartbeats in a row whose summary of heads differs from ours."""
        self.deaf_since = float("inf")
        """When the first heartbeat came of those in a row whose echoes are too old for it to be live."""
        self.is_behind = False
        """What comes from it may still be what had come while this peer stood still."""
        self.ignored_until = 0.0
        """It was asked for commits and did not answer: what it says of heavier heads does not count until then."""

    def record_round_trip(self, sample_s: float) -> None:
        """Take a round trip's time into the mean."""
        self.round_trip_s, self.variation_s = smoothed(self.round_trip_s, self.variation_s, sample_s)

    def interval_s(self, own_s: float) -> float:
        """How long this peer takes between two heartbeats; we take ``own_s``."""
        if self.beat is None or self.beat.interval_s <= own_s:
            return own_s
        return min(self.beat.interval_s, SLOWER * own_s)

    def deadline_s(self, own_s: float) -> float:
        """Return how long this peer may be silent."""
        return 3 * self.interval_s(own_s) + 2 * self.round_trip_s + 4 * self.variation_s


class Membership:
    """All connected peers, and which of them are live."""

    __slots__ = (
        "_median_s",
        "connectivity",
        "fastest_step_s",
        "interval_s",
        "live",
        "me",
        "owners",
        "participating",
        "partition_detector",
        "peers",
        "sent_at",
        "sequence",
        "slowest_round_trip_s",
        "stall",
    )

    def __init__(self, me: PeerId, interval_s: float) -> None:
        self.me = me
        self.connectivity = Connectivity(me)
        self.interval_s = interval_s
        """Between two heartbeats in a small swarm."""
        self.peers: dict[PeerId, PeerView] = {}
        self.sequence = 0
        self.sent_at: deque[float] = deque(maxlen=SENT_KEPT)
        """When the last heartbeats were sent; the newest has number ``sequence``."""
        self.owners = Owners(me)
        self.partition_detector = PartitionDetector()
        self.stall = (0.0, 0.0)
        """When this peer last went on after it had stood still, and for how long it had."""
        self.live: tuple[PeerId, ...] = ()
        """Sorted, without this peer."""
        self.participating: frozenset[PeerId] = frozenset()
        """Of the live ones, without this peer."""
        self._median_s: float | None = None
        self.slowest_round_trip_s = 0.0
        """Largest smoothed round trip to a live peer; like all of these as of the last ``refresh``."""
        self.fastest_step_s = 0.0
        """Smallest step time that a live participating peer reports; 0 if none does."""

    def beat_s(self) -> float:
        """Return the time between two of this peer's heartbeats now."""
        peers = len(self.peers)
        return self.interval_s if peers <= BEAT_PEERS else self.interval_s * (peers / BEAT_PEERS)

    def connect(self, peer: PeerId, now: float) -> bool:
        """Note a connection; False if there are too many."""
        if peer not in self.peers and len(self.peers) >= MAX_PEERS:
            return False
        self.peers[peer] = PeerView(peer, now)
        self.owners.forgive(peer)
        return True

    def disconnect(self, peer: PeerId) -> None:
        """Forget a connection."""
        self.peers.pop(peer, None)
        self.connectivity.forget(peer)
        self.owners.forgive(peer)

    def record_heartbeat(self, peer: PeerId, beat: Heartbeat, now: float) -> bool:
        """Record a heartbeat; True if it may change who is live or what they are."""
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
        is_other_list = self.connectivity.update_list(peer, beat.hears, now)
        is_deaf = now - view.acked_at > view.deadline_s(own_s) + own_s
        view.deaf_since = min(view.deaf_since, now) if is_deaf else float("inf")
        return (
            is_other_list
            or previous is None
            or was_quiet
            or previous.phase != beat.phase
            or previous.is_participating != beat.is_participating
            or previous.weight != beat.weight
        )

    def median_step_s(self, own_s: float) -> float:
        """Of the step times of all who participate, with the own one (0: none); 0 if none is known. As of the last
        ``refresh``."""
        if self._median_s is not None:
            return self._median_s
        times = sorted(t for t in (own_s, *(b.step_time_s for b in self._beats() if b.is_participating)) if t > 0.0)
        self._median_s = times[len(times) // 2] if times else 0.0
        return self._median_s

    def majority_step(self, own: int) -> int:
        """The step that more than half of all live peers say they have reached, this one (at ``own``) included."""
        steps = sorted((own, *(beat.step for beat in self._beats())))
        return steps[(len(steps) - 1) // 2]

    def furthest_step(self) -> int:
        """The largest that a live peer says it has reached."""
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
            return  # we were late to read it, it was told before, or it waited for what was cut
        view.is_behind = False
        sample_s = now - at - beat.echo_held_s
        if sample_s > -self.interval_s:  # else it says that it stood still
            view.record_round_trip(max(0.0, sample_s))

    def on_stall(self, now: float, seconds: float) -> None:
        """This peer did nothing for so long, until now. Round trips that span this time are no samples, at neither
        end."""
        self.stall = now, seconds
        for view in self.peers.values():
            view.is_behind = True

    def held_s(self, view: PeerView, now: float) -> float:
        """How long ago what is echoed to a peer came; longer than it can be, if that is not known."""
        return now - view.heard_at + (self.stall[1] + 2 * self.interval_s if view.is_behind else 0.0)

    def next_sequence(self, now: float) -> int:
        """Number of the next heartbeat, which is about to be sent to everybody."""
        self.sequence += 1
        self.sent_at.append(now)
        return self.sequence

    def refresh(self, now: float) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """Decide anew who is live; returns who appeared and who was lost since the last time, sorted."""
        live = []
        participating = []
        candidates = []
        slowest_s = 0.0
        step_s = float("inf")
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
                if 0.0 < beat.step_time_s < step_s:
                    step_s = beat.step_time_s
            if beat.phase not in ("joining", "leaving"):
                candidates.append((peer, beat.weight))
        self._median_s = None
        if slowest_s > interval_s:
            trips = sorted(self.peers[peer].round_trip_s for peer in live)
            slowest_s = min(slowest_s, interval_s + SLOW_TRIPS * trips[(len(trips) - 1) // 2])
        self.slowest_round_trip_s = slowest_s
        self.fastest_step_s = 0.0 if step_s == float("inf") else step_s
        before = self.live
        live.sort()
        if live != list(before):
            self.live = tuple(live)
            self.connectivity.update_own_list(live, self.sequence)
        self.participating = frozenset(participating)
        self.owners.set_candidates(candidates)
        self.connectivity.judge(now, self.live, self.owners.willing, SETTLING_BEATS * beat_s)
        self.owners.rank(now, self.connectivity.tiers)
        if self.live == before:
            return (), ()
        old, new = set(before), set(self.live)
        return tuple(sorted(new - old)), tuple(sorted(old - new))

    def detect_partition(self, now: float, *, is_silent: bool) -> None:
        """Who is here, as of the last ``refresh``; ``is_silent``: somebody was lost then who had not said goodbye."""
        here = self.connectivity.lists[self.me] | self.connectivity.afar
        self.partition_detector.update(now, here, WINDOW_BEATS * self.beat_s(), is_silent=is_silent)

    def on_takeover_missed(self, peer: PeerId, now: float, takeover_s: float) -> None:
        """Note that ``peer`` as an owner let ``takeover_s`` pass."""
        if peer in self.peers:
            self.owners.on_takeover_missed(peer, now, takeover_s, self.connectivity.tiers)

    def claims_of(self, peer: PeerId) -> tuple[Block, ...]:
        """Blocks of data that ``peer`` has taken; of more than a learner holds, the first."""
        beat = self.peers[peer].beat
        return () if beat is None else beat.claims[:MAX_HELD]

    def is_any_departing(self, peers: frozenset[PeerId]) -> bool:
        """Whether one of these live peers is on its way out."""
        return any(map(self.is_departing, peers))

    def is_departing(self, peer: PeerId) -> bool:
        """Whether this live peer is on its way out."""
        view = self.peers.get(peer)
        return view is not None and view.beat is not None and view.beat.phase in ("leaving", "finished")
