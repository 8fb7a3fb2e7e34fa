"""Outbox and inbox: order, bounds, and that any way of cutting the bytes gives the same messages."""

from __future__ import annotations

import random

import pytest

from p2pdiloco.wire.blocks import Blocks, block_bytes
from p2pdiloco.wire.frames import (
    CHUNK_LIMIT,
    HEADER,
    OPEN_STREAMS_LIMIT,
    FrameError,
    Kind,
    Parting,
    encode_frame,
    encode_goodbye,
    encode_header,
    encode_sized,
    parse_header,
)
from p2pdiloco.wire.inbox import Aborted, Completed, Event, Inbox, Received, Skipped
from p2pdiloco.wire.outbox import GROUP_BYTES, Outbox

CHUNK = 1000
GENEROUS = 1 << 30


def make_outbox(**limits: int) -> Outbox:
    return Outbox(**{"control_limit": 1 << 20, "payload_limit": 1 << 20, "chunk_bytes": CHUNK, **limits})


def make_inbox(
    *, admits: bool = True, is_open: bool = True, bytes_limit: int = GENEROUS
) -> tuple[Inbox, list[tuple[bytes, int]]]:
    asked: list[tuple[bytes, int]] = []

    def admit(kind: Kind, stream: int, body: bytes, size: int) -> bool:
        asked.append((body, size))
        return admits

    inbox = Inbox(admit, allocate=Blocks(limit_bytes=0).take, bytes_limit=bytes_limit)
    if is_open:
        inbox.open()
        inbox.granted = GENEROUS
    return inbox, asked


def payload(size: int, seed: int = 1) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


def drain(outbox: Outbox) -> bytes:
    out = bytearray()
    while (piece := outbox.next()) is not None:
        out += piece.head
        out += piece.chunk
    return bytes(out)


def kinds_in(data: bytes) -> list[tuple[Kind, int]]:
    found, position = [], 0
    while position < len(data):
        header = parse_header(data, position)
        found.append((header.kind, header.stream))
        position += HEADER.size + header.length
    return found


def feed(inbox: Inbox, data: bytes, cut: int | random.Random = 1 << 20) -> list[Event]:
    events: list[Event] = []
    position = 0
    while position < len(data):
        buffer = inbox.buffer()
        most = cut if isinstance(cut, int) else cut.choice([1, 3, 9, 500, 5000, 40000])
        count = min(len(buffer), most, len(data) - position)
        assert count > 0
        buffer[:count] = data[position : position + count]
        events += inbox.advance(count)
        position += count
    return events


# -- outbox ----------------------------------------------------------------------------------------------------------


def test_control_overtakes_bulk_that_was_put_before() -> None:
    outbox = make_outbox()
    assert outbox.put_bulk(b"bulk", payload(5 * CHUNK), 0.0)
    outbox.next()
    assert outbox.put(encode_frame(Kind.MESSAGE, 0, b"urgent"))
    assert kinds_in(drain(outbox))[0] == (Kind.MESSAGE, 0)


def test_equal_streams_take_turns_and_the_more_urgent_goes_first() -> None:
    outbox = make_outbox()
    for _ in range(2):
        outbox.put_bulk(b"", payload(3 * CHUNK), 1.0)
    outbox.put_bulk(b"", payload(2 * CHUNK), 0.5)
    chunks = [stream for kind, stream in kinds_in(drain(outbox)) if kind is Kind.BULK_CHUNK]
    assert chunks == [2, 2, 0, 1, 0, 1, 0, 1]


def test_an_urgent_stream_opens_beyond_the_group() -> None:
    outbox = make_outbox()
    for _ in range(40):
        outbox.put_bulk(b"", payload(3 * CHUNK), 1.0)
    for _ in range(20):
        outbox.next()
    outbox.put_bulk(b"", payload(CHUNK), 0.0)
    assert kinds_in(drain(outbox))[0] == (Kind.BULK_START, 40)


def test_never_more_open_streams_than_the_receiver_takes() -> None:
    outbox = make_outbox(payload_limit=GENEROUS)
    chunks: dict[int, int] = {}
    most = 0
    for urgency in range(200):
        outbox.put_bulk(b"", payload(3 * CHUNK), -float(urgency))
        piece = outbox.next()
        assert piece is not None
        for kind, stream in kinds_in(piece.head + bytes(piece.chunk)):
            chunks[stream] = chunks.get(stream, 0) + (kind is Kind.BULK_CHUNK)
        most = max(most, sum(count < 3 for count in chunks.values()))
    assert most == OPEN_STREAMS_LIMIT
    drain(outbox)
    assert outbox.is_empty
    assert outbox.queued_bytes == 0


def test_a_full_outbox_says_no_and_recovers() -> None:
    outbox = make_outbox(payload_limit=2 * CHUNK, control_limit=100)
    assert outbox.put_bulk(b"", payload(2 * CHUNK), 0.0)
    assert not outbox.put_bulk(b"", payload(1), 0.0)
    assert not outbox.put(bytes(101))
    drain(outbox)
    assert outbox.put_bulk(b"", payload(1), 0.0)


