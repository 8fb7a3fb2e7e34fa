"""Audits: makes other owners' merges again from the payloads of their contributions, and compares (rules V5).

Rules of this file:
1. A verdict follows from signed and hashed data alone, and from this peer's own arithmetic, done twice. What another
   peer says is only a reason to look.
2. Audits wait for everything else. One runs at a time, on a queue of its own, and asks for one payload at a time; an
   audit that finds too many waiting is not made. Accusations have a queue of their own, so that no accuser delays this
   peer's audits. Accusers take turns in it. Payloads beyond ``SPILL_BYTES`` wait on the disk, and are merged from
   there one at a time.
3. A peer that accuses an owner whose merge is right is not listened to again. One whose accusations cannot be checked,
   because the payloads do not come, is heard a few times, and then seldom.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from msgspec import Struct

from p2pdiloco.codec import agreement, bitrate_ladder, compression, merge, quantization
from p2pdiloco.codec.formats import FORMATS, Recipe
from p2pdiloco.codec.shard_codec import Bodies
from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import Disk
from p2pdiloco.peer.message_verifier import MessageVerifier
from p2pdiloco.peer.payload_store import Held
from p2pdiloco.peer.signatures import FalseContributionError, UnknownMemberError, check_commit
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.audits import AUDITED_VERSIONS, MOST_AUDITED_BYTES
from p2pdiloco.protocol.barred_owners import EVIDENCE_MOST, audited_payloads
from p2pdiloco.protocol.ids import Digest, PeerId, digest_of, peer_of
from p2pdiloco.protocol.manifest import Manifest, Shard
from p2pdiloco.protocol.messages import CommitHeader, Contributor, WrongMerge, commit_id
from p2pdiloco.timing import RateLimiter
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import GetPayload, encode
from p2pdiloco.wire.request_reply import RequestError, RequestRefused

# -- The merge, made again ---------------------------------------------------------------------------------------------


class LostPayloadError(Exception):
    """This peer's disk has lost or altered a payload, which says nothing of the merge."""


class _OnDisk:
    """A contribution's outer gradient that is read from the disk, and decoded, each time it is needed."""

    def __init__(self, load: Callable[[], Bodies], elements: int) -> None:
        self.elements = elements
        self._load = load
        self._norm = merge.contribution(load(), elements).norm()

    def norm(self) -> float:
        return self._norm

    def add_to(self, out: torch.Tensor, chunk: int, factor: float) -> None:
        quantization.add_chunk(self._load()[chunk], factor, out)


def merge_problem(
    commit: WrongMerge,
    payloads: Mapping[Digest, Held],
    piece: Shard,
    round_steps: int,
    recipes: Sequence[Recipe],
    disk: Disk,
) -> str | None:
    """Return how the values of a merge, of a commit or of one of its groups, differ from what its contributions give,
    or None.

    The result follows from the arguments to the bit, on every machine.

    Args:
        commit: the merge, as if it were wrong.
        payloads: those of ``audited_payloads``.
        piece: the commit's shard.
        round_steps: inner steps between two exchanges of a fragment (H).
        recipes: encodings that an owner may choose (``bitrate_ladder.downward_recipes``).
        disk: has the payloads that are not in memory.

    Raises:
        LostPayloadError: it has lost one.
    """
    elements, claim = piece.elements, _claim_of(commit)
    if not all(c.payload for c in claim.contributors):
        return "it names a contribution without values"
    try:
        gradients = [_gradient(payloads[Digest(c.payload.hex())], elements, disk) for c in claim.contributors]
        merged = torch.empty(elements)
        rules = (claim.contributors, claim.factors, round_steps, merged, claim.longest, claim.members)
        merge.merge_declared(piece.merge, gradients, *rules)
        committed = _bodies(payloads[claim.payload], elements, disk)
        codec = committed[0][1]
        for how in recipes:
            if FORMATS[how.codec].number == codec and _is_same(committed, claim, how, merged):
                return _factor_problem(claim, gradients)
    except (ValueError, ArithmeticError, IndexError) as error:
        return f"its contributions cannot be merged: {error}"
    return "its values are not the merge of the contributions that it names"


