"""A state's digest: a list of its chunks' digests, of which each version's taker checks some."""

import random

import numpy as np
import pytest
import torch

from p2pdiloco.codec.digests import CYCLE, chunk_digest, digest_list, is_chunk, list_bytes, sample, state_digest
from p2pdiloco.codec.formats import CHUNK
from p2pdiloco.protocol.ids import digest_of


def test_a_chunks_digest_is_that_of_the_little_endian_buffers() -> None:
    theta, momentum = torch.tensor([1.0, 2.0]), torch.tensor([-0.0, 3.0])
    raw = np.array([1, 2, -0.0, 3], dtype="<f4").tobytes()
    assert chunk_digest(theta, momentum).hex() == digest_of(raw)
    assert chunk_digest(theta, momentum) != chunk_digest(theta, torch.tensor([0.0, 3.0]))  # bits count, not values
    assert chunk_digest(torch.arange(4.0)[::2], momentum) == chunk_digest(torch.tensor([0.0, 2.0]), momentum)


def test_a_states_digest_is_that_of_the_list() -> None:
    elements = 2 * CHUNK + 5
    theta, momentum = torch.arange(float(elements)), torch.ones(elements)
    digests = digest_list(theta, momentum)
    assert len(digests) == list_bytes(elements) == 60
    assert digests[40:] == chunk_digest(theta[2 * CHUNK :], momentum[2 * CHUNK :])
    assert state_digest(theta, momentum) == digest_of(digests)
    assert is_chunk(digests, 1, theta[CHUNK : 2 * CHUNK], momentum[CHUNK : 2 * CHUNK])
    assert not is_chunk(digests, 0, theta[CHUNK : 2 * CHUNK], momentum[CHUNK : 2 * CHUNK])
    assert not is_chunk(digests, 3, theta[:CHUNK], momentum[:CHUNK])


@pytest.mark.parametrize("elements", [1, CHUNK, CHUNK + 1, 4 * CHUNK, 8 * CHUNK, 30 * CHUNK + 1])
def test_nobody_knows_which_chunks_are_checked(elements: int) -> None:
    chunks, draw = -(-elements // CHUNK), random.Random(1)
    samples = [sample(elements, draw) for _ in range(8 * CYCLE)]
    assert {index for one in samples for index in one} == set(range(chunks))
    assert all(len(set(one)) == -(-chunks // CYCLE) for one in samples)
    assert chunks == 1 or len({tuple(one) for one in samples[::CYCLE]}) > 1
