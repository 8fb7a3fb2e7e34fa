"""The doors of private runs: who is refused, in which words, and what it has learned by then."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
from holders import NOW, RUN, Holder, members, the_founder

from p2pdiloco.access.certificates import Role as MemberRole
from p2pdiloco.access.members import Members
from p2pdiloco.net.authorization import Authorizer, JoinerAuthorizer, MemberAuthorizer, OpenAuthorizer
from p2pdiloco.net.connection import Connection
from p2pdiloco.net.endpoint import Endpoint
from p2pdiloco.net.events import Connected, Event, Failed, Message
from p2pdiloco.net.handshake import Dialled, HandshakeFactory, Role
from p2pdiloco.net.limits import TransportLimits
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.identity import Identity, verify

FINGERPRINT = bytes(32)
ASK = "ask the run's founder for an invite"


class Party(NamedTuple):
    """One process."""

    identity: Identity
    endpoint: Endpoint
    wrote: bytearray


def party(identity: Identity, authorizer: Authorizer, run: str = RUN, *, claims: PeerId | None = None) -> Party:
    handshake_factory = HandshakeFactory(
        peer=claims or identity.peer_id,
        run=run,
        version=1,
        life=os.urandom(16),
        sign=identity.sign,
        verify=verify,
        nonce=lambda: os.urandom(32),
        authorizer=authorizer,
    )
    return Party(identity, Endpoint(handshake_factory, TransportLimits(lanes=1)), bytearray())


def member(holder: Holder, known: Members | None = None, now_s: float = NOW) -> Party:
    return party(holder.identity, MemberAuthorizer(known or members(), holder.chain, lambda: now_s))


def stranger(run: str = "") -> Party:
    return party(Identity.ephemeral(), OpenAuthorizer(), run)


class Meeting:
    """What came of a connection, with all that both have written."""

    def __init__(
        self,
        dialler: Party,
        listener: Party,
        *,
        expected: PeerId | None = None,
        seen: tuple[bytes, bytes] = (FINGERPRINT, FINGERPRINT),
    ) -> None:
        begun = (
            (dialler, dialler.endpoint.add_connection(Role.DIALLER, 0.0, host="h", dialled=Dialled(expected))),
            (listener, listener.endpoint.add_connection(Role.LISTENER, 0.0, host="h")),
        )
        self.mine, self.theirs = (one.endpoint.connection(connection) for one, connection in begun)
        self.events: dict[Connection, list[Event]] = {self.mine: [], self.theirs: []}
        for (one, connection), fingerprint in zip(begun, seen, strict=True):
            one.endpoint.handle_tls_established(connection, fingerprint, 0.0)
        for _ in range(20):
            for (here, mine), (there, theirs) in (begun, begun[::-1]):
                self.events[here.endpoint.connection(mine)] += here.endpoint.events(0.0)
                for _, piece in here.endpoint.to_send(0.0):
                    data = piece.head + bytes(piece.chunk)
                    here.wrote.extend(data)
                    there.endpoint.receive_data(theirs, data, 0.0)

    @property
    def stands(self) -> bool:
        return self.mine.is_open and self.theirs.is_open

    def refusal(self, connection: Connection) -> str:
        """Why it never was one, at that end."""
        assert not self.stands
        told = self.events[connection]
        assert not any(isinstance(event, (Connected, Message)) for events in self.events.values() for event in events)
        return next(str(e.error) for e in told if isinstance(e, Failed) and e.connection == connection.id)


def test_members_meet_and_know_each_others_role() -> None:
    ann, bob = (
        the_founder().invites().certifies(),
        the_founder().invites(MemberRole.FOLLOWER).certifies(role=MemberRole.FOLLOWER),
    )
    known = members()
    assert Meeting(member(bob), member(ann, known)).stands
    assert known.role_of(bob.peer) is MemberRole.FOLLOWER


@pytest.mark.parametrize("run", ["", "cd" * 20, RUN])
def test_a_stranger_is_told_to_ask_for_an_invite_and_nothing_else(run: str) -> None:
    ann = member(the_founder().invites().certifies())
    met = Meeting(stranger(run), ann)
    assert ASK in met.refusal(met.theirs), "in our log"
    if not run:
        assert ASK in met.refusal(met.mine), "and for the stranger's user"
    assert RUN.encode() not in ann.wrote
    assert bytes.fromhex(RUN) not in ann.wrote
    assert len(ann.wrote) < 700, "a HELLO and a GOODBYE; no certificate"


def test_who_dials_a_stranger_shows_it_nothing() -> None:
    ann, other = member(the_founder().invites().certifies()), stranger()
    met = Meeting(ann, other)
    met.refusal(met.mine)
    assert len(ann.wrote) < 700
    assert RUN.encode() not in ann.wrote


def test_who_knows_the_run_and_has_no_certificate_is_refused() -> None:
    other = party(Identity.ephemeral(), JoinerAuthorizer(b""))
    met = Meeting(other, member(the_founder()))
    for end in (met.mine, met.theirs):
        assert "takes members only" in met.refusal(end)


def test_a_tag_that_was_seen_is_of_no_use() -> None:
    """To who replays a member's HELLO at another member, or sends it back."""
    ann, bob = member(the_founder().invites().certifies()), member(the_founder().invites().certifies())
    thief = Identity.ephemeral()
    met = Meeting(ann, party(thief, OpenAuthorizer(), ""), seen=(b"t" * 32, b"t" * 32))
    met.refusal(met.mine)
    for victim in (ann, bob):
        connection = victim.endpoint.add_connection(Role.LISTENER, 1.0, host="h")
        victim.endpoint.handle_tls_established(connection, FINGERPRINT, 1.0)
        before = len(victim.wrote)
        victim.endpoint.receive_data(connection, bytes(ann.wrote[: ann.wrote.index(b"p2pdiloco") + 400]), 1.0)
        told = [e for e in victim.endpoint.events(1.0) if isinstance(e, Failed)]
        assert before <= len(victim.wrote)
        assert told
        assert ASK in str(told[0].error)


