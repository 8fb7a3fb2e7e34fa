"""Lanes over real sockets: payloads come whole over several connections, and when some of those are cut."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from test_transport import LOOPBACK, MIB, Recorder, peer, run, where
from waiting import until

from p2pdiloco.net.bandwidth import Path
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.path_monitor import Idleness, lanes_for
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Answer, RequestError, Transport, TransportLimits

__all__ = ["run"]


class Librarian(Recorder):
    """Answers with a large payload."""

    def __init__(self, payload: bytes) -> None:
        super().__init__()
        self.payload = payload

    async def answer(self, peer: Any, body: bytes) -> Answer:
        return Answer(b"here", self.payload) if body == b"book" else await super().answer(peer, body)


@asynccontextmanager
async def dialler(lanes: int, lane_idle_s: float = 60.0) -> AsyncIterator[tuple[Transport, Recorder]]:
    recorder = Recorder()
    limits = TransportLimits(lanes=lanes, lane_idle_s=lane_idle_s)
    transport = Transport(Identity.ephemeral(), listen=LOOPBACK, run="run", version=1, limits=limits)
    async with transport.serve(recorder):
        yield transport, recorder


def lanes_of(transport: Transport) -> list[Connection]:
    return [one.connection for one in transport._channels.values() if one.connection.session.is_lane]


def cut(transport: Transport, connection: Connection) -> None:
    """As if its socket had failed."""
    channel = transport._channels[connection.id].transport
    assert channel is not None
    channel.abort()


def test_payloads_come_whole_both_ways_and_use_all_lanes(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob), dialler(4) as (ann, heard_by_ann):
            await ann.dial(where(bob), 5.0)
            await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 4)
            payloads = {
                b"%d" % index: os.urandom(size) for index, size in enumerate([1, 70_000, 33 * MIB, 5 * MIB + 3])
            }
            for body, payload in payloads.items():
                assert ann.send(bob.peer_id, body, payload)
                assert bob.send(ann.peer_id, body, payload)
            for heard in (heard_by_ann, heard_by_bob):
                await until(lambda heard=heard: len(heard.messages) == len(payloads))
                assert {body: payload for _, body, payload in heard.messages} == payloads
            assert all(lane.session.traffic.sent_bulk for lane in lanes_of(ann))
            assert len(heard_by_bob.connections) == 1
            assert ann.peers() == [bob.peer_id]
            assert ann.traffic().sent_bulk >= sum(map(len, payloads.values()))
            await until(lambda: ann.queued_bytes(bob.peer_id) == 0)

    run(main())


def test_a_payload_comes_whole_when_lanes_are_cut_midway(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob), dialler(4) as (ann, heard_by_ann):
            await ann.dial(where(bob), 5.0)
            await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 4)
            payload = os.urandom(64 * MIB)
            ann.set_budget(100e6, None)
            assert ann.send(bob.peer_id, b"large", payload)
            for end in (ann, bob):
                await until(lambda: all(lane.session.traffic.sent_bulk for lane in lanes_of(ann)) and lanes_of(ann))
                assert ann.queued_bytes(bob.peer_id) > 4 * MIB, "too late to cut"
                cut(end, lanes_of(end)[0])
            await until(lambda: heard_by_bob.messages)
            assert [message[1:] for message in heard_by_bob.messages] == [(b"large", payload)]
            assert not heard_by_ann.losses
            assert not heard_by_bob.losses
            await until(lambda: ann.lanes(bob.peer_id) == 4, what="a new lane")

    run(main())


def test_answers_come_over_lanes_and_those_not_wanted_stop(run: Any) -> None:
    async def main() -> None:
        librarian = Librarian(os.urandom(32 * MIB))
        library = Transport(Identity.ephemeral(), listen=LOOPBACK, run="run", version=1)
        async with library.serve(librarian), dialler(3) as (ann, _):
            await ann.dial(where(library), 5.0)
            await until(lambda: library.lanes(ann.peer_id) == 3)
            response = await ann.request(library.peer_id, b"book", timeout_s=20.0, max_payload=64 * MIB)
            assert response.payload == librarian.payload
            assert all(lane.session.traffic.received_bulk for lane in lanes_of(ann))
            before = library.traffic().sent_bulk
            with pytest.raises(RequestError, match="the maximum is"):
                await ann.request(library.peer_id, b"book", timeout_s=20.0, max_payload=1)
            library.set_budget(1e6, None)
            with pytest.raises(RequestError, match="no answer within"):
                await ann.request(library.peer_id, b"book", timeout_s=0.2, max_payload=64 * MIB)
            library.set_budget(None, None)
            await until(lambda: library.queued_bytes(ann.peer_id) == 0)
            assert library.traffic().sent_bulk < before + 32 * MIB
            assert (await ann.request(library.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"

    run(main())


def test_what_is_not_admitted_stops_on_all_lanes(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob), dialler(4) as (ann, _):
            await ann.dial(where(bob), 5.0)
            await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 4)
            heard_by_bob.admits = False
            assert ann.send(bob.peer_id, b"unwanted", bytes(64 * MIB))
            await until(lambda: ann.queued_bytes(bob.peer_id) == 0)
            assert heard_by_bob.asked == [(b"unwanted", 64 * MIB)]
            assert ann.traffic().sent_bulk < 64 * MIB
            heard_by_bob.admits = True
            assert ann.send(bob.peer_id, b"wanted", bytes(MIB))
            await until(lambda: heard_by_bob.messages)

    run(main())


def test_leaving_flushes_what_was_sent_over_lanes(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob):
            async with dialler(4) as (ann, _):
                await ann.dial(where(bob), 5.0)
                await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 4)
                assert ann.send(bob.peer_id, b"last words", bytes(32 * MIB))
            await until(lambda: heard_by_bob.losses)
            assert [len(payload or b"") for _, _, payload in heard_by_bob.messages] == [32 * MIB]
            await until(lambda: not bob._channels)

    run(main())


def test_lanes_end_with_their_primary(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob), dialler(4) as (ann, heard_by_ann):
            await ann.dial(where(bob), 5.0)
            await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 4)
            cut(ann, ann._endpoint.serving[bob.peer_id])
            await until(lambda: not ann._channels and not bob._channels)
            assert len(heard_by_ann.losses) == len(heard_by_bob.losses) == 1

    run(main())


def test_idle_lanes_close_and_come_back_with_bulk(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob), dialler(3, lane_idle_s=0.5) as (ann, heard_by_ann):
            await ann.dial(where(bob), 5.0)
            await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 3)
            await until(lambda: ann.lanes(bob.peer_id) == bob.lanes(ann.peer_id) == 1, what="idle lanes are closed")
            ann.set_budget(4e6, None)
            payload = os.urandom(6 * MIB)
            assert ann.send(bob.peer_id, b"bulk", payload)
            await until(lambda: ann.lanes(bob.peer_id) == 3, what="lanes again")
            ann.set_budget(None, None)
            await until(lambda: heard_by_bob.messages)
            assert [message[1:] for message in heard_by_bob.messages] == [(b"bulk", payload)]
            assert not heard_by_ann.losses
            assert not heard_by_bob.losses

    run(main())


def test_idleness() -> None:
    idleness = Idleness(10.0, now=0.0)
    assert not idleness.update(0, 9.0)
    assert idleness.update(0, 10.0)
    assert not idleness.update(5, 11.0)
    assert not idleness.update(5, 20.0)
    assert idleness.update(5, 21.0)


def test_a_down_budget_holds_over_all_lanes(run: Any) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob), dialler(3) as (ann, _):
            bob.set_budget(None, 20e6)
            await ann.dial(where(bob), 5.0)
            await until(lambda: ann.lanes(bob.peer_id) == 3)
            payload = os.urandom(8 * MIB)
            assert ann.send(bob.peer_id, b"", payload)
            await until(lambda: heard_by_bob.messages)
            assert heard_by_bob.messages[0][2] == payload

    run(main())


def path(congestion: str, round_trip_s: float, busy_s: float = 0.0, *, is_local: bool = False) -> Path:
    """``busy_s``: what queues and busy processors add to a round trip."""
    return Path(congestion, round_trip_s + busy_s, round_trip_s, is_local=is_local)


def test_how_many_lanes() -> None:
    long, short = path("cubic", 0.040), path("cubic", 0.0002)
    assert lanes_for("auto", short, 312.5e6) == 1
    assert lanes_for("auto", long, 312.5e6) == 7
    assert lanes_for("auto", path("bbr", 0.1), 125e6) == 9
    assert lanes_for("auto", path("bbr", 0.1), None) == 9
    assert lanes_for("auto", path("bbr", 0.2), 625e6) == 16
    assert lanes_for("auto", path("bbr", 0.0002, busy_s=0.1), 125e6) == 1
    assert lanes_for("auto", path("bbr", 0.1, is_local=True), 125e6) == 1
    assert lanes_for("auto", None, 1e9) == 1
    assert lanes_for(3, short, None) == 3
    assert lanes_for(100, short, None) == 16
