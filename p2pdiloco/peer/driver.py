"""Driver: runs one peer's state machine. Turns its effects into messages and jobs, and their results into events.

Rules of this file:
1. All events go through ``feed``, one at a time. Effects run in the order in which the machine returned them.
2. Tensor work goes to the host's ``tensors`` queue, in order (``model_state``). Received data is checked on another
   queue, so that a flood of payloads does not delay this peer's merges.
3. A message is fed to the machine only after its payload was verified (``payload_cache``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from p2pdiloco.peer.codec_selection import CodecChoice
from p2pdiloco.peer.commit_wal import CommitLog
from p2pdiloco.peer.convictions import ConvictionFile
from p2pdiloco.peer.host import Handle, Host, within
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.peer.learner_updates import Payload, Shifts
from p2pdiloco.peer.metrics import Metrics, PayloadTraffic
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
from p2pdiloco.peer.signatures import OPEN
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId, digest_of, peer_of
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import encode, join_commit

log = logs.get("protocol")
T = TypeVar("T")


EXPECTED = StaleBaseError, DigestMismatchError, SpoiltStateError, ContributionError, ValueError, MemoryError
"""Errors of tensor work after which the peer goes on."""
NO_MEMORY = "can't allocate memory"
"""How torch's RuntimeError says that the system gave none."""

# Called with each event, its effects and its time, before the effects run.
Observed = Callable[[ev.Event, list[ef.Effect], float], None]


class Defect(NamedTuple):
    """An error in this program's own code: the peer must stop."""

    error: BaseException


# Output that the driver leaves to the peer: effects for the learner, for downloads, for states on disk and for audits,
# the machine's end, shifts that the learner is to take, and defects.
Output = ef.ForLearner | ef.Fetch | ef.Restore | ef.Audit | ef.BecameCurrent | ef.Leave | Shifts | Defect

COPY_S = 60.0


class CopyError(Exception):
    """A shard cannot be copied now. The message says why."""


def topic_of(contribution: msg.Contribution) -> str:
    """Return the topic under which a contribution waits to be sent.

    A later one covers an earlier one's tokens (T5), but not those of another group, whose merge this peer passes on.
    """
    what = "contribution" if contribution.group is None else f"merge of {contribution.giver}"
    return f"{what} {contribution.shard}"


