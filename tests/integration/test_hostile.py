"""A peer that breaks the rules over real connections, in a live run: what it sends is dropped and counted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop
from swarm import (
    LOOPBACK,
    START_S,
    contributors,
    ended,
    learners_held,
    log_lines,
    report_of,
    swarm_in,
    until,
    write_config,
)
from waiting import until as until_in_loop

from p2pdiloco.codec.compression import compress
from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.discovery.directory import Directory
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.peer.signatures import signed
from p2pdiloco.protocol import messages
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import DIGEST_BYTES, Digest, PeerId, RunId, ShardId, digest_of, learner_id
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.swarm.run_lookup import RunLookup
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Observer, Transport
from p2pdiloco.wire.control_messages import CommitParts, decode_message, encode, join_commit
from p2pdiloco.wire.directory_records import PeerRecord

GARBAGE = (b"no zstd at all", compress(bytes(1000)), compress(b"\xff" * 1000))
KINDS = {"message", "payload", "contribution"}
UNFORGED_ROUNDS = 12
"""Rounds in which it forges nothing yet: four forged messages end its connection, and what is garbage comes first."""
HEAVY = 30_000
"""Tokens that a lying head claims: as many as a step of the largest batch that is believed."""


class Hostile(Observer):
    """Takes part well enough to be live, and answers everything with something that is wrong."""

    def __init__(self, identity: Identity, run: RunId) -> None:
        self.identity = identity
        self.run = run
        self.learner = learner_id(identity.peer_id, "evil")
        self.transport = Transport(identity, listen=LOOPBACK, run=run, version=WIRE_VERSION)
        self._sequence = 0
        self._garbage = itertools.cycle(GARBAGE)
        self._rounds: Counter[PeerId] = Counter()

    def admit(self, peer: PeerId, body: bytes, size: int) -> bytes:
        """Whatever there is: what is honest can be spoiled."""
        return body

    def message(self, peer: PeerId, body: bytes, payload: memoryview | None) -> None:
        match decode_message(body):
            case msg.Heartbeat() as beat:
                self._beat(peer, beat)
            case msg.Round() as opened:
                self._rounds[peer] += 1
                self.transport.send(peer, b"\x93 this is no message")
                for head in opened.heads:
                    self._contribute(peer, head, opened.step)
            case msg.Commit() as commit if payload is not None:
                self._commit(peer, commit.header, split_of(commit.header, bytes(payload)))
            case _:
                pass

    def _beat(self, peer: PeerId, beat: msg.Heartbeat) -> None:
        self._sequence += 1
        mine = msgspec.structs.replace(
            beat,
            sequence=self._sequence,
            echo=beat.sequence,
            echo_held_s=0.0,
            phase="training",
            is_participating=True,
            weight=0.0,
        )
        self.transport.send(peer, encode(mine))

    def _contribute(self, peer: PeerId, head: msg.Head, step: int) -> None:
        """Contribute garbage, without a payload, with another one than announced, and in another learner's name."""
        payload = next(self._garbage)
        good = msg.Contribution(head.shard, head, step, self._given(head.shard, head.id, payload), len(payload))
        self.transport.send(peer, encode(good), payload)
        self.transport.send(peer, encode(good))
        if not self._forges(peer):
            return
        for lie in ({"learner": learner_id(peer, "stolen")}, {"tokens_to": 10**9}):
            said = msgspec.structs.replace(good.contributor, **lie)
            self.transport.send(peer, encode(msgspec.structs.replace(good, contributor=said)), payload)
        self.transport.send(peer, encode(good), b"something else")

    def _forges(self, peer: PeerId) -> bool:
        return self._rounds[peer] > UNFORGED_ROUNDS

    def _given(self, shard: ShardId, base: Digest, payload: bytes) -> msg.Contributor:
        """Tokens of our own, signed as they should be."""
        mine = msg.Contributor(self.learner, 0, HEAVY, 0, 1)
        return signed(self.identity, self.run, shard, base, mine, digest_of(payload))

    def _commit(self, peer: PeerId, header: msg.CommitHeader, honest: CommitParts) -> None:
        """The next version: in order but for its signature; signed by nobody and spoilt; signed by us, with what others
        gave to the version before; with tokens of others' learners; and a head that does not exist."""
        payload = honest.gradient[:-2] + b"\xff\xff"
        parent = msg.commit_id(header)
        following = msgspec.structs.replace(
            header,
            version=header.version + 1,
            parent=parent,
            contributors=(self._given(header.shard, parent, payload),),
            tokens=header.tokens + HEAVY,
            payload=digest_of(payload),
        )
        unsigned = msgspec.structs.replace(following, payload=header.payload)
        nobody = CommitParts(bytes(SIGNATURE_BYTES), honest.digests, payload)
        if self._forges(peer):
            self.transport.send(peer, encode(msg.Commit(unsigned)), join_commit(honest))
            self.transport.send(peer, encode(msg.Commit(following)), join_commit(nobody))
        ours = msgspec.structs.replace(following, owner=self.identity.peer_id)
        (mine,) = following.contributors
        theirs = msgspec.structs.replace(mine, learner=learner_id(peer, "stolen"), tokens_to=2**50)
        for named in ((mine,), header.contributors, (theirs,)) if self._forges(peer) else ((mine,),):
            said = msgspec.structs.replace(ours, contributors=named)
            signature = self.identity.sign(messages.signed_commit_bytes(msg.commit_id(said)))
            self.transport.send(peer, encode(msg.Commit(said)), join_commit(nobody._replace(signature=signature)))
        head = msg.Head(header.shard, header.version + 9, digest_of(b"nothing"), header.tokens + HEAVY)
        self.transport.send(peer, encode(msg.Heads((head,), header.step)))


