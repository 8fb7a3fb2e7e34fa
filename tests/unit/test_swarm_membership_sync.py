"""The members of a run at running nodes: what they tell each other, whom they part from, what is kept; and invites."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from holders import FOUNDER, RUN, Holder, members, the_founder

from p2pdiloco.access import members as rules
from p2pdiloco.access import membership_log
from p2pdiloco.access.certificates import NEVER, NO_CAP, Role
from p2pdiloco.access.invite_code import decode_invite, encode_invite
from p2pdiloco.access.members import Members, NotAMemberError
from p2pdiloco.access.membership_log import introduction, join_statements
from p2pdiloco.net.authorization import MemberAuthorizer
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.swarm import membership_sync as membership_sync_module
from p2pdiloco.swarm.credentials import (
    Credentials,
    CredentialsError,
    MemberFiles,
    credentials_from_invite,
    invite_key,
    make_invite,
)
from p2pdiloco.swarm.membership_sync import MembershipLost, MembershipSync, Prolonged
from p2pdiloco.transport.identity import Identity, verify
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.wire.control_messages import GetStatements, TellStatements, decode_request
from p2pdiloco.wire.request_reply import Answer, RequestError, RequestRefused, Response

ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{Identity.ephemeral().peer_id}"


class Place:
    """Fellowships that reach each other, in one loop and one point of time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.there: dict[PeerId, MembershipSync] = {}
        self.doors: dict[MembershipSync, MemberAuthorizer] = {}
        """Who is let in to each one's transport."""
        self.links: set[frozenset[PeerId]] = set()
        self.parted: list[tuple[PeerId, PeerId, str]] = []
        self.expelled: list[tuple[PeerId, str]] = []
        self.ends: list[tuple[PeerId, int]] = []
        self.blamed: Counter[tuple[PeerId, PeerId]] = Counter()
        self.told: Counter[PeerId] = Counter()
        """How many others each has told of members."""
        self.now_s = 1_000_000.0
        self._work: list[asyncio.Task[None]] = []

    def enter(self, holder: Holder) -> MembershipSync:
        files = MemberFiles(self.folder / holder.peer)
        mine = Credentials(RUN, holder.chain, holder.identity)
        door = MemberAuthorizer(members(), mine.chain, lambda: self.now_s)
        events = EventBus()
        events.subscribe(MembershipLost, lambda lost: self.expelled.append((holder.peer, lost.reason)))
        events.subscribe(Prolonged, lambda end: self.ends.append((holder.peer, end.last)))
        one = MembershipSync(door, mine, files, Line(self, holder.peer), self._spawn, events, lambda: self.now_s)
        self.there[holder.peer], self.doors[one] = one, door
        return one

    def connect(self, ann: Holder, bob: Holder) -> None:
        for here, there in ((ann, bob), (bob, ann)):
            self.doors[self.there[here.peer]].admit(there.peer, self.there[there.peer].chain)
        self.links.add(frozenset({ann.peer, bob.peer}))
        for here, there in ((ann, bob), (bob, ann)):
            self.there[here.peer].connected(there.peer)

    async def settle(self) -> None:
        while waiting := [task for task in self._work if not task.done()]:
            await asyncio.wait(waiting)

    def _spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        self._work.append(asyncio.create_task(work, name=name))


class Line:
    """One's links."""

    def __init__(self, place: Place, me: PeerId) -> None:
        self._place, self._me = place, me

    def peers(self) -> list[PeerId]:
        return [peer for link in self._place.links if self._me in link for peer in link if peer != self._me]

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        await asyncio.sleep(0)
        if peer not in self.peers():
            raise RequestError("not connected")
        request = decode_request(body)
        assert isinstance(request, GetStatements | TellStatements)
        self._place.told[self._me] += isinstance(request, TellStatements)
        answer = await self._place.there[peer].answer(self._me, request)
        assert len(answer.payload or b"") <= max_payload
        return Response(answer.body, memoryview(bytes(answer.payload)) if answer.payload else None)  # type: ignore[arg-type]

    def blame(self, peer: PeerId) -> None:
        self._place.blamed[self._me, peer] += 1

    def disconnect(self, peer: PeerId, reason: str) -> None:
        self._place.links.discard(frozenset({self._me, peer}))
        self._place.parted.append((self._me, peer, reason))