class Driver:
    """Drives one peer's machine, its model state, and its payloads. ``emit`` receives what is left to the peer.

    The parts of the peer that work beside the driver find here what they share with it.
    """

    def __init__(
        self,
        machine: Machine,
        state: ModelState,
        payload_cache: PayloadCache,
        store: PayloadStore,
        commit_log: CommitLog,
        convictions: ConvictionFile,
        codecs: CodecChoice,
        host: Host,
        metrics: Metrics,
        *,
        observed: Observed,
        emit: Callable[[Output], None],
    ) -> None:
        self.payload_cache = payload_cache
        self.store = store
        self.commit_log = commit_log
        self._convictions = convictions
        elements = [shard.elements for shard in state.layout.shards]
        self.sent_up, self.sent_down = PayloadTraffic(elements), PayloadTraffic(elements)
        self.is_closed = False
        self._machine = machine
        self.view = machine.view
        self.state = state
        self._codecs = codecs
        self.host = host
        self.metrics = metrics
        self._observed = observed
        self._emit = emit
        self._timer: Handle | None = None
        self._has_left = False
        # Peers that the log has named, because their contributions point away from most others'.
        self._dissenters: frozenset[str] = frozenset()

    def close(self) -> None:
        """Handle no more events. Running jobs end without effect."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def load_own_commits(self, heads: Sequence[msg.Head | None]) -> list[msg.CommitHeader]:
        """Return the commits of this peer's earlier lives that it may have sent and ``heads`` do not contain.
        Blocks."""
        found = []
        for header, data in self.commit_log.load(heads):
            try:
                self.payload_cache.verify_commit(memoryview(data), header, OPEN)()
            except ValueError as error:
                log.warning("cannot use a commit from before the restart", version=header.version, reason=str(error))
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
            effects = self._machine.handle(event, now)
            self._observed(event, effects, now)
            for effect in effects:
                self._execute(effect)
        except AssertionError as error:
            self._emit(Defect(error))
            return
        self._set_timer()
        if self.payload_cache.sweep(self._machine, now):
            self.save_convictions()
            self.submit(self.state.shifts.memory.release_unused, lambda _: None)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.next_deadline()
        if deadline is not None and not self.is_closed:
            self._timer = self.host.call_at(deadline, lambda: self.feed(ev.Woke()))

    def save_convictions(self) -> None:
        """Write what the machine knows against commits and owners to disk. Does not wait."""
        self._convictions.save(self.view.convictions())

    # -- effects -------------------------------------------------------------------------------------------------------

    def _execute(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self._send(effect)
            case ef.Note():
                # After it has left, this peer receives nothing more. The machine takes that for silent peers, which is
                # no news for the user.
                getattr(log, "debug" if self._has_left else effect.level)(effect.topic, reason=effect.reason)
            case ef.Encode():
                self._encode(effect)
            case ef.Merge():
                self._merge(effect)
            case ef.Apply():
                self._apply(effect)
            case ef.Install():
                self._install(effect)
            case ef.HangUp():
                self.host.links.hang_up(effect.peer, effect.reason)
            case ef.Leave():
                self._has_left = True
                self._emit(effect)
            case _:
                self._emit(effect)

    def _send(self, effect: ef.Send) -> None:
        message: msg.Message = effect.message
        match message:
            case msg.Contribution() if message.payload:
                shard, held = message.shard, self.payload_cache.shards[message.shard].payloads.get(message.payload)
                if held is None:
                    if message.group is None:
                        self.feed(ev.Failed("give", shard, None, "an own payload is gone"))
                    return
                self.sent_up.count(shard, held, len(effect.peers))
                told, topic = encode(message), topic_of(message)
                self.store.fetch(held, lambda data: self._deliver(effect.peers, told, data, topic), lambda: None)
            case msg.Commit() if self.commit_log.is_appending(commit := msg.commit_id(message.header)):
                self.commit_log.when_durable(commit, lambda: None if self.is_closed else self._send(effect))
            case msg.Commit(header=header):
                advice = partial(self._advise_to_fetch, effect.peers, header.shard)
                parts = self.payload_cache.commit_parts(header)
                if parts is None:
                    advice()
                    return
                (held, parts_of), told = parts, encode(message)
                self.sent_down.count(header.shard, held, len(effect.peers))
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
        """Tell peers to fetch the shard's state, because the commit that they need is no longer here."""
        head = self.view.head(shard)
        assert head is not None, "what is sent of a shard follows from its head"
        self._deliver(peers, encode(msg.FetchAdvised(shard, head)))

    # -- work ----------------------------------------------------------------------------------------------------------

    def round_bytes(self) -> float:
        """Return the payload bytes that a peer sends, and receives, in a round of the whole model.

        These are its contributions, and on average as much of commits; estimated from what this peer has sent so far.
        """
        up, others = self.sent_up.per_parameter(), len(self.view.live)
        per_parameter = up + (self.sent_down.per_parameter() or up)
        return self.state.layout.elements * per_parameter * others / (others + 1)

    def payload_bytes_per_s(self) -> float:
        """Return the rate of these bytes if all rounds come in time; 0 while no step time is known."""
        round_s = self._codecs.round_s()
        return self.round_bytes() / round_s if round_s > 0.0 else 0.0

    def submit(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        fail: Callable[[Exception], None] | None = None,
        *,
        shard: ShardId | None = None,
    ) -> None:
        """Run ``work`` on tensors after all earlier jobs of its ``shard`` and of no shard, then ``then`` on the event
        loop.

        ``fail`` receives the expected errors, a shortage of memory among them. Any other error is a defect and stops
        the node.
        """
        if self.is_closed:
            return

        def done(future: asyncio.Future[T]) -> None:
            if self.is_closed or future.cancelled():
                return
            error = future.exception()
            if error is None:
                then(future.result())
            elif fail is not None and isinstance(error, EXPECTED):
                fail(error)
            elif fail is not None and NO_MEMORY in str(error):
                fail(MemoryError(str(error)))
            else:
                self._emit(Defect(error))

        self.host.work("tensors", work, shard).add_done_callback(done)

    def _failure_handler(self, work: str, shard: ShardId, owner: PeerId | None = None) -> Callable[[Exception], None]:
        """Return a function that reports a failed job to the machine.

        ``owner`` signed the commit that the job applied, so a digest mismatch is the owner's fault.
        """

        def fail(error: Exception) -> None:
            if work == "install" and isinstance(error, MemoryError):
                self._emit(Defect(error))  # to fetch the state again would only load the donors
                return
            if owner is not None and isinstance(error, DigestMismatchError):
                self.metrics.report_fault(owner, "commit", str(error))
            culprit = peer_of(error.learner) if isinstance(error, ContributionError) else None
            if culprit is not None:
                self.metrics.report_fault(culprit, "contribution", str(error))
            # Contributions to a spoilt state are still good: they are merged after the repair.
            if work not in ("merge", "group") or not isinstance(error, SpoiltStateError):
                unfit = isinstance(error, UnfitCommitError)
                self.feed(ev.Failed("values" if unfit else work, shard, culprit, str(error)))
            if isinstance(error, SpoiltStateError):
                self.report_corruption(error)

        return fail

    def report_corruption(self, error: SpoiltStateError) -> None:
        """Have the machine fetch a shard again, at the same head, because its state in memory is altered."""
        self.metrics.report_fault(self.view.me, "memory", str(error))
        self.feed(ev.Failed("state", error.shard, None, str(error)))

    async def copy_shard(
        self,
        shard: ShardId,
        data: memoryview,
        then: Callable[[Digest, bytes], T],
        *,
        chunks: range | None = None,
        is_checked: bool = True,
    ) -> T:
        """Copy the shard's state into ``data`` in wire layout (only ``chunks``; default: all).

        ``then`` gets the shard's head and the digests of its chunks; its result is returned. It runs in the event-loop
        turn in which the copy arrives, so that what it reads from the machine matches the copy. ``is_checked``: chunks
        that were not verified yet are compared with their digests.

        Raises:
            CopyError: the state is not here, or altered, or the worker is busy for more than ``COPY_S``.
        """
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def take(result: tuple[Digest, bytes]) -> None:
            if not found.done():
                found.set_result(then(*result))

        def refuse(error: Exception) -> None:
            if isinstance(error, SpoiltStateError):
                self.report_corruption(error)
                copy_now()  # fails with the digest that the state has
            elif not found.done():
                found.set_exception(CopyError(str(error)))

        def copy_now() -> None:
            self.submit(lambda: self.state.copy(shard, data, chunks, is_checked=is_checked), take, refuse, shard=shard)

        copy_now()
        try:
            return await within(self.host, found, COPY_S)
        except TimeoutError:
            raise CopyError("busy") from None

    def _encode(self, effect: ef.Encode) -> None:
        rung, is_coded = self._codecs.choose("up", effect.shard), self._codecs.is_coded("up", effect.shard)

        def work() -> tuple[Payload, Digest, msg.Contributor, float]:
            payload, digest = self.state.encode(effect.shard, effect.base.id, rung and rung.recipe, is_coded=is_coded)
            given = self.payload_cache.sign_contribution(effect, digest)
            return payload, digest, given, self.state.encode_error(effect.shard, payload) if rung else 0.0

        def done(result: tuple[Payload, Digest, msg.Contributor, float]) -> None:
            payload, digest, given, error = result
            self.payload_cache.shards[effect.shard].put(digest, payload)
            if rung is not None:
                self._codecs.record("up", effect.shard, rung, len(payload), error)
            if self._codecs.judge_line(self.payload_bytes_per_s()):
                self.feed(ev.LineChanged(self._codecs.line_speed))
            self.feed(ev.Encoded(effect.shard, effect.base.id, given, len(payload)))

        self.submit(work, done, self._failure_handler("encode", effect.shard), shard=effect.shard)

    def _merge(self, effect: ef.Merge) -> None:
        payloads = self.payload_cache.shards[effect.shard].payloads
        given = [(c.contributor, payloads[c.payload]) for c in effect.contributions if c.payload in payloads]
        kind = "group" if effect.is_group else "merge"
        if len(given) < len(effect.contributions):
            gone = next(c for c in effect.contributions if c.payload not in payloads)
            giver = peer_of(gone.contributor.learner)
            self.feed(ev.Failed(kind, effect.shard, giver, "a contribution's payload is gone"))
            if giver == self.view.me:
                self.feed(ev.Failed("give", effect.shard, None, "an own payload is gone"))
            return
        rung, is_coded = self._codecs.choose("down", effect.shard), self._codecs.is_coded("down", effect.shard)

        def work() -> tuple[MergeResult, float]:
            read = [(contributor, held.read(self.host.disk)) for contributor, held in given]
            how = rung and rung.recipe
            version = effect.base.version + 1
            merged = self.state.merge(
                effect.shard,
                effect.base.id,
                version,
                read,
                how,
                effect.longest,
                is_coded=is_coded,
                is_group=effect.is_group,
                members=[len(c.contributors) for c in effect.contributions if c.group is not None],
            )
            return merged, self.state.merge_error(effect.shard, merged.payload) if rung else 0.0

        def done(result: tuple[MergeResult, float]) -> None:
            merged, error = result
            if rung is not None:
                self._codecs.record("down", effect.shard, rung, len(merged.payload), error)
            if not effect.is_group:
                learners = sum(len(contribution.contributors) for contribution in effect.contributions)
                self._note_merge(effect.base, learners, merged)
            (self._finish_group if effect.is_group else self._finish_merge)(effect, merged)

        self.submit(work, done, self._failure_handler(kind, effect.shard), shard=effect.shard)

    def _note_merge(self, base: msg.Head, contributors: int, merged: MergeResult) -> None:
        """Log how well the learners of a merge agreed."""
        cosine, shortened = merged.agreement
        self.metrics.write(
            "merge",
            shard=base.shard,
            version=base.version + 1,
            contributors=contributors,
            shortened=shortened,
            length=float(f"{merged.length:.4g}"),
            cosine=None if cosine is None else round(cosine, 4),
        )
        found = self.state.agreement.dissenters()
        for peer in sorted(found.keys() - self._dissenters):
            text = (
                f"{found[peer]} contributions of {peer} point away from most others': its "
                "data or learning rate may be wrong; they weigh less"
            )
            self.metrics.write("note", level="warning", topic="agreement", text=text)
            log.warning(text)
        self._dissenters = frozenset(found)

    def _finish_merge(self, effect: ef.Merge, merged: MergeResult) -> None:
        result, cached = digest_of(merged.digests), self.payload_cache.shards[effect.shard]
        cached.put(merged.payload_digest, merged.payload)
        cached.digests[result] = merged.digests
        self.feed(ev.Merged(effect.shard, effect.base.id, merged.payload_digest, result, merged.length, merged.factors))

    def _finish_group(self, effect: ef.Merge, merged: MergeResult) -> None:
        self.payload_cache.shards[effect.shard].put(merged.payload_digest, merged.payload)
        contributors = tuple(c.contributor for c in effect.contributions)
        digest = bytes.fromhex(merged.payload_digest)
        group = msg.GroupMerge(self.view.me, contributors, digest, merged.factors)
        signed = self.payload_cache.sign_group(effect.shard, effect.base.id, group)
        self.feed(ev.GroupMerged(effect.shard, effect.base.id, signed, len(merged.payload)))

    def _apply(self, effect: ef.Apply) -> None:
        header, cached = effect.header, self.payload_cache.shards[effect.header.shard]
        payload, digests = cached.payloads.get(header.payload), cached.digests.get(header.result)
        if payload is None or digests is None:
            self.feed(ev.Failed("apply", header.shard, None, f"the payload of commit {effect.id[:8]} is gone"))
            return
        self.payload_cache.sign_commit(effect.id, header)
        parts = self.payload_cache.commit_parts(header) if header.owner == self.view.me else None
        if parts is not None and payload.data is not None:  # a spilled payload was appended when it was made
            self.commit_log.append_own(header, parts[1](payload.data))
        moves, disk = self.payload_cache.read_moves(header.shard, effect, self.host.disk), self.host.disk
        self.submit(
            lambda: self.state.apply(header, effect.id, payload.read(disk), digests, moves()),
            lambda shifts: self._finish_apply(header.shard, effect.id, shifts),
            self._failure_handler("apply", header.shard, header.owner),
            shard=header.shard,
        )

    def _install(self, effect: ef.Install) -> None:
        head = effect.state.head
        moves = self.payload_cache.read_moves(head.shard, effect, self.host.disk)
        self.submit(
            lambda: self.state.install(head.shard, head.id, moves(), effect.farthest),
            lambda shifts: self._finish_install(head.shard, head.id, shifts),
            self._failure_handler("install", head.shard),
            shard=head.shard,
        )

    def _finish_apply(self, shard: ShardId, head: Digest, shifts: Shifts) -> None:
        self._emit(shifts)
        self.commit_log.when_durable(head, lambda: self.feed(ev.Applied(shard, head)))

    def _finish_install(self, shard: ShardId, head: Digest, shifts: Shifts) -> None:
        self._emit(shifts)
        self.feed(ev.Applied(shard, head))
