"""Outbox and inbox: order, bounds, and that any way of cutting the bytes gives the same messages."""

from __future__ import annotations

import random

import pytest

from p2pdiloco.net.frames import (
    CHUNK_LIMIT,
    HEADER,
    OPEN_STREAMS_LIMIT,
    FrameError,
    FrameKind,
    GoodbyeCode,
    Part,
    Start,
    Use,
    encode_frame,
    encode_goodbye,
    encode_header,
    encode_start,
    parse_header,
)
from p2pdiloco.net.receive_buffer import STAGING_BYTES, Aborted, Begun, Completed, Event, Frame, ReceiveBuffer
from p2pdiloco.net.send_queue import GROUP_BYTES, SendQueue
from p2pdiloco.wire.buffer_pool import Blocks, block_bytes

CHUNK = 1000
GENEROUS = 1 << 30


def make_outbox(**limits: int) -> SendQueue:
    return SendQueue(**{"control_limit": 1 << 20, "payload_limit": 1 << 20, "chunk_bytes": CHUNK, **limits})


def whole(size: int) -> Start:
    return Start(Use.MESSAGE, 0, size)


def put(outbox: SendQueue, body: bytes, data: memoryview, priority: float, topic: str | None = None) -> bool:
    return outbox.put_payload(whole(len(data)), body, data, priority, topic) is not None


def make_inbox(*, is_open: bool = True) -> ReceiveBuffer:
    inbox = ReceiveBuffer()
    if is_open:
        inbox.open()
        inbox.granted = GENEROUS
    return inbox


def payload(size: int, seed: int = 1) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


def drain(outbox: SendQueue) -> bytes:
    out = bytearray()
    while (piece := outbox.next()) is not None:
        out += piece.head
        out += piece.chunk
    return bytes(out)


def kinds_in(data: bytes) -> list[tuple[FrameKind, int]]:
    found, position = [], 0
    while position < len(data):
        header = parse_header(data, position)
        found.append((header.kind, header.stream))
        position += HEADER.size + header.length
    return found


def feed(inbox: ReceiveBuffer, data: bytes, cut: int | random.Random = 1 << 20, *, takes: bool = True) -> list[Event]:
    """All events of ``data``; every stream that begins is taken, or none."""
    events: list[Event] = []
    position = 0
    while position < len(data):
        buffer = inbox.buffer()
        most = cut if isinstance(cut, int) else cut.choice([1, 3, 9, 500, 5000, 40000])
        count = min(len(buffer), most, len(data) - position)
        assert count > 0
        buffer[:count] = data[position : position + count]
        if inbox.advance(count):
            while (event := inbox.next_event()) is not None:
                events.append(event)
                if takes and isinstance(event, Begun) and event.start.size:
                    inbox.receive_into(event.stream, memoryview(bytearray(event.start.size)), event.body)
        position += count
    return events


# -- outbox ----------------------------------------------------------------------------------------------------------


def test_control_overtakes_bulk_that_was_put_before() -> None:
    outbox = make_outbox()
    assert put(outbox, b"bulk", payload(5 * CHUNK), 0.0)
    outbox.next()
    assert outbox.put(encode_frame(FrameKind.MESSAGE, 0, b"urgent"))
    assert kinds_in(drain(outbox))[0] == (FrameKind.MESSAGE, 0)


def test_equal_streams_take_turns_and_the_more_urgent_goes_first() -> None:
    outbox = make_outbox()
    for _ in range(2):
        put(outbox, b"", payload(3 * CHUNK), 1.0)
    put(outbox, b"", payload(2 * CHUNK), 0.5)
    chunks = [stream for kind, stream in kinds_in(drain(outbox)) if kind is FrameKind.CHUNK]
    assert chunks == [2, 2, 0, 1, 0, 1, 0, 1]


def test_a_turn_ends_with_a_payload_or_a_slice_of_a_state() -> None:
    outbox = make_outbox()
    put(outbox, b"", payload(3 * CHUNK), 0.0)
    put(outbox, b"", payload(2 * CHUNK), 10.0)
    found = []
    while (piece := outbox.next()) is not None:
        found.append(piece.ends_turn)
    assert found == [False, False, True, True, True]


def test_an_urgent_stream_opens_beyond_the_group() -> None:
    outbox = make_outbox()
    for _ in range(40):
        put(outbox, b"", payload(3 * CHUNK), 1.0)
    for _ in range(20):
        outbox.next()
    put(outbox, b"", payload(CHUNK), 0.0)
    assert kinds_in(drain(outbox))[0] == (FrameKind.START, 40)


