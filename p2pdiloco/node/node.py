"""A running peer on this machine: its host, its connections, its place in the directory, and what a user sees of it.

Rule of this file: ``async with Node.open(...)`` builds everything in the order in which the parts depend on each other,
and closes everything in reverse order, also when something fails half-way.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import msgspec

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.net.authorization import MemberAuthorizer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.node.eta import EtaEstimator, duration
from p2pdiloco.node.local_host import LocalHost
from p2pdiloco.node.resource_guard import ResourceGuard, toggle
from p2pdiloco.node.results import farewell
from p2pdiloco.node.status_report import StatusReporter
from p2pdiloco.node.swarm_status import SwarmStatus
from p2pdiloco.node.telemetry import MachineStepped, Telemetry, run_history
from p2pdiloco.peer.ending import APART, Ending
from p2pdiloco.peer.event_journal import Journal
from p2pdiloco.peer.metrics import Metrics, progress_fields
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import InitialState, Peer
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, members_of
from p2pdiloco.swarm.duplicate_identity import DuplicateIdentity, IdentityTaken
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.lookup_policy import LookupPolicy
from p2pdiloco.swarm.membership_sync import MembershipLost, MembershipSync
from p2pdiloco.swarm.peer_manager import PeerManager
from p2pdiloco.swarm.reachability import Reachability
from p2pdiloco.swarm.run_announcer import RunAnnouncer
from p2pdiloco.swarm.run_lookup import ask_status
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import ConnectionLimits, Transport, TransportLimits
from p2pdiloco.util import logs
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.util.files import write_atomically
from p2pdiloco.wire.control_messages import PeerStatus

log = logs.get("node")

PROGRESS_S = 5.0
"""Between two lines of the log about progress."""
STAY_S = 600.0
"""How long a peer serves the result of a run, unless its user says otherwise."""
FETCH_S = 20.0
"""A peer that only fetches leaves after so long, if the state goes on changing."""
LOOK_S = 0.2
"""Between two looks at whether the state is fetched."""
LEAST_REUSED_BYTES, MOST_REUSED_BYTES = 4 << 20, 256 << 20
"""Memory for payloads that is kept for the next ones: half a byte a parameter, within these."""


@dataclass(kw_only=True, eq=False)
class Node:
    """A running peer, as ``open`` builds it."""

    events: EventBus
    directory: Directory
    transport: Transport
    host: LocalHost
    membership_sync: MembershipSync
    peer: Peer
    reporter: StatusReporter
    reachability: Reachability
    duplicate_identity: DuplicateIdentity
    peer_manager: PeerManager
    run_announcer: RunAnnouncer
    telemetry: Telemetry
    initial: InitialState | None
    """State that the peer brings, until ``begin`` hands it over."""
    _leaves: asyncio.Event = field(default_factory=asyncio.Event)
    """The peer is to go, and serves nobody after the end."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        manifest: Manifest,
        options: PeerOptions,
        identity: Identity,
        directory: Directory,
        initial: InitialState | None,
        credentials: Credentials | None = None,
    ) -> AsyncIterator[Self]:
        """Build a peer from the bottom up, then open its connections.

        Each part gets finished ones. What a part reports to one that is built after it goes over the event bus.

        Args:
            directory: is open already, and stays so.
            initial: state that the peer brings; None for a newcomer.
            credentials: let the peer in to a private run that it has not founded.

        Raises:
            OSError: the data port is taken, or the folder is not writable.
        """
        me, folder, link, layout = identity.peer_id, options.folder, options.link, Layout.of(manifest)
        mine = credentials or Credentials(manifest.run, b"", identity)
        began_s, events = directory.now_s(), EventBus()
        async with AsyncExitStack() as stack:
            # Disk and memory.
            folder.mkdir(parents=True, exist_ok=True)
            history = run_history(manifest, me)
            metrics = stack.enter_context(Metrics(folder / "metrics.jsonl", history.take))
            await asyncio.to_thread(write_atomically, folder / "manifest.msgpack", manifest.encode())
            vectors = stack.enter_context(SharedVectors.create(layout.elements))

            # Connections: who is let in, and the transport, which serves nobody yet.
            authorizer = MemberAuthorizer(members_of(manifest), mine.chain, time.time)
            transport = Transport(
                identity,
                listen=link.listen,
                run=manifest.run,
                version=WIRE_VERSION,
                limits=TransportLimits(
                    connection=ConnectionLimits.for_payloads(8 * max(s.elements for s in layout.shards)),
                    up_bytes_per_s=link.up_bytes_per_s,
                    down_bytes_per_s=link.down_bytes_per_s,
                    reused_bytes=min(MOST_REUSED_BYTES, max(LEAST_REUSED_BYTES, layout.elements // 2)),
                ),
                door=authorizer,
                port_file=folder / "ports.json",
            )
            known = KnownPeers(me)

            # The peer, in the world that the host is.
            threads = options.machine.tensor_threads
            host = await stack.enter_async_context(LocalHost(transport, vectors.fd, folder / "learner.log", threads))
            membership_sync = MembershipSync(authorizer, mine, MemberFiles(folder), transport, host.spawn, events)
            reporter = StatusReporter(transport, known, (host.troubles, transport.troubles, directory.troubles))
            peer = Peer(
                manifest,
                options,
                identity,
                host,
                vectors,
                metrics,
                sent_bytes=reporter.sent_bytes,
                status=reporter.status,
                observed=lambda *step: events.publish(MachineStepped(*step)),
                standing=membership_sync,
            )
            stack.callback(peer.driver.close)

            # The swarm: how this peer is reached, and how it reaches others.
            lookup = LookupPolicy(me, lambda: peer.machine.view.heard_by_others)
            reachability = Reachability(
                identity,
                directory,
                transport,
                known,
                lookup,
                announced=link.announce,
                relay_bytes_per_s=link.relay_bytes_per_s,
                maps_port=link.maps_port,
                troubles=host.troubles,
            )
            shown = mine if authorizer.is_private else None
            duplicate_identity = DuplicateIdentity(me, shown, host, events, began_s=began_s, life=transport.life)
            peer_manager = PeerManager(
                manifest.run,
                directory,
                transport,
                known,
                lookup,
                membership_sync,
                reachability.connector,
                record=reachability.record,
                began_s=began_s,
                cache=folder / "peers.json",
                duplicate_seen=duplicate_identity.handle_record,
            )
            run_announcer = RunAnnouncer(manifest, directory, lambda: len(transport.peers()))

            # What its user sees.
            journal = stack.enter_context(Journal(folder / "journal.bin", peer.config)) if options.has_journal else None
            status = partial(reporter.status, peer)
            swarm_status = SwarmStatus(peer, status, partial(ask_status, transport))
            telemetry = Telemetry(
                peer, transport, history, status, swarm_status, journal, membership_sync.remaining_s, events
            )
            node = cls(
                events=events,
                directory=directory,
                transport=transport,
                host=host,
                membership_sync=membership_sync,
                peer=peer,
                reporter=reporter,
                reachability=reachability,
                duplicate_identity=duplicate_identity,
                peer_manager=peer_manager,
                run_announcer=run_announcer,
                telemetry=telemetry,
                initial=initial,
            )
            events.subscribe(MembershipLost, node._on_membership_lost)
            events.subscribe(IdentityTaken, node._on_identity_taken)

            # All parts are there: from here on others can come.
            await stack.enter_async_context(transport.serve(peer))
            await stack.enter_async_context(reachability)
            yield node

    @property
    def options(self) -> PeerOptions:
        """Options of the peer."""
        return self.peer.options

    @property
    def metrics(self) -> Metrics:
        """Event log and totals of the peer."""
        return self.peer.metrics

    # -- the main line -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Feed the peer's first event. The state that it brings is not kept here."""
        initial, self.initial = self.initial, None
        self.peer.begin(initial)

    async def run(self, say: Callable[[str], None], ended: Callable[[Ending], None] = lambda _: None) -> Ending:
        """Take part until something ends it.

        Args:
            say: tells the user a sentence.
            ended: called with the ending, before the peer serves the result.
        """
        self.begin()
        self.host.keep(partial(self.reachability.keep, say), name="reachability")
        self.host.keep(self.peer_manager.keep, name="peer manager")
        self.host.keep(self.run_announcer.keep, name="run announcer")
        self.host.keep(self.membership_sync.keep, name="membership")
        self.host.keep(self._log_progress, name="progress")
        guard = ResourceGuard(self.options.folder, self.options.machine, self.peer.supervision, self._end_early)
        self.host.keep(guard.keep, name="resource guard")
        if self.options.learner.script:
            self.host.keep(self.telemetry.swarm_status.keep, name="swarm status")
        self.host.keep(self.telemetry.keep, name="telemetry")
        if self.options.is_fetching:
            self.host.keep(self._leave_when_fetched, name="fetch")
        ending = await self.peer.live()
        self._write_report(ending)
        ending = await self._finish(ending, say, ended)
        if not self.duplicate_identity.must_end:  # the records are the other one's
            await asyncio.gather(self.peer_manager.withdraw(), self.run_announcer.withdraw())
        return ending

    @property
    def has_finished(self) -> bool:
        """The run is complete here."""
        return self.peer.machine.view.has_finished

    def _end_early(self, reason: str) -> None:
        """Leave in order, since the machine cannot have this peer."""
        self._leaves.set()
        self.peer.end_in_order(Ending(1, reason))

    def _on_membership_lost(self, event: MembershipLost) -> None:
        self.peer.end_in_order(Ending(2, event.reason))

    def _on_identity_taken(self, event: IdentityTaken) -> None:
        """Leave at once: the identity is another process's."""
        self._leaves.set()
        self.peer.end_at_once(Ending(2, event.reason))

    def leave(self, reason: str) -> None:
        """Leave in order; at once if the run is over."""
        self._leaves.set()
        self.peer.request_leave(reason)

    def toggle_pause(self) -> None:
        """Pause the learner until told otherwise, or let it go on."""
        toggle(self.options.folder)

    def abandon(self, reason: str) -> None:
        """Leave at once: nothing more is contributed or saved."""
        self._leaves.set()
        self.peer.abandon(reason)

    async def _finish(self, ending: Ending, say: Callable[[str], None], ended: Callable[[Ending], None]) -> Ending:
        """Tell the user the result, and serve it to others."""
        is_in_order = ending.status in (0, APART)
        if is_in_order and (self.has_finished or self.options.is_fetching):
            if ending.status:
                say(ending.reason)
            log.info("progress", **progress_fields(self.status()))  # a short run has told none yet
            is_scripts = self.peer.manifest.config.model.kind == "external"
            for line in farewell(self.status(), self.options.folder, is_scripts=is_scripts):
                say(line)
        ended(ending)
        if is_in_order and self.has_finished:
            await self._stay(say)
            ending = await self.peer.stayed(ending)
        return ending

    async def _stay(self, say: Callable[[str], None]) -> None:
        """Serve the result to peers that come after the end: machine, connections and records go on as before."""
        stay_s = self.options.stay_s
        if stay_s is None:
            stay_s = 0.0 if self.options.learner.script else STAY_S
        if stay_s and not self._leaves.is_set():
            say(f"it is served to whoever comes, for {duration(stay_s)} (--stay-s); Ctrl+C ends that")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaves.wait(), stay_s)

    async def _leave_when_fetched(self) -> None:
        """Leave as soon as another live peer holds the state that this peer holds."""
        view, waited_s = self.peer.machine.view, 0.0
        while waited_s < FETCH_S:
            await asyncio.sleep(LOOK_S)
            marks = view.marks().values()
            if view.is_current and view.heads_mark in marks:
                break
            waited_s += LOOK_S if view.is_current and marks else 0.0
        self.leave("what the run has come to is here")

    # -- status --------------------------------------------------------------------------------------------------------

    def status(self) -> PeerStatus:
        """What this peer tells of itself."""
        return self.reporter.status(self.peer)

    async def _log_progress(self) -> None:
        """Log a line for the user every PROGRESS_S."""
        outlook = EtaEstimator()
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self.peer.machine.view.is_current and not self.peer.is_over:
                status = self.status()
                resting = {"resting": why} if (why := self.peer.supervision.resting) else {}
                log.info("progress", **progress_fields(status), **outlook.look(self.host.now(), status), **resting)

    def _write_report(self, ending: Ending) -> None:
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
