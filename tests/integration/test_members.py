"""A private run of real nodes, as ``p2pdiloco start`` founds it: who has its invite takes part, nobody else."""

from __future__ import annotations

import json
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest
import uvloop
from event_lines import faults_of
from forked import run
from swarm import PEER, START_S, advance, contributes, ended, log_lines, printed, swarm_in, until, write_config
from waiting import wait_until

from p2pdiloco.access.certificates import CERTIFICATE_BYTES, HINT_BYTES, NO_CAP, Role
from p2pdiloco.access.invite_code import TEXT_LIMIT, Invite, decode_invite, encode_invite
from p2pdiloco.access.membership_log import INTRODUCTION, join_statements
from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.net.authorization import JoinerAuthorizer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.observability.log_reader import lines
from p2pdiloco.swarm.credentials import Credentials, credentials_from_invite, invite_key, make_invite
from p2pdiloco.swarm.run_lookup import observer_transport
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Observer, PeerRefused, Transport
from p2pdiloco.util.status_pipe import Invited
from p2pdiloco.wire.control_messages import TellStatements, encode


def command(*words: str, state: Path) -> tuple[int, str]:
    """A command, to its end: exit status and all that it said."""
    done = run(*words, "--state", state, timeout_s=START_S)
    return done.returncode, done.stdout + done.stderr


def has_logged(member: Member, *words: str) -> bool:
    return any(all(word in line for word in words) for line in log_lines(member))


def invited(member: Member) -> str:
    """The invite that a founder reports: a terminal shows it, and a file that keeps the output does not."""
    invited = member.wait_for(Invited, START_S)
    assert f"to join from another machine:  p2pdiloco join {invited.invite}\n" in str(invited)
    assert "whoever has it counts as up to 256 peers" in str(invited)
    assert "for another person: p2pdiloco members add" in str(invited)
    assert printed(member, "to join from another machine:") == invited.public
    assert printed(member, invited.invite) is None
    assert Path(invited.file).read_text() == invited.invite
    return invited.invite


async def refused(opened: AbstractAsyncContextManager[Transport], address: str) -> str:
    """What a stranger who dials is told; it is told nothing else."""
    async with opened as transport:
        with pytest.raises(PeerRefused) as told:
            await transport.dial(address)
        assert transport.peers() == []
    return str(told.value)


