"""Budgets, credits and back-pressure over real sockets. Nothing here asserts a time."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from typing import Any

import msgspec
import pytest
from test_transport import LOOPBACK, MIB, Recorder, peer, run, where
from test_transport_lanes import cut
from waiting import until

from p2pdiloco.net.frames import FIRST_CREDIT
from p2pdiloco.net.send_queue import GROUP
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import sockets
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import ConnectionLimits, Transport, TransportLimits

__all__ = ["run"]

A_TRICKLE = 1.0
"""Bytes per second: after the first slice nothing more comes in a test's lifetime."""


class Holder(Recorder):
    """A handler that takes payloads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.untaken: list[asyncio.Future[None]] = []
        self.holds = True

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> asyncio.Future[None] | None:  # type: ignore[override]
        super().message(peer, body, payload)
        if payload is None or not self.holds:
            return None
        self.untaken.append(asyncio.get_running_loop().create_future())
        return self.untaken[-1]


def holding_peer(window_bytes: int) -> tuple[Transport, Holder]:
    holder = Holder()
    limits = TransportLimits(connection=ConnectionLimits(window_bytes=window_bytes))
    transport = Transport(Identity.ephemeral(), listen=LOOPBACK, run="run", version=1, limits=limits)
    return transport, holder


def test_the_up_budget_holds_bulk_back_and_not_control(run: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            await ann.dial(where(bob), 5.0)
            ann.set_budget(A_TRICKLE, None)
            payload = os.urandom(4 * MIB)
            assert ann.send(bob.peer_id, b"bulk", payload)
            for _ in range(20):
                assert (await ann.request(bob.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"
            assert bob.traffic().received_bulk < MIB
            assert ann.queued_bytes(bob.peer_id) > 3 * MIB
            ann.set_budget(None, None)
            await until(lambda: heard_by_bob.messages)
            assert heard_by_bob.messages[0][2] == payload

    run(main())


def test_the_down_budget_holds_senders_back_and_not_control(run: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            bob.set_budget(None, A_TRICKLE)
            await ann.dial(where(bob), 5.0)
            assert ann.send(bob.peer_id, b"bulk", bytes(4 * MIB))
            for _ in range(20):
                assert (await ann.request(bob.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"
            assert bob.traffic().received_bulk <= FIRST_CREDIT + 16 * 1024
            bob.set_budget(None, None)
            await until(lambda: heard_by_bob.messages)

    run(main())


def test_a_down_budget_survives_a_lost_connection(run: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            bob.set_budget(None, 40e6)
            for _ in range(3):
                await ann.dial(where(bob), 5.0)
                received = bob.traffic().received_bulk
                assert ann.send(bob.peer_id, b"lost", bytes(64 * MIB))
                await until(lambda received=received: bob.traffic().received_bulk > received + MIB)
                cut(ann, ann._endpoint.serving[bob.peer_id])
                await until(lambda: not bob.peers() and not ann.peers())
            await ann.dial(where(bob), 5.0)
            assert ann.send(bob.peer_id, b"whole", bytes(2 * MIB))
            await until(lambda: heard_by_bob.messages)
            assert [body for _, body, _ in heard_by_bob.messages] == [b"whole"]

    run(main())


def test_what_the_handler_does_not_take_stops_bulk_and_not_control(run: Any) -> None:
    async def main() -> None:
        transport, holder = holding_peer(MIB)
        async with peer() as (ann, _), transport.serve(holder) as bob:
            await ann.dial(where(bob), 5.0)
            for _ in range(100):
                assert ann.send(bob.peer_id, b"", bytes(MIB // 2))
            await until(lambda: len(holder.untaken) >= 2)
            for _ in range(20):
                assert (await ann.request(bob.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"
            assert bob.traffic().received_bulk <= MIB + GROUP * MIB // 2
            holder.holds = False
            for future in holder.untaken:
                future.set_result(None)
            await until(lambda: len(holder.messages) == 100)

    run(main())


def test_a_sender_that_exceeds_its_credit_is_dropped(run: Any) -> None:
    async def main() -> None:
        transport, holder = holding_peer(MIB)
        async with peer() as (ann, _), transport.serve(holder) as bob, peer() as (eve, _):
            await ann.dial(where(bob), 5.0)
            await eve.dial(where(bob), 5.0)
            ann._endpoint.serving[bob.peer_id].session.spending.sent = -(1 << 40)
            for _ in range(8):
                assert ann.send(bob.peer_id, b"", bytes(MIB))
            await until(lambda: holder.losses)
            (lost, reason), *others = holder.losses
            assert lost == ann.peer_id
            assert "that were granted" in reason
            assert not others
            assert (await eve.request(bob.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"

    run(main())


def test_a_refused_congestion_control_is_said_once(run: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(sockets, "tune", lambda connection, *, congestion: None)

    async def main() -> None:
        refusing = TransportLimits(congestion="none such")
        recorder = Recorder()
        bob = Transport(Identity.ephemeral(), listen=LOOPBACK, run="run", version=1, limits=refusing)
        async with peer() as (ann, _), peer() as (eve, _), bob.serve(recorder):
            await ann.dial(where(bob), 5.0)
            await eve.dial(where(bob), 5.0)
            await until(lambda: len(bob.peers()) == 2)
        assert sum("congestion control" in record.message for record in caplog.records) == 1

    run(main())


def test_the_learned_budget_follows_what_is_delivered(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tune = sockets.path_of, sockets.tune

    def slow(connection: socket.socket, *, congestion: str) -> None:
        tune(connection, congestion=congestion)
        sockets.pace(connection, 20e6)

    monkeypatch.setattr("p2pdiloco.transport.sockets.tune", slow)
    monkeypatch.setattr(
        "p2pdiloco.transport.sockets.path_of",
        lambda connection: (path := real(connection)) and msgspec.structs.replace(path, is_local=False),
    )

    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, _):
            await ann.dial(where(bob), 5.0)
            ann.set_budget("auto", None)
            assert ann.up_bytes_per_s is None
            assert ann.send(bob.peer_id, b"bulk", bytes(60 * MIB))
            await until(lambda: ann.up_bytes_per_s is not None)
            assert 0.0 < (ann.line_bytes_per_s or 0.0) < math.inf
            ann.set_budget(3e6, None)
            assert ann.line_bytes_per_s == 3e6
            ann.set_budget(None, None)
            assert ann.up_bytes_per_s is None
            assert ann.line_bytes_per_s is None

    run(main())


def test_on_this_machine_there_is_no_link_to_learn(run: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            await ann.dial(where(bob), 5.0)
            ann.set_budget("auto", None)
            for _ in range(4):
                assert ann.send(bob.peer_id, b"bulk", bytes(60 * MIB))
            await until(lambda: len(heard_by_bob.messages) == 4)
            assert ann.up_bytes_per_s is None
            await until(lambda: ann.line_bytes_per_s == math.inf)
            path = next(iter(ann._channels.values())).path()
            assert path is not None
            assert path.is_local
            assert (path.acked_bytes or 0) > 240 * MIB

    run(main())
