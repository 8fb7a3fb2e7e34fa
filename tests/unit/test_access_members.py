"""Members: what a chain grants, what a ban takes, and that neither can be forged, moved or stretched."""

from __future__ import annotations

import contextlib
import itertools
import random

import msgspec
import pytest
from holders import FOUNDER, NOW, Holder, members, the_founder

from p2pdiloco.access import members as rules
from p2pdiloco.access import membership_log
from p2pdiloco.access.certificates import DEPTH_LIMIT, Chain, Grant, Role, decode_chain, hint_of
from p2pdiloco.access.members import Members, NotAMemberError
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.transport.identity import Identity, verify

ANN, BOB = (Identity.ephemeral() for _ in range(2))


def admitted(known: Members, holder: Holder, now: float = NOW) -> Grant:
    return known.admit(holder.peer, holder.chain, now)


def is_let_in(known: Members, holder: Holder, now: float = NOW) -> bool:
    try:
        admitted(known, holder, now)
    except NotAMemberError:
        return False
    return True


# -------------------------------------------------------------------------------------------------------- certificates


def test_who_holds_an_invite_certifies_its_own_key_and_is_let_in() -> None:
    ann = the_founder().invites().certifies(ANN)
    assert admitted(members(), ann).role is Role.LEARNER
    assert admitted(members(), the_founder()).role is Role.ADMIN


def test_a_stranger_is_refused_in_a_sentence() -> None:
    with pytest.raises(NotAMemberError, match=r"takes members only.*ask its founder for an invite"):
        members().admit(ANN.peer_id, b"", NOW)


def test_in_an_open_run_everybody_is_a_learner_but_who_is_banned() -> None:
    known = members("open")
    assert known.admit(ANN.peer_id, b"", NOW).role is Role.LEARNER
    assert known.is_member(ANN.peer_id, NOW)
    assert known.learn(the_founder().bans(Holder(ANN)))
    with pytest.raises(NotAMemberError, match="is banned"):
        known.admit(ANN.peer_id, b"", NOW)
    assert not known.is_member(ANN.peer_id, NOW)


def test_in_a_list_only_who_was_certified_by_name_is_let_in() -> None:
    known = members("list")
    assert admitted(known, the_founder().certifies(ANN)).role is Role.LEARNER
    with pytest.raises(NotAMemberError, match="by name only"):
        admitted(known, the_founder().invites().certifies(BOB))


def test_the_certificate_of_another_key_is_refused() -> None:
    ann = the_founder().invites().certifies(ANN)
    with pytest.raises(NotAMemberError, match="another key"):
        members().admit(BOB.peer_id, ann.chain, NOW)


def test_an_invite_is_no_peer() -> None:
    invite = the_founder().invites()
    with pytest.raises(NotAMemberError, match="another key"):
        members().admit(invite.peer, invite.chain, NOW)


def test_a_certificate_for_another_run_is_refused() -> None:
    elsewhere = Holder(FOUNDER, run=RunId("cd" * 20)).invites().certifies(ANN)
    with pytest.raises(NotAMemberError, match=r"has not signed .* for this run"):
        admitted(members(), elsewhere)


def test_a_chain_that_begins_at_nobody_known_is_refused() -> None:
    mine = Holder(BOB).invites().certifies(ANN)
    for hint in (hint_of(BOB.peer_id), hint_of(FOUNDER.peer_id)):
        with pytest.raises(NotAMemberError, match="is not valid"):
            members().admit(ANN.peer_id, Chain(hint, mine.certificates).encode(), NOW)


def test_an_expired_membership_ends_at_its_second() -> None:
    known, ann = members(), the_founder().invites(not_after=NOW).certifies(ANN)
    assert is_let_in(known, ann, NOW)
    assert known.is_member(ann.peer, NOW)
    with pytest.raises(NotAMemberError, match="expired at 1970-01-12 13:46 UTC"):
        admitted(known, ann, NOW + 1)
    assert not known.is_member(ann.peer, NOW + 1)
    assert known.grant_of(ann.peer) is not None, "what it did before stays valid"


