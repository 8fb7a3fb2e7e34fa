"""Peer: composes state machine, driver, model state, transfers, checkpoints and learner, for any host.

Rules of this file:
1. This module only composes. Decisions are made in the modules below; effects on the environment go through the host.
2. A peer ends once, for one reason (``ending.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import msgspec
import torch

from p2pdiloco.codec.compression import payload_limit
from p2pdiloco.codec.digests import list_bytes
from p2pdiloco.peer.audit import Auditor
from p2pdiloco.peer.checkpoint_writer import CheckpointWriter
from p2pdiloco.peer.codec_selection import CodecChoice
from p2pdiloco.peer.commit_wal import CommitLog
from p2pdiloco.peer.convictions import ConvictionFile
from p2pdiloco.peer.disk_budget import DiskBudget
from p2pdiloco.peer.driver import Defect, Driver, Observed, Output
from p2pdiloco.peer.ending import APART, Ending, ordinary_ending
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.learner_supervisor import LearnerSupervisor
from p2pdiloco.peer.learner_updates import Shifts
from p2pdiloco.peer.message_verifier import MessageVerifier
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.peer.options import PeerOptions, protocol_config
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.payload_store import PayloadStore
from p2pdiloco.peer.scrubber import CorruptShardPolicy, Scrubber
from p2pdiloco.peer.signatures import Permissions
from p2pdiloco.peer.state_client import INCOMING, PartialDownloads, StateClient
from p2pdiloco.peer.state_proof import SavedState, ancestors, unbroken_lineage
from p2pdiloco.peer.state_server import RequestHandlers, StateServer
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.config import RunEnd
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.timing import RateLimiter
from p2pdiloco.training.shared_memory import SharedVectors, let_go
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT, PeerStatus, StateProof, decode_message
from p2pdiloco.wire.request_reply import Answer

log = logs.get("node")

MESSAGES_PER_S = 1000
# Rate limit per peer and kind of message. An honest peer sends a few per exchange of a fragment: hundreds a second for
# a tiny model on a fast machine. Messages above the limit are dropped and count as malformed, so that the sender is
# eventually blocked.
MESSAGE_BURST = 5000


class InitialState:
    """The states that a peer begins with: version 0 (at the founder) or a checkpoint."""

    def __init__(self, shards: Sequence[StateProof], theta: torch.Tensor, momentum: torch.Tensor) -> None:
        self.shards = tuple(shards)
        self._vectors: tuple[torch.Tensor, torch.Tensor] | None = (theta, momentum)

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return parameters and momentum. Call it once; the caller may overwrite or release them.

        This object drops its references, because its owner lives as long as the node and must not keep a second copy of
        the model.
        """
        assert self._vectors is not None, "taken already"
        vectors, self._vectors = self._vectors, None
        return vectors


