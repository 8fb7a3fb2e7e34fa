"""A shard's bodies by one call against the same chunk by chunk by torch: the same bits. And what one call does not
take."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2pdiloco.codec import merge, native, outer_optimizer, quantization, shard_codec
from p2pdiloco.codec.formats import LARGEST
from p2pdiloco.codec.quantization import CHUNK
from p2pdiloco.codec.shard_codec import Bodies, encoded
from p2pdiloco.protocol.manifest import Codec

HAS_LIBRARY = native.LIBRARY is not None
pytestmark = pytest.mark.skipif(not HAS_LIBRARY, reason="no library of these sources is there: pip install -e .")
SIZES = [1, 63, 2500, CHUNK, CHUNK + 777]
CODECS: tuple[Codec, ...] = ("int4", "int8", "bf16")


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once called, nothing compiled is used any more."""
    return lambda: monkeypatch.setattr(native, "is_used", False)


def vector(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(size: int, seed: int = 0, block: int = 256, codec: Codec = "int4") -> Bodies:
    found = encoded(quantization.recipe(codec, None, block), vector(size, seed))
    assert found is not None
    return found


def spans(size: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, size)) for start in range(0, size, CHUNK)]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [64, 4096])
@pytest.mark.parametrize("codec", CODECS)
def test_a_shard_is_encoded_and_measured_as_its_chunks_are(
    size: int, block: int, codec: Codec, by_torch: Callable[[], None]
) -> None:
    how, x, less = quantization.recipe(codec, None, block), vector(size, 1), vector(size, 2)
    found, chunks = encoded(how, x, less), spans(size)
    assert found is not None
    measured = shard_codec.squared_norms(found, size)
    if codec != "int4":  # whose scales' sums may run in another order; see tests/property/test_quantize.py
        by_torch()
    assert [bytes(body) for body in found] == [bytes(quantization.encode_chunk(how, x[s], less[s])) for s in chunks]
    by_torch()
    squares = [quantization.squared_norm(body, s.stop - s.start) for body, s in zip(found, chunks, strict=True)]
    assert measured == pytest.approx(squares, rel=1e-12)


@pytest.mark.parametrize("codec", ["int8", "bf16"])
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-28, 1e-3, 1.0, 1e30, 1e33])
def test_what_is_very_small_or_large_is_encoded_with_the_bits_of_torch(
    codec: Codec, scale: float, by_torch: Callable[[], None]
) -> None:
    """Also blocks of zeros, values half way between two symbols, and the largest there may be."""
    x = vector(5000, 1) * scale
    x[256:768] = 0.0
    x[1024:1280] = (torch.arange(256) - 127.5).clamp_(-127, 127) * scale
    x[2048], x[2049] = LARGEST, -LARGEST
    found, how = encoded(quantization.recipe(codec), x), quantization.recipe(codec)
    assert found is not None
    by_torch()
    assert [bytes(body) for body in found] == [bytes(body) for body in quantization.encode_vector(how, x)]