def test_nothing_is_granted_that_was_not_granted_before() -> None:
    greedy = the_founder().invites(cap=1500, not_after=NOW + 5).certifies(ANN, cap=9000, not_after=NOW + 99)
    grant = admitted(members(), greedy)
    assert (grant.most_weight, grant.not_after) == (1.5, NOW + 5)
    assert not is_let_in(members(), the_founder().invites().certifies(ANN, role=Role.ADMIN))
    assert not is_let_in(members(), the_founder().invites(Role.FOLLOWER).certifies(ANN, role=Role.LEARNER))
    assert (
        admitted(members(), the_founder().invites(Role.FOLLOWER).certifies(ANN, role=Role.FOLLOWER)).most_weight == 0.0
    )


def test_who_may_sign_what() -> None:
    learner = the_founder().invites().certifies(ANN)
    admin = the_founder().certifies(ANN, role=Role.ADMIN)
    assert is_let_in(members(), learner.certifies(role=Role.OBSERVER))
    assert not is_let_in(members(), learner.certifies(role=Role.FOLLOWER))
    assert not is_let_in(members(), learner.certifies(role=Role.OBSERVER).certifies(role=Role.OBSERVER))
    assert not is_let_in(members(), learner.invites().certifies())
    assert not is_let_in(members(), the_founder().invites().invites().certifies())
    assert is_let_in(members(), admin.invites().certifies())
    assert is_let_in(members(), the_founder().invites(Role.ADMIN).certifies(role=Role.ADMIN).invites().certifies())
    assert not is_let_in(members(), the_founder().invites(Role.ADMIN).invites().certifies())


def test_a_chain_is_of_bounded_depth_and_goes_in_no_circle() -> None:
    long = the_founder()
    for _ in range(DEPTH_LIMIT):
        long = long.certifies(role=Role.ADMIN)
    assert is_let_in(members(), long)
    assert not is_let_in(members(), long.certifies())
    known, last = members(), long.certifies(role=Role.ADMIN).certificates[-1:]
    known.learn(membership_log.introduction(long.grant))
    with pytest.raises(NotAMemberError, match="more than 7"):
        known.admit(last[0].subject, Chain(hint_of(long.peer), last).encode(), NOW)
    admin = the_founder().certifies(ANN, role=Role.ADMIN)
    assert not is_let_in(members(), admin.certifies(role=Role.ADMIN).certifies(ANN, role=Role.ADMIN))


def test_a_chain_may_begin_at_an_admin_who_is_known() -> None:
    admin = the_founder().certifies(ANN, role=Role.ADMIN)
    bob = admin.invites().certifies(BOB)
    short = Chain(hint_of(ANN.peer_id), bob.certificates[1:]).encode()
    known = members()
    with pytest.raises(NotAMemberError, match="its signer is not an admin"):
        known.admit(BOB.peer_id, short, NOW)
    assert known.learn(membership_log.introduction(admin.grant))
    assert known.admit(BOB.peer_id, short, NOW).chain().encode() == bob.chain, "it is complete now"


def test_every_changed_bit_of_a_chain_is_noticed() -> None:
    ann = the_founder().invites(cap=5, not_after=NOW).certifies(ANN)
    for bit in range(0, 8 * len(ann.chain), 3):
        changed = bytearray(ann.chain)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(NotAMemberError):
            members().admit(ANN.peer_id, bytes(changed), NOW)


# ---------------------------------------------------------------------------------------------------------------- bans


def test_a_ban_wins_over_every_certificate_older_or_newer() -> None:
    known, ann = members(), the_founder().invites().certifies(ANN)
    admitted(known, ann)
    assert known.learn(the_founder().bans(ann))
    assert not known.is_member(ann.peer, NOW)
    assert not is_let_in(known, the_founder().invites().certifies(ANN))


def test_revoking_an_invite_revokes_what_came_from_it() -> None:
    known, invite = members(), the_founder().invites(Role.ADMIN)
    ann = invite.certifies(ANN, role=Role.ADMIN)
    bob = ann.invites().certifies(BOB)
    assert is_let_in(known, bob)
    known.learn(the_founder().bans(invite))
    with pytest.raises(NotAMemberError, match="which is revoked"):
        admitted(known, bob)
    assert not is_let_in(known, ann)
    assert not is_let_in(known, bob.certifies(role=Role.OBSERVER))
    assert is_let_in(known, the_founder().invites().certifies(BOB)), "another invite is another matter"
    assert known.is_member(BOB.peer_id, NOW), "and takes the revoked one's place"


