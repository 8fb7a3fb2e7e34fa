"""Peer ids of libp2p: conversion between an Ed25519 public key and its text form.

The peer id is the multihash "identity" of the libp2p public key, so the public key can be read from the id itself.
https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import base58

from p2pdiloco.protocol.ids import PeerId

KEY_BYTES = 32
Sign = Callable[[bytes], bytes]
"""Returns a signature made with a peer's key."""
Verify = Callable[[PeerId, bytes, bytes], bool]
"""Returns whether a peer has signed data: peer, data, signature."""
ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"
"""Multihash "identity" with 36 bytes, then protobuf: key type Ed25519, then 32 bytes of data."""
ID_TEXT_LIMIT = 64
"""Maximum characters; an Ed25519 peer id has 52. Longer text is refused before base58, whose cost is quadratic."""


@lru_cache(maxsize=4096)
def peer_id_of(public_key: bytes) -> PeerId:
    """Return the peer id (``12D3KooW...``) of 32 bytes of public key."""
    assert len(public_key) == KEY_BYTES
    return PeerId(base58.b58encode(ID_PREFIX + public_key).decode("ascii"))


@lru_cache(maxsize=4096)
def key_of(peer: PeerId) -> bytes:
    """Return the 32 bytes of public key in ``peer``.

    Raises:
        ValueError: ``peer`` is not the id of an Ed25519 key.
    """
    if len(peer) > ID_TEXT_LIMIT:
        raise ValueError("a peer id has at most 64 characters")
    raw: bytes = base58.b58decode(peer)
    if len(raw) != len(ID_PREFIX) + KEY_BYTES or not raw.startswith(ID_PREFIX):
        raise ValueError(f"{peer!r} is not the peer id of an Ed25519 key (12D3KooW...)")
    return raw[len(ID_PREFIX) :]


def is_key(peer: PeerId) -> bool:
    """Return whether ``peer`` is the id of an Ed25519 key."""
    try:
        key_of(peer)
    except ValueError:
        return False
    return True
