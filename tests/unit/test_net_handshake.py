"""Handshake: what it proves, and each way in which it must fail."""

from __future__ import annotations

import os

import pytest

from p2pdiloco.net.handshake import MAGIC, Handshake, HandshakeError, HandshakeFactory, Hello, MismatchError, Role
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.identity import Identity, verify

FINGERPRINT = bytes(32)


def half(
    role: Role,
    identity: Identity,
    *,
    run: str = "run",
    version: int = 1,
    magic: str = MAGIC,
    claims: str | None = None,
    fingerprint: bytes = FINGERPRINT,
    expected: PeerId | None = None,
) -> Handshake:
    hello = Hello(
        magic=magic,
        version=version,
        run=run,
        peer=claims or identity.peer_id,
        nonce=os.urandom(32),
        life=os.urandom(16),
        attempt=1,
    )
    handshake_factory = HandshakeFactory(
        peer=identity.peer_id,
        run="",
        version=version,
        life=hello.life,
        sign=identity.sign,
        verify=verify,
        nonce=lambda: os.urandom(32),
    )
    return Handshake(handshake_factory, role, hello, fingerprint, expected)


def meet(dialler: Handshake, listener: Handshake) -> tuple[Hello, Hello]:
    dialler_proof = dialler.proof_after(listener.hello_body)
    listener_proof = listener.proof_after(dialler.hello_body)
    return dialler.finish(listener_proof), listener.finish(dialler_proof)


def test_both_learn_who_the_other_is() -> None:
    ann, bob = Identity.ephemeral(), Identity.ephemeral()
    seen_by_ann, seen_by_bob = meet(half(Role.DIALLER, ann), half(Role.LISTENER, bob, run=""))
    assert (seen_by_ann.peer, seen_by_bob.peer) == (bob.peer_id, ann.peer_id)
    assert seen_by_ann.run == ""


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"run": "elsewhere"}, "runs differ"),
        ({"version": 2}, "versions differ"),
        ({"magic": "gossip"}, "speaks 'gossip'"),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(other: dict[str, object], sentence: str) -> None:
    dialler = half(Role.DIALLER, Identity.ephemeral())
    listener = half(Role.LISTENER, Identity.ephemeral(), **other)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=sentence):
        dialler.proof_after(listener.hello_body)


def test_a_man_in_the_middle_shows_another_certificate() -> None:
    dialler = half(Role.DIALLER, Identity.ephemeral(), fingerprint=b"m" * 32)
    listener = half(Role.LISTENER, Identity.ephemeral())
    with pytest.raises(HandshakeError, match="somebody in between"):
        meet(dialler, listener)


def test_a_claimed_peer_id_needs_its_key() -> None:
    victim = Identity.ephemeral()
    thief = half(Role.DIALLER, Identity.ephemeral(), claims=victim.peer_id)
    listener = half(Role.LISTENER, Identity.ephemeral())
    proof = thief.proof_after(listener.hello_body)
    listener.proof_after(thief.hello_body)
    with pytest.raises(HandshakeError, match="does not own that peer id"):
        listener.finish(proof)


def test_a_proof_serves_one_connection_only() -> None:
    ann, bob = Identity.ephemeral(), Identity.ephemeral()
    dialler, listener = half(Role.DIALLER, ann), half(Role.LISTENER, bob)
    old_proof = dialler.proof_after(listener.hello_body)
    again = half(Role.LISTENER, bob)
    again.proof_after(dialler.hello_body)  # the same HELLO, replayed
    with pytest.raises(HandshakeError):
        again.finish(old_proof)


def test_a_proof_cannot_be_reflected() -> None:
    ann = Identity.ephemeral()
    mirror = half(Role.LISTENER, Identity.ephemeral(), claims="12D3KooWother")
    dialler = half(Role.DIALLER, ann)
    with pytest.raises(HandshakeError):
        dialler.finish(dialler.proof_after(mirror.hello_body))
    with pytest.raises(HandshakeError, match="dialled itself"):
        half(Role.DIALLER, ann).proof_after(dialler.hello_body)


def test_another_peer_than_expected_is_refused() -> None:
    dialler = half(Role.DIALLER, Identity.ephemeral(), expected=Identity.ephemeral().peer_id)
    with pytest.raises(HandshakeError, match="expected"):
        dialler.proof_after(half(Role.LISTENER, Identity.ephemeral()).hello_body)


def test_the_order_is_fixed() -> None:
    dialler, listener = half(Role.DIALLER, Identity.ephemeral()), half(Role.LISTENER, Identity.ephemeral())
    with pytest.raises(HandshakeError, match="before its HELLO"):
        dialler.finish(bytes(64))
    dialler.proof_after(listener.hello_body)
    with pytest.raises(HandshakeError, match="second HELLO"):
        dialler.proof_after(listener.hello_body)
    with pytest.raises(HandshakeError, match="malformed"):
        half(Role.DIALLER, Identity.ephemeral()).proof_after(b"garbage")


def test_a_hello_that_is_nested_too_deep_is_refused() -> None:
    ann = half(Role.LISTENER, Identity.ephemeral())
    with pytest.raises(HandshakeError, match="malformed"):
        ann.proof_after(b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0")
