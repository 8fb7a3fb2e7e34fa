"""Lookup of runs by an observer: lists runs, and asks their peers for manifests and statuses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pdiloco.access.certificates import Role
from p2pdiloco.access.invite_code import Invite
from p2pdiloco.access.membership_log import last_in, split_statements
from p2pdiloco.discovery.directory import AddressBook, Directory, DirectoryError
from p2pdiloco.nat.rendezvous_client import RendezvousClient
from p2pdiloco.net.authorization import JoinerAuthorizer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.protocol.manifest_validation import MAX_MANIFEST_BYTES, decode_manifest
from p2pdiloco.swarm.connect import ConnectFallback
from p2pdiloco.swarm.credentials import (
    Credentials,
    MemberFiles,
    credentials_from_invite,
    members_of,
    observing_credentials,
)
from p2pdiloco.swarm.membership_sync import PIECE_BYTES
from p2pdiloco.swarm.run_index import is_meant
from p2pdiloco.transport import addresses, port_memory
from p2pdiloco.transport.dialer import Dialler
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.narrow_paths import NarrowPaths
from p2pdiloco.transport.sockets import everywhere
from p2pdiloco.transport.transport import DialError, Observer, PeerRefused, RequestError, Transport
from p2pdiloco.util import logs
from p2pdiloco.util.errors import NobodyThereError
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import GetManifest, GetStatements, GetStatus, PeerStatus, decode_as, encode
from p2pdiloco.wire.directory_records import PeerRecord, RunRecord

log = logs.get("lookup")

# Time to wait for a run or a peer to appear in the directory.
FIND_S = 15.0
ASK_S = 8.0
# Time to wait for a run or a peer, for an observer that does not join.
PATIENCE_S = 5.0
# Time for the other peers to answer after the first one: several answers are wanted since one peer may lie, but peers
# that are gone stay in the directory for minutes. A relayed connection takes half of this time.
STRAGGLERS_S = 3.0
# Maximum number of peers to dial at a time. From more, a random sample is drawn, since a directory may lie.
MOST_DIALS = 64


# File in a state folder: addresses of the directory's peers that this peer has met.
CACHE = "directory.json"


class LookupFailedError(NobodyThereError):
    """The run or its peers cannot be found. The message says what to do."""


class AllRefuseError(LookupFailedError):
    """All peers that answer refuse this one."""


class DirectoryOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of this peer's node of the directory."""

    listen: tuple[str, ...] = msgspec.field(default_factory=everywhere)
    announce: tuple[str, ...] = ()
    initial_peers: tuple[str, ...] = ()
    invite: Invite | None = None
    """Invite with which to join. Its addresses are among the initial peers."""
    has_lan: bool = True
    """Whether to look for peers of the run on the local network."""


def check_directory_addresses(texts: Iterable[str]) -> None:
    """Check the syntax of directory addresses.

    Raises:
        ValueError: an address is malformed, or names no peer.
    """
    for text in texts:
        if addresses.parse(text).peer is None:
            raise ValueError(f"{text} lacks the peer id at its end (/p2p/12D3KooW...): copy the whole address")


@contextlib.asynccontextmanager
async def open_directory(
    identity: Identity,
    options: DirectoryOptions,
    folder: Path | None,
    patience_s: float = 0.0,
    run: RunId | None = None,
) -> AsyncIterator[Directory]:
    """Open the directory, with a cache of its peers' addresses in ``folder`` (None: no cache).

    run: the run, if it is known: its peers are looked for on the local network, too.

    Raises:
        DirectoryError: none of the initial (and remembered) peers answers within ``patience_s`` (0: at once).
        ValueError: an address is malformed, or names no peer.
        OSError: a port is taken.
    """
    check_directory_addresses(options.initial_peers)
    ports = None if folder is None else folder / "directory-ports.json"
    listen = options.listen if ports is None else await asyncio.to_thread(port_memory.again, options.listen, ports)
    directory = Directory(
        identity,
        listen=list(listen),
        announce=list(options.announce),
        initial_peers=list(options.initial_peers),
        cache_path=None if folder is None else folder / CACHE,
        patience_s=patience_s,
        narrow_paths=NarrowPaths(None if folder is None else folder / "narrow-paths.json"),
        lan_run=run if options.has_lan else None,
    )
    async with directory:
        if ports is not None and not options.announce:  # announced addresses show the forwarded port, not ours
            await asyncio.to_thread(port_memory.remember, directory.visible_addresses(), ports)
        yield directory


