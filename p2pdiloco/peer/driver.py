"""Runs one machine against the world: its effects become messages and jobs, their ends become events.

Rules of this file:
1. All events go through ``feed``, one at a time; effects run in the order in which the machine gave them.
2. Tensor work goes to the host's ``tensors`` queue, in order (``global_state``); checking what others sent goes to
   another, so that a flood of payloads does not delay our own merges.
3. What a peer sent is fed to the machine only when what came with it was found sound (``payload_cache``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar, assert_never

from p2pdiloco.peer.codec_selection import CodecChoice
from p2pdiloco.peer.commit_wal import CommitLog
from p2pdiloco.peer.convictions import ConvictionFile
from p2pdiloco.peer.ema import RunningAverage
from p2pdiloco.peer.host import Handle, Host
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.peer.learner_updates import Payload, Shifts
from p2pdiloco.peer.metrics import PayloadTraffic
from p2pdiloco.peer.model_state import (
    ContributionError,
    DigestMismatchError,
    MergeResult,
    ModelState,
    StaleBaseError,
    UnfitCommitError,
)
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.payload_store import PayloadStore
from p2pdiloco.peer.signatures import OPEN, Standing
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, digest_of, peer_of
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import encode, join_commit

log = logs.get("protocol")
T = TypeVar("T")


class DriverCallbacks(Protocol):
    """What the driver asks of the node around it."""

    def fetch(self, shard: ShardId, peer: PeerId) -> None:
        """Download a shard's state and feed ``Fetched`` or ``Failed``."""

    def tell_learner(self, effect: ef.ForLearner) -> None:
        """Pass a command on to the learner."""

    def shifts_ready(self, shifts: Shifts) -> None:
        """The learner has shifts to take."""

    def became_current(self) -> None:
        """Every shard has a state."""

    def leave(self, reason: str) -> None:
        """Nothing is left to do."""

    def observed(self, event: ev.Event, effects: list[ef.Effect], now: float) -> None:
        """For journal and metrics; called after each event."""

    def merged(self, base: msg.Head, contributors: int, result: MergeResult) -> None:
        """This peer made the version after ``base``."""

    def fault(self, peer: PeerId, what: str, reason: str) -> None:
        """A peer broke the rules; what it sent is dropped."""

    def crashed(self, error: BaseException) -> None:
        """A defect of ours: the node must stop."""


