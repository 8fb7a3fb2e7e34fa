"""Adapter to hivemind: the imports from it, the record validator of our DHT, and the patches to hivemind.

Rules of this file:
1. ``discovery/p2pd.py`` takes hivemind's names from here; no other module imports hivemind.
2. All patches to hivemind are made here: its clock, its log, its stores, the session of its daemon.
3. The ``__init__`` modules of hivemind, hivemind.dht and hivemind.utils are not run: they load averaging, experts,
   optimizers and torch, which a directory does not need.
"""

from __future__ import annotations

import asyncio
import heapq
import importlib.util
import logging
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from typing import Any
from unittest import mock

import msgspec

from p2pdiloco.discovery import sandbox
from p2pdiloco.discovery.call_deadlines import CallDeadlines
from p2pdiloco.discovery.clock_sync import SharedClock
from p2pdiloco.transport.identity import verify
from p2pdiloco.util import logs
from p2pdiloco.wire.directory_records import CLOCK_SKEW_S, TTL_LIMIT_S, subkey_of, unseal

os.environ.setdefault("GOLOG_LOG_LEVEL", "error")  # level of p2pd's log, which hivemind repeats in its own
for _name in ("hivemind", "hivemind.dht", "hivemind.utils"):
    if _name not in sys.modules:
        _package = importlib.util.find_spec(_name)
        assert _package is not None
        sys.modules[_name] = importlib.util.module_from_spec(_package)  # an empty package, to import submodules from
with warnings.catch_warnings(), mock.patch.object(multiprocessing, "Lock", threading.Lock):
    # hivemind makes a lock between processes, which needs room in /dev/shm; we use it in one process only.
    warnings.simplefilter("ignore")
    from hivemind.utils import serializer, timed_storage
    from hivemind.utils.logging import get_logger, use_hivemind_log_handler

    vars(sys.modules["hivemind.utils"]).update(  # names that other modules of hivemind import from there
        MSGPackSerializer=serializer.MSGPackSerializer,
        SerializerBase=serializer.SerializerBase,
        get_logger=get_logger,
        get_dht_time=timed_storage.get_dht_time,
    )
    from hivemind.dht import node as dht_node
    from hivemind.dht import protocol as dht_protocol
    from hivemind.dht import routing as dht_routing
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
    from hivemind.proto import dht_pb2
    from hivemind.utils.multiaddr import Multiaddr

# The shared clock of this process. It replaces the wall clock in all of hivemind's modules that use one.
CLOCK = SharedClock()
for _module in (dht_node, dht_protocol, dht_routing, timed_storage):
    _module.get_dht_time = CLOCK.now

__all__ = [
    "BUCKET",
    "CLOCK",
    "DHTID",
    "P2P",
    "ControlFailure",
    "DirectoryNode",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "SignedRecords",
    "adopt_logging",
    "channel_tasks",
    "confined",
    "dht_pb2",
    "shorten",
]

log = logs.get("directory")

VERIFIED_LIMIT = 8192
# Kademlia's bucket size (k): nodes that a search asks, and nodes that each answer names. It is twice the number of
# nodes that store a record.
BUCKET = 10
Found = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[Any]]


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Validator of our DHT: accepts a record only if its publisher signed it for this key and subkey."""

    def __init__(self) -> None:
        self._verified: dict[DHTRecord, None] = {}

    def validate(self, record: DHTRecord) -> bool:
        """Return whether to accept a record that is to be stored here or was read from another node."""
        if record in self._verified:
            return True
        if not self._is_valid(record):
            log.debug("refused a record", bytes=len(record.value))
            return False
        self._verified[record] = None
        while len(self._verified) > VERIFIED_LIMIT:
            del self._verified[next(iter(self._verified))]
        return True

    def _is_valid(self, record: DHTRecord) -> bool:
        try:
            value = msgspec.msgpack.decode(record.value, type=bytes)
            subkey = msgspec.msgpack.decode(record.subkey, type=str)
        except (msgspec.MsgspecError, RecursionError):
            return False
        envelope = unseal(value, verify)
        return (
            envelope is not None
            and subkey == subkey_of(envelope)
            and record.key == _key_of(envelope.topic)
            and record.expiration_time == envelope.expires_s
            and record.expiration_time <= CLOCK.now() + TTL_LIMIT_S + CLOCK_SKEW_S
        )


class TimedStub:
    """Stub of another node whose calls have that node's own deadline, and measure its round trip.

    hivemind gives all calls the same timeout, which is too short for far nodes or too long for dead ones.
    """

    def __init__(self, stub: Any, peer: PeerID, deadlines: CallDeadlines) -> None:
        self._stub = stub
        self._peer = peer
        self._deadlines = deadlines

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return partial(self.call, name)

    async def call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        """Call the node within its deadline, instead of ``timeout``."""
        return await self.call_within(self._deadlines.deadline_s(self._peer), name, request)

    async def call_within(self, limit_s: float, name: str, request: Any) -> Any:
        """Call the node within ``limit_s``."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await getattr(self._stub, name)(request, timeout=limit_s)
        self._deadlines.record(self._peer, loop.time() - began)
        return answer