def has_met(folder: Path, peers: Sequence[str]) -> bool:
    """Return whether this state folder has met one of the peers at these addresses. Blocks on the disk."""
    book = AddressBook()
    book.load(folder / CACHE)
    known = set(book.peers())
    return any(addresses.parse(text).peer in known for text in peers)


def observer_transport(
    identity: Identity, credentials: Credentials | None = None
) -> contextlib.AbstractAsyncContextManager[Transport]:
    """Return the context of a transport that does not listen and only sends requests.

    In a private run it shows an observer's certificate, issued with our ``credentials``. It sends little, so it uses
    short segments in any case: they also pass where long packets are lost."""
    narrow_paths = NarrowPaths(everywhere=True)
    if credentials is None:
        transport = Transport(identity, listen="", run="", version=WIRE_VERSION, narrow_paths=narrow_paths)
        return transport.serve(Observer())
    authorizer = JoinerAuthorizer(credentials.chain_for(identity.peer_id, Role.OBSERVER))
    transport = Transport(
        identity,
        listen="",
        run=credentials.run,
        version=WIRE_VERSION,
        authorizer=authorizer,
        observes=True,
        narrow_paths=narrow_paths,
    )
    return transport.serve(Observer())


class RunAnswer(NamedTuple):
    """An observer's view of one run."""

    run: RunId
    record: RunRecord
    peers: tuple[PeerStatus, ...] = ()
    """Statuses of the peers that answered."""
    addresses: tuple[str, ...] = ()
    """Addresses at which these peers were reached."""
    manifest: Manifest | None = None
    """The run's manifest, if it was requested."""
    trouble: str = ""
    """Reason why no peer was reached; empty if one was."""


