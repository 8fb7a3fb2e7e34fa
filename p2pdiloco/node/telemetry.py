"""Collects what a node shows of itself for page, terminal view, metrics and alerts.

The events of the state machine become lines of the event log. With the current status, the connections and what
other peers answer they become the picture that page, terminal view, metrics and alerts show.

Rules of this file:
1. Nothing here influences the protocol, and the protocol never waits for it.
2. Other peers are asked for their status only while somebody views a picture.
3. Notes are rate limited by topic.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from p2pdiloco.net.bandwidth import Traffic
from p2pdiloco.net.handshake import Role
from p2pdiloco.node.eta import EtaEstimator
from p2pdiloco.node.swarm_status import ASK_S, SwarmStatus
from p2pdiloco.node.thin_line import ThinLine
from p2pdiloco.observability.alerts import Alerts
from p2pdiloco.observability.history import RunHistory, account, finite
from p2pdiloco.observability.snapshot import (
    Costs,
    Headcount,
    LinkUse,
    OwnWords,
    PeerRow,
    Reach,
    RunProgress,
    RunSnapshot,
    ShardRow,
    Title,
)
from p2pdiloco.peer.peer import Peer
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId, peer_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.swarm.limits import approached
from p2pdiloco.timing import RateLimiter
from p2pdiloco.transport.tls_connection import Channel
from p2pdiloco.transport.transport import Transport
from p2pdiloco.util import logs
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.wire.control_messages import PeerStatus

log = logs.get("node")

LOOK_S = 1.0
OUTLOOK_S = 5.0
# Time for which a viewer counts as present after requesting a picture.
WATCHED_S = 60.0
# Number of measurements over which the use of the link is averaged.
RATE_LOOKS = 10
# Rate limit of the notes of one topic.
NOTE_BURST, NOTES_PER_S = 10, 1 / 6
LONGEST_NOTE = 500


class MachineStepped(NamedTuple):
    """Event: the peer's state machine has handled an event."""

    event: ev.Event
    effects: list[ef.Effect]
    now: float


def run_history(manifest: Manifest, me: PeerId) -> RunHistory:
    """Return an empty history of a run, to be filled from the event log of the peer ``me``."""
    layout, config = Layout.of(manifest), manifest.config
    title = Title(run=manifest.run, name=config.name, me=me, parameters=layout.elements)
    return RunHistory(title, [shard.elements for shard in layout.shards], config.inner.steps)


