"""Membership of a run, decided by its access rule, the certificate chains that peers show, and known bans.

A peer that joined with an invite is *seen* here once it has connected to this peer, which proves its key, and has shown
its chain. A peer that only others report is *unseen*: the holder of an invite can certify any number of keys.

Rules of this file:
1. The founder is always a member of its run. ``open``: every peer is a member unless it is banned. ``invite``: every
   peer that shows a chain from the founder. ``list``: only peers that the founder or an admin certified by name;
   invites do not count.
2. A chain may begin at an admin instead of the founder, if this peer knows the admin.
3. A ban of a key ends the membership of every peer whose chain contains that key; a banned invite thus bans its guests.
   It applies regardless of when the statements were made. The founder may ban every other peer. An admin may ban peers
   that are not admins, and admins that are farther from the founder. A ban by a banned peer does not count. So the
   order in which bans arrive makes no difference.
4. A closed invite admits no new peers. The closing names the peers that stay, so that all peers agree on them, in
   whatever order they learn of closings and introductions.
5. An invite admits as many peers here as it has uses. A peer that was seen keeps its place for good. Unseen peers use
   up nothing. The oldest of them count for the places that are left. Peers that see the guests of an invite in
   different orders admit different ones, but none admits more, so no commit may name more. Observers take no place,
   but those of a peer that would not be admitted are refused like it.
6. All collections are bounded: by invite, by banning admin, and in total. Of an invite's unseen peers, UNSEEN_LIMIT are
   kept. Beyond that, peers reported by the most frequent teller make room, the oldest report first. Beyond half of
   that, the peers of that teller are not passed on. Unseen peers never displace seen ones. In total, peers nearer to
   the founder displace peers farther away.
7. If a peer has two chains, the one that is not banned counts; then the one that the peer has shown here; then the one
   whose invite has a place left; then the one that grants more. So another peer's statement cannot replace the chain of
   a peer that was seen.
8. The founder and admins may prolong the run: it ends at the largest number that one of them has signed. Only the
   largest statement of each counts, and none of a banned admin, whenever it was made, so the end may also come nearer.
9. Time comes from the machine's own clock: no other peer can end or prolong a membership.
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from p2pdiloco.access.certificates import (
    NEVER,
    CertificateError,
    Grant,
    Kind,
    Role,
    decode_chain,
    follow,
    hint_of,
)
from p2pdiloco.access.membership_log import (
    CLOSING,
    INTRODUCTION,
    MARK_BYTES,
    PROLONGING,
    Ban,
    Prolonging,
    introduction,
    last_in,
    mark_of,
    named_in,
    read_statement,
)
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import Access
from p2pdiloco.wire.peer_ids import Verify, is_key

UNSEEN_LIMIT = 256
"""Maximum number of unseen peers of one invite. All members must know whom a commit may name, so that it does not
depend on the invite's uses: each member may have admitted other guests."""
KNOWN_LIMIT = 4096
"""Maximum number of introduced peers."""
BANS_LIMIT = 1024
"""Maximum number of bans of one admin."""
ALL_BANS_LIMIT = 4096
"""Maximum number of bans of all admins; the founder's own are not limited."""
FOLLOWED_LIMIT = 8192
"""Maximum number of cached chains with verified signatures."""
OBSERVING_LIMIT = 1024
"""Maximum number of remembered observers; more than connections."""
SIGNERS_LIMIT = 8
"""Maximum number of bans and closings of one key."""
PROLONGERS_LIMIT = 64
"""Maximum number of admins whose prolongings are kept; the founder's is always kept."""
NOBODY = PeerId("")
"""Teller of the statements on this machine's disk."""


class NotAMemberError(ValueError):
    """A peer is not admitted. The text is shown to users on both sides."""


class UnknownInviterError(NotAMemberError):
    """No key that could have signed the chain is known here; another peer may know it."""


class UnknownAdminError(CertificateError):
    """The chain begins at an unknown key."""