class RunLookup:
    """Queries a directory and the peers of its runs, as an observer."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def list_runs(self, *, patience_s: float = FIND_S) -> dict[RunId, RunRecord]:
        """Return all runs in the directory. Waits up to ``patience_s`` seconds for the first one.

        Raises:
            DirectoryError: the directory does not answer.
        """
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            found = {}
            for run, record in (await self._directory.runs()).items():
                try:
                    found[run] = decode_as(record, RunRecord)
                except ValueError:
                    log.debug("malformed run record ignored", run=run)
            if found or asyncio.get_running_loop().time() >= deadline:
                return found
            await asyncio.sleep(0.5)

    async def dial_any(self, transport: Transport, run: RunId, *, patience_s: float = FIND_S) -> list[PeerId]:
        """Connect to the peers of the run that answer, and return their ids.

        Waits up to ``patience_s`` seconds for the first one, and STRAGGLERS_S more for others.

        Raises:
            AllRefuseError: all peers that answer refuse us. The message has the reason of each.
            LookupFailedError: nobody answers. The message has the reason of each.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        reasons: dict[PeerId, str] = {}
        records: dict[PeerId, bytes] = {}
        async with observer_connector(transport, lambda peer: peer in records) as connector:
            while True:
                try:
                    records = await self._directory.peers(run)
                except DirectoryError as error:
                    records, reasons[PeerId("directory")] = {}, str(error)
                chosen = sorted(random.sample(sorted(records.items()), min(len(records), MOST_DIALS)))
                reached = await _wait_for_peers(
                    [_dial_peer(connector, peer, record, reasons) for peer, record in chosen]
                )
                peers = [peer for peer in reached if isinstance(peer, str)]
                if peers:
                    return peers
                are_all_refusing = bool(reached) and all(isinstance(answer, PeerRefused) for answer in reached)
                if are_all_refusing or loop.time() >= deadline:
                    detail = (
                        "; ".join(f"{peer}: {reason}" for peer, reason in sorted(reasons.items()))
                        or "no peer is announced"
                    )
                    failed = AllRefuseError if are_all_refusing else LookupFailedError
                    raise failed(
                        f"no peer of run {run[:12]} can be reached ({detail}). If nobody trains it any more: "
                        "p2pdiloco resume DIR on a machine that has its state"
                    )
                await asyncio.sleep(0.5)

    async def find_namesake(self, manifest: Manifest, patience_s: float) -> tuple[RunId, RunRecord] | None:
        """Return another live run of the same name, or None."""
        for run, record in sorted((await self.list_runs(patience_s=patience_s)).items()):
            if record.name == manifest.config.name and run != manifest.run:
                async with self._connected(run, None) as (_, peers):
                    if peers:
                        return run, record
        return None

    async def has_state(self, run: RunId, credentials: Credentials | None) -> bool:
        """Return whether some peer of the run can send the run's state."""
        async with self._connected(run, credentials) as (transport, peers):
            answers = await asyncio.gather(*(ask_status(transport, peer) for peer in peers))
        return any(answer is not None and answer.phase != "joining" for answer in answers)

    async def hears_of_end(self, manifest: Manifest, folder: Path, credentials: Credentials | None) -> bool:
        """Return whether a peer of the run can be reached, and take over what it knows of the run's end."""
        async with self._connected(manifest.run, credentials) as (transport, peers):
            await fetch_prolongings(transport, peers, folder, manifest)
            return bool(peers)

    async def ask_runs(
        self,
        invite: Invite | None,
        wanted: str | None,
        identity: Callable[[], Identity],
        *,
        mine: Credentials | None = None,
        needs_manifest: bool = False,
    ) -> list[RunAnswer]:
        """Ask peers about the private run of ``mine`` or ``invite``; without them, about the open runs that match.

        wanted: name of an open run, or the beginning of its id; None: all.
        identity: returns the identity of this peer, for an invite that is bound to one peer.

        Raises:
            LookupFailedError: there is no such run, or no peer of the private run can be reached.
            DirectoryError: the directory does not answer.
            CredentialsError: the invite is for another peer.
        """
        if mine is not None:
            return [await self._ask_private_run(mine.run, mine)]
        if invite is None:
            runs = pick_runs(await self.list_runs(patience_s=PATIENCE_S), wanted)
            return [await self._ask_open_run(run, runs[run], needs_manifest) for run in sorted(runs)]
        shown = observing_credentials(invite) if invite.peer is None else credentials_from_invite(invite, identity())
        return [await self._ask_private_run(invite.run, shown)]

    @contextlib.asynccontextmanager
    async def _connected(
        self, run: RunId, credentials: Credentials | None
    ) -> AsyncIterator[tuple[Transport, list[PeerId]]]:
        """Context of an observer's transport and the peers of the run that answer at once."""
        async with observer_transport(Identity.ephemeral(), credentials) as transport:
            try:
                peers = await self.dial_any(transport, run, patience_s=0.0)
            except LookupFailedError:
                peers = []
            yield transport, peers

    async def _ask_private_run(self, run: RunId, mine: Credentials) -> RunAnswer:
        async with observer_transport(Identity.ephemeral(), mine) as transport:
            peers = await self.dial_any(transport, run, patience_s=PATIENCE_S)
            manifest = await fetch_manifest(transport, peers, run)
            record = RunRecord(manifest.config.name, Layout.of(manifest).elements)
            return await _with_statuses(RunAnswer(run, record, manifest=manifest), transport, peers)

    async def _ask_open_run(self, run: RunId, record: RunRecord, needs_manifest: bool) -> RunAnswer:
        async with observer_transport(Identity.ephemeral()) as transport:
            try:
                peers = await self.dial_any(transport, run, patience_s=PATIENCE_S)
                manifest = await fetch_manifest(transport, peers, run) if needs_manifest else None
            except LookupFailedError as error:
                return RunAnswer(run, record, trouble=str(error))
            return await _with_statuses(RunAnswer(run, record, manifest=manifest), transport, peers)


def pick_runs(runs: dict[RunId, RunRecord], wanted: str | None) -> dict[RunId, RunRecord]:
    """Return the runs that match ``wanted``: a name, or the beginning of an id; None: all.

    Raises:
        LookupFailedError: there is none.
    """
    if not runs:
        raise LookupFailedError(
            "the directory lists no open run: has anybody started one with this bootstrap address? "
            "Private runs are not listed: ask a member for an invite"
        )
    found = {run: record for run, record in runs.items() if is_meant(wanted, record.name, run)}
    if not found:
        names = ", ".join(sorted(f"{record.name} ({run[:12]})" for run, record in runs.items()))
        raise LookupFailedError(
            f"no run is called {wanted!r}: choose another one with --run; the directory knows: {names}"
        )
    return found


