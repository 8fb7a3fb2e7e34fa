"""Sockets that were accepted and have not greeted: what is made of each, with real sockets."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from p2pdiloco.net.limits import ConnectionLimits, TransportLimits
from p2pdiloco.transport import connection_setup, sockets
from p2pdiloco.transport.addresses import parse
from p2pdiloco.transport.connection_setup import BLOCKLIST_S, HandshakePool
from p2pdiloco.util.tasks import Tasks

LIMITS = TransportLimits(
    silent=4,
    failures_at_once=2,
    failures_per_s=5.0,
    shut_out_after=20,
    shut_out_s=0.5,
    connection=ConnectionLimits(handshake_s=0.5),
)
GREETING = b"\x16\x03\x01\x02\x00" + bytes(512)


class House:
    """An anteroom, and what it did."""

    def __init__(self, is_proved: bool) -> None:
        self.greeted: list[bytes] = []
        self.taken: list[bytes] = []
        self.away: list[str] = []
        self.port = 0
        self._is_proved = is_proved

    async def let_in(self, raw: socket.socket) -> bool:
        self.greeted.append(raw.recv(10_000))
        raw.close()
        return self._is_proved

    async def take(self, raw: socket.socket) -> bool:
        self.taken.append(raw.recv(100))
        raw.close()
        return self._is_proved

    async def call(
        self, *pieces: bytes, sender: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(sender, 0))
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return reader, writer

    async def hear_the_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


@asynccontextmanager
async def house(*, is_proved: bool = True) -> AsyncIterator[House]:
    found, listener = House(is_proved), sockets.listen(parse("/ip4/127.0.0.1/tcp/0"))
    found.port = listener.getsockname()[1]
    async with Tasks() as tasks:
        anteroom = HandshakePool(
            found.let_in,
            lambda _, why: found.away.append(why),
            takers={b"T": found.take},
            limits=LIMITS,
            tasks=tasks,
        )
        tasks.spawn(anteroom.serve(listener), name="serve")
        yield found
    listener.close()


def test_a_greeting_is_heard_once_it_is_whole_however_it_comes() -> None:
    async def main() -> None:
        async with house() as there:
            for pieces in ([GREETING], [GREETING[:3], GREETING[3:]], [bytes([byte]) for byte in GREETING[:9]]):
                calling = await there.call(*pieces)
                calling[1].write(GREETING[len(b"".join(pieces)) :])
                await there.hear_the_end(*calling)
            assert there.greeted == [GREETING] * 3
            await there.hear_the_end(*await there.call(b"T for something else"))
            assert there.taken == [b"T for something else"]
            assert there.away == []

    uvloop.run(main())


def test_who_says_nothing_or_no_greeting_or_goes_is_turned_away() -> None:
    async def main() -> None:
        async with house() as there:
            for pieces, why in (
                ([b"GET / HTTP/1.1\r\n"], "it does not speak our TLS"),
                ([b"\x16\x03\x01\xff\xff"], "it does not speak our TLS"),
                ([b"\x16\x02"], "it does not speak our TLS"),
                ([], "it sent no whole greeting within 0 s"),
                ([GREETING[:100]], "it sent no whole greeting within 0 s"),
            ):
                await there.hear_the_end(*await there.call(*pieces))
                assert there.away.pop() == why, pieces
            for said in (b"", GREETING[:2], GREETING[:5], GREETING[:100]):
                reader, writer = await there.call(said)
                writer.write_eof()
                await there.hear_the_end(reader, writer)
                assert there.away.pop() == (
                    "it closed the connection within its greeting"
                    if said
                    else "it closed the connection without sending anything"
                )
            assert not there.away
            assert not there.greeted

    uvloop.run(main())


def test_handshakes_that_come_to_nothing_wait_and_a_newcomer_finds_a_place() -> None:
    async def main() -> None:
        async with house(is_proved=False) as there:
            began = asyncio.get_running_loop().time()
            calling = [await there.call(GREETING) for _ in range(4)]
            for one in calling:
                await there.hear_the_end(*one)
            assert len(there.greeted) == 4
            assert asyncio.get_running_loop().time() - began >= 0.35, "two at once, then five a second"
            silent = [await there.call() for _ in range(6)]
            await there.hear_the_end(*silent[0])
            await there.hear_the_end(*silent[1])
            assert there.away[:2] == ["it made room for a newcomer: it took too long to send a greeting"] * 2
            for one in silent[2:]:
                await there.hear_the_end(*one)

    uvloop.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a machine has one address of its own")
@pytest.mark.parametrize(("is_sieved", "said"), [(True, b"what"), (False, b"what"), (True, b"Taken")])
def test_a_machine_of_which_many_were_turned_away_is_not_heard_for_a_while(
    monkeypatch: pytest.MonkeyPatch, is_sieved: bool, said: bytes
) -> None:
    is_shut = asyncio.Event()
    block = connection_setup.block

    def shut(listener: socket.socket, machines: Sequence[str]) -> bool:
        if machines:
            is_shut.set()
        return is_sieved and block(listener, machines)

    monkeypatch.setattr(connection_setup, "block", shut)

    async def main() -> None:
        async with house(is_proved=False) as there:
            turned_away = LIMITS.shut_out_after + 1  # they are forgotten from the first moment on
            for _ in range(turned_away):
                await there.hear_the_end(*await there.call(said, sender="127.0.0.7"))
            assert there.taken + [b"what"] * len(there.away) == [said] * turned_away
            await asyncio.wait_for(is_shut.wait(), 10)
            began = asyncio.get_running_loop().time()
            late = asyncio.create_task(asyncio.wait_for(there.call(GREETING, sender="127.0.0.7"), 10))
            await there.hear_the_end(*await there.call(GREETING))
            assert there.greeted == [GREETING]
            await there.hear_the_end(*await late)
            if is_sieved:  # the kernel of the one that calls tries again, by itself
                assert there.greeted == [GREETING] * 2
                assert asyncio.get_running_loop().time() - began >= LIMITS.shut_out_s - 2 * BLOCKLIST_S
            else:
                assert there.greeted == [GREETING]
            assert len(there.away) + len(there.taken) == turned_away

    uvloop.run(main())
