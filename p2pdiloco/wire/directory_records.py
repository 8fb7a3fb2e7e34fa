"""Signed records of the directory: publisher, topic, expiry, and content.

A stored value is a 64-byte signature and a MessagePack envelope. The signature covers a context string and the
envelope. The envelope names its topic and its expiry. So a record can neither be forged, nor moved to another topic,
nor kept alive by others.

Rules of this file:
1. The module handles bytes only; keys and the clock come from outside.
2. A reader returns the envelope or None, and never fails: a bad record is its publisher's fault.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.protocol.ids import PeerId, RunId, digest_of
from p2pdiloco.protocol.manifest import Name
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.wire.peer_ids import Sign, Verify

CONTEXT = b"p2pdiloco record 1\x00"
RECORD_LIMIT = 16 << 10
"""Maximum bytes of a stored value. All records under one key must stay below 1 MiB together."""
BODY_LIMIT = RECORD_LIMIT - 4096
CHAIN_LIMIT = 760
"""Maximum bytes of a member's certificates (``access/certificates.py`` has the same number)."""
TTL_LIMIT_S = 24 * 3600.0
CLOCK_SKEW_S = 10.0

RUNS_TOPIC = "p2pdiloco/runs"
POINTS_TOPIC = "p2pdiloco/points"
"""Topic of rendezvous servers that take part in no run (nat/messages.py)."""
PEERS_CONTEXT = b"p2pdiloco topic 1\x00"


class Envelope(Struct, frozen=True, kw_only=True):
    """The signed part of a record."""

    topic: Annotated[str, Meta(max_length=128)]
    name: Annotated[str, Meta(max_length=128)]
    """Name of the record among the publisher's under this topic: "" for a peer, the run's id for a run."""
    peer: Annotated[str, Meta(min_length=1, max_length=64)]
    """Publisher."""
    expires_s: Annotated[float, Meta(gt=0.0, le=1e11)]
    """Expiry, in seconds since 1970."""
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)]
    """Multiaddrs at which the publisher's own directory node listens."""
    is_withdrawn: bool = False
    body: Annotated[bytes, Meta(max_length=BODY_LIMIT)] = b""


RELAYS = 128
"""Maximum number of pairs that one peer relays."""


class RunRecord(Struct, frozen=True):
    """Directory record of a run."""

    name: Name
    parameters: Annotated[int, Meta(ge=1, le=2**48)]


class PointRecord(Struct, frozen=True):
    """Directory record of a rendezvous server."""

    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=8)]


class PeerRecord(Struct, frozen=True):
    """Directory record of a peer."""

    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=16)]
    life: Annotated[str, Meta(max_length=64)] = ""
    """Random id of the process that published it, from its transport."""
    began_s: float = 0.0
    """Start of that process, by the directory's clock."""
    chain: Annotated[bytes, Meta(max_length=CHAIN_LIMIT)] = b""
    """Certificate chain of the peer."""
    seen: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=4)] = ()
    """Hosts that other peers see as this peer's address."""
    points: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=4)] = ()
    """Rendezvous servers through which the peer can be reached."""
    is_point: bool = False
    """Whether the peer can be dialled, so that it can serve as a rendezvous server."""
    room: Annotated[int, Meta(ge=0, le=RELAYS)] = 0
    """Number of pairs for which it can relay."""


def peers_topic(run: RunId, group: str = "") -> str:
    """Return the topic under which the peers of ``run`` publish, or those of a group of it.

    The topic does not reveal the run's id to the nodes that store it. Only members know the id of a private run, so
    strangers can neither find its topic nor fill it.
    """
    return f"p2pdiloco/peers/{digest_of(PEERS_CONTEXT, run.encode(), group.encode())}"


def subkey_of(envelope: Envelope) -> str:
    """Return the key of an envelope below its topic: each publisher has its own."""
    return f"{envelope.name}/{envelope.peer}"


def seal(envelope: Envelope, sign: Sign) -> bytes:
    """Sign and encode ``envelope`` for the directory.

    Raises:
        ValueError: the value has more than RECORD_LIMIT bytes.
    """
    data = msgspec.msgpack.encode(envelope)
    if SIGNATURE_BYTES + len(data) > RECORD_LIMIT:
        raise ValueError(f"the record has {SIGNATURE_BYTES + len(data)} bytes; the limit is {RECORD_LIMIT}")
    return sign(CONTEXT + data) + data


def unseal(value: bytes, verify: Verify) -> Envelope | None:
    """Decode and verify ``value``; return None if it is malformed or not signed by its publisher."""
    if not SIGNATURE_BYTES < len(value) <= RECORD_LIMIT:
        return None
    signature, data = value[:SIGNATURE_BYTES], value[SIGNATURE_BYTES:]
    try:
        envelope = msgspec.msgpack.decode(data, type=Envelope)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return envelope if verify(PeerId(envelope.peer), CONTEXT + data, signature) else None