@contextlib.asynccontextmanager
async def observer_connector(
    transport: Transport, is_known: Callable[[PeerId], bool]
) -> AsyncIterator[ConnectFallback]:
    """Context of a connector for an observer's ``transport``, by addresses or through rendezvous servers.

    is_known: returns whether to reach a rendezvous server over ``transport``; others are reached without naming a run.
    """
    async with observer_transport(Identity.ephemeral()) as outside, Tasks() as tasks:
        dialler = Dialler()
        yield ConnectFallback(transport, dialler, RendezvousClient(transport, outside, dialler, tasks, is_known))


async def _wait_for_peers(
    dials: Sequence[Coroutine[Any, Any, PeerId | PeerRefused | None]],
) -> list[PeerId | PeerRefused | None]:
    """Return the results of the dials that end at most STRAGGLERS_S after the first success."""
    tasks = [asyncio.create_task(dial, name="reach a peer") for dial in dials]
    waiting = set(tasks)
    try:
        while waiting and not any(task.done() and isinstance(task.result(), str) for task in tasks):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await asyncio.wait(waiting, timeout=STRAGGLERS_S)
        return [task.result() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _dial_peer(
    connector: ConnectFallback, peer: PeerId, record: bytes, reasons: dict[PeerId, str]
) -> PeerId | PeerRefused | None:
    """Dial a peer. Return its id, its refusal (which is final), or None for other failures.

    The reason of a failure is added to ``reasons``."""
    try:
        return await connector.connect(peer, decode_as(record, PeerRecord))
    except PeerRefused as error:
        reasons[peer] = str(error)
        return error
    except (DialError, ValueError) as error:
        reasons[peer] = str(error)
    return None


async def fetch_manifest(transport: Transport, peers: list[PeerId], run: RunId) -> Manifest:
    """Fetch the run's manifest from any of ``peers``, and check it against its digest.

    Raises:
        LookupFailedError: no peer sent a matching manifest.
    """
    reasons = []
    for peer in peers:
        try:
            response = await transport.request(
                peer, encode(GetManifest()), timeout_s=ASK_S, max_payload=MAX_MANIFEST_BYTES
            )
            return decode_manifest(bytes(response.payload or b""), run)
        except (RequestError, ValueError) as error:
            reasons.append(f"{peer}: {error}")
    raise LookupFailedError(
        f"no peer sent a valid manifest of run {run[:12]} ({'; '.join(reasons)}): "
        "compare releases (p2pdiloco doctor ADDR), or use the address of a peer that you trust"
    )


async def fetch_prolongings(transport: Transport, peers: list[PeerId], folder: Path, manifest: Manifest) -> None:
    """Ask ``peers`` how far the run is prolonged, and leave what they know for this peer's node in the run's folder."""
    files, members = MemberFiles(folder), members_of(manifest)
    known = await asyncio.to_thread(files.prolonged_to, manifest)

    async def ask(peer: PeerId) -> None:
        try:
            response = await transport.request(
                peer, encode(GetStatements(b"")), timeout_s=ASK_S, max_payload=2 * PIECE_BYTES
            )
            for statement in split_statements(bytes(response.payload or b"")):
                if last_in(statement) > known and members.learn(statement):
                    await asyncio.to_thread(files.queue_statement, statement)
        except (RequestError, ValueError) as error:
            log.debug("a peer did not say how far the run is prolonged", peer=peer, reason=str(error))

    await asyncio.gather(*map(ask, peers))  # at once, so that several that do not answer cost no more than one


async def ask_status(transport: Transport, peer: PeerId) -> PeerStatus | None:
    """Return the status that a peer reports about itself, made printable, or None if it sends none."""
    try:
        response = await transport.request(peer, encode(GetStatus()), timeout_s=ASK_S)
        status = decode_as(response.body, PeerStatus)
    except (RequestError, ValueError) as error:
        log.debug("no status", peer=peer, reason=str(error))
        return None
    if status.peer != peer:
        log.debug("no status", peer=peer, reason="it names another peer")
        return None
    return msgspec.structs.replace(
        status, phase=logs.printable(status.phase), trouble=logs.printable(status.trouble), name=status.name.rstrip()
    )


async def _with_statuses(found: RunAnswer, transport: Transport, peers: list[PeerId]) -> RunAnswer:
    statuses = await asyncio.gather(*(ask_status(transport, peer) for peer in peers))
    channels = [channel for peer in peers if (channel := transport.channel_of(peer)) is not None]
    return found._replace(
        peers=tuple(one for one in statuses if one is not None),
        addresses=tuple(str(channel.address) for channel in channels),
    )
