"""Synchronizes the membership log of a run with other peers, and disconnects peers that are no longer members.

Rules of this file:
1. A newly connected peer is asked for the statements that are missing here. New statements are forwarded once: bans and
   ends of the run to all connected members, those of new members to ``TOLD_OF_NEWCOMERS``. Others learn of a new member
   when they connect to it or to one that knows it, or when it is named to them (G2d of docs/protocol.md).
2. Statements are sent only to members, never to observers. Those that prolong the run are the exception: a peer that
   comes back is told of the run's end before it begins.
3. A peer whose membership has expired or was revoked by a ban first receives the same statements as the others, and is
   then disconnected with a reason. If it is this peer, the node ends.
4. Statements cost signature checks, so they are rate limited. Each peer may introduce a limited number of new peers,
   and send a limited number of statements without one (another chain of a known one). All peers that came with
   one invite share the latter limit. Answers are limited, too. Statements beyond a limit are logged and ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from random import Random
from typing import NamedTuple

from p2pdiloco.access.certificates import NEVER, Role
from p2pdiloco.access.members import NotAMemberError
from p2pdiloco.access.membership_log import INTRODUCTION, join_statements, split_statements
from p2pdiloco.net.authorization import MemberAuthorizer
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.swarm.credentials import Credentials, MemberFiles
from p2pdiloco.timing import RateLimiter
from p2pdiloco.transport.transport import Transport
from p2pdiloco.util import logs
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.wire.control_messages import MARKS_LIMIT, GetStatements, TellStatements, encode
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused

log = logs.get("members")

# Interval between two checks of the statements that commands have left, and of the connected peers.
LOOK_S = 2.0
ASK_S = 10.0
# Maximum size of the statements in one answer.
PIECE_BYTES = 128 << 10
# Time to send new statements to peers before former members are disconnected.
TELL_S = 1.0
# Members that one tells of new members. If all told all, N peers would make N^2 requests for each newcomer.
TOLD_OF_NEWCOMERS = 4
# Maximum number of consecutive requests to one peer.
ROUNDS = 32
# Rate limit of unknown peers that one connected peer may introduce. It costs a core 0.2 s at first, 0.02 % afterwards.
INTRODUCED, INTRODUCED_PER_S = 1024, 1.0
# Rate limit of statements without a new peer, for all peers that came with one invite.
VAIN, VAIN_PER_S = 1024, 1.0
# Maximum number of peers about which refused or ignored statements are logged, so that attackers cannot flood the log.
LOGGED_PEERS = 64
# Rate limit of answers to one peer, of PIECE_BYTES each. The burst allows two full synchronizations, since a peer that
# connects twice may not have received the first one.
ANSWERS, ANSWERS_PER_S = 2 * ROUNDS, 0.2


class MembershipLost(NamedTuple):
    """Event: this peer is no longer a member of its run."""

    reason: str


class Prolonged(NamedTuple):
    """Event: the run is prolonged to ``last`` steps, or tokens if it has a token budget; 0: no longer."""

    last: int


class MembershipSync:
    """Synchronizes and enforces membership. Publishes ``MembershipLost`` when this peer is no longer a member, and
    ``Prolonged`` when the run's end has moved."""

    def __init__(
        self,
        authorizer: MemberAuthorizer,
        mine: Credentials,
        files: MemberFiles,
        links: Transport,
        spawn: Callable[..., object],
        events: EventBus,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            authorizer: admits peers to the transport, by the same members.
            mine: credentials of this peer.
            spawn: starts a coroutine as a task, as ``Host.spawn`` does.
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
        self._admitted: frozenset[int] = frozenset()
        self._admitted_at = -1
        """Number of changes of the members for which ``_admitted`` was computed."""
        self._refused: Counter[PeerId] = Counter()
        self._ignored: set[PeerId] = set()
        self._introduced: RateLimiter[PeerId] = RateLimiter(burst=INTRODUCED, per_s=INTRODUCED_PER_S)
        self._vain: RateLimiter[PeerId] = RateLimiter(burst=VAIN, per_s=VAIN_PER_S)
        self._answers: RateLimiter[PeerId] = RateLimiter(burst=ANSWERS, per_s=ANSWERS_PER_S)
        files.load(self.members)
        self._prolonged_to = self.members.prolonged_to
        with contextlib.suppress(NotAMemberError):  # this peer's own place, before others that came by its invite
            self.members.admit(mine.identity.peer_id, mine.chain, now_s())

    @property
    def chain(self) -> bytes:
        """Encoded certificate chain that this peer shows to others."""
        return self._authorizer.chain

    # -- permissions -------------------------------------------------------------------------------------------------

    def observes(self, peer: PeerId) -> bool:
        """Return whether a connected peer is an observer, which may only send requests."""
        return self.members.role_of(peer) is Role.OBSERVER

    def may_contribute(self, peer: PeerId) -> bool:
        """Return whether contributions of ``peer`` may be merged."""
        return self.members.role_of(peer) >= Role.LEARNER

    def most_weight(self, peer: PeerId) -> float:
        """Return the largest ownership weight that ``peer`` may have."""
        return self.members.most_weight_of(peer)

    def invite_problem(self, peers: Collection[PeerId]) -> str | None:
        """Return why ``peers`` cannot have been admitted together, or None."""
        return self.members.invite_problem(peers)

    def admitted(self) -> frozenset[int] | None:
        """Return the fingerprints of all peers that have a place here; None: every peer has."""
        if not self.members.is_private:
            return None
        if self._admitted_at != self.members.changes:
            self._admitted_at = self.members.changes
            peers = [grant.subject for grant in self.members.known()]
            self._admitted = frozenset(fingerprint(peer) for peer in peers if self.members.has_place(peer))
        return self._admitted

    def is_member(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is a valid member now."""
        return self.members.is_member(peer, self._now_s())

    def was_member(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is or was a member."""
        return self.members.grant_of(peer) is not None

    def was_removed(self, peer: PeerId) -> bool:
        """Return whether ``peer`` was a member and no longer is."""
        return self.was_member(peer) and not self.is_member(peer)

    def is_announced_by_member(self, peer: PeerId, chain: bytes) -> bool:
        """Return whether ``peer`` is a member, judged by the ``chain`` in its directory record."""
        try:
            self.members.examine(peer, chain, self._now_s())
        except NotAMemberError as error:
            self._refused[peer] += 1
            if self._refused[peer] == 1 and len(self._refused) <= LOGGED_PEERS:
                log.warning("a directory record is ignored: its peer is not a member", peer=peer, reason=str(error))
            return False
        return True

    def remaining_s(self) -> float | None:
        """Return the remaining seconds of this peer's own membership; None: it does not expire, or has ended."""
        if not self.members.is_private:
            return None
        try:
            grant = self.members.admit(self.mine.identity.peer_id, self.mine.chain, self._now_s())
        except NotAMemberError:
            return None
        return None if grant.not_after == NEVER else grant.not_after - self._now_s()

    # -- messages of other peers -------------------------------------------------------------------------------------

    def connected(self, peer: PeerId) -> None:
        """Ask a newly connected member for statements."""
        self._is_changed = True  # the chain in its handshake may be new here
        self._spawn(self.ask(peer), name=f"ask {peer} for members")

    async def answer(self, peer: PeerId, request: GetStatements | TellStatements) -> Answer:
        """Answer a request about members.

        Raises:
            RequestRefused: the peer is an observer, asks too often, or sent malformed statements.
        """
        is_observer = self.observes(peer)
        if is_observer and not isinstance(request, GetStatements):
            raise RequestRefused("only members may tell of members")
        if isinstance(request, GetStatements):
            if not self._answers.take(peer, self._now_s()):
                raise RequestRefused("rate limit for membership statements reached; retry in a few seconds")
            found = self.members.prolongings() if is_observer else self.members.beyond(request.marks, PIECE_BYTES)
            return Answer(b"", join_statements(found))
        try:
            self._spread_and_part(await self._learn(split_statements(request.statements), peer), but=peer)
        except ValueError as error:
            self._links.blame(peer)
            raise RequestRefused(str(error)) from error
        return Answer(b"")

    async def keep(self) -> None:
        """Check members and save statements until cancelled."""
        while True:
            self.check_members()
            await self.save()
            await asyncio.sleep(LOOK_S)

    async def save(self) -> None:
        """Save the statements, if there are new ones."""
        if self._is_changed:
            self._is_changed = False
            try:
                await asyncio.to_thread(self._files.save, self.members)
            except OSError as error:
                log.warning("the membership log cannot be saved", reason=str(error))

    def check_members(self) -> None:
        """Take the statements that commands have left, and disconnect peers that are no longer members."""
        before = self._files.taken
        news = list(self._files.take_queued(self.members))
        self._is_changed = self._is_changed or self._files.taken > before
        self._spread_and_part(news)
        own = self.members.grant_of(self.mine.identity.peer_id)
        if own is not None and own.depth and own.chain().encode() != self.chain:
            # Our chain began at an admin and is complete now, or another chain grants more.
            self._authorizer.chain = own.chain().encode()
            self._files.write_chain(self.chain)

    async def ask(self, peer: PeerId) -> None:
        """Ask ``peer`` for missing statements until it has no more, at most ROUNDS times."""
        try:
            for _ in range(ROUNDS):
                body = encode(GetStatements(self.members.marks()[:MARKS_LIMIT]))
                response = await self._links.request(peer, body, timeout_s=ASK_S, max_payload=2 * PIECE_BYTES)
                statements = split_statements(bytes(response.payload or b""))
                news = await self._learn(statements, peer)
                self._spread_and_part(news, but=peer)
                if not news:
                    return
        except ValueError as error:
            self._links.blame(peer)
            log.debug("a peer sent malformed membership statements", peer=peer, reason=str(error))
        except RequestError as error:
            log.debug("a peer did not send membership statements", peer=peer, reason=str(error))

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _learn(self, statements: Iterable[bytes], teller: PeerId) -> list[bytes]:
        """Add ``statements`` and return the new ones.

        Each costs signature checks, so the event loop gets a turn after each."""
        news: list[bytes] = []
        for statement in statements:
            if self.members.has(statement):
                continue
            if not self._may_tell(teller, statement):
                if teller not in self._ignored and len(self._ignored) < LOGGED_PEERS:
                    self._ignored.add(teller)
                    log.warning(
                        "a peer sent more membership statements than its rate limit allows, and the rest is ignored; "
                        "real members become known from other peers, or when they connect",
                        peer=teller,
                    )
                continue
            if self.members.learn(statement, teller):
                news.append(statement)
            await asyncio.sleep(0)
        self._is_changed = self._is_changed or bool(news)
        return news

    def _may_tell(self, teller: PeerId, statement: bytes) -> bool:
        """Return whether ``teller`` is within its rate limits (rule 4)."""
        match self.members.brings(statement):
            case "ban":
                return True
            case "peer" | "end":
                return self._introduced.take(teller, self._now_s())
            case "nothing":
                grant = self.members.grant_of(teller)
                came_with = grant.steps[-1].subject if grant is not None and grant.depth else teller
                return self._vain.take(came_with, self._now_s())

    def _spread_and_part(self, news: list[bytes], but: PeerId | None = None) -> None:
        """Send ``news`` to other members, then disconnect former members. Publish a new end of the run."""
        if (last := self.members.prolonged_to) != self._prolonged_to:
            self._prolonged_to = last
            self._events.publish(Prolonged(last))
        receivers = sorted(peer for peer in self._links.peers() if peer != but and not self.observes(peer))
        urgent = [statement for statement in news if not statement.startswith(INTRODUCTION)]
        drawn = Random(b"".join((self.mine.identity.peer_id.encode(), *news)))
        told = dict.fromkeys(receivers if urgent else (), _telling(urgent))
        if len(urgent) < len(news):
            few = drawn.sample(receivers, min(TOLD_OF_NEWCOMERS, len(receivers)))
            told.update(dict.fromkeys(few, _telling(news)))
        self._spawn(self._tell_and_part(told), name="tell of members")

    async def _tell_and_part(self, told: Mapping[PeerId, bytes]) -> None:
        telling = [asyncio.ensure_future(self._tell(peer, body)) for peer, body in told.items()]
        if telling:
            await asyncio.wait(telling, timeout=TELL_S)
        self._disconnect_former_members()
        await asyncio.gather(*telling)

    async def _tell(self, peer: PeerId, body: bytes) -> None:
        try:
            await self._links.request(peer, body, timeout_s=ASK_S)
        except RequestError as error:
            log.debug("membership statements could not be sent to a peer", peer=peer, reason=str(error))

    def _disconnect_former_members(self) -> None:
        now_s, me = self._now_s(), self.mine.identity.peer_id
        for peer in (me, *self._links.peers()):
            if peer == me and self.members.grant_of(me) is None:
                continue  # our own chain is not verified yet
            try:
                self.members.judge(peer, now_s)
            except NotAMemberError as error:
                if peer == me:
                    self._events.publish(MembershipLost(str(error)))
                    continue
                log.warning("disconnecting a peer that is no longer a member", peer=peer, reason=str(error))
                self._links.disconnect(peer, str(error))


def _telling(statements: list[bytes]) -> bytes:
    return encode(TellStatements(join_statements(statements)))