def played(folder: Path, story: Callable[[Place], Coroutine[Any, Any, None]]) -> Place:
    place = Place(folder)
    asyncio.run(asyncio.wait_for(story(place), 20.0))
    return place


def test_who_connects_learns_of_all_members_and_bans(tmp_path: Path) -> None:
    invite = the_founder().invites()
    ann, bob, eve = invite.certifies(), the_founder().invites().certifies(), invite.certifies()

    async def story(place: Place) -> None:
        first = place.enter(the_founder())
        first.members.admit(eve.peer, eve.chain, place.now_s)
        first.members.learn(the_founder().bans(eve))
        for holder in (ann, bob):
            place.enter(holder)
        place.connect(the_founder(), ann)
        await place.settle()
        place.connect(ann, bob)
        await place.settle()
        known = place.there[bob.peer]
        assert known.is_member(ann.peer)
        assert not known.is_member(eve.peer)
        assert known.members.marks() == place.there[ann.peer].members.marks()

    played(tmp_path, story)


def test_each_tells_four_of_a_new_member_and_all_of_a_ban(tmp_path: Path) -> None:
    """Thirty peers made 870 requests for each newcomer. Who is not told asks when the newcomer is named to it."""
    holders = [the_founder(), *(the_founder().invites().certifies() for _ in range(29))]
    ann = the_founder().invites().certifies()

    async def story(place: Place) -> None:
        for holder in holders:
            place.enter(holder)
        for number, holder in enumerate(holders):
            for other in holders[:number]:
                place.connect(holder, other)
        await place.settle()
        place.told.clear()
        place.enter(ann)
        place.connect(ann, holders[7])
        await place.there[holders[7].peer].answer(ann.peer, TellStatements(b""))
        news = [introduction(place.there[holders[7].peer].members.grant_of(ann.peer))]  # type: ignore[arg-type]
        await place.there[holders[3].peer].answer(holders[7].peer, TellStatements(join_statements(news)))
        await place.settle()
        assert place.told
        assert max(place.told.values()) <= 4
        knowing = [holder for holder in holders if place.there[holder.peer].is_member(ann.peer)]
        assert len(knowing) > 20
        for holder in holders:
            await place.there[holder.peer].ask(knowing[-1].peer)
            assert place.there[holder.peer].is_member(ann.peer)
        await place.settle()
        place.told.clear()
        MemberFiles(tmp_path / the_founder().peer).queue_statement(the_founder().bans(ann))
        place.there[the_founder().peer].check_members()
        await place.settle()
        assert place.told[the_founder().peer] == 29
        assert not any(place.there[holder.peer].is_member(ann.peer) for holder in holders)

    played(tmp_path, story)


def test_each_knows_how_long_it_is_a_member(tmp_path: Path) -> None:
    ann = the_founder().invites(not_after=1_003_600).certifies()

    async def story(place: Place) -> None:
        assert place.enter(the_founder()).remaining_s() is None
        mine = place.enter(ann)
        assert mine.remaining_s() == 3600.0
        place.now_s += 3000.0
        assert mine.remaining_s() == 600.0
        place.now_s += 3000.0
        assert mine.remaining_s() is None

    played(tmp_path, story)


def test_a_ban_reaches_everybody_and_ends_connections(tmp_path: Path) -> None:
    """What a command has left for one node is at all nodes, and who is banned is parted from with the reason."""
    ann, bob, eve = (the_founder().invites().certifies() for _ in range(3))

    async def story(place: Place) -> None:
        for holder in (the_founder(), ann, bob, eve):
            place.enter(holder)
        for pair in ((the_founder(), ann), (ann, bob), (bob, eve), (ann, eve)):
            place.connect(*pair)
        await place.settle()
        assert not place.parted
        MemberFiles(tmp_path / the_founder().peer).queue_statement(the_founder().bans(eve))
        place.there[the_founder().peer].check_members()
        await place.settle()
        assert sorted(here for here, there, _ in place.parted if there == eve.peer) == sorted([ann.peer, bob.peer])
        assert all("is banned" in reason for _, _, reason in place.parted)
        assert {peer for peer, _ in place.expelled} == {eve.peer}, "it is told, and ends"
        here = place.there[the_founder().peer]
        assert [here.was_removed(one.peer) for one in (ann, eve, Holder(Identity.ephemeral()))] == [
            False,
            True,
            False,
        ], "who is dialled no more"
        await here.save()
        assert not list((tmp_path / the_founder().peer / "members" / "new").iterdir()), "it was taken"

    played(tmp_path, story)