class _Claim(NamedTuple):
    """A merge as its maker states it: a commit's own, or that of one of its groups."""

    contributors: tuple[Contributor, ...]
    factors: tuple[int, ...]
    payload: Digest
    longest: float
    length: float | None
    """None: it says none."""
    members: tuple[int, ...] = ()


def _claim_of(commit: WrongMerge) -> _Claim:
    header = commit.header
    if commit.part < 0:
        members, longest = tuple(len(part.members) for part in header.parts), header.longest or math.inf
        return _Claim(header.merged, header.merged_factors, header.payload, longest, header.length, members)
    group = header.groups()[commit.part]
    return _Claim(group.contributors, group.factors, Digest(group.payload.hex()), math.inf, None)


def _factor_problem(claim: _Claim, gradients: Sequence[merge.Gradient]) -> str | None:
    """Return which factor of a merge no honest owner can have stated, or None. Empty factors are all 100 per cent."""
    least = agreement.least_factors(gradients, b"".join(c.payload for c in claim.contributors))
    for c, factor, lowest in zip(claim.contributors, claim.factors, least, strict=False):
        if factor < lowest:
            return f"it counts {factor} % of what {c.learner} gave, which agrees with the others: at least {lowest} %"
    return None


def _gradient(held: Held, elements: int, disk: Disk) -> merge.Gradient:
    load = partial(_bodies, held, elements, disk)
    return _OnDisk(load, elements) if held.data is None else merge.contribution(load(), elements)


def _bodies(held: Held, elements: int, disk: Disk) -> Bodies:
    try:
        payload = held.read(disk)
    except ValueError as error:
        raise LostPayloadError(str(error)) from error
    return Bodies(*compression.unpack(payload, quantization.chunk_count(elements), quantization.LARGEST_BODY))


def _is_same(committed: Bodies, claim: _Claim, how: Recipe, merged: torch.Tensor) -> bool:
    """Return whether ``merged``, encoded as an owner does, is what was committed. Compressed bytes are not compared,
    since they depend on the release of zstd."""
    bodies, length = merge.encode(how, merged.clone(), claim.longest)
    pairs = zip(bodies, committed, strict=True)
    return claim.length in (None, length) and all(
        np.array_equal(np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)) for a, b in pairs
    )


# -- Auditor -----------------------------------------------------------------------------------------------------------

log = logs.get("node")

# Own audits that wait. Further ones are dropped: a commit is one of many.
AUDITS_WAITING = 4
# Accusers whose accusations wait. Of each, the newest wait that it keeps the payloads of.
ACCUSERS_WAITING = 16
# Accusations of one peer that cannot be checked until it is not heard any more, and how fast it may try again.
UNCHECKED, UNCHECKED_PER_S = 3, 1 / 3600
# Accusers that are ignored; the latest stay.
IGNORED_MOST = 1024
# The payloads of a commit take at most so long together: for the first answer, for each to wait for other traffic
# (``state_server.YIELD_MOST_S``) and to come over a slow link, and in all.
ANSWER_S, TURN_S, SLOWEST_BYTES_PER_S, CASE_S = 20.0, 2.0, 50_000, 300.0
# The first answer to an own audit takes at most the takeover time, if that is between this and ``ANSWER_S``.
LEAST_ANSWER_S = 3.0
# A peer that no longer has a payload says so at once.
PROMPT_S = 1.0
# Payloads of one commit in memory from which further ones wait on the disk, for an audit and for an accusation; and at
# most, if the disk takes none. A commit with more, or with more than ``MOST_AUDITED_BYTES``, is not audited, which the
# log tells once.
SPILL_BYTES, MEMORY_BYTES = 256 << 20, 512 << 20


