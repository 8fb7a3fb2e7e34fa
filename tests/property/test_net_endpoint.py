"""Two endpoints against each other in virtual time: what is accepted comes once, everything ends, nothing is left."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from two_endpoints import FINGERPRINT, Peer, Wire, World, book, check_quiet, small_parts

from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import TWIN, Peers
from p2pdiloco.net.events import Closing, ConnectionId, Failed, Message, Offered
from p2pdiloco.net.frames import (
    CONTROL_LIMIT,
    HEADER,
    FrameKind,
    Part,
    Start,
    Use,
    encode_frame,
    encode_header,
    encode_start,
    parse_header,
)
from p2pdiloco.net.handshake import Role
from p2pdiloco.net.multipath import Splitter
from p2pdiloco.net.receive_buffer import ReceiveBuffer
from p2pdiloco.net.session import Session
from p2pdiloco.wire.request_reply import RequestError, RequestRefused, Response

SEEDS = st.integers(0, 2**32)
QUIET_S = 200.0


def talk(world: World, *, cuts_primaries: bool) -> dict[Peer, dict[bytes, bytes | None]]:
    """Messages, requests, cuts and second dials for a while; what each peer's ``send`` took."""
    rng = world.rng
    taken: dict[Peer, dict[bytes, bytes | None]] = {world.ann: {}, world.bob: {}}
    for number in range(60):
        here, there = (world.ann, world.bob) if rng.random() < 0.5 else (world.bob, world.ann)
        match rng.choice(["send", "send", "bulk", "bulk", "ask", "dial", "cut", "wait"]):
            case "send" | "bulk" as what:
                body = b"%d" % number
                payload = rng.randbytes(rng.choice([0, 10, 900, 3000, 20_000])) if what == "bulk" else None
                if here.send(there, body, payload, rng.choice([0.0, 1.0])):
                    taken[here][body] = payload
            case "ask" if there.id in here.endpoint.serving:
                with suppress(RequestError):
                    here.ask(there, rng.choice([b"5", b"20000", b"40000", b"no", b"never", b"hello"]), rng.random() * 9)
            case "dial":
                world.dial(here, there)
            case "cut":
                doomed = rng.choice(world.wires)
                if cuts_primaries or any(end.session.is_lane for end in doomed.ends.values()):
                    doomed.cut()
            case _:
                world.run(world.now + rng.choice([0.001, 0.1, 3.0]))
    return taken


def check_answers(peer: Peer) -> None:
    for question, (end,) in peer.answers.items():
        if isinstance(end, Response):
            assert end.payload is None or bytes(end.payload) == book(end.body), question.number
        else:
            assert str(end)


@example(seed=363489775)  # parts were acknowledged on a lane that was bound at one end alone, and lost with it
@example(seed=2405020801)
@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_what_is_accepted_comes_once_though_lanes_are_cut_and_both_dial(seed: int) -> None:
    with small_parts():
        world = World(seed)
        world.ann.holds = world.bob.holds = 0.3
        world.meet()
        taken = talk(world, cuts_primaries=False)
        world.run(world.now + QUIET_S)
        for here, there in ((world.ann, world.bob), (world.bob, world.ann)):
            assert dict(there.messages) == taken[here]
            assert len(there.messages) == len(taken[here])
            assert here.connections == ["up"], here.connections
            check_quiet(here)
            check_answers(here)
            serving = [c for c in here.endpoint.connections.values() if not c.session.is_lane]
            assert len(serving) == 1, "a duplicate stays"


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_nothing_comes_twice_and_everything_ends_whatever_is_cut(seed: int) -> None:
    with small_parts():
        world = World(seed)
        world.meet()
        taken = talk(world, cuts_primaries=True)
        world.run(world.now + QUIET_S)
        for here, there in ((world.ann, world.bob), (world.bob, world.ann)):
            assert max(Counter(body for body, _ in there.messages).values(), default=0) <= 1
            assert all(taken[here][body] == payload for body, payload in there.messages)
            assert here.connections == (["up", "down"] * len(here.connections))[: len(here.connections)]
            check_quiet(here)
            check_answers(here)
        assert world.ann.connections[-1] == world.bob.connections[-1]
        if world.ann.connections[-1] == "down":
            world.meet()
        before = len(world.bob.messages)
        assert world.ann.send(world.bob, b"after all", bytes(5000))
        world.run(world.now + QUIET_S)
        assert world.bob.messages[before:] == [(b"after all", bytes(5000))]