class Telemetry:
    """Telemetry of one node. Listens to ``MachineStepped``, and publishes each ``Alert``."""

    def __init__(
        self,
        peer: Peer,
        links: Transport,
        history: RunHistory,
        status: Callable[[], PeerStatus],
        swarm_status: SwarmStatus,
        membership_remaining_s: Callable[[], float | None],
        events: EventBus,
        members: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            history: history of the run, fed by the event log of ``peer``.
            status: returns this peer's status.
            swarm_status: status of the other peers.
            membership_remaining_s: returns the remaining seconds of this peer's membership; None: it does not expire.
            members: returns how many members the run has had, without the founder.
        """
        self._peer = peer
        self._members = members
        self._links = links
        self.history = history
        self._status = status
        self.swarm_status = swarm_status
        self._events = events
        self._alerts = Alerts(membership_remaining_s)
        self._live: tuple[PeerId, ...] = ()
        # The last evaluation in the event log, so that each is written once.
        self._evaluation: msg.Evaluation | None = None
        # For each peer, its connection and the time at which that was first seen.
        self._since: dict[str, tuple[object, float]] = {}
        self._traffic: deque[tuple[float, int, int]] = deque(maxlen=RATE_LOOKS)
        self._line = ThinLine(peer.machine.view.sync_every)
        # Versions that hold other learners' progress.
        self._of_others = 0
        self._outlook = EtaEstimator()
        self._watched_at = -math.inf
        self._began = peer.host.now()
        # By topic of a note.
        self._notes: RateLimiter[str] = RateLimiter(burst=NOTE_BURST, per_s=NOTES_PER_S)
        events.subscribe(MachineStepped, self._on_step)

    # -- events --------------------------------------------------------------------------------------------------------

    def _on_step(self, step: MachineStepped) -> None:
        """Write the event and its effects to the event log."""
        event, effects, _ = step
        view, write = self._peer.machine.view, self._peer.metrics.write
        if view.live != self._live:
            self._write_live_changes(view.live)
        match event:
            case ev.Applied():
                header = view.commit_of(event.shard, event.head)
                if header is not None:
                    self._of_others += any(peer_of(one.learner) != view.me for one in header.contributors)
                    write(
                        "commit",
                        shard=event.shard,
                        version=header.version,
                        head=event.head,
                        step=header.step,
                        tokens=header.counts.merged,
                        owner=header.owner,
                        contributors={c.learner: c.tokens for c in header.contributors},
                    )
            case ev.Evaluated() | ev.Received(message=msg.Evaluation()):
                evaluation = view.evaluation
                if evaluation is not None and evaluation != self._evaluation:
                    self._evaluation = evaluation
                    write("evaluation", **msgspec.structs.asdict(evaluation))
            case _:
                pass
        for effect in effects:
            if isinstance(effect, ef.Note) and (effect.level != "debug" or effect.topic == "refusal"):
                self._write_note(effect)

    def _write_live_changes(self, live: tuple[PeerId, ...]) -> None:
        was, self._live = set(self._live), live
        self._peer.metrics.write("peers", live=len(live) + 1)
        for peer in live:
            if peer not in was:
                self._peer.metrics.write("joined", peer=peer, live=len(live) + 1)
        for peer in sorted(was.difference(live)):
            self._peer.metrics.write("left", peer=peer, live=len(live) + 1)

    def _write_note(self, note: ef.Note) -> None:
        if note.topic == "peers":  # already in the log as "joined" and "left"
            return
        if self._notes.take(note.topic, self._peer.host.now()):
            self._peer.metrics.write("note", level=note.level, topic=note.topic, text=note.reason[:LONGEST_NOTE])

    # -- measuring -----------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Measure rates, estimate the remaining time, and ask other peers while there is a viewer, until cancelled."""
        asked_at = prospect_at = -math.inf
        while True:
            now = self._peer.host.now()
            traffic = self._links.traffic()
            up, down = (traffic.sent_control + traffic.sent_bulk), (traffic.received_control + traffic.received_bulk)
            self._traffic.append((now, up, down))
            self._judge_line(now, traffic)
            if now - prospect_at >= OUTLOOK_S and self._peer.machine.view.is_current:
                prospect_at = now
                self._outlook.look(now, self._status())
                await self._publish_alerts()
            if now - asked_at >= ASK_S and self.is_watched and not self._peer.options.learner.script:
                asked_at = now
                await self.swarm_status.ask_peers()
            await asyncio.sleep(LOOK_S)

    def _judge_line(self, now: float, traffic: Traffic) -> None:
        """Tell the user, and in the status all others, if the line is too thin for the run's exchanges."""
        peer, view, metrics = self._peer, self._peer.machine.view, self._peer.metrics
        self._line.look(
            now,
            metrics.steps if view.phase == "training" else None,
            view.unmerged_tokens() * metrics.steps / max(1, metrics.tokens),
            self._of_others,
            peer.driver.round_bytes(),
            (traffic.sent_bulk, traffic.received_bulk),
            self._links.waiting_payloads(),
        )
        if self._line.sentence and not peer.line_trouble:
            log.warning(self._line.sentence)
        peer.line_trouble = self._line.sentence

    async def _publish_alerts(self) -> None:
        """Publish and log each alert that begins or ends."""
        folder = self._peer.options.folder
        room: float | None = None
        with suppress(OSError):  # without the free space, all other alerts still work
            room = (await asyncio.to_thread(shutil.disk_usage, folder)).free
        limits = approached(
            [self._status()], max(shard.elements for shard in self._peer.state.layout.shards), self._members()
        )
        for alert in self._alerts.look(self._peer.host.now(), self._current_picture(), room, limits):
            self._peer.metrics.write("alert", kind=alert.kind, text=alert.text, is_over=alert.is_over)
            self._events.publish(alert)

    @property
    def is_watched(self) -> bool:
        """True if a viewer has requested a picture in the last WATCHED_S seconds."""
        return self._peer.host.now() - self._watched_at < WATCHED_S

    def picture_for_viewer(self) -> RunSnapshot:
        """Return a picture for a viewer that stays, so that other peers are asked for their status from now on."""
        self._watched_at = self._peer.host.now()
        return self.picture()

    def picture(self) -> RunSnapshot:
        """Return the current picture, with the alerts that are active."""
        seen, lasts_s = self._current_picture(), self._peer.host.now() - self._began
        lasting = (text for kind, text in self._alerts.present.items() if kind != "trouble")
        return msgspec.structs.replace(
            seen,
            troubles=tuple(dict.fromkeys((*seen.troubles, *lasting))),
            account=account(seen, lasts_s),
        )

    def _current_picture(self) -> RunSnapshot:
        now, status = time.time(), self._status()
        base = self.history.picture(now)
        peers = self._rows(now, status, base.peers)
        rates = [row.words.tokens_per_s for row in peers if row.words is not None]
        prospect = self._outlook.prospect()
        return msgspec.structs.replace(
            base,
            course=RunProgress(
                phase=status.phase,
                step=status.step,
                total_steps=status.total_steps,
                done=prospect.done,
                left_s=prospect.left_s,
                my_share=prospect.my_share,
                tokens_trained=status.tokens_trained,
                tokens_merged=status.tokens_merged,
                tokens_per_s=status.tokens_per_second,
                swarm_tokens_per_s=sum(rates),
                train_loss=finite(status.train_loss),
                reward=finite(status.reward),
                held_out_loss=finite(status.held_out_loss),
                held_out_step=status.held_out_step,
            ),
            headcount=Headcount(
                known=status.known,
                live=status.live,
                participating=status.participating,
                weight_averaged=status.weight_averaged,
            ),
            link=self._link_use(status),
            costs=Costs(
                compute_s=status.compute_s,
                overhead_s=status.overhead_s,
                blocked_s=status.blocked_s,
                node_cpu_s=status.node_cpu_s,
            ),
            shards=self._shards({row.shard: row.at for row in base.shards}),
            peers=peers,
            troubles=(status.trouble,) if status.trouble else (),
        )

    def _link_use(self, status: PeerStatus) -> LinkUse:
        (began, up, down), (ended, last_up, last_down) = (
            (self._traffic[0], self._traffic[-1]) if self._traffic else ((0.0, 0, 0), (0.0, 0, 0))
        )
        seconds = max(ended - began, LOOK_S)
        return LinkUse(
            up_bytes=status.bytes_up,
            down_bytes=status.bytes_down,
            up_per_s=(last_up - up) / seconds,
            down_per_s=(last_down - down) / seconds,
            up_budget=self._links.up_bytes_per_s,
            down_budget=self._peer.options.link.down_bytes_per_s,
        )

    def _shards(self, came: dict[int, float]) -> tuple[ShardRow, ...]:
        heads = self._peer.machine.view.heads()
        return tuple(
            ShardRow(shard=head.shard, version=head.version, at=came.get(head.shard, 0.0))
            for head in heads
            if head is not None
        )

    def _rows(self, now: float, status: PeerStatus, given: tuple[PeerRow, ...]) -> tuple[PeerRow, ...]:
        """Return rows of the live peers and of those that have contributed. Peers that have left come last."""
        view, rows = self._peer.machine.view, {row.peer: row for row in given}
        participating, words = view.participating, {view.me: status, **self.swarm_status.others}
        live = (view.me, *view.live)
        reaches = {peer: self._reach(peer, now) for peer in view.live}
        self._since = {peer: self._since[peer] for peer in view.live if peer in self._since}
        found = []
        for peer in dict.fromkeys((*live, *rows)):
            is_live = peer == view.me or peer in reaches
            found.append(
                msgspec.structs.replace(
                    rows.get(peer, PeerRow(peer=peer, is_me=peer == view.me)),
                    is_live=is_live,
                    is_participating=peer in participating or (peer == view.me and status.phase == "training"),
                    reach=reaches.get(PeerId(peer)),
                    words=public_words(words[PeerId(peer)]) if is_live and peer in words else None,
                )
            )
        return tuple(sorted(found, key=lambda row: (not row.is_me, not row.is_live, -row.merged, row.peer)))

    def _reach(self, peer: PeerId, now: float) -> Reach | None:
        channel = self._links.channel_of(peer)
        if channel is None:
            return None
        known, since = self._since.get(peer, (None, now))
        if known is not channel:
            self._since[peer] = (channel, since := now)
        path = channel.path()
        return Reach(
            how=_connection_kind(channel),
            address=str(channel.address),
            since=since,
            lanes=self._links.lanes(peer),
            round_trip_s=None if path is None else finite(path.round_trip_s),
        )


def _connection_kind(channel: Channel) -> str:
    if channel.is_met:
        return "relayed" if channel.connection.greeting.is_relayed else "punched"
    return "they dialled" if channel.connection.role is Role.LISTENER else "we dialled"


def public_words(status: PeerStatus) -> OwnWords:
    """Return the part of a peer's status that the picture shows."""
    return OwnWords(
        phase=status.phase,
        tokens_per_s=max(0.0, finite(status.tokens_per_second) or 0.0),
        tokens=status.tokens_trained,
        loss=finite(status.train_loss),
        version_min=status.version_min,
        version_max=status.version_max,
        up_bytes=status.bytes_up,
        down_bytes=status.bytes_down,
        blocked_s=max(0.0, finite(status.blocked_s) or 0.0),
        trouble=status.trouble,
    )