def test_payloads_are_not_copied() -> None:
    outbox = make_outbox()
    source = bytearray(CHUNK)
    outbox.put_bulk(b"", memoryview(source), 0.0)
    piece = outbox.next()
    assert piece is not None
    assert piece.chunk.obj is source


def test_cancel_forgets_the_rest_and_tells_only_if_it_had_begun() -> None:
    outbox = make_outbox()
    outbox.put_bulk(b"", payload(3 * CHUNK), 0.0)
    outbox.put_bulk(b"", payload(3 * CHUNK), 0.0)
    outbox.next()
    outbox.cancel(Kind.BULK_CANCEL, 0)
    assert kinds_in(drain(outbox))[0] == (Kind.BULK_ABORT, 0)
    outbox.cancel(Kind.BULK_CANCEL, 1)  # out already
    outbox.put_bulk(b"", payload(CHUNK), 0.0)
    outbox.cancel(Kind.BULK_CANCEL, 2)  # not begun
    assert outbox.is_empty
    assert outbox.queued_bytes == 0


def test_large_streams_go_one_after_another() -> None:
    outbox = make_outbox(payload_limit=GENEROUS, chunk_bytes=CHUNK_LIMIT)
    for _ in range(3):
        outbox.put_bulk(b"", memoryview(bytes(2 * GROUP_BYTES)), 0.0)
    opened, most, left = set(), 0, [2 * GROUP_BYTES] * 3
    while (piece := outbox.next()) is not None:
        for kind, stream in kinds_in(piece.head + bytes(piece.chunk)):
            opened.add(stream)
            if kind is Kind.BULK_CHUNK:
                left[stream] -= len(piece.chunk)
        most = max(most, sum(left[stream] for stream in opened))
    assert left == [0] * 3
    assert most <= 3 * GROUP_BYTES


def test_what_is_newer_takes_the_place_of_what_has_not_begun() -> None:
    outbox = make_outbox()
    outbox.put_bulk(b"begun", payload(3 * CHUNK), 0.0, topic="shard 1")
    outbox.next()
    outbox.put_bulk(b"old", payload(3 * CHUNK), 0.0, topic="shard 1")
    outbox.put_bulk(b"other", payload(3 * CHUNK), 0.0, topic="shard 2")
    outbox.put_bulk(b"new", payload(2 * CHUNK), 0.0, topic="shard 1")
    assert outbox.payload_bytes == (2 + 3 + 2) * CHUNK
    sent = drain(outbox)
    assert [stream for kind, stream in kinds_in(sent) if kind is Kind.BULK_START] == [2, 3]
    assert outbox.is_empty
    assert outbox.queued_bytes == 0


def test_what_is_announced_but_not_begun_is_given_up() -> None:
    outbox = make_outbox()
    outbox.put_bulk(b"old", payload(3 * CHUNK), 0.0, topic="shard 1")
    assert outbox.next(0) is not None
    outbox.put_bulk(b"new", payload(CHUNK), 0.0, topic="shard 1")
    assert kinds_in(drain(outbox)) == [(Kind.BULK_ABORT, 0), (Kind.BULK_START, 1), (Kind.BULK_CHUNK, 1)]


def test_goodbye_is_last() -> None:
    outbox = make_outbox()
    outbox.part(encode_goodbye(Parting.LEAVING, "bye"))
    outbox.put_bulk(b"", payload(2 * CHUNK), 0.0)
    outbox.put(encode_frame(Kind.MESSAGE, 0, b""))
    assert kinds_in(drain(outbox))[-1] == (Kind.GOODBYE, 0)
    assert outbox.is_empty


# -- inbox -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_however_the_bytes_are_cut_the_messages_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    outbox = make_outbox(payload_limit=GENEROUS, control_limit=GENEROUS)
    bodies, payloads = [], {}
    for index in range(60):
        body = b"%d " % index + rng.randbytes(rng.choice([0, 10, 900, 20000]))
        if rng.random() < 0.4:
            payloads[body] = bytes(payload(rng.choice([0, 1, CHUNK, 300_000]), seed=index))
            assert outbox.put_bulk(body, memoryview(payloads[body]), rng.random())
        else:
            bodies.append(body)
            assert outbox.put(encode_frame(Kind.MESSAGE, 0, body))
    inbox, asked = make_inbox()
    events = feed(inbox, drain(outbox), rng)
    assert [event.body for event in events if isinstance(event, Received)] == bodies
    assert {event.body: bytes(event.payload) for event in events if isinstance(event, Completed)} == payloads
    assert len(asked) == len(payloads)
    assert inbox.reserved_bytes == 0