@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_of_two_processes_with_one_identity_only_the_one_that_serves_is_heard(seed: int) -> None:
    """Both dial and are dialled, are refused, come again, and speak as soon as they are connected."""
    with small_parts():
        world = World(seed)
        rng, twin = world.rng, world.come("bob", life="twin")
        for peer in (world.bob, twin):
            peer.greeting = peer.life
        for _ in range(40):
            other = rng.choice([world.bob, twin])
            match rng.choice(["dial", "dialled", "say", "bulk", "ask", "cut", "wait", "wait"]):
                case "dial":
                    world.dial(world.ann, other)
                case "dialled":
                    world.dial(other, world.ann)
                case "say" | "bulk" as what:
                    other.send(world.ann, other.life, bytes(20_000) if what == "bulk" else None)
                case "ask" if world.ann.id in other.endpoint.serving:  # what retires meanwhile stays for the answer
                    with suppress(RequestError):
                        other.ask(world.ann, b"20000", 5.0)
                case "cut" if world.wires:
                    rng.choice(world.wires).cut()
                case _:
                    world.run(world.now + rng.choice([0.001, 0.02, 0.1, 1.0]))
        world.run(world.now + QUIET_S)
        assert all(life == body for life, body in world.ann.voices)
        check_quiet(world.ann)


def test_what_comes_with_a_proof_that_is_turned_away_is_not_heard() -> None:
    """Not even what is read together with it."""
    world = World(1)
    twin = world.come("bob", life="twin")
    world.dial(world.bob, world.ann)
    world.run(1.0)
    world.dial(twin, world.ann)
    world.run(2.0)
    assert world.ann.connections == ["up", "down", "up"], "the later one serves"
    world.bob.greeting = b"it is me"
    wire = world.dial(world.ann, world.bob)  # a listener speaks right after its proof
    held: list[bytes] = []
    wire.write = lambda peer, data: held.append(data) if peer is world.bob else Wire.write(wire, peer, data)  # type: ignore[method-assign]
    world.run(3.0)
    proof_and_greeting = b"".join(held)
    assert world.bob.greeting in proof_and_greeting
    world.ann.endpoint.receive_data(wire.ends[world.ann].id, proof_and_greeting, world.now)
    world.ann.turn()
    world.run(4.0)
    assert not world.ann.messages
    assert world.bob.ended[-1] == TWIN
    assert world.ann.connections == ["up", "down", "up"]


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_control_keeps_its_order_while_one_connection_lasts(seed: int) -> None:
    with small_parts():
        world = World(seed)
        world.meet()
        for number in range(50):
            world.ann.send(world.bob, b"%d" % number, None)
            if world.rng.random() < 0.3:
                world.ann.send(world.bob, b"bulk", bytes(5000))
            world.run(world.now + world.rng.choice([0.0, 0.1]))
        world.run(world.now + QUIET_S)
        assert [body for body, payload in world.bob.messages if payload is None] == [b"%d" % n for n in range(50)]


@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_what_is_not_admitted_stops_and_the_rest_goes_on(seed: int) -> None:
    with small_parts():
        world = World(seed, inbox_bytes=50_000)
        world.bob.admits = lambda body: body != b"unwanted"
        world.meet()
        for number in range(12):
            unwanted = world.rng.random() < 0.5
            world.ann.send(world.bob, b"unwanted" if unwanted else b"%d" % number, bytes(20_000))
            world.run(world.now + world.rng.choice([0.0, 0.05, 1.0]))
        world.run(world.now + QUIET_S)
        assert b"unwanted" not in dict(world.bob.messages)
        check_quiet(world.ann)
        check_quiet(world.bob)


