"""The directory, in which peers find each other: a hivemind DHT (``discovery/dht.py``).

Rules of this file:
1. The DHT node runs in our own event loop, with libp2p's daemon (p2pd) as a child process (``p2pd.py``).
2. Records are hints. They are signed by their publisher (wire/directory_records.py), refused by every honest node if
   forged, bounded in size and number, and dropped when they expire. The directory does not decide which peers are live.
3. Every call has a deadline. A failed read returns the records that were read before and have not expired; a failed
   write raises.
4. Records expire by the clock that the nodes share (``clock_sync.py``), not by the machine's.
5. A network partition heals only if nodes reconnect. So each node keeps connecting to the nodes that it has met, and
   pings them, every KEEP_S at first.
6. A peer with a state to continue from (``patience_s``) listens on its old port and waits for the initial and the
   remembered peers: after a power failure they return in any order, and the bootstrap may not return at all.
7. p2pd is supervised. If it dies or stops answering, it is restarted with the same identity and port, and this peer's
   records are published again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.discovery.dht import CLOCK, adopt_logging
from p2pdiloco.discovery.lan import LanDiscovery
from p2pdiloco.discovery.p2pd import (
    CALL_S,
    CLIENT,
    SILENT,
    STARTUP_S,
    UNREACHABLE,
    DirectoryError,
    P2pdProcess,
    is_loopback,
)
from p2pdiloco.discovery.record_cache import RecordCache
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.timing import Backoff
from p2pdiloco.transport import addresses
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.narrow_paths import EVERYWHERE, NarrowPaths
from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular, write_atomically
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.directory_records import POINTS_TOPIC, RUNS_TOPIC, TTL_LIMIT_S, Envelope, peers_topic, seal

# -- Address book ------------------------------------------------------------------------------------------------------
# Peers of the directory that this node has met, with their addresses, in memory and on disk.
# 1. It holds at most ENTRY_LIMIT peers, with at most ADDRESS_LIMIT addresses each. The peer unseen for longest is
#    forgotten first.
# 2. The file is a hint: if it is damaged or missing, the book starts empty. It is written atomically.


log = logs.get("directory")

ENTRY_LIMIT = 256
ADDRESS_LIMIT = 4
# Maximum number of bytes to read from the cache file.
FILE_LIMIT = 1 << 20


class _Entry(Struct):
    peer: Annotated[str, Meta(max_length=64)]
    addresses: Annotated[list[Annotated[str, Meta(max_length=addresses.TEXT_LIMIT)]], Meta(max_length=16)]


class AddressBook:
    """Map from peer id to multiaddrs (without the peer id), ordered by last meeting."""

    def __init__(self) -> None:
        self._known: dict[PeerId, list[str]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def peers(self) -> list[PeerId]:
        """Return all known peers, most recently met first."""
        return list(reversed(self._known))

    def addresses_of(self, peer: PeerId) -> list[str]:
        """Return the multiaddrs of ``peer`` without its id, best first."""
        return list(self._known.get(peer, ()))

    def add(self, peer: PeerId, where: list[str]) -> None:
        """Record that ``peer`` was met just now at the multiaddrs ``where``, with or without its id.

        Addresses that are not usable are skipped."""
        known = self._known.pop(peer, [])
        for text in where:
            try:
                address = addresses.parse(text)
            except ValueError:
                continue
            if address.peer in (None, peer) and address.port:
                bare = str(msgspec.structs.replace(address, peer=None))
                known = [bare, *(other for other in known if other != bare)]
        self._known[peer] = known[:ADDRESS_LIMIT]
        while len(self._known) > ENTRY_LIMIT:
            del self._known[next(iter(self._known))]

    def load(self, path: Path) -> None:
        """Add the peers of the cache file ``path``. Blocks on the disk."""
        try:
            entries = msgspec.json.decode(read_regular(path, FILE_LIMIT), type=list[_Entry])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the address cache cannot be read; starting with an empty one", path=path, error=error)
            return
        for entry in entries[:ENTRY_LIMIT]:
            self.add(PeerId(entry.peer), entry.addresses[::-1])

    def encode(self) -> bytes:
        """Return the content of the cache file, oldest peer first."""
        entries = [_Entry(peer=peer, addresses=where) for peer, where in self._known.items() if where]
        return msgspec.json.format(msgspec.json.encode(entries), indent=1)


def save(path: Path, content: bytes) -> None:
    """Write the cache file. An error, such as a full disk, is logged and not raised. Blocks on the disk."""
    try:
        write_atomically(path, content)
    except OSError as error:
        log.warning("the address cache cannot be written", path=path, error=error)


# -- Ping schedule -----------------------------------------------------------------------------------------------------
# Decides when each peer of the directory is pinged. Intervals start short, double while nothing changes, and become
# short again when a peer stops answering. They also grow with the number of peers, so that the cost of a node does not
# grow with the swarm. At most PEERS_MOST peers are remembered; the one unpinged for longest is forgotten first.


# Longest interval between two pings of a peer that answers, and of one that does not.
CALM_S, SILENT_S = 60.0, 8.0
# Above this number of peers, the intervals of answering peers grow in proportion (benchmarks/notes.md, idle traffic).
FEW = 8
PEERS_MOST = 512


class _Peer:
    def __init__(self, shortest_s: float) -> None:
        self.next_at = 0.0
        self.has_answered = False
        self.pauses = {True: Backoff(shortest_s, CALM_S), False: Backoff(shortest_s, SILENT_S)}


class PingSchedule:
    """Schedule of pings. ``shortest_s`` is the shortest interval between two pings of one peer."""

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s = shortest_s
        self._peers: dict[PeerId, _Peer] = {}

    def due(self, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Return the members of ``peers`` that are due for a ping."""
        return [peer for peer in peers if peer not in self._peers or now >= self._peers[peer].next_at]

    def is_silent(self, peer: PeerId) -> bool:
        """Return whether the last ping of ``peer`` was not answered."""
        return peer in self._peers and not self._peers[peer].has_answered

    def has_answered(self, peer: PeerId) -> bool:
        """Return whether the last ping of ``peer`` was answered."""
        return peer in self._peers and self._peers[peer].has_answered

    def record_result(self, peer: PeerId, now: float, *, is_answered: bool) -> None:
        """Note whether a ping of ``peer`` was answered."""
        known = self._peers.pop(peer) if peer in self._peers else _Peer(self._shortest_s)
        self._peers[peer] = known
        if is_answered != known.has_answered:
            known.has_answered = is_answered
            known.pauses[is_answered].reset()
        many = max(1.0, len(self._peers) / FEW) if is_answered else 1.0
        known.next_at = now + many * known.pauses[is_answered].next_s()
        while len(self._peers) > PEERS_MOST:
            del self._peers[next(iter(self._peers))]


