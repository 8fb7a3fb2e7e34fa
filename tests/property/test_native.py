"""The compiled kernels against those of the same names in Python, by numba: the same bits."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.codec import native, numba_kernels, shard_codec
from p2pdiloco.codec.formats import FORMATS, HEADER, LARGEST_BITS, VERSION
from p2pdiloco.codec.shard_codec import Bodies

pytest.importorskip("numba")
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        native.LIBRARY is None, reason="no library of these sources is there: pip install -e ., with a C compiler"
    ),
]
BLOCKS = st.sampled_from([64, 128, 256])


@pytest.fixture(scope="module")
def reference() -> tuple[ModuleType, ModuleType]:
    """Kernels and step kernels as they are where there is no library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY", None)
        found = []
        for module in (numba_kernels, numba_kernels):
            assert module.__spec__ is not None
            again = importlib.util.module_from_spec(module.__spec__)
            patch.setitem(sys.modules, module.__name__, again)
            assert module.__spec__.loader is not None
            module.__spec__.loader.exec_module(again)
            found.append(again)
    assert found[0].numba is not None
    return found[0], found[1]


def bits(*vectors: Any) -> list[bytes]:
    return [vector.tobytes() for vector in vectors]


class Body:
    """A packed chunk and its scales, of any symbols."""

    def __init__(self, elements: int, block: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        blocks = -(-elements // block)
        self.packed = random.integers(-128, 128, blocks * block // 2).astype(np.int8)
        self.raw = random.integers(0x3000, 0x4000, blocks).astype("<u2")
        self.scales = (self.raw.astype(np.int32) << 16).view(np.float32)
        header = HEADER.pack(VERSION, FORMATS["int4"].number, block, elements)
        self.whole = header + self.packed.tobytes() + self.raw.tobytes()


@given(st.integers(1, 3000), BLOCKS, st.integers(0, 2**32), st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_steps_have_the_same_bits(
    reference: Any, elements: int, block: int, seed: int, is_narrow: bool, has_own: bool, is_added: bool
) -> None:
    """With and without momentum in bfloat16, an own contribution, and somewhere to add the change to."""
    random = np.random.default_rng(seed)
    body, own = Body(elements, block, seed), Body(elements, block, seed + 1)
    theta, momentum, buffer = (random.standard_normal(elements).astype(np.float32) for _ in range(3))
    narrow = (momentum.view(np.int32) >> 16).astype(np.int16)
    nothing, not_narrow = np.empty(0, np.float32), np.empty(0, np.int16)
    mine = (own.packed, own.scales) if has_own else (np.empty(0, np.int8), nothing)
    factors, found = (0.4, 0.7, 1.63), []
    for steps in (numba_kernels, reference[1]):
        t, b, g = theta.copy(), buffer.copy(), buffer.copy()
        m = (nothing, narrow.copy()) if is_narrow else (momentum.copy(), not_narrow)
        aside = np.empty_like(theta), *(np.empty_like(one) for one in m)
        if steps is numba_kernels:
            ours, vectors = Bodies.of(own.whole) if has_own else None, (torch.from_numpy(t), m)
            assert shard_codec.stepped_aside(body.whole, (t, *m), aside, factors)
            assert shard_codec.stepped(Bodies.of(body.whole), ours, *vectors, torch.from_numpy(b), is_added, factors)
            assert shard_codec.stepped(Bodies.of(body.whole), ours, *vectors, None, is_added, factors)
        else:
            steps.step_aside_int4(body.packed, body.scales, block, t, *m, *aside, *factors)
            steps.step_int4(body.packed, body.scales, *mine, block, t, *m, b, is_added, *factors)
            steps.step_int4(body.packed, body.scales, *mine, block, t, *m, nothing, is_added, *factors)
        if is_narrow:
            steps.outer_step_narrow(t, m[1], g, 0.4, 0.7, 1.63)
        else:
            steps.outer_step(t, m[0], g, 0.4, 0.7)
        found.append(bits(t, *m, b, g, *aside))
    assert found[0] == found[1]


@given(st.integers(1, 3000), BLOCKS, st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_decoding_has_the_same_bits(reference: Any, elements: int, block: int, seed: int) -> None:
    """What every peer computes of a body."""
    body = Body(elements, block, seed)
    out, added = np.empty((2, elements), np.float32), np.tile(np.linspace(-1, 1, elements, dtype=np.float32), (2, 1))
    assert shard_codec.decoded(body.whole, torch.from_numpy(out[0]))
    assert shard_codec.decoded(body.whole, torch.from_numpy(added[0]), 0.3)
    squares = shard_codec.squared_norms(Bodies.of(body.whole), elements)
    sums, wide = np.empty(len(body.raw), np.int32), np.empty(len(body.raw), np.float32)
    assert reference[0].widen_scales(body.raw.view(np.uint8), wide.view(np.int32), LARGEST_BITS)
    reference[0].unpack_int4(body.packed, wide, block, out[1])
    reference[0].add_int4(body.packed, wide, block, 0.3, added[1])
    reference[0].square_int4(body.packed, block, sums)
    assert bits(out[0], added[0]) == bits(out[1], added[1])
    assert squares == pytest.approx([float((sums * np.square(wide, dtype=np.float64)).sum())], rel=1e-12)


@given(st.integers(1, 3000), BLOCKS, st.integers(0, 2**32), st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e20]))
@settings(deadline=None, max_examples=60)
def test_encoding_is_the_same_but_for_the_order_of_sums(
    reference: Any, elements: int, block: int, seed: int, size: float
) -> None:
    """Scales may differ in their last bit; by the same scales the symbols do not differ. What is subtracted counts as
    if the difference were given."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal(elements) * size).astype(np.float32)
    x[:: 3 * block] *= 50
    less = random.standard_normal(elements).astype(np.float32)
    x[block : 2 * block] = less[block : 2 * block] = 0
    nothing, blocks = np.empty(0, np.float32), -(-elements // block)
    found = []
    for module in (numba_kernels, reference[0]):
        packed, scales = np.zeros((3, blocks * block // 2), np.uint8), np.zeros((3, blocks), np.uint16)
        how = (block, 0.4, 4.0, 7.0, 1e-15, 1e18)
        given = ((x, nothing), (x, less), (x - less, nothing))
        is_done = [module.encode_int4(*pair, *how, *out) for *out, pair in zip(packed, scales, given, strict=True)]
        if is_done[1]:
            assert bits(packed[1], scales[1]) == bits(packed[2], scales[2])
        wide = (scales[0].astype(np.int32) << 16).view(np.float32)
        if is_done[0]:
            again = np.empty_like(packed[0])
            module.pack_int4(x, wide, block, 7.0, again)
            assert bits(again) == bits(packed[0])
        ones = np.empty_like(packed[0])
        module.pack_int4(x, np.ones(blocks, np.float32), block, 7.0, ones)
        found.append((is_done, scales[0].astype(np.int64), module.squares(x), bits(ones)))
    assert found[0][0] == found[1][0]
    if found[0][0][0]:
        assert np.abs(found[0][1] - found[1][1]).max() <= 1
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-12)
    assert found[0][3] == found[1][3]


def test_what_does_not_fit_is_refused() -> None:
    """A vector of another type, or one with gaps, is not handed to the library."""
    with pytest.raises(TypeError, match="float32"):
        numba_kernels.squares(np.zeros(8))
    with pytest.raises(TypeError, match="contiguous"):
        numba_kernels.squares(np.zeros(8, np.float32)[::2])


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lack what this release calls, or mean something else by it."""
    monkeypatch.setattr(native, "REVISION", native.REVISION + 1)
    assert native._load() is None
