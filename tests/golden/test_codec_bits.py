"""Codecs give the same bits on every platform: hashes of a fixed vector's bodies and of what they decode to.

The vector's values are small integers times a power of two for each block, so that sums of squares are exact in float32
whatever their order: even encoding, which need not be reproducible in general, is so here. A change of these hashes is
a change of the format (``chunk_bodies.VERSION``) or of the arithmetic, and two releases could not merge together.
"""

import hashlib

import pytest
import torch

from p2pdiloco.codec.quantization import CHUNK, decode_chunks, encode_vector, recipe
from p2pdiloco.protocol.manifest import Codec

ELEMENTS = CHUNK + 3 * 256 + 17

GOLDEN: dict[tuple[Codec, float | None], tuple[str, str]] = {
    ("int4", None): ("941b4e4d9956bd16", "3142859a393aa9e0"),
    ("int4", 0.335): ("43b484f98d8af26d", "01a3e728c4b04e71"),
    ("int4", 0.0): ("7866ade7fd6d5bdd", "4d3d72530cae09dd"),
    ("int4", 1.0): ("6a058f2c7bd176aa", "2e8a99f64c3ba126"),
    ("int8", None): ("77a21cce44f1482b", "be2f39413005a2b0"),
    ("int8", 0.1): ("be38e5211d2db8d7", "e34e630d9d30960e"),
    ("bf16", None): ("e48fafff5a29188f", "21222da2972485d4"),
    ("int2", None): ("102568cf62373dbf", "44119451fed388ce"),
    ("e3m0", None): ("0c8c043756958d31", "10e84a16a9717a41"),
}


def fixed_vector() -> torch.Tensor:
    """Bell-shaped integers in [-90, 90] from a linear congruence, blocks from 2^-40 to 2^23, one of zeros, one tail."""
    state, values = 1, []
    for _ in range(1 << 12):
        total = 0
        for _ in range(6):
            state = (state * 1103515245 + 12345) % 2**31
            total += (state >> 16) % 31 - 15
        values.append(total)
    x = torch.tensor(values, dtype=torch.float32).repeat(-(-ELEMENTS // len(values)))[:ELEMENTS]
    blocks = -(-ELEMENTS // 256)
    powers = torch.tensor([2.0 ** (b % 64 - 40) for b in range(blocks)]).repeat_interleave(256)[:ELEMENTS]
    x *= powers
    x[512:768] = 0.0
    x[1024] = 2.0**-30
    return x


def digest(tensor_or_bytes: bytes) -> str:
    return hashlib.blake2b(tensor_or_bytes, digest_size=8).hexdigest()


@pytest.mark.parametrize(("codec", "step"), [*GOLDEN])
def test_bodies_and_values_are_the_same_everywhere(codec: Codec, step: float | None) -> None:
    x = fixed_vector()
    bodies = [bytes(body) for body in encode_vector(recipe(codec, step), x)]
    y = decode_chunks(bodies, torch.empty(ELEMENTS))
    assert (digest(b"".join(bodies)), digest(y.numpy().tobytes())) == GOLDEN[codec, step]