class Driver:
    """One peer's machine, its global state, and the payloads between them."""

    def __init__(
        self,
        machine: Machine,
        state: ModelState,
        identity: Identity,
        host: Host,
        around: DriverCallbacks,
        codecs: CodecChoice,
        standing: Standing,
        commit_log: CommitLog,
        convictions: ConvictionFile,
        store: PayloadStore,
        average: RunningAverage | None = None,
    ) -> None:
        self.machine = machine
        self.state = state
        self.identity = identity
        self.host = host
        self.around = around
        self.codecs = codecs
        self.payload_cache = PayloadCache(state.layout, identity, machine.view.run, standing, store)
        self.store = store
        self.average = average
        """If this peer keeps one."""
        self.commit_log = commit_log
        self._convictions = convictions
        self.traffic = PayloadTraffic([s.elements for s in state.layout.shards])
        self._timer: Handle | None = None
        self.is_closed = False
        self._has_left = False

    def close(self) -> None:
        """Handle no more events; running work ends without effect."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def load_own_commits(self, heads: Sequence[msg.Head | None]) -> list[msg.CommitHeader]:
        """Commits of this peer's earlier lives, which it may have sent and ``heads`` do not contain. Blocks."""
        found = []
        for header, data in self.commit_log.load(heads):
            try:
                self.payload_cache.commit(memoryview(data), header, OPEN)()
            except ValueError as error:
                log.warning("a commit of an earlier life cannot be used", version=header.version, reason=str(error))
                continue
            found.append(header)
        return found

    # -- events --------------------------------------------------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        """Handle one event and run its effects."""
        if self.is_closed:
            return
        now = self.host.now()
        try:
            effects = self.machine.handle(event, now)
            self.around.observed(event, effects, now)
            for effect in effects:
                self._execute(effect)
        except AssertionError as error:
            self.around.crashed(error)
            return
        self._set_timer()
        if self.payload_cache.sweep(self.machine, now):
            self._convictions.save(self.machine.view.convictions())
            self.job(self.state.shifts.memory.rest, lambda _: None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.machine.next_deadline()
        if deadline is not None and not self.is_closed:
            self._timer = self.host.call_at(deadline, lambda: self.feed(ev.Woke()))

    # -- effects -------------------------------------------------------------------------------------------------------

    def _execute(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self._send(effect)
            case ef.Note():
                # Who has said goodbye is told nothing more; that this looks like silence is no news for the user.
                getattr(log, "debug" if self._has_left else effect.level)(effect.topic, reason=effect.reason)
            case ef.Snapshot() | ef.AdoptStep() | ef.Train() | ef.PauseLearner() | ef.Evaluate():
                self.around.tell_learner(effect)
            case ef.Encode():
                self._encode(effect)
            case ef.Merge():
                self._merge(effect)
            case ef.Apply():
                self._apply(effect)
            case ef.Install():
                self._install(effect)
            case ef.Fetch():
                self.around.fetch(effect.shard, effect.peer)
            case ef.BecameCurrent():
                self.around.became_current()
            case ef.HangUp():
                self.host.links.hang_up(effect.peer, effect.reason)
            case ef.Leave():
                self._has_left = True
                self.around.leave(effect.reason)
            case _:
                assert_never(effect)

    def _send(self, effect: ef.Send) -> None:
        message: msg.Message = effect.message
        match message:
            case msg.Contribution() if message.payload:
                shard, held = message.shard, self.payload_cache.shelves[message.shard].payloads.get(message.payload)
                if held is None:
                    self.feed(ev.Failed("give", shard, None, "an own payload is gone"))
                    return
                self.traffic.sent_up(shard, held, len(effect.peers))
                topic = f"contribution {shard}"  # A later one covers an earlier one's tokens (rule T5).
                told = encode(message)
                self.store.fetch(held, lambda data: self._deliver(effect.peers, told, data, topic), lambda: None)
            case msg.Commit() if self.commit_log.is_appending(commit := msg.commit_id(message.header)):
                self.commit_log.when_durable(commit, lambda: None if self.is_closed else self._send(effect))
            case msg.Commit(header=header):
                advice = partial(self._advise_to_fetch, effect.peers, header.shard)
                parts = self.payload_cache.parts(header)
                if parts is None:
                    advice()
                    return
                (held, parts_of), told = parts, encode(message)
                self.traffic.sent_down(header.shard, held, len(effect.peers))
                self.store.fetch(
                    held, lambda data: self._deliver(effect.peers, told, join_commit(parts_of(data))), advice
                )
            case _:
                self._deliver(effect.peers, encode(message))

    def _deliver(
        self, peers: Iterable[PeerId], body: bytes, payload: Payload | None = None, topic: str | None = None
    ) -> None:
        for peer in peers:
            if not self.is_closed and not self.host.links.send(peer, body, payload, topic=topic):
                log.debug("message not sent: not connected, or too much waits", peer=peer)

    def _advise_to_fetch(self, peers: Iterable[PeerId], shard: ShardId) -> None:
        """Instead of commits that are not here."""
        head = self.machine.view.head(shard)
        assert head is not None, "what is sent of a shard follows from its head"
        self._deliver(peers, encode(msg.FetchAdvised(shard, head)))

    # -- work ----------------------------------------------------------------------------------------------------------

    def job(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        fail: Callable[[Exception], None] | None = None,
        *,
        shard: ShardId | None = None,
    ) -> None:
        """Run ``work`` on tensors after all earlier jobs (of its ``shard``, and of none), then ``then`` on the loop.

        ``fail`` gets the errors that work may end in; any other is a defect of ours and stops the node.
        """
        if self.is_closed:
            return

        def done(future: asyncio.Future[T]) -> None:
            if self.is_closed or future.cancelled():
                return
            error = future.exception()
            if error is None:
                then(future.result())
            elif fail is not None and isinstance(
                error, StaleBaseError | DigestMismatchError | SpoiltStateError | ContributionError | ValueError
            ):
                fail(error)
            else:
                self.around.crashed(error)

        self.host.work("tensors", work, shard).add_done_callback(done)

    def _failed(self, work: str, shard: ShardId, owner: PeerId | None = None) -> Callable[[Exception], None]:
        """Tell the machine. ``owner`` signed what was worked on, and answers for its digest."""

        def fail(error: Exception) -> None:
            if owner is not None and isinstance(error, DigestMismatchError):
                self.around.fault(owner, "commit", str(error))
            culprit = peer_of(error.learner) if isinstance(error, ContributionError) else None
            if culprit is not None:
                self.around.fault(culprit, "contribution", str(error))
            is_spoilt = isinstance(error, SpoiltStateError)
            if not (is_spoilt and work == "merge"):  # its contributions are as good as before
                unfit = isinstance(error, UnfitCommitError)
                self.feed(ev.Failed("values" if unfit else work, shard, culprit, str(error)))
            if isinstance(error, SpoiltStateError):
                self.spoilt(error)

        return fail

    def spoilt(self, error: SpoiltStateError) -> None:
        """Our own state is not what it should be: get it again, at the same head (else: ``fallback``)."""
        self.around.fault(self.identity.peer_id, "memory", str(error))
        self.feed(ev.Failed("state", error.shard, None, str(error)))

    def _encode(self, effect: ef.Encode) -> None:
        rung, is_coded = self.codecs.choose("up", effect.shard), self.codecs.is_coded("up", effect.shard)

        def work() -> tuple[Payload, Digest, msg.Contributor, float]:
            payload, digest = self.state.encode(effect.shard, effect.base.id, rung and rung.recipe, is_coded=is_coded)
            given = self.payload_cache.signed(effect, digest)
            return payload, digest, given, self.state.encode_error(effect.shard, payload) if rung else 0.0

        def done(result: tuple[Payload, Digest, msg.Contributor, float]) -> None:
            payload, digest, given, error = result
            self.payload_cache.shelves[effect.shard].put(digest, payload)
            if rung is not None:
                self.codecs.used("up", effect.shard, rung, len(payload), error)
            self.feed(ev.Encoded(effect.shard, effect.base.id, given, len(payload)))

        self.job(work, done, self._failed("encode", effect.shard), shard=effect.shard)

    def _merge(self, effect: ef.Merge) -> None:
        payloads = self.payload_cache.shelves[effect.shard].payloads
        given = [(c.contributor, payloads[c.payload]) for c in effect.contributions if c.payload in payloads]
        if len(given) < len(effect.contributions):
            gone = next(c for c in effect.contributions if c.payload not in payloads)
            giver = peer_of(gone.contributor.learner)
            self.feed(ev.Failed("merge", effect.shard, giver, "a contribution's payload is gone"))
            if giver == self.identity.peer_id:
                self.feed(ev.Failed("give", effect.shard, None, "an own payload is gone"))
            return
        rung, is_coded = self.codecs.choose("down", effect.shard), self.codecs.is_coded("down", effect.shard)

        def work() -> tuple[MergeResult, float]:
            read = [(contributor, held.read(self.host.disk)) for contributor, held in given]
            how = rung and rung.recipe
            version = effect.base.version + 1
            merged = self.state.merge(
                effect.shard, effect.base.id, version, read, how, effect.longest, is_coded=is_coded
            )
            return merged, self.state.merge_error(effect.shard, merged.payload) if rung else 0.0

        def done(result: tuple[MergeResult, float]) -> None:
            merged, error = result
            if rung is not None:
                self.codecs.used("down", effect.shard, rung, len(merged.payload), error)
            self.around.merged(effect.base, len(given), merged)
            self._merged(effect, merged)

        self.job(work, done, self._failed("merge", effect.shard), shard=effect.shard)

    def _merged(self, effect: ef.Merge, merged: MergeResult) -> None:
        result, shelf = digest_of(merged.digests), self.payload_cache.shelves[effect.shard]
        shelf.put(merged.payload_digest, merged.payload)
        shelf.digests[result] = merged.digests
        self.feed(ev.Merged(effect.shard, effect.base.id, merged.payload_digest, result, merged.length))

    def _apply(self, effect: ef.Apply) -> None:
        header, shelf = effect.header, self.payload_cache.shelves[effect.header.shard]
        payload, digests = shelf.payloads.get(header.payload), shelf.digests.get(header.result)
        if payload is None or digests is None:
            self.feed(ev.Failed("apply", header.shard, None, f"the payload of commit {effect.id[:8]} is gone"))
            return
        self.payload_cache.sign(effect.id, header)
        parts = self.payload_cache.parts(header) if header.owner == self.identity.peer_id else None
        if parts is not None and payload.data is not None:  # else it was appended when it was made
            self.commit_log.append_own(header, parts[1](payload.data))
        moves, disk = self.payload_cache.moves(header.shard, effect, self.host.disk), self.host.disk
        self.job(
            lambda: self._looked(
                header.shard, self.state.apply(header, effect.id, payload.read(disk), digests, moves())
            ),
            lambda shifts: self._applied_when_durable(header.shard, effect.id, shifts),
            self._failed("apply", header.shard, header.owner),
            shard=header.shard,
        )

    def _install(self, effect: ef.Install) -> None:
        head = effect.state.head
        moves = self.payload_cache.moves(head.shard, effect, self.host.disk)
        self.job(
            lambda: self._looked(head.shard, self.state.install(head.shard, head.id, moves(), effect.farthest)),
            lambda shifts: self._applied(head.shard, head.id, shifts),
            self._failed("install", head.shard),
            shard=head.shard,
        )

    def _looked(self, shard: ShardId, shifts: Shifts) -> Shifts:
        """On the shard's worker thread: the shard has another version."""
        if self.average is not None:
            piece = self.state.layout.shards[shard]
            self.average.look(shard, self.state.theta[piece.start : piece.stop])
        return shifts

    def _applied_when_durable(self, shard: ShardId, head: Digest, shifts: Shifts) -> None:
        self.around.shifts_ready(shifts)
        self.commit_log.when_durable(head, lambda: self.feed(ev.Applied(shard, head)))

    def _applied(self, shard: ShardId, head: Digest, shifts: Shifts) -> None:
        self.around.shifts_ready(shifts)
        self.feed(ev.Applied(shard, head))
