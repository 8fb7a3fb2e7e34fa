"""Compressed payloads: frames, their index, and what hostile peers put there."""

import contextlib
import struct
from collections.abc import Iterator

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.tensors.quantizers import CHUNK, encode_chunk, recipe
from p2pdiloco.wire import compression, libzstd
from p2pdiloco.wire.compression import compress, decompress, join, payload_limit, split, unpack


@pytest.fixture(params=["zstandard", "libzstd"], autouse=True, scope="module")
def decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both that may decode."""
    if request.param == "libzstd" and not libzstd.AVAILABLE:
        pytest.skip("no libzstd here that is worth using")
    before = compression._contexts.decoder
    compression._contexts.decoder = libzstd.Decoder() if request.param == "libzstd" else None
    yield
    compression._contexts.decoder = before


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    with pytest.raises(ValueError, match="at most 1000"):
        decompress(bomb, 1000)
    with pytest.raises(ValueError, match="at most 1000"):
        list(split(struct.pack("<II", 1, len(bomb)) + bomb, 1, 1000))


def test_frames_that_hide_something_are_refused() -> None:
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 100)
    good = compress(b"x" * 100)
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    for frame in (unknown, b"", b"no zstd", good[:-1], good + b"x", good + good, skippable + good):
        with pytest.raises(ValueError, match="payload"):
            decompress(frame, 1000)


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_noise_is_no_frame(data: bytes) -> None:
    with pytest.raises(ValueError, match="payload"):
        decompress(data, 1 << 16)


@given(st.binary(max_size=2000), st.data())
@settings(deadline=None)
def test_altered_frames_never_yield_too_much(content: bytes, data: st.DataObject) -> None:
    frame = bytearray(compress(content))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ValueError):
        assert len(decompress(frame, 2000)) <= 2000


@given(st.lists(st.binary(max_size=3000), max_size=5), st.sampled_from([bytes, bytearray, memoryview]), st.booleans())
@settings(deadline=None)
def test_bodies_come_back_as_they_were(bodies: list[bytes], kind: type, is_coded: bool) -> None:
    payload = join((kind(body) for body in bodies), is_coded=is_coded)
    assert list(split(kind(payload), len(bodies), 3000)) == bodies
    whole, ends = unpack(kind(payload), len(bodies), 3000)
    assert [bytes(whole[end - len(body) : end]) for body, end in zip(bodies, ends, strict=True)] == bodies
    assert len(whole) == sum(map(len, bodies))


def test_symbols_without_huffman_codes_are_as_large_as_they_are() -> None:
    """int4's, whose entropy is some three and a half bits: four bits each, and what zstd adds to what it cannot
    compress. Runs of zeros are small either way."""
    body = bytes(encode_chunk(recipe("int4"), torch.randn(CHUNK, generator=torch.Generator().manual_seed(1))))
    coded, packed = compress(body), compress(body, is_coded=False)
    assert len(coded) < 0.9 * len(body) < len(body) <= len(packed) < len(body) + 64
    assert decompress(coded, len(body)) == decompress(packed, len(body)) == body
    assert len(compress(bytes(CHUNK), is_coded=False)) < 100
    assert len(join([packed] * 8)) <= payload_limit(8 * CHUNK)


def test_a_frame_of_a_payload_is_one_that_could_be_sent_alone() -> None:
    bodies = [bytes(range(256)) * 40, b"", b"abc" * 999]
    payload = join(bodies)
    sizes = struct.unpack_from("<3I", payload, 4)
    at = 16
    for size, body in zip(sizes, bodies, strict=True):
        assert decompress(payload[at : at + size], 1 << 20) == body
        at += size
    assert at == len(payload)


def test_an_index_that_does_not_fit_is_refused() -> None:
    payload = join([b"a" * 50, b"b" * 60])
    huge = struct.pack("<III", 2, 2**32 - 1, 2**32 - 1)
    for wrong, bodies in (
        (payload, 1),
        (payload, 3),
        (payload[:-1], 2),
        (payload + b"x", 2),
        (payload[:7], 2),
        (b"", 0),
        (huge + payload[12:], 2),
    ):
        with pytest.raises(ValueError, match="payload"):
            list(split(wrong, bodies, 1000))
        with pytest.raises(ValueError, match="payload"):
            unpack(wrong, bodies, 1000)


@given(st.binary(max_size=300), st.integers(0, 4))
@settings(deadline=None)
def test_noise_is_no_payload(data: bytes, bodies: int) -> None:
    with contextlib.suppress(ValueError):
        assert sum(len(body) for body in split(data, bodies, 100)) <= 100 * bodies