class _Case(Struct, eq=False):
    """The collection of one commit's payloads, from ``began`` to ``until`` at the latest.

    ``answer_s``: for how long each payload may be waited for, besides the time in which it comes.
    """

    began: float
    until: float
    answer_s: float
    failed: set[PeerId] = set()
    """Peers that did not answer, or sent something else. They are not asked again."""
    refused: set[PeerId] = set()
    """Peers that said at once (``PROMPT_S``) that they do not have a payload."""
    is_given_up: bool = False
    """This peer cannot make the merge again, whatever others send."""
    fetched: list[Held] = []
    """Payloads that came for this case."""


class Auditor:
    """Audits commits, and checks accusations against owners, of one peer."""

    def __init__(self, manifest: Manifest, driver: Driver, verifier: MessageVerifier) -> None:
        self._run = manifest.run
        self._round_steps = manifest.config.schedule.sync_every
        self._recipes = bitrate_ladder.downward_recipes(manifest.config.codec)
        self._layout = driver.state.layout
        self._driver = driver
        self._view = driver.view
        self._payload_cache = driver.payload_cache
        self._verifier = verifier
        self._host = driver.host
        self._metrics = driver.metrics
        self._unchecked: RateLimiter[PeerId] = RateLimiter(burst=UNCHECKED, per_s=UNCHECKED_PER_S)
        # Ordered set, the oldest first.
        self._ignored: dict[PeerId, None] = {}
        # Commits to audit, as if their merges were wrong, and how long their owners may take to answer.
        self._audits: deque[tuple[WrongMerge, float]] = deque()
        # Accusations by accuser, the accuser that waits longest first.
        self._accusations: dict[PeerId, deque[WrongMerge]] = {}
        self._has_told = False
        self._auditing: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    def consider(self, effect: ef.Audit) -> None:
        """Audit a merge with the given probability."""
        if self._host.draw() >= effect.chance:
            return
        proof = self._payload_cache.shards[effect.shard].proofs.get(effect.commit)
        if proof is None:
            return
        answer_s = min(ANSWER_S, max(LEAST_ANSWER_S, effect.patience_s))
        begin = partial(self._begin_audit, WrongMerge(*proof, effect.part), answer_s)
        if effect.part < 0:
            begin()
        else:  # its collector shows it once it has the commit, which this peer may have had first
            self._host.call_at(self._host.now() + answer_s, begin)

    def _begin_audit(self, commit: WrongMerge, answer_s: float) -> None:
        if self._driver.is_closed or len(self._audits) >= AUDITS_WAITING:
            return
        self._audits.append((commit, answer_s))
        if self._auditing is None or self._auditing.done():
            self._auditing = self._host.keep(self._audit_waiting, name="audits")

    def accused(self, accuser: PeerId, accusation: WrongMerge) -> None:
        """Check what ``accuser`` says of an owner."""
        if not self._is_heard(accuser) or not self._is_open(accusation):
            return
        if accuser not in self._accusations:
            if len(self._accusations) >= ACCUSERS_WAITING:
                return
            self._accusations[accuser] = deque(maxlen=EVIDENCE_MOST)
        self._accusations[accuser].append(accusation)
        if self._checking is None or self._checking.done():
            self._checking = self._host.keep(self._check_waiting, name="accusations")

    def _is_heard(self, accuser: PeerId) -> bool:
        return accuser not in self._ignored and self._unchecked.available(accuser, self._host.now()) >= 1.0

    def _is_open(self, accusation: WrongMerge) -> bool:
        """Return whether a verdict would change anything here."""
        owner = accusation.owner
        is_known = owner == self._view.me or accusation.shard >= len(self._layout.shards)
        return not is_known and all(owner != proof.owner for proof in self._view.convictions().proofs)

    async def _audit_waiting(self) -> None:
        while self._audits and not self._driver.is_closed:
            await self._audit(*self._audits.popleft())

    async def _audit(self, commit: WrongMerge, answer_s: float) -> None:
        """Make a merge again, unless its owner may have dropped the contributions by now."""
        header, asked_at = commit.header, self._version(commit)
        if not self._is_open(commit) or asked_at >= header.version + AUDITED_VERSIONS:
            return
        case = self._begin(commit, answer_s)
        is_right = await self._judge(commit, (commit.owner,), case)
        if is_right is False or case.is_given_up or self._driver.is_closed:
            return
        # An owner that takes its time does not escape by that. One that answers may be ahead of this peer.
        version = self._version(commit) if commit.owner in case.refused else asked_at
        self._driver.feed(ev.Audited(header.shard, header.version, commit.owner, is_right is not None, version))

    def _version(self, commit: WrongMerge) -> int:
        head = self._view.head(commit.shard)
        assert head is not None, "it was applied here"
        return head.version

    async def _check_waiting(self) -> None:
        while self._accusations and not self._driver.is_closed:
            accuser, waiting = next(iter(self._accusations.items()))
            accusation = waiting.pop()
            if self._is_heard(accuser) and self._is_open(accusation):
                await self._check(accuser, accusation)
            del self._accusations[accuser]
            if waiting:
                self._accusations[accuser] = waiting  # behind the other accusers

    async def _check(self, accuser: PeerId, accusation: WrongMerge) -> None:
        owner = accusation.owner
        is_right = None
        try:
            is_signed = await self._is_signed(accuser, accusation)
        except FalseContributionError as error:
            self._convict(accusation, {}, str(error))
            return
        if is_signed:
            is_right = await self._judge(accusation, (accuser, owner), self._begin(accusation, ANSWER_S))
        if is_right:
            self._ignore(accuser, f"it accuses {owner} of a wrong merge, which is right")
        elif is_right is None and accuser not in self._ignored:
            self._unchecked.take(accuser, self._host.now())

    async def _judge(self, commit: WrongMerge, sources: Sequence[PeerId], case: _Case) -> bool | None:
        """Return whether a merge is right; None if its payloads did not come. A wrong one is reported."""
        cached = self._payload_cache.shards[commit.shard].payloads
        try:
            payloads = await self._collect(commit, sources, case)
            if payloads is None or self._driver.is_closed:
                return None
            problem = await self._host.work("audits", partial(self._problem, commit, payloads))
            if problem is not None and not self._driver.is_closed:
                self._convict(commit, payloads, problem)
        except LostPayloadError as error:
            case.is_given_up = True
            log.warning("a merge is not audited", shard=commit.shard, reason=str(error))
            return None
        finally:
            self._driver.store.drop([held for held in case.fetched if cached.get(held.digest) is not held])
        return problem is None

    def _problem(self, commit: WrongMerge, payloads: Mapping[Digest, Held]) -> str | None:
        """Return what is wrong with a merge. As memory and processors err, it must be found twice."""
        piece, found = self._layout.shards[commit.shard], list[str | None]()
        for _ in range(2):
            if any((data := held.data) is not None and digest_of(data) != held.digest for held in payloads.values()):
                return None
            found.append(merge_problem(commit, payloads, piece, self._round_steps, self._recipes, self._host.disk))
            if found[0] is None:
                return None
        return found[1]

    def _convict(self, proof: WrongMerge, payloads: Mapping[Digest, Held], problem: str) -> None:
        """Report a proof, and keep what others need to see it."""
        for digest, held in payloads.items():
            self._payload_cache.shards[proof.shard].payloads.setdefault(digest, held)
        self._payload_cache.keep_proof(proof.header, proof.signature)
        self._metrics.report_fault(proof.owner, "merge", problem)
        self._driver.feed(ev.Contradicted(proof))

    def _ignore(self, accuser: PeerId, reason: str) -> None:
        self._metrics.report_fault(accuser, "accusation", reason)
        self._ignored[accuser] = None
        if len(self._ignored) > IGNORED_MOST:
            del self._ignored[next(iter(self._ignored))]

    async def _is_signed(self, accuser: PeerId, accusation: WrongMerge) -> bool:
        """Return whether the commit bears its owner's signature, and its owner and contributors are members.

        Raises FalseContributionError if a contributor did not sign."""
        header, signature, permissions = accusation.header, accusation.signature, self._verifier.permissions
        for is_last in (False, True):
            try:
                await self._host.work("checks", partial(check_commit, self._run, header, signature, permissions))
            except UnknownMemberError:
                if is_last:
                    return False
                await self._verifier.ask_for_members(accuser)
            except FalseContributionError:
                raise
            except ValueError as error:
                self._ignore(accuser, str(error))
                return False
            else:
                return True
        return False

    # -- payloads ------------------------------------------------------------------------------------------------------

    def _begin(self, commit: WrongMerge, answer_s: float) -> _Case:
        count, most = len(audited_payloads(commit.header, commit.part)), self._most_bytes(commit.header)
        now, case_s = self._host.now(), answer_s + count * (TURN_S + most / SLOWEST_BYTES_PER_S)
        return _Case(now, now + min(CASE_S, case_s), answer_s)

    def _most_bytes(self, header: CommitHeader) -> int:
        return compression.payload_limit(self._layout.shards[header.shard].elements)

    async def _collect(self, commit: WrongMerge, sources: Sequence[PeerId], case: _Case) -> dict[Digest, Held] | None:
        """Return the payloads that make the merge again, from here, from ``sources`` or from who made them; None if one
        is not there, or all are too large."""
        found, store, header = dict[Digest, Held](), self._driver.store, commit.header
        cached, wanted = self._payload_cache.shards[header.shard], audited_payloads(header, commit.part)
        givers = {Digest(c.payload.hex()): peer_of(c.learner) for c in (*header.contributors, *header.merged)}
        most_bytes = MOST_AUDITED_BYTES if store.may_write() else MEMORY_BYTES
        if len(wanted) * cached.size_of(header.payload) > most_bytes:  # a contribution is as large as the commit
            self._give_up(header, case)
            return None
        for digest in sorted(wanted):
            held = cached.payloads.get(digest)
            for source in dict.fromkeys((*sources, givers.get(digest, header.owner))):
                if held is None and source not in case.failed and not self._driver.is_closed:
                    held = await self._ask(source, header, digest, case)
            if held is None:
                return None
            found[digest] = held
            in_memory = sum(each.size for each in found.values() if each.data is not None)
            if in_memory > MEMORY_BYTES or sum(map(len, found.values())) > MOST_AUDITED_BYTES:
                self._give_up(header, case)
                return None
            if in_memory > SPILL_BYTES and store.may_write():
                store.spill(held)
        return found

    def _give_up(self, header: CommitHeader, case: _Case) -> None:
        case.is_given_up = True
        if not self._has_told:
            self._has_told = True
            log.warning(
                f"merges of more than {MOST_AUDITED_BYTES >> 30} GiB of contributions, or {MEMORY_BYTES >> 20} MiB "
                "while the disk takes no payloads, are not audited: nobody finds an owner that lies in one. A run with "
                "smaller shards (schedule.max_shard) has smaller merges",
                shard=header.shard,
                contributors=len(header.contributors),
            )

    async def _ask(self, peer: PeerId, header: CommitHeader, digest: Digest, case: _Case) -> Held | None:
        most = self._most_bytes(header)
        timeout_s = min(case.until - self._host.now(), case.answer_s + most / SLOWEST_BYTES_PER_S)
        if timeout_s <= 0.0:
            return None
        wanted = encode(GetPayload(header.shard, commit_id(header), digest))
        try:
            response = await self._host.links.request(peer, wanted, timeout_s=timeout_s, max_payload=most)
        except RequestError as error:
            log.debug("an audited payload did not arrive", peer=peer, reason=str(error))
            is_prompt = isinstance(error, RequestRefused) and self._host.now() - case.began <= PROMPT_S
            (case.refused if is_prompt else case.failed).add(peer)
            return None
        if response.payload is None or digest_of(response.payload) != digest:
            self._metrics.report_fault(peer, "payload", "the digest of an audited payload does not match")
            case.failed.add(peer)
            return None
        case.fetched.append(held := Held(digest, response.payload))
        return held
