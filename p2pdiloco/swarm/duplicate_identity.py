"""Two processes with one identity: a state folder was copied to another machine.

On one machine the locks of the identity's file and of the run's folder keep a second process out.

Rules of this file:
1. A peer that starts looks for a process with its key at the addresses in its own record, and through its meeting
   points. If one answers, the peer does not start.
2. Two processes that start at once see each other's record in the place of their own (``peer_manager.py``, rule 4); the
   one that began later ends. A process counts only if it proves to have the key.
3. Other peers keep to the life that they saw last, and refuse one that had to give way before (``net/endpoint.py``), so
   that connections do not flap meanwhile.
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
"""Limit for an answer at the addresses, which are all dialled at once."""
MEET_S = 8.0
"""Limit for an answer through a meeting point, after hole punching."""
LOOK_S = 5.0
"""Between two looks at a duplicate."""


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
        """Whether this process is the one that ends."""
        self._looked_at = -LOOK_S
        self._told = ""
        """Life of the duplicate that was logged last."""

    def handle_record(self, record: PeerRecord) -> None:
        """Look at a record of ``me`` that this process has not published."""
        now = self._host.now()
        if now >= self._looked_at + LOOK_S and not self.must_end:
            self._looked_at = now
            self._host.spawn(self._check(record), name="twin")

    async def _check(self, record: PeerRecord) -> None:
        """Reach the other process; if it answers, the one that began later ends."""
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
    """Check before taking part that no other process has this identity.

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
    """Where a process proves to be ``peer``, in the life that the record names; None if nowhere."""
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
    """Whether a process that began at ``began_s``, with that life, ends in favour of the one that published ``to``.

    Of any two processes exactly one does."""
    return (began_s, life) > (to.began_s, to.life)


def describe_duplicate(peer: PeerId, address: str) -> str:
    """Tell the user what happened and what to do."""
    return (
        f"another process takes part with this peer's identity ({peer}, at {address}): its state folder is a copy of "
        "this one, or the other way round. Stop one of them; to run both, remove identity.key from the copy, which "
        "then gets an identity of its own"
    )
