"""Messages between peers: frozen, validated on decoding, with a bound on every size.

A message is a small control body. ``Contribution`` and ``Commit`` travel with a payload (compressed outer gradients),
which the machine knows only by its digest. The driver stores payloads and attaches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import (
    DIGEST_BYTES,
    FINGERPRINT_BYTES,
    Digest,
    FragmentId,
    LearnerId,
    PeerId,
    RunId,
    ShardId,
    digest_of,
    peer_of,
)

MAX_CLAIMS = 256
SIGNATURE_BYTES = 64
Count = Annotated[int, Meta(ge=0, le=2**56)]
Hex = Annotated[Digest, Meta(min_length=1, max_length=40)]
Percent = Annotated[int, Meta(ge=0, le=100)]
Shard = Annotated[ShardId, Meta(ge=0, le=2**24)]
Fragment = Annotated[FragmentId, Meta(ge=0, le=2**16)]
Learner = Annotated[LearnerId, Meta(min_length=1, max_length=160)]
Peer = Annotated[PeerId, Meta(min_length=1, max_length=128)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Blocks = Annotated[tuple[Annotated[Block, Meta(ge=0, le=2**56)], ...], Meta(max_length=MAX_CLAIMS)]
MAX_TEXT = 400
Text = Annotated[str, Meta(max_length=MAX_TEXT)]

MAX_SHARDS = 1 << 16
MAX_CONTRIBUTORS = 4096
MAX_PARTS = 256
"""Maximum number of groups' merges in a commit."""
MAX_KNOWN = 256
MAX_ABANDONED = 1024
"""Maximum number of commits in a vote."""
MOST_LENGTH = 1e38
"""Maximum stated norm, beyond that of any merge."""
MOST_LOSS = 1e6
"""Maximum loss, in nats a token."""
MAX_HEARD_BYTES = 4096 * FINGERPRINT_BYTES
"""Maximum size of a heartbeat's list: as many peers as are connected at most (``membership.MAX_PEERS``)."""

Phase = Literal["joining", "training", "following", "finished", "done", "leaving"]


class Contributor(msgspec.Struct, frozen=True, array_like=True):
    """Half-open range of one learner's tokens (and inner steps) that a contribution or commit merges."""

    learner: Learner
    tokens_from: Count
    tokens_to: Count
    steps_from: Count
    steps_to: Count
    blocks: Blocks = ()
    """Blocks of data whose last token is in the range, sorted; only for shard 0."""
    payload: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    """Digest of the outer gradient, as bytes; empty if the learner has nothing to contribute."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Signature of the learner's peer over ``signed_contribution_bytes``: the fields above, the run, the base."""

    @property
    def tokens(self) -> int:
        """Number of tokens in the range."""
        return self.tokens_to - self.tokens_from

    @property
    def steps(self) -> int:
        """Number of inner steps in the range."""
        return self.steps_to - self.steps_from


class Head(msgspec.Struct, frozen=True, array_like=True):
    """A shard's latest commit at a peer: its id, its version, and the weight of its chain."""

    shard: Shard
    version: Count
    id: Hex
    tokens: Count
    """Cumulative counted tokens of the chain (``counted_tokens``)."""


class GroupMerge(msgspec.Struct, frozen=True, array_like=True):
    """The merge of one group's contributions (``groups``), which its collector signs and sends to the owner."""

    collector: Peer
    contributors: Annotated[tuple[Contributor, ...], Meta(min_length=1, max_length=MAX_CONTRIBUTORS)]
    """Sorted by learner."""
    payload: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
    """Digest of the merged outer gradient, as bytes."""
    factors: Annotated[tuple[Percent, ...], Meta(max_length=MAX_CONTRIBUTORS)] = ()
    """As in ``CommitHeader``, for this merge."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Signature of the collector over ``signed_group_bytes``: the fields above, the run, the base."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A group's merge, as a commit names it."""

    collector: Peer
    payload: Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
    members: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_CONTRIBUTORS)], ...], Meta(max_length=MAX_CONTRIBUTORS)]
    """Places of its contributors among those of the commit."""
    factor: Percent = 100
    """Percentage of the part's weight that counted in the commit."""


