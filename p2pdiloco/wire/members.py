"""Who is a member of a run, by its access rule, the chains that are shown, and what is known of bans.

Rules of this file:
1. The founder is a member of its run, always. ``open``: everybody is, but who is banned. ``invite``: whoever shows a
   chain from the founder. ``list``: only whom the founder or an admin has certified by name; no invite counts.
2. A chain may begin at an admin instead of at the founder, if the admin is known here.
3. A ban of any key in a chain ends the membership of all who hang on it: of an invite, of what came from it. It wins
   over everything that is older or younger. The founder bans everybody, an admin those who are no admins, and admins
   that are farther from the founder; a ban by somebody who is banned does not count. So the order in which bans come
   makes no difference.
4. What is known only grows, and is bounded: by invite, by banning admin, and in all. Who is nearer to the founder
   displaces who is farther away.
5. Time comes from outside, from the machine's own clock: nobody else's word ends or prolongs a membership.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable

from p2pdiloco.protocol.identifiers import PeerId, RunId
from p2pdiloco.protocol.manifest import Access
from p2pdiloco.wire.certificates import (
    NEVER,
    CertificateError,
    Grant,
    Kind,
    Role,
    Verify,
    decode_chain,
    follow,
    hint_of,
)
from p2pdiloco.wire.peer_ids import is_key
from p2pdiloco.wire.statements import MARK_BYTES, Ban, introduction, mark_of, named_in, read_statement

INVITED_LIMIT = 256
"""Peers that one invite brings."""
KNOWN_LIMIT = 4096
"""Introduced peers."""
BANS_LIMIT = 1024
"""Of one admin."""
ALL_BANS_LIMIT = 4096
"""Of all admins; the founder's own are not bounded."""
FOLLOWED_LIMIT = 8192
"""Chains whose signatures were looked at."""
OBSERVING_LIMIT = 1024
"""Observers that are remembered: more than connections."""
SIGNERS_LIMIT = 8
"""Who ban one key."""


class NotAMemberError(ValueError):
    """Somebody is not let in; the text is for both sides' people."""


class UnknownInviterError(NotAMemberError):
    """Nobody is known here who could have signed the chain; somebody else may know."""


class UnknownAdminError(CertificateError):
    """A chain begins at nobody who is known."""


