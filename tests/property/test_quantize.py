"""Quantizers and their compression: error bounds, lengths, and bodies from hostile peers."""

import contextlib
import math
import struct
import warnings

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.protocol.manifest import Codec
from p2pdiloco.tensors.quantize import BLOCK, CHUNK, HEADER, body_bytes, decode, encode
from p2pdiloco.wire.compression import body_limit, compress, decompress, payload_limit

CODECS: list[Codec] = ["int4", "int8", "bf16"]
LENGTHS = [0, 1, 2, 255, 256, 257, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 300]
codecs = st.sampled_from(CODECS)


def bell(elements: int, seed: int, scale: float = 1e-3) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("elements", LENGTHS)
def test_round_trip_of_a_bell(codec: Codec, elements: int) -> None:
    x = bell(elements, elements)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        body = encode(codec, x)
        y = decode(body, elements)
    assert len(body) == body_bytes(codec, elements) <= body_limit(elements)
    payload = compress(body)
    assert len(payload) <= payload_limit(elements)
    assert decompress(payload, body_limit(elements)) == body
    bound = {"int4": 0.13, "int8": 0.009, "bf16": 0.0024}[codec]
    if elements >= BLOCK:
        assert float((x - y).norm() / x.norm()) < bound


@given(codecs, st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=600))
def test_error_is_bounded_for_any_values(codec: Codec, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    y = decode(encode(codec, x), len(values))
    for at in range(0, len(values), BLOCK):
        a, b = x[at : at + BLOCK].double(), y[at : at + BLOCK].double()
        # int4: half a step within the range, clipping (at 2.3 of up to 6 rms) beyond it
        share = {"int4": 0.65, "int8": 0.5 / 127 * 1.01, "bf16": 2.0**-8}[codec]
        assert float((a - b).abs().max()) <= share * float(a.abs().max()) + 1.1e-28


def test_one_rare_value_is_not_clipped() -> None:
    x = torch.zeros(BLOCK)
    x[3] = 5.0
    assert decode(encode("int4", x), BLOCK)[3] == pytest.approx(5.0, rel=0.01)


def test_the_scale_of_a_short_last_block_ignores_the_padding() -> None:
    x = bell(BLOCK + 20, 5)
    y = decode(encode("int4", x), len(x))
    assert float((x - y)[BLOCK:].norm() / x[BLOCK:].norm()) < 0.2


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_and_the_smallest_numbers(codec: Codec) -> None:
    tiny = torch.full((300,), 1e-45)
    for x in (torch.zeros(300), -torch.zeros(300), tiny, tiny * 1e10):
        y = decode(encode(codec, x), 300)
        assert bool(torch.isfinite(y).all())
        assert float((x - y).abs().max()) <= 1e-29


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3.4e38])
@pytest.mark.parametrize("at", [0, 299])
def test_what_is_not_finite_is_not_encoded(codec: Codec, bad: float, at: int) -> None:
    x = torch.ones(300)
    x[at] = bad
    with pytest.raises(ValueError, match="not finite"):
        encode(codec, x)


@pytest.mark.parametrize("codec", CODECS)
def test_the_largest_values_stay_decodable(codec: Codec) -> None:
    y = decode(encode(codec, torch.full((300,), 6e35)), 300)
    assert bool(torch.isfinite(y).all())


def test_dequantizing_is_one_float32_multiply() -> None:
    x = bell(5 * BLOCK + 7, 9)
    body = encode("int8", x)
    scales = np.frombuffer(body, "<u2", 6, HEADER.size).astype(np.uint32) << 16
    symbols = np.frombuffer(body, np.int8, len(x), HEADER.size + 12)
    expected = symbols.astype(np.float32) * np.repeat(scales.view(np.float32), BLOCK)[: len(x)]
    assert np.array_equal(decode(body, len(x)).numpy().view(np.uint32), expected.view(np.uint32))