@given(seed=SEEDS, down=st.sampled_from([20_000.0, 200_000.0]))
@settings(max_examples=20, deadline=None)
def test_a_down_budget_holds_in_any_second_and_everything_comes(seed: int, down: float) -> None:
    with small_parts():
        world = World(seed, down_bytes_per_s=down)
        world.meet()
        for number in range(10):
            world.ann.send(world.bob, b"%d" % number, bytes(20_000))
        counts = [(world.now, 0)]
        while len(world.bob.messages) < 10:
            world.run(world.now + 0.5)
            counts.append((world.now, world.bob.endpoint.traffic().received_bulk))
            assert world.now < 100.0
        granted = 70_000 * 3
        for begin, (at, count) in enumerate(counts):
            for then, later in counts[begin:]:
                assert later - count <= down * (then - at) + granted


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_answers_come_and_refusals_in_the_words_of_the_other_side(seed: int) -> None:
    with small_parts():
        world = World(seed)
        world.meet()
        for body in (b"5", b"20000", b"no", b"hello", b"40000"):
            world.ann.ask(world.bob, body, 8.0)
            world.run(world.now + world.rng.choice([0.5, 2.0]))
        world.run(world.now + QUIET_S)
        five, large, no, hello, too_large = (ends[0] for ends in world.ann.answers.values())
        assert isinstance(hello, Response)
        assert hello.body == b"hello"
        for end, body in ((five, b"5"), (large, b"20000")):
            assert isinstance(end, Response)
            assert bytes(end.payload or b"") == book(body)
        assert isinstance(no, RequestRefused)
        assert str(no) == "no"
        assert "40000 bytes; the maximum is 30000" in str(too_large)


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_questions_end_by_their_deadlines(seed: int) -> None:
    world = World(seed)
    world.meet()
    for _ in range(6):
        world.ann.ask(world.bob, world.rng.choice([b"never", b"20000", b"hello"]), 0.1 + 8 * world.rng.random())
    if world.rng.random() < 0.5:
        world.wires[0].is_cut = True  # The sockets stay, but nothing more goes over them.
    for question, at in sorted(world.ann.asked.items(), key=lambda entry: entry[1]):
        world.run(at + 1e-6)
        assert len(world.ann.answers[question]) == 1


def test_half_an_answer_that_is_not_wanted_any_more_leaves_nothing() -> None:
    """No memory here, and no parts that go on coming; the next answer comes whole."""
    halves = 0
    for seed in range(12):
        with small_parts():
            world = World(seed, up_bytes_per_s=10_000.0)
            world.meet()
            world.ann.ask(world.bob, b"30000", 9.0)
            (question,) = world.ann.answers
            session = world.ann.endpoint.serving[world.bob.id].session
            while not world.ann.answers[question] and not session.lanes.reassembler.held_bytes:
                world.run(world.now + 0.001)
            if world.ann.answers.pop(question):
                continue
            halves += 1
            world.ann.endpoint.withdraw_request(question)
            world.ann.turn()
            assert session.lanes.reassembler.held_bytes == 0
            world.run(world.now + 2.0)
            assert world.ann.endpoint.traffic().received_bulk < 10_000, "the rest does not come"
            check_quiet(world.ann)
            check_quiet(world.bob)
            world.ann.ask(world.bob, b"5000", 9.0)
            world.run(world.now + QUIET_S)
            check_answers(world.ann)
    assert halves > 6


