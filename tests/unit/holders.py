"""Keys with their chains, for tests of membership."""

from __future__ import annotations

from p2pdiloco.access import membership_log
from p2pdiloco.access.certificates import (
    NEVER,
    NO_CAP,
    USES_LIMIT,
    Certificate,
    Chain,
    Grant,
    Kind,
    Role,
    certify,
    hint_of,
)
from p2pdiloco.access.members import Members
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import Access
from p2pdiloco.transport.identity import Identity, verify

RUN = RunId("ab" * 20)
FOUNDER = Identity.ephemeral()
NOW = 1_000_000


class Holder:
    """A key with its chain."""

    def __init__(self, identity: Identity, chain: tuple[Certificate, ...] = (), run: RunId = RUN) -> None:
        self.identity, self.certificates, self.run = identity, chain, run

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def chain(self) -> bytes:
        return Chain(hint_of(FOUNDER.peer_id), self.certificates).encode() if self.certificates else b""

    @property
    def grant(self) -> Grant:
        grant = Grant(subject=FOUNDER.peer_id)
        for one in self.certificates:
            grant = Grant(
                subject=one.subject,
                kind=one.kind,
                role=one.role,
                uses=one.uses,
                steps=grant.path,
                certificates=(*grant.certificates, one),
            )
        return grant

    def certifies(
        self,
        identity: Identity | None = None,
        kind: Kind = Kind.PEER,
        role: Role = Role.LEARNER,
        *,
        cap: int = NO_CAP,
        not_after: int = NEVER,
        uses: int = 1,
    ) -> Holder:
        identity = identity or Identity.ephemeral()
        bare = Certificate(kind=kind, role=role, subject=identity.peer_id, cap=cap, not_after=not_after, uses=uses)
        signed = certify(self.run, self.peer, bare, self.identity.sign)
        return Holder(identity, (*self.certificates, signed), self.run)

    def invites(
        self, role: Role = Role.LEARNER, *, cap: int = NO_CAP, not_after: int = NEVER, uses: int = USES_LIMIT
    ) -> Holder:
        return self.certifies(None, Kind.INVITE, role, cap=cap, not_after=not_after, uses=uses)

    def bans(self, other: Holder) -> bytes:
        return membership_log.ban(RUN, other.peer, self.grant, self.identity.sign)

    def prolongs(self, last: int) -> bytes:
        return membership_log.prolonging(self.run, last, self.grant, self.identity.sign)

    def closes(self, invite: Holder, *stay: Holder) -> bytes:
        return membership_log.closing(RUN, invite.peer, [one.peer for one in stay], self.grant, self.identity.sign)


def the_founder() -> Holder:
    return Holder(FOUNDER)


def members(access: Access = "invite") -> Members:
    return Members(RUN, FOUNDER.peer_id, access, verify)
