"""Keeps the membership log of a run in sync with other peers, and disconnects those that are no longer members.

Rules of this file:
1. A peer that connects is asked for the statements that are not known here. News are passed on once, to all members
   that are connected.
2. Statements are told to members alone, never to observers.
3. A peer that is no longer a member, because its term has ended or a ban has come, is told what the others are told,
   and is then disconnected with a reason. If that is this peer itself, it ends.
4. Statements cost signature checks. Each peer may introduce a limited number of others, and tell a limited number of
   statements that bring nobody new (another chain of a known peer); the latter limit is shared by all peers that came
   with one invite. Answers are limited, too. Statements beyond a limit are ignored, with a line in the log.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from p2pdiloco.access.certificates import NEVER, Role
from p2pdiloco.access.members import NotAMemberError
from p2pdiloco.access.membership_log import join_statements, split_statements
from p2pdiloco.net.authorization import MemberAuthorizer
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm.credentials import Credentials, MemberFiles
from p2pdiloco.timing import RateLimiter
from p2pdiloco.util import logs
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.wire.control_messages import MARKS_LIMIT, GetStatements, TellStatements, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

log = logs.get("members")

LOOK_S = 2.0
"""Between two looks at the statements that commands have left, and at the connected peers."""
ASK_S = 10.0
PIECE_BYTES = 128 << 10
"""Statements in one answer, at most."""
TELL_S = 1.0
"""How long peers that are disconnected have to take the news."""
ROUNDS = 32
"""Requests to one peer, one after the other."""
INTRODUCED, INTRODUCED_PER_S = 1024, 1.0
"""Peers that are not known here, introduced by one connected peer: 0.2 s of a processor, and then 0.02 %."""
VAIN, VAIN_PER_S = 1024, 1.0
"""Statements that bring nobody new, of all peers that came with one invite."""
LOGGED_PEERS = 64
"""Peers about which a log line tells that something was refused or ignored."""
ANSWERS, ANSWERS_PER_S = 2 * ROUNDS, 0.2
"""To one peer, of PIECE_BYTES each: whoever connects twice may have been told nothing yet."""


class MembershipLost(NamedTuple):
    """This peer is no longer a member of its run."""

    reason: str


class Links(Protocol):
    """The part of a transport that is needed here."""

    def peers(self) -> list[PeerId]:
        """The peers that can be sent to."""

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask ``peer``."""

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Disconnect ``peer``."""

    def blame(self, peer: PeerId) -> None:
        """``peer`` sent something malformed: too much of that ends its connection."""


class MembershipSync:
    """See the module's rules. Publishes ``MembershipLost`` when this peer is no longer a member."""

    def __init__(
        self,
        authorizer: MemberAuthorizer,
        mine: Credentials,
        files: MemberFiles,
        links: Links,
        spawn: Callable[..., object],
        events: EventBus,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            authorizer: lets peers in to the transport, by the same members.
            mine: credentials of this peer.
            spawn: runs a coroutine beside the rest, as of ``Host``.
        """
        self.members = authorizer.members
        self.mine = mine
        self._authorizer = authorizer
        self._files = files
        self._links = links
        self._spawn = spawn
        self._events = events
        self._now_s = now_s
        self._is_changed = False
        self._refused: Counter[PeerId] = Counter()
        self._ignored: set[PeerId] = set()
        self._introduced: RateLimiter[PeerId] = RateLimiter(burst=INTRODUCED, per_s=INTRODUCED_PER_S)
        self._vain: RateLimiter[PeerId] = RateLimiter(burst=VAIN, per_s=VAIN_PER_S)
        self._answers: RateLimiter[PeerId] = RateLimiter(burst=ANSWERS, per_s=ANSWERS_PER_S)
        files.load(self.members)

    @property
    def chain(self) -> bytes:
        """Certificates of this peer, encoded, as others are shown them now."""
        return self._authorizer.chain

    # -- who may what ------------------------------------------------------------------------------------------------

    def observes(self, peer: PeerId) -> bool:
        """Whether a connected peer may only ask."""
        return self.members.role_of(peer) is Role.OBSERVER

    def may_contribute(self, peer: PeerId) -> bool:
        """Whether contributions of ``peer`` may be merged."""
        return self.members.role_of(peer) >= Role.LEARNER

    def most_weight(self, peer: PeerId) -> float:
        """Largest ownership weight that ``peer`` may have."""
        return self.members.most_weight_of(peer)

    def is_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` is in good standing now."""
        return self.members.is_member(peer, self._now_s())

    def was_member(self, peer: PeerId) -> bool:
        """Whether ``peer`` is a member, or was one."""
        return self.members.grant_of(peer) is not None

    def was_removed(self, peer: PeerId) -> bool:
        """Whether ``peer`` was a member and no longer is."""
        return self.was_member(peer) and not self.is_member(peer)

    def is_announced_by_member(self, peer: PeerId, chain: bytes) -> bool:
        """Whether a directory record of ``peer`` is a member's, by the ``chain`` in it."""
        try:
            self.members.examine(peer, chain, self._now_s())
        except NotAMemberError as error:
            self._refused[peer] += 1
            if self._refused[peer] == 1 and len(self._refused) <= LOGGED_PEERS:
                log.warning("a record of the directory is ignored: its peer is no member", peer=peer, reason=str(error))
            return False
        return True

    def remaining_s(self) -> float | None:
        """How long this peer's own membership lasts, in seconds; None: it has no end, or is over."""
        if not self.members.is_private:
            return None
        try:
            grant = self.members.admit(self.mine.identity.peer_id, self.mine.chain, self._now_s())
        except NotAMemberError:
            return None
        return None if grant.not_after == NEVER else grant.not_after - self._now_s()

    # -- what others tell --------------------------------------------------------------------------------------------

    def connected(self, peer: PeerId) -> None:
        """A peer that takes part has connected: ask it for members."""
        self._is_changed = True  # it was introduced by its chain
        self._spawn(self.ask(peer), name=f"ask {peer} for members")

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """Answer a request about members.

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
            self._spread_and_part(await self._learn(split_statements(request.statements), peer), but=peer)
        except ValueError as error:
            self._links.blame(peer)
            raise RequestRefused(str(error)) from error
        return Answer(b"")

    async def keep(self) -> None:
        """Run until cancelled."""
        while True:
            self.check_members()
            if self._is_changed:
                self._is_changed = False
                try:
                    await asyncio.to_thread(self._files.save, self.members)
                except OSError as error:
                    log.warning("what is known of members is not written", reason=str(error))
            await asyncio.sleep(LOOK_S)

    def check_members(self) -> None:
        """Take the statements that commands have left, and disconnect peers that are no longer members."""
        news = list(self._files.take_queued(self.members))
        self._is_changed = self._is_changed or bool(news)
        self._spread_and_part(news)
        own = self.members.grant_of(self.mine.identity.peer_id)
        if own is not None and own.depth and own.chain().encode() != self.chain:
            self._authorizer.chain = own.chain().encode()  # what began at an admin is whole now, or another grants more
            self._files.write_chain(self.chain)

    async def ask(self, peer: PeerId) -> None:
        """Ask ``peer`` for statements that are not known here, until it has none."""
        try:
            for _ in range(ROUNDS):
                body = encode(GetStatements(self.members.marks()[:MARKS_LIMIT]))
                response = await self._links.request(peer, body, timeout_s=ASK_S, max_payload=2 * PIECE_BYTES)
                told = split_statements(bytes(response.payload or b""))
                news = await self._learn(told, peer)
                self._spread_and_part(news, but=peer)
                if not news:
                    return
        except ValueError as error:
            self._links.blame(peer)
            log.debug("what a peer tells of members is malformed", peer=peer, reason=str(error))
        except RequestError as error:
            log.debug("a peer tells nothing of members", peer=peer, reason=str(error))

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _learn(self, statements: Iterable[bytes], teller: PeerId) -> list[bytes]:
        """Learn ``statements``; those that are news. Each costs signature checks, so the event loop runs in between."""
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
        """Whether ``teller`` is within its limits (rule 4)."""
        match self.members.brings(statement):
            case "ban":
                return True
            case "peer":
                return self._introduced.take(teller, self._now_s())
            case "nothing":
                grant = self.members.grant_of(teller)
                came_with = grant.steps[-1].subject if grant is not None and grant.depth else teller
                return self._vain.take(came_with, self._now_s())

    def _spread_and_part(self, news: list[bytes], but: PeerId | None = None) -> None:
        """Tell all other members the news, then disconnect peers that are no longer members."""
        told = [peer for peer in self._links.peers() if peer != but and not self.observes(peer)] if news else []
        self._spawn(self._tell_and_part(told, encode(TellStatements(join_statements(news)))), name="tell of members")

    async def _tell_and_part(self, peers: list[PeerId], body: bytes) -> None:
        telling = [asyncio.ensure_future(self._tell(peer, body)) for peer in peers]
        if telling:
            await asyncio.wait(telling, timeout=TELL_S)
        self._disconnect_former_members()
        await asyncio.gather(*telling)

    async def _tell(self, peer: PeerId, body: bytes) -> None:
        try:
            await self._links.request(peer, body, timeout_s=ASK_S)
        except RequestError as error:
            log.debug("a peer was not told of members", peer=peer, reason=str(error))

    def _disconnect_former_members(self) -> None:
        now_s, me = self._now_s(), self.mine.identity.peer_id
        for peer in (me, *self._links.peers()):
            if peer == me and self.members.grant_of(me) is None:
                continue  # nobody has introduced us yet
            try:
                self.members.judge(peer, now_s)
            except NotAMemberError as error:
                if peer == me:
                    self._events.publish(MembershipLost(str(error)))
                    continue
                log.warning("parting from a peer that is no member any more", peer=peer, reason=str(error))
                self._links.disconnect(peer, str(error))