class CommitHeader(msgspec.Struct, frozen=True, array_like=True):
    """The merged update that takes a shard from ``version - 1`` to ``version``, without its payload."""

    shard: Shard
    version: Count
    parent: Hex
    step: Count
    """Global step of the round."""
    owner: Peer
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_CONTRIBUTORS)]
    """Sorted by learner."""
    tokens: Count
    """Cumulative counted tokens of the chain, this commit's contributors included (``counted_tokens``)."""
    payload: Hex
    result: Hex
    """Digest of the shard's global parameters and outer momentum after this commit."""
    record: Hex
    """Digest of the chain's marks, trained blocks and norm bound after this commit (``Chain.record_after``)."""
    length: Annotated[float, Meta(ge=0.0, le=MOST_LENGTH)] = 0.0
    """Upper bound of the norm (Euclidean) of the merged outer gradient."""
    counts: TokenCounts = NOTHING_COUNTED
    """The chain's record of its contributions' tokens after this commit."""
    factors: Annotated[tuple[Percent, ...], Meta(max_length=MAX_CONTRIBUTORS)] = ()
    """How much of each contribution's weight counted, in per cent: less where most others disagree with it. Empty: all
    of all."""
    longest: Annotated[float, Meta(ge=0.0, le=MOST_LENGTH)] = 0.0
    """Norm to which a longer merged outer gradient was scaled down (``Chain.stated_longest``); 0: no limit is known.
    With it the header has all that a merge depends on besides the contributions' payloads."""
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()
    """The groups' merges that were merged, sorted by collector; empty: the contributions themselves were. With parts,
    ``factors`` has the percentage of each contribution that counted in its group's merge."""

    def __post_init__(self) -> None:
        """Check that the parts, if there are any, divide the contributors, and their factors.

        Raises:
            ValueError: they do not.
        """
        count, places = len(self.contributors), sorted(place for part in self.parts for place in part.members)
        if self.parts and (places != [*range(count)] or len(self.factors) not in (0, count)):
            raise ValueError("its parts do not divide its contributors")

    @property
    def merged(self) -> tuple[Contributor, ...]:
        """Contributions that the owner merged: those of learners, or each group's merge as one (``part_as_one``)."""
        return tuple(map(part_as_one, self.groups())) if self.parts else self.contributors

    @property
    def merged_factors(self) -> tuple[int, ...]:
        """The factors of ``merged``; empty: all of all."""
        return _as_stated([part.factor for part in self.parts]) if self.parts else self.factors

    @property
    def counted_factors(self) -> tuple[int, ...]:
        """Percentage of each contribution that counted after both merges; empty: 100 for each."""
        found = list(self.factors or [100] * len(self.contributors))
        for part in self.parts:
            for place in part.members:
                found[place] = found[place] * part.factor // 100
        return tuple(found) if self.parts else self.factors

    def groups(self) -> tuple[GroupMerge, ...]:
        """Return the groups' merges, as their collectors signed them."""
        return tuple(
            GroupMerge(
                part.collector,
                tuple(self.contributors[place] for place in part.members),
                part.payload,
                _as_stated([self.factors[place] for place in part.members]) if self.factors else (),
                part.signature,
            )
            for part in self.parts
        )


def _as_stated(factors: Sequence[int]) -> tuple[int, ...]:
    """Return a merge's factors as its maker states, and signs, them: none if all of all counts."""
    return tuple(factors) if any(factor < 100 for factor in factors) else ()


def part_as_one(group: GroupMerge) -> Contributor:
    """Return a group's merge as the owner merges it: like one contribution, with the tokens and steps of all.

    Its weight, tokens times batch size, is thus that of its members together. Its learner is its collector.
    """
    tokens, steps = (sum(c.tokens for c in group.contributors), sum(c.steps for c in group.contributors))
    return Contributor(LearnerId(group.collector), 0, tokens, 0, steps, (), group.payload)


