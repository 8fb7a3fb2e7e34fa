"""Keeps this peer connected to every other peer of its run: announce, look up, dial, dial again.

Rules of this file:
1. The directory gives addresses, nothing else. Who is live is the protocol's decision, from connections. Of a private
   run, only members' records are looked at.
2. Of two peers the one with the smaller id dials first; the other dials only if nothing came for a while. Who has just
   come dials all whom it finds: they may not look for long (``lookup_policy.py``).
3. Addresses are remembered on disk, so that a restarted peer finds the run again without any bootstrap node.
4. It looks before it announces, and announces at once where another process's record stands in the place of its own:
   so of two with one identity (twins.py) each sees the other, in whatever order they look and announce.
5. Who is connected is told how we can be reached, whenever that changes, and tells us: the directory, which is asked
   seldom, is for who is not. What a connected peer says of itself is newer than its record there.
6. What is known is bounded, and nobody fills it for good: who does not answer makes room for who was not tried yet.
7. Who has said goodbye is dialled seldom, until it is announced by a process that began after that, or is connected
   again. Who is no member any more is not dialled, and dials nobody.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.nat.messages import Reachable
from p2pdiloco.net.endpoint import LEAVING
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.swarm.connect import ConnectFallback
from p2pdiloco.swarm.lookup_policy import LookupPolicy
from p2pdiloco.swarm.membership_sync import MembershipSync
from p2pdiloco.timing import Backoff
from p2pdiloco.transport.transport import DialError, Impostor, PeerRefused, Transport
from p2pdiloco.util import logs
from p2pdiloco.util.files import write_atomically
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.directory_records import PeerRecord
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused

log = logs.get("roster")

ROUND_S = 2.0
"""Between two looks at who is to be dialled."""
ANNOUNCE_S, ANNOUNCE_MOST_S = 10.0, 120.0
"""Between two announcements: as seldom as looks, since who keeps our record may go when others do; and beyond FEW peers
more seldom in proportion (``LookupPolicy.seldom``), since who looks for a record's place is told all that is there."""
NEWS_S = 1.0
"""Where we can be reached in another way than the record says."""
TELL_S = 8.0
RECORD_LIFE_S = 960.0
"""Two announcements of a large run. Of all processes alike: a new one's record outlives that of the life before it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 30.0
"""Between two dials of a peer."""
PATIENCE_S = 3.0
"""How long the peer with the larger id waits to be dialled."""
SHORT_S = 5.0
"""A connection that ends so soon after our dial counts as one that failed."""
SHORT_PAUSE_S = 8.0
"""At most, before the next dial after that."""
LEFT_S = 120.0
"""Between two dials to who has said goodbye: it may be back where no directory tells."""
DIRECT_S, DIRECT_MOST_S = 30.0, 600.0
"""Between looks for a direct way to a peer over a relay."""
MAX_KNOWN = 1024
ROOM = 64
"""Places that a full table has for each look into the directory."""


class _Known:
    __slots__ = (
        "dials",
        "direct_looks",
        "is_dialling",
        "is_first_hand",
        "left_s",
        "next_dial_at",
        "next_direct_at",
        "reached_at",
        "record",
        "refusals",
        "since",
    )

    def __init__(self, since: float) -> None:
        self.record = PeerRecord(())
        self.since = since
        self.next_dial_at = since
        self.reached_at = since - SHORT_S
        """When a dial last succeeded."""
        self.dials = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        """Dials that failed in a row."""
        self.refusals = 0
        """Dials that were answered by a no, or by somebody else."""
        self.is_dialling = False
        self.left_s: float | None = None
        """When it said goodbye, by the directory's clock; None: it has not, or has come back."""
        self.is_first_hand = False
        """The record is its own word, over a connection that lasts."""
        self.next_direct_at: float | None = None
        """When a direct way is looked for, of a peer over a relay."""
        self.direct_looks = Backoff(DIRECT_S, DIRECT_MOST_S)