def test_chunks_are_read_straight_into_the_payload() -> None:
    inbox, _ = make_inbox()
    feed(inbox, encode_sized(Kind.BULK_START, 0, 50_000, b""))
    feed(inbox, encode_header(Kind.BULK_CHUNK, 0, 50_000) + b"x")
    assert len(inbox.buffer()) == 49_999


def test_what_is_not_admitted_is_dropped_without_memory() -> None:
    inbox, asked = make_inbox(admits=False)
    outbox = make_outbox()
    outbox.put_bulk(b"unwanted", payload(50 * CHUNK), 0.0)
    outbox.put(encode_frame(Kind.MESSAGE, 0, b"after"))
    events = feed(inbox, drain(outbox), 7)
    assert [type(event) for event in events] == [Received, Skipped]
    assert asked == [(b"unwanted", 50 * CHUNK)]
    assert inbox.reserved_bytes == 0
    assert inbox.bulk_bytes == 50 * CHUNK


def test_more_than_the_bytes_limit_is_not_even_asked_about() -> None:
    inbox, asked = make_inbox(bytes_limit=1000)
    events = feed(inbox, encode_sized(Kind.BULK_START, 0, 900, b"a") + encode_sized(Kind.BULK_START, 1, 101, b"b"))
    assert events == [Skipped(Kind.BULK_START, 1)]
    assert asked == [(b"a", 900)]


def test_admission_is_asked_after_the_frames_before_it_are_handled() -> None:
    inbox, asked = make_inbox()
    data = encode_frame(Kind.MESSAGE, 0, b"first") + encode_sized(Kind.BULK_START, 0, 5, b"then")
    inbox.buffer()[: len(data)] = data
    events = inbox.advance(len(data))
    assert isinstance(next(events), Received)
    assert not asked
    assert list(events) == []
    assert asked


def test_an_aborted_stream_gives_its_memory_back() -> None:
    inbox, _ = make_inbox()
    feed(inbox, encode_sized(Kind.RESPONSE_START, 3, 500, b""))
    assert inbox.reserved_bytes == 500
    assert feed(inbox, encode_frame(Kind.RESPONSE_ABORT, 3, b"")) == [Aborted(Kind.RESPONSE_START, 3, b"")]
    assert inbox.reserved_bytes == 0


BROKEN = {
    "unknown kind": b"\0\0\0\0\xff\0\0\0\0",
    "too long": HEADER.pack(2**31, Kind.MESSAGE, 0),
    "chunk of nothing": encode_header(Kind.BULK_CHUNK, 5, 10),
    "chunk too long": encode_sized(Kind.BULK_START, 0, 5, b"") + encode_header(Kind.BULK_CHUNK, 0, 6),
    "empty chunk": encode_sized(Kind.BULK_START, 0, 5, b"") + encode_header(Kind.BULK_CHUNK, 0, 0),
    "begun twice": encode_sized(Kind.BULK_START, 0, 5, b"") * 2,
    "hello when open": encode_frame(Kind.HELLO, 0, b""),
    "too many streams": b"".join(encode_sized(Kind.BULK_START, n, 5, b"") for n in range(200)),
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("cut", [1, 1 << 20])
def test_a_peer_that_breaks_the_format_is_found_out(name: str, cut: int) -> None:
    inbox, _ = make_inbox()
    with pytest.raises(FrameError):
        feed(inbox, BROKEN[name], cut)


def test_before_the_handshake_nothing_else_may_come() -> None:
    inbox, _ = make_inbox(is_open=False)
    assert feed(inbox, encode_frame(Kind.HELLO, 0, b"hi")) == [Received(Kind.HELLO, 0, b"hi")]
    with pytest.raises(FrameError, match="no place"):
        feed(inbox, encode_frame(Kind.MESSAGE, 0, b""))


# -- blocks ----------------------------------------------------------------------------------------------------------


def test_a_block_is_lent_again_only_when_nobody_looks_at_it() -> None:
    blocks = Blocks(limit_bytes=1 << 30)
    first = blocks.take(1 << 20)
    first[:3] = b"old"
    part = first[1:3]
    del first
    second = blocks.take(1 << 20)
    second[:3] = b"new"
    assert bytes(part) == b"ld"
    del part
    third = blocks.take(1 << 20)
    assert bytes(third[:3]) == b"old"
    assert blocks.kept_bytes == 2 * block_bytes(1 << 20)


def test_the_pool_keeps_to_its_limit() -> None:
    blocks = Blocks(limit_bytes=4 << 20)
    lent = [blocks.take(1 << 20) for _ in range(10)]
    assert blocks.kept_bytes <= 4 << 20
    assert len({id(view.obj) for view in lent}) == 10
    blocks.take(64 << 20)
    assert blocks.kept_bytes <= 4 << 20


def test_block_sizes_waste_an_eighth_at_most() -> None:
    for size in [262_144, 262_145, 300_000, 1 << 20, (1 << 20) + 1, 77_777_777]:
        assert size <= block_bytes(size) <= size * 1.126 + 1