def commit_id(header: CommitHeader) -> Digest:
    """Return a commit's id: the digest of its header."""
    return digest_of(_encoder.encode(header))


_encoder = msgspec.msgpack.Encoder()


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Liveness, round trips and a summary of heads.

    ``echo`` is the last sequence number that the sender has seen from the receiver, and ``echo_held_s`` its age. From
    these the receiver learns the round trip, and that it is heard.
    """

    sequence: Count
    echo: Count
    echo_held_s: Seconds
    phase: Phase
    is_participating: bool
    step: Count
    step_time_s: Seconds
    heads_mark: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Exclusive-or over the head ids of all shards: equal if the heads are."""
    weight: Annotated[float, Meta(ge=0.0, le=1e12)]
    """Requested share of ownership (upload budget); with 0 the sender owns only if no other peer may."""
    claims: Blocks = ()
    """Blocks of data that the learner has, or has trained and not seen merged; other peers leave them alone."""
    interval_s: Seconds = 0.0
    """Maximum time until the sender's next heartbeat; 0: the receiver's own interval."""
    hears: Annotated[bytes, Meta(max_length=MAX_HEARD_BYTES)] | None = None
    """Peers that the sender hears, as fingerprints (``connectivity``); None: unchanged."""


class Round(msgspec.Struct, frozen=True, array_like=True, tag="round"):
    """Contributions to ``fragment`` are due. ``heads`` are the announcer's heads of the fragment's shards."""

    fragment: Fragment
    step: Count
    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_SHARDS)]


class Contribution(msgspec.Struct, frozen=True, array_like=True, tag="contribution"):
    """One learner's outer gradient for one shard, or a group's merge of these, relative to ``base``.

    Without tokens it has no payload, and only says that the learner has nothing to contribute this time.
    """

    shard: Shard
    base: Head
    step: Count
    contributor: Contributor
    payload_bytes: Count
    group: GroupMerge | None = None
    """The group's merge that this is, instead of one learner's; ``contributor`` is then ``part_as_one`` of it."""

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        """The learners' contributions that this one holds: itself, or those in its group's merge."""
        return (self.contributor,) if self.group is None else self.group.contributors

    @property
    def givers(self) -> set[PeerId]:
        """Their learners' peers."""
        return {peer_of(c.learner) for c in self.contributors}

    @property
    def giver(self) -> PeerId:
        """The peer that made it: the learner's, or the group's collector."""
        return peer_of(self.contributor.learner)

    @property
    def payload(self) -> Digest:
        """Digest of the outer gradient; empty if there is none."""
        return Digest(self.contributor.payload.hex())


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The owner does not merge this contribution. ``head`` is the owner's head."""

    shard: Shard
    base: Hex
    reason: Text
    head: Head


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """A shard's new version, with its payload."""

    header: CommitHeader
    entry: Peer | None = None
    """The peer at which another group's commit came into the receiver's group; None: the receiver, or it was asked for.
    """


class HeadsRequest(msgspec.Struct, frozen=True, array_like=True, tag="heads?"):
    """Request for all of the receiver's heads."""


class Heads(msgspec.Struct, frozen=True, array_like=True, tag="heads"):
    """All heads of the sender."""

    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_SHARDS)]
    step: Count


class CommitsRequest(msgspec.Struct, frozen=True, array_like=True, tag="commits?"):
    """Request for the commits after ``head``; if the receiver cannot send them, it answers ``FetchAdvised``."""

    shard: Shard
    head: Hex


class FetchAdvised(msgspec.Struct, frozen=True, array_like=True, tag="fetch!"):
    """Answer to ``CommitsRequest``: the requested head is not in the sender's log, so fetch the shard's state."""

    shard: Shard
    head: Head


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Goodbye: the sender leaves the run in order, effective immediately."""

    reason: Text


class Evaluation(msgspec.Struct, frozen=True, array_like=True, tag="evaluation"):
    """Held-out loss of the global model, measured by the sender."""

    version: Count
    tokens: Count
    step: Count
    loss: Annotated[float, Meta(ge=0.0, le=MOST_LOSS)]


class AbandonVote(msgspec.Struct, frozen=True, array_like=True, tag="abandon"):
    """The sender's vote to go on without these commits, after which the held-out loss has jumped."""

    commits: Annotated[tuple[Hex, ...], Meta(max_length=MAX_ABANDONED)]


