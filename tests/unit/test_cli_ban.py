"""``p2pdiloco members ban``: whom it puts out, which invite it closes, and that it says so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from actors import FOUNDER, make_manifest

from p2pdiloco.access.certificates import CERTIFICATE_BYTES, HINT_BYTES, Grant, Role
from p2pdiloco.access.invite_code import decode_invite
from p2pdiloco.cli.errors import REPAIR
from p2pdiloco.cli.main import main
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import MANIFEST, Access, Manifest
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, credentials_from_invite, invite_key, members_of
from p2pdiloco.swarm.invitations import OWN_MACHINES, invite_text, keep_addresses
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.transport.identity import KEY_FILE, Identity

pytestmark = pytest.mark.usefixtures("own_logging")
ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{Identity.ephemeral().peer_id}"
NOW = 1_000_000.0


class Home:
    """A state folder of ``owner``, a peer of FOUNDER's run; who comes is known there."""

    def __init__(self, folder: Path, access: Access = "invite", owner: Identity = FOUNDER, chain: bytes = b"") -> None:
        self.state = folder
        manifest = make_manifest()
        config = msgspec.structs.replace(manifest.config, name="story", access=access)
        self.manifest: Manifest = msgspec.structs.replace(manifest, config=config)
        place = folder_of(folder, self.manifest.run)
        place.mkdir(parents=True)
        self.files = MemberFiles(place)
        self.files.write_chain(chain)
        (place / MANIFEST).write_bytes(self.manifest.encode())
        (folder / KEY_FILE).write_bytes(owner.to_file_bytes())
        self.mine = Credentials(self.manifest.run, chain, owner)
        self.members = members_of(self.manifest)

    def invite(self, role: Role = Role.LEARNER, peer: PeerId | None = None, uses: int = OWN_MACHINES) -> str:
        grant, uses = Grant(subject=self.mine.identity.peer_id), 1 if peer else uses
        return invite_text(self.manifest, self.mine, grant, (ADDRESS,), role=role, uses=uses, peer=peer)

    def joins(self, invite: str, identity: Identity | None = None) -> PeerId:
        mine = credentials_from_invite(decode_invite(invite), identity or Identity.ephemeral())
        self.members.admit(mine.identity.peer_id, mine.chain, NOW)
        self.files.save(self.members)
        return mine.identity.peer_id

    def standing(self, *peers: PeerId) -> list[bool]:
        """Of these, what a node finds that reads what the commands have left."""
        members = members_of(self.manifest)
        self.files.load(members)
        return [members.is_member(peer, NOW) for peer in peers]

    def is_let_in(self, invite: str) -> bool:
        members = members_of(self.manifest)
        self.files.load(members)
        mine = credentials_from_invite(decode_invite(invite), Identity.ephemeral())
        try:
            members.admit(mine.identity.peer_id, mine.chain, NOW)
        except ValueError:
            return False
        return True


def said(home: Home, capsys: pytest.CaptureFixture[str], who: str, status: int = 0, *more: str) -> str:
    assert main(["members", "ban", who, *more, "--state", str(home.state)]) == status
    told = capsys.readouterr()
    return told.out + told.err


def key_in(invite: str) -> PeerId:
    return invite_key(decode_invite(invite).secret).peer_id


def test_a_peers_ban_closes_the_invite_by_which_it_came(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the founder's terminal shows: the next start shows another."""
    home = Home(tmp_path)
    shown, other = home.invite(), home.invite()
    home.files.write_invite(shown)
    ann, bob, eve = (home.joins(shown) for _ in range(3))
    told = said(home, capsys, eve)
    assert home.standing(ann, bob, eve) == [True, True, False]
    assert (home.is_let_in(shown), home.is_let_in(other)) == (False, True)
    assert f"closed the invite with which it joined, {key_in(shown)}: nobody new is let in by it" in told
    assert "a new invite for others: p2pdiloco members add" in told
    assert "its next start shows another one" in told
    assert (
        f"2 peers are still in the run with that invite; to remove them, too: p2pdiloco members ban {key_in(shown)}"
        in told
    )
    assert ann in told
    assert bob in told
    assert home.files.invite() == ""
    assert "was closed already" in said(home, capsys, bob)
    assert home.standing(ann, bob) == [True, False]
    told = said(home, capsys, key_in(shown))
    assert home.standing(ann) == [False]
    assert "3 peers are out too, because their membership depends on it" in told
    assert "does not know" not in told


def test_an_invites_ban_puts_out_all_who_came_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path)
    leaked, other = home.invite(), home.invite()
    home.files.write_invite(other)
    many, ann = [home.joins(leaked) for _ in range(20)], home.joins(other)
    told = said(home, capsys, leaked)
    assert home.standing(ann, *many) == [True] + 20 * [False]
    assert "20 peers are out too" in told
    assert "and 4 more: p2pdiloco members" in told
    assert home.files.invite() == other
    assert "it was the invite that this peer shows when it starts" in said(home, capsys, other)
    assert home.files.invite() == ""


