"""Peers with changed code: ours, with a method replaced for each lie that a plan names, in this process.

All else of such a peer is honest, so that it stays in the run for as long as the others let it. A lie counts as sent
once a message that bears it has left for another peer: what the liar's own code refuses harms nobody and proves
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from p2pdiloco import learner as shipped_script
from p2pdiloco.access.invite_code import decode_invite, is_invite
from p2pdiloco.access.membership_log import introduction
from p2pdiloco.codec import agreement, digests, merge, quantization
from p2pdiloco.codec.digests import list_bytes
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.net.flow_control import Granter
from p2pdiloco.peer.integrity import Integrity
from p2pdiloco.peer.model_state import ModelState
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.signatures import signed
from p2pdiloco.peer.state_server import StateServer
from p2pdiloco.protocol import aggregation, block_assignment, gathering, heartbeat, replication, waiting
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.chain import NO_MARK, record_of
from p2pdiloco.protocol.config import BATCH_ROOM, LEAST_FACTOR, RANGE_ROUNDS
from p2pdiloco.protocol.connectivity import Connectivity, listed
from p2pdiloco.protocol.contributions import Contributions, DeltaReconciliation
from p2pdiloco.protocol.counted_tokens import TokenCounts
from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.heartbeat import Heartbeats
from p2pdiloco.protocol.ids import (
    DIGEST_BYTES,
    Digest,
    FragmentId,
    LearnerId,
    PeerId,
    ShardId,
    digest_of,
    fingerprint,
    learner_id,
    peer_of,
)
from p2pdiloco.protocol.manifest import DataConfig
from p2pdiloco.protocol.messages import MAX_CLAIMS, Head, Heads, commit_id, signed_commit_bytes
from p2pdiloco.protocol.replication import LogRequests
from p2pdiloco.protocol.state import Core
from p2pdiloco.swarm.credentials import credentials_from_invite
from p2pdiloco.swarm.membership_sync import MembershipSync
from p2pdiloco.training import models, optimizers
from p2pdiloco.training.corpus import Batches, load_corpus
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Transport
from p2pdiloco.wire.control_messages import (
    CommitParts,
    GetChunk,
    GetState,
    SignedCommit,
    StateOffer,
    StateProof,
    decode_as,
    decode_message,
    encode,
    join_commit,
)
from p2pdiloco.wire.request_reply import RequestError, RequestRefused

LARGE = 1e34
TINY = 1e-40
SHORT = 1e-3
MANY_TOKENS = 2**50
LATE_STEP = 2**55
FAR_VERSIONS, HEAVIER = 1000, 2**40
HEAVY = 1e12
NOISE_TIMES = 30.0
NOISE_SHARE = 0.5
LONG = 1.5
"""Length of a lie that hides, in lengths of what the learner has found: as much as counts in a merge."""
HIDDEN_SHARE = 0.5
"""Share of an honest direction in a lie that hides."""
STALE_VERSIONS = 10
ROUNDS_S, FLOOD_S, RECONNECT_S = 0.05, 0.02, 12.0
FLOOD_MESSAGES = 100
"""Messages of one kind to each peer, every ``FLOOD_S``."""
FORGED_STEPS = 6
NOTHING = digest_of(b"nothing")
NO_TIME_S = 1e-9
CROWD = 8
OVERWRITTEN, OVERWRITING = 17, 3.0
"""The first parameters of a chunk, one of so many, and their new value."""
SINK = 200
SLANDER_S, STALL_S = 5.0, 50.0
LATE_SHARE = 0.9
"""Share of the takeover time that an owner lets pass."""
ORPHANS = 24
"""Commits without a parent for each shard, sent to each peer."""

SLEEP_SHARE, PARTING_SHARE = 0.92, 0.95
"""Share of the budget after which members that share a plan strike."""
HONEST_PART, UPHILL_PART = 0.5, 0.9
KNOWN_SAMPLES = 32


class Lie(NamedTuple):
    """A change of this process's code."""

    begin: Callable[[], None]
    is_in: Callable[[msg.Message], bool]
    """Whether a message bears it."""


class _Node:
    """The parts of this process's peer that a lie needs beyond the method that it replaces, once they are there."""

    core: Core
    transport: Transport
    cache: PayloadCache
    merged: set[Digest]
    """Payloads of commits whose values are not the merge."""
    reconnects: int
    states: StateServer
    puppet: Identity
    """A second key of this member, which is connected to nobody."""
    has_puppet: bool
    is_sink: bool
    late: int
    """Merges that it held back."""
    kept: int
    """Commits that it did not pass on."""
    taught: Path
    """A file that the learner makes when it has trained on what a lie made of its data."""
    cabal: Path
    """A file with the ids of all peers that tell the lie ``cabal``."""


_node = _Node()
_node.merged, _node.reconnects, _node.late, _node.kept = set(), 0, 0, 0
_node.puppet, _node.has_puppet, _node.is_sink = Identity.ephemeral(), False, False


def tell(names: Sequence[str], sent: Path) -> None:
    """From now on. The name of each lie is added to the file ``sent`` when it has left for another peer first.

    Raises:
        KeyError: there is no such lie.
    """
    _remember(PayloadCache, "cache")
    _node.taught, _node.cabal = sent.with_suffix(".taught"), sent.parents[1] / "cabal.txt"
    for name in names:
        LIES[name].begin()
    waiting = set(names)
    sound = Transport.send

    def send(self: Transport, peer: Any, body: bytes, *rest: Any, **options: Any) -> bool:
        is_sent = sound(self, peer, body, *rest, **options)
        if is_sent and (waiting or not hasattr(_node, "transport")):
            message = decode_message(body)
            if isinstance(message, msg.Heartbeat):  # a process has other transports, which take no part in the run
                _node.transport = self
            if self is not getattr(_node, "transport", None):
                return is_sent
            for name in [name for name in waiting if LIES[name].is_in(message)]:
                waiting.remove(name)
                with open(sent, "a") as file:
                    file.write(f"{name}\n")
        return is_sent

    _put(Transport, "send", send)


