"""Keeps this peer connected to its run: announces itself, looks up the others, and dials them. In a large run it
connects only to some (``neighbours.py``).

Rules of this file:
1. The directory provides only addresses; the protocol decides from connections which peers are live. In a private run,
   only records of members are used.
2. Of two peers, the one with the smaller id dials first. The other one dials only if no connection came for a while. A
   peer that has just started dials all peers that it finds, since they may not look it up for a long time
   (``lookup_policy.py``).
3. Addresses are saved on disk, so that a restarted peer finds the run again without a bootstrap node.
4. A peer queries the directory before it announces itself, and announces itself at once if another process's record
   stands in the place of its own. So two processes with one identity (``duplicate_identity.py``) see each other, in
   whatever order they query and announce.
5. Connected peers send each other their records when these change. The directory, which is queried rarely, serves peers
   that are not connected.
6. A peer that has left gracefully is dialled rarely, until a process that began later announces it, or it connects
   again. A peer that is no longer a member is not dialled, and dials nobody.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.nat.messages import Reachable
from p2pdiloco.net.endpoint import LEAVING
from p2pdiloco.protocol.groups import group_of
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.swarm.connect import ConnectFallback
from p2pdiloco.swarm.known_peers import KnownPeers
from p2pdiloco.swarm.lookup_policy import LookupPolicy
from p2pdiloco.swarm.membership_sync import MembershipSync
from p2pdiloco.swarm.neighbours import own_topics, surplus, topic_of, wanted
from p2pdiloco.transport.transport import DialError, PeerRefused, Transport, WrongPeerError
from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular, write_atomically
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.control_messages import decode_as, encode
from p2pdiloco.wire.directory_records import PeerRecord
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused

log = logs.get("peers")

# Interval between two rounds of ``keep``.
ROUND_S = 2.0
# Shortest and longest interval between two announcements, which follows that of lookups: the nodes that store our
# record may leave. In large runs it is stretched as lookups are, since a publication downloads all records there.
ANNOUNCE_S, ANNOUNCE_MOST_S = 10.0, 120.0
# Minimum interval before the next announcement after the record has changed.
NEWS_S = 1.0
TELL_S = 8.0
# Lifetime of a record: two announcement intervals of a large run. It is constant, since of two records the one that
# expires later wins, and the record of a new process must win over that of the previous one.
RECORD_LIFE_S = 960.0
# Time that the peer with the larger id waits to be dialled.
PATIENCE_S = 3.0
# A connection that ends sooner after its dial counts as a failed dial.
SHORT_S = 5.0
# Longest pause before the next dial after such a short connection.
SHORT_PAUSE_S = 8.0
# Interval between two dials to a peer that has left: it may be back before the directory shows that.
LEFT_S = 120.0
# Number of places to free in a full table before each lookup.
ROOM = 64
# Groups of which nobody is connected: how many are looked up in a round, and how often each.
GROUPS_AT_ONCE, GROUP_S = 4, 30.0
SURPLUS = "this peer has enough connections to its group"


class PeerManager:
    """Keeps this peer connected to the ``known`` peers of its run."""

    def __init__(
        self,
        run: RunId,
        directory: Directory,
        transport: Transport,
        known: KnownPeers,
        lookup: LookupPolicy,
        membership: MembershipSync,
        connector: ConnectFallback,
        *,
        record: Callable[[], PeerRecord],
        began_s: float,
        cache: Path,
        duplicate_seen: Callable[[PeerRecord], None],
        group_bits: Callable[[], int],
        is_leaving: Callable[[PeerId], bool],
    ) -> None:
        """
        Args:
            record: returns this peer's record, with the addresses at which others can reach it.
            began_s: start of this process, by the directory's clock.
            cache: file in which addresses are saved.
            duplicate_seen: called with a record of this peer that another process has published.
            group_bits: returns the base-2 logarithm of the number of groups of the run, as far as this peer knows.
            is_leaving: returns whether a connected peer is leaving the run.
        """
        self._run = run
        self._directory = directory
        self._transport = transport
        self._known = known
        self._lookup = lookup
        self._membership = membership
        self._connector = connector
        self._record = record
        self._began_s = began_s
        self._cache = cache
        self._duplicate_seen = duplicate_seen
        self._group_bits = group_bits
        self._is_leaving = is_leaving
        self._bits = 0
        # When each group was looked up.
        self._sought_at: dict[int, float] = {}
        self._announced_at = float("-inf")
        self._announced = PeerRecord(())
        self._topics: list[str] = []
        # For each connected peer, its incarnation and the record of ours that was sent to it.
        self._told: dict[PeerId, tuple[str | None, PeerRecord]] = {}
        self._saved: dict[str, list[str]] = {}
        transport.answer_requests(Reachable, self._answer_reachable)
        transport.add_disconnect_callback(self.handle_disconnected)

    async def keep(self) -> None:
        """Announce, look up and dial until cancelled."""
        self._directory.screen_peers(self._run, self._is_announced_by_member)
        loop = asyncio.get_running_loop()
        for peer, addresses in _load_addresses(self._cache).items():
            self._learn(PeerId(peer), PeerRecord(tuple(addresses)), loop.time())
        async with Tasks() as tasks:
            while True:
                if (bits := self._group_bits()) != self._bits:
                    self._bits, self._sought_at = bits, {}
                    self._lookup.look_soon(loop.time())
                if self._lookup.is_lookup_due(self._near(), self._known, loop.time()):
                    await self._ignore_directory_errors(self._look_up(loop.time()))
                for group in self._groups_to_seek(loop.time()):
                    await self._ignore_directory_errors(self._read(topic_of(group, bits), loop.time()))
                await self._ignore_directory_errors(self._announce(loop.time()))
                for peer in self._peers_to_tell():
                    tasks.spawn(self._tell(peer), name=f"tell {peer}")
                for peer in self._peers_to_dial(loop.time()):
                    tasks.spawn(self._dial(peer), name=f"dial {peer}")
                connected = self._connected()
                leaving = set(connected).difference(self._staying(connected))
                for peer in surplus(self._transport.peer_id, bits, connected, leaving=leaving):
                    self._transport.disconnect(peer, SURPLUS)
                for peer in self._relayed_peers_due(loop.time()):
                    tasks.spawn(self._connect_directly(peer), name=f"direct way to {peer}")
                await asyncio.sleep(ROUND_S)

    def handle_reachable(self, peer: PeerId, record: PeerRecord) -> None:
        """Store the record that a connected ``peer`` sent about itself."""
        if not self._membership.observes(peer):
            now = asyncio.get_running_loop().time()
            self._known.learn_first_hand(peer, record, now, self._transport.peers())

    async def _answer_reachable(self, peer: PeerId, request: Reachable) -> Answer:
        self.handle_reachable(peer, request.record)
        return Answer(b"")

    async def withdraw(self) -> None:
        """Withdraw this peer's records from the directory."""
        for topic in self._topics:
            await self._ignore_directory_errors(self._directory.withdraw_peer(self._run, topic))

    def handle_disconnected(self, peer: PeerId, reason: str) -> None:
        """Schedule the next dial of ``peer`` after its connection ended: soon, unless it has left gracefully."""
        known, now = self._known.get(peer), asyncio.get_running_loop().time()
        self._lookup.look_soon(now)
        if known is not None:
            known.is_first_hand = False
            known.since = known.next_dial_at = now
            if now - known.reached_at < SHORT_S:
                known.next_dial_at = now + min(SHORT_PAUSE_S, known.dials.next_s())
            else:
                known.dials.reset()
            known.left_s = self._directory.now_s() if reason == LEAVING else None
            if known.left_s is not None or reason == SURPLUS:
                known.next_dial_at = now + LEFT_S

    async def _ignore_directory_errors(self, call: Awaitable[object]) -> None:
        try:
            await call
        except DirectoryError as error:
            log.debug("directory does not answer", reason=str(error))

    async def _announce(self, now: float) -> None:
        # ``record`` leaves these two fields empty, so they are not compared.
        topics = own_topics(self._transport.peer_id, self._bits)
        is_news = msgspec.structs.replace(self._announced, life="", began_s=0.0) != self._record()
        is_news = is_news or topics != self._topics
        usual_s = min(max(self._lookup.pause.pause_s, ANNOUNCE_S), ANNOUNCE_MOST_S) * self._lookup.stretch
        if now - self._announced_at >= (NEWS_S if is_news else usual_s):
            record = msgspec.structs.replace(
                self._record(),
                life=self._transport.life,
                began_s=self._began_s,
                chain=self._membership.chain,
            )
            for topic in topics:
                await self._directory.publish_peer(self._run, msgspec.msgpack.encode(record), RECORD_LIFE_S, topic)
            for topic in set(self._topics).difference(topics):
                await self._ignore_directory_errors(self._directory.withdraw_peer(self._run, topic))
            self._announced, self._announced_at = msgspec.structs.replace(record, chain=b""), now
            self._topics = topics

    def _groups_to_seek(self, now: float) -> list[int]:
        """Return other groups to look up now, of which nobody is connected who stays."""
        met = {group_of(peer, self._bits) for peer in (self._transport.peer_id, *self._staying(self._connected()))}
        unmet = [group for group in range(1 << self._bits) if group not in met]
        due = [group for group in unmet if now - self._sought_at.get(group, -GROUP_S) >= GROUP_S]
        found = random.sample(due, min(GROUPS_AT_ONCE, len(due)))
        self._sought_at.update(dict.fromkeys(found, now))
        return found

    def _near(self) -> list[PeerId]:
        """Return the connected peers of this peer's group. Without any, it is looked up again and again."""
        own = group_of(self._transport.peer_id, self._bits)
        return [peer for peer in self._transport.peers() if group_of(peer, self._bits) == own]

    def _connected(self) -> list[PeerId]:
        """Return the connected peers of the run."""
        return [peer for peer in self._transport.peers() if peer in self._known]

    def _staying(self, connected: Iterable[PeerId]) -> list[PeerId]:
        """Return those of the ``connected`` peers that are not leaving: others are no bridges to their groups."""
        return [peer for peer in connected if not self._is_leaving(peer)]

    async def _look_up(self, now: float) -> None:
        """Look up the peers of this peer's group; in a small run, and while nobody of the group is connected, those of
        the run, as the others announce themselves anew a moment after groups begin or divide."""
        is_full = self._known.free_places < ROOM
        is_news = await self._read(topic_of(group_of(self._transport.peer_id, self._bits), self._bits), now)
        if self._bits and not self._near():
            is_news = await self._read(topic_of(0, 0), now) or is_news
        self._lookup.record_lookup(now, is_news=is_news and not is_full)
        await self._save()

    async def _read(self, topic: str, now: float) -> bool:
        """Learn of the peers that announce themselves in a topic. Return whether there are new peers or addresses."""
        is_news, found = False, list((await self._directory.peers(self._run, topic)).items())
        self._known.make_room(ROOM, self._transport.peers())
        for peer, record in random.sample(found, len(found)):  # shuffled, as the first ones get the free places
            try:
                decoded = decode_as(record, PeerRecord)
            except ValueError:
                log.debug("malformed record ignored", peer=peer)
                continue
            if peer == self._transport.peer_id and decoded.life not in ("", self._transport.life):
                self._announced_at = float("-inf")
                self._duplicate_seen(decoded)
            known = self._known.get(peer)
            if known is None or not known.is_first_hand:
                is_news = self._learn(peer, decoded, now) or is_news
        return is_news

    def _peers_to_tell(self) -> list[PeerId]:
        """Return the connected peers that have not received this peer's current record.

        When two peers connect, at least one knows the other and sends its record, by which the other one learns of it.
        Observers are never known, and so receive no record."""
        record, lives = self._record(), {peer: self._transport.life_of(peer) for peer in self._transport.peers()}
        self._told = {peer: told for peer, told in self._told.items() if peer in lives}
        return [peer for peer in lives if peer in self._known and self._told.get(peer) != (lives[peer], record)]

    async def _tell(self, peer: PeerId) -> None:
        sent = self._told[peer] = (self._transport.life_of(peer), self._record())
        try:
            await self._transport.request(peer, encode(Reachable(sent[1])), timeout_s=TELL_S)
        except RequestRefused as error:
            log.debug("a peer refuses our record", peer=peer, reason=str(error))
        except RequestError as error:
            log.debug("our record could not be sent to a peer", peer=peer, reason=str(error))
            if self._told.get(peer) == sent:
                del self._told[peer]

    def _is_announced_by_member(self, peer: PeerId, record: bytes) -> bool:
        try:
            decoded = decode_as(record, PeerRecord)
        except ValueError:
            return False
        return self._membership.is_announced_by_member(peer, decoded.chain)

    def _learn(self, peer: PeerId, record: PeerRecord, now: float) -> bool:
        """Store a record and return whether it is new. Peers known at the start are dialled at once (rule 2)."""
        return self._known.learn(peer, record, now, now if self._lookup.has_looked_up else now - PATIENCE_S)

    def _peers_to_dial(self, now: float) -> list[PeerId]:
        me, connected, was_removed = self._transport.peer_id, set(self._transport.peers()), self._membership.was_removed
        here, due = self._staying(connected), []
        for peer, known in self._known.items():
            is_patient = peer < me and now - known.since < PATIENCE_S
            if known.is_dialling:
                here.append(peer)
            elif peer not in connected and not is_patient and now >= known.next_dial_at and not was_removed(peer):
                due.append(peer)
        return [] if was_removed(me) else wanted(me, self._bits, due, here)

    async def _dial(self, peer: PeerId) -> None:
        known = self._known.get(peer)
        if known is None:
            return  # it was removed from the table meanwhile
        known.is_dialling = True
        try:
            try:
                await self._connector.connect(peer, known.record)
                known.reached_at = asyncio.get_running_loop().time()
                return
            except (WrongPeerError, PeerRefused) as error:
                known.refusals += 1
                if known.refusals.bit_count() == 1:
                    what = "a peer refuses us" if isinstance(error, PeerRefused) else "an address leads to another peer"
                    log.warning(what, peer=peer, reason=str(error), times=known.refusals)
            except DialError as error:
                times = known.dials.failures + 1
                if known.left_s is None and times.bit_count() == 1:
                    log.info("a peer cannot be reached", peer=peer, reason=str(error), times=times)
            pause_s = known.dials.next_s()
            known.next_dial_at = asyncio.get_running_loop().time() + (pause_s if known.left_s is None else LEFT_S)
        finally:
            known.is_dialling = False

    def _relayed_peers_due(self, now: float) -> list[PeerId]:
        """Return relayed peers to which a direct connection should be tried now. The smaller id of two peers tries."""
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

    async def _connect_directly(self, peer: PeerId) -> None:
        known = self._known.get(peer)
        if known is None:
            return
        known.is_dialling = True
        try:
            await self._connector.connect_directly(peer, known.record)
            known.direct_looks.reset()
        except DialError as error:
            log.debug("no direct connection to a relayed peer", peer=peer, reason=str(error))
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
                log.warning("the peer cache cannot be written", path=self._cache, reason=str(error))


def _load_addresses(path: Path) -> dict[str, list[str]]:
    try:
        return msgspec.json.decode(read_regular(path), type=dict[str, list[str]])
    except (OSError, ValueError):
        return {}