def test_only_admins_ban_and_the_ban_names_run_signer_and_subject() -> None:
    ann, bob = the_founder().invites().certifies(ANN), the_founder().invites().certifies(BOB)
    with pytest.raises(ValueError, match="may not ban"):
        members().learn(ann.bans(bob))
    with pytest.raises(ValueError, match="may not ban"):
        members().learn(the_founder().invites(Role.ADMIN).bans(bob))
    good = the_founder().bans(ann)
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 1
        with pytest.raises(ValueError):
            members().learn(bytes(changed))
    with pytest.raises(ValueError):
        Members(RunId("cd" * 20), FOUNDER.peer_id, "invite", verify).learn(good)


def test_who_bans_whom_does_not_depend_on_the_order() -> None:
    near = the_founder().certifies(ANN, role=Role.ADMIN)
    far = near.certifies(BOB, role=Role.ADMIN)
    learner, victim = near.invites().certifies(), the_founder().invites().certifies()
    said = [near.bans(far), far.bans(near), far.bans(victim), near.bans(learner), near.bans(the_founder())]
    for order in itertools.permutations(said):
        known = members()
        for one in order:
            known.learn(one)
        standing = [is_let_in(known, who) for who in (the_founder(), near, far, learner, victim)]
        assert standing == [True, True, False, False, True], "the ban of one who is banned does not count"


def test_the_founder_ends_what_a_rogue_admin_did() -> None:
    rogue = the_founder().certifies(ANN, role=Role.ADMIN)
    victim, friend = the_founder().invites().certifies(), rogue.invites().certifies()
    known = members()
    known.learn(rogue.bans(victim))
    assert not is_let_in(known, victim)
    known.learn(the_founder().bans(rogue))
    assert is_let_in(known, victim)
    assert not is_let_in(known, friend)


# ------------------------------------------------------------------------------------------------------ closed invites


def test_a_closed_invite_keeps_who_is_in_and_lets_in_nobody_new() -> None:
    """All agree on them, in whatever order they hear of it; an invite that is revoked, too, keeps nobody."""
    invite = the_founder().invites(Role.ADMIN)
    ann, eve, late = invite.certifies(ANN, role=Role.ADMIN), invite.certifies(), invite.certifies()
    under = ann.invites().certifies(BOB)
    said = [membership_log.introduction(one.grant) for one in (ann, eve, under, late)]
    said += [the_founder().closes(invite, ann), the_founder().bans(eve)]
    for order in itertools.permutations(said):
        known = members()
        for one in order:
            assert known.learn(one)
        standing = [known.is_member(one.peer, NOW) for one in (ann, under, eve, late)]
        assert standing == [True, True, False, False]
    assert is_let_in(known, ann), "who is in comes back"
    assert is_let_in(known, ann.certifies(role=Role.OBSERVER))
    for new in (late, invite.certifies(), invite.certifies(role=Role.OBSERVER)):
        with pytest.raises(NotAMemberError, match=r"which is closed to newcomers .*ask for a new invite"):
            admitted(known, new)
    assert known.guests_of(invite.peer) == sorted([ann.peer, eve.peer, late.peer])
    assert is_let_in(known, the_founder().invites().certifies(late.identity)), "another invite is another matter"
    assert known.learn(the_founder().bans(invite))
    assert not is_let_in(known, ann)


def test_only_admins_close_invites_and_nobody_changes_who_stays() -> None:
    invite = the_founder().invites()
    ann, bob = invite.certifies(ANN), invite.certifies(BOB)
    with pytest.raises(ValueError, match="may not ban"):
        members().learn(ann.closes(invite, ann))
    good = the_founder().closes(invite, ann, bob)
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 1
        with pytest.raises(ValueError):
            members().learn(bytes(changed))
    with pytest.raises(ValueError):
        Members(RunId("cd" * 20), FOUNDER.peer_id, "invite", verify).learn(good)
    near = the_founder().certifies(role=Role.ADMIN)
    far = near.certifies(role=Role.ADMIN)
    known, admins = members(), near.invites(Role.ADMIN)
    known.learn(far.closes(admins))
    assert is_let_in(known, admins.certifies()), "who is farther from the founder closes no invite that makes admins"
    known.learn(far.closes(invite, bob))
    assert not is_let_in(known, ann)
    known.learn(near.bans(far))
    assert is_let_in(known, ann), "what a banned admin closed is open"


