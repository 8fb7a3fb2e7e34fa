"""What a peer makes of what its certificate lets another one do."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from actors import genesis
from troupe import Stage, act

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.wire.control_messages import encode
from tests.peer_sim.members import Everybody


class Follower(Everybody):
    """Everybody else is a follower."""

    def may_contribute(self, peer: PeerId) -> bool:
        return False

    def most_weight(self, peer: PeerId) -> float:
        return 0.25


class Observer(Everybody):
    """Everybody else only asks."""

    def observes(self, peer: PeerId) -> bool:
        return True


def test_a_weight_counts_for_what_the_certificate_says(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            ann.peer.verifier.permissions = Follower()
            bob = await stage.add("bob", genesis(stage.manifest), weight=9.0)
            await stage.wait(3.0)
            beat = ann.machine.core.membership.peers[bob.id].beat
            assert beat is not None
            assert beat.weight == 0.25

    act(story)


def test_what_a_follower_contributes_is_not_taken(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            bob = await stage.beside()
            stage.catch = lambda sender, to, message: isinstance(message, msg.Contribution)
            await stage.train(bob, 1.0, 1.0)
            caught = stage.caught[0]
            ann.peer.verifier.permissions = Follower()
            assert not ann.peer.admit(bob.id, encode(caught.message), len(caught.payload))
            await stage.deliver(ann, bob.id, caught.message, caught.payload)
            assert (ann.faults(), ann.versions) == ({"contribution": 1}, [0, 0])
            ann.peer.verifier.permissions = Everybody()
            assert ann.peer.admit(bob.id, encode(caught.message), len(caught.payload))

    act(story)


class Counted(Everybody):
    """An invite admits fewer peers than it has guests."""

    def invite_problem(self, peers: Collection[PeerId]) -> str | None:
        return "too many came with one invite"

    def admitted(self) -> frozenset[int]:
        return ADMITTED


ADMITTED = frozenset({1, 2})


def test_a_commit_of_more_guests_than_an_invite_admits_is_dropped(tmp_path: Path) -> None:
    """G2e: keys that an owner made itself would be what all others' contributions are measured by."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside(has_learner=False)
            bob.driver.payload_cache._register = Counted()
            await stage.train(ann, 1.0, 1.0)
            assert (ann.versions, bob.versions) == ([0, 1], [0, 0])
            assert bob.faults() == {"payload": 1}
            failed = [event for event in bob.events if isinstance(event, ev.Failed)]
            assert [(event.work, event.shard, event.peer) for event in failed] == [("commit", 1, ann.id)]

    act(story)


def test_a_peer_learns_of_places_with_each_heartbeat(tmp_path: Path) -> None:
    """R2b: before it takes a list of peers for true."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            ann.peer.verifier.permissions = Counted()
            assert ann.peer.machine.view.admitted is None
            await stage.beside()
            assert ann.peer.machine.view.admitted is ADMITTED

    act(story)


class Newcomer(Everybody):
    """Nobody is known who was not asked for."""

    def __init__(self, *, told: bool) -> None:
        self.asked: list[PeerId] = []
        self._is_told = told

    def was_member(self, peer: PeerId) -> bool:
        return bool(self.asked) and self._is_told

    async def ask(self, peer: PeerId) -> None:
        self.asked.append(peer)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_commit_waits_until_its_sender_was_asked_whom_it_names(tmp_path: Path, is_told: bool) -> None:
    """Once for all that came meanwhile; what names somebody unknown even then is dropped."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            bob = await stage.beside(has_learner=False)
            bob.driver.payload_cache._register = bob.peer.verifier.permissions = newcomer = Newcomer(told=is_told)
            await stage.train(ann, 1.0, 1.0)
            assert newcomer.asked == [ann.id]
            assert bob.versions == ([0, 1] if is_told else [0, 0])
            assert bob.faults() == ({} if is_told else {"payload": 1})
            await stage.train(ann, 1.0, 1.0)
            assert newcomer.asked == [ann.id] * (1 if is_told else 2), "whoever is known needs no question"

    act(story)


def test_a_commit_of_who_is_no_member_is_dropped_by_a_peer(tmp_path: Path) -> None:
    """As a node sets it up."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            permissions = Newcomer(told=False)
            bob = await stage.add("bob", genesis(stage.manifest), has_learner=False, permissions=permissions)
            await stage.wait(3.0)
            await stage.train(ann, 1.0, 1.0)
            assert bob.versions == [0, 0]
            assert bob.faults() == {"payload": 1}

    act(story)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_state_is_taken_when_its_donor_has_told_who_made_it(tmp_path: Path, is_told: bool) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            await stage.train(ann, 1.0, 1.0)
            newcomer = Newcomer(told=is_told)
            bob = await stage.add("bob", has_learner=False, permissions=newcomer)
            await stage.wait(3.0)
            assert set(newcomer.asked) == {ann.id}
            assert bob.versions == ([0, 1] if is_told else [0, -1])
            assert bob.faults() == ({} if is_told else {"state": 1})

    act(story)


def test_who_observes_is_no_peer(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            ann.peer.verifier.permissions = Observer()
            ann.peer.connected(PeerId("eve"), "/ip4/10.0.0.1/tcp/1", False, True)
            await stage.settle()
            assert PeerId("eve") not in ann.machine.core.membership.peers
            ann.peer.verifier.permissions = Everybody()
            ann.peer.connected(PeerId("eve"), "/ip4/10.0.0.1/tcp/1", False, True)
            await stage.settle()
            assert PeerId("eve") in ann.machine.core.membership.peers

    act(story)
