"""Frames: limits are checked on the header alone, and texts from peers are tamed."""

from __future__ import annotations

import pytest

from p2pdiloco.net.frames import (
    BODY_LIMITS,
    CONTROL_LIMIT,
    HEADER,
    FrameError,
    FrameKind,
    GoodbyeCode,
    Header,
    Part,
    Start,
    Use,
    decode_goodbye,
    decode_request,
    decode_start,
    decode_text,
    encode_frame,
    encode_goodbye,
    encode_request,
    encode_start,
    parse_header,
)


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_header_may_claim_the_limit_and_not_a_byte_more(kind: FrameKind) -> None:
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
        lambda: encode_frame(FrameKind.MESSAGE, 0, bytes(CONTROL_LIMIT + 1)),
        lambda: encode_request(0, 0, bytes(CONTROL_LIMIT + 1)),
        lambda: encode_start(0, Start(Use.MESSAGE, 0, 1), bytes(CONTROL_LIMIT + 1)),
    ):
        with pytest.raises(ValueError) as caught:
            encode()
        assert not isinstance(caught.value, FrameError)


@pytest.mark.parametrize(
    "start",
    [
        Start(Use.MESSAGE, 0, 12345),
        Start(Use.MESSAGE, 0, 0),
        Start(Use.ANSWER, 7, 2**40),
        Start(Use.MESSAGE, 0, 10, Part(3, 30, 20)),
        Start(Use.ANSWER, 2**32 - 1, 1, Part(2**60, 2**40, 0)),
    ],
)
def test_what_a_stream_is_for_comes_back(start: Start) -> None:
    frame = encode_start(1, start, b"body")
    assert parse_header(frame) == Header(len(frame) - HEADER.size, FrameKind.START, 1)
    assert decode_start(frame[HEADER.size :]) == (start, b"body")


@pytest.mark.parametrize(
    "start",
    [
        Start(Use.MESSAGE, 0, 2**40 + 1),
        Start(Use.MESSAGE, 0, 11, Part(1, 10, 0)),
        Start(Use.MESSAGE, 0, 1, Part(1, 10, 10)),
        Start(Use.MESSAGE, 0, 10, Part(1, 10, 2**64 - 1)),
        Start(Use.MESSAGE, 0, 0, Part(1, 10, 0)),
        Start(Use.MESSAGE, 0, 10, Part(1, 2**63, 0)),
    ],
)
def test_what_cannot_be_is_no_stream(start: Start) -> None:
    with pytest.raises(FrameError):
        decode_start(encode_start(0, start, b"")[HEADER.size :])


@pytest.mark.parametrize("body", [b"", bytes(12), bytes([4]) + bytes(100), bytes([2]) + bytes(36)])
def test_a_start_that_is_none_is_found_out(body: bytes) -> None:
    with pytest.raises(FrameError):
        decode_start(body)


def test_requests_come_back_and_absurd_ones_do_not() -> None:
    assert decode_request(encode_request(1, 12345, b"body")[HEADER.size :]) == (12345, b"body")
    assert decode_request(encode_request(1, 2**63, b"")[HEADER.size :]) == (2**40, b"")
    for bad in (b"", bytes(7), b"\xff" * 8):
        with pytest.raises(FrameError):
            decode_request(bad)


def test_there_are_few_kinds_and_those_that_refuse_have_the_numbers_that_they_always_had() -> None:
    assert len(FrameKind) <= 14
    assert (FrameKind.HELLO, FrameKind.PROOF, FrameKind.GOODBYE) == (1, 2, 15)


def test_goodbye_comes_back_cut_and_printable() -> None:
    body = encode_goodbye(GoodbyeCode.REFUSED, "no\nway " + "x" * 5000)[HEADER.size :]
    parting, reason = decode_goodbye(body)
    assert parting is GoodbyeCode.REFUSED
    assert reason.startswith("no way xxx")
    assert len(reason) <= 1024
    for bad in (b"", b"\xee"):
        with pytest.raises(FrameError):
            decode_goodbye(bad)


def test_text_of_a_peer_has_no_control_characters() -> None:
    assert decode_text(b"a\x1b[31mb\r\nc\xff") == "a [31mb  c\N{REPLACEMENT CHARACTER}"