def test_malformed_statements_cost_their_sender(tmp_path: Path) -> None:
    """Told, or in an answer: each is a signature that is looked at for nothing."""
    ann, bob = the_founder().invites().certifies(), the_founder().invites().certifies()

    async def story(place: Place) -> None:
        for holder in (ann, bob):
            place.enter(holder)
        place.connect(ann, bob)
        await place.settle()
        for number, malformed in enumerate((b"\x00", b"\x00\x01x", b"\xff\xff"), 1):
            with pytest.raises(RequestRefused):
                await place.there[ann.peer].answer(bob.peer, TellStatements(malformed))
            assert place.blamed == {(ann.peer, bob.peer): number}
        place.there[bob.peer].members._statements[b"none"] = b"x"
        await place.there[ann.peer].ask(bob.peer)
        assert place.blamed == {(ann.peer, bob.peer): 4}

    played(tmp_path, story)


def test_who_expires_is_parted_from(tmp_path: Path) -> None:
    ann = the_founder().invites(not_after=1_000_010).certifies()

    async def story(place: Place) -> None:
        for holder in (the_founder(), ann):
            place.enter(holder)
        place.connect(the_founder(), ann)
        await place.settle()
        place.now_s += 10.0
        place.there[the_founder().peer].check_members()
        await place.settle()
        assert not place.parted
        place.now_s += 1.0
        place.there[the_founder().peer].check_members()
        await place.settle()
        assert [(there, "expired" in reason) for _, there, reason in place.parted] == [(ann.peer, True)]

    played(tmp_path, story)


def test_observers_are_told_nothing_of_members_and_are_not_believed(tmp_path: Path) -> None:
    ann = the_founder().invites().certifies()
    asking = ann.certifies(role=Role.OBSERVER)

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        place.doors[one].admit(asking.peer, asking.chain)
        assert one.observes(asking.peer)
        with pytest.raises(RequestRefused, match="only members"):
            await one.answer(asking.peer, TellStatements(b""))
        assert await one.answer(asking.peer, GetStatements(b"")) == Answer(b"", b"")
        one.members.admit(ann.peer, ann.chain, place.now_s)
        one.members.learn(the_founder().prolongs(500))
        told = await one.answer(asking.peer, GetStatements(b""))
        assert told == Answer(b"", join_statements([the_founder().prolongs(500)])), "but of the end of the run"

    played(tmp_path, story)


def test_a_prolonged_run_ends_later_everywhere_and_a_ban_takes_it_back(tmp_path: Path) -> None:
    """A command leaves the statement in one peer's folder; the others hear of it, also those that come later."""
    admin, ann, bob = the_founder().certifies(role=Role.ADMIN), *(the_founder().invites().certifies() for _ in "ab")

    async def story(place: Place) -> None:
        for holder in (admin, the_founder(), ann):
            place.enter(holder)
        place.connect(admin, the_founder())
        place.connect(the_founder(), ann)
        await place.settle()
        one = place.there[admin.peer]
        one._files.queue_statement(admin.prolongs(500))
        one.check_members()
        await place.settle()
        assert place.ends == [(peer, 500) for peer in (admin.peer, FOUNDER.peer_id, ann.peer)]
        place.enter(bob)
        place.connect(bob, ann)
        await place.settle()
        assert place.ends[3:] == [(bob.peer, 500)]
        first = place.there[FOUNDER.peer_id]
        first._files.queue_statement(the_founder().bans(admin))
        first.check_members()
        await place.settle()
        assert dict(place.ends)[bob.peer] == dict(place.ends)[ann.peer] == 0

    played(tmp_path, story)


