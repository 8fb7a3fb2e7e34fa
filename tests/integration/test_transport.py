"""The transport over real sockets, TLS and both event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from msgspec import msgpack
from waiting import until

from p2pdiloco.nat.messages import Attend, Meet
from p2pdiloco.net.frames import HEADER, FrameKind, encode_frame
from p2pdiloco.net.handshake import MAGIC, Hello
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses
from p2pdiloco.transport.connection_setup import LINE_BURST, LINES_PER_S
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.tls import TlsContexts
from p2pdiloco.transport.transport import (
    Answer,
    ConnectionLimits,
    DialError,
    PeerRefused,
    RequestError,
    RequestRefused,
    Transport,
    TransportLimits,
)
from p2pdiloco.wire.control_messages import encode

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
MIB = 1 << 20
Main = Coroutine[Any, Any, None]


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Runs a test's coroutine on each event loop, with a deadline, and insists that nothing is left running."""

    async def bounded(main: Main) -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with asyncio.timeout(30):
            await main
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"
        assert not errors, errors

    return lambda main: (uvloop.run if request.param == "uvloop" else asyncio.run)(bounded(main))


class Recorder:
    """A handler that writes down what it hears."""

    def __init__(self) -> None:
        self.connections: list[tuple[PeerId, bool, bool]] = []
        self.losses: list[tuple[PeerId, str]] = []
        self.messages: list[tuple[PeerId, bytes, bytes | None]] = []
        self.asked: list[tuple[bytes, int]] = []
        self.answering: list[bytes] = []
        self.admits = True
        self.may_answer = asyncio.Event()

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        assert addresses.parse(address).port
        self.connections.append((peer, is_observer, inbound))

    def disconnected(self, peer: PeerId, reason: str) -> None:
        self.losses.append((peer, reason))

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        self.messages.append((peer, body, None if payload is None else bytes(payload)))

    def admit(self, peer: PeerId, body: bytes, size: int) -> bytes | None:
        self.asked.append((body, size))
        return body if self.admits else None

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        match body:
            case b"refuse":
                raise RequestRefused("not today")
            case b"break":
                raise KeyError("a defect")
            case b"wait":
                self.answering.append(body)
                try:
                    await self.may_answer.wait()
                finally:
                    self.answering.remove(body)
                return Answer(b"waited")
            case b"large":
                return Answer(b"here", bytes(3 * MIB))
            case _:
                return Answer(b"re: " + body)


@asynccontextmanager
async def peer(
    *, run: str = "run", version: int = 1, identity: Identity | None = None, **limits: Any
) -> AsyncIterator[tuple[Transport, Recorder]]:
    recorder = Recorder()
    transport = Transport(
        identity or Identity.ephemeral(),
        listen=LOOPBACK,
        run=run,
        version=version,
        limits=TransportLimits(connection=ConnectionLimits(**limits)),
    )
    async with transport.serve(recorder):
        yield transport, recorder


def where(transport: Transport) -> str:
    return transport.listen_addresses()[0]


def bare(transport: Transport) -> str:
    return where(transport).split("/p2p/")[0]


def port(transport: Transport) -> int:
    return addresses.parse(where(transport)).port


@pytest.mark.parametrize("by_invite", [False, True])
def test_who_only_looks_round_tells_nothing_of_its_connections(
    run: Callable[[Main], None], caplog: pytest.LogCaptureFixture, by_invite: bool
) -> None:
    """As who is about to join does, without the run's name, or with an invite."""

    async def main() -> None:
        caplog.set_level("DEBUG", "p2pdiloco.transport")
        async with peer() as (ann, _):
            looks = {"run": "run", "observes": True} if by_invite else {"run": ""}
            watcher = Transport(Identity.ephemeral(), listen="", version=1, **looks)  # type: ignore[arg-type]
            async with watcher.serve(Recorder()):
                await watcher.dial(where(ann), 5.0)
        told = [record for record in caplog.records if record.message in ("connected", "disconnected")]
        assert len(told) == 4
        assert {record.levelname for record in told} == {"DEBUG"}

    run(main())