def test_never_more_open_streams_than_the_receiver_takes() -> None:
    outbox = make_outbox(payload_limit=GENEROUS)
    chunks: dict[int, int] = {}
    most = 0
    for urgency in range(200):
        put(outbox, b"", payload(3 * CHUNK), -float(urgency))
        piece = outbox.next()
        assert piece is not None
        for kind, stream in kinds_in(piece.head + bytes(piece.chunk)):
            chunks[stream] = chunks.get(stream, 0) + (kind is FrameKind.CHUNK)
        most = max(most, sum(count < 3 for count in chunks.values()))
    assert most == OPEN_STREAMS_LIMIT
    drain(outbox)
    assert outbox.is_empty
    assert outbox.queued_bytes == 0


def test_a_full_outbox_says_no_and_recovers() -> None:
    outbox = make_outbox(payload_limit=2 * CHUNK, control_limit=100)
    assert put(outbox, b"", payload(2 * CHUNK), 0.0)
    assert not put(outbox, b"", payload(1), 0.0)
    assert not outbox.put(bytes(101))
    drain(outbox)
    assert put(outbox, b"", payload(1), 0.0)


def test_payloads_are_not_copied() -> None:
    outbox = make_outbox()
    source = bytearray(CHUNK)
    put(outbox, b"", memoryview(source), 0.0)
    piece = outbox.next()
    assert piece is not None
    assert piece.chunk.obj is source


def test_cancel_forgets_the_rest_and_tells_only_if_it_had_begun() -> None:
    outbox = make_outbox()
    put(outbox, b"", payload(3 * CHUNK), 0.0)
    put(outbox, b"", payload(3 * CHUNK), 0.0)
    outbox.next()
    outbox.cancel(0)
    assert kinds_in(drain(outbox))[0] == (FrameKind.ABORT, 0)
    outbox.cancel(1)  # out already
    put(outbox, b"", payload(CHUNK), 0.0)
    outbox.cancel(2)  # not begun
    assert outbox.is_empty
    assert outbox.queued_bytes == 0


def test_large_streams_go_one_after_another() -> None:
    outbox = make_outbox(payload_limit=GENEROUS, chunk_bytes=CHUNK_LIMIT)
    for _ in range(3):
        put(outbox, b"", memoryview(bytes(2 * GROUP_BYTES)), 0.0)
    opened, most, left = set(), 0, [2 * GROUP_BYTES] * 3
    while (piece := outbox.next()) is not None:
        for kind, stream in kinds_in(piece.head + bytes(piece.chunk)):
            opened.add(stream)
            if kind is FrameKind.CHUNK:
                left[stream] -= len(piece.chunk)
        most = max(most, sum(left[stream] for stream in opened))
    assert left == [0] * 3
    assert most <= 3 * GROUP_BYTES


def test_what_is_newer_takes_the_place_of_what_has_not_begun() -> None:
    outbox = make_outbox()
    put(outbox, b"begun", payload(3 * CHUNK), 0.0, topic="shard 1")
    outbox.next()
    put(outbox, b"old", payload(3 * CHUNK), 0.0, topic="shard 1")
    put(outbox, b"other", payload(3 * CHUNK), 0.0, topic="shard 2")
    put(outbox, b"new", payload(2 * CHUNK), 0.0, topic="shard 1")
    assert outbox.payload_bytes == (2 + 3 + 2) * CHUNK
    sent = drain(outbox)
    assert [stream for kind, stream in kinds_in(sent) if kind is FrameKind.START] == [2, 3]
    assert outbox.is_empty
    assert outbox.queued_bytes == 0


def test_what_is_announced_but_not_begun_is_given_up() -> None:
    outbox = make_outbox()
    put(outbox, b"old", payload(3 * CHUNK), 0.0, topic="shard 1")
    assert outbox.next(0) is not None
    put(outbox, b"new", payload(CHUNK), 0.0, topic="shard 1")
    assert kinds_in(drain(outbox)) == [(FrameKind.ABORT, 0), (FrameKind.START, 1), (FrameKind.CHUNK, 1)]


@pytest.mark.parametrize("is_announced", [False, True])
def test_what_finds_no_room_replaces_nothing(is_announced: bool) -> None:
    """Otherwise neither the old commit nor the new one would arrive."""
    outbox = make_outbox(payload_limit=3 * CHUNK)
    put(outbox, b"old", payload(2 * CHUNK), 0.0, topic="shard 1")
    if is_announced:
        outbox.next(0)
    assert not put(outbox, b"too large", payload(4 * CHUNK), 0.0, topic="shard 1")
    assert outbox.payload_bytes == 2 * CHUNK
    assert put(outbox, b"new", payload(3 * CHUNK), 0.0, topic="shard 1"), "the room of the old one is its room"
    assert outbox.payload_bytes == 3 * CHUNK


