"""Compressed payloads: frames, their index, and what hostile peers put there."""

import contextlib
import struct

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.codec import native
from p2pdiloco.codec.compression import (
    STORED,
    compress,
    decompress,
    index_bytes,
    join,
    payload_limit,
    split,
    store,
    unpack,
)
from p2pdiloco.codec.quantization import CHUNK, LARGEST_BODY, encode_vector, recipe


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


def stored(bodies: list[bytes]) -> bytes:
    payload = memoryview(bytearray(index_bytes(len(bodies))) + b"".join(bodies))
    return bytes(store(payload, [len(body) for body in bodies]))


@given(st.lists(st.binary(max_size=3000), max_size=5), st.sampled_from([bytes, bytearray, memoryview]), st.booleans())
@settings(deadline=None)
def test_bodies_come_back_as_they_were(bodies: list[bytes], kind: type, is_stored: bool) -> None:
    payload = stored(bodies) if is_stored else join(kind(body) for body in bodies)
    assert list(split(kind(payload), len(bodies), 3000)) == bodies
    whole, ends = unpack(kind(payload), len(bodies), 3000)
    assert [bytes(whole[end - len(body) : end]) for body, end in zip(bodies, ends, strict=True)] == bodies
    assert len(whole) == sum(map(len, bodies))


@pytest.mark.parametrize("is_used", [False, native.is_used])
def test_stored_bodies_are_neither_coded_nor_copied(is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """int4's: four bits each and a scale a block. With the library and without it."""
    monkeypatch.setattr(native, "is_used", is_used)
    elements = CHUNK + 1000
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    bodies = encode_vector(recipe("int4"), values, room=index_bytes(2))
    payload = store(bodies.memory, [len(body) for body in bodies])
    assert list(map(bytes, bodies)) == list(map(bytes, encode_vector(recipe("int4"), values)))
    assert len(join(bodies)) < 0.9 * len(payload) < len(payload) <= payload_limit(elements)
    whole, ends = unpack(payload, 2, LARGEST_BODY)
    assert (whole.obj, ends) == (payload.obj, [len(bodies[0]), len(whole)])
    assert bytes(whole) == b"".join(bodies)


def test_stored_bodies_are_no_larger_than_they_may_be() -> None:
    payload = stored([b"a" * 1001, b"b"])
    with pytest.raises(ValueError, match="a body of 1001 bytes, at most 1000"):
        unpack(payload, 2, 1000)
    with pytest.raises(ValueError, match="a body of 1001 bytes, at most 1000"):
        list(split(payload, 2, 1000))


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
    for payload, flag in ((join([b"a" * 50, b"b" * 60]), 0), (stored([b"a" * 50, b"b" * 60]), STORED)):
        refuse_other_indices(payload, struct.pack("<III", flag | 2, 2**32 - 1, 2**32 - 1))


def refuse_other_indices(payload: bytes, huge: bytes) -> None:
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


@given(st.binary(max_size=300), st.integers(0, 4), st.booleans())
@settings(deadline=None)
def test_noise_is_no_payload(data: bytes, bodies: int, is_stored: bool) -> None:
    data = struct.pack("<I", STORED | bodies) + data if is_stored else data
    with contextlib.suppress(ValueError):
        assert sum(len(body) for body in split(data, bodies, 100)) <= 100 * bodies