def test_peers_meet_and_talk(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer(run="") as (bob, heard_by_bob):
            assert await bob.dial(where(ann), 5.0) == ann.peer_id
            assert await bob.dial(where(ann), 5.0) == ann.peer_id
            await until(lambda: ann.peers() == [bob.peer_id])
            assert heard_by_ann.connections == [(bob.peer_id, True, True)]
            assert heard_by_bob.connections == [(ann.peer_id, False, False)]
            payload = os.urandom(3 * MIB + 17)
            assert ann.send(bob.peer_id, b"control")
            assert ann.send(bob.peer_id, b"bulk", payload)
            assert ann.send(bob.peer_id, b"empty", b"")
            await until(lambda: len(heard_by_bob.messages) == 3)
            assert sorted(heard_by_bob.messages, key=lambda message: message[1]) == [
                (ann.peer_id, b"bulk", payload),
                (ann.peer_id, b"control", None),
                (ann.peer_id, b"empty", b""),
            ]
            assert ann.traffic().sent_bulk == bob.traffic().received_bulk == len(payload)
            assert ann.traffic().sent_control == bob.traffic().received_control > 0
            assert not ann.send(PeerId("nobody"), b"")
        assert [reason for _, reason in heard_by_ann.losses] == ["the peer is leaving"]

    run(main())


def test_messages_that_come_one_by_one_go_on_coming(run: Callable[[Main], None]) -> None:
    """Also when one of them ends where the receiver's buffer ends: sixteen of this size fill it."""

    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            await bob.dial(where(ann), 5.0)
            await until(lambda: ann.peers() == [bob.peer_id])
            for count in range(1, 65):
                assert ann.send(bob.peer_id, bytes(1024 - HEADER.size))
                await until(lambda: len(heard_by_bob.messages) == count)  # noqa: B023

    run(main())


@pytest.mark.parametrize(("other", "sentence"), [({"run": "elsewhere"}, "runs differ"), ({"version": 2}, "versions")])
def test_a_mismatch_is_told_to_both(
    run: Callable[[Main], None], other: dict[str, Any], sentence: str, caplog: Any
) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer(**other) as (bob, heard_by_bob):
            with pytest.raises(PeerRefused, match=sentence):
                await bob.dial(where(ann), 5.0)
            await until(lambda: any(sentence in str(record.__dict__.get("fields")) for record in caplog.records))
            assert not heard_by_ann.connections
            assert not heard_by_bob.connections

    run(main())


def test_dial_errors_say_why(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, _):
            stranger = Identity.ephemeral().peer_id
            with pytest.raises(DialError, match=f"expected {stranger}"):
                await bob.dial(f"{bare(ann)}/p2p/{stranger}", 5.0)
            with pytest.raises(DialError, match="refused: nothing listens"):
                await bob.dial("/ip4/127.0.0.1/tcp/1", 5.0)
            with pytest.raises(DialError, match="this peer itself"):
                await bob.dial(where(bob), 5.0)
            with pytest.raises(DialError, match="dialled itself"):
                await bob.dial(bare(bob), 5.0)
            with pytest.raises(DialError, match="cannot be resolved"):
                await bob.dial("/dns/no-such-host.invalid/tcp/1", 5.0)
            with pytest.raises(ValueError, match="write it as"):
                await bob.dial("127.0.0.1:1", 5.0)
            silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
            async with silent:
                silent_port = silent.sockets[0].getsockname()[1]
                with pytest.raises(DialError, match=r"no answer within 0\.2 s"):
                    await bob.dial(f"/ip4/127.0.0.1/tcp/{silent_port}", 0.2)
            assert await bob.dial(where(ann), 5.0) == ann.peer_id

    run(main())


def test_a_dial_that_fails_as_its_time_ends_leaves_no_error_behind(
    run: Callable[[Main], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS fails, and the dial is given up before it has seen that (64 nodes on two cores)."""

    async def main() -> None:
        under_way, may_fail = asyncio.Event(), asyncio.Event()

        async def fail(*_: object, **__: object) -> None:
            under_way.set()
            await may_fail.wait()
            raise ConnectionResetError("reset")

        async with peer() as (ann, _), peer() as (bob, _):
            monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fail)
            dialling = asyncio.create_task(bob.dial(where(ann), 5.0))
            await under_way.wait()
            may_fail.set()
            await asyncio.sleep(0)
            dialling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dialling
        del dialling
        gc.collect()

    run(main())


def test_a_man_in_the_middle_is_detected(run: Callable[[Main], None], caplog: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer() as (bob, heard_by_bob):
            tls = TlsContexts()
            pumps: list[asyncio.Task[None]] = []

            async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                try:
                    while data := await reader.read(65536):
                        writer.write(data)
                except (ConnectionError, ssl.SSLError):
                    pass
                finally:
                    writer.close()

            async def intercept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                to_ann = await asyncio.open_connection("127.0.0.1", port(ann), ssl=tls.client, server_hostname="")
                pumps.append(asyncio.create_task(pump(reader, to_ann[1])))
                pumps.append(asyncio.create_task(pump(to_ann[0], writer)))

            middle = await asyncio.start_server(intercept, "127.0.0.1", 0, ssl=tls.server)
            with pytest.raises(DialError, match="somebody in between reads the traffic"):
                await bob.dial(f"/ip4/127.0.0.1/tcp/{middle.sockets[0].getsockname()[1]}/p2p/{ann.peer_id}", 5.0)
            await until(lambda: any("somebody in between" in str(vars(record)) for record in caplog.records))
            assert not heard_by_ann.connections
            assert not heard_by_bob.connections
            middle.close()
            await asyncio.wait(pumps, timeout=5)

    run(main())


async def raw_channel(transport: Transport) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port(transport), ssl=TlsContexts().client, server_hostname="")


async def hear_goodbye(reader: asyncio.StreamReader) -> str:
    """The text of the GOODBYE with which the other side ends."""
    while True:
        length, kind, _ = HEADER.unpack(await reader.readexactly(HEADER.size))
        body = await reader.readexactly(length)
        if kind == FrameKind.GOODBYE:
            return body[1:].decode()


def test_a_peer_that_claims_anothers_id_is_refused(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann):
            victim, thief = Identity.ephemeral(), Identity.ephemeral()
            reader, writer = await raw_channel(ann)
            hello = Hello(
                magic=MAGIC, version=1, run="run", peer=victim.peer_id, nonce=bytes(32), life=bytes(16), attempt=1
            )
            writer.write(encode_frame(FrameKind.HELLO, 0, msgpack.encode(hello)))
            writer.write(encode_frame(FrameKind.PROOF, 0, thief.sign(b"whatever")))
            assert "does not own that peer id" in await hear_goodbye(reader)
            assert await reader.read() == b""
            assert not heard_by_ann.connections
            writer.close()

    run(main())


def test_garbage_ends_one_connection_and_nothing_else(run: Callable[[Main], None], caplog: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer() as (bob, _):
            await bob.dial(where(ann), 5.0)
            plain = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(500), b"", b"\x16\x03\x01"]
            for garbage in plain:
                reader, writer = await asyncio.open_connection("127.0.0.1", port(ann))
                with suppress(OSError):  # what was not read makes a reset of the end
                    writer.write(garbage)
                    writer.write_eof()
                    await reader.read()
                writer.close()
            for garbage in [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(2**32 - 1, FrameKind.HELLO, 0), os.urandom(500)]:
                reader, writer = await raw_channel(ann)
                writer.write(garbage)
                assert "broken frames" in await hear_goodbye(reader)
                writer.close()
            await until(lambda: sum("dropped a stranger" in record.message for record in caplog.records) == 7)
            ours = [record for record in caplog.records if record.name == "p2pdiloco.transport"]
            assert sum(record.levelname in ("WARNING", "WARN", "ERROR") for record in ours) == 7
            assert (await bob.request(ann.peer_id, b"still there?", timeout_s=5.0)).body == b"re: still there?"
            assert len(heard_by_ann.connections) == 1

    run(main())


def test_a_silent_stranger_is_dropped_at_the_deadline(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer(handshake_s=0.3) as (ann, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", port(ann))
            assert await reader.read() == b""
            writer.close()
            reader, writer = await raw_channel(ann)
            hello = await reader.read(1)
            assert hello
            await asyncio.wait_for(reader.read(), 5.0)
            writer.close()

    run(main())


def test_control_overtakes_64_mib_of_bulk(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            await ann.dial(where(bob), 5.0)
            payload = bytearray(os.urandom(MIB) * 64)
            assert ann.send(bob.peer_id, b"bulk", payload)
            await until(lambda: bob.traffic().received_bulk > MIB)
            left = ann.queued_bytes(bob.peer_id)
            assert left > 16 * MIB, "the bulk must still be waiting for this test to mean anything"
            for index in range(100):
                assert ann.send(bob.peer_id, b"%d" % index)
            await until(lambda: heard_by_bob.messages)
            assert ann.queued_bytes(bob.peer_id) > 0
            await until(lambda: len(heard_by_bob.messages) == 101)
            assert [body for _, body, _ in heard_by_bob.messages] == [b"%d" % index for index in range(100)] + [b"bulk"]
            assert heard_by_bob.messages[-1][2] == payload

    run(main())


def test_what_is_not_admitted_is_not_sent_to_the_end(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, heard_by_bob):
            await ann.dial(where(bob), 5.0)
            heard_by_bob.admits = False
            assert ann.send(bob.peer_id, b"unwanted", bytes(64 * MIB))
            await until(lambda: ann.queued_bytes(bob.peer_id) == 0)
            assert heard_by_bob.asked == [(b"unwanted", 64 * MIB)]
            assert ann.traffic().sent_bulk < 64 * MIB
            heard_by_bob.admits = True
            assert ann.send(bob.peer_id, b"wanted", bytes(MIB))
            await until(lambda: heard_by_bob.messages)
            assert heard_by_bob.messages[0][1] == b"wanted"

    run(main())


def test_a_full_outbox_refuses(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer(outbox_bytes=8 * MIB) as (ann, _), peer() as (bob, heard_by_bob):
            await ann.dial(where(bob), 5.0)
            assert not ann.send(bob.peer_id, b"too large", bytes(9 * MIB))
            sent = [ann.send(bob.peer_id, b"", bytes(2 * MIB)) for _ in range(20)]
            assert sent[0]
            assert not all(sent)
            await until(lambda: len(heard_by_bob.messages) == sum(sent))
            with pytest.raises(ValueError):
                ann.send(bob.peer_id, bytes(MIB + 1))

    run(main())


def test_requests(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer(answers=2) as (ann, heard_by_ann), peer() as (bob, _):
            await bob.dial(where(ann), 5.0)

            async def ask(body: bytes, timeout_s: float = 5.0, max_payload: int = 0) -> Any:
                return await bob.request(ann.peer_id, body, timeout_s=timeout_s, max_payload=max_payload)

            assert (await ask(b"hello")).body == b"re: hello"
            answer = await ask(b"large", max_payload=3 * MIB)
            assert (answer.body, len(answer.payload)) == (b"here", 3 * MIB)
            with pytest.raises(RequestError, match="the maximum is 1000"):
                await ask(b"large", max_payload=1000)
            with pytest.raises(RequestRefused, match="not today"):
                await ask(b"refuse")
            with pytest.raises(RequestRefused, match="internal error"):
                await ask(b"break")
            with pytest.raises(RequestError, match=r"no answer within 0\.05 s"):
                await ask(b"wait", timeout_s=0.05)
            waiting = [asyncio.create_task(ask(b"wait")) for _ in range(3)]
            done, waiting_still = await asyncio.wait(waiting, timeout=5, return_when=asyncio.FIRST_COMPLETED)
            with pytest.raises(RequestRefused, match="busy: 2"):
                await done.pop()
            heard_by_ann.may_answer.set()
            assert [(await task).body for task in waiting_still] == [b"waited"] * 2
            heard_by_ann.may_answer.clear()
            last = asyncio.create_task(ask(b"wait"))
            await asyncio.sleep(0)
            ann.disconnect(bob.peer_id, "enough")
            with pytest.raises(RequestError, match="disconnected: enough"):
                await last
            with pytest.raises(RequestError, match="not connected"):
                await ask(b"hello")

    run(main())


def test_a_request_that_nobody_waits_for_any_more_is_cancelled_at_the_other_side(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer() as (bob, _):
            await bob.dial(where(ann), 5.0)
            asking = asyncio.create_task(bob.request(ann.peer_id, b"wait", timeout_s=20.0))
            await until(lambda: heard_by_ann.answering == [b"wait"])
            asking.cancel()
            await until(lambda: not heard_by_ann.answering)
            assert (await bob.request(ann.peer_id, b"hello", timeout_s=5.0)).body == b"re: hello"

    run(main())


def test_requests_of_a_kind_go_to_who_answers_these_and_all_others_to_the_handler(run: Callable[[Main], None]) -> None:
    async def attend(peer: PeerId, request: Attend) -> Answer:
        if not request.token:
            raise RequestRefused("no token")
        return Answer(request.token)

    async def main() -> None:
        async with peer() as (ann, _), peer() as (bob, _):
            ann.answer_requests(Attend, attend)
            await bob.dial(where(ann), 5.0)

            async def ask(body: bytes) -> bytes:
                return (await bob.request(ann.peer_id, body, timeout_s=5.0)).body

            assert await ask(encode(Attend((1,), b"token"))) == b"token"
            assert await ask(b"hello") == b"re: hello"
            assert await ask(encode(Meet("bob", True))) == b"re: " + encode(Meet("bob", True))
            with pytest.raises(RequestRefused, match="no token"):
                await ask(encode(Attend()))
            with pytest.raises(RequestRefused, match="malformed request"):
                await ask(encode(Attend((1,), b"token"))[:-1])

    run(main())


def test_who_waits_to_hear_that_a_peer_is_gone_does_so_after_the_handler(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer() as (bob, _):
            gone: list[tuple[PeerId, str, int]] = []
            ann.add_disconnect_callback(lambda who, why: gone.append((who, why, len(heard_by_ann.losses))))
            await bob.dial(where(ann), 5.0)
            bob.disconnect(ann.peer_id, "enough")
            await until(lambda: gone)
            assert gone == [(bob.peer_id, "enough", 1)]

    run(main())


def test_both_dial_at_once_and_one_connection_stays(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        for _ in range(10):
            async with peer() as (ann, heard_by_ann), peer() as (bob, heard_by_bob):
                await asyncio.gather(ann.dial(where(bob), 5.0), bob.dial(where(ann), 5.0))
                assert ann.send(bob.peer_id, b"from ann")
                assert bob.send(ann.peer_id, b"from bob", bytes(100_000))
                await until(lambda: len(ann._channels) == len(bob._channels) == 1)
                await until(lambda: heard_by_ann.messages and heard_by_bob.messages)
                assert ann.peers() == [bob.peer_id]
                assert bob.peers() == [ann.peer_id]
                assert len(heard_by_ann.connections) == len(heard_by_bob.connections) == 1
                assert not heard_by_ann.losses
                assert not heard_by_bob.losses
                assert (await ann.request(bob.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"

    run(main())


def test_a_peer_that_comes_back_replaces_its_old_connection(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        identity = Identity.ephemeral()
        async with peer() as (ann, heard_by_ann), peer(identity=identity) as (bob, _):
            await bob.dial(where(ann), 5.0)
            async with peer(identity=identity) as (reborn, _):
                await reborn.dial(where(ann), 5.0)
                await until(lambda: len(heard_by_ann.connections) == 2)
                assert [reason for _, reason in heard_by_ann.losses] == ["the peer came back with a new connection"]
                assert ann.send(identity.peer_id, b"hello again")
                await until(lambda: bob.peers() == [])

    run(main())


def test_of_two_processes_with_one_identity_the_later_stays_and_nothing_flaps(
    run: Callable[[Main], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        identity = Identity.ephemeral()
        async with (
            peer() as (ann, heard_by_ann),
            peer(identity=identity) as (bob, heard_by_bob),
        ):
            await bob.dial(where(ann), 5.0)
            async with peer(identity=identity) as (twin, _):
                await twin.dial(where(ann), 5.0)
                await until(lambda: bob.peers() == [])
                assert ann.life_of(identity.peer_id) == twin.life != bob.life
                for tries in range(3):
                    await bob.dial(where(ann), 5.0)
                    await until(lambda tries=tries: len(heard_by_bob.losses) == 2 + tries)  # type: ignore[misc]
                    assert "another process with this identity" in heard_by_bob.losses[-1][1]
                assert len(heard_by_ann.connections) == 2
                assert ann.life_of(identity.peer_id) == twin.life
                assert (await twin.request(ann.peer_id, b"?", timeout_s=5.0)).body == b"re: ?"
                told = [record for record in caplog.records if "two processes have one identity" in record.message]
                assert len(told) == 1
            await until(lambda: ann.peers() == [])
            await bob.dial(where(ann), 5.0)
            await until(lambda: ann.life_of(identity.peer_id) == bob.life)

    run(main())


def test_leaving_flushes_what_was_sent(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (bob, heard_by_bob):
            async with peer() as (ann, _):
                await ann.dial(where(bob), 5.0)
                assert ann.send(bob.peer_id, b"last words", bytes(8 * MIB))
            await until(lambda: heard_by_bob.losses)
            assert [len(payload or b"") for _, _, payload in heard_by_bob.messages] == [8 * MIB]
            assert heard_by_bob.losses == [(ann.peer_id, "the peer is leaving")], "what is said last is said"

    run(main())


def test_idle_sockets_do_not_keep_a_newcomer_out(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        recorder = Recorder()
        ann = Transport(
            Identity.ephemeral(),
            listen=LOOPBACK,
            run="run",
            version=1,
            limits=TransportLimits(silent=8),
        )
        async with ann.serve(recorder), peer() as (bob, _):
            idle = [await asyncio.open_connection("127.0.0.1", port(ann)) for _ in range(9)]
            assert await idle[0][0].read() == b"", "the oldest is closed"
            assert await bob.dial(where(ann), 5.0) == ann.peer_id
            assert await idle[1][0].read() == b"", "the oldest is closed"
            assert len(ann._channels) == 1, "for who says nothing nothing is made"
            for _, writer in idle:
                writer.close()

    run(main())


def test_strangers_cannot_flood_the_log(run: Callable[[Main], None], caplog: Any) -> None:
    async def main() -> None:
        async with peer() as (ann, _):
            began = time.monotonic()
            for _ in range(2 * LINE_BURST):
                reader, writer = await asyncio.open_connection("127.0.0.1", port(ann))
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(OSError):
                    await reader.read()
                writer.close()
            await until(lambda: not ann._channels)
            lines = sum("dropped a stranger" in record.message for record in caplog.records)
            assert LINE_BURST <= lines <= LINE_BURST + (time.monotonic() - began) * LINES_PER_S

    run(main())


def test_a_peer_that_cannot_be_understood_is_cut_off_and_stays_out_for_a_while(run: Callable[[Main], None]) -> None:
    async def main() -> None:
        async with peer() as (ann, heard_by_ann), peer() as (bob, heard_by_bob):
            await bob.dial(where(ann), 5.0)
            await until(lambda: ann.peers() == [bob.peer_id])
            for _ in range(200):
                ann.blame(bob.peer_id)
            await until(lambda: heard_by_bob.losses and heard_by_ann.losses)
            assert "cannot be parsed" in heard_by_bob.losses[0][1]
            await bob.dial(where(ann), 5.0)
            await until(lambda: len(heard_by_bob.losses) == 2)
            assert "try again in a minute" in heard_by_bob.losses[1][1]
            assert len(heard_by_ann.connections) == 1

    run(main())
