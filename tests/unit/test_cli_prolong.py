"""``p2pdiloco prolong``: who may use it, what it refuses, and what commands read of it afterwards."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from actors import FOUNDER, make_manifest

from p2pdiloco.access.certificates import Role
from p2pdiloco.access.membership_log import prolonging
from p2pdiloco.cli.errors import REPAIR
from p2pdiloco.cli.main import main
from p2pdiloco.node.results import finished_message
from p2pdiloco.node.run_folder import known_end
from p2pdiloco.protocol.config import RunEnd
from p2pdiloco.protocol.manifest import MANIFEST, InnerConfig, Manifest
from p2pdiloco.protocol.manifest_defaults import end_of
from p2pdiloco.swarm.credentials import Credentials, MemberFiles, credentials_from_invite, make_invite
from p2pdiloco.swarm.invitations import load_grant
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.transport.identity import KEY_FILE, Identity

pytestmark = pytest.mark.usefixtures("own_logging")
ADDRESS = f"/ip4/127.0.0.1/tcp/4100/p2p/{Identity.ephemeral().peer_id}"
STEPS, TOKENS = InnerConfig(steps=100), InnerConfig(steps=100, tokens=10_000)


def home(state: Path, inner: InnerConfig, owner: Identity = FOUNDER, role: Role | None = None) -> Manifest:
    """A state folder of ``owner`` with a run of FOUNDER's, in which it has ``role`` by an invite."""
    manifest = make_manifest()
    manifest = msgspec.structs.replace(manifest, config=msgspec.structs.replace(manifest.config, inner=inner))
    folder = folder_of(state, manifest.run)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_bytes(manifest.encode())
    (state / KEY_FILE).write_bytes(owner.to_file_bytes())
    if role is not None:
        first, never = Credentials(manifest.run, b"", FOUNDER), 2**32 - 1
        invite = make_invite(first, b"s" * 16, role=role, cap=never, not_after=never, addresses=(ADDRESS,))
        MemberFiles(folder).write_chain(credentials_from_invite(invite, owner).chain)
    return manifest


def said(capsys: pytest.CaptureFixture[str], status: int, *words: str | Path) -> str:
    assert main(["prolong", *map(str, words)]) == status
    told = capsys.readouterr()
    return told.out + told.err


def test_the_founder_prolongs_a_run_and_commands_know_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = home(tmp_path, STEPS)
    folder = folder_of(tmp_path, manifest.run)
    assert known_end(manifest, folder) == RunEnd(100)
    told = said(capsys, 0, tmp_path, "--steps", "300")
    assert "run stage now ends at step 300, no longer at step 100" in told
    assert f"p2pdiloco resume {tmp_path} --state {tmp_path} --run {manifest.run[:12]}" in told
    assert known_end(manifest, folder) == RunEnd(300)
    assert "now ends at step 400, no longer at step 300" in said(capsys, 0, folder, "--steps", "400")
    for steps in ("400", "300"):
        told = said(capsys, 0 if steps == "400" else REPAIR, tmp_path, "--steps", steps)
        assert "ends at step 400" in told
    assert known_end(manifest, folder) == RunEnd(400)
    told = finished_message(manifest, folder)
    assert "finished all 400 steps" in told
    assert f"p2pdiloco prolong {folder} --steps N" in told
    copy = tmp_path / "copy"
    MemberFiles(copy).take_over_end(manifest, [tmp_path, folder])
    assert known_end(manifest, copy) == RunEnd(400)


def test_a_token_budget_is_prolonged_by_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The upper bound on its steps follows."""
    manifest = home(tmp_path, TOKENS)
    assert "is measured in tokens: say where it ends with --tokens N" in said(
        capsys, REPAIR, tmp_path, "--steps", "500"
    )
    told = said(capsys, 0, tmp_path, "--tokens", "1000000")
    assert "now ends at 1,000,000 merged tokens, no longer at 10,000 merged tokens" in told
    end = known_end(manifest, folder_of(tmp_path, manifest.run))
    assert end == end_of(manifest.config, 1_000_000)
    assert end.steps * manifest.config.inner.batch * manifest.config.model.context >= 2 * 1_000_000


@pytest.mark.parametrize("role", [Role.FOLLOWER, Role.LEARNER, Role.ADMIN])
def test_only_the_founder_and_admins_prolong_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], role: Role
) -> None:
    manifest = home(tmp_path, STEPS, Identity.ephemeral(), role)
    may = role is Role.ADMIN
    told = said(capsys, 0 if may else REPAIR, tmp_path, "--steps", "300")
    assert ("only its founder and admins prolong it" in told) is not may
    assert known_end(manifest, folder_of(tmp_path, manifest.run)) == RunEnd(300 if may else 100)


def test_where_nothing_is_prolonged_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no run" in said(capsys, REPAIR, tmp_path, "--steps", "300")
    manifest = home(tmp_path, STEPS)
    assert "is measured in steps: say where it ends with --steps N" in said(capsys, REPAIR, tmp_path, "--tokens", "500")
    files = MemberFiles(folder_of(tmp_path, manifest.run))
    files.queue_statement(b"p" + bytes(200))
    other = load_grant(manifest, Credentials(manifest.run, b"", FOUNDER), files.folder, 0.0)
    files.queue_statement(prolonging(manifest.run, 300, other, Identity.ephemeral().sign))
    assert known_end(manifest, files.folder.parent) == RunEnd(100), "damaged and forged ones count for nothing"