def test_a_peer_is_not_closed_like_an_invite() -> None:
    known, ann = members(), the_founder().invites().certifies(ANN)
    known.learn(the_founder().closes(ann))
    assert is_let_in(known, ann)


# -------------------------------------------------------------------------------------------------------- unseen peers


def test_made_up_introductions_use_up_no_invite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "UNSEEN_LIMIT", 3)
    known, invite = members(), the_founder().invites(uses=3)
    for _ in range(20):
        known.learn(membership_log.introduction(invite.certifies().grant), BOB.peer_id)
    assert len(known.known()) == 4, "and are bounded"
    guests = [invite.certifies() for _ in range(4)]
    known.learn(membership_log.introduction(guests[0].grant), BOB.peer_id)
    assert [is_let_in(known, guest) for guest in guests] == [True, True, True, False]
    for _ in range(20):
        known.learn(membership_log.introduction(invite.certifies().grant), BOB.peer_id)
    assert all(is_let_in(known, guest) for guest in guests[:3]), "who was seen is not displaced"
    again = members()
    for one in known.statements():
        again.learn(one)
    assert all(again.is_member(guest.peer, NOW) for guest in guests[:3]), "nor when it is read from the disk"


def test_who_makes_up_introductions_displaces_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others are told of no more than half of it, or it would go round for ever."""
    monkeypatch.setattr(rules, "UNSEEN_LIMIT", 8)
    known, invite = members(), the_founder().invites()
    honest = [invite.certifies() for _ in range(2)]
    for guest in honest:
        assert known.learn(membership_log.introduction(guest.grant), ANN.peer_id)
    news = [known.learn(membership_log.introduction(invite.certifies().grant), BOB.peer_id) for _ in range(20)]
    assert news == 2 * [True] + 18 * [False]
    assert len(known.known()) == 9
    assert sorted(known.beyond(b"", 1 << 20)) == sorted(membership_log.introduction(guest.grant) for guest in honest)
    assert all(known.is_member(guest.peer, NOW) for guest in honest)
    late = invite.certifies()
    known.learn(membership_log.introduction(late.grant), ANN.peer_id)
    assert known.is_member(late.peer, NOW)


def test_an_honest_newcomer_is_agreed_on_beside_made_up_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connects to one peer first, which tells another, which it meets later; others never meet it."""
    monkeypatch.setattr(rules, "UNSEEN_LIMIT", 8)
    one, two, three = members(), members(), members()
    invite = the_founder().invites()
    for known in (one, two, three):
        for _ in range(12):
            known.learn(membership_log.introduction(invite.certifies().grant), BOB.peer_id)
    newcomer = invite.certifies()
    assert is_let_in(one, newcomer)
    for here, there, teller in ((one, two, ANN.peer_id), (two, three, FOUNDER.peer_id)):
        for said in here.beyond(there.marks(), most_bytes=1 << 20):
            there.learn(said, teller)
    assert two.is_member(newcomer.peer, NOW)
    assert is_let_in(two, newcomer)
    for said in two.beyond(three.marks(), most_bytes=1 << 20):
        three.learn(said, FOUNDER.peer_id)
    assert three.is_member(newcomer.peer, NOW)


def test_nobodys_word_takes_a_chain_from_a_peer_that_was_here() -> None:
    """Who holds an invite can certify any key: when it is revoked, they would all be out with it."""
    known, leaked = members(), the_founder().invites()
    ann = the_founder().invites().certifies(ANN, not_after=NOW + 100)
    admitted(known, ann)
    for holder in (leaked.certifies(ANN), leaked.certifies(ANN, not_after=NOW + 5)):  # the first grants more
        assert not known.learn(membership_log.introduction(holder.grant), BOB.peer_id)
    known.learn(the_founder().bans(leaked))
    assert known.is_member(ANN.peer_id, NOW)
    heard = members()
    heard.learn(membership_log.introduction(leaked.certifies(ANN).grant), BOB.peer_id)
    heard.learn(the_founder().bans(leaked))
    assert not heard.is_member(ANN.peer_id, NOW)
    assert is_let_in(heard, ann), "its own chain goes before what was told"
    assert heard.is_member(ANN.peer_id, NOW)


