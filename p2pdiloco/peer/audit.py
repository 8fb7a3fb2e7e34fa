"""Audits: makes other owners' merges again from the payloads of their contributions, and compares (rules V5).

Rules of this file:
1. A verdict follows from signed and hashed data alone, and from this peer's own arithmetic, done twice. What another
   peer says is only a reason to look.
2. Audits wait for everything else. One runs at a time, on a queue of its own, and asks for one payload at a time; an
   audit that finds too many waiting is not made.
3. A peer that accuses an owner whose merge is right is not listened to again. One whose accusation cannot be checked,
   because the payloads are gone, is.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from p2pdiloco.codec import bitrate_ladder, compression, merge, quantization
from p2pdiloco.codec.formats import FORMATS, Recipe
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import Host
from p2pdiloco.peer.learner_updates import Payload
from p2pdiloco.peer.message_verifier import MessageVerifier
from p2pdiloco.peer.metrics import Metrics
from p2pdiloco.peer.payload_cache import PayloadCache
from p2pdiloco.peer.signatures import UnknownMemberError, check_commit
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.commit_validation import audited_payloads
from p2pdiloco.protocol.ids import Digest, PeerId, digest_of, peer_of
from p2pdiloco.protocol.manifest import Layout, Manifest, Shard
from p2pdiloco.protocol.messages import CommitHeader, WrongMerge, commit_id
from p2pdiloco.protocol.view import MachineView
from p2pdiloco.timing import RateLimiter
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import GetPayload, encode
from p2pdiloco.wire.request_reply import RequestError

# -- The merge, made again ---------------------------------------------------------------------------------------------


def merge_problem(
    header: CommitHeader, payloads: Mapping[Digest, Payload], piece: Shard, turn_steps: int, recipes: Sequence[Recipe]
) -> str | None:
    """Return how a commit's values differ from the merge of the contributions that it names, or None.

    The result follows from the arguments to the bit, on every machine.

    Args:
        payloads: those of ``audited_payloads``.
        piece: the commit's shard.
        turn_steps: inner steps between two exchanges of a fragment (H).
        recipes: encodings that an owner may choose (``bitrate_ladder.downward_recipes``).
    """
    elements = piece.elements
    if not all(c.payload for c in header.contributors):
        return "it names a contribution without values"
    try:
        bodies = [_bodies(payloads[Digest(c.payload.hex())], elements) for c in header.contributors]
        gradients = [merge.contribution(each, elements) for each in bodies]
        merged = torch.empty(elements)
        longest = header.longest or math.inf
        merge.merge_declared(piece.merge, gradients, header.contributors, header.factors, turn_steps, merged, longest)
        committed = _bodies(payloads[header.payload], elements)
        codec = committed[0][1]
        for how in recipes:
            if FORMATS[how.codec].number == codec and _is_same(committed, header, how, merged):
                return None
    except (ValueError, ArithmeticError, IndexError) as error:
        return f"its contributions cannot be merged: {error}"
    return "its values are not the merge of the contributions that it names"


def _bodies(payload: Payload, elements: int) -> Bodies:
    return Bodies(*compression.unpack(payload, quantization.chunk_count(elements), quantization.LARGEST_BODY))


def _is_same(committed: Bodies, header: CommitHeader, how: Recipe, merged: torch.Tensor) -> bool:
    """Return whether ``merged``, encoded as an owner does, is what was committed. Compressed bytes are not compared,
    since they depend on the release of zstd."""
    bodies, length = merge.encode(how, merged.clone(), header.longest or math.inf)
    pairs = zip(bodies, committed, strict=True)
    return length == header.length and all(
        np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)) for a, b in pairs
    )


# -- Auditor -----------------------------------------------------------------------------------------------------------

log = logs.get("node")

# Audits and accusations that wait. Further ones are dropped: a commit is one of many, and accusations come again.
AUDITS_WAITING, ACCUSATIONS_WAITING = 4, 16
# Accusations that one peer may make: all that it knows when it connects, and one a minute.
ACCUSATIONS, ACCUSATIONS_PER_S = 16, 1 / 60
# Accusers that are ignored; the latest stay.
IGNORED_MOST = 1024
# A payload takes at most so long, by its size at a slow link, and all of a commit so long together.
PAYLOAD_S, SLOWEST_BYTES_PER_S, CASE_S = 20.0, 50_000, 300.0
# Payloads of one commit that are held in memory; a commit with more is not audited.
CASE_MOST_BYTES = 512 << 20


class _Case(NamedTuple):
    """A commit to be checked."""

    commit: WrongMerge
    """As if its merge were wrong; without a verdict so far."""
    accuser: PeerId | None
    """None: this peer audits by itself."""


class Auditor:
    """Audits commits, and checks accusations against owners, of one peer."""

    def __init__(
        self,
        manifest: Manifest,
        layout: Layout,
        driver: Driver,
        view: MachineView,
        payload_cache: PayloadCache,
        verifier: MessageVerifier,
        host: Host,
        metrics: Metrics,
    ) -> None:
        self._run = manifest.run
        self._turn_steps = manifest.config.schedule.sync_every
        self._recipes = bitrate_ladder.downward_recipes(manifest.config.codec)
        self._layout = layout
        self._driver = driver
        self._view = view
        self._payload_cache = payload_cache
        self._verifier = verifier
        self._host = host
        self._metrics = metrics
        self._accusations: RateLimiter[PeerId] = RateLimiter(burst=ACCUSATIONS, per_s=ACCUSATIONS_PER_S)
        # Ordered set, the oldest first.
        self._ignored: dict[PeerId, None] = {}
        self._cases: deque[_Case] = deque()
        self._task: asyncio.Task[None] | None = None

    def consider(self, effect: ef.Audit) -> None:
        """Audit a commit with the given probability."""
        if self._host.draw() >= effect.chance or sum(c.accuser is None for c in self._cases) >= AUDITS_WAITING:
            return
        proof = self._payload_cache.shards[effect.shard].proofs.get(effect.commit)
        if proof is not None:
            self._add(_Case(WrongMerge(*proof), None))

    def accused(self, accuser: PeerId, accusation: WrongMerge) -> None:
        """Check what ``accuser`` says of an owner."""
        waiting = sum(c.accuser is not None for c in self._cases)
        if accuser in self._ignored or waiting >= ACCUSATIONS_WAITING or not self._is_open(accusation):
            return
        if self._accusations.take(accuser, self._host.now()):
            self._add(_Case(accusation, accuser))

    def _is_open(self, accusation: WrongMerge) -> bool:
        """Return whether a verdict would change anything here."""
        owner = accusation.owner
        is_known = owner == self._view.me or accusation.shard >= len(self._layout.shards)
        return not is_known and all(owner != proof.owner for proof in self._view.convictions().proofs)

    def _add(self, case: _Case) -> None:
        self._cases.append(case)
        if self._task is None or self._task.done():
            self._task = self._host.spawn(self._work(), name="audits")

    async def _work(self) -> None:
        while self._cases and not self._driver.is_closed:
            case = self._cases.popleft()
            if self._is_open(case.commit):
                await self._judge(case)

    async def _judge(self, case: _Case) -> None:
        header, accuser = case.commit.header, case.accuser
        if accuser is not None and not await self._is_signed(accuser, case.commit):
            return
        payloads = await self._collect(header, (header.owner,) if accuser is None else (accuser, header.owner))
        if self._driver.is_closed:
            return
        if payloads is None:
            if accuser is None:
                self._driver.feed(ev.Audited(header.shard, header.version, header.owner, False))
            return
        problem = await self._host.work("audits", partial(self._problem, header, payloads))
        if self._driver.is_closed:
            return
        if problem is not None:
            self._convict(case.commit, payloads, problem)
        elif accuser is None:
            self._driver.feed(ev.Audited(header.shard, header.version, header.owner, True))
        else:
            self._ignore(accuser, f"it accuses {header.owner} of a wrong merge, which is right")

    def _problem(self, header: CommitHeader, payloads: Mapping[Digest, Payload]) -> str | None:
        """Return what is wrong with a merge. As memory and processors err, it must be found twice."""
        piece, found = self._layout.shards[header.shard], list[str | None]()
        for _ in range(2):
            if any(digest_of(payload) != digest for digest, payload in payloads.items()):
                return None
            found.append(merge_problem(header, payloads, piece, self._turn_steps, self._recipes))
            if found[0] is None:
                return None
        return found[1]

    def _convict(self, proof: WrongMerge, payloads: Mapping[Digest, Payload], problem: str) -> None:
        """Report a proof, and keep what others need to see it."""
        cached = self._payload_cache.shards[proof.shard]
        for digest, payload in payloads.items():
            cached.put(digest, payload)
        self._payload_cache.keep_proof(proof.header, proof.signature)
        self._metrics.report_fault(proof.owner, "merge", problem)
        self._driver.feed(ev.Contradicted(proof))

    def _ignore(self, accuser: PeerId, reason: str) -> None:
        self._metrics.report_fault(accuser, "accusation", reason)
        self._ignored[accuser] = None
        if len(self._ignored) > IGNORED_MOST:
            del self._ignored[next(iter(self._ignored))]

    async def _is_signed(self, accuser: PeerId, accusation: WrongMerge) -> bool:
        """Return whether the commit bears the signatures of its owner and its contributors, who are members."""
        header, signature, standing = accusation.header, accusation.signature, self._verifier.standing
        for is_last in (False, True):
            try:
                await self._host.work("checks", partial(check_commit, self._run, header, signature, standing))
            except UnknownMemberError:
                if is_last:
                    return False
                await self._verifier.ask_for_members(accuser)
            except ValueError as error:
                self._ignore(accuser, str(error))
                return False
            else:
                return True
        return False

    # -- payloads ------------------------------------------------------------------------------------------------------

    async def _collect(self, header: CommitHeader, sources: Sequence[PeerId]) -> dict[Digest, Payload] | None:
        """Return the payloads that make the merge again, from here, from ``sources`` or from the contributors; None if
        one is not there."""
        found, size, until = dict[Digest, Payload](), 0, self._host.now() + CASE_S
        givers = {Digest(c.payload.hex()): peer_of(c.learner) for c in header.contributors}
        for digest in sorted(audited_payloads(header)):
            payload = await self._read(header, digest)
            for source in dict.fromkeys((*sources, givers.get(digest, header.owner))):
                if payload is None and self._host.now() < until and not self._driver.is_closed:
                    payload = await self._ask(source, header, digest)
            size += 0 if payload is None else len(payload)
            if payload is None or size > CASE_MOST_BYTES:
                return None
            found[digest] = payload
        return found

    async def _read(self, header: CommitHeader, digest: Digest) -> Payload | None:
        """Return a payload that is here."""
        held = self._payload_cache.shards[header.shard].payloads.get(digest)
        if held is None or held.data is not None:
            return None if held is None else held.data
        try:
            return await self._host.work("disk", partial(held.read, self._host.disk))
        except ValueError:
            return None

    async def _ask(self, peer: PeerId, header: CommitHeader, digest: Digest) -> Payload | None:
        """Return a payload from ``peer``."""
        most = compression.payload_limit(self._layout.shards[header.shard].elements)
        wanted = encode(GetPayload(header.shard, commit_id(header), digest))
        timeout_s = min(CASE_S, PAYLOAD_S + most / SLOWEST_BYTES_PER_S)
        try:
            response = await self._host.links.request(peer, wanted, timeout_s=timeout_s, max_payload=most)
        except RequestError as error:
            log.debug("an audited payload did not arrive", peer=peer, reason=str(error))
            return None
        if response.payload is None or digest_of(response.payload) != digest:
            self._metrics.report_fault(peer, "payload", "the digest of an audited payload does not match")
            return None
        return response.payload