def test_an_admin_that_prolongs_the_run_again_and_again_is_soon_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statement is one step further, costs everybody two signatures, and is told to all."""
    monkeypatch.setattr(membership_sync_module, "INTRODUCED", 5)
    admin = the_founder().certifies(role=Role.ADMIN)

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        place.enter(admin)
        place.connect(the_founder(), admin)
        await place.settle()
        for last in range(100, 120):
            await one.answer(admin.peer, TellStatements(join_statements([admin.prolongs(last)])))
        assert one.members.prolonged_to < 110
        assert len(one.members.prolongings()) == 1

    played(tmp_path, story)


def test_what_a_command_left_before_the_start_is_kept(tmp_path: Path) -> None:
    """The node knows it from its start, and nobody connects to it."""

    async def story(place: Place) -> None:
        files = MemberFiles(tmp_path / FOUNDER.peer_id)
        files.queue_statement(the_founder().prolongs(500))
        one = place.enter(the_founder())
        one.check_members()
        await one.save()
        assert list((files.folder / "new").iterdir()) == []
        found = members()
        files.load(found)
        assert found.prolonged_to == 500

    played(tmp_path, story)


def test_an_observer_whose_invite_is_revoked_is_parted_from(tmp_path: Path) -> None:
    invite = the_founder().invites()
    asking = invite.certifies(role=Role.OBSERVER)

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        place.doors[one].admit(asking.peer, asking.chain)
        place.links.add(frozenset({the_founder().peer, asking.peer}))
        one.check_members()
        await place.settle()
        assert not place.parted
        assert not one.is_member(asking.peer), "it only asks"
        MemberFiles(tmp_path / the_founder().peer).queue_statement(the_founder().bans(invite))
        one.check_members()
        await place.settle()
        assert [(there, "is revoked" in why) for _, there, why in place.parted] == [(asking.peer, True)]

    played(tmp_path, story)


def test_a_follower_gives_nothing_and_owns_nothing(tmp_path: Path) -> None:
    follower = the_founder().invites(Role.FOLLOWER).certifies(role=Role.FOLLOWER)
    small = the_founder().invites(cap=250).certifies()

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        for holder in (follower, small):
            place.doors[one].admit(holder.peer, holder.chain)
        assert (one.may_contribute(follower.peer), one.most_weight(follower.peer)) == (False, 0.0)
        assert (one.may_contribute(small.peer), one.most_weight(small.peer)) == (True, 0.25)
        assert not one.observes(follower.peer)
        assert one.observes(PeerId("nobody"))

    played(tmp_path, story)


def test_malformed_news_are_refused(tmp_path: Path) -> None:
    ann = the_founder().invites().certifies()

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        place.doors[one].admit(ann.peer, ann.chain)
        forged = membership_log.join_statements([Holder(Identity.ephemeral()).bans(ann)])
        for data in (b"\x00", forged):
            with pytest.raises(RequestRefused):
                await one.answer(ann.peer, TellStatements(data))
        assert one.is_member(ann.peer)

    played(tmp_path, story)


def test_a_record_of_the_directory_counts_only_if_it_is_a_members(tmp_path: Path) -> None:
    ann = the_founder().invites().certifies()

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        assert one.is_announced_by_member(ann.peer, ann.chain)
        assert not one.is_announced_by_member(ann.peer, b"")
        assert not one.is_announced_by_member(Identity.ephemeral().peer_id, ann.chain)

    played(tmp_path, story)


def test_records_of_the_directory_use_up_no_invite(tmp_path: Path) -> None:
    invite = the_founder().invites(uses=2)

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        for guest in [invite.certifies() for _ in range(5)]:
            assert one.is_announced_by_member(guest.peer, guest.chain)
        newcomer = invite.certifies()
        place.doors[one].admit(newcomer.peer, newcomer.chain)
        assert one.is_member(newcomer.peer)

    played(tmp_path, story)


def test_each_peer_merges_contributions_of_as_many_guests_as_an_invite_admits(tmp_path: Path) -> None:
    """Peers that see two guests of one invite in different orders admit one each, and take the other's commits."""
    invite = the_founder().invites(uses=1)
    ann, bob = (the_founder().invites().certifies() for _ in range(2))
    eve, eva = invite.certifies(), invite.certifies()

    async def story(place: Place) -> None:
        for one in (the_founder(), ann, bob, eve, eva):
            place.enter(one)
        for one in (ann, bob):
            place.connect(the_founder(), one)
        place.connect(ann, eve)
        place.connect(bob, eva)
        await place.settle()
        for here, there in ((ann, eva), (bob, eve)):
            with pytest.raises(NotAMemberError, match="admits one peer and has been used"):
                place.connect(here, there)
        for here in (the_founder(), ann, bob):
            assert all(place.there[here.peer].may_contribute(there.peer) for there in (eve, eva)), (
                "a commit may name it"
            )

    played(tmp_path, story)