def test_a_chain_for_which_there_is_no_room_takes_nobodys_place() -> None:
    known, full = members(), the_founder().invites(uses=1)
    follower = the_founder().invites(Role.FOLLOWER).certifies(ANN, role=Role.FOLLOWER)
    admitted(known, follower)
    admitted(known, full.certifies())
    assert admitted(known, full.certifies(ANN)).role is Role.FOLLOWER
    assert known.is_member(ANN.peer_id, NOW)


# -------------------------------------------------------------------------------------------------- a set that grows


def test_peers_that_exchange_what_the_other_lacks_know_the_same() -> None:
    rng = random.Random(3)
    admin = the_founder().certifies(role=Role.ADMIN)
    invite = the_founder().invites()
    guests = [invite.certifies() for _ in range(12)]
    said = [membership_log.introduction(g.grant) for g in (admin, *guests)]
    said += [rng.choice([the_founder(), admin]).bans(g) for g in guests[:5]]
    sides = (members(), members())
    for one in said:
        rng.choice(sides).learn(one)
    rounds = 0
    while sides[0].marks() != sides[1].marks():
        rounds += 1
        for here, there in (sides, sides[::-1]):
            for one in membership_log.split_statements(
                membership_log.join_statements(there.beyond(here.marks(), most_bytes=1000))
            ):
                here.learn(one)
    assert 1 < rounds < 20
    assert [sides[0].is_member(g.peer, NOW) for g in guests] == 5 * [False] + 7 * [True]
    assert [sides[1].is_member(g.peer, NOW) for g in guests] == 5 * [False] + 7 * [True]


def test_a_peer_is_introduced_by_whoever_met_it_and_observers_are_not() -> None:
    known, other, ann = members(), members(), the_founder().invites().certifies(ANN)
    admitted(known, ann)
    admitted(known, ann.certifies(role=Role.OBSERVER))
    (said,) = known.statements()
    assert other.learn(said)
    assert not other.learn(said), "no news"
    assert other.is_member(ANN.peer_id, NOW)
    assert other.role_of(ANN.peer_id) is Role.LEARNER
    assert other.role_of(BOB.peer_id) is Role.OBSERVER


def test_of_two_chains_of_a_peer_the_one_that_grants_more_is_kept() -> None:
    follower = the_founder().invites(Role.FOLLOWER).certifies(ANN, role=Role.FOLLOWER)
    learner = the_founder().invites().certifies(ANN)
    for order in itertools.permutations((follower, learner)):
        known = members()
        assert [admitted(known, one).role for one in order][-1] is Role.LEARNER
        assert known.role_of(ANN.peer_id) is Role.LEARNER
        assert len(list(known.statements())) == 1


@pytest.mark.parametrize(("uses", "says"), [(1, "one peer"), (3, "3 peers")])
def test_an_invite_brings_so_many_peers(uses: int, says: str) -> None:
    known, invite = members(), the_founder().invites(uses=uses)
    guests = [invite.certifies() for _ in range(uses + 1)]
    assert [is_let_in(known, guest) for guest in guests] == [True] * uses + [False]
    assert known.used_of(invite.peer) == uses
    assert is_let_in(known, guests[0]), "who was let in comes back"
    assert is_let_in(known, the_founder().invites(uses=1).certifies())
    with pytest.raises(NotAMemberError, match=rf"admits {says} and has been used: ask for another .*identity\.key"):
        admitted(known, guests[-1])
    for _ in range(2):
        assert is_let_in(known, invite.certifies(role=Role.OBSERVER)), "asking takes no place"
        assert is_let_in(known, guests[0].certifies(role=Role.OBSERVER))
        with pytest.raises(NotAMemberError, match=rf"admits {says} and has been used"):
            admitted(known, guests[-1].certifies(role=Role.OBSERVER))


def test_a_guest_that_is_banned_or_has_expired_keeps_its_place() -> None:
    known, invite = members(), the_founder().invites(uses=2)
    ann, bob = invite.certifies(ANN, not_after=NOW), invite.certifies(BOB)
    for guest in (ann, bob):
        admitted(known, guest)
    known.learn(the_founder().bans(bob))
    assert not is_let_in(known, invite.certifies(), NOW + 1)


