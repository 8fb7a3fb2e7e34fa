"""Payloads in parts: whole and once, whatever lanes are lost and in whatever order parts come."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.net import multipath
from p2pdiloco.net.frames import OPEN_STREAMS_LIMIT, FrameError, Part, Start, Use
from p2pdiloco.net.multipath import PayloadState, Piece, Reassembler, Splitter, Whole

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipath, "PART_BYTES", PART)


def payload(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def assembler() -> Reassembler:
    return Reassembler(allocate=lambda size: memoryview(bytearray(size)))


def deliver(receiver: Reassembler, piece: Piece, *, admits: bool = True) -> Whole | None:
    """As a conversation does it."""
    start = piece.start
    known = receiver.state_of(start)
    if known is PayloadState.NEW and admits:
        receiver.admit(start, piece.body)
    elif known is PayloadState.NEW:
        receiver.refuse(start)
    if known is PayloadState.OVER or not admits:
        return None
    receiver.place_of(start)[:] = piece.data
    return receiver.complete(start)


def give(sender: Splitter[Any], lane: Any, stream: int) -> Piece | None:
    """The next part, for this lane and stream."""
    piece = sender.next(lane)
    if piece is not None:
        sender.assign(lane, stream, piece)
    return piece


def test_what_is_newer_takes_the_place_of_what_no_lane_has() -> None:
    sender: Splitter[int] = Splitter(payload_limit=1 << 30)
    for body in (b"begun", b"old", b"new"):
        assert sender.put(Use.MESSAGE, 0, body, memoryview(payload(2 * PART)), 0.0, topic="shard 1")
        if body == b"begun":
            piece = sender.next(0)
            assert piece is not None
            sender.put_back(piece)
    bodies = []
    for stream in range(1, 10):
        if (part := give(sender, 0, stream)) is not None:
            bodies.append(part.body)
            sender.acknowledge(0, stream)
    assert bodies == [b"begun", b"begun", b"new", b"new"]
    assert sender.is_idle


@given(
    sizes=st.lists(st.integers(1, 12 * PART), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_every_payload_comes_whole_and_once(sizes: list[int], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multipath, "PART_BYTES", PART)
        rng = random.Random(seed)
        sender: Splitter[int] = Splitter(payload_limit=1 << 30)
        receiver = assembler()
        for index, size in enumerate(sizes):
            assert sender.put(Use.MESSAGE, 0, b"%d" % index, memoryview(payload(size)), rng.random())
        out: list[tuple[int, int, Any]] = []
        """On its way: lane, stream, part."""
        wholes, streams, lanes = [], 0, [0, 1, 2]
        while not sender.is_idle:
            lane = rng.choice(lanes)
            match rng.choice(["send", "send", "arrive", "arrive", "arrive unacknowledged", "lose"]):
                case "send":
                    streams += 1
                    if (part := give(sender, lane, streams)) is not None:
                        out.append((lane, streams, part))
                case "lose" if rng.random() < 0.2:
                    sender.requeue(lane)
                    late = [entry for entry in out if entry[0] == lane]
                    out = [entry for entry in out if entry[0] != lane]
                    lanes[lanes.index(lane)] = max(lanes) + 1
                    # What a dead lane carried may have arrived all the same.
                    for _, _, part in late:
                        if rng.random() < 0.5:
                            wholes.append(deliver(receiver, part))
                case "lose":
                    pass
                case what if out:
                    lane, stream, part = out.pop(rng.randrange(len(out)))
                    wholes.append(deliver(receiver, part))
                    if what == "arrive":
                        sender.acknowledge(lane, stream)
                    else:
                        sender.requeue(lane)
                        out = [entry for entry in out if entry[0] != lane]
        done = [whole for whole in wholes if whole is not None]
        assert sorted(whole.body for whole in done) == sorted(b"%d" % index for index in range(len(sizes)))
        for whole in done:
            assert bytes(whole.payload) == payload(sizes[int(whole.body)])
        assert receiver.held_bytes == 0
        assert sender.queued_bytes == 0


def test_urgent_first_then_in_order() -> None:
    sender: Splitter[str] = Splitter(payload_limit=1 << 20)
    for name, priority in ((b"late", 1.0), (b"first", 0.0), (b"later", 1.0)):
        sender.put(Use.MESSAGE, 0, name, memoryview(payload(2 * PART)), priority)
    order = [part.body for stream in range(6) if (part := give(sender, "lane", stream)) is not None]
    assert order == [b"first", b"first", b"late", b"late", b"later", b"later"]
    assert give(sender, "lane", 7) is None


def test_the_sender_is_bounded_and_recovers() -> None:
    sender: Splitter[str] = Splitter(payload_limit=3 * PART)
    assert sender.put(Use.MESSAGE, 0, b"", memoryview(payload(2 * PART)), 0.0)
    assert not sender.put(Use.MESSAGE, 0, b"", memoryview(payload(2 * PART)), 0.0)
    for stream in (1, 2):
        give(sender, "lane", stream)
        sender.acknowledge("lane", stream)
    assert sender.is_idle
    assert sender.put(Use.MESSAGE, 0, b"", memoryview(payload(3 * PART)), 0.0)
    assert sender.queued_bytes == 3 * PART
    part = sender.next("lane")
    assert part is not None
    sender.put_back(part)
    assert sender.queued_bytes == 3 * PART


def test_what_is_refused_is_forgotten_on_all_lanes() -> None:
    sender: Splitter[str] = Splitter(payload_limit=1 << 20)
    sender.put(Use.ANSWER, 9, b"", memoryview(payload(5 * PART)), 0.0)
    give(sender, "a", 1)
    give(sender, "b", 2)
    sender.acknowledge("a", 1)
    give(sender, "a", 3)
    assert sorted(sender.refuse("b", 2)) == [("a", 3), ("b", 2)]
    assert sender.is_idle
    assert sender.refuse("b", 2) == []
    sender.acknowledge("a", 3)
    sender.put(Use.ANSWER, 9, b"", memoryview(payload(5 * PART)), 0.0)
    give(sender, "a", 4)
    assert sender.withdraw(8) == []
    assert sender.withdraw(9) == [("a", 4)]
    assert sender.is_idle


def part(use: Use, number: int, total: int, offset: int, size: int, request: int = 0) -> Start:
    return Start(use, request, size, Part(number, total, offset))


def test_what_is_refused_is_over() -> None:
    receiver = assembler()
    first, second = (part(Use.MESSAGE, 1, 2 * PART, offset, PART) for offset in (0, PART))
    assert receiver.state_of(first) is PayloadState.NEW
    receiver.refuse(first)
    assert receiver.state_of(second) is PayloadState.OVER
    assert receiver.held_bytes == 0


def test_an_answer_that_is_not_wanted_gives_its_memory_back() -> None:
    receiver = assembler()
    for number, request in ((1, 4), (2, 5)):
        receiver.admit(part(Use.ANSWER, number, 2 * PART, 0, PART, request), b"")
    assert receiver.held_bytes == 4 * PART
    receiver.withdraw(4)
    assert receiver.held_bytes == 2 * PART
    receiver.refuse(part(Use.ANSWER, 2, 2 * PART, PART, PART, 5))
    assert receiver.held_bytes == 0


@pytest.mark.parametrize("start", [part(Use.MESSAGE, 7, 11, 0, 10), part(Use.ANSWER, 7, 10, 0, 10)])
def test_a_part_of_another_payload_is_found_out(start: Start) -> None:
    receiver = assembler()
    receiver.admit(part(Use.MESSAGE, 7, 10, 0, 5), b"")
    with pytest.raises(FrameError):
        receiver.state_of(start)


def test_payloads_in_parts_are_bounded() -> None:
    receiver = assembler()
    for number in range(2 * OPEN_STREAMS_LIMIT):
        receiver.admit(part(Use.MESSAGE, number, 10, 0, 5), b"")
    with pytest.raises(FrameError, match="at once"):
        receiver.state_of(part(Use.MESSAGE, 999, 10, 0, 5))