class Members:
    """The members of ``run``, as far as this peer knows."""

    def __init__(self, run: RunId, founder: PeerId, access: Access, verify: Verify) -> None:
        self.run = run
        self.access = access
        self._founder = Grant(subject=founder)
        self._verify = verify
        self._known: dict[PeerId, Grant] = {}
        if is_key(founder):
            self._known[founder] = self._founder
        elif access != "open":
            raise ValueError("the run's founder is no peer, so nobody can be its member")
        self._bans: dict[PeerId, dict[PeerId, Ban]] = {}
        self._statements: dict[bytes, bytes] = {}
        self._invited: Counter[PeerId] = Counter()
        self._banned_by: Counter[PeerId] = Counter()
        self._observing: dict[PeerId, Grant] = {}
        """Those who were let in to ask, the latest."""
        self._followed: dict[bytes, Grant] = {}
        """Chains that hold, whatever else is known: signatures are looked at once."""

    # -- who is a member ---------------------------------------------------------------------------------------------

    @property
    def is_private(self) -> bool:
        """Strangers are told nothing."""
        return self.access != "open"

    def admit(self, peer: PeerId, chain: bytes, now_s: float) -> Grant:
        """What ``peer``, which has proved its key and shows ``chain``, may do now.

        Raises:
            NotAMemberError: nothing.
        """
        grant = self._granted(peer, chain)
        self._judge(grant, now_s)
        if grant.role is Role.OBSERVER:
            while len(self._observing) >= OBSERVING_LIMIT:
                del self._observing[next(iter(self._observing))]
            self._observing[peer] = grant
        if not grant.depth or grant.role is Role.OBSERVER:
            return grant
        self._introduce(grant, introduction(grant))
        if peer not in self._known:
            raise NotAMemberError(
                f"the invite of {peer} has brought {INVITED_LIMIT} peers, or there are {KNOWN_LIMIT} in all: ask for "
                "another one"
            )
        return self._known[peer]

    def is_member(self, peer: PeerId, now_s: float) -> bool:
        """Whether ``peer``, whose chain was shown here or somewhere else, is in good standing now."""
        try:
            self.judge(peer, now_s)
        except NotAMemberError:
            return False
        return self.grant_of(peer) is not None

    def judge(self, peer: PeerId, now_s: float) -> None:
        """Whether ``peer`` may be connected: as ``is_member``, with the reason, and of observers, too.

        Raises:
            NotAMemberError: it may not.
        """
        grant = self.grant_of(peer) or self._observing.get(peer)
        if grant is None:
            raise NotAMemberError(f"{peer} is not known here as a member of the run")
        self._judge(grant, now_s)

    def grant_of(self, peer: PeerId) -> Grant | None:
        """What is known of ``peer``, whether it has expired or is banned or not; None: it was never a member. What a
        member did while it was one stays valid."""
        known = self._known.get(peer)
        return _anybody(peer) if known is None and not self.is_private else known

    def role_of(self, peer: PeerId) -> Role:
        """What ``peer`` may do, if it is connected."""
        grant = self.grant_of(peer)
        return Role.OBSERVER if grant is None else grant.role

    def most_weight_of(self, peer: PeerId) -> float:
        """Of ownership."""
        grant = self.grant_of(peer)
        return 0.0 if grant is None else grant.most_weight

    def ban_of(self, grant: Grant) -> Ban | None:
        """The ban that ends it, if there is one (rule 3)."""
        for step in grant.path:
            for ban in self._bans.get(step.subject, {}).values():
                if self._may_ban(ban.by, step) and self.ban_of(ban.by) is None:
                    return ban
        return None

    # -- what is known -----------------------------------------------------------------------------------------------

    def learn(self, statement: bytes) -> bool:
        """Whether ``statement`` is news that is kept.

        Raises:
            CertificateError: it is malformed or forged.
        """
        if self.has(statement):
            return False
        if self._founder.subject not in self._known:
            raise CertificateError("this run's founder has no key")
        said = read_statement(self.run, self._founder, statement, self._verify)
        return self._introduce(said, statement) if isinstance(said, Grant) else self._ban(said, statement)

    def has(self, statement: bytes) -> bool:
        """Whether it is known; it costs no signature to tell."""
        return mark_of(statement) in self._statements

    def grows_by(self, statement: bytes) -> bool:
        """Whether it brings, if it holds, who or what is not known here, within the bounds; also if it is malformed: no
        other statement can be told without end by who signs what he likes. It costs no signature to tell."""
        try:
            subject, by, is_ban = named_in(statement)
        except ValueError:
            return True
        if is_ban:
            return self._may_be_banned(subject, by)
        return subject not in self._known and self._invited[by] < INVITED_LIMIT and len(self._known) <= KNOWN_LIMIT
        return len(self._statements)

    def statements(self) -> Iterable[bytes]:
        """All that is known."""
        return self._statements.values()

    def marks(self) -> bytes:
        """MARK_BYTES of each statement that is known, in order."""
        return b"".join(sorted(self._statements))

    def beyond(self, marks: bytes, most_bytes: int) -> list[bytes]:
        """What is known here and not named in ``marks``, bans first; at most ``most_bytes`` of it, and one more."""
        there = {marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES)}
        missing = sorted(s for mark, s in self._statements.items() if mark not in there)  # "b" comes before "i"
        taken, size = [], 0
        for statement in missing:
            taken.append(statement)
            size += len(statement)
            if size >= most_bytes:
                break
        return taken

    def known(self) -> list[Grant]:
        """The founder and all who were introduced."""
        return list(self._known.values())

    def banned_keys(self) -> dict[PeerId, list[Ban]]:
        """All bans, by whom they hit."""
        return {subject: list(bans.values()) for subject, bans in self._bans.items()}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _granted(self, peer: PeerId, data: bytes) -> Grant:
        if peer == self._founder.subject:
            return self._founder
        if not self.is_private and not data:
            return _anybody(peer)
        if not data:
            raise NotAMemberError(
                f"this run takes members only, and {peer} shows no certificate: ask its founder for an invite, and "
                "join with that"
            )
        try:
            grant = self._followed.get(data) or self._follow(data)
        except UnknownAdminError as error:
            raise UnknownInviterError(f"the certificate of {peer} does not hold: {error}") from None
        except CertificateError as error:
            raise NotAMemberError(f"the certificate of {peer} does not hold: {error}") from None
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
                "whoever signed it is no admin that is known here: ask for an invite by whoever founded the run"
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
                what, remedy = f"{grant.subject} came with {ban.subject}, which is revoked", "ask for a new invite"
            else:
                what, remedy = f"{ban.subject} is banned", "if that is an error, ask them, or whoever founded the run"
            raise NotAMemberError(f"{what} (by {ban.by.subject}): {remedy}")

    def _may_ban(self, by: Grant, target: Grant) -> bool:
        if target.subject == self._founder.subject:
            return False
        return target.role is not Role.ADMIN or by.depth < target.depth

    def _introduce(self, grant: Grant, statement: bytes) -> bool:
        old = self._known.get(grant.subject)
        if old is not None:
            if not old.depth or (self.ban_of(old) is None and _rank(old) >= _rank(grant)):
                return False
            self._forget(old)
        inviter = grant.steps[-1]
        if inviter.kind is Kind.INVITE and self._invited[inviter.subject] >= INVITED_LIMIT:
            return False
        if len(self._known) > KNOWN_LIMIT:
            farthest = max(self._known.values(), key=lambda g: (g.depth, g.role is not Role.ADMIN, g.subject))
            if farthest.depth <= grant.depth:
                return False
            self._forget(farthest)
        self._known[grant.subject] = grant
        self._statements[mark_of(statement)] = statement
        self._invited[inviter.subject] += 1
        return True

    def _forget(self, grant: Grant) -> None:
        del self._known[grant.subject]
        self._statements.pop(mark_of(introduction(grant)), None)
        self._invited[grant.steps[-1].subject] -= 1

    def _ban(self, said: Ban, statement: bytes) -> bool:
        signer = said.by.subject
        if not self._may_be_banned(said.subject, signer):
            return False
        self._bans.setdefault(said.subject, {})[signer] = said
        self._statements[mark_of(statement)] = statement
        self._banned_by[signer] += 1
        return True

    def _may_be_banned(self, subject: PeerId, signer: PeerId) -> bool:
        """Once by each, within the bounds."""
        signers = self._bans.get(subject, {})
        is_full = (
            self._banned_by[signer] >= BANS_LIMIT
            or len(signers) >= SIGNERS_LIMIT
            or self._banned_by.total() - self._banned_by[self._founder.subject] >= ALL_BANS_LIMIT
        )
        return signer not in signers and (not is_full or signer == self._founder.subject)


def _rank(grant: Grant) -> tuple[int, int, int, bytes]:
    """Of two chains of one peer the one that grants more is kept, everywhere the same."""
    return grant.role, grant.not_after, grant.cap, grant.chain().encode()


def _anybody(peer: PeerId) -> Grant:
    """What an open run grants."""
    return Grant(subject=peer, role=Role.LEARNER)
