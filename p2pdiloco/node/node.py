"""One peer's node: the machine, its global state, its connections, its place in the directory, and its learner.

Rules of this file:
1. ``async with Node(...)`` opens everything and closes everything, in reverse order, also when something fails
   half-way.
2. The node ends for one of four reasons: the run is complete, it was asked to leave, its learner cannot go on, or a
   defect of ours. Each has an exit status and a sentence.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from p2pdiloco.node.learner_process import LearnerProcess
from p2pdiloco.node.roster import Roster
from p2pdiloco.peer.adapting import Adapting
from p2pdiloco.peer.answering import Answering
from p2pdiloco.peer.arrivals import Arrivals
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.fetching import Fetching
from p2pdiloco.peer.global_state import GlobalState, Shifts
from p2pdiloco.peer.incoming import INCOMING
from p2pdiloco.peer.metrics import Metrics, progress_fields
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.saving import Saving
from p2pdiloco.peer.supervision import Supervision
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.core import ProtocolConfig
from p2pdiloco.protocol.identifiers import PeerId, ShardId
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.manifest import PROTOCOL_VERSION, Layout, Manifest
from p2pdiloco.runtime import logs
from p2pdiloco.runtime.directory import Directory
from p2pdiloco.runtime.files import write_atomically
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.runtime.journal import Journal
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.transport import Answer, ConnectionLimits, Transport, TransportLimits
from p2pdiloco.tensors.digests import list_bytes
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire.bodies import SIGNATURE_BYTES, PeerStatus, StateProof, decode_message
from p2pdiloco.wire.compression import payload_limit

log = logs.get("node")

PROGRESS_S = 5.0
"""Between two lines of the log about progress."""


class Ending(msgspec.Struct, frozen=True):
    """Why the node stopped. Status 0: in order; 1: something failed; 2: the user must repair something."""

    status: int
    reason: str


def protocol_config(manifest: Manifest, options: PeerOptions, peer: PeerId) -> ProtocolConfig:
    """The machine's configuration for this peer of this run."""
    config, layout = manifest.config, Layout.of(manifest)
    return ProtocolConfig(
        run=manifest.run,
        peer=peer,
        fragments=layout.fragments,
        sync_every=config.schedule.sync_every,
        overlap=config.schedule.overlap,
        min_quorum=config.schedule.min_quorum,
        grace_share=config.schedule.grace_share,
        total_steps=config.inner.steps,
        blocks=manifest.blocks.number,
        is_overwrite=config.outer.adopt == "overwrite",
        evaluation_every=config.evaluation.every,
        weight=0.0 if options.is_unreachable else options.weight,
        leave_s=options.leave_s,
    )


