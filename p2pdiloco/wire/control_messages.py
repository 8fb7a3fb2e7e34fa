"""Control bodies between peers: the protocol's messages, and the requests outside it (manifest, state, status).

Rules of this file:
1. Everything decodes into typed, bounded structs or raises ValueError, nested too deep or not; floats must be finite.
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
"""Of a state's lineage; of a longer one the newest commits travel."""


class GetManifest(msgspec.Struct, frozen=True, array_like=True, tag="manifest?"):
    """Answer: the manifest's canonical bytes as payload."""


class GetState(msgspec.Struct, frozen=True, array_like=True, tag="state?"):
    """Answer: ``StateOffer``. The state at that head can be had from this peer for a while, also when it moves on."""

    shard: Shard


class GetChunk(msgspec.Struct, frozen=True, array_like=True, tag="chunk?"):
    """Answer: nothing, with one chunk of the shard's state at ``head`` as payload: its global parameters, then its
    momentum, as its digest is made of them (``codec/digests.py``)."""

    shard: Shard
    head: Hex
    chunk: Annotated[int, Meta(ge=0, lt=1 << 20)]


class GetStatus(msgspec.Struct, frozen=True, array_like=True, tag="status?"):
    """Answer: ``PeerStatus``."""


class GetStatements(msgspec.Struct, frozen=True, array_like=True, tag="members?"):
    """Answer: statements of members (``access/membership_log.py``) that are not among ``marks``, as payload."""

    marks: Annotated[bytes, Meta(max_length=MARKS_LIMIT)]


class TellStatements(msgspec.Struct, frozen=True, array_like=True, tag="members"):
    """News of members. Answer: nothing."""

    statements: Annotated[bytes, Meta(max_length=1 << 19)]


Request = GetManifest | GetState | GetChunk | GetStatus | GetStatements | TellStatements


class SignedCommit(msgspec.Struct, frozen=True, array_like=True):
    """A commit without its payload."""

    header: CommitHeader
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


class StateProof(msgspec.Struct, frozen=True, array_like=True):
    """A shard's state at one head, with the commit that its owner signed (none at version 0)."""

    state: ShardState
    header: CommitHeader | None
    signature: Annotated[bytes, Meta(max_length=SIGNATURE_BYTES)]


class StateOffer(msgspec.Struct, frozen=True, array_like=True):
    """What a peer has of a shard, and how each chunk of it is checked."""

    proof: StateProof
    digests: Annotated[bytes, Meta(max_length=1 << 19)]
    """``tensors.digests``'s list, whose digest the proof proves."""
    lineage: Annotated[tuple[SignedCommit, ...], Meta(max_length=MAX_LINEAGE)] = ()
    """The commits before the proof's, oldest first, as far as the donor's log reaches."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer tells of itself and its view of the run."""

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
    epochs: float = 0.0
    """Of the run's data, trained and merged; 0 if it has no blocks."""
    blocks_repeated: Annotated[float, Meta(ge=0.0)] = 0.0
    """Blocks of data that were trained again, as a share of those trained."""
    trouble: Annotated[str, Meta(max_length=TROUBLE_LIMIT)] = ""
    """Why nothing that this peer's learner trains can be merged; empty: it can."""
    first_batches: Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=4)] = ()
    """Digests of the first batches that a training script has trained, so that others see if theirs are the same."""


class CommitParts(NamedTuple):
    """What travels with a commit."""

    signature: bytes
    digests: bytes
    """``tensors.digests``'s list, whose digest is the commit's ``result``."""
    gradient: bytes | memoryview
    """The commit's ``payload``."""


def join_commit(parts: CommitParts) -> bytes:
    """As it travels."""
    return b"".join(parts)


def split_commit(data: memoryview, list_bytes: int) -> CommitParts:
    """The parts of what came with a commit, of whose shard the list of digests has ``list_bytes``.

    Raises:
        ValueError: it is too short.
    """
    begin = SIGNATURE_BYTES + list_bytes
    if len(data) < begin:
        raise ValueError(f"{len(data)} bytes came with a commit; its signature and digests alone have {begin}")
    return CommitParts(bytes(data[:SIGNATURE_BYTES]), bytes(data[SIGNATURE_BYTES:begin]), bytes(data[begin:]))


_encoder = msgspec.msgpack.Encoder()
_messages: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
T = TypeVar("T")


def encode(value: object) -> bytes:
    """Any of this module's structs, or a protocol message, as MessagePack."""
    return _encoder.encode(value)


def decode_message(body: bytes) -> Message:
    """A protocol message.

    Raises:
        ValueError: malformed, out of bounds, or not finite.
    """
    message = _decoded(_messages, body)
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
    """A request. Raises ValueError if malformed."""
    return _decoded(_requests, body)


def decode_as(body: bytes, kind: type[T]) -> T:
    """An answer of a known kind. Raises ValueError if malformed."""
    return _decoded(msgspec.msgpack.Decoder(kind), body)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except RecursionError:
        raise ValueError("nested too deep") from None