def test_peers_are_counted_by_the_invites_that_they_came_with(tmp_path: Path) -> None:
    """G2e: by what all peers know alike, so that all judge a commit alike."""
    person, machines = the_founder().invites(uses=1), the_founder().invites(uses=2)
    eve, eva, *fleet = person.certifies(), person.certifies(), *(machines.certifies() for _ in range(3))
    named = the_founder().certifies()

    async def story(place: Place) -> None:
        one = place.enter(the_founder())
        assert one.admitted() == {fingerprint(the_founder().peer)}
        for holder in (eve, named, *fleet[:2]):
            place.doors[one].admit(holder.peer, holder.chain)
        for holder in (eva, fleet[2]):
            one.members.learn(introduction(holder.grant), eve.peer)
        honest = {the_founder().peer, named.peer, eve.peer, *(holder.peer for holder in fleet[:2])}
        assert one.invite_problem(honest) is None
        assert one.invite_problem({eva.peer, fleet[2].peer}) is None, "another peer may have admitted these"
        assert "2 of its peers" in (one.invite_problem({*honest, eva.peer}) or "")
        assert "3 of its peers" in (one.invite_problem({holder.peer for holder in fleet}) or "")
        assert one.admitted() == set(map(fingerprint, honest)), "the others' invites are used up here"

    played(tmp_path, story)


def test_a_peers_own_place_comes_before_others_that_use_its_invite(tmp_path: Path) -> None:
    invite = the_founder().invites(uses=1)
    ann, thief = invite.certifies(), invite.certifies()

    async def story(place: Place) -> None:
        one = place.enter(ann)
        with pytest.raises(NotAMemberError, match="has been used"):
            place.doors[one].admit(thief.peer, thief.chain)
        assert one.remaining_s() is None

    played(tmp_path, story)


def test_what_is_known_is_kept_and_damage_is_survived(tmp_path: Path) -> None:
    files, known = MemberFiles(tmp_path), members()
    ann = the_founder().invites().certifies()
    known.admit(ann.peer, ann.chain, 0.0)
    files.save(known)
    files.queue_statement(the_founder().bans(ann))
    (tmp_path / "members" / "new" / "garbage").write_bytes(b"garbage")

    def read() -> Members:
        found = members()
        files.load(found)
        return found

    assert read().grant_of(ann.peer) is not None
    assert not read().is_member(ann.peer, 0.0)
    assert len(list(files.take_queued(members()))) == 1
    assert len(list(files.take_queued(members()))) == 0
    assert not read().is_member(ann.peer, 0.0), "a crash now loses nothing"
    files.save(known)
    assert read().is_member(ann.peer, 0.0), "whoever takes a statement keeps it"
    (tmp_path / "members" / "statements").write_bytes(b"\xff\xff")
    assert read().grant_of(ann.peer) is None
    assert (files.chain(), files.invite()) == (b"", "")
    files.write_chain(ann.chain)
    assert files.chain() == ann.chain
    files.write_invite("p2pdiloco123")
    assert files.invite() == "p2pdiloco123"
    assert (tmp_path / "members" / "invite").stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------------------------- invites


