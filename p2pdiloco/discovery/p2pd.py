"""The libp2p daemon (p2pd, a child process) and the DHT node that uses it, in our own event loop.

Rules of this file:
1. Every call has a deadline, and every error inside hivemind is raised as DirectoryError.
2. If the daemon ends or stops answering, ``directory.py`` restarts it with the same identity and port, so that others
   find this peer at its old address.

This module does not use hivemind.DHT, which forks Python and leaves orphans when the parent is killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from p2pdiloco.discovery.call_deadlines import LEAST_S, CallDeadlines
from p2pdiloco.discovery.detours import Detours, loses_long_packets
from p2pdiloco.discovery.dht import (
    BUCKET,
    CLOCK,
    DHTID,
    P2P,
    ControlFailure,
    DirectoryNode,
    Multiaddr,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    SignedRecords,
    channel_tasks,
    confined,
    dht_pb2,
    shorten,
)
from p2pdiloco.discovery.record_cache import RECORDS_LIMIT
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.transport.narrow_paths import NarrowPaths
from p2pdiloco.util import logs
from p2pdiloco.util.errors import NobodyThereError
from p2pdiloco.util.files import UNSUPPORTED
from p2pdiloco.wire.directory_records import Envelope, subkey_of, unseal

log = logs.get("directory")

Result = TypeVar("Result")

# Deadline of a read or a write among near nodes; far ones have CALL_ROUND_TRIPS more. A search takes some three rounds
# of calls, and each call opens a stream.
CALL_S, CALL_ROUND_TRIPS = 5.0, 12
STARTUP_S = 15.0
# Reasons why a node was not reached, as ``connect`` returns them.
CLIENT = "it answers, but only asks the directory, and others cannot reach it"
UNREACHABLE = "no connection"
# Time for the first answer of a node that is connected and near, before a detour is tried.
SILENT_S = 3.0
SILENT = "connected, but no answer to a ping"

# Prefix of the name of the folder for p2pd's control sockets.
SOCKET_FOLDER = "p2pdiloco-p2pd-"
# Longest folder in which the sockets are put, in bytes: the path of a Unix socket may have at most 107.
LONGEST_SOCKET_BASE = 40
# A folder younger than this is not removed, in seconds.
NEW_S = 60.0


class DirectoryError(NobodyThereError):
    """The directory cannot be reached or used. The message says what was tried and what to do."""


class P2pdProcess:
    """The daemon and its DHT node. ``listen`` and ``announce`` are multiaddrs, as for ``Directory``."""

    def __init__(
        self,
        identity: Identity,
        *,
        listen: list[str],
        announce: list[str],
        narrow_paths: NarrowPaths,
    ) -> None:
        self._identity = identity
        self._listen = [str(addresses.parse(text)) for text in listen]
        self._announce = [str(addresses.parse(text)) for text in announce]
        self._validator = SignedRecords()
        # True unless this node is a client of the DHT.
        self.is_serving = True
        self._sockets: SocketFolder | None = None
        self._p2p: Any = None
        self._node: Any = None
        self._deadlines = CallDeadlines()
        self._narrow_paths = narrow_paths
        self._detours: Detours | None = None
        # Nodes that were connected by a detour, and whether their paths are known to lose long packets.
        self.detoured: dict[PeerId, bool] = {}
        # Multiaddrs with this peer's id; loopback addresses come last.
        self.visible: list[str] = []

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def require_free_ports(self) -> None:
        """Check that the ports are free.

        p2pd listens with SO_REUSEPORT, so on a taken port it would start and share the other process's connections.

        Raises:
            OSError: a port to listen on is taken.
        """
        for text in self._listen:
            address = addresses.parse(text)
            if address.port and address.family in ("ip4", "ip6"):
                sockets.listen(address).close()

    async def start(self) -> None:
        """Start p2pd. It does not connect to any peer yet.

        Raises:
            DirectoryError: p2pd does not start.
        """
        identity_path, is_temporary = self._identity.path, False
        if identity_path is None:
            identity_path, is_temporary = await asyncio.to_thread(_write_temporary_identity, self._identity), True
        if self._sockets is None:
            self._sockets = await asyncio.to_thread(SocketFolder)
        if self._detours is None:
            self._detours = await Detours().__aenter__()
        # hivemind puts p2pd's control sockets into /tmp with the umask's permissions, so any user could control p2pd.
        private: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._sockets.path}/"})
        try:
            with confined():
                self._p2p = await private.create(
                    host_maddrs=self._listen,
                    announce_maddrs=self._announce or None,
                    identity_path=str(identity_path),
                    check_if_identity_free=False,
                    startup_timeout=STARTUP_S,
                    nat_port_map=False,
                    auto_nat=False,
                    use_relay=False,
                )
        except (P2PDaemonError, ValueError, OSError) as error:
            raise DirectoryError(f"the libp2p daemon does not start (listening on {self._listen}): {error}") from error
        finally:
            if is_temporary:
                identity_path.unlink(missing_ok=True)
        for task in channel_tasks(self._p2p):
            # Retrieve the exception, or asyncio complains about it. The owner notices a dead p2pd by ``wait_for_exit``
            # and ``is_broken``.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Caching is off: every read asks a bucket of nodes, and each returns all records that it has. Copies on further
        # nodes would only multiply that traffic.
        self._node = await DirectoryNode.create(
            p2p=self._p2p,
            bucket_size=BUCKET,
            wait_timeout=LEAST_S,  # see set_deadlines
            record_validator=self._validator,
            cache_refresh_before_expiry=0,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
        )
        self._node.set_deadlines(self._deadlines)
        if not self.is_serving:
            self.stop_serving()
        found = [str(text) for text in await self._p2p.get_visible_maddrs(latest=True)]
        self.visible = sorted(found, key=is_loopback)
        self._pin_port()

    def _pin_port(self) -> None:
        """Reuse the ports that p2pd chose after a restart, so that others find this peer at the same address."""
        ports: dict[str, int] = {}
        for text in self.visible:
            with suppress(ValueError):
                ports.setdefault((found := addresses.parse(text)).family, found.port)
        self._listen = [
            str(msgspec.structs.replace(parsed, port=parsed.port or ports.get(parsed.family, 0)))
            for parsed in map(addresses.parse, self._listen)
        ]

    async def stop(self) -> None:
        """Stop the node and p2pd. Kill p2pd if it does not end in time."""
        node, p2p, self._node, self._p2p = self._node, self._p2p, None, None
        is_running = p2p is not None and p2p._child.returncode is None
        if node is not None:
            node.is_alive = False
            if node.cache_refresh_task is not None:
                node.cache_refresh_task.cancel()
        if node is not None and is_running:
            with suppress(DirectoryError):
                await self.call(node.shutdown, "leaving the DHT")
        if p2p is not None:
            try:
                await self.call(p2p.shutdown, "stopping p2pd")
            except DirectoryError:
                with suppress(ProcessLookupError):
                    p2p._child.kill()
                await p2p._child.wait()
        if self._detours is not None:
            await self._detours.__aexit__(None, None, None)
            self._detours = None
        self.detoured.clear()
        if self._sockets is not None:
            await asyncio.to_thread(self._sockets.remove)
            self._sockets = None

    async def wait_for_exit(self) -> bool:
        """Wait until p2pd has ended, and return True; return False at once if it does not run."""
        if self._p2p is None:
            return False
        await self._p2p._child.wait()
        return True

    @property
    def is_up(self) -> bool:
        """True if p2pd was started and has not been stopped since."""
        return self._p2p is not None and self._node is not None

    @property
    def is_broken(self) -> bool:
        """True if hivemind's control channel to p2pd, which carries all calls, is closed."""
        return self._p2p is not None and any(task.done() for task in channel_tasks(self._p2p))

    def kill(self) -> None:
        """Kill a p2pd that does not answer."""
        if self._p2p is not None and self._p2p._child.returncode is None:
            self._p2p._child.kill()

    def stop_serving(self) -> None:
        """Become a client of the DHT: store no keys for others from now on, also after a restart."""
        self.is_serving = False
        if self._node is not None:
            self._node.protocol.client_mode = True
            self._node.protocol.node_info = dht_pb2.NodeInfo()

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(self, action: Callable[[], Awaitable[Result]], doing: str) -> Result:
        """Await ``action`` within CALL_S, or longer where other nodes are far away, and return its result.

        ``doing`` names the action in error messages.

        Raises:
            DirectoryError: the deadline has passed, or hivemind or p2pd failed.
        """
        limit_s = CALL_S + CALL_ROUND_TRIPS * self._deadlines.typical_s
        try:
            async with asyncio.timeout(limit_s):
                return await action()
        except TimeoutError:
            raise DirectoryError(f"{doing} took longer than {limit_s:.1f} s") from None
        except (OSError, EOFError, RuntimeError, ValueError, AssertionError, P2PDaemonError, ControlFailure) as error:
            raise DirectoryError(f"{doing} failed: {error or type(error).__name__}") from error

    async def store(self, envelope: Envelope, value: bytes) -> None:
        """Put a sealed record into the DHT.

        Raises:
            DirectoryError: no node accepted it, or the daemon does not run.
        """
        node = self._running_node()
        is_stored = await node.store(envelope.topic, value, envelope.expires_s, subkey=subkey_of(envelope))
        # hivemind reports only the last replica's answer. A refusal does not matter if another node has the record.
        if not is_stored and envelope not in await self.fetch(envelope.topic):
            raise DirectoryError("no node of the directory accepted the record; can other nodes reach this one?")

    async def fetch(self, topic: str) -> list[Envelope]:
        """Return the valid records that the DHT holds under ``topic`` now, at most RECORDS_LIMIT."""
        found = await self._running_node().get(topic, latest=True)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        values = [item.value for item in list(records.values())[:RECORDS_LIMIT] if isinstance(item.value, bytes)]
        envelopes = [unseal(value, verify) for value in values]
        return [envelope for envelope in envelopes if envelope is not None and envelope.topic == topic]

    def _running_node(self) -> Any:
        if self._node is None:
            raise DirectoryError("the directory is restarting")
        return self._node

    async def fill_routing_table(self) -> None:
        """Fill the routing table with this node's neighbours."""
        node = self._running_node()
        await self.call(lambda: node.find_nearest_nodes([node.node_id]), "searching for neighbours")

    async def connected_peers(self) -> dict[PeerId, list[str]]:
        """Return the peers to which p2pd is connected, with their addresses."""
        if self._p2p is None:
            raise DirectoryError("the directory is restarting")
        infos = await self.call(self._p2p.list_peers, "asking p2pd")
        return {PeerId(info.peer_id.to_base58()): [str(address) for address in info.addrs] for info in infos}

    async def connect(
        self, peer: PeerId, where: Sequence[str], timeout_s: float, *, by_detour: bool = False
    ) -> str | None:
        """Connect to ``peer`` and add it to the routing table. Returns None, or the reason why that failed.

        A peer that is silent at first, or whose path is known to lose long packets, is reached by a detour. The daemon
        may still know the direct address then, and be faster there, so that it stays silent. With ``by_detour``,
        nothing else is tried: for a daemon that was just started, and knows no address.
        """
        is_narrow = peer in self.detoured or any(_host(text) in self._narrow_paths for text in where)
        silent_s = min(timeout_s, SILENT_S + CALL_ROUND_TRIPS * self._deadlines.typical_s)
        if not is_narrow and not by_detour:
            reason = await self._connect(peer, where, timeout_s, silent_s)
            if reason is None or not reason.startswith(SILENT) or not where or all(map(is_loopback, where)):
                return reason
        if peer not in self.detoured and self._p2p is not None:
            with suppress(DirectoryError):
                await self.call(lambda: self._p2p._client.disconnect(PeerID.from_base58(peer)), "disconnecting")
        try:
            ways = await self._detours.to(where) if self._detours is not None else []
        except OSError as error:
            return str(error)
        if not ways:
            return UNREACHABLE
        reason, lost = await asyncio.gather(
            self._connect(peer, ways, timeout_s, timeout_s if by_detour or is_narrow else silent_s),
            asyncio.gather(*(loses_long_packets(text) for text in where if not is_narrow)),
        )
        if reason is None and peer not in self.detoured:
            self.detoured[peer] = is_narrow or any(lost)
            # else the node, or a full queue, was slow
            if any(lost) and self._narrow_paths.add(_host(where[lost.index(True)])):
                log.warning("the path loses long packets; the directory uses short segments", peer=peer)
        if reason is not None:
            self.detoured.pop(peer, None)
        return reason

    async def _connect(self, peer: PeerId, where: Sequence[str], timeout_s: float, silent_s: float) -> str | None:
        """Connect to ``peer`` at exactly these addresses; its ping may take ``silent_s``."""
        p2p, node = self._p2p, self._node
        if p2p is None or node is None:
            return "the directory is restarting"
        is_connected = False
        try:
            target = PeerID.from_base58(peer)
            async with asyncio.timeout(timeout_s):
                await p2p._client.connect(target, [Multiaddr(text) for text in where])
                is_connected = True
                request = dht_pb2.PingRequest(peer=node.protocol.node_info)
                answer = await node.protocol.get_stub(target).call_within(silent_s, "rpc_ping", request)
        except TimeoutError:
            await node.protocol.update_routing_table(None, target, responded=False)
            return f"{SILENT} within {silent_s:.1f} s" if is_connected else f"{UNREACHABLE} within {timeout_s:g} s"
        except (ControlFailure, P2PDaemonError, P2PHandlerError, OSError, EOFError, ValueError) as error:
            reason = shorten(str(error) or type(error).__name__)
            return f"{SILENT}: {reason}" if is_connected and "not supported" not in reason else reason
        if not answer.peer.node_id:  # it stores nothing, so that searches must not end there
            await node.protocol.update_routing_table(None, target, responded=False)
            return CLIENT
        await node.protocol.update_routing_table(DHTID.from_bytes(answer.peer.node_id), target, responded=True)
        return None

    async def clock_of(self, peer: PeerId) -> float | None:
        """Return how far the peer's clock is ahead of the shared time, in seconds, or None if it does not answer."""
        node = self._node
        if node is None:
            return None
        try:
            asked = CLOCK.now()
            answer = await node.protocol.get_stub(PeerID.from_base58(peer)).rpc_ping(dht_pb2.PingRequest())
            return float(answer.dht_time) - (asked + CLOCK.now()) / 2
        except (TimeoutError, P2PHandlerError, P2PDaemonError, ControlFailure, OSError, EOFError, ValueError):
            return None