class Peer:
    """One peer of a run.

    Args:
        vectors: shared memory with the parameters and the learner's buffers.
        sent_bytes: returns the bytes that this peer has sent so far.
        status: returns the status that other peers get on request.
        observed: called with every event, its effects and its time.
        permissions: knows what each other peer may do.
    """

    def __init__(
        self,
        manifest: Manifest,
        options: PeerOptions,
        identity: Identity,
        host: Host,
        vectors: SharedVectors,
        metrics: Metrics,
        *,
        sent_bytes: Callable[[], int],
        status: Callable[[Peer], PeerStatus],
        observed: Observed,
        permissions: Permissions,
    ) -> None:
        self.manifest = manifest
        self.options = options
        self.host = host
        layout = Layout.of(manifest)
        self.config = protocol_config(manifest, options, identity.peer_id)
        self.machine = Machine(self.config)
        self.metrics = metrics
        # The reason for which this peer ends, once it is known.
        self._reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # An ending that overrides the ordinary one.
        self._cause: Ending | None = None
        # Why the line to other peers is too thin; empty if it is not, or not known.
        self.line_trouble = ""
        self._rates: RateLimiter[tuple[PeerId, type]] = RateLimiter(burst=MESSAGE_BURST, per_s=MESSAGES_PER_S)
        self.state = ModelState(
            layout,
            manifest.config.outer,
            manifest.config.codec,
            vectors,
            round_steps=manifest.config.schedule.sync_every,
        )
        width = self.state.form.width
        a_day, are_timed = options.write_bytes_per_day, options.are_checkpoints_timed
        budget = DiskBudget(a_day, layout.elements, width, are_timed=are_timed)
        store = PayloadStore(host, options, budget)
        payload_cache = PayloadCache(layout, identity, manifest.run, permissions, store)
        checkpoints = options.folder / "checkpoint"
        commit_log = CommitLog(checkpoints, host, identity.peer_id, layout)
        self._convictions = ConvictionFile(options.folder, host)
        codecs = CodecChoice(
            manifest.config,
            layout,
            self.machine.view,
            metrics,
            rate=lambda: host.links.up_bytes_per_s,
            line=lambda: host.links.line_bytes_per_s,
        )
        self.driver = Driver(
            self.machine,
            self.state,
            payload_cache,
            store,
            commit_log,
            self._convictions,
            codecs,
            host,
            metrics,
            observed=observed,
            emit=self._handle,
        )
        self.verifier = MessageVerifier(self.driver, permissions)
        self._payload_cache = payload_cache
        self._auditor = Auditor(manifest, self.driver, self.verifier)
        arrivals = PartialDownloads(layout, width, options.folder / INCOMING, metrics, host)
        self._downloads = StateClient(manifest, self.driver, self.verifier, arrivals)
        self.state_server = StateServer(self.driver)
        self._request_handlers = RequestHandlers(manifest, self.state_server, host, partial(status, self), permissions)
        self.supervision = LearnerSupervisor(
            self.driver,
            options,
            manifest=manifest.encode(),
            evaluation_steps=manifest.config.evaluation.samples / manifest.config.inner.batch,
            gave_up=self._learner_gave_up,
            sent_bytes=sent_bytes,
        )
        self.checkpoint_writer = CheckpointWriter(
            checkpoints,
            manifest,
            self.driver,
            keep=options.keep_checkpoints,
            save_learner=self.supervision.save,
            budget=budget,
        )

    # -- life of the peer ----------------------------------------------------------------------------------------------

    def move_end(self, end: RunEnd) -> None:
        """Take part until another end of the run. It may be called before ``begin``."""
        if end != self.machine.view.end:
            self.driver.feed(ev.EndMoved(end))
            self.metrics.write("end", last_step=end.steps)

    def begin(self, initial: InitialState | None) -> None:
        """Feed the first event, with the states that the peer brings. None: it is a newcomer and has none."""
        shards: list[ev.ShardState] = []
        lineages: list[tuple[Digest, ...]] = []
        if initial is not None:
            theta, momentum = initial.take()
            self.state.keep_in(momentum)
            for proof in initial.shards:
                piece = self.state.layout.shards[proof.state.head.shard]
                span = slice(piece.start, piece.stop)
                self.state.put(piece.shard, proof.state.head.id, theta[span], momentum[span])
                let_go(theta[span])  # otherwise memory holds the model twice for some seconds
                lineage = unbroken_lineage(proof, proof.lineage) if isinstance(proof, SavedState) else ()
                self._payload_cache.keep_proofs(proof, lineage)
                lineages.append(ancestors(proof, lineage))
                shards.append(proof.state)
        self.metrics.write("started", peer=self.config.peer, run=self.manifest.run, is_new=not shards)
        brought = {state.head.shard for state in shards}
        if missing := [piece.elements for piece in self.state.layout.shards if piece.shard not in brought]:
            self._downloads.arrivals.begin(missing)
        heads: list[msg.Head | None] = [None] * len(self.state.layout.shards)
        for state in shards:
            heads[state.head.shard] = state.head
        own = tuple(self.driver.load_own_commits(heads))
        self.driver.feed(ev.Started(tuple(shards), tuple(lineages), own, self._convictions.load()))

    async def live(self) -> Ending:
        """Take part in the run until the peer ends. Call ``begin`` first."""
        self.host.keep(partial(self.checkpoint_writer.keep_saving, self.options.checkpoint_s), name="checkpoints")
        self.host.keep(Scrubber(self.driver).run, name="scrub")
        self.host.keep(CorruptShardPolicy(self.driver).run, name="fallback")
        async with AsyncExitStack() as lives:
            if not self.options.is_follower:
                self.host.spawn(self._look_after_learner(lives), name="learner")
            reason = await self._reason
            await self.supervision.wait_for_script()
            self.supervision.is_over = True
        ending = self._cause or ordinary_ending(
            reason,
            self.machine.view,
            needs_majority=self.config.needs_majority,
            trouble=self.trouble,
            learners=self.supervision.trouble,
            absence=self.supervision.absence,
            line=self.line_trouble,
        )
        return self._with_last_checkpoint(ending, await self.checkpoint_writer.save_last())

    def _with_last_checkpoint(self, ending: Ending, problem: str) -> Ending:
        """Return the ending of a peer whose last checkpoint was not written because of ``problem``, if there is one."""
        if not problem or ending.status not in (0, APART):
            return ending
        return Ending(
            1,
            f"{ending.reason}; the last checkpoint was not written ({problem}), so {self.options.folder} holds an "
            "older model. When the disk accepts writes again, the same command takes the newest one from other peers",
        )

    async def _look_after_learner(self, lives: AsyncExitStack) -> None:
        """Run the learner's supervisor. A failure in it ends the peer, which must not silently go on without a
        learner."""
        try:
            await self.supervision.live(lives)
        except Exception as error:  # noqa: BLE001 (the top of a task)
            self._crash(error)

    async def stayed(self, ending: Ending) -> Ending:
        """Return the ending after the peer has stayed: a peer that was apart from others may have met them again."""
        view = self.machine.view
        is_one = not view.missing and all(mark == view.heads_mark for mark in view.marks().values())
        if ending.status != APART or not is_one:
            return ending
        problem = await self.checkpoint_writer.save_last()
        return self._with_last_checkpoint(
            Ending(0, "the missing peers came back, and all have the same model"), problem
        )

    @property
    def trouble(self) -> str:
        """Problems of the learner or the swarm that a person should look at; empty if there are none."""
        supervision = self.supervision
        learners = "; ".join(
            filter(None, (supervision.absence, supervision.hang, supervision.trouble, self._dissent()))
        )
        return (learners or "; ".join(filter(None, (self.line_trouble, *self.machine.view.troubles))))[:TROUBLE_LIMIT]

    def _dissent(self) -> str:
        """Return a warning if this peer's own contributions point away from the others', in the merges that it made
        itself."""
        times = self.state.agreement.dissenters().get(self.config.peer)
        if times is None:
            return ""
        return (
            f"the last {times} contributions of this peer that could be compared point away from the others': check "
            "its data and its learning rate"
        )

    @property
    def is_over(self) -> bool:
        """True if the peer is ending."""
        return self._reason.done()

    @property
    def is_saved(self) -> bool:
        """True if a peer that has ended has saved its state, as far as the disk accepted it."""
        return self.machine.view.is_current and not self.driver.is_closed

    def request_leave(self, reason: str) -> None:
        """Leave in order: contribute what is unmerged, save, and disconnect."""
        self.supervision.stop_waiting()
        self.driver.feed(ev.LeaveRequested(reason))

    def abandon(self, reason: str) -> None:
        """Leave at once, without contributing or saving."""
        self.end_at_once(Ending(1, f"left at once ({reason}); unmerged progress is lost"))

    def end_in_order(self, ending: Ending) -> None:
        """Save and leave in order, with this ending instead of the ordinary one."""
        if not self.is_over:
            self._cause = ending
            self.request_leave(ending.reason)

    def end_at_once(self, ending: Ending) -> None:
        """End at once, without contributing or saving."""
        self.supervision.stop_waiting()
        self._cause = ending
        self.driver.close()
        self._end(ending.reason)

    def _end(self, reason: str) -> None:
        if not self.is_over:
            self._reason.set_result(reason)

    # -- output of the driver ------------------------------------------------------------------------------------------

    def _handle(self, output: Output) -> None:
        match output:
            case Shifts():
                self.supervision.send_shifts(output)
            case ef.Fetch():
                self.host.spawn(self._downloads.fetch(output.shard, output.peer), name=f"fetch {output.shard}")
            case ef.Restore():
                self.host.spawn(self.checkpoint_writer.restore(output.shard), name=f"restore {output.shard}")
            case ef.Audit():
                self._auditor.consider(output)
            case ef.BecameCurrent():
                self._become_current()
            case ef.Leave():
                self._end(output.reason)
            case Defect():
                self._crash(output.error)
            case _:
                self.supervision.send_effect(output)

    def _crash(self, error: BaseException) -> None:
        """End at once because of a defect in this program, or because the machine has no memory left."""
        log.failure("defect", error)
        reason = f"internal error: {error!r}; please report it with {self.options.folder}"
        if isinstance(error, MemoryError):
            reason = f"no memory left ({error}): close other programs, or take part from a machine with more memory"
        self.end_at_once(Ending(1, reason))

    def _become_current(self) -> None:
        """Start training: every shard has a state."""
        self.metrics.write("current", step=self.machine.view.step)
        self.supervision.load()
        if self._downloads.arrivals.end():
            self.host.spawn(self._replace_incoming(), name="first checkpoint")

    async def _replace_incoming(self) -> None:
        """Write the first checkpoint, then remove the downloaded shards that were kept until then."""
        if await self.checkpoint_writer.save(is_last=False):
            await self._downloads.arrivals.clear()

    def _learner_gave_up(self, status: int, reason: str) -> None:
        self._cause = Ending(status, reason)
        self.request_leave("the learner cannot go on")

    # -- connections ---------------------------------------------------------------------------------------------------

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Handle a new connection. Observers only send requests, so the machine does not see them."""
        if not is_observer and not self.verifier.permissions.observes(peer):
            self.driver.feed(ev.PeerConnected(peer))
            self.verifier.permissions.connected(peer)

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Handle the end of a connection."""
        if self.machine.view.is_connected(peer):  # the machine does not know observers
            self.driver.feed(ev.PeerDisconnected(peer, reason, self.host.links.is_shut_out(peer)))

    def message(
        self, peer: PeerId, body: bytes | msg.Message, payload: memoryview | None
    ) -> asyncio.Future[Any] | None:
        """Handle a message. ``body`` is its bytes, or, with a payload, the message that ``admit`` decoded."""
        try:
            message = decode_message(body) if isinstance(body, bytes) else body
        except ValueError as error:
            self.metrics.report_fault(peer, "message", str(error))
            self.host.links.blame(peer)
            return None
        if not self._rates.take((peer, type(message)), self.host.now()):
            self.metrics.report_fault(peer, "flood", f"more than {MESSAGES_PER_S} {type(message).__name__} a second")
            self.host.links.blame(peer)
            return None
        permissions = self.verifier.permissions
        match message:
            case msg.Contribution() if message.group is None and not permissions.may_contribute(message.giver):
                self.metrics.report_fault(peer, "contribution", "its contributor has a follower's certificate")
                return None
            case msg.Heartbeat():
                if (admitted := permissions.admitted()) is not None and admitted is not self.machine.view.admitted:
                    self.driver.feed(ev.Admitted(admitted))
                weight = min(message.weight, permissions.most_weight(peer))
                message = message if weight == message.weight else msgspec.structs.replace(message, weight=weight)
            case msg.WrongMerge():
                self._auditor.accused(peer, message)
                return None
            case _:
                pass
        return self.verifier.receive(peer, message, payload)

    def admit(self, peer: PeerId, body: bytes, size: int) -> msg.Message | None:
        """Decode a message that announces a payload of ``size`` bytes. Returns None if the payload must not be
        received."""
        try:
            message = decode_message(body)
        except ValueError:
            return None
        match message:
            case msg.Contribution():
                shard = message.shard
                is_able = message.group is not None or self.verifier.permissions.may_contribute(message.giver)
                may_come = is_able and self.machine.wants(peer, message)
                if size != message.payload_bytes or not may_come:
                    return None
            case msg.Commit():
                shard = message.header.shard
            case _:
                return None
        if shard >= len(self.state.layout.shards):
            return None
        elements = self.state.layout.shards[shard].elements
        return message if size <= payload_limit(elements) + SIGNATURE_BYTES + list_bytes(elements) else None

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Answer a request."""
        return await self._request_handlers.answer(peer, body)