def test_where_no_invite_is_closed_it_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path / "private")
    ann, stranger = Identity.ephemeral(), Identity.ephemeral().peer_id
    home.joins(home.invite(peer=ann.peer_id), ann)
    assert "admitted by name" in said(home, capsys, ann.peer_id)
    assert "does not know with which invite it joined, so no invite was closed" in said(home, capsys, stranger)
    assert "open to all" in said(Home(tmp_path / "open", "open"), capsys, stranger)


def test_what_an_admin_cannot_ban_or_close_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home, admin, ann = Home(tmp_path / "founder"), Identity.ephemeral(), Identity.ephemeral()
    of_admins = home.invite(Role.ADMIN)
    chain = credentials_from_invite(decode_invite(of_admins), admin).chain
    theirs = Home(tmp_path / "admin", owner=admin, chain=chain)
    theirs.members.admit(admin.peer_id, chain, NOW)
    theirs.joins(of_admins, ann)
    assert "ask the founder, or an admin who is nearer" in said(theirs, capsys, ann.peer_id, REPAIR)
    assert theirs.standing(ann.peer_id) == [True]
    learner = Identity.ephemeral()
    key = invite_key(decode_invite(of_admins).secret)
    below = Credentials(home.manifest.run, chain[: HINT_BYTES + CERTIFICATE_BYTES], key)
    theirs.members.admit(learner.peer_id, below.chain_for(learner.peer_id, Role.LEARNER), NOW)
    theirs.files.save(theirs.members)
    told = said(theirs, capsys, learner.peer_id)
    assert theirs.standing(learner.peer_id) == [False]
    assert f"only an admin nearer to the founder can close it: until one bans {key_in(of_admins)}" in told
    assert theirs.is_let_in(of_admins)


def test_an_invite_is_closed_and_its_members_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = Home(tmp_path)
    shown, other = home.invite(), home.invite(uses=1)
    home.files.write_invite(shown)
    ann, bob, eve = home.joins(shown), home.joins(shown), home.joins(other)
    told = said(home, capsys, shown, 0, "--keep-members")
    assert home.standing(ann, bob, eve) == [True, True, True]
    assert (home.is_let_in(shown), home.files.invite()) == (False, "")
    assert f"closed to new peers in run story: {key_in(shown)}" in told
    assert "its next start shows another one" in told
    assert "2 peers are still in the run with that invite" in told
    assert "was closed already" in said(home, capsys, shown, REPAIR, "--keep-members")
    assert "its ban keeps the other peers of its invite anyway" in said(home, capsys, eve, REPAIR, "--keep-members")
    assert home.standing(ann, bob, eve) == [True, True, True]
    said(home, capsys, key_in(shown))
    assert home.standing(ann, bob, eve) == [False, False, True]


def test_a_closed_invite_keeps_no_more_peers_than_it_admits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who expects a ban introduces other keys of its own first."""
    home = Home(tmp_path)
    theirs = home.invite(uses=2)
    made_up = [credentials_from_invite(decode_invite(theirs), Identity.ephemeral()) for _ in range(5)]
    for one in made_up:
        home.members.learn(b"i" + one.chain, PeerId("eve"))
    eve = home.joins(theirs)
    peers = [one.identity.peer_id for one in made_up]
    assert home.standing(*peers) == 5 * [True]
    said(home, capsys, eve)
    assert home.standing(eve, *peers) == [False, True, False, False, False, False]


def test_an_invite_is_for_one_peer_unless_more_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Home(tmp_path)
    keep_addresses(folder_of(tmp_path, home.manifest.run), (ADDRESS,))

    def added(*more: str, status: int = 0) -> str:
        assert main(["members", "add", *more, "--state", str(home.state)]) == status
        told = capsys.readouterr()
        return (told.out + told.err).strip()

    for more, uses in (((), 1), (("--uses", "16"), 16), (("--uses", "256"), 256)):
        text = added(*more)
        assert decode_invite(text).uses == uses
        for number in range(min(uses, 3)):
            home.joins(text)
            assert main(["members", "--state", str(home.state)]) == 0
            assert f"{number + 1} of {uses} used" in capsys.readouterr().out
    assert decode_invite(added("--peer", FOUNDER.peer_id)).uses == 1
    for bad in (("--uses", "0"), ("--uses", "257"), ("--uses", "2", "--peer", FOUNDER.peer_id)):
        with pytest.raises(SystemExit):
            main(["members", "add", *bad, "--state", str(home.state)])
        assert "--uses" in capsys.readouterr().err


def test_a_restart_frees_no_place_of_an_invite(tmp_path: Path) -> None:
    home = Home(tmp_path)
    text = home.invite(uses=1)
    key = Identity.ephemeral()
    home.joins(text, key)
    assert not home.is_let_in(text)
    assert home.standing(key.peer_id) == [True]