def made(by: Credentials, peer: PeerId | None = None, role: Role = Role.LEARNER) -> str:
    terms: dict[str, Any] = {"role": role, "cap": NO_CAP, "not_after": NEVER}
    return encode_invite(make_invite(by, bytes(range(16)), addresses=(ADDRESS,), peer=peer, **terms))


def test_whoever_has_an_invite_makes_its_own_certificate_offline() -> None:
    founder = Credentials(RUN, b"", FOUNDER)
    for role in (Role.FOLLOWER, Role.LEARNER, Role.ADMIN):
        joiner = Identity.ephemeral()
        mine = credentials_from_invite(decode_invite(made(founder, role=role)), joiner)
        grant = members().admit(joiner.peer_id, mine.chain, time.time())
        assert (grant.role, grant.depth) == (role, 2)
        assert grant.steps[-1].subject == invite_key(bytes(range(16))).peer_id
        asking = Identity.ephemeral()
        observer = members().admit(asking.peer_id, mine.chain_for(asking.peer_id, Role.OBSERVER), time.time())
        assert observer.role is Role.OBSERVER


def test_an_admins_invite_is_good_where_the_admin_is_known() -> None:
    founder, admin, joiner = Credentials(RUN, b"", FOUNDER), Identity.ephemeral(), Identity.ephemeral()
    appointed = credentials_from_invite(decode_invite(made(founder, admin.peer_id, Role.ADMIN)), admin)
    mine = credentials_from_invite(decode_invite(made(appointed)), joiner)
    known = members()
    with pytest.raises(NotAMemberError):
        known.admit(joiner.peer_id, mine.chain, time.time())
    known.admit(admin.peer_id, appointed.chain, time.time())
    assert known.admit(joiner.peer_id, mine.chain, time.time()).depth == 3


def test_an_invite_for_one_peer_is_of_use_to_no_other() -> None:
    ann = Identity.ephemeral()
    invite = decode_invite(made(Credentials(RUN, b"", FOUNDER), ann.peer_id))
    known = Members(RUN, FOUNDER.peer_id, "list", verify)
    assert known.admit(ann.peer_id, credentials_from_invite(invite, ann).chain, time.time()).role is Role.LEARNER
    with pytest.raises(CredentialsError, match="is for the peer"):
        credentials_from_invite(invite, Identity.ephemeral())


