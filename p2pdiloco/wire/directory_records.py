"""Records in the directory: who says what about which topic, until when; signed.

A stored value is a 64-byte signature and a MessagePack envelope. The signature covers a context string and the
envelope, and the envelope names its topic and its expiry, so a record can be neither forged, nor moved to another
topic, nor kept alive by others.

Rules of this file:
1. Bytes only; the keys and the clock come from outside.
2. A reader gives back the envelope or None: a bad record is the peer's fault and never ours to fail on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.protocol.ids import PeerId, RunId, digest_of
from p2pdiloco.protocol.manifest import Name

CONTEXT = b"p2pdiloco record 1\x00"
SIGNATURE_BYTES = 64
RECORD_LIMIT = 16 << 10
"""Bytes of a stored value. All records under one key must stay below 1 MiB together (docs: measured)."""
BODY_LIMIT = RECORD_LIMIT - 4096
CHAIN_LIMIT = 746
"""Bytes of a member's certificates (``access/certificates.py`` has the same number)."""
TTL_LIMIT_S = 24 * 3600.0
CLOCK_SKEW_S = 10.0

RUNS_TOPIC = "p2pdiloco/runs"
POINTS_TOPIC = "p2pdiloco/points"
"""Meeting points that take part in no run (nat/messages.py)."""
PEERS_CONTEXT = b"p2pdiloco topic 1\x00"

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]


class Envelope(Struct, frozen=True, kw_only=True):
    """What is signed."""

    topic: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=128)]
    """Which of the publisher's records under this topic: "" for a peer's, the run's id for a run's."""
    peer: Annotated[str, Meta(min_length=1, max_length=64)]
    """The publisher."""
    expires_s: Annotated[float, Meta(gt=0.0, le=1e11)]
    """Seconds since 1970."""
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)]
    """Where the publisher's own directory listens."""
    is_withdrawn: bool = False
    body: Annotated[bytes, Meta(max_length=BODY_LIMIT)] = b""


class RunRecord(Struct, frozen=True):
    """What the directory says of a run."""

    name: Name
    parameters: Annotated[int, Meta(ge=1, le=2**48)]


class PointRecord(Struct, frozen=True):
    """Where a meeting point is."""

    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)]


class PeerRecord(Struct, frozen=True):
    """What a peer publishes of itself."""

    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=16)]
    life: Annotated[str, Meta(max_length=64)] = ""
    """Of the process that published it (a transport's)."""
    began_s: float = 0.0
    """When that process began, by the directory's clock."""
    chain: Annotated[bytes, Meta(max_length=CHAIN_LIMIT)] = b""
    """Its certificates."""
    seen: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=4)] = ()
    """The hosts as which others see it."""
    points: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=4)] = ()
    """Where it can be met."""
    is_point: bool = False
    """Others have dialled it: peers can meet there."""


def peers_topic(run: RunId) -> str:
    """The topic under which the peers of ``run`` publish. It does not tell the run's id to those who store it: that of
    a private run only members know, so strangers neither find its topic nor fill it."""
    return f"p2pdiloco/peers/{digest_of(PEERS_CONTEXT, run.encode())}"


def subkey_of(envelope: Envelope) -> str:
    """Where an envelope is stored below its topic: each publisher has its own place."""
    return f"{envelope.name}/{envelope.peer}"


def seal(envelope: Envelope, sign: Sign) -> bytes:
    """The value to store.

    Raises:
        ValueError: it has more than RECORD_LIMIT bytes.
    """
    data = msgspec.msgpack.encode(envelope)
    if SIGNATURE_BYTES + len(data) > RECORD_LIMIT:
        raise ValueError(f"a record of {SIGNATURE_BYTES + len(data)} bytes; the limit is {RECORD_LIMIT}")
    return sign(CONTEXT + data) + data


def unseal(value: bytes, verify: Verify) -> Envelope | None:
    """The envelope in ``value``; None if it is malformed or the signature is not its publisher's."""
    if not SIGNATURE_BYTES < len(value) <= RECORD_LIMIT:
        return None
    signature, data = value[:SIGNATURE_BYTES], value[SIGNATURE_BYTES:]
    try:
        envelope = msgspec.msgpack.decode(data, type=Envelope)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return envelope if verify(PeerId(envelope.peer), CONTEXT + data, signature) else None
