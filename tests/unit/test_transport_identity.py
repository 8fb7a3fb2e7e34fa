"""Identity files and signatures."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.identity import Identity, IdentityError, verify


def test_an_identity_is_made_once_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert first.peer_id.startswith("12D3KooW")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_bytes()) == 68
    assert os.listdir(path.parent) == ["identity"]


def test_two_that_create_at_once_agree(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from p2pdiloco.transport.identity import Identity;"
        "sys.stdin.read(); print(Identity.load_or_create(Path(sys.argv[1])).peer_id)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "identity")]
    # Processes of their own, never forks: a fork of a process with threads may hang before its first line.
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]  # each waits for the end of its standard input, so that all of them create at the same moment
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    ids = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(ids)) == 1
    assert ids[0].startswith("12D3KooW")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not a libp2p Ed25519 private key"),
        (b"garbage" * 20, "not a libp2p Ed25519 private key"),
        (b"\x08\x00\x12\xa8\x09" + bytes(1200), "RSA"),
        (b"\x08\x01\x12\x40" + bytes(64), "damaged"),
    ],
)
def test_a_file_that_is_no_identity_is_explained_and_kept(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "identity"
    path.write_bytes(content)
    with pytest.raises(IdentityError, match=sentence):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_folder_in_place_of_the_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="cannot be read"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match=r"cannot be (read|created)"):
        Identity.load_or_create(tmp_path / "file" / "identity")


def test_one_identity_serves_one_peer(tmp_path: Path) -> None:
    identity = Identity.load_or_create(tmp_path / "identity")
    with identity.hold(), pytest.raises(IdentityError, match=f"process {os.getpid()}"), identity.hold():
        pass
    with identity.hold():
        pass


def test_signatures_hold_for_the_signer_and_the_data_only() -> None:
    ann, bob = Identity.ephemeral(), Identity.ephemeral()
    signature = ann.sign(b"data")
    assert len(signature) == 64
    assert verify(ann.peer_id, b"data", signature)
    assert not verify(ann.peer_id, b"Data", signature)
    assert not verify(bob.peer_id, b"data", signature)


@pytest.mark.parametrize(
    "peer", ["", "12D3KooW", "0OIl", "é" * 10, "1" * 100_000, "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]
)
def test_a_malformed_peer_id_verifies_nothing(peer: str) -> None:
    assert not verify(PeerId(peer), b"data", bytes(64))


def test_a_malformed_signature_verifies_nothing() -> None:
    assert not verify(Identity.ephemeral().peer_id, b"data", b"short")
