"""Frames: limits are checked on the header alone, and texts from peers are tamed."""

from __future__ import annotations

import pytest

from p2pdiloco.wire.frames import (
    BODY_LIMITS,
    CONTROL_LIMIT,
    HEADER,
    FrameError,
    Kind,
    Parting,
    decode_goodbye,
    decode_text,
    encode_frame,
    encode_goodbye,
    encode_sized,
    parse_header,
    split_size,
)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_header_may_claim_the_limit_and_not_a_byte_more(kind: Kind) -> None:
    limit = BODY_LIMITS[kind]
    assert parse_header(HEADER.pack(limit, kind, 7)).length == limit
    with pytest.raises(FrameError, match=kind.name):
        parse_header(HEADER.pack(limit + 1, kind, 7))


@pytest.mark.parametrize("garbage", [b"GET / HTT", b"\xff" * 9, b"\0" * 9, b"SSH-2.0-O"])
def test_garbage_is_no_header(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        parse_header(garbage)


def test_the_callers_too_long_body_is_a_value_error_and_no_frame_error() -> None:
    for encode in (
        lambda: encode_frame(Kind.MESSAGE, 0, bytes(CONTROL_LIMIT + 1)),
        lambda: encode_sized(Kind.REQUEST, 0, 0, bytes(CONTROL_LIMIT + 1)),
    ):
        with pytest.raises(ValueError) as caught:
            encode()
        assert not isinstance(caught.value, FrameError)


def test_sizes_come_back_and_absurd_ones_do_not() -> None:
    frame = encode_sized(Kind.BULK_START, 1, 12345, b"body")
    assert split_size(frame[HEADER.size :]) == (12345, b"body")
    for bad in (b"", b"\0" * 7, b"\xff" * 8):
        with pytest.raises(FrameError):
            split_size(bad)


def test_goodbye_comes_back_cut_and_printable() -> None:
    body = encode_goodbye(Parting.REFUSED, "no\nway " + "x" * 5000)[HEADER.size :]
    parting, reason = decode_goodbye(body)
    assert parting is Parting.REFUSED
    assert reason.startswith("no way xxx")
    assert len(reason) <= 1024
    for bad in (b"", b"\xee"):
        with pytest.raises(FrameError):
            decode_goodbye(bad)


def test_text_of_a_peer_has_no_control_characters() -> None:
    assert decode_text(b"a\x1b[31mb\r\nc\xff") == "a [31mb  c\N{REPLACEMENT CHARACTER}"