class Equivocation(msgspec.Struct, frozen=True, array_like=True, tag="equivocation"):
    """Two commits that one owner signed on one parent, with its signatures. Every peer can check them."""

    first: CommitHeader
    second: CommitHeader
    first_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
    second_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]

    @property
    def owner(self) -> PeerId:
        """The peer that signed both commits."""
        return self.first.owner

    @property
    def shard(self) -> ShardId:
        """The shard of both commits."""
        return self.first.shard

    @property
    def version(self) -> int:
        """The version of both commits."""
        return self.first.version

    @property
    def is_one(self) -> bool:
        """True if the two commits conflict. The signatures are not checked here."""
        a, b = self.first, self.second
        return (a.owner, a.shard, a.parent) == (b.owner, b.shard, b.parent) and commit_id(a) != commit_id(b)


class WrongMerge(msgspec.Struct, frozen=True, array_like=True, tag="wrong-merge"):
    """A commit, with its owner's signature, whose values are not the merge of the contributions that it names, or that
    names a contribution which was not made.

    The sender has the payloads. A receiver believes nothing before it has checked all signatures, and has made the
    merge again.
    """

    header: CommitHeader
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
    part: Annotated[int, Meta(ge=-1, lt=MAX_PARTS)] = -1
    """Which group's merge is wrong; -1: the commit's own."""

    def __post_init__(self) -> None:
        """Check that there is such a part.

        Raises:
            ValueError: there is not.
        """
        if self.part >= len(self.header.parts):
            raise ValueError(f"its commit has no part {self.part}")

    @property
    def owner(self) -> PeerId:
        """The peer that signed the wrong merge: the commit's owner, or the group's collector."""
        return self.header.owner if self.part < 0 else self.header.parts[self.part].collector

    @property
    def shard(self) -> ShardId:
        """The commit's shard."""
        return self.header.shard

    @property
    def version(self) -> int:
        """The commit's version."""
        return self.header.version


Proof = Equivocation | WrongMerge
"""Proofs against an owner."""


Message = (
    Heartbeat
    | Round
    | Contribution
    | Refused
    | Commit
    | HeadsRequest
    | Heads
    | CommitsRequest
    | FetchAdvised
    | Leaving
    | Evaluation
    | AbandonVote
    | Equivocation
    | WrongMerge
)


# -- Signed statements, as bytes. Keys are in ``peer/signatures.py`` ---------------------------------------------------
# The holder of the keys signs and verifies. To the machine a signature is a value that only its peer can make.
#
# Rules of this file:
# 1. A statement begins with its kind and names the run, so it cannot be reused as another kind or in another run.
# 2. A head id is a digest of everything that led to it, so naming a head names its shard's whole chain.


_CONTRIBUTION = "p2pdiloco contribution"
_GROUP = "p2pdiloco group merge"
_COMMIT = b"p2pdiloco commit\0"


def signed_contribution_bytes(run: RunId, shard: ShardId, base: Digest, c: Contributor) -> bytes:
    """Return the statement that a learner's peer signs: this range and payload, on this head, in this run."""
    given = (c.learner, c.tokens_from, c.tokens_to, c.steps_from, c.steps_to, c.blocks, c.payload)
    return _encoder.encode((_CONTRIBUTION, run, shard, base, given))


def signed_group_bytes(run: RunId, shard: ShardId, base: Digest, group: GroupMerge) -> bytes:
    """Return the statement that a collector signs: these contributions, merged to this payload, on this head."""
    made = (group.collector, group.contributors, group.factors, group.payload)
    return _encoder.encode((_GROUP, run, shard, base, made))


def signed_commit_bytes(commit_id: Digest) -> bytes:
    """Return the statement that an owner signs: its header's id. The chain of parents leads from there to the run."""
    return _COMMIT + commit_id.encode()
