"""Merging: whatever finite contributions come, what is made of them can be encoded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2pdiloco.codec import merge, native
from p2pdiloco.codec.formats import HEADER
from p2pdiloco.codec.merge import EncodedGradient, contribution
from p2pdiloco.codec.quantization import encode_vector, recipe
from p2pdiloco.protocol.manifest import Codec, MergeRule

ELEMENTS = 300
LONGEST = 40.0
CODECS: list[Codec] = ["int4", "int8", "bf16"]
exponents = st.integers(-149, 126)
weights = st.sampled_from([0.0, 1e-12, 1.0, 2.5e11, 1e30])


@contextlib.contextmanager
def without_the_library(is_native: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr(native, "is_used", False)
        yield


def body_of(codec: Codec, exponent: int, seed: int, sign: float) -> list[memoryview]:
    """Numbers around 2^exponent, some of them zero, as somebody encodes them who may do as it likes."""
    drawn = torch.Generator().manual_seed(seed)
    values = sign * torch.randn(ELEMENTS, generator=drawn) * (torch.rand(ELEMENTS, generator=drawn) < 0.5)
    if codec != "bf16":
        return list(encode_vector(recipe(codec), values * 2.0 ** min(exponent, 114)))
    raw = (values.double() * 2.0**exponent).clamp(-3e38, 3e38).float().to(torch.bfloat16).view(torch.int16).numpy()
    planes = raw.astype("<u2").view("u1").reshape(-1, 2)
    head = bytes(next(iter(encode_vector(recipe("bf16"), values))))[: HEADER.size]
    return [memoryview(head + planes[:, 1].tobytes() + planes[:, 0].tobytes())]


contributions = st.lists(
    st.tuples(st.sampled_from(CODECS), exponents, st.integers(0, 2), st.sampled_from([1.0, -1.0]), weights),
    min_size=1,
    max_size=4,
)


@given(contributions, st.sampled_from(["rda", "direct"]), st.sampled_from(CODECS), st.booleans())
@example([("bf16", 0, 0, 1.0, 1.0), ("bf16", -133, 1, 1.0, 1.0)], "rda", "int4", True)
@example([("bf16", 0, 0, 1.0, 1e-12), ("bf16", 109, 1, 1.0, 1.0), ("bf16", 109, 1, -1.0, 1.0)], "rda", "int4", True)
@example(
    [("bf16", 0, 0, 1.0, 1.0), ("bf16", 109, 1, 1.0, 2.5e11), ("bf16", 109, 1, -1.0, 2.5e11)], "rda", "int4", False
)
@settings(max_examples=300, deadline=None)
def test_what_is_merged_of_finite_contributions_can_be_encoded(
    given_: list[tuple[Codec, int, int, float, float]], rule: MergeRule, codec: Codec, is_native: bool
) -> None:
    with without_the_library(is_native):
        gradients, counted = [], []
        for how, exponent, seed, sign, weight in given_:
            try:
                gradients.append(contribution(body_of(how, exponent, seed, sign), ELEMENTS))
            except ValueError:
                continue  # it is named, and the others are merged
            counted.append(weight)
        out = torch.full((ELEMENTS,), math.nan)
        accord = merge.merge(rule, gradients, counted, [4] * len(gradients), 4, out)
        assert torch.isfinite(out).all()
        assert accord.cosine is None or math.isfinite(accord.cosine)
        bodies, length = merge.encode(recipe(codec), out, LONGEST)
        assert length <= LONGEST
        assert EncodedGradient(bodies, ELEMENTS).norm() == length
