"""A shard's bodies by one call against the same chunk by chunk: the same bits. And what one call does not take."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from p2pdiloco.tensors import merge, native, outer, quantizers, shard_bodies
from p2pdiloco.tensors.quantizers import CHUNK
from p2pdiloco.tensors.shard_bodies import Bodies, encoded

HAS_LIBRARY = native.LIBRARY is not None and hasattr(native.LIBRARY, "encode_shard")
pytestmark = pytest.mark.skipif(not HAS_LIBRARY, reason="no library of these sources is there: pip install -e .")
SIZES = [1, 63, 1000, CHUNK, CHUNK + 777]


def vector(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(size: int, seed: int = 0, block: int = 256) -> Bodies:
    found = encoded(quantizers.recipe("int4", None, block), vector(size, seed))
    assert found is not None
    return found


def spans(size: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [64, 4096])
def test_a_shard_is_encoded_and_measured_as_its_chunks_are(size: int, block: int) -> None:
    how, x, less = quantizers.recipe("int4", None, block), vector(size, 1), vector(size, 2)
    found, chunks = encoded(how, x, less), spans(size)
    assert found is not None
    assert [bytes(body) for body in found] == [bytes(quantizers.encode_chunk(how, x[s], less[s])) for s in chunks]
    squares = [quantizers.squared_norm(body, s.stop - s.start) for body, s in zip(found, chunks, strict=True)]
    assert shard_bodies.squared_norms(found, size) == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factors", [[0.3], [0.3, 0.0, -0.7, 0.11]])
def test_a_sum_has_the_bits_of_its_chunks_sums(size: int, factors: list[float]) -> None:
    given, found, wanted = [made(size, seed) for seed in range(len(factors))], torch.empty(size), torch.zeros(size)
    square = shard_bodies.weighted_sum(given, factors, found)
    for number, span in enumerate(spans(size)):
        for bodies, factor in zip(given, factors, strict=True):
            if factor:
                quantizers.add_chunk(bodies[number], factor, wanted[span])
    assert torch.equal(bits(found), bits(wanted))
    assert square is not None
    assert math.sqrt(square) == merge.norm(wanted)


@pytest.mark.parametrize("size", [1000, CHUNK + 777])
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("to", ["nowhere", "buffer", "sum"])
def test_an_outer_step_has_the_bits_of_its_chunks_steps(size: int, is_narrow: bool, has_own: bool, to: str) -> None:
    bodies, own = made(size), made(size, 1) if has_own else None
    momentum = vector(size, 3).bfloat16() if is_narrow else vector(size, 3)
    vectors = [vector(size, 2), momentum, None if to == "nowhere" else vector(size, 4)]
    found, wanted = ([None if v is None else v.clone() for v in vectors] for _ in range(2))
    how = {"is_added": to == "sum", "learning_rate": 0.4, "momentum_factor": 0.7}
    factors = outer.Factors(learning_rate=0.4, momentum_factor=0.7)
    assert outer.step_shard(bodies, own, *found, to == "sum", factors)  # type: ignore[arg-type]
    for number, span in enumerate(spans(size)):
        mine, pieces = None if own is None else own[number], [None if v is None else v[span] for v in wanted]
        assert outer.step_and_hand_over(bodies[number], mine, *pieces, **how)  # type: ignore[arg-type]
    for one, other in zip(found, wanted, strict=True):
        assert (one is None and other is None) or torch.equal(bits(one), bits(other))  # type: ignore[arg-type]


def _altered(bodies: Bodies, at: int, value: int) -> Bodies:
    whole = bytearray(b"".join(bodies))
    whole[at] = value
    ends = [sum(len(body) for body in bodies[: i + 1]) for i in range(len(bodies))]
    return Bodies(memoryview(whole), ends)


SECOND = len(made(CHUNK)[0]) if HAS_LIBRARY else 0
UNSOUND = {
    "a version": (SECOND, 3),
    "a codec": (SECOND + 1, 2),
    "another block": (SECOND + 2, 64),
    "elements": (SECOND + 4, 1),
    "a scale that is negative": (-1, 0xFF),
    "a block that is none": (3, 2),
}


@pytest.mark.parametrize("what", UNSOUND)
def test_what_is_not_as_it_should_be_is_left_to_those_who_say_so(what: str) -> None:
    size = CHUNK + 1000
    unsound, sound = _altered(made(size), *UNSOUND[what]), made(size, 1)
    out, theta, momentum = torch.full((size,), 5.0), torch.ones(size), torch.ones(size)
    assert shard_bodies.squared_norms(unsound, size) is None
    assert shard_bodies.weighted_sum([sound, unsound], [0.5, 0.5], out) is None
    for bodies, own in ((unsound, None), (sound, unsound)):
        factors = outer.Factors(learning_rate=0.4, momentum_factor=0.7)
        assert not outer.step_shard(bodies, own, theta, momentum, out, False, factors)
    assert bool((out == 5.0).all() and (theta == 1.0).all() and (momentum == 1.0).all())
    with pytest.raises(ValueError):
        merge.EncodedGradient(unsound, size)


def test_bodies_are_where_their_frames_end_and_nowhere_else() -> None:
    """Else a peer with the library takes what one without it refuses."""
    size, good = CHUNK + 1000, made(CHUNK + 1000)
    whole = b"".join(good)
    shifted = Bodies(memoryview(whole), [SECOND - 2, len(whole)])
    assert shard_bodies.squared_norms(shifted, size) is None
    with pytest.raises(ValueError):
        merge.EncodedGradient(shifted, size)
    assert shard_bodies.squared_norms(Bodies(memoryview(b""), []), size) is None
    assert [bytes(body) for body in good] == [bytes(good[0]), bytes(good[-1])] == [bytes(b) for b in good[:]]


def test_a_vector_that_is_out_of_the_ordinary_is_encoded_chunk_by_chunk() -> None:
    x = vector(CHUNK + 1000, 1)
    x[:256] = 1e-25  # a block whose squares vanish
    assert encoded(quantizers.recipe("int4"), x) is None
    found = quantizers.encode_vector(quantizers.recipe("int4"), x)
    assert [bytes(body) for body in found] == [
        bytes(body) for body in quantizers.encode_chunks(quantizers.recipe("int4"), x)
    ]
    x[-1] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        quantizers.encode_vector(quantizers.recipe("int4"), x)


def test_a_sum_of_nothing_is_zeros() -> None:
    out = torch.ones(1000)
    assert merge.direct_mean([], [], out) == 0.0
    assert not out.any()