def test_int4_packs_halves_of_a_chunk() -> None:
    x = torch.cat((torch.full((BLOCK,), 1.0), torch.full((BLOCK,), -1.0)))
    packed = encode("int4", x)[HEADER.size + 4 :]
    assert set(packed) == {(3 | (-3 & 15) << 4)}  # 1 / 0.335 rounds to 3


@pytest.mark.parametrize("codec", CODECS)
def test_decodes_into_a_slice(codec: Codec) -> None:
    x, whole = bell(1000, 1), torch.zeros(1200)
    out = decode(encode(codec, x), 1000, whole[100:1100])
    assert out.data_ptr() == whole[100:].data_ptr()
    assert torch.equal(out, decode(encode(codec, x), 1000))
    assert not whole[:100].any()
    assert not whole[1100:].any()


# ------------------------------------------------------------------------------------------------------ hostile bodies


@given(st.binary(max_size=400), st.integers(0, 300))
def test_noise_is_refused_or_finite(body: bytes, elements: int) -> None:
    try:
        y = decode(body, elements)
    except ValueError:
        return
    assert bool(torch.isfinite(y).all())


@given(codecs, st.integers(1, 700), st.data())
@settings(max_examples=300)
def test_an_altered_body_is_refused_or_finite(codec: Codec, elements: int, data: st.DataObject) -> None:
    body = bytearray(encode(codec, bell(elements, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        y = decode(body, elements)
    except ValueError:
        return
    assert y.shape == (elements,)
    assert bool(torch.isfinite(y).all())


@pytest.mark.parametrize("codec", CODECS)
def test_wrong_lengths_are_refused(codec: Codec) -> None:
    body = encode(codec, bell(600, 4))
    for wrong in (b"", body[:5], body[:-1], body + b"\0"):
        with pytest.raises(ValueError, match="bytes"):
            decode(wrong, 600)
    with pytest.raises(ValueError, match="claims 600 elements"):
        decode(body, 601)


def test_wrong_headers_are_refused() -> None:
    body = encode("int8", bell(300, 4))
    for header, says in (
        ((9, 2, 256, 300), "version"),
        ((1, 9, 256, 300), "codec"),
        ((1, 2, 64, 300), "blocks"),
        ((1, 2, 256, 2**63), "claims"),
    ):
        with pytest.raises(ValueError, match=says):
            decode(struct.pack("<BBHQ", *header) + body[HEADER.size :], 300)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -1.0, 3e38])
def test_wild_scales_are_refused(scale: float) -> None:
    body = bytearray(encode("int4", bell(300, 4)))
    body[HEADER.size + 2 : HEADER.size + 4] = np.array([scale], "<f4").tobytes()[2:]
    with pytest.raises(ValueError, match="scale"):
        decode(body, 300)


# -------------------------------------------------------------------------------------------------------- compression


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    with pytest.raises(ValueError, match="at most 1000"):
        decompress(bomb, 1000)


def test_frames_that_hide_something_are_refused() -> None:
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    good = compress(b"x" * 100)
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    for frame in (unknown, b"", b"no zstd", good[:-1], good + b"x", good + good, skippable + good):
        with pytest.raises(ValueError, match="payload"):
            decompress(frame, 1000)


@given(st.binary(max_size=300))
def test_noise_is_no_frame(data: bytes) -> None:
    with pytest.raises(ValueError, match="payload"):
        decompress(data, 1 << 16)


@given(st.binary(max_size=2000), st.data())
def test_altered_frames_never_yield_too_much(content: bytes, data: st.DataObject) -> None:
    frame = bytearray(compress(content))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        assert len(decompress(frame, 2000)) <= 2000


def test_any_buffer_can_be_given() -> None:
    body = encode("int4", bell(300, 4))
    for kind in (bytes, bytearray, memoryview):
        assert decompress(kind(compress(kind(body))), len(body)) == body
        assert torch.equal(decode(kind(body), 300), decode(body, 300))