# -- Explanations of the daemon's errors -------------------------------------------------------------------------------
# Explains why no initial peer answered: the meaning of each error of libp2p's daemon, and the remedy.


# Parts of the daemon's errors, their meaning, the remedy.
_CAUSES = (
    (
        ("peer id mismatch",),
        "another key answers there",
        "take the address that this peer prints now, since its key is new",
    ),
    (
        ("connection refused",),
        "connection refused",
        "nothing listens there: start it again, or correct the port in the address",
    ),
    (
        ("no good addresses",),
        "its name cannot be resolved",
        "correct the name in the address, or use the IP address with /ip4",
    ),
    (
        ("no route to host", "network is unreachable"),
        "no route to host",
        "this machine has no route to it: with IPv4 alone, take an /ip4 address, with IPv6 alone an /ip6 address",
    ),
    (
        ("i/o timeout", "deadline exceeded"),
        "no answer",
        "a firewall or a router drops it: open or forward its port",
    ),
    (
        (UNREACHABLE,),
        "no answer",
        "its machine is off, or a firewall or a router drops packets to it: open or forward its port",
    ),
    (
        (SILENT,),
        SILENT,
        "the link is too slow or loses most packets, or the process there hangs: restart it",
    ),
    (
        ("protocols not supported",),
        "it answers, but is not a node of this directory",
        "another program has this port: copy the address that a bootstrap or a peer of the run prints",
    ),
    ((CLIENT,), CLIENT, "name a bootstrap or a peer that others can dial"),
    (
        ("dial to self",),
        "that is this machine's own address",
        "name another peer's address; to found a network, name none",
    ),
)
CHECK = "check that it is running, and that its port can be reached from here"


