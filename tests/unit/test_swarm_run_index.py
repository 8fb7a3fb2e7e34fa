"""The runs of a state folder, and those of other peers in it, such as training scripts: commands find both, and each
has its own peer's key."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from actors import FOUNDER, make_manifest

from p2pdiloco.access.invite_code import decode_invite
from p2pdiloco.cli.main import main
from p2pdiloco.protocol.manifest import MANIFEST, Manifest
from p2pdiloco.swarm.credentials import credentials_from_invite
from p2pdiloco.swarm.invitations import keep_addresses
from p2pdiloco.swarm.run_index import ConfigError, folder_of, kept_run, kept_runs
from p2pdiloco.transport.identity import KEY_FILE, Identity

pytestmark = pytest.mark.usefixtures("own_logging")
ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{Identity.ephemeral().peer_id}"


def leave(state: Path, name: str, peer: Identity | None = FOUNDER) -> Manifest:
    """A peer's state folder with a run for members that FOUNDER has founded."""
    manifest = make_manifest()
    config = msgspec.structs.replace(manifest.config, name=name, access="invite")
    manifest = msgspec.structs.replace(manifest, config=config)
    folder = folder_of(state, manifest.run)
    keep_addresses(folder, [ADDRESS])
    (folder / MANIFEST).write_bytes(manifest.encode())
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / MANIFEST).write_bytes(manifest.encode())
    if peer is not None:
        (state / KEY_FILE).write_bytes(peer.to_file_bytes())
    return manifest


def said(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_what_a_state_folder_has_itself_comes_first(tmp_path: Path) -> None:
    leave(tmp_path / "script", "story")
    leave(tmp_path / "nobody", "another", peer=None)
    assert [kept.state for kept in kept_runs(tmp_path)] == [tmp_path / "script"]
    assert kept_run(tmp_path, None).state == kept_run(tmp_path, "story").state == tmp_path / "script"
    leave(tmp_path, "story")
    leave(tmp_path, "other")
    assert kept_run(tmp_path, "story").state == tmp_path
    with pytest.raises(ConfigError, match=r"there are several runs .* name one with --run"):
        kept_run(tmp_path, None)
    for name in ("first", "second"):
        leave(tmp_path / name, "twice")
    with pytest.raises(ConfigError, match=f"in {tmp_path}/first.*or its peer's folder with --state"):
        kept_run(tmp_path, "twice")
    with pytest.raises(ConfigError, match="has no run nothing: is --state the folder"):
        kept_run(tmp_path, "nothing")


def test_a_scripts_run_is_invited_to_and_paused_by_name_with_the_scripts_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = leave(tmp_path / "story", "story")
    ours = Identity.load_or_create(tmp_path / KEY_FILE)
    invite = decode_invite(said(capsys, "members", "add", "--run", "story", "--state", tmp_path))
    assert invite.run == manifest.run
    assert credentials_from_invite(invite, ours).chain
    assert "banned" in said(capsys, "members", "ban", ours.peer_id, "--run", "story", "--state", tmp_path)
    assert list((folder_of(tmp_path / "story", manifest.run) / "members" / "new").iterdir())
    assert str(tmp_path / "story") in said(capsys, "pause", "--state", tmp_path)
    assert not (tmp_path / manifest.run[:12]).exists(), "all is kept with the script's peer"


def test_members_tells_each_peer_with_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = Identity.load_or_create(tmp_path / KEY_FILE).peer_id
    theirs = leave(tmp_path / "story", "story")
    told = said(capsys, "members", "--state", tmp_path).splitlines()
    assert told[:2] == [f"this peer  {ours}", f"another peer  {FOUNDER.peer_id}  in {tmp_path / 'story'}"]
    assert told[2].startswith("story  ")
    found = json.loads(said(capsys, "members", "--json", "--state", tmp_path))
    assert (found["peer"], found["runs"]) == (ours, {})
    (other,) = found["others"]
    assert (other["state"], other["peer"]) == (str(tmp_path / "story"), FOUNDER.peer_id)
    assert [row["key"] for row in other["runs"][theirs.run]] == [FOUNDER.peer_id]
    (tmp_path / KEY_FILE).rename(tmp_path / "key")
    told = said(capsys, "members", "--state", tmp_path, "--identity", tmp_path / "key").splitlines()
    assert [line.split()[2] for line in told[:2]] == [ours, FOUNDER.peer_id]
    told = said(capsys, "members", "--run", "story", "--state", tmp_path).splitlines()
    assert told[0] == f"this peer  {FOUNDER.peer_id}  in {tmp_path / 'story'}"
    found = json.loads(said(capsys, "members", "--run", "story", "--json", "--state", tmp_path))
    assert (found["peer"], list(found["runs"])) == (FOUNDER.peer_id, [theirs.run])


def test_members_writes_nothing_but_the_id_that_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "bootstrap"
    assert said(capsys, "members", "--state", state) == (
        "this peer  has no id yet: it gets one when it first takes part, or now by p2pdiloco members --id\n"
    )
    assert json.loads(said(capsys, "members", "--json", "--state", state)) == {"peer": None, "runs": {}}
    assert list(tmp_path.iterdir()) == []
    made = said(capsys, "members", "--id", "--state", state).strip()
    assert said(capsys, "members", "--id", "--state", state).strip() == made
    assert said(capsys, "members", "--state", state) == f"this peer  {made}\n"
    leave(state / "story", "story")
    assert said(capsys, "members", "--id", "--run", "story", "--state", state).strip() == FOUNDER.peer_id
