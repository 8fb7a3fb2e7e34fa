"""What a peer makes of what its certificate lets another one do."""

from __future__ import annotations

from pathlib import Path

from actors import genesis
from troupe import Stage, act

from p2pdiloco.peer.standing import Everybody
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.wire.bodies import encode


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
            ann.peer._standing = Follower()
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
            bob = await stage.add("bob", genesis(stage.manifest), is_unreachable=True)
            await stage.ready(bob)
            await stage.wait(3.0)
            stage.catch = lambda sender, to, message: isinstance(message, msg.Contribution)
            await stage.train(bob, 1.0, 1.0)
            caught = stage.caught[0]
            ann.peer._standing = Follower()
            assert not ann.peer.admit(bob.id, encode(caught.message), len(caught.payload))
            await stage.deliver(ann, bob.id, caught.message, caught.payload)
            assert (ann.faults(), ann.versions) == ({"contribution": 1}, [0, 0])
            ann.peer._standing = Everybody()
            assert ann.peer.admit(bob.id, encode(caught.message), len(caught.payload))

    act(story)


def test_who_observes_is_no_peer(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found(has_learner=False)
            ann.peer._standing = Observer()
            ann.peer.connected(PeerId("eve"), "/ip4/10.0.0.1/tcp/1", False, True)
            await stage.settle()
            assert PeerId("eve") not in ann.machine.core.membership.peers
            ann.peer._standing = Everybody()
            ann.peer.connected(PeerId("eve"), "/ip4/10.0.0.1/tcp/1", False, True)
            await stage.settle()
            assert PeerId("eve") in ann.machine.core.membership.peers

    act(story)