@pytest.mark.parametrize("codec", ["int8", "bf16"])
@pytest.mark.parametrize("value", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800000, -0x800000, 0x7B010000])
def test_what_is_not_finite_is_not_encoded(codec: Codec, value: int) -> None:
    """By its bits: NaN of several kinds, infinities, and more than the largest there may be."""
    x = vector(CHUNK + 1000, 1)
    x.view(torch.int32)[-7] = value
    assert encoded(quantization.recipe(codec), x) is None
    with pytest.raises(ValueError, match="not finite"):
        quantization.encode_vector(quantization.recipe(codec), x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factors", [[0.3], [0.3, 0.0, -0.7, 0.11]])
@pytest.mark.parametrize("codecs", [["int4"], ["int8"], ["bf16"], ["int4", "bf16", "int8"]])
def test_a_sum_has_the_bits_of_its_chunks_sums(
    size: int, factors: list[float], codecs: list[Codec], by_torch: Callable[[], None]
) -> None:
    """Of one codec, or of several, in blocks of several sizes."""
    how = [(codecs[seed % len(codecs)], (64, 256, 1024)[seed % len(codecs)]) for seed in range(len(factors))]
    given = [made(size, seed, block, codec) for seed, (codec, block) in enumerate(how)]
    found, wanted = torch.empty(size), torch.zeros(size)
    square = shard_codec.weighted_sum(given, factors, found)
    assert square == merge.norm(found) ** 2 or math.sqrt(square or 0.0) == merge.norm(found)
    by_torch()
    for number, span in enumerate(spans(size)):
        for bodies, factor in zip(given, factors, strict=True):
            if factor:
                quantization.add_chunk(bodies[number], factor, wanted[span])
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("size", [1000, CHUNK + 777])
@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("own", [None, "int4", "bf16"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("to", ["nowhere", "buffer", "sum"])
def test_an_outer_step_has_the_bits_of_its_chunks_steps(
    size: int, is_narrow: bool, own: Codec | None, codec: Codec, to: str, by_torch: Callable[[], None]
) -> None:
    """Decoded, stepped and added one after the other."""
    bodies, mine = made(size, codec=codec), None if own is None else made(size, 1, 64, own)
    momentum = vector(size, 3).bfloat16() if is_narrow else vector(size, 3)
    vectors = [vector(size, 2), momentum, None if to == "nowhere" else vector(size, 4)]
    found, wanted = ([None if v is None else v.clone() for v in vectors] for _ in range(2))
    factors = outer_optimizer.Factors(learning_rate=0.4, momentum_factor=0.7)
    assert outer_optimizer.step_shard(bodies, mine, *found, to == "sum", factors)  # type: ignore[arg-type]
    by_torch()
    for number, span in enumerate(spans(size)):
        theta, kept, buffer = (None if v is None else v[span] for v in wanted)
        assert theta is not None
        assert kept is not None
        change = quantization.decode_chunk(bodies[number], torch.empty_like(theta))
        outer_optimizer.outer_step_by_torch(theta, kept, change, 0.4, 0.7)
        if mine is not None:
            quantization.add_chunk(mine[number], 1.0, change)
        if buffer is not None:
            buffer.copy_(buffer + change if to == "sum" else change)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None and other is None) or torch.equal(bits(one), bits(other))  # type: ignore[arg-type]


def _altered(bodies: Bodies, at: int, value: int) -> Bodies:
    whole = bytearray(b"".join(bodies))
    whole[at] = value
    ends = [sum(len(body) for body in bodies[: i + 1]) for i in range(len(bodies))]
    return Bodies(memoryview(whole), ends)


SECOND = {codec: len(made(CHUNK, codec=codec)[0]) if HAS_LIBRARY else 0 for codec in CODECS}
HIGH = 8
UNSOUND: dict[str, tuple[Codec, int, int]] = {
    "a version": ("int4", SECOND["int4"], 3),
    "a codec": ("int4", SECOND["int4"] + 1, 2),
    "a codec that is not read here": ("int4", SECOND["int4"] + 1, 4),
    "another block": ("int4", SECOND["int4"] + 2, 64),
    "elements": ("int4", SECOND["int4"] + 4, 1),
    "a scale that is negative": ("int4", -1, 0xFF),
    "a block that is none": ("int4", 3, 2),
    "a scale of int8 that is negative": ("int8", -1, 0xFF),
    "a version of int8": ("int8", SECOND["int8"], 3),
    "a block of bf16": ("bf16", SECOND["bf16"] + 3, 1),
    "elements of bf16": ("bf16", SECOND["bf16"] + 4, 1),
}


def assert_refused(unsound: Bodies, sound: Bodies, size: int) -> None:
    """By all, and nothing is changed."""
    out, theta, momentum = torch.full((size,), 5.0), torch.ones(size), torch.ones(size)
    assert shard_codec.squared_norms(unsound, size) is None
    assert shard_codec.weighted_sum([sound, unsound], [0.5, 0.5], out) is None
    for bodies, own in ((unsound, None), (sound, unsound)):
        factors = outer_optimizer.Factors(learning_rate=0.4, momentum_factor=0.7)
        assert not outer_optimizer.step_shard(bodies, own, theta, momentum, out, False, factors)
    assert bool((out == 5.0).all() and (theta == 1.0).all() and (momentum == 1.0).all())
    with pytest.raises(ValueError):
        merge.EncodedGradient(unsound, size)


@pytest.mark.parametrize("what", UNSOUND)
def test_what_is_not_as_it_should_be_is_left_to_those_who_say_so(what: str) -> None:
    size, (codec, at, value) = CHUNK + 1000, UNSOUND[what]
    assert_refused(_altered(made(size, codec=codec), at, value), made(size, 1), size)


@pytest.mark.parametrize("bits_of_it", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize("at", [0, 999])
def test_a_value_of_bf16_that_is_not_finite_is_refused(bits_of_it: int, at: int) -> None:
    size = CHUNK + 1000
    start = SECOND["bf16"] + HIGH + at
    unsound = _altered(_altered(made(size, codec="bf16"), start, bits_of_it >> 8), start + 1000, bits_of_it & 0xFF)
    assert_refused(unsound, made(size, 1), size)
    chunk, new = unsound[1], (torch.full((1000,), 5.0), torch.full((1000,), 5.0))
    assert not shard_codec.decoded(chunk, new[0])
    with pytest.raises(ValueError, match="not finite"):
        outer_optimizer.step_aside(
            chunk, torch.ones(1000), torch.ones(1000), new, learning_rate=0.4, momentum_factor=0.7
        )
    assert bool((new[0] == 5.0).all() and (new[1] == 5.0).all())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_body_that_is_longer_or_shorter_than_it_says_is_refused(codec: Codec, by: int) -> None:
    body = (bytes(made(1000, codec=codec)[0]) + b"\0")[: len(made(1000, codec=codec)[0]) + by]
    new = torch.full((1000,), 5.0), torch.full((1000,), 5.0)
    assert not shard_codec.decoded(body, new[0])
    assert not shard_codec.decoded(b"", new[0])
    with pytest.raises(ValueError):
        outer_optimizer.step_aside(
            body, torch.ones(1000), torch.ones(1000), new, learning_rate=0.4, momentum_factor=0.7
        )
    assert bool((new[0] == 5.0).all() and (new[1] == 5.0).all())


def test_bodies_are_where_their_frames_end_and_nowhere_else() -> None:
    """Else a peer with the library takes what one without it refuses."""
    size, good = CHUNK + 1000, made(CHUNK + 1000)
    whole = b"".join(good)
    shifted = Bodies(memoryview(whole), [SECOND["int4"] - 2, len(whole)])
    assert shard_codec.squared_norms(shifted, size) is None
    with pytest.raises(ValueError):
        merge.EncodedGradient(shifted, size)
    assert shard_codec.squared_norms(Bodies(memoryview(b""), []), size) is None
    assert [bytes(body) for body in good] == [bytes(good[0]), bytes(good[-1])] == [bytes(b) for b in good[:]]


def test_a_vector_that_is_out_of_the_ordinary_is_encoded_chunk_by_chunk() -> None:
    x = vector(CHUNK + 1000, 1)
    x[:256] = 1e-25  # a block whose squares vanish
    assert encoded(quantization.recipe("int4"), x) is None
    found = quantization.encode_vector(quantization.recipe("int4"), x)
    assert [bytes(body) for body in found] == [
        bytes(quantization.encode_chunk(quantization.recipe("int4"), x[span])) for span in spans(len(x))
    ]
    x[-1] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        quantization.encode_vector(quantization.recipe("int4"), x)


@pytest.mark.parametrize("byte", [0x88, 0x80, 0x08, 0x97])
@pytest.mark.parametrize("block", [64, 4096])
def test_the_largest_symbols_are_measured_as_they_are(block: int, byte: int) -> None:
    """Also -8, which no honest peer sends: sums of squares are exact in all lanes, however large a block."""
    blocks = CHUNK // block
    header = bytes((2, 1)) + block.to_bytes(2, "little") + CHUNK.to_bytes(4, "little")
    body = header + bytes([byte]) * (CHUNK // 2) + b"\x80\x3f" * blocks  # scales of 1
    low, high = ((nibble ^ 8) - 8 for nibble in (byte & 15, byte >> 4))
    assert quantization.squared_norm(body, CHUNK) == CHUNK // 2 * (low * low + high * high)


def test_a_sum_of_nothing_is_zeros() -> None:
    out = torch.ones(1000)
    assert merge.direct_mean([], [], out) == 0.0
    assert not out.any()