def _remember(kind: Any, name: str) -> None:
    """Keep the part of the peer that is of this class."""
    sound = kind.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        sound(self, *arguments, **options)
        setattr(_node, name, self)

    _put(kind, "__init__", init)


def _labels() -> None:
    """Its learner, which is a fork of this process, trains to predict symbols from anywhere in the batch."""
    sound, taught = optimizers.inner_step, _node.taught

    def inner_step(model: Any, stepped: Any, inner: Any, batch: torch.Tensor, *rest: Any) -> float:
        drawn = batch.flatten()[torch.randperm(batch.numel())].view_as(batch)
        taught.touch()
        return sound(model, stepped, inner, drawn, *rest)

    _put(shipped_script, "inner_step", inner_step)


def _values() -> None:
    """As an owner it merges what nobody gave, says that it is short, and goes on from it."""
    sound = merge.encode

    def encode(how: quantization.Recipe, merged: torch.Tensor, _: float, room: int) -> tuple[Bodies, float]:
        bodies, _length = sound(how, merged.fill_(LARGE), math.inf, room)
        return bodies, SHORT

    _put(merge, "encode", encode)


def _merges() -> None:
    """As an owner it adds noise to each merge, half as long as what was given: within all bounds."""
    sound = merge.encode

    def encode(how: quantization.Recipe, merged: torch.Tensor, longest: float, room: int) -> tuple[Bodies, float]:
        drawn = torch.randn_like(merged)
        merged += drawn.mul_(NOISE_SHARE * float(merged.norm()) / float(drawn.norm()))
        bodies, length = sound(how, merged, longest, room)
        wrong_lengths.add(length)
        return bodies, length

    _put(merge, "encode", encode)


wrong_lengths: set[float] = set()
"""Lengths of the wrong merges of this process."""


def _tokens() -> None:
    """What its learner gives is said to be of as many steps and tokens as honest peers believe."""
    sound = Contributions.on_snapshot

    def snapshotted(self: Contributions, event: Any) -> None:
        many = replace(event, steps=event.steps * RANGE_ROUNDS, tokens=event.tokens * RANGE_ROUNDS * BATCH_ROOM)
        sound(self, many)

    _put(Contributions, "on_snapshot", snapshotted)


def _is_many_tokens(message: msg.Message) -> bool:
    """Whether a contribution declares as many steps as the lie does at least."""
    return isinstance(message, msg.Contribution) and message.contributor.steps >= RANGE_ROUNDS


def _others() -> None:
    """Its commits name a learner of the first contributor's peer with 2^50 tokens."""
    sound = aggregation.Aggregation.commit

    def commit(self: aggregation.Aggregation, event: Any) -> Any:
        header = sound(self, event)
        if header is None:
            return None
        first = header.contributors[0]
        return replace(header, contributors=(replace(first, tokens_to=first.tokens_from + MANY_TOKENS),))

    _put(aggregation.Aggregation, "commit", commit)


def _steps() -> None:
    """With each heartbeat all are told that the run is at step 2^55."""
    _tell_all(lambda _: Heads((), LATE_STEP))


def _heads() -> None:
    """With each heartbeat all are told of heads that are 1,000 versions ahead."""

    def ahead(self: heartbeat.Heartbeats) -> Heads:
        known = (self.core.head(chain.shard) for chain in self.core.chains if chain.head is not None)
        heads = (Head(h.shard, h.version + FAR_VERSIONS, Digest(h.id[::-1]), h.tokens + HEAVIER) for h in known)
        return Heads(tuple(heads), self.core.step)

    _tell_all(ahead)


def _tell_all(message: Callable[[heartbeat.Heartbeats], msg.Message]) -> None:
    sound = heartbeat.Heartbeats.send_heartbeats

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        known = list(views)
        sound(self, known)
        self.core.send(tuple(view.peer for view in known), message(self))

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)


def _blocks() -> None:
    """It claims as many blocks of data as a message holds."""
    _put(block_assignment.BlockAssignment, "claims", lambda self: tuple(range(MAX_CLAIMS)))


def _weight() -> None:
    """It asks to own all that there is, and never merges."""
    _heavy()
    _idle()


def _heavy() -> None:
    """It asks to own all that there is. The others let it own twice as much as one of them."""
    sound = heartbeat.Heartbeats.send_heartbeats

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        honest = self.core.config
        self.core.config = replace(honest, weight=HEAVY)
        sound(self, views)
        self.core.config = honest

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)


def _x10() -> None:
    """Contribute gradients ten times as long as those that the learner found."""
    _give(lambda found: found * 10.0)


def _x1000() -> None:
    """Contribute gradients a thousand times as long as those that the learner found."""
    _give(lambda found: found * 1000.0)


def _random() -> None:
    """What its learner gives has a random direction, and the length of what it has found."""
    _give(lambda found: _as_long(torch.randn_like(found), found))


def _drift() -> None:
    """What its learner gives has always the same direction, and the length of what it has found."""
    _give(lambda found: _as_long(torch.ones_like(found), found))


def _hidden() -> None:
    """What its learner gives has always the same direction, and hides behind what it has found."""

    def hide(found: torch.Tensor) -> torch.Tensor:
        unit = found / found.norm().clamp(min=1e-30)
        away = torch.ones_like(found)
        away -= unit * float(away @ unit)
        across = math.sqrt(1.0 - HIDDEN_SHARE**2)
        return _as_long(HIDDEN_SHARE * unit + across * away / away.norm().clamp(min=1e-30), found) * LONG

    _give(hide)


