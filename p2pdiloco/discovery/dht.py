"""Adapter to hivemind: what is imported of it, which records our DHT accepts, and what is changed in it.

Rules of this file:
1. ``discovery/p2pd.py`` takes hivemind's names from here; no other module imports hivemind.
2. All changes to hivemind are made here: its clock, its log, the session of its daemon.
3. The ``__init__`` of hivemind, and of its ``dht`` and ``utils``, are not run: they load averaging, experts, optimizers
   and torch, which a directory does not need.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import msgspec

from p2pdiloco.discovery import sandbox
from p2pdiloco.discovery.clock_sync import SharedClock
from p2pdiloco.transport.identity import verify
from p2pdiloco.util import logs
from p2pdiloco.wire.directory_records import CLOCK_SKEW_S, TTL_LIMIT_S, subkey_of, unseal

os.environ.setdefault("GOLOG_LOG_LEVEL", "error")  # p2pd's own log, which hivemind reads and repeats
for _name in ("hivemind", "hivemind.dht", "hivemind.utils"):
    if _name not in sys.modules:
        _package = importlib.util.find_spec(_name)
        assert _package is not None
        sys.modules[_name] = importlib.util.module_from_spec(_package)  # the package as a place to find modules in
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from hivemind.utils import serializer, timed_storage
    from hivemind.utils.logging import get_logger, use_hivemind_log_handler

    vars(sys.modules["hivemind.utils"]).update(  # what its modules take from there
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

CLOCK = SharedClock()
"""Shared clock of this process. It replaces the wall clock in each of hivemind's modules that use one."""
for _module in (dht_node, dht_protocol, dht_routing, timed_storage):
    _module.get_dht_time = CLOCK.now

__all__ = [
    "BUCKET",
    "CLOCK",
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
BUCKET = 10
"""Nodes that a search asks, and that each of them names: twice the number of nodes that keep a record."""
Found = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[Any]]


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Validator: a node of our DHT stores and returns only records that their publisher signed for that very place."""

    def __init__(self) -> None:
        self._verified: dict[DHTRecord, None] = {}

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record that is stored here, or read from another node, is accepted."""
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


class DirectoryNode(DHTNode):  # type: ignore[misc]
    """DHT node whose searches do not download records.

    A search for the nodes near a key returns the records that they have under it: all records of a run, for each one
    that is announced. So this node searches for the neighbour of the key, which has no records and is near to the same
    nodes.
    """

    async def find_nearest_nodes(
        self, queries: Collection[DHTID], *given: Any, found_callback: Found | None = None, **more: Any
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """As ``DHTNode.find_nearest_nodes``."""
        keys = {DHTID(key ^ 1): key for key in queries}

        async def found(beside: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            if found_callback is not None:
                await found_callback(keys[beside], nearest, visited)

        nearest = await super().find_nearest_nodes(list(keys), *given, found_callback=found, **more)
        return {keys[beside]: nodes for beside, nodes in nearest.items()}


@lru_cache(maxsize=256)
def _key_of(topic: str) -> bytes:
    key: bytes = DHTID.generate(source=topic).to_bytes()
    return key


class _Forward(logging.Handler):
    """Passes hivemind's log on to ours. Its errors are about other nodes, so they are warnings here."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("p2pdiloco.hivemind").warning("%s", shorten(record.getMessage()))


def adopt_logging() -> None:
    use_hivemind_log_handler("nowhere")
    logger = logging.getLogger("hivemind")
    logger.handlers = [_Forward(level=logging.WARNING)]
    logger.propagate = False
    logger.setLevel(logging.WARNING)


@contextmanager
def confined() -> Iterator[None]:
    """Within it, p2pd is started in the sandbox (``discovery/sandbox.py``) and in a session of its own.

    Ctrl+C reaches the whole process group of the terminal; p2pd must outlive it, so that this peer can leave in order.
    hivemind has no options for that."""
    start = asyncio.subprocess.create_subprocess_exec
    before = (sys.executable, "-I", "-S", sandbox.__file__)
    asyncio.subprocess.create_subprocess_exec = partial(start, *before, start_new_session=True)
    try:
        yield
    finally:
        asyncio.subprocess.create_subprocess_exec = start


def channel_tasks(p2p: Any) -> list[asyncio.Task[None]]:
    """Tasks of hivemind that read and write the one channel over which all DHT calls go to p2pd."""
    control = p2p._client.control
    return [task for task in (control._read_task, control._write_task) if task is not None]


def shorten(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