@pytest.mark.timeout(600)
def test_who_has_the_invite_takes_part_and_nobody_else_learns_of_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, access="invite", inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        bootstrap = swarm.start_bootstrap()
        ann = swarm.launch("A", ["start", str(config), "--bootstrap", bootstrap])
        text = invited(ann)
        assert len(text) <= TEXT_LIMIT
        bob = swarm.launch("B", ["join", text])
        until(ann, lambda: contributes(ann, bob, 0), what="contributions of who has the invite")

        # Strangers: who asks the directory, who knows a peer's address, and who knows even the run.
        status, said = command("status", bootstrap, state=tmp_path / "stranger")
        assert status == 3, said
        assert "ask a member for an invite" in said
        invite = decode_invite(text)
        founder = Identity.load_or_create(ann.folder / "identity.key")
        address = data_address(ann)
        told = uvloop.run(refused(observer_transport(Identity.ephemeral()), address))
        assert "ask the run's founder for an invite" in told
        me = Identity.ephemeral()
        knows = Transport(me, listen="", run=invite.run, version=WIRE_VERSION, authorizer=JoinerAuthorizer(b""))
        assert "shows no certificate" in uvloop.run(refused(knows.serve(Observer()), address))

        # Expired, and signed by somebody else: their users are told, and we see it in our log.
        mine = Credentials(invite.run, b"", founder)
        expired = made(invite, mine, not_after=int(time.time()) - 5)
        status, said = command("join", expired, *PEER, "--data", str(tmp_path / "corpus"), state=tmp_path / "late")
        assert (status, "expired" in said) == (3, True), said
        other = made(invite, Credentials(invite.run, b"", Identity.ephemeral()), not_after=int(time.time()) + 500)
        status, said = command("join", other, *PEER, "--data", str(tmp_path / "corpus"), state=tmp_path / "other")
        assert (status, "its signer is not an admin" in said) == (3, True), said
        for words in ("for an invite", "shows no certificate", "expired at", "its signer is not an admin"):
            assert has_logged(ann, "dropped a stranger", words) or has_logged(bob, "dropped a stranger", words), words

        # A peer's address that somebody else has taken is noticed by who dials it.
        async def stolen() -> None:
            host = address.partition("/p2p/")[0]
            async with observer_transport(Identity.ephemeral()) as transport:
                with pytest.raises(DialError, match="expected"):
                    await transport.dial(f"{host}/p2p/{Identity.ephemeral().peer_id}")

        uvloop.run(stolen())

        # Members ask with the invite, and the invite can be revoked with all that came from it.
        status, said = command("status", text, state=tmp_path / "asking")
        assert (status, said.count("training")) == (0, 2), said
        for name, state in (("tiny", ann.folder), ("tiny", bob.folder), (invite.run[:12], bob.folder)):
            status, said = command("status", name, state=state)
            assert (status, said.count("training")) == (0, 2), said
        assert command("status", "nobody's", state=bob.folder)[0] == 2
        corpus = str(tmp_path / "corpus")
        status, said = command(
            "doctor", text, "--data", corpus, "--seconds", "0.1", "--json", state=tmp_path / "asking"
        )
        told = json.loads(said)
        assert status == 0, said
        assert told["would_give"][invite.run]["tokens_per_s"] > 0
        assert {"clock", "reach", "packets", "speed", "memory", "link"} <= {one["subject"] for one in told["findings"]}
        for member in (ann, bob):
            log = next(member.folder.glob("*/metrics.jsonl"))
            assert not [fault for line in lines(log) for fault in faults_of(line)], "as docs/watching.md says"
        status, said = command("members", state=ann.folder)
        assert status == 0, said
        assert "the founder" in said
        bob.refresh()
        wait_until(lambda: bob.view.peer in command("members", state=ann.folder)[1], START_S, "bob among the members")
        status, said = command("members", "ban", text, state=ann.folder)
        assert status == 0, said
        wait_until(lambda: has_logged(ann, "disconnecting a peer", "is revoked"), START_S, "the end of a membership")
        assert ended(bob) == 2
        assert has_logged(bob, "p2pdiloco:", "is revoked")
        advance(ann, 2)
        status, said = command("join", text, *PEER, "--data", str(tmp_path / "corpus"), state=tmp_path / "again")
        assert (status, "is revoked" in said) == (3, True), said
        assert "its invite is revoked" in command("members", state=ann.folder)[1]

        # Another invite is another matter; its holder learns of the ban.
        status, said = command("members", "add", "--expires", "2h", "--max-weight", "0.5", state=ann.folder)
        assert status == 0, said
        eve = swarm.launch("E", ["join", said.strip()])
        until(ann, lambda: contributes(ann, eve, 0), what="contributions of who has the new invite")
        wait_until(lambda: "its invite is revoked" in command("members", state=eve.folder)[1], START_S, "the ban")
        for member in (ann, eve):
            member.process.terminate()
        for member in (eve, ann):
            assert ended(member) == 0