class DirectoryNode(DHTNode):  # type: ignore[misc]
    """A DHT node whose calls have deadlines by measured round trips, and whose searches do not download records.

    In hivemind, a search for the nodes near a key also returns the records under that key, so that each announcement
    would download all records of the run. This node searches for an adjacent key instead: it has no records, and the
    same nodes are near to it.
    """

    def set_deadlines(self, deadlines: CallDeadlines) -> None:
        """Use ``deadlines`` for all calls to other nodes."""
        stub_of = self.protocol.get_stub
        self.protocol.get_stub = lambda peer: TimedStub(stub_of(peer), peer, deadlines)

    async def find_nearest_nodes(
        self, queries: Collection[DHTID], *given: Any, found_callback: Found | None = None, **more: Any
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """Search for nodes near each key, as ``DHTNode.find_nearest_nodes`` does, without reading records."""
        keys = {DHTID(key ^ 1): key for key in queries}

        async def found(beside: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            if found_callback is not None:
                await found_callback(keys[beside], nearest, visited)

        nearest = await super().find_nearest_nodes(list(keys), *given, found_callback=found, **more)
        return {keys[beside]: nodes for beside, nodes in nearest.items()}


def _compact(store: Callable[..., bool]) -> Callable[..., bool]:
    """Return ``TimedStorage.store`` whose heap of expirations does not outgrow its values.

    hivemind adds an entry to the heap in each call, which stays until it expires: 14 a second in a swarm of three
    peers. Where it refuses a value that expires earlier than the one it has, it would also drop that one earlier.
    """

    @wraps(store)
    def store_compactly(storage: Any, key: Any, value: Any, expiration_time: float) -> bool:
        held = storage.data.get(key)
        if held is not None and held.expiration_time >= expiration_time and not storage.frozen:
            return False
        is_stored = store(storage, key, value, expiration_time)
        if len(storage.expiration_heap) > 2 * len(storage.key_to_heap) + 16:
            storage.expiration_heap = list(storage.key_to_heap.values())
            heapq.heapify(storage.expiration_heap)
        return is_stored

    return store_compactly


timed_storage.TimedStorage.store = _compact(timed_storage.TimedStorage.store)


@lru_cache(maxsize=256)
def _key_of(topic: str) -> bytes:
    key: bytes = DHTID.generate(source=topic).to_bytes()
    return key


class _Forward(logging.Handler):
    """Forwards hivemind's log to ours. Its errors concern other nodes, so they are warnings here."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("p2pdiloco.hivemind").warning("%s", shorten(record.getMessage()))


def adopt_logging() -> None:
    """Redirect hivemind's log to ours, warnings and errors only."""
    use_hivemind_log_handler("nowhere")
    logger = logging.getLogger("hivemind")
    logger.handlers = [_Forward(level=logging.WARNING)]
    logger.propagate = False
    logger.setLevel(logging.WARNING)


@contextmanager
def confined() -> Iterator[None]:
    """Context in which p2pd is started in the sandbox (``discovery/sandbox.py``) and in a session of its own.

    Ctrl+C signals the whole process group of the terminal. p2pd must survive it, so that this peer can shut down
    gracefully. hivemind has no option for either, so the function that starts processes is replaced."""
    start = asyncio.subprocess.create_subprocess_exec
    before = (sys.executable, "-I", "-S", sandbox.__file__)
    asyncio.subprocess.create_subprocess_exec = partial(start, *before, start_new_session=True)
    try:
        yield
    finally:
        asyncio.subprocess.create_subprocess_exec = start


def channel_tasks(p2p: Any) -> list[asyncio.Task[None]]:
    """Return hivemind's tasks that read and write its control channel to p2pd, which carries all DHT calls."""
    control = p2p._client.control
    return [task for task in (control._read_task, control._write_task) if task is not None]


def shorten(text: str, limit: int = 300) -> str:
    """Return ``text`` in one line of at most ``limit`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