def test_the_first_frame_of_what_is_replaced_gives_its_room() -> None:
    size = len(encode_start(0, whole(CHUNK), b"12345"))
    outbox = make_outbox(control_limit=size)
    assert put(outbox, b"first", payload(CHUNK), 0.0, topic="shard 1")
    assert not put(outbox, b"other", payload(CHUNK), 0.0, topic="shard 2")
    assert put(outbox, b"newer", payload(CHUNK), 0.0, topic="shard 1")
    assert b"newer" in drain(outbox)


def test_goodbye_is_last() -> None:
    outbox = make_outbox()
    outbox.put_goodbye(encode_goodbye(GoodbyeCode.LEAVING, "bye"))
    put(outbox, b"", payload(2 * CHUNK), 0.0)
    outbox.put(encode_frame(FrameKind.MESSAGE, 0, b""))
    assert kinds_in(drain(outbox))[-1] == (FrameKind.GOODBYE, 0)
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
            payloads[body] = bytes(payload(rng.choice([1, CHUNK, 300_000]), seed=index))
            assert put(outbox, body, memoryview(payloads[body]), rng.random())
        else:
            bodies.append(body)
            assert outbox.put(encode_frame(FrameKind.MESSAGE, 0, body))
    inbox = make_inbox()
    events = feed(inbox, drain(outbox), rng)
    assert [event.body for event in events if isinstance(event, Frame)] == bodies
    assert {event.body: bytes(event.payload) for event in events if isinstance(event, Completed)} == payloads
    assert sum(isinstance(event, Begun) for event in events) == len(payloads)
    assert inbox.held_bytes == inbox.demand_bytes == 0


def test_chunks_are_read_straight_into_the_payload() -> None:
    inbox = make_inbox()
    feed(inbox, encode_start(0, whole(50_000), b""))
    feed(inbox, encode_header(FrameKind.CHUNK, 0, 50_000) + b"x")
    assert len(inbox.buffer()) == 49_999


def test_the_middle_of_a_body_is_no_reason_to_look_for_events() -> None:
    inbox = make_inbox()
    feed(inbox, encode_start(0, whole(50_000), b"") + encode_header(FrameKind.CHUNK, 0, 50_000))
    assert not inbox.advance(49_998)
    assert not inbox.advance(1)
    assert inbox.advance(1)
    assert isinstance(inbox.next_event(), Completed)


def test_there_is_always_room_to_read_into() -> None:
    """Also after frames that together end where the staging buffer ends."""
    inbox, size = make_inbox(), STAGING_BYTES // 16
    frame = encode_frame(FrameKind.MESSAGE, 0, bytes(size - HEADER.size))
    for _ in range(40):
        buffer = inbox.buffer()
        assert len(buffer) >= size
        buffer[:size] = frame
        assert inbox.advance(size)
        while inbox.has_more:
            assert isinstance(inbox.next_event(), Frame)


def test_what_is_not_taken_is_dropped_without_memory() -> None:
    inbox = make_inbox()
    outbox = make_outbox()
    put(outbox, b"unwanted", payload(50 * CHUNK), 0.0)
    outbox.put(encode_frame(FrameKind.MESSAGE, 0, b"after"))
    events = feed(inbox, drain(outbox), 7, takes=False)
    assert [type(event) for event in events] == [Frame, Begun]
    assert inbox.held_bytes == 0
    assert inbox.bulk_bytes == 50 * CHUNK


def test_what_follows_a_frame_is_looked_at_after_it() -> None:
    inbox = make_inbox()
    data = encode_frame(FrameKind.MESSAGE, 0, b"first") + encode_start(0, whole(5), b"then") + b"garbage!!"
    inbox.buffer()[: len(data)] = data
    inbox.advance(len(data))
    assert isinstance(inbox.next_event(), Frame)
    assert isinstance(inbox.next_event(), Begun)
    with pytest.raises(FrameError):
        inbox.next_event()


def test_the_beginning_of_a_chunk_is_put_away_without_a_turn_of_the_driver() -> None:
    inbox = make_inbox()
    feed(inbox, encode_start(3, whole(500), b""))
    said = []
    for data in (encode_header(FrameKind.CHUNK, 3, 400) + b"a" * 100, b"a" * 200, b"a" * 100):
        inbox.buffer()[: len(data)] = data
        said.append(inbox.advance(len(data)))
    assert said == [False, False, True]
    assert inbox.arrived_bytes == 400
    assert inbox.next_event() is None
    (event,) = feed(inbox, encode_header(FrameKind.CHUNK, 3, 100) + b"b" * 100)
    assert isinstance(event, Completed)
    assert bytes(event.payload) == b"a" * 400 + b"b" * 100


