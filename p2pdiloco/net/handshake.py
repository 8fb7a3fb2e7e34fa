"""Two peers prove to each other who they are, over a TLS channel that proves nothing by itself.

Both sides send HELLO at once (what they speak, who they are, a fresh nonce), then PROOF, the listener only after the
dialler's was good: a signature with the peer id's key over a context string, the signer's role, the fingerprint of the
TLS certificate that the *listener* showed, and both HELLOs with their nonces; behind it, the certificates that make the
key a member's. So:
- the key of the claimed peer id is proved (signature over both nonces);
- a man in the middle who ends TLS himself shows another certificate, and both proofs fail (fingerprint);
- a proof cannot be replayed (nonces), nor reflected to its maker (role);
- a certificate serves whoever has its key, and nobody who has only seen it.

A private run is not named: instead of its id, HELLO has a tag that only who knows the id can make or recognize, for
this channel and this direction. Who dials and is no member learns the peer's id, and nothing else: it gets no PROOF, so
no certificate.

Rules of this file:
1. Bytes in, bytes out; the keys and the nonce come from outside.
2. Whatever is wrong is HandshakeError with a sentence for people: it is sent to the other side as GOODBYE.
3. Nothing but HELLO, PROOF and GOODBYE is read before the other side has proved its key and its membership.
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

MAGIC = "p2pdiloco"
WIRE_VERSION = 4
"""How peers talk: frames, and the messages in them. Raised when two releases would not understand each other; both are
then told so. (A run's own version is its manifest's: a run goes on when all of its peers take a newer release.)"""
CONTEXT = b"p2pdiloco handshake 1\x00"
TAG_CONTEXT = b"p2pdiloco run 1\x00"
NONCE_BYTES = 32
SIGNATURE_BYTES = 64

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]


class Role(Enum):
    """Which end of the connection one is."""

    DIALLER = b"D"
    LISTENER = b"L"

    @property
    def other(self) -> Role:
        return Role.LISTENER if self is Role.DIALLER else Role.DIALLER


class HandshakeError(ValueError):
    """The two sides do not fit, or the other one is not who it says. The text is for both."""


class MismatchError(HandshakeError):
    """Both are honest, but cannot work together: another protocol, version or run. Found here or, as GOODBYE, there."""


class Dialled(NamedTuple):
    """What a dialler wants of a connection; a listener wants nothing."""

    expected: PeerId | None = None
    """Who must be at the other end; None: anybody."""
    lane: int = 0
    bond: bytes = b""
    is_relayed: bool = False


ANYBODY = Dialled()


class Hello(Struct, frozen=True, kw_only=True):
    """What a side says first. Unknown fields of later releases are ignored."""

    magic: Annotated[str, Meta(max_length=32)]
    version: Annotated[int, Meta(ge=0, le=2**31)]
    run: Annotated[str, Meta(max_length=64)]
    """"" for a private run, or for who does not know its run yet."""
    peer: Annotated[str, Meta(min_length=1, max_length=64)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    """Fresh for every connection."""
    life: Annotated[bytes, Meta(min_length=8, max_length=16)]
    """Fresh for every start of the peer: tells a second connection of one life from a peer that came back."""
    attempt: Annotated[int, Meta(ge=0, le=2**62)]
    """Grows with every connection that the peer takes part in: of two that it dialled, the later one counts."""
    lane: Annotated[int, Meta(ge=0, le=2**16)] = 0
    """Dialler only: 0 for a connection of its own right, else the number of a lane (net/multipath.py)."""
    bond: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """With a lane: the nonce of the HELLO with which its dialler began the primary connection."""
    is_relayed: bool = False
    """Dialler only: a meeting point carries the bytes, so a direct connection of the two is better."""
    tag: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """Of a private run (``tag_of``)."""
    observes: bool = False
    """It only asks, and takes no part."""


class Handshake:
    """One side's half: send ``hello_body``, then ``proof_after(their hello)``; ``finish(their proof)`` ends it."""

    def __init__(
        self,
        role: Role,
        hello: Hello,
        fingerprint: bytes,
        *,
        sign: Sign,
        verify: Verify,
        expected: PeerId | None = None,
        run: str = "",
        door: Authorizer | None = None,
    ) -> None:
        """``run``: ours, also if HELLO does not name it."""
        self._role = role
        self._run = run
        self._door: Authorizer = door or OpenAuthorizer()
        self.hello = hello
        """Ours."""
        self._expected = expected
        """Who must be at the other end; None: anybody."""
        self._fingerprint = fingerprint
        self._sign = sign
        self._verify = verify
        self._transcript = b""
        self._remote: Hello | None = None
        self.proof: bytes = b""
        """The body of our PROOF, after the other side's HELLO."""
        self.hello_body: bytes = msgspec.msgpack.encode(hello)
        assert len(self.hello_body) <= HANDSHAKE_LIMIT

    def proof_after(self, body: bytes) -> bytes:
        """The body of our PROOF, after the other side's HELLO ``body``.

        Raises:
            HandshakeError: not our protocol, version or run; ourselves; a second HELLO.
        """
        if self._remote is not None:
            raise HandshakeError("a second HELLO came")
        try:
            remote = msgspec.msgpack.decode(body, type=Hello)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HandshakeError(f"the HELLO cannot be read ({error})") from error
        self._check(remote)
        self._remote = remote
        hellos = (self.hello_body, body) if self._role is Role.DIALLER else (body, self.hello_body)
        self._transcript = transcript(self._fingerprint, *hellos)
        self.proof = self._sign(signed_bytes(self._role, self._transcript)) + self._door.chain
        return self.proof

    def finish(self, body: bytes) -> Hello:
        """The other side's HELLO, now proved by the ``body`` of its PROOF.

        Raises:
            HandshakeError: the proof came before the HELLO, or does not hold; it is not let in.
        """
        if self._remote is None:
            raise HandshakeError("a PROOF came before the HELLO")
        peer = PeerId(self._remote.peer)
        proof, chain = body[:SIGNATURE_BYTES], body[SIGNATURE_BYTES:]
        if not self._verify(peer, signed_bytes(self._role.other, self._transcript), proof):
            raise HandshakeError(
                f"the proof of {peer} does not hold on this channel: it does not own that peer id, "
                "or somebody in between reads the traffic"
            )
        try:
            self._door.admit(peer, chain)
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
        if self._door.is_private:
            if remote.tag != tag_of(self._run, self._role.other, self._fingerprint, remote.nonce):
                raise MismatchError(
                    f"{mine.peer} takes part in a private run, and talks to its members alone: to join it, ask whoever "
                    "founded it for an invite"
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


class Greeter:
    """What one process says first on all its connections. ``nonce`` gives NONCE_BYTES fresh random bytes; who
    ``observes`` takes no part."""

    def __init__(
        self,
        *,
        peer: PeerId,
        run: str,
        version: int,
        life: bytes,
        sign: Sign,
        verify: Verify,
        nonce: Callable[[], bytes],
        door: Authorizer | None = None,
        observes: bool = False,
    ) -> None:
        self.peer = peer
        self.run = run
        self._version = version
        self._life = life
        self._sign = sign
        self._verify = verify
        self._nonce = nonce
        self._door: Authorizer = door or OpenAuthorizer()
        self.observes = observes
        self._attempt = 0

    def handshake(self, role: Role, fingerprint: bytes, dialled: Dialled) -> Handshake:
        """Our half, over the channel whose listener showed the certificate with ``fingerprint``."""
        self._attempt += 1
        nonce, is_private = self._nonce(), self._door.is_private
        hello = Hello(
            magic=MAGIC,
            version=self._version,
            run="" if is_private else self.run,
            peer=self.peer,
            nonce=nonce,
            life=self._life,
            attempt=self._attempt,
            lane=dialled.lane,
            bond=dialled.bond,
            is_relayed=dialled.is_relayed,
            tag=tag_of(self.run, role, fingerprint, nonce) if is_private else b"",
            observes=self.observes,
        )
        return Handshake(
            role,
            hello,
            fingerprint,
            sign=self._sign,
            verify=self._verify,
            expected=dialled.expected,
            run=self.run,
            door=self._door,
        )


def tag_of(run: str, role: Role, fingerprint: bytes, nonce: bytes) -> bytes:
    """What the side with ``role`` says instead of a private run's id, on the channel whose listener showed the
    certificate with ``fingerprint``. Seen, it is of no use on another channel."""
    return bytes.fromhex(digest_of(TAG_CONTEXT, role.value, fingerprint, nonce, run.encode()))


def transcript(fingerprint: bytes, dialler_hello: bytes, listener_hello: bytes) -> bytes:
    """What both proofs cover, every part with its length."""
    parts = (fingerprint, dialler_hello, listener_hello)
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def signed_bytes(role: Role, covered: bytes) -> bytes:
    """What the side with ``role`` signs."""
    return CONTEXT + role.value + covered