def test_guests_of_an_admin_that_came_by_invite_use_up_its_own_invites() -> None:
    known, first = members(), the_founder().invites(Role.ADMIN, uses=1)
    admin = first.certifies(ANN, role=Role.ADMIN)
    admitted(known, admin)
    theirs = admin.invites(uses=2)
    assert [is_let_in(known, theirs.certifies()) for _ in range(3)] == [True, True, False]
    assert not is_let_in(known, first.certifies(role=Role.ADMIN))


def test_the_uses_of_an_invite_are_signed_and_have_one_form() -> None:
    invite = the_founder().invites(uses=2)
    ann = invite.certifies(ANN)
    more = msgspec.structs.replace(invite.certificates[0], uses=3)
    with pytest.raises(NotAMemberError, match="has not signed"):
        members().admit(ann.peer, Holder(ANN, (more, *ann.certificates[1:])).chain, NOW)
    for bad in (the_founder().invites(uses=0), the_founder().invites(uses=257), the_founder().certifies(ANN, uses=2)):
        with pytest.raises(ValueError, match=r"cannot have (0|257|2) uses"):
            decode_chain(bad.chain)


def test_only_as_many_unseen_peers_count_as_an_invite_has_places_left() -> None:
    """Others may have admitted them, so they stay known as members."""
    known, invite = members(), the_founder().invites(uses=2)
    guests = [invite.certifies() for _ in range(5)]
    for guest in guests:
        known.learn(membership_log.introduction(guest.grant), BOB.peer_id)
    assert [known.has_place(guest.peer) for guest in guests] == [True, True, False, False, False]
    admitted(known, guests[4])
    assert [known.has_place(guest.peer) for guest in guests] == [True, False, False, False, True]
    admitted(known, guests[3])
    assert [known.has_place(guest.peer) for guest in guests] == [False, False, False, True, True]
    assert all(known.is_member(guest.peer, NOW) for guest in guests)
    assert known.has_place(FOUNDER.peer_id)
    assert not known.has_place(ANN.peer_id)
    assert members("open").has_place(ANN.peer_id)


def test_who_has_used_up_an_invite_takes_no_other_peers_place_with_it() -> None:
    """It can certify every key. Of two chains that were told, the one that has a place counts."""
    known, theirs = members(), the_founder().invites(uses=1)
    admitted(known, theirs.certifies())
    for _ in range(8):
        ann = the_founder().invites(uses=1).certifies()
        said = [membership_log.introduction(one.grant) for one in (theirs.certifies(ann.identity), ann)]
        random.Random(ann.peer).shuffle(said)
        for one in said:
            known.learn(one, BOB.peer_id)
        assert known.has_place(ann.peer)


def test_what_is_known_is_bounded_and_the_near_displace_the_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "KNOWN_LIMIT", 3)
    known, admin = members(), the_founder().certifies(role=Role.ADMIN)
    for holder in (admin, admin.certifies(), admin.certifies()):
        assert is_let_in(known, holder)
    assert not is_let_in(known, admin.certifies())
    assert is_let_in(known, the_founder().certifies())
    assert len(known.known()) == 4
    assert len(list(known.statements())) == 3
    assert known.is_member(admin.peer, NOW)


def test_bans_are_bounded_but_the_founders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "BANS_LIMIT", 2)
    monkeypatch.setattr(rules, "ALL_BANS_LIMIT", 3)
    monkeypatch.setattr(rules, "SIGNERS_LIMIT", 1)
    ann, bob = the_founder().certifies(role=Role.ADMIN), the_founder().certifies(role=Role.ADMIN)
    keys = [Holder(Identity.ephemeral()) for _ in range(5)]
    known = members()
    assert [known.learn(ann.bans(key)) for key in keys[:3]] == [True, True, False]
    assert [known.learn(bob.bans(key)) for key in (keys[0], keys[3], keys[4])] == [False, True, False]
    assert all(known.learn(the_founder().bans(key)) for key in keys)
    assert known.learn(the_founder().bans(keys[0])) is False


# ------------------------------------------------------------------------------------------------------------- garbage


