"""Peers that stand in a directory and are not what they say, or not open to those who come: each a transport and a
record, on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from threading import Thread

import msgspec
import uvloop
from swarm import LOOPBACK

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.net.authorization import Authorizer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Answer, Observer, Transport
from p2pdiloco.wire.directory_records import PeerRecord, RunRecord

PROCESS_S = 300.0


class Liar(Observer):
    """Says that it trains a run, and gives this as its manifest."""

    def __init__(self, manifest: bytes) -> None:
        self.manifest = manifest

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        return Answer(b"", self.manifest)


@asynccontextmanager
async def stand(
    directory: Directory,
    run: RunId,
    name: str,
    version: int = WIRE_VERSION,
    manifest: bytes = b"\x80 not the manifest",
    authorizer: Authorizer | None = None,
) -> AsyncIterator[None]:
    """A peer that announces ``run`` in the directory; with an ``authorizer``, which is private, itself alone."""
    transport = Transport(Identity.ephemeral(), listen=LOOPBACK, run=run, version=version, authorizer=authorizer)
    async with transport.serve(Liar(manifest)):
        if authorizer is None:
            await directory.publish_run(run, msgspec.msgpack.encode(RunRecord(name, 1000)), 60.0)
        record = msgspec.msgpack.encode(PeerRecord(tuple(transport.listen_addresses())))
        await directory.publish_peer(run, record, 60.0)
        yield


Stand = Callable[[Directory], AbstractAsyncContextManager[None]]


@contextmanager
def directory_with(*stands: Stand) -> Iterator[str]:
    """A directory, and peers that announce themselves in it, on a thread of their own; its address."""
    up: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            directory = Directory(Identity.ephemeral(), listen=[LOOPBACK], announce=[], initial_peers=[])
            await stack.enter_async_context(directory)
            for one in stands:
                await stack.enter_async_context(one(directory))
            is_over = asyncio.Event()
            up.set_result((directory.bootstrap_addresses()[0], asyncio.get_running_loop(), is_over))
            await is_over.wait()

    def run() -> None:
        try:
            uvloop.run(serve())
        except BaseException as error:
            if up.done():
                raise
            up.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    address, loop, is_over = up.result(PROCESS_S)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(is_over.set)
        thread.join(PROCESS_S)