class Members:
    """Members of ``run`` as far as this peer knows."""

    def __init__(self, run: RunId, founder: PeerId, access: Access, verify: Verify) -> None:
        self.run = run
        self.access = access
        self._founder = Grant(subject=founder)
        self._verify = verify
        self._known: dict[PeerId, Grant] = {}
        if is_key(founder):
            self._known[founder] = self._founder
        elif access != "open":
            raise ValueError("the run's founder is not a valid peer id, so the run cannot be private")
        self._bans: dict[PeerId, dict[tuple[PeerId, bool], Ban]] = {}
        """By banned key; then by signer and by whether the ban closes an invite."""
        self._prolongings: dict[PeerId, tuple[Prolonging, bytes]] = {}
        """By signer, with the statement."""
        self._statements: dict[bytes, bytes] = {}
        self._invited: Counter[PeerId] = Counter()
        """Number of peers seen, by invite."""
        self._unseen: dict[PeerId, dict[PeerId, PeerId]] = {}
        """Peers announced but not yet seen, by invite, oldest first; the value is the peer that announced it."""
        self._banned_by: Counter[PeerId] = Counter()
        self._observing: dict[PeerId, Grant] = {}
        """Observers that were admitted, oldest first."""
        self._followed: dict[bytes, Grant] = {}
        """Chains with valid signatures, by their bytes, so that each is verified only once."""
        self.changes = 0
        """Number of changes of who is known, so that what follows from it need not be computed again."""

    # -- membership --------------------------------------------------------------------------------------------------

    @property
    def is_private(self) -> bool:
        """True if strangers are told nothing of the run."""
        return self.access != "open"

    def admit(self, peer: PeerId, chain: bytes, now_s: float) -> Grant:
        """Admit ``peer``, which has proved its key and shows ``chain``, and return its grant.

        Raises:
            NotAMemberError: ``peer`` is not admitted.
        """
        grant = self.examine(peer, chain, now_s)
        if grant.role is Role.OBSERVER:
            if not self._would_admit(grant.steps[-1]):  # a peer asks before it joins, and is told now
                raise NotAMemberError(self._no_place_for(grant.steps[-1]))
            while len(self._observing) >= OBSERVING_LIMIT:
                del self._observing[next(iter(self._observing))]
            self._observing[peer] = grant
        if not grant.depth or grant.role is Role.OBSERVER:
            return grant
        self._introduce(grant, introduction(grant), None)
        known = self._known.get(peer)
        if known is None or self._is_unseen(known):
            raise NotAMemberError(self._no_place_for(grant))
        return known

    def examine(self, peer: PeerId, chain: bytes, now_s: float) -> Grant:
        """Verify ``chain`` and return its grant for ``peer`` now. Nothing is stored; the peer need not be connected.

        Raises:
            NotAMemberError: the chain grants nothing.
        """
        grant = self._granted(peer, chain)
        self._judge(grant, now_s)
        return grant

    def is_member(self, peer: PeerId, now_s: float) -> bool:
        """Return whether ``peer``, whose chain was shown here or elsewhere, is a member in good standing now."""
        try:
            self.judge(peer, now_s)
        except NotAMemberError:
            return False
        return self.grant_of(peer) is not None

    def judge(self, peer: PeerId, now_s: float) -> None:
        """Check that ``peer`` may be connected: it is a member, or an observer, in good standing.

        Raises:
            NotAMemberError: it may not be connected; the text says why.
        """
        grant = self.grant_of(peer) or self._observing.get(peer)
        if grant is None:
            raise NotAMemberError(f"{peer} is not known here as a member of the run")
        self._judge(grant, now_s)

    def grant_of(self, peer: PeerId) -> Grant | None:
        """Return the grant of ``peer``, even if it has expired or is banned; None if it was never a member.

        The work of a former member stays valid.
        """
        known = self._known.get(peer)
        return _anybody(peer) if known is None and not self.is_private else known

    def role_of(self, peer: PeerId) -> Role:
        """Return the role of ``peer`` once it is connected."""
        grant = self.grant_of(peer)
        return Role.OBSERVER if grant is None else grant.role

    def has_place(self, peer: PeerId) -> bool:
        """Return whether contributions of ``peer`` may count here: its invite admits it, or has a place left for it."""
        grant = self.grant_of(peer)
        return grant is not None and self._has_place(grant)

    def invite_problem(self, peers: Iterable[PeerId]) -> str | None:
        """Return why no peer can have admitted ``peers`` together: they are too many for an invite. None: it can."""
        grants = [grant for peer in peers if (grant := self.grant_of(peer)) is not None and grant.depth]
        inviters = {grant.steps[-1].subject: grant.steps[-1] for grant in grants}
        for invite, number in Counter(grant.steps[-1].subject for grant in grants).items():
            if inviters[invite].kind is Kind.INVITE and number > inviters[invite].uses:
                return f"{number} of its peers came with the invite {invite}, which admits {inviters[invite].uses}"
        return None

    def used_of(self, invite: PeerId) -> int:
        """Return how many peers the invite with this key has admitted here."""
        return self._invited[invite]

    def most_weight_of(self, peer: PeerId) -> float:
        """Return the maximum ownership weight of ``peer``."""
        grant = self.grant_of(peer)
        return 0.0 if grant is None else grant.most_weight

    def ban_of(self, grant: Grant) -> Ban | None:
        """Return the ban that ends ``grant``, if any (rules 3 and 4). For an invite's own grant, return its closing."""
        for step, guest in zip(grant.path, (*grant.path[1:], None), strict=True):
            for ban in self._bans.get(step.subject, {}).values():
                is_spared = ban.is_closing and (
                    step.kind is not Kind.INVITE or (guest is not None and ban.keeps(guest.subject))
                )
                if not is_spared and self.may_ban(ban.by, step) and self.ban_of(ban.by) is None:
                    return ban
        return None

    def may_ban(self, by: Grant, target: Grant) -> bool:
        """Return whether the admin ``by`` may ban ``target``."""
        if target.subject == self._founder.subject:
            return False
        return target.role is not Role.ADMIN or by.depth < target.depth

    @property
    def prolonged_to(self) -> int:
        """Steps (tokens, in a run with a token budget) to which the run is prolonged (rule 8); 0: it is not."""
        return max((said.last for said, _ in self._prolongings.values() if self._counts(said)), default=0)

    def guests_of(self, key: PeerId) -> list[PeerId]:
        """Return the current and former members whose chain continues directly after the invite ``key``."""
        paths = [grant.path for grant in self._known.values()]
        return sorted({b.subject for path in paths for a, b in itertools.pairwise(path) if a.subject == key})

    # -- statements --------------------------------------------------------------------------------------------------

    def learn(self, statement: bytes, teller: PeerId | None = NOBODY) -> bool:
        """Store ``statement``, reported by ``teller``. Return whether to pass it on to other peers.

        teller: None if the peer that it introduces was seen here before a restart.

        Another unseen peer of an invite that has many is not passed on: introductions would circulate for ever.

        Raises:
            CertificateError: the statement is malformed or forged.
        """
        if self.has(statement):
            return False
        if self._founder.subject not in self._known:
            raise CertificateError("this run's founder has no key")
        said = read_statement(self.run, self._founder, statement, self._verify)
        if isinstance(said, Prolonging):
            return self._prolong(said, statement)
        return self._introduce(said, statement, teller) if isinstance(said, Grant) else self._ban(said, statement)

    def has(self, statement: bytes) -> bool:
        """Return whether ``statement`` is known, without verifying a signature."""
        return mark_of(statement) in self._statements

    def brings(self, statement: bytes) -> Literal["ban", "peer", "end", "nothing"]:
        """Return what ``statement`` would add if valid, without verifying a signature.

        "ban": a ban or closing that would be kept; "peer": an unknown peer; "end": a later end than its signer has
        named before; "nothing" otherwise.

        Raises:
            ValueError: the statement is malformed.
        """
        subject, by, tag = named_in(statement)
        if tag == INTRODUCTION:
            return "nothing" if subject in self._known else "peer"
        if tag == PROLONGING:
            return "end" if last_in(statement) > self._last_of(by) else "nothing"
        return "ban" if self._may_be_banned(subject, by, is_closing=tag == CLOSING) else "nothing"

    def statements(self) -> list[bytes]:
        """Return all known statements, the most important last: if a reader drops unseen peers, the last ones stay."""
        return [statement for _, statement in self._in_order()]

    def seen_marks(self) -> bytes:
        """Return MARK_BYTES of the introduction of each peer that was seen here, concatenated."""
        seen = (grant for grant in self._known.values() if grant.depth and not self._is_unseen(grant))
        return b"".join(mark_of(introduction(grant)) for grant in seen)

    def marks(self) -> bytes:
        """Return MARK_BYTES of each known statement, sorted and concatenated."""
        return b"".join(sorted(self._statements))

    def beyond(self, marks: bytes, most_bytes: int) -> list[bytes]:
        """Return known statements that are not in ``marks`` and not doubtful, the most important last.

        The list ends with the statement that reaches ``most_bytes``.
        """
        there = {marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)} | self._doubtful()
        taken, size = [], 0
        for mark, statement in reversed(self._in_order()):
            if mark not in there:
                taken.append(statement)
                size += len(statement)
                if size >= most_bytes:
                    break
        return taken[::-1]

    def known(self) -> list[Grant]:
        """Return the grants of the founder and of all introduced peers."""
        return list(self._known.values())

    def banned_keys(self) -> dict[PeerId, list[Ban]]:
        """Return all bans by banned key."""
        return {subject: list(bans.values()) for subject, bans in self._bans.items()}

    def prolongings(self) -> list[bytes]:
        """Return the statements that prolong the run, as far as they count."""
        return [statement for said, statement in self._prolongings.values() if self._counts(said)]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _in_order(self) -> list[tuple[bytes, bytes]]:
        """Return marks and statements: unseen peers, then seen peers, then bans, each the oldest first."""
        unseen = self._marks_of(peer for told in self._unseen.values() for peer in told)
        return sorted(
            self._statements.items(), key=lambda item: (not item[1].startswith(INTRODUCTION), item[0] not in unseen)
        )

    def _doubtful(self) -> set[bytes]:
        """Return the marks of unseen peers that are not passed on (rule 6)."""
        found: set[bytes] = set()
        for told in self._unseen.values():
            if len(told) > UNSEEN_LIMIT // 2:
                most = _most_frequent(told.values())
                found |= self._marks_of(peer for peer, by in told.items() if by == most)
        return found

    def _marks_of(self, peers: Iterable[PeerId]) -> set[bytes]:
        return {mark_of(introduction(self._known[peer])) for peer in peers}

    def _granted(self, peer: PeerId, data: bytes) -> Grant:
        if peer == self._founder.subject:
            return self._founder
        if not self.is_private and not data:
            return _anybody(peer)
        if not data:
            raise NotAMemberError(
                f"this run takes members only, and {peer} shows no certificate: ask its founder for an invite, and "
                "join with it"
            )
        try:
            grant = self._followed.get(data) or self._follow(data)
        except UnknownAdminError as error:
            raise UnknownInviterError(f"the certificate of {peer} is not valid: {error}") from None
        except CertificateError as error:
            raise NotAMemberError(f"the certificate of {peer} is not valid: {error}") from None
        if grant.subject != peer or grant.kind is not Kind.PEER:
            raise NotAMemberError(f"{peer} shows the certificate of another key, {grant.subject}")
        if self.access == "list" and any(step.kind is Kind.INVITE for step in grant.steps):
            raise NotAMemberError(f"this run takes peers by name only: ask its founder to certify {peer}")
        return grant

    def _follow(self, data: bytes) -> Grant:
        chain = decode_chain(data)
        anchors = [g for g in self._known.values() if g.role is Role.ADMIN and hint_of(g.subject) == chain.hint]
        if not anchors:
            raise UnknownAdminError(
                "its signer is not an admin of this run, as far as is known here: ask the founder for an invite"
            )
        for number, anchor in enumerate(anchors, 1):
            try:
                grant = follow(self.run, anchor, chain.certificates, self._verify)
                break
            except CertificateError:
                if number == len(anchors):
                    raise
        while len(self._followed) >= FOLLOWED_LIMIT:
            del self._followed[next(iter(self._followed))]
        self._followed[data] = grant
        return grant

    def _judge(self, grant: Grant, now_s: float) -> None:
        if grant.not_after != NEVER and now_s > grant.not_after:
            until = datetime.datetime.fromtimestamp(grant.not_after, datetime.UTC)
            raise NotAMemberError(
                f"the membership of {grant.subject} expired at {until:%Y-%m-%d %H:%M} UTC: ask for a new invite"
            )
        if (ban := self.ban_of(grant)) is not None:
            if any(step.subject == ban.subject and step.kind is Kind.INVITE for step in grant.path):
                state = "is closed to newcomers" if ban.is_closing else "is revoked"
                what, remedy = f"{grant.subject} came with {ban.subject}, which {state}", "ask for a new invite"
            else:
                what, remedy = f"{ban.subject} is banned", "if that is a mistake, ask them or the founder of the run"
            raise NotAMemberError(f"{what} (by {ban.by.subject}): {remedy}")

    def _introduce(self, grant: Grant, statement: bytes, teller: PeerId | None) -> bool:
        """Store a peer reported by ``teller`` (None: the peer itself is here). Return whether to pass it on."""
        old = self._known.get(grant.subject)
        inviter = grant.steps[-1]
        is_unseen = teller is not None and inviter.kind is Kind.INVITE
        old_teller = None
        if old is not None:
            if not old.depth or self._rank(old, self._is_unseen(old)) >= self._rank(grant, is_unseen):
                return False
            old_teller = self._forget(old)
        displaced = self._displaced_by(grant, teller if is_unseen else None)
        if displaced is grant:
            if old is not None:
                self._keep(old, introduction(old), old_teller)
            return False
        if displaced is not None:
            self._forget(displaced)
        self._keep(grant, statement, teller if is_unseen else None)
        return not is_unseen or len(self._unseen[inviter.subject]) <= UNSEEN_LIMIT // 2

    def _displaced_by(self, grant: Grant, teller: PeerId | None) -> Grant | None:
        """Return the grant that must make room for ``grant``: None if there is room, ``grant`` if none can be made.

        ``teller`` is None if the peer of ``grant`` is seen.
        """
        inviter = grant.steps[-1]
        if teller is not None and len(told := self._unseen.get(inviter.subject, {})) >= UNSEEN_LIMIT:
            most = _most_frequent([teller, *told.values()])
            return next((self._known[peer] for peer, by in told.items() if by == most), grant)
        if teller is None and inviter.kind is Kind.INVITE and self._invited[inviter.subject] >= inviter.uses:
            return grant
        if len(self._known) <= KNOWN_LIMIT:
            return None
        farthest = max(self._known.values(), key=self._distance)
        is_nearer = (teller is not None, grant.depth) < (self._is_unseen(farthest), farthest.depth)
        return farthest if is_nearer else grant

    def _distance(self, grant: Grant) -> tuple[bool, int, bool, PeerId]:
        return self._is_unseen(grant), grant.depth, grant.role is not Role.ADMIN, grant.subject

    def _is_unseen(self, grant: Grant) -> bool:
        return bool(grant.depth) and grant.subject in self._unseen.get(grant.steps[-1].subject, {})

    def _has_place(self, grant: Grant) -> bool:
        """Return whether ``grant`` has a place of its invite (rule 5). One that is not stored counts as the newest."""
        if not grant.depth or (inviter := grant.steps[-1]).kind is not Kind.INVITE:
            return True
        told = self._unseen.get(inviter.subject, {})
        if self._known.get(grant.subject) is grant and grant.subject not in told:
            return True
        older = itertools.takewhile(lambda peer: peer != grant.subject, told)
        return self._invited[inviter.subject] + sum(1 for _ in older) < inviter.uses

    def _would_admit(self, grant: Grant) -> bool:
        """Return whether a peer with this grant was seen here, or its invite has admitted fewer peers than it may."""
        if not grant.depth or (inviter := grant.steps[-1]).kind is not Kind.INVITE:
            return True
        known = self._known.get(grant.subject)
        return (known is not None and not self._is_unseen(known)) or self._invited[inviter.subject] < inviter.uses

    def _no_place_for(self, grant: Grant) -> str:
        """Return why a peer with this grant is not admitted."""
        inviter = grant.steps[-1]
        if inviter.kind is Kind.INVITE and self._invited[inviter.subject] >= inviter.uses:
            admits = "one peer" if inviter.uses == 1 else f"{inviter.uses} peers"
            return (
                f"the invite of {grant.subject} admits {admits} and has been used: ask for another one, or join with "
                "the identity.key of the peer that used it (--identity)"
            )
        return f"the run has {KNOWN_LIMIT} peers already, so {grant.subject} is not admitted"

    def _keep(self, grant: Grant, statement: bytes, teller: PeerId | None) -> None:
        self.changes += 1
        self._known[grant.subject] = grant
        self._statements[mark_of(statement)] = statement
        inviter = grant.steps[-1].subject
        if teller is None:
            self._invited[inviter] += 1
        else:
            self._unseen.setdefault(inviter, {})[grant.subject] = teller

    def _forget(self, grant: Grant) -> PeerId | None:
        """Remove a grant and return the teller of an unseen peer."""
        self.changes += 1
        inviter = grant.steps[-1].subject
        told = self._unseen.get(inviter, {})
        teller = told.pop(grant.subject, None)
        if teller is None:
            self._invited[inviter] -= 1
        elif not told:
            del self._unseen[inviter]
        del self._known[grant.subject]
        self._statements.pop(mark_of(introduction(grant)), None)
        return teller

    def _rank(self, grant: Grant, is_unseen: bool) -> tuple[bool, bool, bool, int, int, int, bytes]:
        """Return the sort key of rule 7."""
        is_seen, bytes_of = not is_unseen, grant.chain().encode()
        has_place = is_seen or self._has_place(grant)
        return self.ban_of(grant) is None, is_seen, has_place, grant.role, grant.not_after, grant.cap, bytes_of

    def _ban(self, said: Ban, statement: bytes) -> bool:
        signer = said.by.subject
        if not self._may_be_banned(said.subject, signer, is_closing=said.is_closing):
            return False
        self._bans.setdefault(said.subject, {})[signer, said.is_closing] = said
        self._statements[mark_of(statement)] = statement
        self._banned_by[signer] += 1
        return True

    def _prolong(self, said: Prolonging, statement: bytes) -> bool:
        """Store a prolonging instead of its signer's earlier one, if it says more and is among the most that count."""
        signer = said.by.subject
        if said.last <= self._last_of(signer):
            return False
        kept = {**self._prolongings, signer: (said, statement)}
        others = [one for one, _ in kept.values() if one.by.subject != self._founder.subject]
        if len(others) > PROLONGERS_LIMIT:
            least = min(others, key=lambda one: (self._counts(one), one.last, one.by.subject))
            if least is said:
                return False
            del kept[least.by.subject]
        for _, dropped in self._prolongings.values():
            del self._statements[mark_of(dropped)]
        self._prolongings = kept
        self._statements.update((mark_of(one), one) for _, one in kept.values())
        return True

    def _last_of(self, signer: PeerId) -> int:
        return self._prolongings[signer][0].last if signer in self._prolongings else 0

    def _counts(self, said: Prolonging) -> bool:
        return self.ban_of(said.by) is None

    def _may_be_banned(self, subject: PeerId, signer: PeerId, *, is_closing: bool) -> bool:
        """Return whether another ban may be stored: one ban and one closing per signer, within the bounds."""
        signed = self._bans.get(subject, {})
        is_full = (
            self._banned_by[signer] >= BANS_LIMIT
            or len(signed) >= SIGNERS_LIMIT
            or self._banned_by.total() - self._banned_by[self._founder.subject] >= ALL_BANS_LIMIT
        )
        return (signer, is_closing) not in signed and (not is_full or signer == self._founder.subject)


def _most_frequent(tellers: Iterable[PeerId]) -> PeerId:
    """Return the most frequent teller; of several the first."""
    return Counter(tellers).most_common(1)[0][0]


def _anybody(peer: PeerId) -> Grant:
    """Return the grant of every peer in an open run."""
    return Grant(subject=peer, role=Role.LEARNER)
