"""One peer's node: the machine, its global state, its connections, its place in the directory, and its learner.

Rules of this file:
1. ``async with Node(...)`` opens everything and closes everything, in reverse order, also when something fails
   half-way.
2. The node ends for one of four reasons: the run is complete, it was asked to leave, its learner cannot go on, or a
   defect of ours. Each has an exit status and a sentence.
3. The learner is told, never asked: nothing here waits for it, and it waits for nothing here.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from p2pdiloco.node.answering import Answering
from p2pdiloco.node.checkpoint import save
from p2pdiloco.node.driver import Driver
from p2pdiloco.node.fetching import Fetching
from p2pdiloco.node.global_state import GlobalState, Shifts
from p2pdiloco.node.learner_process import LearnerProcess, new_incarnation
from p2pdiloco.node.metrics import Metrics, progress_fields
from p2pdiloco.node.options import PeerOptions
from p2pdiloco.node.roster import Roster
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.core import ProtocolConfig
from p2pdiloco.protocol.identifiers import Digest, LearnerId, PeerId, ShardId, learner_id
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.manifest import PROTOCOL_VERSION, Layout, Manifest
from p2pdiloco.runtime import logs
from p2pdiloco.runtime.directory import Directory
from p2pdiloco.runtime.files import write_atomically
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.runtime.journal import Journal
from p2pdiloco.runtime.tasks import Tasks
from p2pdiloco.runtime.transport import Answer, Transport
from p2pdiloco.tensors.digests import list_bytes
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire import link
from p2pdiloco.wire.bodies import SIGNATURE_BYTES, PeerStatus, StateProof, decode_message
from p2pdiloco.wire.compression import payload_limit

log = logs.get("node")

RESTARTS = 3
"""Lives that a learner may lose by crashing before the peer leaves."""
CHECKPOINT_TRIES = 20
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
        is_overwrite=config.outer.adopt == "overwrite",
        evaluation_every=config.evaluation.every,
        weight=0.0 if options.is_unreachable else options.weight,
        leave_s=options.leave_s,
    )


class InitialState(msgspec.Struct, frozen=True):
    """What a peer brings: version 0 (the founder) or a checkpoint."""

    shards: tuple[StateProof, ...]
    theta: torch.Tensor
    momentum: torch.Tensor


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
        self._learner: LearnerProcess | None = None
        self._learner_id: LearnerId | None = None
        self._is_ready = False
        self._is_loaded = False
        self._lost_lives = 0
        self._failure: Ending | None = None
        self._checkpointed = ""
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
            self._vectors = vectors
            self.state = GlobalState(self.layout, self.manifest.config.outer, self.manifest.config.codec, vectors)
            self.driver = Driver(self.machine, self.state, self.identity, self)
            stack.callback(self.driver.close)
            self.transport = Transport(
                self.identity,
                listen=self.options.listen,
                run=self.manifest.run,
                version=PROTOCOL_VERSION,
                handler=self,
            )
            self.transport.set_budget(self.options.up_bytes_per_s, self.options.down_bytes_per_s)
            self._fetching = Fetching(self.manifest, self.layout, self.driver, self.transport)
            self._answering = Answering(self.manifest, self.driver, self.status)
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

    def _addresses(self) -> list[str]:
        return list(self.options.announce) or self.transport.listen_addresses()

    # -- the main line -------------------------------------------------------------------------------------------------

    async def run(self) -> Ending:
        """Take part until something ends it."""
        self._start()
        self._tasks.spawn(self.roster.keep(), name="roster")
        self._tasks.spawn(self._checkpoints(), name="checkpoints")
        self._tasks.spawn(self._tell_progress(), name="progress")
        async with AsyncExitStack() as lives:
            if not self.options.is_follower:
                self._tasks.spawn(self._live(lives), name="learner")
            reason = await self._done
        ending = self._failure or self._ordinary_ending(reason)
        await self._save(is_last=True)
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
            for proof in self._initial.shards:
                piece = self.layout.shards[proof.state.head.shard]
                span = slice(piece.start, piece.stop)
                self.state.put(
                    piece.shard, proof.state.head.id, self._initial.theta[span], self._initial.momentum[span]
                )
                if proof.header is not None:
                    self.driver.proofs[proof.state.head.id] = (proof.header, proof.signature)
                shards.append(proof.state)
            self._initial = None
        self.metrics.write("started", peer=self.identity.peer_id, run=self.manifest.run, is_new=not shards)
        self.driver.feed(ev.Started(tuple(shards)))

    # -- the learner ---------------------------------------------------------------------------------------------------

    async def _live(self, lives: AsyncExitStack) -> None:
        """Start the learner; after a crash again, with growing pauses, from the live global state."""
        while True:
            self._is_ready = self._is_loaded = False
            self._learner_id = learner_id(self.identity.peer_id, new_incarnation())
            ended: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()

            def gone(reason: str, status: int, ended: asyncio.Future[tuple[str, int]] = ended) -> None:
                if not ended.done():
                    ended.set_result((reason, status))

            self._learner = await lives.enter_async_context(
                LearnerProcess(
                    self._learner_arguments(self._learner_id),
                    memory_fd=self._vectors.fd,
                    heard=self._heard,
                    ended=gone,
                    log_path=self.options.folder / "learner.log",
                )
            )
            self.metrics.learner_began()
            reason, status = await ended
            self._learner, was_loaded = None, self._is_loaded
            if self._done.done():
                return
            self._is_ready = self._is_loaded = False
            self.driver.job(self.state.unload, lambda _: None)
            self.metrics.write("learner-lost", reason=reason, status=status)
            if was_loaded:
                self.driver.feed(ev.LearnerStopped(reason))
            self._lost_lives += 1
            if status == 2 or self._lost_lives > RESTARTS:
                self._failure = Ending(2 if status == 2 else 1, f"the learner cannot go on: {reason}")
                self.request_leave("the learner cannot go on")
                return
            pause = 2.0 ** (self._lost_lives - 1)
            log.warning("learner lost, starting it again", reason=reason, pause_s=pause, life=self._lost_lives + 1)
            await asyncio.sleep(pause)

    def _learner_arguments(self, learner: LearnerId) -> list[str]:
        options = self.options
        arguments = ["--manifest", str(options.folder / "manifest.msgpack"), "--incarnation", learner]
        arguments += ["--device", options.device, "--threads", str(options.threads)]
        return [*arguments, "--data", options.data] if options.data else arguments

    def _heard(self, message: link.FromLearner) -> None:
        """The learner says something. Its answers become jobs, in order; its counters go to the machine at once."""
        match message:
            case link.Progress():
                traffic = self.transport.traffic()
                sent_bytes = traffic.sent_control + traffic.sent_bulk
                self.metrics.progress(message, step=self.machine.core.step, sent_bytes=sent_bytes)
                self.driver.feed(ev.Stepped(message.steps, message.tokens, message.step_time_s))
            case link.Shifted():
                self.driver.job(lambda: self.state.shifted(message.shards), self.shifts_ready)
            case link.Snapshotted():
                event = ev.Snapshotted(message.fragment, message.step, message.steps, message.tokens)
                self.driver.job(lambda: self.state.snapshot_taken(message.fragment), lambda _: self.driver.feed(event))
            case link.Paused():
                self.driver.feed(ev.LearnerPaused(message.steps, message.tokens))
            case link.Evaluated():
                self.driver.feed(ev.Evaluated(message.version, message.loss))
            case link.Ready():
                self._is_ready = True
                self.metrics.write("learner-ready", device=message.device, parameters=message.parameters)
                self._load()
            case link.Failed():
                pass

    def _load(self) -> None:
        """Give the learner the global parameters, once both are there."""
        learner = self._learner_id
        if self._is_ready and not self._is_loaded and self.machine.core.is_current and learner is not None:
            self._is_loaded = True

            def loaded(_: None) -> None:
                if self._learner is not None and self._learner_id == learner:
                    self._learner.send(link.Load(step=self.machine.core.step))
                    self.driver.feed(ev.LearnerStarted(learner))

            self.driver.job(lambda: self.state.load(learner), loaded)

    def became_current(self) -> None:
        """Every shard has a state."""
        self.metrics.write("current", step=self.machine.core.step)
        self._load()

    def shifts_ready(self, shifts: Shifts) -> None:
        """Tell the learner which shifts to take."""
        if self._learner is not None:
            if shifts.added:
                self._learner.send(link.Shift(shards=shifts.added, replace=False))
            if shifts.replaced:
                self._learner.send(link.Shift(shards=shifts.replaced, replace=True))

    def tell_learner(self, effect: ef.Snapshot | ef.AdoptStep | ef.PauseLearner | ef.Evaluate) -> None:
        """Pass a command on."""
        if self._learner is None or not self._is_loaded:
            return
        match effect:
            case ef.Snapshot():
                self._learner.send(link.Snapshot(fragment=effect.fragment, step=effect.step))
            case ef.AdoptStep():
                self._learner.send(link.AdoptStep(step=effect.step))
            case ef.PauseLearner():
                self._learner.send(link.Pause())
            case ef.Evaluate():
                self._learner.send(link.Evaluate(version=effect.version))

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

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        """A message came."""
        try:
            message = decode_message(body)
        except ValueError as error:
            self.fault(peer, "message", str(error))
            return
        self.driver.received(peer, message, payload)

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
        return await self._answering.answer(body)

    def post(self, peer: PeerId, body: bytes, payload: bytes | None) -> None:
        """Send a message, if the peer is connected."""
        if not self.transport.send(peer, body, payload):
            log.debug("message not sent: not connected, or too much waits", peer=peer)

    def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Download a shard's state."""
        self._tasks.spawn(self._fetching.fetch(shard, peer), name=f"fetch {shard}")

    # -- looking back --------------------------------------------------------------------------------------------------

    def observed(self, event: ev.Event, effects: list[ef.Effect], now: float) -> None:
        """Journal and metrics."""
        if self._journal is not None:
            self._journal.record(now, event, effects)
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
            bytes_up=traffic.sent_control + traffic.sent_bulk,
            bytes_down=traffic.received_control + traffic.received_bulk,
            blocked_s=self.metrics.blocked_s,
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
            "learner": self._learner_id,
            "faults": dict(self.metrics.faults),
            "exchange_s": self.metrics.exchange_s,
            "compute_s": self.metrics.compute_s,
            "up_bytes_per_parameter": traffic.up_per_parameter(),
            "down_bytes_per_parameter": traffic.down_per_parameter(),
            "up_payload_bytes": traffic.up_bytes,
            "down_payload_bytes": traffic.down_bytes,
        }
        write_atomically(self.options.folder / "report.json", json.dumps(report, indent=2).encode())
        self.metrics.write("ended", status=ending.status, reason=ending.reason)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    async def _checkpoints(self) -> None:
        while True:
            await asyncio.sleep(self.options.checkpoint_s)
            await self._save(is_last=False)

    async def _save(self, *, is_last: bool) -> None:
        """Write a checkpoint if anything is new."""
        core = self.machine.core
        if self.driver.is_closed or not core.is_current:
            return
        mark = f"{core.heads_mark:x}"
        if mark == self._checkpointed:
            return
        taken = await self._snapshot_state()
        if taken is None:
            log.warning("checkpoint skipped: no quiet moment")
            return
        proofs, theta, momentum = taken
        folder: Path = self.options.folder / "checkpoint"
        try:
            await asyncio.to_thread(save, folder, self.manifest, proofs, theta, momentum)
        except OSError as error:
            log.error("checkpoint not written, the last one stays", folder=folder, reason=os.strerror(error.errno or 0))
            return
        self._checkpointed = mark
        self.metrics.write("checkpoint", is_last=is_last)

    async def _snapshot_state(self) -> tuple[tuple[StateProof, ...], torch.Tensor, torch.Tensor] | None:
        """A copy of all shards with the heads that they are at."""
        for _ in range(CHECKPOINT_TRIES):
            taken: asyncio.Future[tuple[tuple[StateProof, ...], torch.Tensor, torch.Tensor] | None]
            taken = asyncio.get_running_loop().create_future()
            self.driver.job(self._copy_state, lambda copied, taken=taken: self._prove(copied, taken))  # type: ignore[misc]
            found = await asyncio.wait_for(taken, 60.0)
            if found is not None:
                return found
        return None

    def _copy_state(self) -> tuple[list[Digest | None], torch.Tensor, torch.Tensor]:
        return list(self.state.heads), self.state.theta.clone(), self.state.momentum.clone()

    def _prove(
        self,
        copied: tuple[list[Digest | None], torch.Tensor, torch.Tensor],
        taken: asyncio.Future[tuple[tuple[StateProof, ...], torch.Tensor, torch.Tensor] | None],
    ) -> None:
        """Pair the copy with the machine's heads, in the same breath; None if a shard is just between two."""
        heads, theta, momentum = copied
        chains = self.machine.core.chains
        is_whole = all(c.head is not None and c.head.id == h for c, h in zip(chains, heads, strict=True))
        if not taken.done():
            proofs = tuple(self._answering.proof(c.shard) for c in chains) if is_whole else ()
            taken.set_result((proofs, theta, momentum) if is_whole else None)