def test_garbage_is_refused_with_a_reason() -> None:
    rng = random.Random(11)
    good = [the_founder().invites().certifies(ANN).chain, the_founder().bans(Holder(BOB))]
    good.append(membership_log.introduction(the_founder().invites().certifies(ANN).grant))
    good.append(the_founder().closes(the_founder().invites(), Holder(BOB)))
    known = members()
    for _ in range(3000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 4)):
            match rng.randrange(4):
                case 0:
                    del data[rng.randrange(len(data) + 1) :]
                case 1:
                    data[rng.randrange(len(data) + 1) : 0] = rng.randbytes(rng.randrange(1, 200))
                case 2 if data:
                    data[rng.randrange(len(data))] = rng.randrange(256)
                case _:
                    data += data[: rng.randrange(len(data) + 1)]
        if bytes(data) in good:
            continue
        for read in (decode_chain, known.learn, membership_log.split_statements):
            with contextlib.suppress(ValueError):
                read(bytes(data))
        with pytest.raises(NotAMemberError):
            known.admit(ANN.peer_id, bytes(data), NOW)
    assert len(known.known()) == 1


def test_what_decodes_encodes_to_the_same_bytes() -> None:
    chain = the_founder().invites(cap=7, not_after=9).certifies(ANN).chain
    assert decode_chain(chain).encode() == chain
    kept = [b"x", b"yy" * 40]
    assert membership_log.split_statements(membership_log.join_statements(kept)) == kept


# ------------------------------------------------------------------------------------------------- the end of the run


def test_founder_and_admins_prolong_the_run_and_the_largest_end_counts() -> None:
    """Whatever the order in which the statements come. Of each signer, one statement is kept."""
    admin, other = (the_founder().certifies(role=Role.ADMIN) for _ in range(2))
    said = [the_founder().prolongs(200), admin.prolongs(500), admin.prolongs(300), other.prolongs(400)]
    for order in itertools.permutations(said):
        known = members()
        for statement in order:
            known.learn(statement)
        assert known.prolonged_to == 500
        assert sorted(known.prolongings()) == sorted(statement for statement in said if statement != said[2])
        assert not known.learn(said[2]), "smaller than what its signer has said"
        assert known.brings(admin.prolongs(501)) == "end"
        assert known.brings(admin.prolongs(499)) == "nothing"
    assert members().prolonged_to == 0


def test_what_a_banned_admin_has_signed_prolongs_nothing_whenever_it_was_made() -> None:
    admin = the_founder().certifies(role=Role.ADMIN)
    said = [the_founder().prolongs(200), admin.prolongs(500), the_founder().bans(admin)]
    for order in itertools.permutations(said):
        known = members()
        for statement in order:
            known.learn(statement)
        assert known.prolonged_to == 200
        assert known.prolongings() == said[:1]


def test_only_admins_prolong_and_the_statement_names_run_signer_and_end() -> None:
    learner, invite = the_founder().invites().certifies(), the_founder().invites(Role.ADMIN)
    for holder in (learner, invite):
        with pytest.raises(ValueError, match="may not"):
            members().learn(holder.prolongs(500))
    stranger = Holder(Identity.ephemeral())
    with pytest.raises(ValueError, match="has not signed"):
        members().learn(stranger.prolongs(500))
    elsewhere = Holder(FOUNDER, run=RunId("cd" * 20)).prolongs(500)
    with pytest.raises(ValueError, match="has not signed"):
        members().learn(elsewhere)
    for last in (0, 2**50 + 1):
        with pytest.raises(ValueError, match="cannot end"):
            members().learn(the_founder().prolongs(last))
    sound = the_founder().certifies(role=Role.ADMIN).prolongs(500)
    assert members().learn(sound)
    for at in range(len(sound)):
        broken = bytearray(sound)
        broken[at] ^= 1
        with pytest.raises(ValueError):
            members().learn(bytes(broken))
        with pytest.raises(ValueError):
            members().learn(sound[:at])


def test_prolongings_are_bounded_and_those_that_count_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PROLONGERS_LIMIT", 2)
    known = members()
    admins = [the_founder().certifies(role=Role.ADMIN) for _ in range(4)]
    for last, admin in enumerate(admins[:3], 100):
        assert known.learn(admin.prolongs(last))
    assert known.prolonged_to == 102
    assert not known.learn(admins[3].prolongs(50)), "two say more"
    assert known.learn(the_founder().prolongs(10)), "the founder's is always kept"
    known.learn(the_founder().bans(admins[2]))
    assert known.learn(admins[3].prolongs(50)), "one of the two counts no more"
    assert known.prolonged_to == 101
    kept = [statement for statement in known.statements() if statement.startswith(membership_log.PROLONGING)]
    assert len(kept) == 3
