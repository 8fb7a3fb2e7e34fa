"""Control bodies between peers: protocol messages, and requests outside the protocol (manifest, state, status).

Rules of this file:
1. Every body decodes into typed, bounded structs or raises ValueError, also if it is nested too deeply. Floats must be
   finite.
2. A commit travels with its owner's signature (64 bytes), the digests of the new state's chunks (20 bytes each) and the
   compressed outer gradient, one after the other.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import Name
from p2pdiloco.protocol.messages import (
    SIGNATURE_BYTES,
    Commit,
    CommitHeader,
    Count,
    Evaluation,
    Heartbeat,
    Hex,
    Message,
    Shard,
)

MARKS_LIMIT = 1 << 18
TROUBLE_LIMIT = 500
MAX_LINEAGE = 256
LINEAGE_BYTES = 1 << 18
"""Maximum size of a state's lineage; of a longer one only the newest commits are sent."""
COMMIT_BYTES = 480 << 10
"""Maximum size of a commit without its payload. Two of them are a proof against their owner, which has to fit into a
message, and one comes with a state's offer."""


class GetManifest(msgspec.Struct, frozen=True, array_like=True, tag="manifest?"):
    """Request for the manifest. Its canonical bytes come back as payload."""


class GetState(msgspec.Struct, frozen=True, array_like=True, tag="state?"):
    """Request for a shard's ``StateOffer``. The peer keeps the offered state available for a while."""

    shard: Shard


class GetChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk?"):
    """Request for one chunk of the shard's state at ``head``. The answer's body is empty.

    Its payload is the chunk's parameters, then its momentum, as in its digest (``codec/digests.py``).
    """

    shard: Shard
    head: Hex
    chunk: Annotated[int, Meta(ge=0, lt=1 << 20)]


class GetPayload(msgspec.Struct, frozen=True, array_like=True, tag="payload?"):
    """Request for a payload by which the merge of a commit can be made again: its own, or one of a contribution that it
    names. It comes as payload."""

    shard: Shard
    commit: Hex
    payload: Hex


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag="status?"):
    """Request for a ``PeerStatus``."""


class GetStatements(msgspec.Struct, frozen=True, array_like=True, tag="members?"):
    """Request for statements of members (``access/membership_log.py``) not among ``marks``; they come as payload."""

    marks: Annotated[bytes, Meta(max_length=MARKS_LIMIT)]


class TellStatements(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """News of members. The answer is empty."""

    statements: Annotated[bytes, Meta(max_length=1 << 19)]


Request = GetManifest | GetState | GetChunk | GetPayload | GetStatus | GetStatements | TellStatements


class SignedCommit(msgspec.Struct, frozen=True, array_like=True):
    """A commit without its payload, with its owner's signature."""

    header: CommitHeader
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


class StateProof(msgspec.Struct, frozen=True, array_like=True):
    """A shard's state at one head, with the signed commit that leads to it (None at version 0)."""

    state: ShardState
    header: CommitHeader | None
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


class StateOffer(msgspec.Struct, frozen=True, array_like=True):
    """Offer of a shard's state, with the digests that verify each chunk."""

    proof: StateProof
    digests: Annotated[bytes, Meta(max_length=1 << 19)]
    """Digest list of the state (``codec/digests.py``); the proof covers its digest."""
    lineage: Annotated[tuple[SignedCommit, ...], Meta(max_length=MAX_LINEAGE)] = ()
    """Commits before the proof's, oldest first, as far as the donor's log reaches."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's report of itself and of its view of the run."""

    run: RunId
    name: Name
    peer: Annotated[str, Meta(max_length=128)]
    phase: Annotated[str, Meta(max_length=32)]
    step: Count
    total_steps: Count
    known: Count
    live: Count
    participating: Count
    weight_averaged: Count
    version_min: Count
    version_max: Count
    heads_mark: int
    tokens_trained: Count
    tokens_merged: Count
    tokens_per_second: float
    train_loss: float | None
    held_out_loss: float | None
    held_out_step: Count
    bytes_up: Count
    bytes_down: Count
    blocked_s: float
    """The part of ``overhead_s`` in which the learner waited for the network. Must be 0."""
    compute_s: float = 0.0
    """Time of the learner in steps, since the node started."""
    overhead_s: float = 0.0
    """Time of the learner between steps: copies, evaluations, saves, messages, waiting."""
    node_cpu_s: float = 0.0
    """CPU time of the node since the learner's first step."""
    epochs: float = 0.0
    """Epochs of the run's data that were trained and merged; 0 if it has no blocks."""
    blocks_repeated: Annotated[float, Meta(ge=0.0)] = 0.0
    """Repeated blocks of data, as a share of the trained ones."""
    trouble: Annotated[str, Meta(max_length=TROUBLE_LIMIT)] = ""
    """Reason why this peer's learner cannot contribute; empty if it can."""
    first_batches: Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=4)] = ()
    """Digests of the first batches of a training script, so that peers notice if theirs are the same."""
    reward: float | None = None
    """Latest reward that the script has reported, in reinforcement learning."""
    connected: Count = 0
    """Number of live peers that it is connected to: of a large run, not all."""


class CommitParts(NamedTuple):
    """The parts that travel with a commit."""

    signature: bytes
    digests: bytes
    """Digest list of the new state (``codec/digests.py``); its digest is the commit's ``result``."""
    gradient: bytes | memoryview
    """The commit's ``payload``."""


def join_commit(parts: CommitParts) -> bytes:
    """Concatenate the parts as they travel."""
    return b"".join(parts)


def split_commit(data: memoryview, list_bytes: int) -> CommitParts:
    """Split the data of a commit for a shard whose digest list has ``list_bytes``.

    Raises:
        ValueError: ``data`` is too short.
    """
    begin = SIGNATURE_BYTES + list_bytes
    if len(data) < begin:
        raise ValueError(f"a commit came with {len(data)} bytes; its signature and digests alone need {begin}")
    return CommitParts(bytes(data[:SIGNATURE_BYTES]), bytes(data[SIGNATURE_BYTES:begin]), bytes(data[begin:]))


_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
T = TypeVar("T")


def encode(value: object) -> bytes:
    """Encode one of this module's structs, or a protocol message, as MessagePack."""
    return _encoder.encode(value)


def decode_message(body: bytes) -> Message:
    """Decode a protocol message.

    Raises:
        ValueError: ``body`` is malformed, out of bounds, or contains a number that is not finite.
    """
    message = _decoded(_messages, body)
    if isinstance(message, Commit) and len(body) > COMMIT_BYTES:
        raise ValueError(f"a commit of {len(body)} bytes; the maximum is {COMMIT_BYTES}")
    if isinstance(message, Heartbeat):
        floats = (message.echo_held_s, message.step_time_s, message.weight)
    elif isinstance(message, Evaluation):
        floats = (message.loss, 0.0, 0.0)
    else:
        return message
    if not all(map(math.isfinite, floats)):
        raise ValueError("a number is not finite")
    return message


def decode_request(body: bytes) -> Request:
    """Decode a request. Raises ValueError if it is malformed."""
    return _decoded(_requests, body)


def decode_as(body: bytes, kind: type[T]) -> T:
    """Decode an answer of a known kind. Raises ValueError if it is malformed."""
    return _decoded(msgspec.msgpack.Decoder(kind), body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ValueError("nested too deeply") from None
