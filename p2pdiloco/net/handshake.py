"""Two peers prove to each other who they are, over a TLS channel that proves nothing by itself.

Both sides send HELLO at once (what they speak, who they are, a fresh nonce), then PROOF: a signature with the peer id's
key over a context string, the signer's role, the fingerprint of the TLS certificate that the *listener* showed, and
both HELLOs with their nonces. So:
- the key of the claimed peer id is proved (signature over both nonces);
- a man in the middle who ends TLS himself shows another certificate, and both proofs fail (fingerprint);
- a proof cannot be replayed (nonces), nor reflected to its maker (role).

Rules of this file:
1. Bytes in, bytes out; the keys and the nonce come from outside.
2. Whatever is wrong is HandshakeError with a sentence for people: it is sent to the other side as GOODBYE.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.net.frames import HANDSHAKE_LIMIT
from p2pdiloco.protocol.identifiers import PeerId, RunId

MAGIC = "p2pdiloco"
WIRE_VERSION = 2
"""How peers talk: frames, and the messages in them. Raised when two releases would not understand each other; both are
then told so. (A run's own version is its manifest's: a run goes on when all of its peers take a newer release.)"""
CONTEXT = b"p2pdiloco handshake 1\x00"
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


class Hello(Struct, frozen=True, kw_only=True):
    """What a side says first. Unknown fields of later releases are ignored."""

    magic: Annotated[str, Meta(max_length=32)]
    version: Annotated[int, Meta(ge=0, le=2**31)]
    run: Annotated[str, Meta(max_length=64)]
    """"" for an observer, or a joiner that does not know its run yet."""
    peer: Annotated[str, Meta(min_length=1, max_length=64)]
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    """Fresh for every connection."""
    life: Annotated[bytes, Meta(min_length=8, max_length=16)]
    """Fresh for every start of the peer: tells a second connection of one life from a peer that came back."""
    attempt: Annotated[int, Meta(ge=0, le=2**62)]
    """Grows with every connection that the peer takes part in: of two that it dialled, the later one counts."""
    lane: Annotated[int, Meta(ge=0, le=2**16)] = 0
    """Dialler only: 0 for a connection of its own right, else the number of a lane (net/parts.py)."""
    bond: Annotated[bytes, Meta(max_length=NONCE_BYTES)] = b""
    """With a lane: the nonce of the HELLO with which its dialler began the primary connection."""


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
    ) -> None:
        self._role = role
        self.hello = hello
        """Ours."""
        self._expected = expected
        """Who must be at the other end; None: anybody."""
        self._fingerprint = fingerprint
        self._sign = sign
        self._verify = verify
        self._transcript = b""
        self._remote: Hello | None = None
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
        return self._sign(signed_bytes(self._role, self._transcript))

    def finish(self, proof: bytes) -> Hello:
        """The other side's HELLO, now proved.

        Raises:
            HandshakeError: the proof came before the HELLO, or does not hold.
        """
        if self._remote is None:
            raise HandshakeError("a PROOF came before the HELLO")
        peer = PeerId(self._remote.peer)
        if not self._verify(peer, signed_bytes(self._role.other, self._transcript), proof):
            raise HandshakeError(
                f"the proof of {peer} does not hold on this channel: it does not own that peer id, "
                "or somebody in between reads the traffic"
            )
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
        if remote.peer == mine.peer:
            raise HandshakeError(f"{mine.peer} dialled itself, or two peers use one identity file")
        if self._expected is not None and remote.peer != self._expected:
            raise HandshakeError(f"expected {self._expected}, but {remote.peer} answers there")
        if remote.run and mine.run and remote.run != mine.run:
            raise MismatchError(
                f"runs differ: {mine.peer} is in run {RunId(mine.run)}, {remote.peer} is in run {RunId(remote.run)}"
            )


class Greeter:
    """What one process says first on all its connections. ``nonce`` gives NONCE_BYTES fresh random bytes."""

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
    ) -> None:
        self.peer = peer
        self.run = run
        self._version = version
        self._life = life
        self._sign = sign
        self._verify = verify
        self._nonce = nonce
        self._attempt = 0

    def handshake(self, role: Role, fingerprint: bytes, expected: PeerId | None, lane: int, bond: bytes) -> Handshake:
        """Our half, over the channel whose listener showed the certificate with ``fingerprint``."""
        self._attempt += 1
        hello = Hello(
            magic=MAGIC,
            version=self._version,
            run=self.run,
            peer=self.peer,
            nonce=self._nonce(),
            life=self._life,
            attempt=self._attempt,
            lane=lane,
            bond=bond,
        )
        return Handshake(role, hello, fingerprint, sign=self._sign, verify=self._verify, expected=expected)


def transcript(fingerprint: bytes, dialler_hello: bytes, listener_hello: bytes) -> bytes:
    """What both proofs cover, every part with its length."""
    parts = (fingerprint, dialler_hello, listener_hello)
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def signed_bytes(role: Role, covered: bytes) -> bytes:
    """What the side with ``role`` signs."""
    return CONTEXT + role.value + covered