class PeerManager:
    """The peers of one run that this peer has heard of."""

    def __init__(
        self,
        run: RunId,
        directory: Directory,
        transport: Transport,
        record: Callable[[], PeerRecord],
        cache: Path,
        twin_seen: Callable[[PeerRecord], None],
        membership_sync: MembershipSync,
        ladder: ConnectFallback,
        heard_of: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        """``record``: of this peer, as far as others know better. ``twin_seen`` gets one that another process has
        published. ``heard_of``: see ``LookupPolicy``."""
        self._run = run
        self._directory = directory
        self._transport = transport
        self._record = record
        self._ladder = ladder
        self._cache = cache
        self._known: dict[PeerId, _Known] = {}
        self._twin_seen = twin_seen
        self._fellowship = membership_sync
        self.began_s = directory.now_s()
        self._announced_at = float("-inf")
        self._announced = PeerRecord(())
        self._told: dict[PeerId, tuple[str | None, PeerRecord]] = {}
        """Which life of each connected peer knows what of us."""
        self._saved: dict[str, list[str]] = {}
        self._curiosity = LookupPolicy(transport.peer_id, heard_of)
        transport.answer_requests(Reachable, self._answer_reachable)
        transport.add_disconnect_callback(self.disconnected)

    @property
    def known(self) -> int:
        """Peers heard of lately, this one included."""
        return len(self._known) + 1

    @property
    def is_missing(self) -> bool:
        """Whether somebody is not connected who should be."""
        return self._curiosity.is_missing

    async def keep(self) -> None:
        """Run until cancelled."""
        self._directory.screen_peers(self._run, self._is_of_member)
        loop = asyncio.get_running_loop()
        for peer, addresses in _load(self._cache).items():
            self._learn(PeerId(peer), PeerRecord(tuple(addresses)), loop.time())
        async with Tasks() as tasks:
            while True:
                if self._curiosity.look_round(self._transport.peers(), self._known, loop.time()):
                    await self._quietly(self._look(loop.time()))
                await self._quietly(self._announce(loop.time()))
                for peer in self._untold():
                    tasks.spawn(self._tell(peer), name=f"tell {peer}")
                for peer in self._due(loop.time()):
                    tasks.spawn(self._dial(peer), name=f"dial {peer}")
                for peer in self._relayed(loop.time()):
                    tasks.spawn(self._look_for_direct_way(peer), name=f"direct way to {peer}")
                await asyncio.sleep(ROUND_S)

    def records(self) -> dict[PeerId, PeerRecord]:
        """What is known of the others."""
        return {peer: known.record for peer, known in self._known.items()}

    def told(self, peer: PeerId, record: PeerRecord) -> None:
        """``peer`` is connected, and says how it can be reached."""
        if not self._fellowship.observes(peer):
            if peer not in self._known:
                self._make_room(1)
            else:
                self._known[peer].left_s = None
            self._learn(peer, record, asyncio.get_running_loop().time())
            if peer in self._known:
                self._known[peer].is_first_hand = True

    async def _answer_reachable(self, peer: PeerId, request: Reachable) -> Answer:
        self.told(peer, request.record)
        return Answer(b"")

    async def withdraw(self) -> None:
        """Take our record back."""
        await self._quietly(self._directory.withdraw_peer(self._run))

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """A connection is lost, for ``reason``: dial again soon, unless that was a goodbye."""
        known, now = self._known.get(peer), asyncio.get_running_loop().time()
        self._curiosity.wake(now)
        if known is not None:
            known.is_first_hand = False
            known.since = known.next_dial_at = now
            if now - known.reached_at < SHORT_S:
                known.next_dial_at = now + min(SHORT_PAUSE_S, known.dials.next_s())
            else:
                known.dials.reset()
            known.left_s = self._directory.now_s() if reason == LEAVING else None
            if known.left_s is not None:
                known.next_dial_at = now + LEFT_S

    async def _quietly(self, call: Awaitable[None]) -> None:
        try:
            await call
        except DirectoryError as error:
            log.debug("directory does not answer", reason=str(error))

    async def _announce(self, now: float) -> None:
        is_news = msgspec.structs.replace(self._announced, life="", began_s=0.0) != self._record()
        usual_s = min(max(self._curiosity.pause_s, ANNOUNCE_S), ANNOUNCE_MOST_S) * self._curiosity.seldom
        if now - self._announced_at >= (NEWS_S if is_news else usual_s):
            told = msgspec.structs.replace(
                self._record(),
                life=self._transport.life,
                began_s=self.began_s,
                chain=self._fellowship.door.chain,
            )
            await self._directory.publish_peer(self._run, msgspec.msgpack.encode(told), RECORD_LIFE_S)
            self._announced, self._announced_at = msgspec.structs.replace(told, chain=b""), now

    async def _look(self, now: float) -> None:
        is_news, found = False, list((await self._directory.peers(self._run)).items())
        is_full = len(self._known) > MAX_KNOWN - ROOM
        self._make_room(ROOM)
        for peer, record in random.sample(found, len(found)):  # so that nobody is always first
            try:
                told = decode_as(record, PeerRecord)
            except ValueError:
                log.debug("malformed record ignored", peer=peer)
                continue
            if peer == self._transport.peer_id and told.life not in ("", self._transport.life):
                self._announced_at = float("-inf")
                self._twin_seen(told)
            if not (peer in self._known and self._known[peer].is_first_hand):
                is_news = self._learn(peer, told, now) or is_news
        self._curiosity.looked(now, is_news=is_news and not is_full)
        await self._save()

    def _untold(self) -> list[PeerId]:
        """Connected peers that do not know how we can be reached now. Of two that connect one knows the other, which is
        told, and then knows the one; who only asks is known to nobody."""
        record, lives = self._record(), {peer: self._transport.life_of(peer) for peer in self._transport.peers()}
        self._told = {peer: told for peer, told in self._told.items() if peer in lives}
        return [peer for peer in lives if peer in self._known and self._told.get(peer) != (lives[peer], record)]

    async def _tell(self, peer: PeerId) -> None:
        told = self._told[peer] = (self._transport.life_of(peer), self._record())
        try:
            await self._transport.request(peer, encode(Reachable(told[1])), timeout_s=TELL_S)
        except RequestRefused as error:
            log.debug("a peer does not want to know how we can be reached", peer=peer, reason=str(error))
        except RequestError as error:
            log.debug("a peer was not told how we can be reached", peer=peer, reason=str(error))
            if self._told.get(peer) == told:
                del self._told[peer]

    def _is_of_member(self, peer: PeerId, record: bytes) -> bool:
        try:
            told = decode_as(record, PeerRecord)
        except ValueError:
            return False
        return self._fellowship.is_announced_by_member(peer, told.chain)

    def _learn(self, peer: PeerId, record: PeerRecord, now: float) -> bool:
        """Whether that is news."""
        if peer == self._transport.peer_id:
            return False
        known = self._known.get(peer)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                return False
            known = self._known[peer] = _Known(now if self._curiosity.has_looked else now - PATIENCE_S)
        if known.left_s is not None and record.began_s <= known.left_s:
            return False  # of the life that is over
        is_back, known.left_s = known.left_s is not None, None
        where = (record.addresses, record.points, record.seen)
        is_other = is_back or where != (known.record.addresses, known.record.points, known.record.seen)
        is_news = any(where[:2]) and is_other
        if is_news:
            known.dials.reset()
            known.next_dial_at = now
        if any(where[:2]):
            known.record = record
        return is_news

    def _make_room(self, places: int) -> None:
        """Who was tried most often in vain goes first."""
        missing = places - (MAX_KNOWN - len(self._known))
        if missing <= 0:
            return
        here = set(self._transport.peers())
        vain = [
            (known.dials.failures, peer)
            for peer, known in self._known.items()
            if known.dials.failures and not known.is_dialling and peer not in here
        ]
        for _, peer in heapq.nlargest(missing, vain):
            del self._known[peer]

    def _due(self, now: float) -> list[PeerId]:
        connected = set(self._transport.peers())
        due = []
        for peer, known in self._known.items():
            is_patient = peer < self._transport.peer_id and now - known.since < PATIENCE_S
            if peer not in connected and not known.is_dialling and not is_patient and now >= known.next_dial_at:
                due.append(peer)
        is_out = self._fellowship.is_out
        return [] if is_out(self._transport.peer_id) else [peer for peer in due if not is_out(peer)]

    async def _dial(self, peer: PeerId) -> None:
        known = self._known.get(peer)
        if known is None:
            return  # it has made room
        known.is_dialling = True
        try:
            try:
                await self._ladder.climb(peer, known.record)
                known.reached_at = asyncio.get_running_loop().time()
                return
            except (Impostor, PeerRefused) as error:
                known.refusals += 1
                if known.refusals.bit_count() == 1:
                    what = "refuses us" if isinstance(error, PeerRefused) else "is not who answers there"
                    log.warning(f"a peer {what}", peer=peer, reason=str(error), times=known.refusals)
            except DialError as error:
                times = known.dials.failures + 1
                if known.left_s is None and times.bit_count() == 1:
                    log.info("no way to a peer", peer=peer, reason=str(error), times=times)
            pause_s = known.dials.next_s()
            known.next_dial_at = asyncio.get_running_loop().time() + (pause_s if known.left_s is None else LEFT_S)
        finally:
            known.is_dialling = False

    def _relayed(self, now: float) -> list[PeerId]:
        """Peers over a relay, to which a direct way is looked for again; the smaller id of two looks."""
        due = []
        for peer in self._transport.peers():
            channel, known = self._transport.channel_of(peer), self._known.get(peer)
            is_relayed = channel is not None and channel.is_met and channel.connection.greeting.is_relayed
            if not is_relayed or known is None or self._transport.peer_id > peer:
                continue
            if known.next_direct_at is None:
                known.next_direct_at = now + known.direct_looks.next_s()
            if now >= known.next_direct_at and not known.is_dialling:
                due.append(peer)
        return due

    async def _look_for_direct_way(self, peer: PeerId) -> None:
        known = self._known.get(peer)
        if known is None:
            return
        known.is_dialling = True
        try:
            await self._ladder.meet(peer, known.record)
            known.direct_looks.reset()
        except DialError as error:
            log.debug("still relayed", peer=peer, reason=str(error))
        finally:
            known.is_dialling = False
            known.next_direct_at = asyncio.get_running_loop().time() + known.direct_looks.next_s()

    async def _save(self) -> None:
        known = {str(peer): list(k.record.addresses) for peer, k in sorted(self._known.items()) if k.record.addresses}
        if known != self._saved:
            try:
                await asyncio.to_thread(write_atomically, self._cache, json.dumps(known).encode())
                self._saved = known
            except OSError as error:
                log.warning("peer cache not written", path=self._cache, reason=str(error))


def _load(path: Path) -> dict[str, list[str]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[str]])
    except (OSError, ValueError):
        return {}
