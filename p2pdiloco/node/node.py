"""A running peer on this machine: its host, its connections, its records in the directory, and its status reports.

Rule of this file: ``async with Node.open(...)`` builds all parts in the order of their dependencies, and closes them in
reverse order, also if building fails half-way.
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
from p2pdiloco.node.chat import Chat, ChatQuestion
from p2pdiloco.node.eta import EtaEstimator
from p2pdiloco.node.local_host import LocalHost
from p2pdiloco.node.publication import Order
from p2pdiloco.node.publisher import Publisher
from p2pdiloco.node.resource_guard import ResourceGuard
from p2pdiloco.node.results import farewell
from p2pdiloco.node.status_report import StatusReporter
from p2pdiloco.node.swarm_status import SwarmStatus
from p2pdiloco.node.telemetry import MachineStepped, Telemetry, run_history
from p2pdiloco.observability.formatting import duration
from p2pdiloco.peer.ending import APART, NOBODY, Ending
from p2pdiloco.peer.metrics import Metrics, progress_fields
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import InitialState, Peer
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.manifest_defaults import budget, end_of
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, members_of
from p2pdiloco.swarm.duplicate_identity import DuplicateIdentity, IdentityTaken
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.lookup_policy import LookupPolicy
from p2pdiloco.swarm.membership_sync import MembershipLost, MembershipSync, Prolonged
from p2pdiloco.swarm.peer_manager import PeerManager
from p2pdiloco.swarm.reachability import Reachability
from p2pdiloco.swarm.run_announcer import RunAnnouncer
from p2pdiloco.swarm.run_lookup import ask_status
from p2pdiloco.training.export import default_format
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import ConnectionLimits, Transport, TransportLimits
from p2pdiloco.util import logs
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.util.files import make_private_folder, write_atomically
from p2pdiloco.util.status_pipe import Say
from p2pdiloco.wire.control_messages import PeerStatus

log = logs.get("node")

# Interval between two progress lines of the log.
PROGRESS_S = 5.0
# Time for which a peer serves the model after the end of the run by default.
STAY_S = 600.0
# A peer that only fetches leaves after this time even if the state keeps changing.
FETCH_S = 20.0
# Interval between two checks whether the state is fetched.
LOOK_S = 0.2
# Time without a peer after which a newcomer gives up: if it has heard that the run is complete, several lookups in the
# directory; else as long as a peer with a state waits for others.
ENDED_S, LOST_S = 60.0, 600.0
# Bounds of the payload memory that is kept for reuse, which is half a byte per parameter.
LEAST_REUSED_BYTES, MOST_REUSED_BYTES = 4 << 20, 256 << 20


@dataclass(kw_only=True, eq=False)
class Node:
    """A running peer with all its parts. Build it with ``open``."""

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
    """State with which the peer starts, until ``begin`` hands it over."""
    _leaves: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer must leave, so that it does not serve the model after the end."""
    publisher: Publisher | None = None
    """Publishes the model while the run trains, if the user wants it."""
    chat: Chat | None = None
    """Continues texts with the model for the page, if the user wants it."""
    goes_on: bool = False
    """True if the run was prolonged after this peer had come to its end, so that it should take part again."""

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

        Each part receives only finished parts. A part that reports to a later one uses the event bus.

        Args:
            directory: an open directory, which stays open afterwards.
            initial: state with which the peer starts; None for a newcomer.
            credentials: credentials for a private run that the peer has not founded.

        Raises:
            OSError: the data port is taken, or the folder is not writable.
        """
        me, folder, link, layout = identity.peer_id, options.folder, options.link, Layout.of(manifest)
        mine = credentials or Credentials(manifest.run, b"", identity)
        began_s, events = directory.now_s(), EventBus()
        async with AsyncExitStack() as stack:
            # Disk and memory.
            make_private_folder(folder)
            history = run_history(manifest, me)
            metrics = stack.enter_context(Metrics(folder / "metrics.jsonl", history.take))
            await asyncio.to_thread(write_atomically, folder / "manifest.msgpack", manifest.encode())
            vectors = stack.enter_context(SharedVectors.create(layout.elements, ring_elements(layout)))

            # Connections: authorization, and the transport, which does not accept connections yet.
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
                authorizer=authorizer,
                port_file=folder / "ports.json",
                narrow_paths=directory.narrow_paths,
            )
            known = KnownPeers(me)

            # The host and the peer on it.
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
                permissions=membership_sync,
            )
            stack.callback(peer.driver.close)

            # The swarm: how others reach this peer, and how it reaches them.
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
                payload_rate=lambda: (peer.driver.payload_bytes_per_s(), len(peer.machine.view.live)),
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
                group_bits=lambda: peer.machine.view.group_bits,
                is_leaving=lambda other: peer.machine.view.is_leaving(other),
            )
            others = lambda: max(len(transport.peers()), peer.machine.view.learners)  # noqa: E731
            run_announcer = RunAnnouncer(manifest, directory, others)

            # Status and telemetry for the user.
            status = partial(reporter.status, peer)
            swarm_status = SwarmStatus(peer, status, partial(ask_status, transport))
            members = membership_sync.members
            telemetry = Telemetry(
                peer,
                transport,
                history,
                status,
                swarm_status,
                membership_sync.remaining_s,
                events,
                lambda: len(members.known()) - members.is_private,
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
            events.subscribe(MembershipLost, lambda event: peer.end_in_order(Ending(2, event.reason)))
            events.subscribe(Prolonged, node._on_prolonged)
            node._on_prolonged(Prolonged(membership_sync.members.prolonged_to))
            node.publisher = node._publisher()
            if (chat := node._chat()) is not None:
                node.chat = chat
                stack.callback(chat.close)
            events.subscribe(IdentityTaken, node._on_identity_taken)

            # All parts exist: from here on, others can connect.
            await stack.enter_async_context(transport.serve(peer))
            await stack.enter_async_context(reachability)
            yield node

    @property
    def options(self) -> PeerOptions:
        """Options of the peer."""
        return self.peer.options

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Feed the peer its first event. The initial state is handed over, so that its memory can be freed."""
        initial, self.initial = self.initial, None
        self.peer.begin(initial)

    async def run(self, say: Say, ended: Callable[[Ending], None] = lambda _: None) -> Ending:
        """Take part in the run until the run or the peer ends; return why.

        Args:
            say: shows a message to the user.
            ended: called with the ending, before the peer serves the model.
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
        if self.publisher is not None:
            self.host.keep(self.publisher.keep, name="publisher")
        self.host.keep(self._leave_when_abandoned, name="end of the run")
        ending = await self.peer.live()
        self._write_report(ending)
        ending = await self._finish(ending, say, ended)
        await self.membership_sync.save()  # among the last news may be the one that lets this peer go on
        if not self.duplicate_identity.must_end:  # otherwise the records belong to the other process
            await asyncio.gather(self.peer_manager.withdraw(), self.run_announcer.withdraw())
        return ending

    @property
    def has_finished(self) -> bool:
        """True if this peer has the complete run."""
        return self.peer.machine.view.has_finished

    def _end_early(self, reason: str) -> None:
        """Shut down gracefully because the machine has too little memory for this peer."""
        self._leaves.set()
        self.peer.end_in_order(Ending(1, reason))

    def _on_prolonged(self, event: Prolonged) -> None:
        self.peer.move_end(end_of(self.peer.manifest.config, event.last))
        self._look_whether_to_go_on()

    def _look_whether_to_go_on(self) -> None:
        """End the time of serving the model if the run goes on and this peer has trained it."""
        if self.peer.is_over and self.peer.machine.view.is_prolonged and not self._leaves.is_set():
            # A script is gone by now, and starts another node when it comes back.
            self.goes_on = not self.options.learner.script and not self.options.is_fetching
            if self.goes_on:
                self._leaves.set()

    def _on_identity_taken(self, event: IdentityTaken) -> None:
        """End at once, because another process has this identity."""
        self._leaves.set()
        self.peer.end_at_once(Ending(2, event.reason))

    def leave(self, reason: str) -> None:
        """Shut down gracefully, or at once if the run is over."""
        self._leaves.set()
        self.peer.request_leave(reason)

    def abandon(self, reason: str) -> None:
        """End at once, without contributing or saving anything more."""
        self._leaves.set()
        self.peer.abandon(reason)

    async def _finish(self, ending: Ending, say: Say, ended: Callable[[Ending], None]) -> Ending:
        """Show the result to the user, and serve it to others."""
        is_in_order = ending.status in (0, APART)
        if is_in_order and (self.has_finished or self.options.is_fetching):
            if ending.status:
                say(ending.reason)
            log.info("progress", **progress_fields(self.status()))  # a short run has logged none yet
        if self.peer.is_saved:
            config = self.peer.manifest.config
            kinds = {"is_scripts": config.model.kind == "external", "has_budget": budget(config.inner) > 0}
            say(farewell(self.status(), self.options.folder, **kinds))
        ended(ending)
        if is_in_order and self.has_finished:
            self._look_whether_to_go_on()
            await self._publish_last(say)
            await self._stay(say)
            ending = await self.peer.stayed(ending)
        return ending

    async def _publish_last(self, say: Callable[[str], None]) -> None:
        """Publish the run's last version, unless the user wants the peer to leave, and tell the user if that failed."""
        if self.publisher is None or self._leaves.is_set():
            return
        publishing = asyncio.ensure_future(self.publisher.publish())
        leaving = asyncio.ensure_future(self._leaves.wait())
        await asyncio.wait({publishing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not publishing.done():
            publishing.cancel()
            say("left before the run's last version was published: p2pdiloco export writes it")
        elif reason := publishing.result():
            say(f"the run's last version is not published: {reason}. p2pdiloco export writes it")

    async def _stay(self, say: Callable[[str], None]) -> None:
        """Serve the model after the end of the run. The state machine, connections and records stay active."""
        stay_s = self.options.stay_s
        if stay_s is None:
            stay_s = 0.0 if self.options.learner.script else STAY_S
        if stay_s and not self._leaves.is_set():
            say(f"serving the final model for {duration(stay_s)} (--stay-s); press Ctrl+C to stop")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leaves.wait(), stay_s)

    async def _leave_when_fetched(self) -> None:
        """Leave once this peer has the same state as another live peer, or FETCH_S after it has a recent one."""
        view, waited_s = self.peer.machine.view, 0.0
        while waited_s < FETCH_S:
            await asyncio.sleep(LOOK_S)
            marks = view.marks().values()
            if view.is_current and view.heads_mark in marks:
                break
            waited_s += LOOK_S if view.is_current and marks else 0.0
        self.leave("the run's state is downloaded")

    async def _leave_when_abandoned(self) -> None:
        """Leave if all other peers are gone for long before this one has the run's states."""
        view, waited_s = self.peer.machine.view, 0.0
        while not view.is_current and waited_s < (ENDED_S if view.has_heard_end else LOST_S):
            await asyncio.sleep(LOOK_S)
            waited_s = 0.0 if view.live else waited_s + LOOK_S
        if not view.is_current:
            what = "the run ended" if view.has_heard_end else "all other peers were lost"
            self.peer.end_in_order(
                Ending(
                    NOBODY,
                    f"{what} before this peer had the model, and no peer has answered for {duration(waited_s)}. Ask a "
                    "member to export the model (p2pdiloco export), or to serve it (p2pdiloco resume STATE --stay-s "
                    "3600), and repeat this command then",
                )
            )

    def _chat(self) -> Chat | None:
        """Return what continues texts for this peer's page; None if the user wants no chat."""
        if not self.options.watch.has_chat:
            return None
        folder, learner = str(self.options.folder), self.options.learner
        question = ChatQuestion(
            source=folder,
            state=folder,
            run=self.peer.manifest.run,
            model=learner.model,
            tokenizer=learner.tokenizer or learner.data,
        )
        return Chat(
            question, self.options.folder / "chat.log", partial(self.peer.checkpoint_writer.save, is_last=False)
        )

    def _publisher(self) -> Publisher | None:
        """Return the publisher of this peer; None if the user wants none."""
        wanted, learner, manifest = self.options.publish, self.options.learner, self.peer.manifest
        if wanted is None:
            return None
        view = self.peer.machine.view
        return Publisher(
            Order(
                state=str(self.options.folder),
                run=manifest.run,
                folder=str(wanted.folder),
                format=wanted.format or default_format(manifest.config.model),
                base=learner.model,
                tokenizer=learner.tokenizer,
                like=wanted.like,
                keep=wanted.keep,
            ),
            every_s=wanted.every_s,
            command=wanted.command,
            log_path=self.options.folder / "publisher.log",
            mark=lambda: view.heads_mark if view.is_current else None,
            save=partial(self.peer.checkpoint_writer.save, is_last=False),
            troubles=self.host.troubles,
        )

    # -- status --------------------------------------------------------------------------------------------------------

    def status(self) -> PeerStatus:
        """Return the current status of this peer."""
        return self.reporter.status(self.peer)

    async def _log_progress(self) -> None:
        outlook = EtaEstimator()
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self.peer.machine.view.is_current and not self.peer.is_over:
                status = self.status()
                resting = {"resting": why} if (why := self.peer.supervision.resting) else {}
                log.info("progress", **progress_fields(status), **outlook.look(self.host.now(), status), **resting)

    def _write_report(self, ending: Ending) -> None:
        status, sent_up, sent_down = self.status(), self.peer.driver.sent_up, self.peer.driver.sent_down
        heads = self.peer.machine.view.known_heads
        report = {
            **msgspec.structs.asdict(status),
            "ending": msgspec.structs.asdict(ending),
            "digests": [self.peer.state.digest(head.shard) for head in heads],
            "heads": [head.id for head in heads],
            "versions": [head.version for head in heads],
            "tokens_unmerged": self.peer.machine.view.unmerged_tokens(),
            "learner": self.peer.supervision.learner,
            "learner_tokens": self.peer.metrics.learner_tokens,
            "faults": dict(self.peer.metrics.faults),
            "up_bytes_per_parameter": sent_up.per_parameter(),
            "down_bytes_per_parameter": sent_down.per_parameter(),
            "up_payload_bytes": sent_up.bytes,
            "down_payload_bytes": sent_down.bytes,
        }
        try:
            write_atomically(self.options.folder / "report.json", json.dumps(report, indent=2).encode())
        except OSError as error:
            log.error("the report cannot be written", folder=self.options.folder, reason=os.strerror(error.errno or 0))
        self.peer.metrics.write("ended", status=ending.status, reason=ending.reason)
