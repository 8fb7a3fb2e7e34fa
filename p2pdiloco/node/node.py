"""A running peer on this machine: its host, its connections, its place in the directory, and what a user sees of it.

Rule of this file: ``async with Node(...)`` opens everything and closes everything, in reverse order, also when
something fails half-way.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self

import msgspec

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.node.eta import EtaEstimator, duration, presented
from p2pdiloco.node.local_host import LocalHost
from p2pdiloco.node.resource_guard import ResourceGuard, toggle
from p2pdiloco.node.results import farewell
from p2pdiloco.node.swarm_status import SwarmStatus
from p2pdiloco.node.telemetry import Telemetry
from p2pdiloco.peer.ending import APART, Ending
from p2pdiloco.peer.event_journal import Journal
from p2pdiloco.peer.metrics import Metrics, progress_fields
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import InitialState, Peer
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, members_of
from p2pdiloco.swarm.duplicate_identity import DuplicateIdentity
from p2pdiloco.swarm.membership_sync import MembershipSync
from p2pdiloco.swarm.peer_manager import PeerManager
from p2pdiloco.swarm.reachability import Reachability
from p2pdiloco.swarm.run_announcer import RunAnnouncer
from p2pdiloco.swarm.run_lookup import ask_status
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.transport import port_memory
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import ConnectionLimits, Transport, TransportLimits
from p2pdiloco.util import logs
from p2pdiloco.util.files import write_atomically
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT, PeerStatus

log = logs.get("node")

PROGRESS_S = 5.0
"""Between two lines of the log about progress."""
STAY_S = 600.0
"""How long a peer serves what has come out of a run, unless its user says otherwise."""
FETCH_S = 20.0
"""Whoever only fetches a state that goes on changing has the newest after so long."""
LOOK_S = 0.2
LEAST_REUSED_BYTES, MOST_REUSED_BYTES = 4 << 20, 256 << 20
"""Memory for payloads that is kept for the next ones: half a byte a parameter, within these."""


class Node:
    """A running peer. ``initial`` is None for a newcomer."""

    def __init__(
        self,
        manifest: Manifest,
        options: PeerOptions,
        identity: Identity,
        directory: Directory,
        initial: InitialState | None,
        mine: Credentials | None = None,
    ) -> None:
        """``mine`` lets it in to a private run that it has not founded."""
        self.manifest = manifest
        self.options = options
        self.directory = directory
        self._initial = initial
        self._mine = mine or Credentials(manifest.run, b"", identity)
        self._stack = AsyncExitStack()
        self._sent_away = asyncio.Event()
        """Nobody wants it to stay."""

    async def __aenter__(self) -> Self:
        """Open everything.

        Raises:
            OSError: the data port is taken, or the folder is not writable.
        """
        folder, manifest, layout = self.options.folder, self.manifest, Layout.of(self.manifest)
        async with AsyncExitStack() as stack:
            folder.mkdir(parents=True, exist_ok=True)
            metrics = stack.enter_context(Metrics(folder / "metrics.jsonl"))
            await asyncio.to_thread(write_atomically, folder / "manifest.msgpack", manifest.encode())
            self.membership_sync = MembershipSync(
                members_of(manifest),
                self._mine,
                MemberFiles(folder),
                lambda work, name: self.host.spawn(work, name=name),
                lambda reason: self.peer.end_in_order(Ending(2, reason)),
            )
            vectors = stack.enter_context(SharedVectors.create(layout.elements))
            host = LocalHost(vectors.fd, folder / "learner.log", self.options.machine.tensor_threads)
            self.host = await stack.enter_async_context(host)
            self.peer = Peer(
                manifest,
                self.options,
                self._mine.identity,
                self.host,
                vectors,
                metrics,
                sent_bytes=self._sent_bytes,
                status=self.status,
                observed=self._observed,
                standing=self.membership_sync,
            )
            stack.callback(self.peer.driver.close)
            journal: Journal | None = None
            if self.options.has_journal:
                journal = stack.enter_context(Journal(folder / "journal.bin", self.peer.config))
            ports = folder / "ports.json"
            self.transport = self.host.links = Transport(
                self._mine.identity,
                listen=await asyncio.to_thread(port_memory.again, self.options.link.listen, ports),
                run=manifest.run,
                version=WIRE_VERSION,
                handler=self.peer,
                limits=TransportLimits(
                    connection=ConnectionLimits.for_payloads(8 * max(s.elements for s in layout.shards)),
                    up_bytes_per_s=self.options.link.up_bytes_per_s,
                    down_bytes_per_s=self.options.link.down_bytes_per_s,
                    reused_bytes=min(MOST_REUSED_BYTES, max(LEAST_REUSED_BYTES, layout.elements // 2)),
                ),
                door=self.membership_sync.door,
            )
            self.membership_sync.links = self.transport
            self.reachability = Reachability(
                self._mine.identity,
                self.directory,
                self.transport,
                announced=self.options.link.announce,
                relay_bytes_per_s=self.options.link.relay_bytes_per_s,
                maps_port=self.options.link.maps_port,
                members=lambda: self.peer_manager.records(),
                is_missing=lambda: self.peer_manager.is_missing,
                troubles=self.host.troubles,
            )
            credentials = self._mine if self.membership_sync.members.is_private else None
            self.twins = DuplicateIdentity(self.peer.config.peer, credentials, self.host, self._give_way)
            self.peer_manager = PeerManager(
                manifest.run,
                self.directory,
                self.transport,
                self.reachability.record,
                folder / "peers.json",
                lambda record: self.twins.seen(record, self.peer_manager.began_s, self.transport.life),
                self.membership_sync,
                self.reachability.ladder,
                heard_of=lambda: self.peer.machine.view.heard_by_others,
            )
            figures = SwarmStatus(self.peer, self.status, self._ask_status)
            self.telemetry = Telemetry(
                self.peer, self.transport, self.status, figures, journal, self.membership_sync.left_s
            )
            await stack.enter_async_context(self.transport)
            await asyncio.to_thread(port_memory.remember, self.transport.listen_addresses(), ports)
            await stack.enter_async_context(self.reachability)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _sent_bytes(self) -> int:
        traffic = self.transport.traffic()
        return traffic.sent_control + traffic.sent_bulk

    @property
    def metrics(self) -> Metrics:
        """What the peer writes down."""
        return self.peer.metrics

    # -- the main line -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The peer's first event. What it brings is not kept here."""
        initial, self._initial = self._initial, None
        self.peer.begin(initial)

    async def run(self, say: Callable[[str], None], ended: Callable[[Ending], None] = lambda _: None) -> Ending:
        """Take part until something ends it; ``say`` tells the user what came out. ``ended`` hears of the end before
        what came out is served."""
        self.begin()
        self.host.keep(partial(self.reachability.keep, say), name="whereabouts")
        self.host.keep(self.peer_manager.keep, name="roster")
        announcement = RunAnnouncer(self.manifest, self.directory, lambda: len(self.transport.peers()))
        self.host.keep(announcement.keep, name="announcement")
        self.host.keep(self.membership_sync.keep, name="members")
        self.host.keep(self._tell_progress, name="progress")
        guest = ResourceGuard(self.options.folder, self.options.machine, self.peer.supervision, self._end_early)
        self.host.keep(guest.keep, name="guest")
        if self.options.learner.script:
            self.host.keep(self.telemetry.figures.keep, name="figures")
        self.host.keep(self.telemetry.keep, name="lookout")
        if self.options.is_fetching:
            self.host.keep(self._go_when_fetched, name="fetch")
        ending = await self.peer.live()
        self._report(ending)
        ending = await self._wind_up(ending, say, ended)
        if not self.twins.have_won:  # the records are the other one's
            await asyncio.gather(self.peer_manager.withdraw(), announcement.withdraw())
        return ending

    @property
    def has_finished(self) -> bool:
        """The run is complete here."""
        return self.peer.machine.view.has_finished

    async def _ask_status(self, peer: PeerId) -> PeerStatus | None:
        return await ask_status(self.transport, peer)

    def _end_early(self, reason: str) -> None:
        """Leave in order, since the machine cannot have this peer."""
        self._sent_away.set()
        self.peer.end_in_order(Ending(1, reason))

    def _give_way(self, reason: str) -> None:
        """Leave at once: the identity is another process's."""
        self._sent_away.set()
        self.peer.end_at_once(Ending(2, reason))

    def leave(self, reason: str) -> None:
        """Leave in order; of a run that is over, at once."""
        self._sent_away.set()
        self.peer.request_leave(reason)

    def toggle_pause(self) -> None:
        """Let the learner rest, until told otherwise, or end that."""
        toggle(self.options.folder)

    def abandon(self, reason: str) -> None:
        """Leave at once: nothing more is contributed or saved."""
        self._sent_away.set()
        self.peer.abandon(reason)

    async def _wind_up(self, ending: Ending, say: Callable[[str], None], ended: Callable[[Ending], None]) -> Ending:
        """Tell what came out, and serve it."""
        is_in_order = ending.status in (0, APART)
        if is_in_order and (self.has_finished or self.options.is_fetching):
            if ending.status:
                say(ending.reason)
            log.info("progress", **progress_fields(self.status()))  # a short run has told none yet
            is_scripts = self.manifest.config.model.kind == "external"
            for line in farewell(self.status(), self.options.folder, is_scripts=is_scripts):
                say(line)
        ended(ending)
        if is_in_order and self.has_finished:
            await self._stay(say)
            ending = await self.peer.stayed(ending)
        return ending

    async def _stay(self, say: Callable[[str], None]) -> None:
        """What came out is served to those who come after the end: machine, connections and records go on as before."""
        stay_s = self.options.stay_s
        if stay_s is None:
            stay_s = 0.0 if self.options.learner.script else STAY_S
        if stay_s and not self._sent_away.is_set():
            say(f"it is served to whoever comes, for {duration(stay_s)} (--stay-s); Ctrl+C ends that")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sent_away.wait(), stay_s)

    async def _go_when_fetched(self) -> None:
        """Leave as soon as one of those who are there holds what this peer holds."""
        view, waited_s = self.peer.machine.view, 0.0
        while waited_s < FETCH_S:
            await asyncio.sleep(LOOK_S)
            marks = view.marks().values()
            if view.is_current and view.heads_mark in marks:
                break
            waited_s += LOOK_S if view.is_current and marks else 0.0
        self.leave("what the run has come to is here")

    @property
    def trouble(self) -> str:
        """What a person should look at: the peer's, then that of tasks that failed and are started again."""
        kept = (self.host.troubles, self.transport.troubles, self.directory.troubles)
        found = (self.peer.trouble, *(text for troubles in kept for text in troubles.values()))
        return "; ".join(filter(None, found))[:TROUBLE_LIMIT]

    # -- looking back --------------------------------------------------------------------------------------------------

    def _observed(self, event: ev.Event, effects: list[ef.Effect], now: float) -> None:
        self.telemetry.observed(event, effects, now)

    def status(self) -> PeerStatus:
        """What this peer tells of itself."""
        status, traffic = self.peer.machine.status(), self.transport.traffic()
        versions = [head.version for head in status.heads] or [0]
        evaluation = status.evaluation
        told = PeerStatus(
            run=self.manifest.run,
            name=self.manifest.config.name,
            peer=self.peer.config.peer,
            phase="resting" if self.peer.supervision.resting else status.phase,
            step=status.step,
            total_steps=self.peer.machine.view.last_step,
            known=max(self.peer_manager.known, len(status.live) + 1),
            live=len(status.live) + 1,
            participating=len(status.participating),
            weight_averaged=status.weight_averaged,
            version_min=min(versions),
            version_max=max(versions),
            heads_mark=self.peer.machine.view.heads_mark,
            tokens_trained=self.metrics.tokens,
            tokens_merged=self._tokens_merged(),
            tokens_per_second=self.metrics.tokens_per_second,
            train_loss=self.metrics.loss,
            held_out_loss=None if evaluation is None else evaluation.loss,
            held_out_step=0 if evaluation is None else evaluation.step,
            bytes_up=self._sent_bytes(),
            bytes_down=traffic.received_control + traffic.received_bulk,
            blocked_s=self.metrics.blocked_s,
            epochs=status.epochs,
            blocks_repeated=status.blocks_repeated,
            trouble=self.trouble,
            first_batches=self.peer.supervision.first_batches,
        )
        return presented(told)

    async def _tell_progress(self) -> None:
        """For the person who watches."""
        outlook = EtaEstimator()
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self.peer.machine.view.is_current and not self.peer.is_over:
                status = self.status()
                resting = {"resting": why} if (why := self.peer.supervision.resting) else {}
                log.info("progress", **progress_fields(status), **outlook.look(self.host.now(), status), **resting)

    def _tokens_merged(self) -> int:
        """What the chains have merged, as declared, averaged over the shards by their size."""
        merged = self.peer.machine.view.merged_tokens()
        total = sum(m * shard.elements for m, shard in zip(merged, self.peer.layout.shards, strict=True))
        return total // self.peer.layout.elements

    def _report(self, ending: Ending) -> None:
        status, traffic = self.status(), self.peer.driver.traffic
        heads = self.peer.machine.status().heads
        report = {
            **msgspec.structs.asdict(status),
            "ending": msgspec.structs.asdict(ending),
            "digests": [self.peer.state.digest(head.shard) for head in heads],
            "heads": [head.id for head in heads],
            "versions": [head.version for head in heads],
            "tokens_unmerged": self.peer.machine.view.unmerged_tokens(),
            "learner": self.peer.supervision.learner,
            "learner_tokens": self.metrics.learner_tokens,
            "faults": dict(self.metrics.faults),
            "exchange_s": self.metrics.exchange_s,
            "compute_s": self.metrics.compute_s,
            "up_bytes_per_parameter": traffic.up_per_parameter(),
            "down_bytes_per_parameter": traffic.down_per_parameter(),
            "up_payload_bytes": traffic.up_bytes,
            "down_payload_bytes": traffic.down_bytes,
        }
        try:
            write_atomically(self.options.folder / "report.json", json.dumps(report, indent=2).encode())
        except OSError as error:
            log.error("report not written", folder=self.options.folder, reason=os.strerror(error.errno or 0))
        self.metrics.write("ended", status=ending.status, reason=ending.reason)
