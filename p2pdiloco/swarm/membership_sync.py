"""The members of a run at a running node: its door, what it tells others of members, whom it parts from.

Rules of this file:
1. Who connects is asked for what is not known here; news are passed on to all members that are connected, once.
2. Statements are told to members alone, never to observers.
3. Who is no member any more, because a term has ended or a ban has come, is told what the others are told, and then
   parted from with a sentence. If that is this peer, it ends.
4. What is told costs signatures to look at. Each peer may introduce so many others, and tell so much that brings
   nobody new (another chain of a known peer): the latter allowance is shared by all who came with one invite. Answers
   have an allowance, too. What goes beyond is not looked at, with a line in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

from p2pdiloco.access.certificates import NEVER, Role
from p2pdiloco.access.members import Members, NotAMemberError
from p2pdiloco.access.membership_log import join_statements, split_statements
from p2pdiloco.net.authorization import MemberAuthorizer
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.credentials import Credentials, MemberFiles
from p2pdiloco.timing import RateLimiter
from p2pdiloco.util import logs
from p2pdiloco.wire.control_messages import MARKS_LIMIT, GetStatements, TellStatements, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

log = logs.get("members")

LOOK_S = 2.0
"""Between two looks at what commands have left, and at who is connected."""
ASK_S = 10.0
PIECE_BYTES = 128 << 10
"""Of statements, in one answer."""
TELL_S = 1.0
"""What those who are parted from have to take the news."""
ROUNDS = 32
"""Answers that one peer is asked for, one after the other."""
INTRODUCED, INTRODUCED_PER_S = 1024, 1.0
"""Peers that are not known here, introduced by one connected peer: 0.2 s of a processor, and then 0.02 %."""
VAIN, VAIN_PER_S = 1024, 1.0
"""Statements that bring nobody new, of all who came with one invite."""
LOGGED_PEERS = 64
"""Peers of whom a log line tells that something of theirs was refused or ignored."""
ANSWERS, ANSWERS_PER_S = 2 * ROUNDS, 0.2
"""To one peer, of PIECE_BYTES each: whoever connects twice may have been told nothing yet."""


class Links(Protocol):
    """A transport, as far as it is needed here."""

    def peers(self) -> list[PeerId]:
        """The peers that can be sent to."""

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask ``peer``."""

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Part from ``peer``."""

    def blame(self, peer: PeerId) -> None:
        """``peer`` sent what cannot be read: too much of that ends its connection."""


class MembershipSync:
    """See the module's rules. ``spawn`` runs a coroutine beside; ``expelled`` hears why this peer is no member any
    more."""

    def __init__(
        self,
        members: Members,
        mine: Credentials,
        files: MemberFiles,
        spawn: Callable[..., object],
        expelled: Callable[[str], None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.members = members
        self.mine = mine
        self.door = MemberAuthorizer(members, mine.chain, now_s)
        self.links: Links
        """Set before the first connection."""
        self._files = files
        self._spawn = spawn
        self._expelled = expelled
        self._now_s = now_s
        self._is_changed = False
        self._refused: Counter[PeerId] = Counter()
        self._ignored: set[PeerId] = set()
        self._introduced: RateLimiter[PeerId] = RateLimiter(burst=INTRODUCED, per_s=INTRODUCED_PER_S)
        self._vain: RateLimiter[PeerId] = RateLimiter(burst=VAIN, per_s=VAIN_PER_S)
        self._answers: RateLimiter[PeerId] = RateLimiter(burst=ANSWERS, per_s=ANSWERS_PER_S)
        files.load(members)

    # -- who may what ------------------------------------------------------------------------------------------------

    def observes(self, peer: PeerId) -> bool:
        """Whether a connected peer may only ask."""
        return self.members.role_of(peer) is Role.OBSERVER

    def may_contribute(self, peer: PeerId) -> bool:
        """Whether what ``peer`` trained may be merged."""
        return self.members.role_of(peer) >= Role.LEARNER

    def most_weight(self, peer: PeerId) -> float:
        """Of ownership."""
        return self.members.most_weight_of(peer)

    def is_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` is in good standing now."""
        return self.members.is_member(peer, self._now_s())

    def was_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` is a member, or was one."""
        return self.members.grant_of(peer) is not None

    def is_out(self, peer: PeerId) -> bool:
        """Whether ``peer`` was a member, and is none any more."""
        return self.was_member(peer) and not self.is_member(peer)

    def is_announced_by_member(self, peer: PeerId, chain: bytes) -> bool:
        """Whether a record of the directory is a member's, by the ``chain`` in it."""
        try:
            self.members.examine(peer, chain, self._now_s())
        except NotAMemberError as error:
            self._refused[peer] += 1
            if self._refused[peer] == 1 and len(self._refused) <= LOGGED_PEERS:
                log.warning("a record of the directory is ignored: its peer is no member", peer=peer, reason=str(error))
            return False
        return True

    def left_s(self) -> float | None:
        """Of this peer's own membership; None: it has no end, or is over."""
        if not self.members.is_private:
            return None
        try:
            grant = self.members.admit(self.mine.identity.peer_id, self.mine.chain, self._now_s())
        except NotAMemberError:
            return None
        return None if grant.not_after == NEVER else grant.not_after - self._now_s()

    # -- what others tell --------------------------------------------------------------------------------------------

    def connected(self, peer: PeerId) -> None:
        """A peer is there that takes part."""
        self._is_changed = True  # it was introduced by its chain
        self._spawn(self.ask(peer), name=f"ask {peer} for members")

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """A request about members.

        Raises:
            RequestRefused: the peer only observes, or asks too often, or what it tells is malformed.
        """
        if self.observes(peer):
            raise RequestRefused("only members are told of members")
        if isinstance(request, GetStatements):
            if not self._answers.take(peer, self._now_s()):
                raise RequestRefused("you were told of members lately: ask again in some seconds")
            return Answer(b"", join_statements(self.members.beyond(request.marks, PIECE_BYTES)))
        try:
            self._spread(await self._learned(split_statements(request.statements), peer), but=peer)
        except ValueError as error:
            self.links.blame(peer)
            raise RequestRefused(str(error)) from error
        return Answer(b"")

    async def keep(self) -> None:
        """Run until cancelled."""
        while True:
            self.look()
            if self._is_changed:
                self._is_changed = False
                try:
                    await asyncio.to_thread(self._files.save, self.members)
                except OSError as error:
                    log.warning("what is known of members is not written", reason=str(error))
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take what commands have left, and part from who is no member any more."""
        news = list(self._files.take_new(self.members))
        self._is_changed = self._is_changed or bool(news)
        self._spread(news)
        own = self.members.grant_of(self.mine.identity.peer_id)
        if own is not None and own.depth and own.chain().encode() != self.door.chain:
            self.door.chain = own.chain().encode()  # what began at an admin is whole now, or another grants more
            self._files.keep_chain(self.door.chain)

    async def ask(self, peer: PeerId) -> None:
        """Hear from ``peer`` of members and bans that are not known here."""
        try:
            for _ in range(ROUNDS):
                body = encode(GetStatements(self.members.marks()[:MARKS_LIMIT]))
                response = await self.links.request(peer, body, timeout_s=ASK_S, max_payload=2 * PIECE_BYTES)
                told = split_statements(bytes(response.payload or b""))
                news = await self._learned(told, peer)
                self._spread(news, but=peer)
                if not news:
                    return
        except ValueError as error:
            self.links.blame(peer)
            log.debug("what a peer tells of members is malformed", peer=peer, reason=str(error))
        except RequestError as error:
            log.debug("a peer tells nothing of members", peer=peer, reason=str(error))

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _learned(self, statements: Iterable[bytes], teller: PeerId) -> list[bytes]:
        """Those that are news; each costs signatures to look at, so others get their turn in between."""
        news: list[bytes] = []
        for statement in statements:
            if self.members.has(statement):
                continue
            if not self._may_tell(teller, statement):
                if teller not in self._ignored and len(self._ignored) < LOGGED_PEERS:
                    self._ignored.add(teller)
                    log.warning(
                        "a peer tells of more members than it may at once, and the rest is ignored; other peers tell "
                        "of those who are real, and they are let in when they connect",
                        peer=teller,
                    )
                continue
            if self.members.learn(statement, teller):
                news.append(statement)
            await asyncio.sleep(0)
        self._is_changed = self._is_changed or bool(news)
        return news

    def _may_tell(self, teller: PeerId, statement: bytes) -> bool:
        """Whether ``statement`` is looked at (rule 4)."""
        match self.members.brings(statement):
            case "ban":
                return True
            case "peer":
                return self._introduced.take(teller, self._now_s())
            case "nothing":
                grant = self.members.grant_of(teller)
                came_with = grant.steps[-1].subject if grant is not None and grant.depth else teller
                return self._vain.take(came_with, self._now_s())

    def _spread(self, news: list[bytes], but: PeerId | None = None) -> None:
        """Tell all others the news, then part from those who are no members any more."""
        told = [peer for peer in self.links.peers() if peer != but and not self.observes(peer)] if news else []
        self._spawn(self._tell_and_part(told, encode(TellStatements(join_statements(news)))), name="tell of members")

    async def _tell_and_part(self, peers: list[PeerId], body: bytes) -> None:
        telling = [asyncio.ensure_future(self._tell(peer, body)) for peer in peers]
        if telling:
            await asyncio.wait(telling, timeout=TELL_S)
        self._part_from_others()
        await asyncio.gather(*telling)

    async def _tell(self, peer: PeerId, body: bytes) -> None:
        try:
            await self.links.request(peer, body, timeout_s=ASK_S)
        except RequestError as error:
            log.debug("a peer was not told of members", peer=peer, reason=str(error))

    def _part_from_others(self) -> None:
        now_s, me = self._now_s(), self.mine.identity.peer_id
        for peer in (me, *self.links.peers()):
            if peer == me and self.members.grant_of(me) is None:
                continue  # nobody has introduced us yet
            try:
                self.members.judge(peer, now_s)
            except NotAMemberError as error:
                if peer == me:
                    self._expelled(str(error))
                    continue
                log.warning("parting from a peer that is no member any more", peer=peer, reason=str(error))
                self.links.disconnect(peer, str(error))
