"""Owners that make two commits of one version are barred, and a restart does not forget it: whole peers on a stage."""

from __future__ import annotations

from pathlib import Path

import msgspec
from actors import FOUNDER, genesis
from troupe import Member, Stage, act

from p2pdiloco.codec.digests import list_bytes
from p2pdiloco.peer.convictions import FILE, ConvictionFile
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.wire.control_messages import CommitParts, encode, join_commit, split_commit


async def followed(stage: Stage) -> tuple[Member, Member]:
    """The founder, who owns everything, and a follower."""
    ann = await stage.found()
    bob = await stage.beside(has_learner=False)
    return ann, bob


def test_a_peer_that_makes_two_commits_of_a_version_owns_no_more(tmp_path: Path) -> None:
    """The founder itself, with a changed program; also where the second comes in a state's lineage."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            cat = await stage.add("cat", genesis(stage.manifest), has_learner=False, weight=0.0)
            await stage.wait(3.0)
            stage.catch = lambda sender, to, message: isinstance(message, msg.Commit)
            await stage.train(ann, 1.0, 1.0)
            caught = next(caught for caught in stage.caught if caught.to == bob.id)
            stage.catch = lambda sender, to, message: False
            assert isinstance(caught.message, msg.Commit)
            header, parts = caught.message.header, split_commit(memoryview(caught.payload), list_bytes(64))
            second = msgspec.structs.replace(header, step=header.step + 1)
            for one in (header, second):
                signature = FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(one)))
                sent = CommitParts(signature, parts.digests, parts.gradient)
                await stage.deliver(bob, ann.id, msg.Commit(one), join_commit(sent))
            assert bob.faults() == {"equivocation": 1}
            await stage.settle()
            assert all(ann.id in member.machine.view.barred for member in (bob, cat)), "cat was told"

    act(story)


def test_a_restart_forgets_no_ban_that_is_running(tmp_path: Path) -> None:
    """Neither what was proved nor what was refused here; what lies there and is no proof counts for nothing."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            await stage.train(ann, 1.0, 1.0)
            header = bob.machine.core.chains[1].log[-1]
            second = msgspec.structs.replace(header, step=header.step + 1)
            genuine = [FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(one))) for one in (header, second)]
            bob.driver.feed(ev.Contradicted(msg.Equivocation(header, second, genuine[0], genuine[1])))
            bob.machine.barred_owners.bar(PeerId("eve"), ShardId(0), 1)
            await stage.wait(5.0)
            path = bob.peer.options.folder / FILE
            assert path.exists()
            stage.kill(ann)  # who would tell of it again
            for spoilt, barred in ((False, {ann.id, "eve"}), (True, {"eve"})):
                if spoilt:
                    forged = msg.Equivocation(header, second, bytes(64), genuine[1])
                    known = msgspec.structs.replace(bob.machine.view.convictions(), proofs=(forged,))
                    path.write_bytes(encode(known))
                stage.kill(bob)
                bob = await stage.add("bob", genesis(stage.manifest), has_learner=False, weight=0.0)
                assert bob.machine.view.barred == barred
            path.write_bytes(b"nonsense")
            assert ConvictionFile(bob.peer.options.folder, bob.host).load().proofs == ()

    act(story)


def test_a_commit_that_proves_something_is_taken_before_anything_is_swept(tmp_path: Path) -> None:
    """Liars' seeds 70 and 122: its payload was gone before the machine had heard of it."""

    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            stage.catch = lambda sender, to, message: isinstance(message, msg.Commit)
            await stage.train(ann, 1.0, 1.0)
            (caught,) = stage.caught
            assert isinstance(caught.message, msg.Commit)
            header, parts = caught.message.header, split_commit(memoryview(caught.payload), list_bytes(64))
            too_far = msgspec.structs.replace(header, step=10**6)
            for one, version in ((too_far, 0), (header, 1)):
                bob.driver.payload_cache._swept_at = bob.host.now() - 10.0 * version
                signature = FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(one)))
                sent = CommitParts(signature, parts.digests, parts.gradient)
                await stage.deliver(bob, ann.id, msg.Commit(one), join_commit(sent))
                assert bob.versions == [0, version]
            assert ann.id in bob.machine.view.barred
            assert not any(isinstance(event, ev.Failed) for event in bob.events), "no state was fetched instead"

    act(story)


def test_a_proof_that_is_none_is_its_senders_fault(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann, bob = await followed(stage)
            await stage.train(ann, 1.0, 1.0)
            header = bob.machine.core.chains[1].log[-1]
            genuine = FOUNDER.sign(messages.signed_commit_bytes(msg.commit_id(header)))
            second = msgspec.structs.replace(header, step=header.step + 1)
            for number, signature in enumerate((bytes(64), genuine), 1):
                await stage.deliver(bob, ann.id, msg.Equivocation(header, second, genuine, signature))
                assert bob.faults() == {"payload": number}
                assert not bob.machine.view.barred

    act(story)