def explain_failure(reason: str) -> tuple[str, str]:
    """Return the meaning of an error of the daemon, and the remedy."""
    for parts, what, remedy in _CAUSES:
        if any(part in reason for part in parts):
            return what, remedy
    return reason.rpartition("failed to dial: ")[2] or "no answer", CHECK


def explain_failures(failures: Mapping[str, str]) -> str:
    """Return a message that explains why no initial peer answers. ``failures``: the daemon's error for each address."""
    explained = {text: explain_failure(reason) for text, reason in failures.items()}
    tried = "; ".join(f"{text}: {what}" for text, (what, _) in explained.items())
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in explained.values()))
    return (
        f"none of the initial peers answers ({tried}): {remedies}. The address of any running bootstrap or peer of "
        "the run will do; it is printed in the line 'directory is up', and may be appended to an invite. To found a "
        "network of your own, name no address"
    )


# -- Directory ---------------------------------------------------------------------------------------------------------


__all__ = ["Directory", "DirectoryError"]


# Deadline of a first connection: some eight round trips, over a satellite 6 s, more if packets are lost.
CONNECT_S = 15.0
STRAGGLERS_S = 1.0
# Time for a peer of the local network to be found, where no other peer answers.
LAN_S = 3.0
# The result of a peer that had not answered STRAGGLERS_S after the first one.
LATE = f"no answer within {STRAGGLERS_S:g} s after another peer's"
KEEP_S = 2.0
# Maximum number of peers to ping in one round; more of them take turns.
KEPT_PEERS = 32
SAVE_ROUNDS = 5
# Shortest and longest interval between two comparisons of clocks. It doubles while the clocks agree, and has a jitter
# of a third, so that not all nodes move their clocks at once.
CLOCKS_S, CLOCKS_MOST_S = 90.0, 720.0
# Number of nodes in a comparison of clocks.
CLOCKS = 8
SILENT_ROUNDS = 3
# Number of nodes that invites name besides the initial peers and this node.
FURTHER_NODES = 2
# Interval between two log lines while this peer waits for others.
WAIT_TOLD_S = 60.0
RESTART_S, RESTART_LIMIT_S = 0.1, 30.0
# Key under which a failing restart stands in ``troubles``.
RESTARTING = "directory"
# Key under which a wrong clock stands in ``troubles``.
WRONG_CLOCK = "clock"


def _one_of_each_family(texts: Iterable[str]) -> list[str]:
    """Return the first multiaddr of each family, public ones first."""
    found: dict[str, str] = {}
    for text in sorted(texts, key=lambda text: not _is_public(text)):
        found.setdefault(addresses.parse(text).family, text)
    return list(found.values())


def _is_public(text: str) -> bool:
    """Return whether a multiaddr may be dialled from anywhere."""
    address = addresses.parse(text)
    return address.family not in ("ip4", "ip6") or ipaddress.ip_address(address.host).is_global