def test_a_request_that_found_no_room_takes_no_place() -> None:
    world = World(0)
    world.meet()
    connection = next(c for c in world.ann.endpoint.connections.values() if not c.session.is_lane)
    world.ann.endpoint.pause_writing(connection.id)
    while world.ann.send(world.bob, bytes(CONTROL_LIMIT // 2), None):
        pass
    with pytest.raises(RequestError, match="too much data"):
        world.ann.ask(world.bob, bytes(CONTROL_LIMIT // 2), 9.0)
    assert not connection.session.outgoing.numbers


def drive(world: World, connection: ConnectionId) -> tuple[bytes, list[object]]:
    """Bob's turns until nothing happens: what he wrote on the connection, what he told of it."""
    endpoint, written, told = world.bob.endpoint, b"", []
    while endpoint.has_events or endpoint.has_control:
        for event in endpoint.events(world.now):
            if getattr(event, "connection", None) == connection:
                told.append(event)
            else:
                world.bob._hear(event)
        for which, piece in endpoint.to_send(world.now, 100_000):
            if which == connection:
                written += piece.head + bytes(piece.chunk)
            else:
                world.bob.wires[which].write(world.bob, piece.head + bytes(piece.chunk))
    return written, told


@given(garbage=st.binary(max_size=400), cut=st.integers(1, 50), kind=st.sampled_from([*FrameKind, 0, 14, 99]))
@settings(max_examples=200, deadline=None)
@example(garbage=b"GET / HTTP/1.1\r\n\r\n", cut=3, kind=0)
def test_garbage_of_a_stranger_ends_its_connection_and_nothing_else(garbage: bytes, cut: int, kind: int) -> None:
    world = World(1)
    world.meet()
    endpoint = world.bob.endpoint
    connection = endpoint.add_connection(Role.LISTENER, world.now, host="10.0.0.66")
    stranger = endpoint.connection(connection)
    endpoint.handle_tls_established(connection, FINGERPRINT, world.now)
    drive(world, connection)
    data = HEADER.pack(len(garbage), kind, 0) + garbage
    told: list[object] = []
    for begin in range(0, len(data), cut):
        endpoint.receive_data(connection, data[begin : begin + cut], world.now)
        told += drive(world, connection)[1]
    is_refused = any(isinstance(event, Failed) for event in told)
    is_left = kind == FrameKind.GOODBYE or len(data) < HEADER.size
    if not (is_refused or is_left):
        assert stranger.is_ending
    world.now += 30.0
    endpoint.wake(world.now)
    told += drive(world, connection)[1]
    assert any(isinstance(event, Closing) for event in told)
    assert stranger.reason
    assert world.ann.send(world.bob, b"still there?", None)
    world.run(world.now + 5.0)
    assert world.bob.messages[-1] == (b"still there?", None)
    assert world.bob.connections == ["up"]


def recorded(seed: int) -> bytes:
    """What Ann says to Bob after the handshake, in a talk about everything."""
    with small_parts():
        world = World(seed)
        said = bytearray()
        wire = world.dial(world.ann, world.bob)
        world.run(2.0)
        write = wire.write

        def tap(peer: Peer, data: bytes) -> None:
            if peer is world.ann:
                said.extend(data)
            write(peer, data)

        wire.write = tap  # type: ignore[method-assign]
        for number in range(6):
            world.ann.send(world.bob, b"%d" % number, random.Random(number).randbytes(3000))
            world.ann.send(world.bob, b"control", None)
            world.ann.ask(world.bob, b"5", 3.0)
        world.run(20.0)
        return bytes(said)


@given(data=st.data(), seed=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_a_peer_that_says_something_else_than_it_should_harms_itself_only(data: st.DataObject, seed: int) -> None:
    said = bytearray(recorded(seed))
    for _ in range(data.draw(st.integers(1, 4))):
        if not said:
            break  # all of it was dropped
        at = data.draw(st.integers(0, len(said) - 1))
        match data.draw(st.sampled_from(["flip", "drop", "repeat", "truncate", "insert"])):
            case "flip":
                said[at] ^= data.draw(st.integers(1, 255))
            case "drop":
                del said[at : at + data.draw(st.integers(1, 30))]
            case "repeat":
                said[at:at] = said[at : at + data.draw(st.integers(1, 300))]
            case "truncate":
                del said[at + 1 :]
            case _:
                kind = data.draw(st.sampled_from(list(FrameKind)))
                said[at:at] = encode_frame(kind, data.draw(st.integers(0, 5)), b"")
    with small_parts():
        world = World(seed, inbox_bytes=20_000)
        wire = world.dial(world.ann, world.bob)
        world.run(2.0)
        world.bob.endpoint.receive_data(wire.ends[world.bob].id, bytes(said), world.now)
        world.bob.turn()
        world.run(world.now + QUIET_S)
        if not wire.is_cut:
            wire.cut()
        world.run(world.now + QUIET_S)
        assert not world.bob.endpoint.connections
        world.meet()
        assert world.ann.send(world.bob, b"again", bytes(3000))
        world.run(world.now + 10.0)
        assert world.bob.messages[-1] == (b"again", bytes(3000))


def test_a_silent_stranger_is_gone_at_its_deadline() -> None:
    world = World(1)
    connection = world.bob.endpoint.add_connection(Role.LISTENER, 0.0, host="10.0.0.66")
    assert world.bob.endpoint.next_deadline() == 10.0
    world.bob.endpoint.wake(9.9)
    assert not drive(world, connection)[1]
    world.bob.endpoint.handle_tls_established(connection, FINGERPRINT, 9.9)
    assert parse_header(drive(world, connection)[0]).kind is FrameKind.HELLO
    world.bob.endpoint.wake(19.9)
    (closing,) = drive(world, connection)[1]
    assert closing == Closing(connection, False)
    assert world.bob.endpoint.connection(connection).reason == "the handshake took too long"


@pytest.mark.parametrize("size", [0, 900, 20_000, 300_000])
def test_who_leaves_says_so_as_soon_as_its_last_payload_is_out(size: int) -> None:
    world = World(3, lanes=1)
    world.meet()
    assert world.ann.send(world.bob, b"last words", bytes(size))
    world.ann.endpoint.leave("enough", world.now)
    world.ann.turn()
    world.run(world.now + 0.9 * world.limits.connection.part_s)
    assert [len(payload or b"") for _, payload in world.bob.messages] == [size]
    assert world.bob.ended == ["enough"]
    assert world.ann.ended == ["enough"]


def test_a_payload_that_was_handed_over_is_nobody_elses() -> None:
    world = World(3, lanes=2)
    world.meet()
    world.run(10.0)
    endpoint = world.bob.endpoint
    primary = endpoint.serving[world.ann.id]
    lane = next(found for found in endpoint.connections.values() if found.session.is_lane)
    payloads: list[memoryview] = []

    def hear(connection: Connection, data: bytes) -> None:
        endpoint.receive_data(connection.id, data, world.now)
        for event in endpoint.events(world.now):
            match event:
                case Offered():
                    endpoint.accept_payload(event, event.body)
                case Message(_, _, payload) if payload is not None:
                    payloads.append(payload)

    begin = encode_start(50, Start(Use.MESSAGE, 0, 100, Part(900, 100, 0)), b"") + encode_header(
        FrameKind.CHUNK, 50, 100
    )
    hear(lane, begin + b"a" * 60)
    hear(primary, begin + b"b" * 100)
    hear(lane, b"a" * 40)
    assert [bytes(payload) for payload in payloads] == [b"b" * 100]
    assert primary.is_open
    assert lane.is_open


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_the_smaller", [True, False])
def test_a_direct_connection_takes_the_place_of_a_relayed_one_whoever_dialled_it(
    seed: int, is_the_smaller: bool
) -> None:
    world = World(seed, lanes=1)
    small, large = sorted((world.ann, world.bob), key=lambda peer: peer.id)
    relayed = world.dial(small, large, is_relayed=True)
    world.run(2.0)
    assert small.endpoint.serving[large.id] is relayed.ends[small]
    direct = world.dial(small, large) if is_the_smaller else world.dial(large, small)
    world.run(4.0)
    late = world.dial(small, large, is_relayed=True)
    world.run(60.0)
    for peer, other in ((small, large), (large, small)):
        assert peer.endpoint.serving[other.id] is direct.ends[peer]
        assert relayed.ends[peer].id not in peer.endpoint.connections
        assert late.ends[peer].id not in peer.endpoint.connections


BUGS = {
    "a lane that is lost takes its parts with it": (Splitter, "requeue", lambda self, lane: None),
    "acknowledgements are not counted": (Splitter, "acknowledge", lambda self, lane, stream: None),
    "withdrawing tells nobody": (Session, "expire_request", lambda self, number: None),
    "duplicates stay": (Peers, "_rank", lambda self, connection: (connection.role is Role.DIALLER, 0)),
    "what is offered is taken anyway": (Session, "decline_offer", lambda self: None),
    "memory is not given back": (ReceiveBuffer, "_forget", lambda self, number, stream: self._streams.pop(number)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_properties_can_fail(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = BUGS[bug]
    monkeypatch.setattr(owner, name, wrong)
    properties = (
        test_what_is_accepted_comes_once_though_lanes_are_cut_and_both_dial,
        test_what_is_not_admitted_stops_and_the_rest_goes_on,
        test_questions_end_by_their_deadlines,
    )
    for prove in properties:
        for seed in range(25):
            try:
                prove.hypothesis.inner_test(seed=seed)  # type: ignore[attr-defined]
            except (AssertionError, KeyError):
                return
    pytest.fail(f"nobody noticed: {bug}")