class SocketFolder:
    """A folder for p2pd's control sockets that only this user may enter. It is locked as long as this process lives.

    Making one also removes the folders that killed processes of this user left. The lock tells these apart, also from
    folders of other containers, whose process ids mean nothing here.
    """

    def __init__(self) -> None:
        """Make the folder.

        Raises:
            DirectoryError: none can be made.
        """
        base = _socket_base()
        for left in base.glob(f"{SOCKET_FOLDER}*"):
            with suppress(OSError):
                if left.lstat().st_uid == os.getuid():
                    self._remove_if_unlocked(left)
        self.path = Path(tempfile.mkdtemp(prefix=SOCKET_FOLDER, dir=base))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in UNSUPPORTED:  # otherwise others cannot lock it either, and leave it
                raise

    @staticmethod
    def _remove_if_unlocked(folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > NEW_S:  # its owner may be about to lock it
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)

    def remove(self) -> None:
        """Remove the folder and what is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _socket_base() -> Path:
    """Return the folder for temporary files, or one with a shorter name: paths of sockets have at most 107 bytes."""
    for base in (tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/dev/shm"):
        if base and len(base) <= LONGEST_SOCKET_BASE and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    raise DirectoryError(
        f"no folder for sockets can be written: set TMPDIR to one of at most {LONGEST_SOCKET_BASE} characters"
    )


def _write_temporary_identity(identity: Identity) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="p2pdiloco-identity-")
    with os.fdopen(descriptor, "wb") as file:
        file.write(identity.to_file_bytes())
    return Path(name)


def _host(text: str) -> str:
    return addresses.parse(text).host


def is_loopback(text: str) -> bool:
    """Return whether a multiaddr is a loopback address."""
    return text.startswith(("/ip4/127.", "/ip6/::1/"))