class InitialState:
    """What a peer brings: version 0 (the founder) or a checkpoint."""

    def __init__(self, shards: Sequence[StateProof], theta: torch.Tensor, momentum: torch.Tensor) -> None:
        self.shards = tuple(shards)
        self._vectors: tuple[torch.Tensor, torch.Tensor] | None = (theta, momentum)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and momentum; once. Whoever waits for the node to end must not keep a second copy of the model."""
        assert self._vectors is not None, "taken already"
        vectors, self._vectors = self._vectors, None
        return vectors


class Node:
    """A running peer. ``initial`` is None for a newcomer."""

    def __init__(
        self,
        manifest: Manifest,
        options: PeerOptions,
        identity: Identity,
        directory: Directory,
        initial: InitialState | None,
    ) -> None:
        self.manifest = manifest
        self.options = options
        self.identity = identity
        self.directory = directory
        self.layout = Layout.of(manifest)
        self._initial = initial
        self._config = protocol_config(manifest, options, identity.peer_id)
        self.machine = Machine(self._config)
        self.metrics = Metrics(options.folder / "metrics.jsonl")
        self._stack = AsyncExitStack()
        self._tasks = Tasks()
        self._failure: Ending | None = None
        self._live_told = 1

    async def __aenter__(self) -> Self:
        """Open everything.

        Raises:
            OSError: the data port is taken, or the folder is not writable.
        """
        async with AsyncExitStack() as stack:
            self._done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self.options.folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(self.metrics)
            self._journal: Journal | None = None
            if self.options.has_journal:
                self._journal = stack.enter_context(Journal(self.options.folder / "journal.bin", self._config))
            manifest_path = self.options.folder / "manifest.msgpack"
            await asyncio.to_thread(write_atomically, manifest_path, self.manifest.encode())
            vectors = stack.enter_context(SharedVectors.create(self.layout.elements))
            self.state = GlobalState(self.layout, self.manifest.config.outer, self.manifest.config.codec, vectors)
            codecs = Adapting(
                self.manifest.config,
                self.layout,
                self.machine.core,
                self.metrics,
                rate=lambda: self.transport.up_bytes_per_s,
            )
            self.driver = Driver(self.machine, self.state, self.identity, self, codecs)
            stack.callback(self.driver.close)
            self.transport = Transport(
                self.identity,
                listen=self.options.listen,
                run=self.manifest.run,
                version=PROTOCOL_VERSION,
                handler=self,
                limits=TransportLimits(
                    connection=ConnectionLimits.for_payloads(8 * max(s.elements for s in self.layout.shards)),
                    up_bytes_per_s=self.options.up_bytes_per_s,
                    down_bytes_per_s=self.options.down_bytes_per_s,
                ),
            )
            self._arrivals = Arrivals(self.layout, self.options.folder / INCOMING, self.metrics, self._tasks)
            self._fetching = Fetching(
                self.manifest, self.layout, self.driver, self.transport, self._tasks, self._arrivals, self.fault
            )
            self._answering = Answering(self.manifest, self.driver, self.status, self.transport)
            self.supervision = Supervision(
                self.identity.peer_id,
                self.driver,
                self.options,
                self.metrics,
                start=partial(LearnerProcess, memory_fd=vectors.fd, log_path=self.options.folder / "learner.log"),
                manifest=self.manifest.encode(),
                gave_up=self._learner_gave_up,
                sent_bytes=self._sent_bytes,
            )
            self._saving = Saving(
                self.options.folder / "checkpoint",
                self.manifest,
                self.driver,
                self._answering.proof,
                self.metrics,
                keep=self.options.keep_checkpoints,
                save_learner=self.supervision.save,
            )
            await stack.enter_async_context(self.transport)
            await stack.enter_async_context(self._tasks)
            self.roster = Roster(
                self.manifest.run, self.directory, self.transport, self._addresses, self.options.folder / "peers.json"
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _sent_bytes(self) -> int:
        traffic = self.transport.traffic()
        return traffic.sent_control + traffic.sent_bulk

    def _addresses(self) -> list[str]:
        return list(self.options.announce) or self.transport.listen_addresses()

    # -- the main line -------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Take part until something ends it."""
        self._start()
        self._tasks.spawn(self.roster.keep(), name="roster")
        self._tasks.spawn(self._saving.keep_saving(self.options.checkpoint_s), name="checkpoints")
        self._tasks.spawn(self._tell_progress(), name="progress")
        async with AsyncExitStack() as lives:
            if not self.options.is_follower:
                self._tasks.spawn(self.supervision.live(lives), name="learner")
            reason = await self._done
            self.supervision.is_over = True
        ending = self._failure or self._ordinary_ending(reason)
        await self._saving.save(is_last=True)
        await self.roster.withdraw()
        self._report(ending)
        return ending

    def _ordinary_ending(self, reason: str) -> Ending:
        unmerged = self.machine.core.unmerged_tokens()
        if unmerged:
            return Ending(
                1, f"{reason}; {unmerged:,} tokens were not merged in time and are lost (--leave-s allows longer)"
            )
        return Ending(0, reason)

    def leave(self, reason: str) -> None:
        """The machine has nothing left to do."""
        if not self._done.done():
            self._done.set_result(reason)

    def request_leave(self, reason: str) -> None:
        """Leave in order: contribute what is unmerged, save, go."""
        self.driver.feed(ev.LeaveRequested(reason))

    def abandon(self, reason: str) -> None:
        """Leave at once: nothing more is contributed or saved."""
        self._failure = Ending(1, f"left at once ({reason}); unmerged progress is lost")
        self.driver.close()
        self.leave(reason)

    def crashed(self, error: BaseException) -> None:
        """A defect of ours."""
        log.failure("defect", error)
        self._failure = Ending(1, f"internal error: {error!r}; please report it with {self.options.folder}")
        self.driver.close()
        self.leave("internal error")

    def _start(self) -> None:
        shards: list[ev.ShardState] = []
        if self._initial is not None:
            theta, momentum = self._initial.take()
            for proof in self._initial.shards:
                piece = self.layout.shards[proof.state.head.shard]
                span = slice(piece.start, piece.stop)
                self.state.put(piece.shard, proof.state.head.id, theta[span], momentum[span])
                if proof.header is not None:
                    self.driver.proofs[proof.state.head.id] = (proof.header, proof.signature)
                shards.append(proof.state)
            self._initial = None
        self.metrics.write("started", peer=self.identity.peer_id, run=self.manifest.run, is_new=not shards)
        brought = {state.head.shard for state in shards}
        if missing := [piece.elements for piece in self.layout.shards if piece.shard not in brought]:
            self._arrivals.begin(missing)
        self.driver.feed(ev.Started(tuple(shards)))

    # -- for the driver: the learner -----------------------------------------------------------------------------------

    def became_current(self) -> None:
        """Every shard has a state."""
        self.metrics.write("current", step=self.machine.core.step)
        self.supervision.load()
        if self._arrivals.end():
            self._tasks.spawn(self._replace_incoming(), name="first checkpoint")

    async def _replace_incoming(self) -> None:
        """What was downloaded is kept shard by shard until a checkpoint has it."""
        if await self._saving.save(is_last=False):
            await self._arrivals.clear()

    def shifts_ready(self, shifts: Shifts) -> None:
        """The learner has shifts to take."""
        self.supervision.shifts_ready(shifts)

    def tell_learner(self, effect: ef.ForLearner) -> None:
        """Pass a command on to the learner."""
        self.supervision.tell(effect)

    def _learner_gave_up(self, status: int, reason: str) -> None:
        self._failure = Ending(status, reason)
        self.request_leave("the learner cannot go on")

    # -- connections ---------------------------------------------------------------------------------------------------

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """A connection stands; observers only ask."""
        if not is_observer:
            self.driver.feed(ev.PeerConnected(peer))

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """A connection is lost."""
        if peer in self.machine.core.membership.peers:  # an observer never was
            self.driver.feed(ev.PeerDisconnected(peer, reason))
        self.roster.disconnected(peer)

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> asyncio.Future[Any] | None:
        """A message came."""
        try:
            message = decode_message(body)
        except ValueError as error:
            self.fault(peer, "message", str(error))
            return None
        return self.driver.received(peer, message, payload)

    def fault(self, peer: PeerId, what: str, reason: str) -> None:
        """A peer broke the rules. All are counted; the log tells the first, the second, the fourth ..., so that nobody
        can flood it."""
        times = self.metrics.fault(peer, what)
        if times.bit_count() == 1:
            log.warning(f"malformed {what} dropped", peer=peer, reason=reason, times=times)

    def admit(self, peer: PeerId, body: bytes, size: int) -> bool:
        """Whether a payload of this size may come with this message."""
        try:
            message = decode_message(body)
        except ValueError:
            return False
        match message:
            case msg.Contribution():
                shard = message.shard
            case msg.Commit():
                shard = message.header.shard
            case _:
                return False
        if shard >= len(self.layout.shards):
            return False
        elements = self.layout.shards[shard].elements
        return size <= payload_limit(elements) + SIGNATURE_BYTES + list_bytes(elements)

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """A request came."""
        return await self._answering.answer(peer, body)

    def post(self, peer: PeerId, body: bytes, payload: bytes | memoryview | None, topic: str | None) -> None:
        """Send a message, if the peer is connected."""
        if not self.transport.send(peer, body, payload, topic=topic):
            log.debug("message not sent: not connected, or too much waits", peer=peer)

    def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Download a shard's state."""
        self._tasks.spawn(self._fetching.fetch(shard, peer), name=f"fetch {shard}")

    # -- looking back --------------------------------------------------------------------------------------------------

    def observed(self, event: ev.Event, effects: list[ef.Effect], now: float) -> None:
        """Journal and metrics."""
        if self._journal is not None:
            try:
                self._journal.record(now, event, effects)
            except OSError as error:
                self._end_journal(error)
        live = len(self.machine.core.membership.live) + 1
        if live != self._live_told:
            self._live_told = live
            self.metrics.write("peers", live=live)
        match event:
            case ev.Applied():
                chain = self.machine.core.chains[event.shard]
                if chain.log and chain.log[-1].version and chain.log_ids[-1] == event.head:
                    header = chain.log[-1]
                    self.metrics.write(
                        "commit",
                        shard=event.shard,
                        version=header.version,
                        head=event.head,
                        step=header.step,
                        tokens=header.tokens,
                        owner=header.owner,
                        contributors={c.learner: c.tokens for c in header.contributors},
                    )
            case ev.Evaluated() | ev.Received(message=msg.Evaluation()):
                evaluation = self.machine.evaluation
                if evaluation is not None:
                    self.metrics.write("evaluation", **msgspec.structs.asdict(evaluation))
            case _:
                pass

    def _end_journal(self, error: OSError) -> None:
        """A journal with a gap would replay to something else, so it ends where the disk was full."""
        log.warning("journal ends here", reason=os.strerror(error.errno or 0))
        assert self._journal is not None
        self._journal.close()
        self._journal = None

    def status(self) -> PeerStatus:
        """What this peer tells of itself."""
        status, traffic = self.machine.status(), self.transport.traffic()
        versions = [head.version for head in status.heads] or [0]
        evaluation = status.evaluation
        return PeerStatus(
            run=self.manifest.run,
            name=self.manifest.config.name,
            peer=self.identity.peer_id,
            phase=status.phase,
            step=status.step,
            total_steps=self.manifest.config.inner.steps,
            known=max(self.roster.known, len(status.live) + 1),
            live=len(status.live) + 1,
            participating=len(status.participating),
            weight_averaged=status.weight_averaged,
            version_min=min(versions),
            version_max=max(versions),
            heads_mark=self.machine.core.heads_mark,
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
        )

    async def _tell_progress(self) -> None:
        """For the person who watches."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            if self.machine.core.is_current and not self._done.done():
                log.info("progress", **progress_fields(self.status()))

    def _tokens_merged(self) -> int:
        """Cumulative tokens of the chains, averaged over the shards by their size."""
        total = sum(h.tokens * self.layout.shards[h.shard].elements for h in self.machine.status().heads)
        return total // self.layout.elements

    def _report(self, ending: Ending) -> None:
        status, traffic = self.status(), self.driver.traffic
        heads = self.machine.status().heads
        report = {
            **msgspec.structs.asdict(status),
            "ending": msgspec.structs.asdict(ending),
            "digests": [self.state.digest(head.shard) for head in heads],
            "heads": [head.id for head in heads],
            "versions": [head.version for head in heads],
            "tokens_unmerged": self.machine.core.unmerged_tokens(),
            "learner": self.supervision.learner,
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
