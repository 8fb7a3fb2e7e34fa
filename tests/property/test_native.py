"""The C library against torch, on bodies of any symbols: the same bits."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2pdiloco.codec import native, outer_optimizer, quantization, shard_codec
from p2pdiloco.codec.formats import FORMATS, HEADER, VERSION
from p2pdiloco.codec.shard_codec import Bodies

pytestmark = pytest.mark.skipif(
    native.LIBRARY is None, reason="no library of these sources is there: pip install -e ., with a C compiler"
)
BLOCKS = st.sampled_from([64, 128, 256])
FACTORS = outer_optimizer.Factors(learning_rate=0.4, momentum_factor=0.7)


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Meanwhile nothing compiled is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "is_used", False)
        yield


@contextlib.contextmanager
def by_plain_c() -> Iterator[None]:
    """Meanwhile the library does not call its functions for AVX2."""
    assert native.LIBRARY is not None
    is_plain = ctypes.c_bool.in_dll(native.LIBRARY, "is_plain")
    is_plain.value = True
    try:
        yield
    finally:
        is_plain.value = False


def any_vector(elements: int, seed: int, has_all: bool) -> Tensor:
    """Values of all magnitudes, zeros and denormals; ``has_all``: also NaN, infinities, and what cannot be encoded."""
    random = np.random.default_rng(seed)
    if has_all:
        return torch.from_numpy(random.integers(-(2**31), 2**31, elements).astype(np.int32).view(np.float32))
    magnitudes = random.choice(np.array([0.0, -0.0, 1e-42, 1e-3, 1.0, 1.0, 1.0, 40.0], np.float32), elements)
    exponents = np.repeat(random.integers(-14, 15, elements // 64 + 1), 64)[:elements]
    return torch.from_numpy((random.standard_normal(elements) * magnitudes * 10.0**exponents).astype(np.float32))


def any_body(elements: int, block: int, seed: int) -> bytes:
    """An int4 body with all symbols there are, also those that no honest peer sends."""
    random = np.random.default_rng(seed)
    blocks = -(-elements // block)
    packed = random.integers(-128, 128, blocks * block // 2).astype(np.int8)
    scales = random.integers(0x3000, 0x4000, blocks).astype("<u2")
    return HEADER.pack(VERSION, FORMATS["int4"].number, block, elements) + packed.tobytes() + scales.tobytes()


def bits(*vectors: Tensor) -> list[bytes]:
    return [vector.view(torch.uint8).numpy().tobytes() for vector in vectors]


@given(st.integers(1, 3000), BLOCKS, st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_steps_have_the_same_bits(
    elements: int, block: int, seed: int, is_narrow: bool, has_own: bool, is_added: bool
) -> None:
    """With and without momentum in bfloat16, an own contribution, and somewhere to add the change to."""
    drawn = torch.Generator().manual_seed(seed)
    body, own = any_body(elements, block, seed), any_body(elements, block, seed + 1)
    start = [torch.randn(elements, generator=drawn) for _ in range(4)]
    if is_narrow:
        start[1] = start[1].bfloat16()

    theta, momentum, buffer, gradient = (v.clone() for v in start)
    aside = torch.empty_like(theta), torch.empty_like(momentum)
    outer_optimizer.step_aside(body, theta, momentum, aside, **FACTORS)
    ours = Bodies.of(own) if has_own else None
    assert outer_optimizer.step_shard(Bodies.of(body), ours, theta, momentum, buffer, is_added, FACTORS)
    assert outer_optimizer.step_shard(Bodies.of(body), ours, theta, momentum, None, is_added, FACTORS)
    outer_optimizer.outer_step(theta, momentum, gradient, **FACTORS)
    found = bits(*aside, theta, momentum, buffer, gradient)

    theta, momentum, buffer, gradient = (v.clone() for v in start)
    with by_torch():
        outer_optimizer.step_aside(body, theta, momentum, aside, **FACTORS)
        assert not outer_optimizer.step_shard(Bodies.of(body), ours, theta, momentum, buffer, is_added, FACTORS)
        change = quantization.decode_chunk(body, torch.empty(elements))
        again = change.clone()
        outer_optimizer.outer_step(theta, momentum, change, **FACTORS)
        if has_own:
            quantization.add_chunk(own, 1.0, change)
        buffer = buffer + change if is_added else change
        outer_optimizer.outer_step(theta, momentum, again, **FACTORS)
        outer_optimizer.outer_step(theta, momentum, gradient, **FACTORS)
    assert found == bits(*aside, theta, momentum, buffer, gradient)


@given(st.integers(1, 3000), BLOCKS, st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_decoding_has_the_same_bits(elements: int, block: int, seed: int) -> None:
    """Everything that a peer computes from a body of another."""
    body = any_body(elements, block, seed)

    def read() -> tuple[list[bytes], float]:
        added = torch.linspace(-1, 1, elements)
        quantization.add_chunk(body, 0.3, added)
        out = quantization.decode_chunk(body, torch.empty(elements))
        return bits(out, added), quantization.squared_norm(body, elements)

    found, square = read()
    with by_torch():
        wanted, wanted_square = read()
    assert found == wanted
    assert square == wanted_square


@given(
    st.integers(1, 3000),
    st.sampled_from([64, 128, 256, 4096]),
    st.integers(0, 2**32),
    st.sampled_from([0.335, 0.4, 1.5]),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_encoding_with_avx2_has_the_bits_of_plain_c_and_torch(
    elements: int, block: int, seed: int, step: float, has_less: bool, has_all: bool
) -> None:
    """AVX2, plain C and torch encode alike; a vector that cannot be encoded is refused by AVX2 and by plain C."""
    x, how = any_vector(elements, seed, has_all), quantization.recipe("int4", step, block)
    less = any_vector(elements, seed + 1, False) if has_less else None

    def made() -> list[bytes] | None:
        found = shard_codec.encoded(how, x, less)
        return None if found is None else [bytes(body) for body in found]

    found = made()
    with by_plain_c():
        assert made() == found
    if found is not None:
        with by_torch():
            assert [bytes(body) for body in quantization.encode_vector(how, x, less)] == found


@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.sampled_from([64, 128, 256, 4096]), st.sampled_from([0.0, 0.3, -0.7, 1e-40])), min_size=1),
    st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=100)
def test_a_sum_with_avx2_has_the_bits_of_plain_c_and_torch(
    elements: int, terms: list[tuple[int, float]], seed: int
) -> None:
    """Bodies in blocks of several sizes, and factors so small that products are denormals."""
    bodies = [any_body(elements, block, seed + index) for index, (block, _) in enumerate(terms)]
    factors = [factor for _, factor in terms]

    def summed() -> tuple[list[bytes], float | None]:
        out = torch.empty(elements)
        square = shard_codec.weighted_sum([Bodies.of(body) for body in bodies], factors, out)
        return bits(out), square

    found = summed()
    assert found[1] is not None
    with by_plain_c():
        assert summed() == found
    wanted = torch.zeros(elements)
    with by_torch():
        for body, factor in zip(bodies, factors, strict=True):
            if factor:
                quantization.add_chunk(body, factor, wanted)
        assert (bits(wanted), quantization.sum_of_squares(wanted)) == found


def test_norms_that_are_nearly_between_two_scales_are_rounded_alike() -> None:
    """A block's norm that differs in its last bit would be rounded to another scale here."""
    for seed in range(200):
        x = torch.randn(256, generator=torch.Generator().manual_seed(seed))
        norm = float(x.double().norm())
        scale = torch.tensor(0.4 * norm / 16).to(torch.bfloat16)
        above = (scale.view(torch.int16) + 1).view(torch.bfloat16)
        how = quantization.recipe("int4", (float(scale) + float(above)) / 2 * 16 / norm)
        [body] = map(bytes, quantization.encode_vector(how, x))
        with by_torch():
            assert [bytes(b) for b in quantization.encode_vector(how, x)] == [body]


def test_the_sum_of_squares_is_that_of_numpy() -> None:
    x = np.random.default_rng(1).standard_normal(5003).astype(np.float32)
    assert native.squares(x) == pytest.approx(float(np.square(x, dtype=np.float64).sum()), rel=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    """A vector of another type, or one with gaps, is not handed to the library."""
    with pytest.raises(ctypes.ArgumentError, match="float32"):
        native.squares(np.zeros(8))
    with pytest.raises(ctypes.ArgumentError, match="CONTIGUOUS"):
        native.squares(np.zeros(8, np.float32)[::2])


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lack what this release calls, or mean something else by it."""
    monkeypatch.setattr(native, "REVISION", native.REVISION + 1)
    assert native._load() is None