def _as_long(values: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    found_length, length = float(found.norm()), float(values.norm())
    return values.mul_(found_length / length) if length else values


def _replay() -> None:
    """What its learner gives for a shard is always what it gave first."""
    _give_earlier(lambda past: past[0])


def _stale() -> None:
    """What its learner gives for a shard is what it found ten versions ago."""
    _give_earlier(lambda past: past[-1 - STALE_VERSIONS] if len(past) > STALE_VERSIONS else past[0])


def _give_earlier(choose: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    """Outer gradients are chosen of all that the learner has found for a shard. Shards are told apart by their
    sizes and places, which follow one another in each round."""
    past: dict[int, list[torch.Tensor]] = {}
    sound = ModelState.encode

    def encode_shard(self: ModelState, shard: ShardId, *rest: Any, **options: Any) -> Any:
        _shard.number = shard
        return sound(self, shard, *rest, **options)

    def earlier(found: torch.Tensor) -> torch.Tensor:
        known = past.setdefault(_shard.number, [])
        known.append(found.clone())
        return choose(known)

    _put(ModelState, "encode", encode_shard)
    _give(earlier)


_shard = threading.local()
"""The shard that this thread encodes."""


def _loss() -> None:
    """With each heartbeat all are told that it has measured a held-out loss of zero."""

    def perfect(self: heartbeat.Heartbeats) -> msg.Message:
        head = self.core.chains[0].head
        return msg.Evaluation(head.version if head else 0, head.tokens if head else 0, self.core.step, 0.0)

    _tell_all(perfect)


def _rounds() -> None:
    """Twenty times a second all are told of a round that is two rounds ahead."""
    fragments = count()

    def ahead() -> Iterator[msg.Message]:
        core, fragment = _node.core, FragmentId(next(fragments) % len(_node.core.config.fragments))
        if core.is_current:
            heads = tuple(core.head(shard) for shard in core.config.fragments[fragment])
            yield msg.Round(fragment, core.step + 2 * core.config.sync_every, heads)

    _repeat(ROUNDS_S, ahead)


def _flood() -> None:
    """All are sent requests, rounds that are long over, and refusals, thousands a second of each."""

    def flood() -> Iterator[msg.Message]:
        core = _node.core
        if core.is_current:
            head = core.head(ShardId(0))
            for _ in range(FLOOD_MESSAGES):
                yield msg.HeadsRequest()
                yield msg.Round(FragmentId(0), 0, ())
                yield msg.Refused(ShardId(0), head.id, FLOODED, head)

    _repeat(FLOOD_S, flood)


FLOODED = "no"


def _repeat(interval_s: float, messages: Callable[[], Iterator[msg.Message]]) -> None:
    """All connected peers are sent ``messages`` every so often, from the first heartbeat on."""

    def send() -> None:
        asyncio.get_running_loop().call_later(interval_s, send)
        for message in messages():
            for peer in _node.transport.peers():
                _node.transport.send(peer, encode(message))

    _at_first_beat(send)


def _at_first_beat(begin: Callable[[], None]) -> None:
    sound, waiting = heartbeat.Heartbeats.send_heartbeats, [begin]

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        sound(self, views)
        _node.core = self.core
        if waiting and hasattr(_node, "transport"):
            asyncio.get_running_loop().call_soon(waiting.pop())

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)


def _reconnect() -> None:
    """It ends its connections every 12 seconds, and connects again."""

    def part() -> None:
        asyncio.get_running_loop().call_later(RECONNECT_S, part)
        for peer in _node.transport.peers():
            _node.transport.hang_up(peer, "it reconnects")
            _node.reconnects += 1

    _at_first_beat(part)


def _idle() -> None:
    """As an owner it never merges."""
    _put(aggregation.Aggregation, "merge_if_due", lambda self, shard: None)


def _reversed() -> None:
    """As an owner it merges the opposite of what was given, as long as it may be."""
    _merge_values(torch.neg)


def _static() -> None:
    """As an owner it merges noise that is as long as it may be."""
    _merge_values(torch.randn_like)


def _merge_values(values: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As an owner it merges ``values`` of the merge, float32 [elements], of the longest length that others take."""
    sound = merge.encode

    def encode_merge(how: quantization.Recipe, merged: torch.Tensor, longest: float, room: int) -> tuple[Bodies, float]:
        if math.isfinite(longest) and merged.norm():
            changed = values(merged)
            merged.copy_(changed * (merge.SHORTENED * longest / changed.norm()))
        return sound(how, merged, longest, room)

    _put(merge, "encode", encode_merge)
    _mark_merges()


def _first() -> None:
    """As an owner it merges only the first contribution, and names all."""
    sound = merge.merge

    def merge_first(rule: Any, gradients: Any, weights: Any, steps: Any, round_steps: int, out: Any, *_: Any) -> Any:
        return sound(rule, gradients[:1], weights[:1], steps[:1], round_steps, out)

    _put(merge, "merge", merge_first)
    _mark_merges()


def _mark_merges() -> None:
    """Remember the payloads of what it merges."""
    sound = ModelState.merge

    def remember(self: ModelState, *arguments: Any, **options: Any) -> Any:
        result = sound(self, *arguments, **options)
        _node.merged.add(result.payload_digest)
        return result

    _put(ModelState, "merge", remember)


def _states() -> None:
    """With each heartbeat all are told of heavier heads, 1,000 versions ahead. Their states are zeros that it has
    signed, and no commit leads to them."""
    _forge(lambda core, shard: (Head(shard, core.head(shard).version + FAR_VERSIONS - 1, NOTHING, HEAVIER), ()))


def _grafts() -> None:
    """With each heartbeat all are told of heavier heads, one version ahead. Their states are zeros that it has signed,
    and the chains of the others lead to them."""

    def on_chain(core: Core, shard: ShardId) -> tuple[Head, tuple[SignedCommit, ...]]:
        head = core.head(shard)
        return head, _node.cache.lineage(shard, (*core.chains[shard].ancestry, head.id))

    _forge(on_chain)


def _forks() -> None:
    """With each heartbeat all are told of heavier heads, one version ahead. Their states are zeros that it has signed,
    and the last two commits before them are its own: they leave the chains of the others a version before their heads.
    """

    def beside(core: Core, shard: ShardId) -> tuple[Head, tuple[SignedCommit, ...]]:
        chain = core.chains[shard]
        lineage = _node.cache.lineage(shard, chain.ancestry)
        before = lineage[-1].header if lineage else None
        if before is None:
            return core.head(shard), ()
        own = _own_commit(core, Head(shard, before.version, commit_id(before), before.tokens), before.counts)
        header = own.header
        return Head(shard, header.version, commit_id(header), header.tokens), (*lineage, own)

    _forge(beside)


Origin = Callable[[Core, ShardId], tuple[Head, tuple[SignedCommit, ...]]]
_forged: dict[ShardId, tuple[StateOffer, memoryview]] = {}


def _forge(origin: Origin) -> None:
    """Offer states of zeros. ``origin`` gives a state's parent, and the commits that led there."""

    def heads(self: heartbeat.Heartbeats) -> Heads:
        for chain in self.core.chains:
            if chain.head is not None and chain.head.version:
                _forged[chain.shard] = _offer(self.core, chain.shard, *origin(self.core, chain.shard))
        return Heads(tuple(offer.proof.state.head for offer, _ in _forged.values()), self.core.step)

    offer_state, chunk_of, answer = StateServer.offer, StateServer.chunk, LogRequests.on_request

    async def offer(self: StateServer, shard: ShardId) -> StateOffer:
        return _forged[shard][0] if shard in _forged else await offer_state(self, shard)

    async def chunk(self: StateServer, shard: ShardId, head: Digest, number: int) -> memoryview:
        if shard not in _forged or (forged := _forged[shard])[0].proof.state.head.id != head:
            return await chunk_of(self, shard, head, number)
        size = self._form.chunk_bytes
        return forged[1][size * number : size * (number + 1)]

    def advise(self: LogRequests, peer: Any, request: msg.CommitsRequest) -> None:
        if request.shard in _forged:
            self.core.send((peer,), msg.FetchAdvised(request.shard, _forged[request.shard][0].proof.state.head))
        else:
            answer(self, peer, request)

    _remember(StateServer, "states")
    _tell_all(heads)
    _put(StateServer, "offer", offer)
    _put(StateServer, "chunk", chunk)
    _put(LogRequests, "on_request", advise)


def _offer(
    core: Core, shard: ShardId, parent: Head, lineage: tuple[SignedCommit, ...]
) -> tuple[StateOffer, memoryview]:
    """An offer of zeros as the state of a shard that follows ``parent``, and the zeros."""
    state, states = core.chains[shard].state(), _node.states
    zeros = memoryview(bytes(states._form.width * states._layout.shards[shard].elements))
    listed = states._form.listed(zeros)
    counts = lineage[-1].header.counts if lineage else state.counts
    own = _own_commit(core, parent, counts, digest_of(listed))
    header = own.header
    head = Head(shard, header.version, commit_id(header), header.tokens)
    proven = ShardState(head, state.step, state.marks, state.trained, state.norm_bound, header.counts)
    return StateOffer(StateProof(proven, header, own.signature), listed, lineage), zeros


def _own_commit(core: Core, parent: Head, counts: TokenCounts, result: Digest = NOTHING) -> SignedCommit:
    """A commit that follows ``parent``. Its only contributor, a learner of its own, is said to have trained as much as
    is believed."""
    chain, identity, run = core.chains[parent.shard], _node.cache._identity, core.config.run
    state, tokens = chain.state(), chain.limits.most_tokens(FORGED_STEPS)
    mine = msg.Contributor(learner_id(identity.peer_id, "forged"), 0, tokens, 0, FORGED_STEPS)
    given = (signed(identity, run, parent.shard, parent.id, mine, NOTHING),)
    added, after = counts.count(parent.version + 1, {PeerId(identity.peer_id): tokens}, first=1)
    header = msg.CommitHeader(
        shard=parent.shard,
        version=parent.version + 1,
        parent=parent.id,
        step=state.step,
        owner=identity.peer_id,
        contributors=given,
        tokens=parent.tokens + added,
        payload=NOTHING,
        result=result,
        record=record_of(dict(state.marks), state.trained, state.norm_bound),
        counts=after,
    )
    return SignedCommit(header, identity.sign(signed_commit_bytes(commit_id(header))))


def _hurry() -> None:
    """Each of its steps is a contribution: it opens rounds that nobody has announced."""
    sound = Contributions.on_steps

    def on_steps(self: Contributions, learner: Any, steps: int) -> None:
        sound(self, learner, steps)
        for fragment, shards in enumerate(self.core.config.fragments if self.core.is_current else ()):
            sync_round = self.rounds[fragment]
            for shard in shards:
                if shard not in sync_round.open:
                    self._open_shard(sync_round, shard)
            self._ask_for_snapshot(FragmentId(fragment))

    _put(Contributions, "on_steps", on_steps)
    _at_first_beat(lambda: None)
    _put(Contributions, "_give_nothing", lambda self, shard: None)


def _fast() -> None:
    """It says that its steps take no time, so that nobody waits for others' contributions."""
    sound = heartbeat.Heartbeats.send_heartbeats

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        learner = self.core.learner
        if learner is None:
            sound(self, views)
            return
        honest = learner.step_time_s
        learner.step_time_s = NO_TIME_S
        sound(self, views)
        learner.step_time_s = honest

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)


def _selfish() -> None:
    """As an owner it merges its own contribution alone, with that of its puppet if it has one, as soon as it is there.
    The merge is right: audits find nothing."""
    sound, view = aggregation.Aggregation.merge_if_due, aggregation.Aggregation._view

    def merge_own(self: aggregation.Aggregation, shard: ShardId) -> None:
        given = self.collections[shard].given
        mine = next((c for c in given.values() if peer_of(c.contributor.learner) == self.core.config.peer), None)
        if mine is None:
            return
        for learner in [x for x, c in given.items() if c is not mine and peer_of(x) != _node.puppet.peer_id]:
            del given[learner]
        if _node.has_puppet:
            theirs = _puppet_gives(self.core, mine)
            given[theirs.contributor.learner] = theirs
        sound(self, shard)

    def alone(self: aggregation.Aggregation, *arguments: Any) -> waiting.QuorumView:
        return view(self, *arguments)._replace(missing={})

    _put(aggregation.Aggregation, "merge_if_due", merge_own)
    _put(aggregation.Aggregation, "_view", alone)


def _cabal() -> None:
    """As an owner that has all contributions of the cabal and one of another peer, it drops the rest and merges at
    once. The merge is right: audits find nothing. Until then it waits as others do, so that it stays an owner."""
    sound, view = aggregation.Aggregation.merge_if_due, aggregation.Aggregation._view

    def meet() -> None:
        with open(_node.cabal, "a") as file:
            file.write(f"{_node.cache._identity.peer_id}\n")

    def honest_if_complete(collection: gathering.Collection) -> list[LearnerId]:
        cabal, givers = _cabal_ids(), {peer_of(learner) for learner in collection.given}
        return [x for x in collection.given if peer_of(x) not in cabal] if cabal <= givers else []

    def merge_cabal(self: aggregation.Aggregation, shard: ShardId) -> None:
        collection = self.collections[shard]
        if not collection.is_closed:
            for learner in honest_if_complete(collection)[1:]:
                del collection.given[learner]
        sound(self, shard)

    def hurried(
        self: aggregation.Aggregation, shard: ShardId, collection: gathering.Collection, quorum: int
    ) -> waiting.QuorumView:
        found = view(self, shard, collection, quorum)
        return found._replace(missing={}) if honest_if_complete(collection) else found

    _at_first_beat(meet)
    _put(aggregation.Aggregation, "merge_if_due", merge_cabal)
    _put(aggregation.Aggregation, "_view", hurried)


def _cabal_ids() -> set[str]:
    return set(_node.cabal.read_text().split()) if _node.cabal.exists() else set()


def _is_of_cabal(header: msg.CommitHeader) -> bool:
    """Whether a commit has all contributions of the cabal and one more."""
    givers, cabal = {peer_of(c.learner) for c in header.contributors}, _cabal_ids()
    return cabal <= givers and len(givers) == len(cabal) + 1


def _crowd() -> None:
    """As an owner it names all contributions, and more of its own: eight keys that are connected to nobody have given
    the same as its learner. The merge is right."""
    keys, sound = [Identity.ephemeral() for _ in range(CROWD)], aggregation.Aggregation.merge_if_due
    _crowd_ids.update(key.peer_id for key in keys)
    _introduce(keys)

    def merge_crowd(self: aggregation.Aggregation, shard: ShardId) -> None:
        given = self.collections[shard].given
        mine = next((c for c in given.values() if peer_of(c.contributor.learner) == self.core.config.peer), None)
        if mine is None:
            return
        for key in keys:
            theirs = _puppet_gives(self.core, mine, key)
            given[theirs.contributor.learner] = theirs
        sound(self, shard)

    def judge(self: agreement.AgreementHistory, peers: Sequence[str], *_: Any, **__: Any) -> agreement.Judgement:
        own = {_node.cache._identity.peer_id, *_crowd_ids}
        return agreement.Judgement([100 if peer in own else LEAST_FACTOR for peer in peers], [])

    _put(aggregation.Aggregation, "merge_if_due", merge_crowd)
    _put(agreement.AgreementHistory, "judge", judge)


_crowd_ids: set[str] = set()


def _puppet_gives(core: Core, mine: msg.Contribution, key: Identity | None = None) -> msg.Contribution:
    """The same contribution in the name of another key, which is connected to nobody."""
    key = key or _node.puppet
    learner = learner_id(key.peer_id, "1")
    mark = core.chains[mine.shard].marks.get(learner, NO_MARK)
    own = mine.contributor
    theirs = replace(
        own,
        learner=learner,
        tokens_from=mark.tokens,
        tokens_to=mark.tokens + own.tokens,
        steps_from=mark.steps,
        steps_to=mark.steps + own.steps,
        blocks=(),
    )
    return replace(mine, contributor=signed(key, core.config.run, mine.shard, mine.base.id, theirs, mine.payload))


def _introduce(keys: Sequence[Identity]) -> None:
    """It certifies further keys with its invite, and tells everybody of them. In an open run they need nothing."""
    sound = MembershipSync.keep

    async def keep(self: MembershipSync) -> None:
        invite = next(filter(is_invite, sys.argv), None)
        if invite is not None:
            chains = [(key.peer_id, credentials_from_invite(decode_invite(invite), key).chain) for key in keys]
            told = [introduction(self.members.examine(peer, chain, time.time())) for peer, chain in chains]
            for statement in told:
                self.members.learn(statement)
            self._spread_and_part(told)
        await sound(self)

    _put(MembershipSync, "keep", keep)


def _puppet() -> None:
    """A selfish owner that names a second key of its own beside itself."""
    _node.has_puppet = True
    _introduce([_node.puppet])
    _selfish()


def _hub() -> None:
    """It says that it hears a peer that nobody else hears, so that it is the best connected owner."""
    sound = Connectivity.update_own_list

    def update(self: Connectivity, live: Any, sequence: int) -> None:
        sound(self, live, sequence)
        known = self.lists[self.me] | {fingerprint(_node.puppet.peer_id)}
        self.lists[self.me], self._own_list = known, listed(known)

    _put(Connectivity, "update_own_list", update)


def _slander() -> None:
    """All are told of wrong merges that it made up, so that they are busy with them."""

    def accuse() -> Iterator[msg.Message]:
        core = _node.core
        if core.is_current:
            head = core.head(ShardId(0))
            own = _own_commit(core, head, core.chains[0].counts, digest_of(str(next(numbers)).encode()))
            yield msg.WrongMerge(own.header, own.signature)

    numbers, sound = count(), StateServer.payload

    async def payload(self: StateServer, shard: ShardId, commit: Digest, wanted: Digest) -> Any:
        if wanted == NOTHING:
            await asyncio.sleep(STALL_S)
        return await sound(self, shard, commit, wanted)

    _put(StateServer, "payload", payload)
    _repeat(SLANDER_S, accuse)


def _stall() -> None:
    """It does not answer auditors."""

    async def payload(self: StateServer, *_: Any) -> Any:
        await asyncio.sleep(STALL_S)
        raise RequestRefused("later")

    _put(StateServer, "payload", payload)


def _late() -> None:
    """It asks to own all that there is, and merges just before the next owner would."""
    sound = aggregation.Aggregation.merge_if_due

    def late(self: aggregation.Aggregation, shard: ShardId) -> None:
        collection, core = self.collections[shard], self.core
        if collection.opened_at is not None and not collection.is_closed:
            due = collection.opened_at + LATE_SHARE * self.waits().takeover_s
            if core.now < due:
                core.alarms.set(("close", shard), due)
                return
            _node.late += 1
        sound(self, shard)

    _put(aggregation.Aggregation, "merge_if_due", late)
    _heavy()


def _keeps() -> None:
    """It passes no commits of others on, and tells nobody of them."""

    def keep(*_: Any) -> None:
        _node.kept += 1

    _put(replication, "relay_commit", keep)


def _patchy() -> None:
    """In three of four shards its learner gives always the same direction, in the others what it has found."""
    sound = ModelState.encode

    def encode_shard(self: ModelState, shard: ShardId, *rest: Any, **options: Any) -> Any:
        _shard.number = shard
        return sound(self, shard, *rest, **options)

    _put(ModelState, "encode", encode_shard)
    _give(lambda found: _as_long(torch.ones_like(found), found) * LONG if _shard.number % 4 else found)


def _orphans() -> None:
    """All are sent commits of versions that are far ahead, whose parents nobody has."""
    sent = set[tuple[Any, int]]()

    def strew() -> None:
        asyncio.get_running_loop().call_later(1.0, strew)
        core, transport = _node.core, _node.transport
        if not core.is_current:
            return
        for peer in transport.peers():
            for number in range(ORPHANS * len(core.chains)):
                if (peer, number) in sent or len(sent) % 500 == 499:
                    continue
                sent.add((peer, number))
                shard = ShardId(number % len(core.chains))
                parent = Head(shard, FAR_VERSIONS + number, digest_of(f"{number}".encode()), 0)
                own = _own_commit(core, parent, core.chains[shard].counts, digest_of(_no_digests(core, shard)))
                data = CommitParts(own.signature, _no_digests(core, shard), b"nothing")
                transport.send(peer, encode(msg.Commit(own.header)), join_commit(data))

    _at_first_beat(strew)


def _overwrites() -> None:
    """Its merges are right, but of a chunk that others may not check it signs the digest of values of its own. They
    take their memory for faulty, and fetch that chunk from it."""
    merge_shard, digests_after, applied = ModelState.merge, ModelState._next_digests, ModelState.apply

    def merged(self: ModelState, shard: ShardId, base: Digest, version: int, *rest: Any, **options: Any) -> Any:
        _shard.version, _shard.number = version, shard
        return merge_shard(self, shard, base, version, *rest, **options)

    def unchecked(self: ModelState, shard: ShardId, version: int) -> int | None:
        chunks = len(self._chunks(shard))
        return version % chunks if chunks > 1 else None  # which of them others check is not known

    def listed_after(self: ModelState, shard: ShardId, bodies: Any, factors: Any) -> bytes:
        found, chunk = bytearray(digests_after(self, shard, bodies, factors)), unchecked(self, shard, _shard.version)
        if chunk is not None:
            theta, momentum = self._next_chunk(bodies[chunk], self._chunks(shard)[chunk], factors)
            theta = theta.clone()
            theta[: theta.numel() // OVERWRITTEN] = OVERWRITING
            found[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)] = digests.chunk_digest(theta, momentum)
        return bytes(found)

    def apply(self: ModelState, header: msg.CommitHeader, *rest: Any) -> Any:
        shifts, chunk = applied(self, header, *rest), unchecked(self, header.shard, header.version)
        if header.owner == _node.cache._identity.peer_id and chunk is not None:
            theta = self.theta[self._chunks(header.shard)[chunk]]
            theta[: theta.numel() // OVERWRITTEN] = OVERWRITING
            _node.merged.add(header.payload)
        return shifts

    _put(ModelState, "merge", merged)
    _put(ModelState, "_next_digests", listed_after)
    _put(ModelState, "apply", apply)
    _put(Integrity, "verify", lambda self, *_: None)


def _lingers() -> None:
    """It says for ever that it is leaving and still has something to give, and gives nothing."""
    sound = heartbeat.Heartbeats.send_heartbeats

    def greet(self: heartbeat.Heartbeats, views: Any) -> None:
        honest = self.core.departure
        self.core.departure = honest or "leaving"
        sound(self, views)
        self.core.departure = honest

    _put(heartbeat.Heartbeats, "send_heartbeats", greet)
    _put(Contributions, "_contribute", lambda self, *_: None)


def _sink() -> None:
    """It asks all others for much of their states, and takes nothing of it."""
    sound = Granter.top_up
    asked = set[Any]()

    async def ask(peer: Any) -> None:
        transport, head = _node.transport, _node.core.head(ShardId(0))
        with contextlib.suppress(RequestError):
            body = (await transport.request(peer, encode(GetState(head.shard)), timeout_s=20.0)).body
            wanted = encode(GetChunk(head.shard, decode_as(body, StateOffer).proof.state.head.id, 0))
            _node.is_sink = True
            most = 8 * _node.core.config.sizes.elements[0]
            asking = [transport.request(peer, wanted, timeout_s=600.0, max_payload=most) for _ in range(SINK)]
            await asyncio.gather(*asking, return_exceptions=True)

    def begin() -> None:
        asyncio.get_running_loop().call_later(1.0, begin)
        for peer in _node.transport.peers() if _node.core.is_current else ():
            if peer not in asked:
                asked.add(peer)
                tasks.append(asyncio.ensure_future(ask(peer)))

    tasks: list[Any] = []
    _at_first_beat(begin)
    _put(Granter, "top_up", lambda self, account: False if _node.is_sink else sound(self, account))


def _no_digests(core: Core, shard: ShardId) -> bytes:
    return bytes(list_bytes(core.config.sizes.elements[shard]))


def _is_forged(message: msg.Message) -> bool:
    """Whether it tells of a head whose state is forged."""
    known = {offer.proof.state.head.id for offer, _ in _forged.values()}
    return isinstance(message, Heads | msg.FetchAdvised) and any(
        head.id in known for head in (message.heads if isinstance(message, Heads) else (message.head,))
    )


def _tiny() -> None:
    """What its learner gives is one value of 1e-40."""

    def tiny(found: torch.Tensor) -> torch.Tensor:
        values = torch.zeros_like(found)
        values[0] = TINY
        return values

    _give(tiny, quantization.recipe("bf16"))


def _flip() -> None:
    """What its learner gives is the opposite of what it has found."""
    _give(torch.neg)


def _noise() -> None:
    """What its learner gives is noise, 30 times as long as what it has found."""

    def noise(found: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn_like(found)
        return drawn.mul_(NOISE_TIMES * float(found.norm()) / float(drawn.norm()))

    _give(noise)


_given: list[Callable[[torch.Tensor], torch.Tensor]] = []


def _give(values: Callable[[torch.Tensor], torch.Tensor], how: quantization.Recipe | None = None) -> None:
    """Outer gradients are ``values`` of what the learner has found, float32 [elements], after what earlier lies made of
    it. It begins anew from each version, since what it gave is not what it has."""
    _given.append(values)
    sound, moves = quantization.encode_vector, DeltaReconciliation.moves

    def encode_vector(
        honest: quantization.Recipe, x: torch.Tensor, less: torch.Tensor | None = None, room: int = 0
    ) -> Bodies:
        if less is None or not (found := x - less).isfinite().all():
            return sound(honest, x, less, room)
        for change in _given:
            found = change(found)
        return sound(how or honest, found, room=room)

    def reset(self: DeltaReconciliation, *arguments: Any) -> Any:
        learner, *_ = moves(self, *arguments)
        return learner, (), (), True

    if len(_given) == 1:
        _put(quantization, "encode_vector", encode_vector)
        _put(DeltaReconciliation, "moves", reset)


def _is_given(message: msg.Message) -> bool:
    """Whether it is a contribution of values."""
    return isinstance(message, msg.Contribution) and bool(message.payload)


# -- Lies of members that share a plan ---------------------------------------------------------------------------------


def _join_plan() -> None:
    """Let the others of the plan know this peer."""
    sound = Core.__init__

    def init(self: Core, config: Any) -> None:
        sound(self, config)
        _node.core = self
        with open(_plan(), "a") as file:
            file.write(f"{config.peer}\n")

    _put(Core, "__init__", init)


def _plan() -> Path:
    return _node.cabal.with_name("plan.txt")


def _colluders() -> frozenset[str]:
    return frozenset(_plan().read_text().split())


def _faces() -> None:
    """Each peer is told that this one hears it, and else only those of the plan: as if it alone were heard by all."""

    def heard_by(beat: msg.Heartbeat, to: PeerId) -> msg.Heartbeat:
        of_plan = _colluders() - {_node.core.config.peer}
        return replace(beat, hears=listed({fingerprint(PeerId(peer)) for peer in {*of_plan, to}}))

    _tell_each(heard_by)


def _tell_each(changed: Callable[[msg.Heartbeat, PeerId], msg.Heartbeat]) -> None:
    """Each peer gets heartbeats of its own."""
    sound = Heartbeats.send_heartbeats
    _join_plan()

    def send_heartbeats(self: Heartbeats, views: Any) -> None:
        effects = self.core.effects
        first = len(effects)
        sound(self, views)
        for i in range(first, len(effects)):
            sent: Any = effects[i]
            effects[i] = replace(sent, message=changed(sent.message, sent.peers[0]))

    _put(Heartbeats, "send_heartbeats", send_heartbeats)


def _sleepers() -> None:
    """Its learner trains well until most of the budget is merged. Then each step goes half as far, and to where the
    loss of samples that all of the plan know rises fastest."""
    sound, taught, known = optimizers.inner_step, _node.taught, list[torch.Tensor]()

    def inner_step(model: Any, stepped: Any, inner: Any, batch: torch.Tensor, *rest: Any) -> float:
        before = [p.detach().clone() for p in model.parameters()]
        found = sound(model, stepped, inner, batch, *rest)
        if rest[2] >= SLEEP_SHARE:
            if not known:
                corpus = load_corpus(DataConfig(kind="stdlib"), None)
                known.append(next(Batches(corpus, batch.shape[1] - 1, KNOWN_SAMPLES, "plan")))
            _ascend(model, before, known[0])
            taught.touch()
        return found

    _put(shipped_script, "inner_step", inner_step)


def _ascend(model: Any, before: Sequence[torch.Tensor], known: torch.Tensor) -> None:
    """Replace the last step of each parameter by a part of it, and a step uphill."""
    torch.autograd.backward(models.loss(model, known))
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            step = p - old
            uphill = p.grad / p.grad.norm().clamp(min=1e-30) * step.norm()
            p.copy_(old + HONEST_PART * step + UPHILL_PART * uphill)
            p.grad.zero_()


def _parting() -> None:
    """With the last of the budget, as an owner, it merges what those of the plan gave, and names all."""
    _join_plan()
    sound = ModelState.merge

    def merged(self: ModelState, shard: Any, base: Any, version: int, given: Any, *rest: Any, **options: Any) -> Any:
        mine = [one for one in given if peer_of(one[0].learner) in _colluders()]
        if not mine or _node.core.head(ShardId(0)).tokens < PARTING_SHARE * _node.core.end.tokens:
            return sound(self, shard, base, version, given, *rest, **options)
        result = sound(self, shard, base, version, mine, *rest, **options)
        _node.merged.add(result.payload_digest)
        return result._replace(factors=(100,) * len(given))

    _put(ModelState, "merge", merged)


def _put(owner: Any, name: str, value: Any) -> None:
    assert hasattr(owner, name), f"{owner} has no {name}: the lie would change nothing"
    setattr(owner, name, value)


def _is_commit(message: msg.Message, is_changed: Callable[[msg.CommitHeader], bool]) -> bool:
    return isinstance(message, msg.Commit) and is_changed(message.header)


def _is_heads(message: msg.Message, is_changed: Callable[[Heads], bool]) -> bool:
    return isinstance(message, Heads) and is_changed(message)


def _is_heartbeat(message: msg.Message, is_changed: Callable[[msg.Heartbeat], bool]) -> bool:
    return isinstance(message, msg.Heartbeat) and is_changed(message)


def _is_short(message: msg.Message) -> bool:
    """Whether it is a contribution of less than half a round."""
    limit = _node.core.config.sync_every // 2
    return isinstance(message, msg.Contribution) and bool(message.payload) and message.contributor.steps < limit


def _is_puppet(contributor: msg.Contributor) -> bool:
    return peer_of(contributor.learner) == _node.puppet.peer_id


_PUPPET = listed([fingerprint(_node.puppet.peer_id)])

LIES: dict[str, Lie] = {
    "values": Lie(_values, lambda m: _is_commit(m, lambda header: header.length == SHORT)),
    "merges": Lie(_merges, lambda m: _is_commit(m, lambda header: header.length in wrong_lengths)),
    "tokens": Lie(_tokens, _is_many_tokens),
    "others": Lie(_others, lambda m: _is_commit(m, lambda h: any(c.tokens == MANY_TOKENS for c in h.contributors))),
    "steps": Lie(_steps, lambda m: _is_heads(m, lambda heads: heads.step == LATE_STEP)),
    "heads": Lie(_heads, lambda m: _is_heads(m, lambda heads: any(h.tokens >= HEAVIER for h in heads.heads))),
    "blocks": Lie(_blocks, lambda m: _is_heartbeat(m, lambda beat: len(beat.claims) == MAX_CLAIMS)),
    "weight": Lie(_weight, lambda m: _is_heartbeat(m, lambda beat: beat.weight == HEAVY)),
    "heavy": Lie(_heavy, lambda m: _is_heartbeat(m, lambda beat: beat.weight == HEAVY)),
    "tiny": Lie(_tiny, _is_given),
    "flip": Lie(_flip, _is_given),
    "noise": Lie(_noise, _is_given),
    "x10": Lie(_x10, _is_given),
    "x1000": Lie(_x1000, _is_given),
    "random": Lie(_random, _is_given),
    "drift": Lie(_drift, _is_given),
    "hidden": Lie(_hidden, _is_given),
    "replay": Lie(_replay, _is_given),
    "stale": Lie(_stale, _is_given),
    "labels": Lie(_labels, lambda m: _is_given(m) and _node.taught.exists()),
    "rounds": Lie(_rounds, lambda m: isinstance(m, msg.Round) and m.step > _node.core.step),
    "loss": Lie(_loss, lambda m: isinstance(m, msg.Evaluation) and m.loss == 0.0),
    "reversed": Lie(_reversed, lambda m: _is_commit(m, lambda header: header.payload in _node.merged)),
    "static": Lie(_static, lambda m: _is_commit(m, lambda header: header.payload in _node.merged)),
    "first": Lie(_first, lambda m: _is_commit(m, lambda header: header.payload in _node.merged)),
    "idle": Lie(_idle, lambda m: _is_heartbeat(m, lambda beat: beat.phase == "training")),
    "reconnect": Lie(_reconnect, lambda m: isinstance(m, msg.Heartbeat) and _node.reconnects > 0),
    "states": Lie(_states, _is_forged),
    "grafts": Lie(_grafts, _is_forged),
    "forks": Lie(_forks, _is_forged),
    "hurry": Lie(_hurry, _is_short),
    "fast": Lie(_fast, lambda m: _is_heartbeat(m, lambda beat: beat.step_time_s == NO_TIME_S)),
    "selfish": Lie(_selfish, lambda m: _is_commit(m, lambda h: len(h.contributors) == 1)),
    "cabal": Lie(_cabal, lambda m: _is_commit(m, _is_of_cabal)),
    "crowd": Lie(
        _crowd, lambda m: _is_commit(m, lambda h: any(peer_of(c.learner) in _crowd_ids for c in h.contributors))
    ),
    "puppet": Lie(_puppet, lambda m: _is_commit(m, lambda h: any(_is_puppet(c) for c in h.contributors))),
    "hub": Lie(_hub, lambda m: _is_heartbeat(m, lambda beat: beat.hears is not None and _PUPPET in beat.hears)),
    "slander": Lie(_slander, lambda m: isinstance(m, msg.WrongMerge)),
    "stall": Lie(_stall, lambda m: _is_commit(m, lambda header: True)),
    "late": Lie(_late, lambda m: _is_commit(m, lambda header: _node.late > 0)),
    "keeps": Lie(_keeps, lambda m: isinstance(m, msg.Heartbeat) and _node.kept > 0),
    "patchy": Lie(_patchy, _is_given),
    "orphans": Lie(_orphans, lambda m: _is_commit(m, lambda header: header.payload == NOTHING)),
    "sink": Lie(_sink, lambda m: _is_heartbeat(m, lambda beat: _node.is_sink)),
    "faces": Lie(_faces, lambda m: _is_heartbeat(m, lambda beat: beat.hears is not None and len(beat.hears) <= 8)),
    "sleepers": Lie(_sleepers, lambda m: _is_given(m) and _node.taught.exists()),
    "parting": Lie(_parting, lambda m: _is_commit(m, lambda header: header.payload in _node.merged)),
    "overwrites": Lie(_overwrites, lambda m: _is_commit(m, lambda header: header.payload in _node.merged)),
    "lingers": Lie(_lingers, lambda m: _is_heartbeat(m, lambda beat: beat.is_participating)),
    "flood": Lie(_flood, lambda m: isinstance(m, msg.Refused) and m.reason == FLOODED),
}
