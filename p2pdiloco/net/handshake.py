"""Handshake: two peers prove their identities to each other, over a TLS channel that proves nothing by itself.

Both sides send HELLO at once (protocol, identity, a fresh nonce), then PROOF. The listener sends its PROOF only after
the dialler's was valid. PROOF is a signature with the peer id's key. It covers a context string, the signer's role, the
fingerprint of the TLS certificate that the *listener* showed, and both HELLOs with their nonces. It is followed by the
certificates that make the key a member's. So:
- the key of the claimed peer id is proved (signature over both nonces);
- a man in the middle who terminates TLS shows another certificate, and both proofs fail (fingerprint);
- a proof cannot be replayed (nonces), nor reflected to its maker (role);
- a certificate is of use only to the owner of its key.

A private run is not named. Instead of its id, HELLO has a tag. Only peers that know the id can make or recognize it,
and it is valid for this channel and this direction only. A dialler that is not a member learns the listener's peer id
and nothing else: it gets no PROOF, and so no certificate.

Rules of this file:
1. Bytes in, bytes out; keys and nonces come from outside.
2. Every fault is a HandshakeError with a sentence for people, which is sent to the other side as GOODBYE.
3. Only HELLO, PROOF and GOODBYE are read before the other side has proved its key and its membership.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.access.members import NotAMemberError
from p2pdiloco.net.authorization import Authorizer, OpenAuthorizer
from p2pdiloco.net.frames import HANDSHAKE_LIMIT
from p2pdiloco.protocol.ids import PeerId, RunId, digest_of
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.wire.peer_ids import Sign, Verify

MAGIC = "p2pdiloco"
WIRE_VERSION = 4
"""Version of the wire protocol: frames, and the messages in them. It is raised when two releases would not understand
each other; both then report that. (A run's own version is in its manifest. A run continues if all of its peers update
to a newer release.)"""
CONTEXT = b"p2pdiloco handshake 1\x00"
TAG_CONTEXT = b"p2pdiloco run 1\x00"
NONCE_BYTES = 32


class Role(Enum):
    """The two ends of a connection."""

    DIALLER = b"D"
    LISTENER = b"L"

    @property
    def other(self) -> Role:
        return Role.LISTENER if self is Role.DIALLER else Role.DIALLER


class HandshakeError(ValueError):
    """The handshake failed: a malformed or false claim, or a mismatch. The text is for both sides."""


class MismatchError(HandshakeError):
    """Both sides are honest but incompatible: another protocol, version or run. Found here or reported by GOODBYE."""


class Dialled(NamedTuple):
    """The dialler's parameters of a connection; a listener has none."""

    expected: PeerId | None = None
    """The peer that must be at the other end; None: any peer."""
    lane: int = 0
    bond: bytes = b""
    is_relayed: bool = False


ANYBODY = Dialled()


