"""Messages between peers: frozen, checked on decoding, with a bound on every size.

A message is a small control body. Two of them travel with a payload (compressed outer gradients), which the machine
knows only by its digest: ``Contribution`` and ``Commit``. Whoever drives the machine keeps payloads and attaches them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, FragmentId, LearnerId, PeerId, RunId, ShardId, digest_of

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
MAX_KNOWN = 256
MOST_LOSS = 1e6
"""Nats a token."""
MAX_HEARD_BYTES = 4096
"""Fingerprints of 1,024 peers."""

Phase = Literal["joining", "training", "following", "finished", "leaving"]


class Contributor(msgspec.Struct, frozen=True, array_like=True):
    """The half-open range of one learner's own tokens (and inner steps) that a contribution or commit merges."""

    learner: Learner
    tokens_from: Count
    tokens_to: Count
    steps_from: Count
    steps_to: Count
    blocks: Blocks = ()
    """Blocks of data whose last token is in the range, sorted; of shard 0 alone."""
    payload: Annotated[bytes, Meta(max_length=DIGEST_BYTES)] = b""
    """The digest of the outer gradient, as bytes; empty: there is none, the learner has nothing to give."""
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)] = b""
    """Of the learner's peer, over ``signed_contribution_bytes``: all of this, the run, and the head it is relative
    to."""

    @property
    def tokens(self) -> int:
        """Tokens in the range."""
        return self.tokens_to - self.tokens_from

    @property
    def steps(self) -> int:
        """Inner steps in the range."""
        return self.steps_to - self.steps_from


class Head(msgspec.Struct, frozen=True, array_like=True):
    """A shard's latest commit at a peer: which one, and how heavy its chain is."""

    shard: Shard
    version: Count
    id: Hex
    tokens: Count
    """Cumulative tokens of the chain, as far as they count."""


class CommitHeader(msgspec.Struct, frozen=True, array_like=True):
    """The merged update that takes a shard from ``version - 1`` to ``version``, without its payload."""

    shard: Shard
    version: Count
    parent: Hex
    step: Count
    """Global step of the turn."""
    owner: Peer
    contributors: Annotated[tuple[Contributor, ...], Meta(max_length=MAX_CONTRIBUTORS)]
    """Sorted by learner."""
    tokens: Count
    """Cumulative, this commit's contributors included, as far as their tokens count (``counted_tokens``)."""
    payload: Hex
    result: Hex
    """Digest of the shard's global parameters and outer momentum after this commit."""
    record: Hex
    """Digest of what the chain counts after this commit: marks, trained blocks, norm bound (``Chain.record_after``)."""
    length: Annotated[float, Meta(ge=0.0, le=1e38)] = 0.0
    """Of the merged outer gradient (Euclidean norm), or more."""
    counts: TokenCounts = NOTHING_COUNTED
    """What the shard's chain knows of its contributions' tokens, after this commit."""
    factors: Annotated[tuple[Percent, ...], Meta(max_length=MAX_CONTRIBUTORS)] = ()
    """How much of each contribution's weight counted, in per cent: less where most others disagree with it. Empty: all
    of all."""

    @property
    def steps(self) -> int:
        """Inner steps of the learner that gave most of them."""
        return max((c.steps for c in self.contributors), default=0)


def commit_id(header: CommitHeader) -> Digest:
    """Return a commit's id, the digest of its header."""
    return digest_of(_encoder.encode(header))


_encoder = msgspec.msgpack.Encoder()


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Liveness, round trips and a summary of heads. ``echo`` is the receiver's last sequence number that the sender
    saw, ``echo_held_s`` how long ago, so that the receiver learns the round trip and that it is heard."""

    sequence: Count
    echo: Count
    echo_held_s: Seconds
    phase: Phase
    is_participating: bool
    step: Count
    step_time_s: Seconds
    heads_mark: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Exclusive-or over all shards' head ids: equal when heads are."""
    weight: Annotated[float, Meta(ge=0.0, le=1e12)]
    """Share of ownership asked for (upload budget); with 0 it owns only if nobody else may."""
    claims: Blocks = ()
    """Blocks of data in the learner's hands, or trained and not merged yet: others leave them alone."""
    interval_s: Seconds = 0.0
    """How long the sender may take until its next heartbeat; 0: as long as the receiver itself."""
    hears: Annotated[bytes, Meta(max_length=MAX_HEARD_BYTES)] | None = None
    """Whom the sender hears, as fingerprints (``connectivity``); None: as it said last."""


