"""Two processes with one identity: a state folder that was copied to another machine. (On one machine the lock of the
identity's file, and that of the run's folder, keep a second one out.)

Rules of this file:
1. Who starts looks whether a process that has its key answers at the addresses in its own record, or through the
   meeting points there, and does not begin.
2. Two that started at once see each other's record in the place of their own (``peer_manager.py``, rule 4); the one
   that began later ends. Nobody's word is taken for it: whoever cannot prove to have the key is no twin.
3. Other peers keep to the life that they saw last, refuse one that had to give way before, and hear nothing from it
   (``net/endpoint.py``), so that nothing flaps meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

import msgspec

from p2pdiloco.discovery.directory import Directory
from p2pdiloco.peer.host import Host
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.swarm.credentials import Credentials
from p2pdiloco.swarm.run_lookup import observer_connector, observer_transport
from p2pdiloco.transport.identity import Identity, IdentityError
from p2pdiloco.transport.transport import DialError
from p2pdiloco.util import logs
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.wire.control_messages import decode_as
from p2pdiloco.wire.directory_records import PeerRecord

log = logs.get("node")

ANSWER_S = 3.0
"""What a twin has to answer, at all its addresses at once."""
MEET_S = 8.0
"""And through a meeting point, whose routers are punched first."""
LOOK_S = 5.0
"""Between two looks at one."""


class IdentityTaken(NamedTuple):
    """Another process that has this peer's identity began earlier and stays: this one must end."""

    reason: str


class DuplicateIdentity:
    """Looks for other processes with the identity ``me``. Publishes ``IdentityTaken`` if one of them began earlier."""

    def __init__(
        self,
        me: PeerId,
        credentials: Credentials | None,
        host: Host,
        events: EventBus,
        *,
        began_s: float,
        life: str,
    ) -> None:
        """``began_s`` and ``life`` are this process's: when it began, by the directory's clock, and its transport's
        life."""
        self._me = me
        self._credentials = credentials
        self._host = host
        self._events = events
        self._began_s = began_s
        self._life = life
        self.must_end = False
        """One of them stays."""
        self._looked_at = -LOOK_S
        self._told = ""
        """Life of the one that was told of."""

    def handle_record(self, record: PeerRecord) -> None:
        """Look at a record of ``me`` that this process has not published."""
        now = self._host.now()
        if now >= self._looked_at + LOOK_S and not self.must_end:
            self._looked_at = now
            self._host.spawn(self._check(record), name="twin")

    async def _check(self, record: PeerRecord) -> None:
        """If it answers, the one of us that began later ends."""
        address = await find_duplicate(record, self._me, self._credentials)
        if address is None:
            return
        told = describe_duplicate(self._me, address)
        if must_give_way(self._began_s, self._life, to=record):
            self.must_end = True
            self._events.publish(IdentityTaken(told))
        elif record.life != self._told:
            self._told = record.life
            log.warning(f"{told}. It began later, and gives way")


async def refuse_duplicate_identity(
    directory: Directory, run: RunId, peer: PeerId, credentials: Credentials | None
) -> None:
    """Before taking part.

    Raises:
        IdentityError: a process with this peer's key takes part in ``run`` already.
        DirectoryError: the directory does not answer.
    """
    record = (await directory.peers(run)).get(peer)
    if record is None:
        return
    try:
        address = await find_duplicate(decode_as(record, PeerRecord), peer, credentials)
    except ValueError:
        return
    if address is not None:
        raise IdentityError(describe_duplicate(peer, address))


async def find_duplicate(record: PeerRecord, peer: PeerId, credentials: Credentials | None) -> str | None:
    """Where a process proves to be ``peer``, in the life that the record names; None: nowhere."""
    async with (
        observer_transport(Identity.ephemeral(), credentials) as transport,
        observer_connector(transport, lambda other: other == peer) as connector,
    ):

        async def prove(way: Awaitable[PeerId], where: str, within_s: float) -> str | None:
            try:
                async with asyncio.timeout(within_s):
                    await way
            except (DialError, ValueError, TimeoutError):
                return None
            return where if record.life in ("", transport.life_of(peer)) else None

        ways = [prove(transport.dial(text, timeout_s=ANSWER_S), text, ANSWER_S + 1.0) for text in record.addresses]
        if record.points:
            met = connector.connect(peer, msgspec.structs.replace(record, addresses=()))
            ways.append(prove(met, f"the meeting point {record.points[0]}", MEET_S))
        answers = await asyncio.gather(*ways)
    return next((where for where in answers if where is not None), None)


def must_give_way(began_s: float, life: str, *, to: PeerRecord) -> bool:
    """Whether a process that began then, with that life, ends for the sake of the one that has published ``to``. Of any
    two one does."""
    return (began_s, life) > (to.began_s, to.life)


def describe_duplicate(peer: PeerId, address: str) -> str:
    """What happened and what to do, for the user."""
    return (
        f"another process takes part with this peer's identity ({peer}, at {address}): its state folder is a copy of "
        "this one, or the other way round. Stop one of them; to run both, remove identity.key from the copy, which "
        "then gets an identity of its own"
    )
