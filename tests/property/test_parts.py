"""Payloads in parts: whole and once, whatever lanes are lost and in whatever order parts come."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.wire import parts
from p2pdiloco.wire.frames import FrameError, Kind
from p2pdiloco.wire.parts import Assembler, PartHeader, Spreader, Whole

PART = 1000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", PART)


def payload(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def assembler(admits: bool = True, bytes_limit: int = 1 << 30) -> Assembler:
    return Assembler(
        lambda kind, stream, body, size: admits,
        allocate=lambda size: memoryview(bytearray(size)),
        bytes_limit=bytes_limit,
    )


def deliver(receiver: Assembler, body: bytes, data: memoryview) -> Whole | None:
    target = receiver.place(body, len(data))
    if target is None:
        return None
    target[:] = data
    return receiver.complete(body, len(data))


def test_what_is_newer_takes_the_place_of_what_no_lane_has() -> None:
    sender: Spreader[int] = Spreader(payload_limit=1 << 30)
    for body in (b"begun", b"old", b"new"):
        assert sender.put(Kind.BULK_START, 0, body, memoryview(payload(2 * PART)), 0.0, topic="shard 1")
        if body == b"begun":
            assert sender.next(0, 0) is not None
            sender.put_back(0, 0)
    bodies = []
    for stream in range(1, 10):
        if (part := sender.next(0, stream)) is not None:
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
        patch.setattr(parts, "PART_BYTES", PART)
        rng = random.Random(seed)
        sender: Spreader[int] = Spreader(payload_limit=1 << 30)
        receiver = assembler()
        for index, size in enumerate(sizes):
            assert sender.put(Kind.BULK_START, 0, b"%d" % index, memoryview(payload(size)), rng.random())
        out: list[tuple[int, int, Any]] = []
        """On its way: lane, stream, part."""
        wholes, streams, lanes = [], 0, [0, 1, 2]
        while not sender.is_idle:
            lane = rng.choice(lanes)
            match rng.choice(["send", "send", "arrive", "arrive", "arrive unacknowledged", "lose"]):
                case "send":
                    streams += 1
                    if (part := sender.next(lane, streams)) is not None:
                        out.append((lane, streams, part))
                case "lose" if rng.random() < 0.2:
                    sender.lose(lane)
                    late = [entry for entry in out if entry[0] == lane]
                    out = [entry for entry in out if entry[0] != lane]
                    lanes[lanes.index(lane)] = max(lanes) + 1
                    # What a dead lane carried may have arrived all the same.
                    for _, _, part in late:
                        if rng.random() < 0.5:
                            wholes.append(deliver(receiver, part.header.encode() + part.body, part.data))
                case "lose":
                    pass
                case what if out:
                    lane, stream, part = out.pop(rng.randrange(len(out)))
                    wholes.append(deliver(receiver, part.header.encode() + part.body, part.data))
                    if what == "arrive":
                        sender.acknowledge(lane, stream)
                    else:
                        sender.lose(lane)
                        out = [entry for entry in out if entry[0] != lane]
        done = [whole for whole in wholes if whole is not None]
        assert sorted(whole.body for whole in done) == sorted(b"%d" % index for index in range(len(sizes)))
        for whole in done:
            assert bytes(whole.payload) == payload(sizes[int(whole.body)])
        assert receiver.reserved_bytes == 0
        assert sender.queued_bytes == 0


def test_urgent_first_then_in_order() -> None:
    sender: Spreader[str] = Spreader(payload_limit=1 << 20)
    for name, priority in ((b"late", 1.0), (b"first", 0.0), (b"later", 1.0)):
        sender.put(Kind.BULK_START, 0, name, memoryview(payload(2 * PART)), priority)
    order = [part.body for stream in range(6) if (part := sender.next("lane", stream)) is not None]
    assert order == [b"first", b"first", b"late", b"late", b"later", b"later"]
    assert sender.next("lane", 7) is None


def test_the_sender_is_bounded_and_recovers() -> None:
    sender: Spreader[str] = Spreader(payload_limit=3 * PART)
    assert sender.put(Kind.BULK_START, 0, b"", memoryview(payload(2 * PART)), 0.0)
    assert not sender.put(Kind.BULK_START, 0, b"", memoryview(payload(2 * PART)), 0.0)
    for stream in (1, 2):
        sender.next("lane", stream)
        sender.acknowledge("lane", stream)
    assert sender.is_idle
    assert sender.put(Kind.BULK_START, 0, b"", memoryview(payload(3 * PART)), 0.0)
    assert sender.queued_bytes == 3 * PART
    part = sender.next("lane", 3)
    assert part is not None
    sender.put_back("lane", 3)
    assert sender.queued_bytes == 3 * PART


def test_what_is_refused_is_forgotten_on_all_lanes() -> None:
    sender: Spreader[str] = Spreader(payload_limit=1 << 20)
    sender.put(Kind.RESPONSE_START, 9, b"", memoryview(payload(5 * PART)), 0.0)
    sender.next("a", 1)
    sender.next("b", 2)
    sender.acknowledge("a", 1)
    sender.next("a", 3)
    assert sorted(sender.refuse("b", 2)) == [("a", 3), ("b", 2)]
    assert sender.is_idle
    assert sender.refuse("b", 2) == []
    sender.acknowledge("a", 3)
    sender.put(Kind.RESPONSE_START, 9, b"", memoryview(payload(5 * PART)), 0.0)
    sender.next("a", 4)
    assert sender.cancel_response(8) == []
    assert sender.cancel_response(9) == [("a", 4)]
    assert sender.is_idle


def test_what_is_not_admitted_goes_nowhere_and_is_asked_about_once() -> None:
    asked = []

    def admit(kind: Kind, stream: int, body: bytes, size: int) -> bool:
        asked.append((kind, stream, body, size))
        return False

    receiver = Assembler(admit, allocate=lambda size: memoryview(bytearray(size)), bytes_limit=1 << 20)
    for offset in (0, PART):
        header = PartHeader(Kind.BULK_START, 0, 1, 2 * PART, offset)
        assert receiver.place(header.encode() + b"body", PART) is None
    assert asked == [(Kind.BULK_START, 0, b"body", 2 * PART)]
    assert assembler(bytes_limit=PART).place(header.encode(), PART) is None


def test_an_answer_that_is_not_wanted_gives_its_memory_back() -> None:
    receiver = assembler()
    receiver.place(PartHeader(Kind.RESPONSE_START, 4, 1, 2 * PART, 0).encode(), PART)
    receiver.place(PartHeader(Kind.RESPONSE_START, 5, 2, 2 * PART, 0).encode(), PART)
    assert receiver.reserved_bytes == 4 * PART
    receiver.drop_response(4)
    assert receiver.reserved_bytes == 2 * PART
    receiver.abort(PartHeader(Kind.RESPONSE_START, 5, 2, 2 * PART, PART).encode())
    assert receiver.reserved_bytes == 0


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (b"short", 1),
        (bytes([99]) + PartHeader(Kind.BULK_START, 0, 1, 10, 0).encode()[1:], 10),
        (PartHeader(Kind.BULK_START, 0, 1, 10, 0).encode(), 11),
        (PartHeader(Kind.BULK_START, 0, 1, 10, 10).encode(), 1),
        (PartHeader(Kind.BULK_START, 0, 1, 10, 2**64 - 1).encode(), 10),
        (PartHeader(Kind.BULK_START, 0, 1, 2**63, 0).encode(), 10),
        (PartHeader(Kind.BULK_START, 0, 7, 11, 0).encode(), 10),
    ],
)
def test_parts_that_cannot_be_are_found_out(body: bytes, size: int) -> None:
    receiver = assembler()
    receiver.place(PartHeader(Kind.BULK_START, 0, 7, 10, 0).encode(), 10)
    with pytest.raises(FrameError):
        receiver.place(body, size)