class Directory:
    """This peer's node of the DHT. Use as ``async with Directory(identity, ...) as directory``.

    listen: multiaddrs to listen on; port 0 means any.
    announce: multiaddrs that others should dial instead, for a forwarded port.
    initial_peers: multiaddrs with /p2p/; empty for the first peer of a network.
    cache_path: file that remembers the peers that this node has met.
    patience_s: seconds to wait for an initial peer to answer, if any were given; 0: each is tried once.
    narrow_paths: hosts to which segments must be short; None: none is known yet.
    lan_run: run whose peers are looked for on the local network; None: none is.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        listen: list[str],
        announce: list[str],
        initial_peers: list[str],
        cache_path: Path | None = None,
        patience_s: float = 0.0,
        narrow_paths: NarrowPaths | None = None,
        lan_run: RunId | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self._identity = identity
        self._patience_s = patience_s
        self._initial_peers = list(initial_peers)
        self._cache_path = cache_path
        self.narrow_paths = narrow_paths or NarrowPaths()
        self._daemon = P2pdProcess(
            identity,
            listen=listen,
            announce=announce,
            narrow_paths=self.narrow_paths,
        )
        self._book = AddressBook()
        self._lan: LanDiscovery | None = None
        if lan_run is not None:
            self._lan = LanDiscovery(lan_run, identity.peer_id, lambda: self._daemon.visible, self._on_lan)
        # The first peer of the local network that answers, while this node joins.
        self._lan_answered: asyncio.Future[PeerId] | None = None
        self._initial: dict[PeerId, list[str]] = {}
        self._tasks = Tasks()
        # Problems of the tasks that keep the directory alive.
        self.troubles = self._tasks.troubles
        self._records = RecordCache()
        # By run: returns whether to keep a record, given its publisher and body (``screen_peers``).
        self._screens: dict[str, Callable[[PeerId, bytes], bool]] = {}
        self._writing = asyncio.Lock()
        self._next_kept = 0
        self._pings = PingSchedule(KEEP_S)
        self._silent_rounds = 0
        # Peers that are being pinged.
        self._pinged: set[PeerId] = set()
        # Receives the first peer that answers, while this one waits in ``_wait_for_peer``.
        self._answered: asyncio.Future[PeerId] | None = None

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start p2pd and join the DHT.

        Raises:
            DirectoryError: p2pd does not start, or initial peers were given and none answers.
            OSError: a port to listen on is taken.
        """
        adopt_logging()
        self._daemon.require_free_ports()
        if self._cache_path is not None:
            await asyncio.to_thread(self._book.load, self._cache_path)
        await asyncio.to_thread(self.narrow_paths.load)
        try:
            async with asyncio.timeout(STARTUP_S + 3 * CONNECT_S + CALL_S):
                await self._daemon.start()
                await self._tasks.__aenter__()
                if self._lan is not None:
                    self._tasks.keep(self._lan.keep, name="local network")
                answered, refusal = await self._connect_to_known()
        except TimeoutError:
            await self._stop()
            raise DirectoryError(f"the directory did not start within {STARTUP_S:g} s") from None
        except BaseException:
            await self._stop()
            raise
        self._tasks.keep(self._supervise, name="directory supervisor")
        self._tasks.keep(self._keep_connected, name="directory keeper")
        try:
            if refusal:
                answered = [await self._wait_for_peer(refusal)]
            await self._join(answered)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()
        await self._save()

    async def _stop(self) -> None:
        await self._tasks.__aexit__(None, None, None)
        await self._daemon.stop()

    # -- for the user ------------------------------------------------------------------------------------------------

    @staticmethod
    def now_s() -> float:
        """Return the directory's shared time in seconds since 1970."""
        return CLOCK.now()

    def visible_addresses(self) -> list[str]:
        """Return this node's multiaddrs with its peer id; those that others may reach come first."""
        return list(self._daemon.visible)

    def bootstrap_addresses(self) -> list[str]:
        """Return addresses to give to newcomers: no loopback address, if there is another one."""
        return [text for text in self._daemon.visible if not is_loopback(text)] or self.visible_addresses()

    def invite_addresses(self) -> tuple[str, ...]:
        """Return addresses for invites: the initial peers that answer, since they are meant to be found, else ours."""
        found = [text for peer, where in self._initial.items() if not self._pings.is_silent(peer) for text in where]
        return tuple(found or self.bootstrap_addresses())

    def further_invite_addresses(self) -> tuple[str, ...]:
        """Return more addresses for invites, so that one of them answers from any network, and later, too.

        They are: for the initial peers that answer, an address of each family that the user has not named; one of this
        node for each family, unless others cannot reach it; and those of FURTHER_NODES nodes that answer at a public
        address.
        """
        places = self.invite_addresses()
        found: list[str] = []
        for peer, named in self._initial.items():
            if not self._pings.is_silent(peer):
                are_local = all(map(is_loopback, named))
                known = [text for text in self._book.addresses_of(peer) if is_loopback(text) == are_local]
                families = {addresses.parse(text).family for text in named}
                more = _one_of_each_family(known)
                found += [f"{text}/p2p/{peer}" for text in more if addresses.parse(text).family not in families]
        if self._daemon.is_serving:
            found += _one_of_each_family(self.bootstrap_addresses())
        others = [peer for peer in self._book.peers() if peer != self.peer_id and peer not in self._initial]
        answering = [peer for peer in others if self._pings.has_answered(peer)]
        public = [(peer, [text for text in self._book.addresses_of(peer) if _is_public(text)]) for peer in answering]
        for peer, where in [one for one in public if one[1]][:FURTHER_NODES]:
            found += [f"{text}/p2p/{peer}" for text in _one_of_each_family(where)]
        return tuple(text for text in dict.fromkeys(found) if text not in places)

    def stop_serving(self) -> None:
        """Become a client of the DHT: store no keys for others, and be in no routing table.

        For a node that others cannot reach."""
        self._daemon.stop_serving()

    async def publish_run(self, run: RunId, record: bytes, ttl_s: float) -> None:
        """Publish a record of ``run``, of at most 12 KiB. It expires after ``ttl_s`` seconds (at most a day).

        Raises:
            DirectoryError: the record could not be stored.
            ValueError: the record is too large, or ``ttl_s`` is out of range.
        """
        await self._publish(RUNS_TOPIC, run, record, ttl_s)

    async def publish_point(self, record: bytes, ttl_s: float) -> None:
        """Publish a record of this peer as a rendezvous server; arguments and errors as for ``publish_run``."""
        await self._publish(POINTS_TOPIC, "", record, ttl_s)

    async def points(self) -> dict[PeerId, bytes]:
        """Return the record of each rendezvous server, those of the initial peers first."""
        found = {PeerId(envelope.peer): envelope.body for envelope in await self._read(POINTS_TOPIC)}
        return {peer: found[peer] for peer in sorted(found, key=lambda peer: peer not in self._initial)}

    async def publish_peer(self, run: RunId, record: bytes, ttl_s: float, group: str = "") -> None:
        """Publish a record of this peer in ``run`` or a group of it; arguments and errors as for ``publish_run``."""
        await self._publish(peers_topic(run, group), "", record, ttl_s)

    async def withdraw_peer(self, run: RunId, group: str = "") -> None:
        """Withdraw the record of this peer in ``run``, or in a group of it.

        Raises:
            DirectoryError: the withdrawal could not be stored; the record then expires by itself.
        """
        await self._withdraw(peers_topic(run, group), "")

    async def withdraw_run(self, run: RunId) -> None:
        """Withdraw this peer's record of ``run``; as for ``withdraw_peer``."""
        await self._withdraw(RUNS_TOPIC, run)

    async def runs(self) -> dict[RunId, bytes]:
        """Return one record of each run.

        Any peer may publish a record for any run, so the most frequent one is returned. Only the manifest's digest
        proves a run."""
        found: dict[RunId, list[bytes]] = {}
        for envelope in await self._read(RUNS_TOPIC):
            found.setdefault(RunId(envelope.name), []).append(envelope.body)
        return {run: max(sorted(set(bodies)), key=bodies.count) for run, bodies in found.items()}

    def screen_peers(self, run: RunId, accepts: Callable[[PeerId, bytes], bool]) -> None:
        """Drop peer records of ``run`` from now on unless ``accepts(publisher, record)`` returns True."""
        self._screens[run] = accepts

    async def peers(self, run: RunId, group: str = "") -> dict[PeerId, bytes]:
        """Return the records of the peers that claim to take part in ``run``, including this one: those of a group, or
        those that newcomers find (``swarm/neighbours.py``)."""
        found = await self._read(peers_topic(run, group), self._screens.get(run))
        return {PeerId(envelope.peer): envelope.body for envelope in found}

    # -- reading and writing -----------------------------------------------------------------------------------------

    def _envelope(
        self, topic: str, name: str, body: bytes, expires_s: float, *, is_withdrawn: bool = False
    ) -> Envelope:
        return Envelope(
            topic=topic,
            name=name,
            peer=self.peer_id,
            expires_s=self._records.next_expiry((topic, name), expires_s),
            addresses=tuple(self.bootstrap_addresses()[:4]),
            is_withdrawn=is_withdrawn,
            body=body,
        )

    async def _publish(self, topic: str, name: str, body: bytes, ttl_s: float) -> None:
        if not 0.0 < ttl_s <= TTL_LIMIT_S:
            raise ValueError(f"ttl_s = {ttl_s}: use more than 0 and at most {TTL_LIMIT_S:g}")
        await self._store(self._envelope(topic, name, body, CLOCK.now() + ttl_s))

    async def _withdraw(self, topic: str, name: str) -> None:
        published = self._records.withdraw((topic, f"{name}/{self.peer_id}"))
        if published is not None:
            await self._store(self._envelope(topic, name, b"", published.expires_s, is_withdrawn=True))

    async def _store(self, envelope: Envelope) -> None:
        value = seal(envelope, self._identity.sign)
        await self._daemon.call(lambda: self._store_in_turn(envelope, value), "publishing")

    async def _store_in_turn(self, envelope: Envelope, value: bytes) -> None:
        """Store a record, one at a time.

        The DHT refuses a record that it already has, so a concurrent write of the same record would look failed."""
        async with self._writing:
            self._records.publish(envelope)
            await self._daemon.store(envelope, value)

    async def _read(self, topic: str, accepts: Callable[[PeerId, bytes], bool] | None = None) -> list[Envelope]:
        """Return the newest unexpired envelopes under ``topic``: those in the DHT now, and those read before.

        Others' envelopes are dropped unless ``accepts(publisher, body)`` returns True.
        """
        try:
            for envelope in await self._daemon.call(lambda: self._daemon.fetch(topic), "reading"):
                is_own = envelope.peer == self.peer_id
                if accepts is not None and not (is_own or accepts(PeerId(envelope.peer), envelope.body)):
                    self._records.drop(envelope)
                    continue
                if self._records.add(envelope) and envelope.peer != self.peer_id and envelope.addresses:
                    self._book.add(PeerId(envelope.peer), list(envelope.addresses))
        except DirectoryError as error:
            log.warning("the directory cannot be read; using records that were read before", topic=topic, reason=error)
        return self._records.current(topic, CLOCK.now())

    # -- starting and joining ----------------------------------------------------------------------------------------

    async def _connect_to_known(self) -> tuple[list[PeerId], str]:
        """Connect to the initial and the remembered peers.

        Returns the peers that answer. If initial peers were given and nobody answers, also returns the reason; if there
        is nobody to wait for, it is raised as DirectoryError."""
        failures: dict[str, str] = {}
        for text in self._initial_peers:
            try:
                parsed = addresses.parse(text)
                if parsed.peer is None:
                    raise ValueError("the address must end with the peer id: /p2p/12D3KooW...")
                self._initial.setdefault(parsed.peer, []).append(text)
            except ValueError as error:
                failures[text] = str(error)
        self._initial.pop(self.peer_id, None)
        for peer, where in self._initial.items():
            self._book.add(peer, where)
        candidates = [peer for peer in self._book.peers() if peer != self.peer_id]
        reasons = await self._connect_to_some_or_lan(candidates)
        if None not in reasons.values() and any(str(reason).startswith(SILENT) for reason in reasons.values()):
            await self._daemon.stop()
            await self._daemon.start()
            reasons = await self._connect_to_some(candidates, by_detour=True)
        answered = [peer for peer, reason in reasons.items() if reason is None]
        if answered and not self.narrow_paths.is_everywhere and all(map(self._daemon.detoured.get, answered)):
            self.narrow_paths.add(EVERYWHERE)  # nobody answers without: the tunnel is on this side
        for peer, reason in reasons.items():
            if reason != LATE:  # a late peer may still answer, so it is not recorded as silent
                self._pings.record_result(peer, asyncio.get_running_loop().time(), is_answered=reason is None)
            if reason is not None:
                failures |= dict.fromkeys(self._initial.get(peer, ()), reason)
        if failures and not answered:
            refusal = explain_failures(failures)
            if not self._patience_s or not candidates:
                raise DirectoryError(refusal)
            return [], refusal
        for text, reason in failures.items():
            log.warning("an initial peer does not answer", address=text, reason=reason)
        return answered, ""

    async def _wait_for_peer(self, refusal: str) -> PeerId:
        """Wait for ``patience_s`` until one of the peers that ``_keep_connected`` retries has answered."""
        loop = asyncio.get_running_loop()
        self._answered = loop.create_future()
        until = loop.time() + self._patience_s
        log.warning(refusal)
        try:
            while (left_s := until - loop.time()) > 0.0:
                log.warning(
                    "waiting for another peer of the run: this peer has a state, listens on its previous addresses, "
                    "and keeps trying the peers that it knows",
                    address=(self.bootstrap_addresses() or ["-"])[0],
                    peers=sum(peer != self.peer_id for peer in self._book.peers()),
                    left_s=round(left_s),
                )
                await asyncio.wait([self._answered], timeout=min(left_s, WAIT_TOLD_S))
                if self._answered.done():
                    return self._answered.result()
        finally:
            self._answered.cancel()
            self._answered = None
        raise DirectoryError(
            f"no other peer has answered for {self._patience_s / 60:.0f} minutes; {refusal}. To continue alone "
            "from the state in this folder: p2pdiloco resume FOLDER, without --bootstrap"
        )

    async def _join(self, answered: list[PeerId]) -> None:
        CLOCK.adopt(await self._clocks_of(answered))
        self._check_clock()
        if answered:
            with suppress(DirectoryError):
                await self._daemon.fill_routing_table()
        log.info("directory is up", peers=len(answered), address=(self.bootstrap_addresses() or ["-"])[0])
        await self._save()

    def _check_clock(self) -> None:
        """Tell the user when this machine's clock becomes wrong, or right again."""
        if CLOCK.is_wrong == (WRONG_CLOCK in self.troubles):
            return
        if CLOCK.is_wrong:
            self.troubles[WRONG_CLOCK] = CLOCK.describe()
            log.warning(self.troubles[WRONG_CLOCK])
        else:
            del self.troubles[WRONG_CLOCK]
            log.info("this machine's clock agrees with that of the directory again")

    async def _connect_to_some(self, peers: list[PeerId], *, by_detour: bool = False) -> dict[PeerId, str | None]:
        """Connect to all ``peers``; after the first answer, the others have STRAGGLERS_S. See ``P2pdProcess.connect``.

        Returns for each peer the result of ``_connect``, or LATE."""
        connect = partial(self._connect, by_detour=True) if by_detour else self._connect
        tasks = {asyncio.create_task(connect(peer), name=f"meet {peer}"): peer for peer in peers}
        waiting = set(tasks)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if waiting and any(task.result() is None for task in done):
                    _, waiting = await asyncio.wait(waiting, timeout=STRAGGLERS_S)
                    break
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return {peer: LATE if task in waiting else task.result() for task, peer in tasks.items()}

    async def _connect_to_some_or_lan(self, peers: list[PeerId]) -> dict[PeerId, str | None]:
        """As ``_connect_to_some``, but also end when a peer of the local network answers, which is then in the result.

        If none of ``peers`` answers, wait LAN_S for one."""
        if self._lan is None or not peers:
            return await self._connect_to_some(peers)
        loop = asyncio.get_running_loop()
        began, self._lan_answered = loop.time(), loop.create_future()
        known = asyncio.create_task(self._connect_to_some(peers), name="meet known peers")
        try:
            either: list[asyncio.Future[Any]] = [known, self._lan_answered]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if known.done() and None not in known.result().values() and self._lan.is_on:
                await asyncio.wait([self._lan_answered], timeout=began + LAN_S - loop.time())
            reasons: dict[PeerId, str | None] = known.result() if known.done() else dict.fromkeys(peers, LATE)
            return reasons | ({self._lan_answered.result(): None} if self._lan_answered.done() else {})
        finally:
            self._lan_answered = None
            known.cancel()
            await asyncio.gather(known, return_exceptions=True)

    def _on_lan(self, peer: PeerId, where: list[str]) -> None:
        """Connect to a peer that announced itself on the local network."""
        self._book.add(peer, where)
        if peer not in self._pinged:
            self._pinged.add(peer)
            self._tasks.spawn(self._ping(peer), name=f"meet {peer}")

    async def _connect(self, peer: PeerId, *, by_detour: bool = False) -> str | None:
        """Connect to ``peer`` at its known addresses. Returns None, or the reason why that failed."""
        return await self._daemon.connect(peer, self._book.addresses_of(peer), CONNECT_S, by_detour=by_detour)

    async def _clocks_of(self, peers: list[PeerId]) -> list[float]:
        """Return how far the clocks of ``peers`` are ahead of the shared time, in seconds, without silent peers."""
        leads_s = await asyncio.gather(*(self._daemon.clock_of(peer) for peer in peers[:KEPT_PEERS]))
        return [ahead for ahead in leads_s if ahead is not None]

    # -- keeping it alive --------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        backoff = Backoff(RESTART_S, RESTART_LIMIT_S)
        while True:
            if await self._daemon.wait_for_exit():
                log.error("the libp2p daemon died; restarting it")
            await self._daemon.stop()
            try:
                async with asyncio.timeout(STARTUP_S + CONNECT_S):
                    await self._daemon.start()
                await asyncio.gather(*(self._connect(peer) for peer in self._peers_to_ping()))
                for envelope in self._records.own(CLOCK.now()):
                    with suppress(DirectoryError):
                        await self._store(envelope)
                backoff.reset()
                self.troubles.pop(RESTARTING, None)
            except Exception as error:  # noqa: BLE001 (the top of a task: any error leads to another attempt)
                pause_s = backoff.next_s()
                reason = str(error) or type(error).__name__
                log.error("the directory could not be restarted; retrying", reason=reason, pause_s=pause_s)
                self.troubles[RESTARTING] = f"this peer's node of the directory does not start, trying again: {reason}"
                await self._daemon.stop()
                await asyncio.sleep(pause_s)

    async def _keep_connected(self) -> None:
        rounds = clocks_at = 0
        clocks = Backoff(CLOCKS_S, CLOCKS_MOST_S)
        while True:
            await asyncio.sleep(KEEP_S)
            rounds += 1
            self._check_clock()
            try:
                await self._ping_round()
                if rounds >= clocks_at and self._answered is None:
                    kept = self._peers_to_ping()
                    if CLOCK.compare(await self._clocks_of(random.sample(kept, min(CLOCKS, len(kept))))):
                        clocks.reset()
                    clocks_at = rounds + round(clocks.next_s() * random.uniform(2 / 3, 4 / 3) / KEEP_S)
                if rounds % SAVE_ROUNDS == 0:
                    await self._save()
            except Exception as error:  # noqa: BLE001 (the top of a task: the next round may do better)
                log.failure("a round of pings in the directory failed", error)

    async def _ping_round(self) -> None:
        if not self._daemon.is_up:
            return
        try:
            for peer, where in (await self._daemon.connected_peers()).items():
                self._book.add(peer, [] if self._book.addresses_of(peer) else where)
            if self._daemon.is_broken:
                raise DirectoryError("the channel to p2pd broke")
            self._silent_rounds = 0
        except DirectoryError:
            self._silent_rounds += 1
            if self._silent_rounds >= SILENT_ROUNDS:
                log.error("the libp2p daemon does not answer; killing it", rounds=self._silent_rounds)
                self._daemon.kill()
                self._silent_rounds = 0
            return
        for peer in self._pings.due(self._peers_to_ping(), asyncio.get_running_loop().time()):
            if peer not in self._pinged:
                self._pinged.add(peer)
                self._tasks.spawn(self._ping(peer), name=f"ping {peer}")

    async def _ping(self, peer: PeerId) -> None:
        """Ping a peer, without keeping the others waiting for it."""
        try:
            reason = await self._connect(peer)
        finally:
            self._pinged.discard(peer)
        self._pings.record_result(peer, asyncio.get_running_loop().time(), is_answered=reason is None)
        for waiting in (self._answered, self._lan_answered):
            if reason is None and waiting is not None and not waiting.done():
                waiting.set_result(peer)

    def _peers_to_ping(self) -> list[PeerId]:
        """Return the initial peers, and up to KEPT_PEERS of the others, which take turns."""
        others = [peer for peer in self._book.peers() if peer not in self._initial and peer != self.peer_id]
        turn = [others[(self._next_kept + index) % len(others)] for index in range(min(len(others), KEPT_PEERS))]
        self._next_kept += len(turn)
        return [*self._initial, *turn]

    async def _save(self) -> None:
        if self._cache_path is not None:
            await asyncio.to_thread(save, self._cache_path, self._book.encode())
        await asyncio.to_thread(self.narrow_paths.save)