@pytest.mark.timeout(600)
def test_a_banned_peer_does_not_come_back_and_made_up_members_keep_nobody_out(tmp_path: Path) -> None:
    """All by one invite: a peer introduces 300 keys that nobody holds, honest ones come, and it is banned."""
    config = write_config(tmp_path, access="invite", inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        ann = swarm.launch("A", ["start", str(config), "--bootstrap", swarm.start_bootstrap()])
        text = invited(ann)
        uvloop.run(introduce(300, decode_invite(text), data_address(ann)))
        bob = swarm.launch("B", ["join", text])
        until(ann, lambda: contributes(ann, bob, 0), what="contributions of an honest newcomer")
        eve = swarm.launch("E", ["join", text])
        until(ann, lambda: contributes(ann, eve, 0), what="contributions of who will be banned")
        wait_until(lambda: eve.view.peer in command("members", state=ann.folder)[1], START_S, "eve among the members")
        wait_until(lambda: bob.view.peer in command("members", state=ann.folder)[1], START_S, "bob among the members")

        status, said = command("members", "ban", eve.view.peer, state=ann.folder)
        assert status == 0, said
        assert "nobody new is let in by it; a new invite for others: p2pdiloco members add" in said
        assert ended(eve) == 2
        for name in ("new", "newer"):
            status, said = command("join", text, *PEER, "--data", str(tmp_path / "corpus"), state=tmp_path / name)
            assert (status, "is closed to newcomers" in said) == (3, True), said
        advance(ann, 2)
        bob.refresh()
        ann.refresh()
        until(ann, lambda: contributes(ann, bob, ann.view.version - 1), what="contributions of who stays")
        bob.process.terminate()
        assert ended(bob) == 0
        before = ann.view.version
        bob = swarm.launch("B", ["join", text])
        until(ann, lambda: contributes(ann, bob, before), what="contributions of who stays, and came back")

        status, said = command("members", "add", state=ann.folder)
        assert status == 0, said
        fay = swarm.launch("F", ["join", said.strip()])
        until(ann, lambda: contributes(ann, fay, 0), what="contributions of who has the new invite")
        for member in (fay, bob, ann):
            member.process.terminate()
        for member in (fay, bob, ann):
            assert ended(member) == 0


@pytest.mark.timeout(600)
def test_an_invite_for_one_person_is_one_peer_whatever_its_holder_does(tmp_path: Path) -> None:
    """Four keys of one invite, and 300 that nobody holds: one takes part, and honest newcomers are not kept out."""
    config = write_config(tmp_path, access="invite", inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        ann = swarm.launch("A", ["start", str(config), "--bootstrap", swarm.start_bootstrap()])
        bob = swarm.launch("B", ["join", invited(ann)])
        until(ann, lambda: contributes(ann, bob, 0), what="contributions of the founder's other machine")
        status, theirs = command("members", "add", state=ann.folder)
        assert status == 0, theirs
        invite, addresses = decode_invite(theirs), [data_address(ann), data_address(bob)]
        key = tmp_path / "eve.key"
        for address in addresses:
            uvloop.run(introduce(300, invite, address, Identity.load_or_create(key)))
        eve = swarm.launch("E", ["join", theirs.strip(), "--identity", str(key)])
        until(ann, lambda: contributes(ann, eve, 0), what="contributions of who came first by the invite")
        until(bob, lambda: contributes(bob, eve, 0), what="the same at the other peer")
        for number in range(3):
            chain = credentials_from_invite(invite, other := Identity.ephemeral()).chain
            for address in addresses:
                door = JoinerAuthorizer(chain)
                opened = Transport(other, listen="", run=invite.run, version=WIRE_VERSION, authorizer=door)
                told = uvloop.run(refused(opened.serve(Observer()), address))
                assert "admits one peer and has been used: ask for another one, or join with the identity.key" in told
            state = tmp_path / f"eve {number}"
            status, said = command("join", theirs.strip(), *PEER, "--data", str(tmp_path / "corpus"), state=state)
            assert (status, "admits one peer and has been used" in said) == (3, True), said
        status, said = command("status", theirs.strip(), state=tmp_path / "asking")
        assert (status, said.count("training")) == (0, 3), "who asks takes no place"
        status, text = command("members", "add", state=ann.folder)
        assert status == 0, text
        fay = swarm.launch("F", ["join", text.strip()])
        until(ann, lambda: contributes(ann, fay, 0), what="contributions of an honest newcomer")
        until(bob, lambda: contributes(bob, fay, 0), what="the same at the other peer")
        eve.process.terminate()
        assert ended(eve) == 0
        ann.refresh()
        before = ann.view.version
        eve = swarm.launch("E", ["join", theirs.strip(), "--identity", str(key)])
        until(ann, lambda: contributes(ann, eve, before), what="contributions of who came back with its key")
        for member in (eve, fay, bob, ann):
            member.process.terminate()
        for member in (eve, fay, bob, ann):
            assert ended(member) == 0


async def introduce(number: int, invite: Invite, address: str, identity: Identity | None = None) -> None:
    """As a member by ``invite``, tell the peer at ``address`` of so many keys that nobody holds."""
    mine = credentials_from_invite(invite, identity or Identity.ephemeral())
    by_invite = Credentials(invite.run, mine.chain[: HINT_BYTES + CERTIFICATE_BYTES], invite_key(invite.secret))
    made_up = [by_invite.chain_for(Identity.ephemeral().peer_id, Role.LEARNER) for _ in range(number)]
    told = TellStatements(join_statements(INTRODUCTION + chain for chain in made_up))
    door = JoinerAuthorizer(mine.chain)
    member = Transport(mine.identity, listen="", run=invite.run, version=WIRE_VERSION, authorizer=door)
    async with member.serve(Observer()):
        founder = await member.dial(address)
        await member.request(founder, encode(told), timeout_s=60.0)


def data_address(member: Member) -> str:
    """Where its node listens: it says so to whoever connects, and writes it down for the others."""
    peer = Identity.load_or_create(member.folder / "identity.key").peer_id

    def ports() -> list[int]:
        found = psutil.Process(member.process.pid).net_connections("tcp")
        return [one.laddr.port for one in found if one.status == "LISTEN"]

    wait_until(lambda: len(ports()) == 1, START_S, "the port on which a node listens")
    return f"/ip4/127.0.0.1/tcp/{ports()[0]}/p2p/{peer}"


def made(invite: Invite, by: Credentials, not_after: int) -> str:
    """An invite like ``invite``, signed by others or for another time."""
    terms = {"role": Role.LEARNER, "cap": NO_CAP, "not_after": not_after}
    return encode_invite(make_invite(by, bytes(16), addresses=invite.initial_peers(), **terms))  # type: ignore[arg-type]