class Hello(Struct, frozen=True, kw_only=True):
    """The first message of each side. Unknown fields of later releases are ignored."""

    magic: Annotated[str, Meta(max_length=32)]
    version: Annotated[int, Meta(ge=0, le=2**31)]
    run: Annotated[str, Meta(max_length=64)]
    """Run id; empty for a private run, or if the peer does not know its run yet."""
    peer: Annotated[str, Meta(min_length=1, max_length=64)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    """Fresh for every connection."""
    life: Annotated[bytes, Meta(min_length=8, max_length=16)]
    """Random id of the peer's incarnation, fresh for every start. It distinguishes a second connection from a restart.
    """
    attempt: Annotated[int, Meta(ge=0, le=2**62)]
    """Counts the peer's connections. Of two that it dialled, the later one counts."""
    lane: Annotated[int, Meta(ge=0, le=2**16)] = 0
    """Dialler only: 0 for a primary connection, else the number of a lane (net/multipath.py)."""
    bond: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """With a lane: the nonce of the dialler's HELLO on the primary connection."""
    is_relayed: bool = False
    """Dialler only: the connection runs through a relay, so a direct one is preferred."""
    tag: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """Replaces the id of a private run (``tag_of``)."""
    observes: bool = False
    """Whether the peer takes part in no run and only sends requests."""


class Handshake:
    """One side of a handshake: send ``hello_body``, then ``proof_after(their hello)``; ``finish(their proof)``."""

    def __init__(
        self, factory: HandshakeFactory, role: Role, hello: Hello, fingerprint: bytes, expected: PeerId | None = None
    ) -> None:
        self._factory = factory
        self._role = role
        self.hello = hello
        """This peer's HELLO."""
        self._expected = expected
        """The peer that must be at the other end; None: any peer."""
        self._fingerprint = fingerprint
        self._transcript = b""
        self._remote: Hello | None = None
        self.proof: bytes = b""
        """Body of this peer's PROOF, after the other side's HELLO."""
        self.hello_body: bytes = msgspec.msgpack.encode(hello)
        assert len(self.hello_body) <= HANDSHAKE_LIMIT

    def proof_after(self, body: bytes) -> bytes:
        """Return the body of this peer's PROOF, given the other side's HELLO ``body``.

        Raises:
            HandshakeError: the protocol, version or run differs, the peer is this one, or it is a second HELLO.
        """
        if self._remote is not None:
            raise HandshakeError("the other side sent a second HELLO")
        try:
            remote = msgspec.msgpack.decode(body, type=Hello)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HandshakeError(f"the HELLO is malformed ({error})") from error
        self._check(remote)
        self._remote = remote
        hellos = (self.hello_body, body) if self._role is Role.DIALLER else (body, self.hello_body)
        self._transcript = transcript(self._fingerprint, *hellos)
        self.proof = self._factory.sign(signed_bytes(self._role, self._transcript)) + self._factory.authorizer.chain
        return self.proof

    def finish(self, body: bytes) -> Hello:
        """Return the other side's HELLO, proved by the ``body`` of its PROOF.

        Raises:
            HandshakeError: the proof came before the HELLO or is not valid, or the peer is not admitted.
        """
        if self._remote is None:
            raise HandshakeError("the other side sent its PROOF before its HELLO")
        peer = PeerId(self._remote.peer)
        proof, chain = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES:]
        if not self._factory.verify(peer, signed_bytes(self._role.other, self._transcript), proof):
            raise HandshakeError(
                f"the proof of {peer} is not valid on this channel: the other side does not own that peer id, "
                "or somebody in between reads the traffic"
            )
        try:
            self._factory.authorizer.admit(peer, chain)
        except NotAMemberError as error:
            raise MismatchError(str(error)) from None
        return self._remote

    def _check(self, remote: Hello) -> None:
        mine = self.hello
        if remote.magic != MAGIC:
            raise MismatchError(f"the other side speaks {remote.magic!r}, not {MAGIC!r}")
        if remote.version != mine.version:
            raise MismatchError(
                f"protocol versions differ: {mine.peer} speaks {mine.version}, {remote.peer} speaks {remote.version}; "
                "run the same release of p2pdiloco"
            )
        if self._factory.authorizer.is_private:
            if remote.tag != tag_of(self._factory.run, self._role.other, self._fingerprint, remote.nonce):
                raise MismatchError(
                    f"{mine.peer} takes part in a private run, and talks to its members alone: to join it, ask the "
                    "run's founder for an invite"
                )
        elif remote.tag and mine.run:
            raise MismatchError(f"{remote.peer} takes part in a private run, not in run {RunId(mine.run)}")
        if remote.peer == mine.peer:
            raise HandshakeError(f"{mine.peer} dialled itself, or two peers use one identity file")
        if self._expected is not None and remote.peer != self._expected:
            raise HandshakeError(f"expected {self._expected}, but {remote.peer} answers there")
        if remote.run and mine.run and remote.run != mine.run:
            raise MismatchError(
                f"runs differ: {mine.peer} is in run {RunId(mine.run)}, {remote.peer} is in run {RunId(remote.run)}"
            )


class HandshakeFactory(Struct, eq=False, kw_only=True):
    """Factory of handshakes of one process."""

    peer: PeerId
    run: str
    """This peer's run, even if its HELLO does not name it."""
    version: int
    life: bytes
    sign: Sign
    verify: Verify
    nonce: Callable[[], bytes]
    """Returns NONCE_BYTES fresh random bytes."""
    authorizer: Authorizer = OpenAuthorizer()
    observes: bool = False
    """True: the process takes no part in a run."""
    attempts: int = 0

    def handshake(self, role: Role, fingerprint: bytes, dialled: Dialled) -> Handshake:
        """Begin a handshake on a channel. ``fingerprint`` is that of its listener's certificate."""
        self.attempts += 1
        nonce, is_private = self.nonce(), self.authorizer.is_private
        hello = Hello(
            magic=MAGIC,
            version=self.version,
            run="" if is_private else self.run,
            peer=self.peer,
            nonce=nonce,
            life=self.life,
            attempt=self.attempts,
            lane=dialled.lane,
            bond=dialled.bond,
            is_relayed=dialled.is_relayed,
            tag=tag_of(self.run, role, fingerprint, nonce) if is_private else b"",
            observes=self.observes,
        )
        return Handshake(self, role, hello, fingerprint, dialled.expected)


def tag_of(run: str, role: Role, fingerprint: bytes, nonce: bytes) -> bytes:
    """Return the tag that the side with ``role`` sends instead of a private run's id.

    It is valid only on the channel whose listener showed the certificate with ``fingerprint``.
    """
    return bytes.fromhex(digest_of(TAG_CONTEXT, role.value, fingerprint, nonce, run.encode()))


def transcript(fingerprint: bytes, dialler_hello: bytes, listener_hello: bytes) -> bytes:
    """Return the bytes that both proofs cover: fingerprint and HELLOs, each after its length."""
    parts = (fingerprint, dialler_hello, listener_hello)
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def signed_bytes(role: Role, covered: bytes) -> bytes:
    """Return the bytes that the side with ``role`` signs."""
    return CONTEXT + role.value + covered