def test_an_aborted_stream_gives_its_memory_back() -> None:
    inbox = make_inbox()
    start = Start(Use.ANSWER, 3, 500)
    feed(inbox, encode_start(3, start, b""))
    assert inbox.held_bytes == 500
    assert feed(inbox, encode_frame(FrameKind.ABORT, 3)) == [Aborted(3, start)]
    assert inbox.held_bytes == inbox.demand_bytes == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_is_written_into_a_payload_that_is_handed_over(in_place: bool) -> None:
    inbox = make_inbox()
    place = memoryview(bytearray(100))
    feed(inbox, encode_start(0, Start(Use.MESSAGE, 0, 100, Part(9, 100, 0)), b""), takes=False)
    inbox.receive_into(0, place, b"")
    late = encode_header(FrameKind.CHUNK, 0, 100) + b"a" * 10
    feed(inbox, late if in_place else late[:9])
    inbox.drop(9)
    before = bytes(place)
    assert feed(inbox, b"b" * (90 if in_place else 100) + encode_frame(FrameKind.MESSAGE, 0, b"after"))
    assert bytes(place) == before
    assert inbox.demand_bytes == 0


BROKEN = {
    "unknown kind": b"\0\0\0\0\xff\0\0\0\0",
    "too long": HEADER.pack(2**31, FrameKind.MESSAGE, 0),
    "chunk of nothing": encode_header(FrameKind.CHUNK, 5, 10),
    "chunk too long": encode_start(0, whole(5), b"") + encode_header(FrameKind.CHUNK, 0, 6),
    "empty chunk": encode_start(0, whole(5), b"") + encode_header(FrameKind.CHUNK, 0, 0),
    "begun twice": encode_start(0, whole(5), b"") * 2,
    "hello when open": encode_frame(FrameKind.HELLO, 0, b""),
    "too many streams": b"".join(encode_start(n, whole(5), b"") for n in range(200)),
    "http": b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("cut", [1, 1 << 20])
def test_a_peer_that_breaks_the_format_is_found_out(name: str, cut: int) -> None:
    inbox = make_inbox()
    with pytest.raises(FrameError):
        feed(inbox, BROKEN[name], cut)


def test_before_the_handshake_nothing_else_may_come() -> None:
    inbox = make_inbox(is_open=False)
    assert feed(inbox, encode_frame(FrameKind.HELLO, 0, b"hi")) == [Frame(FrameKind.HELLO, 0, b"hi")]
    with pytest.raises(FrameError, match="not allowed"):
        feed(inbox, encode_frame(FrameKind.MESSAGE, 0, b""))


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
    assert sum(map(len, blocks._blocks)) == 2 * block_bytes(1 << 20)


def test_the_pool_keeps_to_its_limit() -> None:
    blocks = Blocks(limit_bytes=4 << 20)
    lent = [blocks.take(1 << 20) for _ in range(10)]
    assert sum(map(len, blocks._blocks)) <= 4 << 20
    assert len({id(view.obj) for view in lent}) == 10
    blocks.take(64 << 20)
    assert sum(map(len, blocks._blocks)) <= 4 << 20


def test_block_sizes_waste_an_eighth_at_most() -> None:
    for size in [262_144, 262_145, 300_000, 1 << 20, (1 << 20) + 1, 77_777_777]:
        assert size <= block_bytes(size) <= size * 1.126 + 1


def test_what_was_left_of_a_cancelled_payload_keeps_no_other_waiting() -> None:
    """Of streams that take turns at most GROUP_BYTES are left; those of a cancelled one do not count."""
    outbox = make_outbox(payload_limit=1 << 30)
    small = memoryview(bytes(10 * CHUNK))
    assert put(outbox, b"small", small, 0.0)
    large = outbox.put_payload(whole(2 * GROUP_BYTES), b"large", memoryview(bytes(2 * GROUP_BYTES)), 0.0)
    assert large is not None
    assert outbox.next() is not None, "both have begun"
    outbox.cancel(large)
    assert put(outbox, b"another", small, 0.0)
    for _ in range(4):
        found = outbox.next()
        assert found is not None
        if b"another" in found.head:
            return
    raise AssertionError("it waits until the small one is sent")
