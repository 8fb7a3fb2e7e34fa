"""Detects a second process with the same identity, which happens if a state folder is copied to another machine.

On one machine, the locks on the identity's file and on the run's folder prevent that.

Rules of this file:
1. A starting peer looks for a process with its key, at the addresses in its own record and through its rendezvous
   servers. If one answers, the peer does not start.
2. If two processes start at the same time, each sees the other's record in the place of its own (``peer_manager.py``,
   rule 4). The one that began later ends. A process counts only if it proves that it has the key.
3. Other peers stay with the incarnation (``life``) that they saw last, and refuse an earlier one that was displaced
   (``net/endpoint.py``), so that connections do not flap meanwhile.
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

# Timeout for an answer at the addresses, which are all dialled at once.
ANSWER_S = 3.0
# Timeout for an answer through a rendezvous server, which includes hole punching.
MEET_S = 8.0
# Minimum time between two checks of a duplicate.
LOOK_S = 5.0


class IdentityTaken(NamedTuple):
    """Event: another process with this peer's identity began earlier, so this process must end."""

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
        """
        Args:
            began_s: start of this process, by the directory's clock.
            life: incarnation of this process's transport.
        """
        self._me = me
        self._credentials = credentials
        self._host = host
        self._events = events
        self._began_s = began_s
        self._life = life
        # True once this process was found to be the later one.
        self.must_end = False
        self._looked_at = -LOOK_S
        # Incarnation of the duplicate that was logged last, so that each is logged once.
        self._told = ""

    def handle_record(self, record: PeerRecord) -> None:
        """Check a record of ``me`` that another process has published."""
        now = self._host.now()
        if now >= self._looked_at + LOOK_S and not self.must_end:
            self._looked_at = now
            self._host.spawn(self._check(record), name="twin")

    async def _check(self, record: PeerRecord) -> None:
        """Try to reach the other process. If it answers, the process that began later ends."""
        address = await find_duplicate(record, self._me, self._credentials)
        if address is None:
            return
        sentence = describe_duplicate(self._me, address)
        if must_give_way(self._began_s, self._life, to=record):
            self.must_end = True
            self._events.publish(IdentityTaken(sentence))
        elif record.life != self._told:
            self._told = record.life
            log.warning(f"{sentence}. The other process began later, so it will end")


async def refuse_duplicate_identity(
    directory: Directory, run: RunId, peer: PeerId, credentials: Credentials | None
) -> None:
    """Check before joining that no other process has this identity.

    Raises:
        IdentityError: a process with this peer's key already takes part in ``run``.
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
    """Return where a process answers and proves to be ``peer``, in the incarnation of the record, or None."""
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
            ways.append(prove(met, f"the rendezvous server {record.points[0]}", MEET_S))
        answers = await asyncio.gather(*ways)
    return next((where for where in answers if where is not None), None)


def must_give_way(began_s: float, life: str, *, to: PeerRecord) -> bool:
    """Return whether a process must end in favour of the one that published the record ``to``.

    began_s, life: start and incarnation of the process. The incarnation breaks ties, so that of any two processes
    exactly one ends.
    """
    return (began_s, life) > (to.began_s, to.life)


def describe_duplicate(peer: PeerId, address: str) -> str:
    """Return a message for the user: the cause, and how to correct it."""
    return (
        f"another process takes part with this peer's identity ({peer}, at {address}): one of the two state folders is "
        "a copy of the other. Stop one of them; to run both, remove identity.key from the copy, which then gets an "
        "identity of its own"
    )