def split_of(header: msg.CommitHeader, data: bytes) -> CommitParts:
    """The parts of an honest commit; its shard's size, which a stranger does not know, shows in the digests."""
    lengths = range(SIGNATURE_BYTES, len(data), DIGEST_BYTES)
    end = next(at for at in lengths if digest_of(data[SIGNATURE_BYTES:at]) == header.result)
    return CommitParts(data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:end], data[end:])


async def attack(address: str, victims: list[Member], begin: Callable[[], object]) -> PeerId:
    """Join as ``Hostile`` and stay until the victims have counted every kind of fault, made some versions, and shut it
    out."""
    identity = Identity.ephemeral()
    async with Directory(identity, listen=[LOOPBACK], announce=[], initial_peers=[address]) as directory:
        (run,) = await RunLookup(directory).list_runs()
        hostile = Hostile(identity, run)
        async with hostile.transport.serve(hostile) as transport:
            for record in (await directory.peers(run)).values():
                for where in msgspec.msgpack.decode(record, type=PeerRecord).addresses:
                    await transport.dial(where)
            assert len(transport.peers()) == len(victims)
            began = [version_of(victim) for victim in victims]
            begin()

            def is_enough() -> bool:
                have_moved = all(version_of(v) >= start + 4 for v, start in zip(victims, began, strict=True))
                seen = [{what for _, what in faults(victim)} for victim in victims]
                return have_moved and all(seen) and set().union(*seen) >= KINDS and not transport.peers()

            await until_in_loop(is_enough, START_S, "versions, every kind of fault, and the end of both connections")
    return identity.peer_id


def version_of(member: Member) -> int:
    member.refresh()
    assert member.is_running, log_lines(member)[-20:]
    return member.view.version


def faults(member: Member) -> set[tuple[PeerId, str]]:
    """Who did what, as far as it has counted."""
    folder = member.run_folder()
    assert folder is not None
    lines = map(msgspec.json.decode, (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:-1])
    return {(PeerId(line["peer"]), line["what"]) for line in lines if line["event"] == "fault"}


def test_a_hostile_peer_does_no_harm(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=400, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        bob = swarm.join("B", address)
        with ExitStack() as stack:
            stack.enter_context(learners_held(ann, bob))
            # a newcomer with one honest donor of two would wait for a second that stands by the state
            until(bob, lambda: bob.view.current_at and bob.view.live == 2, what="the second peer's state")
            evil = uvloop.run(attack(address, [ann, bob], begin=stack.close))
        reports = []
        for member in (ann, bob):
            assert ended(member, 2 * START_S) == 0, log_lines(member)
            reports.append(report_of(member))
    assert reports[0]["digests"] == reports[1]["digests"]
    assert sum(report["tokens_trained"] for report in reports) == reports[0]["tokens_merged"]
    assert not any(evil in contributors(commit) for member in (ann, bob) for commit in member.view.commits)
    for report in reports:
        assert report["faults"]
        assert report["tokens_unmerged"] == 0
    assert set(reports[0]["faults"]) | set(reports[1]["faults"]) >= KINDS
    for member in (ann, bob):
        assert {peer for peer, _ in faults(member)} == {evil}, "nobody answers for what another said in its name"
        told = "\n".join(log_lines(member))
        assert "too much data that cannot be parsed or is forged" in told, "four forged messages end its connection"
        assert f"commit of {evil} rejected: its " in told, "its record, or its length, does not follow from the chain"
        assert "Traceback" not in told
        assert "defect" not in told
        assert len(log_lines(member)) < 500