@pytest.mark.parametrize(
    ("guest", "now_s", "sentence"),
    [
        (the_founder().invites(not_after=NOW).certifies(), NOW + 1.0, "expired"),
        (Holder(Identity.ephemeral()).invites().certifies(), NOW, "is not valid"),
        (Holder(the_founder().identity, run="cd" * 20).invites().certifies(), NOW, "for this run"),  # type: ignore[arg-type]
    ],
    ids=["expired", "of another founder", "for another run"],
)
def test_a_certificate_that_does_not_hold_is_refused_at_both_ends(guest: Holder, now_s: float, sentence: str) -> None:
    met = Meeting(party(guest.identity, JoinerAuthorizer(guest.chain)), member(the_founder(), now_s=now_s))
    for end in (met.mine, met.theirs):
        assert sentence in met.refusal(end)


def test_the_revoked_and_the_banned_are_refused() -> None:
    invite = the_founder().invites()
    ann, bob, eve = invite.certifies(), invite.certifies(), the_founder().invites().certifies()
    known = members()
    known.learn(the_founder().bans(invite))
    known.learn(the_founder().bans(eve))
    for guest, sentence in ((ann, "which is revoked"), (bob, "which is revoked"), (eve, "is banned")):
        met = Meeting(member(guest), member(the_founder(), known))
        assert sentence in met.refusal(met.mine)


def test_anothers_certificate_is_refused() -> None:
    victim = the_founder().invites().certifies()
    met = Meeting(party(Identity.ephemeral(), JoinerAuthorizer(victim.chain)), member(the_founder()))
    assert "another key" in met.refusal(met.mine)


def test_anothers_peer_id_is_refused_whatever_it_shows() -> None:
    victim = the_founder().invites().certifies()
    thief = party(Identity.ephemeral(), JoinerAuthorizer(victim.chain), claims=victim.peer)
    met = Meeting(thief, member(the_founder()))
    assert "does not own that peer id" in met.refusal(met.theirs)


def test_a_stolen_address_is_noticed_by_who_dials_it() -> None:
    ann, thief = the_founder().invites().certifies(), the_founder().invites().certifies()
    met = Meeting(member(ann), member(thief), expected=the_founder().peer)
    assert f"expected {the_founder().peer}, but {thief.peer} answers there" in met.refusal(met.mine)


def test_a_man_in_the_middle_with_a_certificate_of_his_own_reads_nothing() -> None:
    """He ends TLS on both sides, and hands on what both say."""
    ann, bob = (the_founder().invites().certifies() for _ in range(2))
    met = Meeting(member(ann), member(bob), seen=(b"m" * 32, b"b" * 32))
    for end in (met.mine, met.theirs):
        assert ASK in met.refusal(end), "the tag is of another channel"
    known = members("open")
    open_ends = [party(one.identity, MemberAuthorizer(known, one.chain, lambda: NOW)) for one in (ann, bob)]
    met = Meeting(*open_ends, seen=(b"m" * 32, b"b" * 32))
    for end in (met.mine, met.theirs):
        assert "somebody in between" in met.refusal(end)


def test_a_joiner_judges_whom_it_met_once_it_knows_the_founder() -> None:
    ann, guest = the_founder().invites().certifies(), the_founder().invites().certifies()
    door = JoinerAuthorizer(guest.chain)
    assert Meeting(party(guest.identity, door), member(ann)).stands
    assert members().admit(ann.peer, door.shown[ann.peer], NOW).role is MemberRole.LEARNER


def test_an_open_run_refuses_whom_its_founder_has_banned() -> None:
    known, eve = members("open"), Identity.ephemeral()
    known.learn(the_founder().bans(Holder(eve)))
    listener = party(the_founder().identity, MemberAuthorizer(known, b"", lambda: NOW))
    met = Meeting(party(eve, OpenAuthorizer()), listener)
    assert "is banned" in met.refusal(met.mine)
    assert Meeting(party(Identity.ephemeral(), OpenAuthorizer()), listener).stands