def test_who_tells_what_brings_nobody_new_is_soon_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own chain in a thousand forms: each is signed, and costs everybody two signatures and a file."""
    monkeypatch.setattr(membership_sync_module, "VAIN", 5)
    invite = the_founder().invites()
    eve = invite.certifies(not_after=2_000_000_000)
    friend = invite.certifies()
    again = [invite.certifies(eve.identity, not_after=2_000_000_000 + n) for n in range(1, 9)]
    before = [invite.certifies(eve.identity, not_after=1_900_000_000 + n) for n in range(8)]
    newcomers = [invite.certifies() for _ in range(20)]

    def told(holders: list[Holder]) -> TellStatements:
        return TellStatements(membership_log.join_statements(membership_log.introduction(one.grant) for one in holders))

    async def story(place: Place) -> None:
        hub = place.enter(the_founder())
        for one in (eve, friend):
            place.doors[hub].admit(one.peer, one.chain)
        await hub.answer(eve.peer, told(newcomers))
        assert all(hub.is_member(one.peer) for one in newcomers), "those who come are not counted"
        looked: list[bytes] = []
        learn = hub.members.learn
        monkeypatch.setattr(hub.members, "learn", lambda one, by: looked.append(one) or learn(one, by))
        await hub.answer(eve.peer, told(again))
        assert len(looked) == 5
        await hub.answer(friend.peer, told(before))
        assert len(looked) == 5, "all who came with one invite have one allowance"
        place.now_s += 3 / membership_sync_module.VAIN_PER_S
        await hub.answer(friend.peer, told(before))
        assert len(looked) == 8
        until = hub.members.grant_of(eve.peer)
        assert until is not None
        assert until.not_after == 2_000_000_000, "others' words replace no chain that its key has shown"
        late = invite.certifies()
        await hub.answer(friend.peer, told([*before, late]))
        assert hub.is_member(late.peer), "whoever used it up keeps nobody out"
        await hub.answer(friend.peer, TellStatements(membership_log.join_statements([the_founder().bans(late)])))
        assert not hub.is_member(late.peer)

    played(tmp_path, story)


def test_made_up_introductions_are_bounded_and_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """300 over one connection, of keys that nobody holds, by the invite with which others come, too."""
    monkeypatch.setattr(membership_sync_module, "INTRODUCED", 280)
    invite = the_founder().invites()
    eve, bob, late = invite.certifies(), invite.certifies(), invite.certifies()
    made_up = [invite.certifies() for _ in range(300)]
    told = TellStatements(membership_log.join_statements(membership_log.introduction(one.grant) for one in made_up))

    async def story(place: Place) -> None:
        hub = place.enter(the_founder())
        for one in (eve, bob, late):
            place.enter(one)
        place.connect(the_founder(), eve)
        place.connect(the_founder(), bob)
        await place.settle()
        looked: list[bytes] = []
        learn = hub.members.learn
        monkeypatch.setattr(hub.members, "learn", lambda one, by: looked.append(one) or learn(one, by))
        await hub.answer(eve.peer, told)
        await place.settle()
        assert len(looked) == 280
        assert "more membership statements than its rate limit" in caplog.text
        assert len(hub.members.known()) == 3 + rules.UNSEEN_LIMIT
        assert len(place.there[bob.peer].members.known()) <= 3 + rules.UNSEEN_LIMIT // 2, "others are told of few"
        place.connect(the_founder(), late)
        await place.settle()
        place.connect(bob, late)
        await place.settle()
        assert [place.there[one].is_member(late.peer) for one in (FOUNDER.peer_id, bob.peer)] == [True, True]
        place.now_s += 5 / membership_sync_module.INTRODUCED_PER_S
        await hub.answer(eve.peer, told)
        assert len(looked) == 285

    played(tmp_path, story)


def test_a_banned_peer_does_not_come_back_with_a_new_key_anywhere(tmp_path: Path) -> None:
    """Ban and closing are left for one node; a peer to which the new key came before that parts from it, too."""
    invite = the_founder().invites()
    ann, bob, eve, again, never = (invite.certifies() for _ in range(5))

    async def story(place: Place) -> None:
        for holder in (the_founder(), ann, bob, eve, again):
            place.enter(holder)
        for pair in ((the_founder(), ann), (the_founder(), eve), (ann, bob)):
            place.connect(*pair)
        await place.settle()
        files = MemberFiles(tmp_path / the_founder().peer)
        files.queue_statement(the_founder().bans(eve))
        files.queue_statement(the_founder().closes(invite, ann, bob))
        place.connect(bob, again)
        place.there[the_founder().peer].check_members()
        await place.settle()
        assert {there for _, there, _ in place.parted} == {eve.peer, again.peer}
        assert {peer for peer, _ in place.expelled} == {eve.peer, again.peer}
        for one in (the_founder(), ann, bob):
            assert [place.there[one.peer].is_member(peer.peer) for peer in (ann, bob, eve, again)] == [
                True,
                True,
                False,
                False,
            ]
            with pytest.raises(NotAMemberError, match="is closed to newcomers"):
                place.doors[place.there[one.peer]].admit(never.peer, never.chain)

    played(tmp_path, story)


def test_who_asks_for_members_again_and_again_is_answered_seldom(tmp_path: Path) -> None:
    ann = the_founder().invites().certifies()

    async def story(place: Place) -> None:
        hub = place.enter(the_founder())
        place.doors[hub].admit(ann.peer, ann.chain)
        for _ in range(membership_sync_module.ANSWERS):
            assert (await hub.answer(ann.peer, GetStatements(b""))).payload
        with pytest.raises(RequestRefused, match="retry in a few seconds"):
            await hub.answer(ann.peer, GetStatements(b""))
        place.now_s += 1 / membership_sync_module.ANSWERS_PER_S
        assert (await hub.answer(ann.peer, GetStatements(b""))).payload

    played(tmp_path, story)