class Turn(msgspec.Struct, frozen=True, array_like=True, tag="turn"):
    """Fragment ``fragment``'s contributions are due; ``heads`` are the announcer's, for the fragment's shards."""

    fragment: Fragment
    step: Count
    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_SHARDS)]


class Contribution(msgspec.Struct, frozen=True, array_like=True, tag="contribution"):
    """One learner's outer gradient for one shard, relative to ``base``. With no tokens it has no payload and says only
    that its learner has nothing to give this time."""

    shard: Shard
    base: Head
    step: Count
    contributor: Contributor
    payload_bytes: Count

    @property
    def payload(self) -> Digest:
        """Digest of the outer gradient; empty if there is none."""
        return Digest(self.contributor.payload.hex())


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The owner does not merge this contribution; its newest commit follows where that helps."""

    shard: Shard
    base: Hex
    reason: Text
    head: Head


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """A shard's new version, with its payload."""

    header: CommitHeader


class HeadsRequest(msgspec.Struct, frozen=True, array_like=True, tag="heads?"):
    """Tell me your heads."""


class Heads(msgspec.Struct, frozen=True, array_like=True, tag="heads"):
    """All of the sender's heads."""

    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_SHARDS)]
    step: Count


class CommitsRequest(msgspec.Struct, frozen=True, array_like=True, tag="commits?"):
    """Send me the commits after my head, or say that I must fetch the state."""

    shard: Shard
    head: Hex


class FetchAdvised(msgspec.Struct, frozen=True, array_like=True, tag="fetch!"):
    """Answer to ``CommitsRequest``: your head is not in my log, so fetch the shard's state."""

    shard: Shard
    head: Head


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The sender is gone from now on, in order."""

    reason: Text


class Evaluation(msgspec.Struct, frozen=True, array_like=True, tag="evaluation"):
    """Held-out loss of the global model, measured by the sender."""

    version: Count
    tokens: Count
    step: Count
    loss: Annotated[float, Meta(ge=0.0, le=MOST_LOSS)]


class Equivocation(msgspec.Struct, frozen=True, array_like=True, tag="equivocation"):
    """Two commits that one owner signed on one parent, with its signatures: whoever has them can check them."""

    first: CommitHeader
    second: CommitHeader
    first_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]
    second_signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]

    @property
    def owner(self) -> PeerId:
        """The owner that signed both commits."""
        return self.first.owner

    @property
    def is_one(self) -> bool:
        """Whether these commits exclude each other, whoever signed them."""
        a, b = self.first, self.second
        return (a.owner, a.shard, a.parent) == (b.owner, b.shard, b.parent) and commit_id(a) != commit_id(b)


Message = (
    Heartbeat
    | Turn
    | Contribution
    | Refused
    | Commit
    | HeadsRequest
    | Heads
    | CommitsRequest
    | FetchAdvised
    | Leaving
    | Evaluation
    | Equivocation
)


# -- What peers sign, as bytes. Keys are in ``peer/signatures.py`` -----------------------------------------------------
# Whoever holds the keys signs and verifies. In the machine a signature is a value that only its peer can make.
#
# Rules of this file:
# 1. A statement begins with what kind it is and names the run: none can be taken for another's, or for another run's.
# 2. Head ids are digests of all that led to them, so naming a head names its shard's whole chain.


_CONTRIBUTION = "p2pdiloco contribution"
_COMMIT = b"p2pdiloco commit\0"


def signed_contribution_bytes(run: RunId, shard: ShardId, base: Digest, c: Contributor) -> bytes:
    """What a learner's peer signs: this range of tokens, steps and blocks, with this payload, on this head."""
    given = (c.learner, c.tokens_from, c.tokens_to, c.steps_from, c.steps_to, c.blocks, c.payload)
    return _encoder.encode((_CONTRIBUTION, run, shard, base, given))


def signed_commit_bytes(commit_id: Digest) -> bytes:
    """What an owner signs: its header's digest, which leads to the run by the parents."""
    return _COMMIT + commit_id.encode()
