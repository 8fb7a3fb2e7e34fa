"""Integrity of the state in memory: chunks that count as verified, and a changed bit."""

from __future__ import annotations

import pytest
import torch

from p2pdiloco.codec.digests import digest_list
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.peer.integrity import Integrity, SpoiltStateError
from p2pdiloco.protocol.ids import ShardId

SHARD = ShardId(1)
ELEMENTS = CHUNK + 1000


def state(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(ELEMENTS, generator=drawn), torch.zeros(ELEMENTS)


def verify_all(integrity: Integrity, theta: torch.Tensor, momentum: torch.Tensor) -> None:
    for chunk in integrity.unverified(SHARD):
        here = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        integrity.verify(SHARD, chunk, theta[here], momentum[here])


def test_a_chunk_is_verified_once_and_again_for_a_new_state_or_when_told() -> None:
    integrity = Integrity([1, 2])
    assert not integrity.unverified(SHARD), "there is no state yet"
    for seed in range(2):
        integrity.set_digests(SHARD, digest_list(*state(seed)))
        assert integrity.unverified(SHARD) == [0, 1]
        assert not integrity.is_verified(SHARD, 0)
        verify_all(integrity, *state(seed))
        assert not integrity.unverified(SHARD)
        assert integrity.is_verified(SHARD, 0)
    integrity.invalidate()
    assert integrity.unverified(SHARD) == [0, 1]


def test_a_changed_bit_spoils_the_shard_until_it_has_a_new_state_or_is_accepted() -> None:
    theta, momentum = state(0)
    integrity = Integrity([1, 2])
    integrity.set_digests(SHARD, digest_list(theta, momentum))
    theta[-1] += 1.0
    with pytest.raises(SpoiltStateError, match="chunk 1 of shard 1"):
        verify_all(integrity, theta, momentum)
    assert integrity.is_spoilt(SHARD)
    assert not integrity.unverified(SHARD)
    assert not integrity.is_verified(SHARD, 1)
    integrity.accept(SHARD, digest_list(theta, momentum))
    assert integrity.is_unsigned(SHARD)
    assert not integrity.is_spoilt(SHARD)
    verify_all(integrity, theta, momentum)
    integrity.set_digests(SHARD, digest_list(theta, momentum))
    assert not integrity.is_unsigned(SHARD)
    assert integrity.unverified(SHARD) == [0, 1]
