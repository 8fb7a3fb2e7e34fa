"""Certificates: what a key may do in a run, signed along a chain that begins at the founder's key.

A certificate is 106 bytes: kind (1), role (1), key (32), weight cap (4), not after (4), signature (64); numbers are
big-endian. The signature covers a context string, the run's id, the signer's key and the first 42 bytes, so that a
certificate serves one run, one signer and one key. A chain is the first 4 bytes of the key that it begins at, and its
certificates, the last one being its holder's.

Rules of this file:
1. There is one way to write a certificate, and every length is fixed: what decodes encodes to the same bytes.
2. The founder signs everything. A peer that is admin signs invites, and peers of any role. An invite's key signs peers
   of its role or less. Any other peer signs observers, for its own questions beside the run. Nobody else signs.
3. What is granted along a chain is never more than what was granted before: the least role of an invite and what came
   of it, the smallest cap, the earliest end.
4. Bytes and values only; keys and clocks come from outside.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum

from msgspec import Struct

from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.wire.peer_ids import key_of, peer_id_of

CONTEXT = b"p2pdiloco certificate 1\x00"
SIGNATURE_BYTES = 64
_BODY = struct.Struct(">BB32sII")
CERTIFICATE_BYTES = _BODY.size + SIGNATURE_BYTES
HINT_BYTES = 4
"""Of the key at which a chain begins; it is looked for among the few that may be one."""
DEPTH_LIMIT = 7
"""Certificates in a chain: an admin by invite, three times, and an observer."""
CHAIN_LIMIT = HINT_BYTES + DEPTH_LIMIT * CERTIFICATE_BYTES
"""Bytes of a chain."""
NO_CAP = NEVER = 0xFFFF_FFFF
CAP_UNIT = 0.001
"""Of ownership weight."""

Sign = Callable[[bytes], bytes]
Verify = Callable[[PeerId, bytes, bytes], bool]


class CertificateError(ValueError):
    """A chain grants nothing; the text says why."""


class Kind(IntEnum):
    """Of what the key is."""

    INVITE = 1
    """Whoever has it certifies a peer."""
    PEER = 2


class Role(IntEnum):
    """What a peer may do; each may what those before it may."""

    OBSERVER = 0
    """Ask: for the manifest, the status."""
    FOLLOWER = 1
    """Track the global model."""
    LEARNER = 2
    """Contribute."""
    ADMIN = 3
    """Invite and ban."""


class Certificate(Struct, frozen=True, kw_only=True):
    """One link of a chain."""

    kind: Kind
    role: Role
    subject: PeerId
    """The key that is certified, as a peer id; an invite's, too."""
    cap: int = NO_CAP
    """Most weight, in CAP_UNIT."""
    not_after: int = NEVER
    """Seconds since 1970."""
    signature: bytes = b""

    def body(self) -> bytes:
        """What is signed, without run and signer."""
        return _BODY.pack(self.kind, self.role, key_of(self.subject), self.cap, self.not_after)

    def encode(self) -> bytes:
        """CERTIFICATE_BYTES bytes."""
        return self.body() + self.signature


class Chain(Struct, frozen=True):
    """Certificates from a key that begins with ``hint`` to their holder's."""

    hint: bytes
    certificates: tuple[Certificate, ...]

    def encode(self) -> bytes:
        """As it travels."""
        return self.hint + b"".join(certificate.encode() for certificate in self.certificates)


class Grant(Struct, frozen=True, kw_only=True):
    """What a key may do, by the certificates that lead to it from the founder's (none: it is the founder's)."""

    subject: PeerId
    kind: Kind = Kind.PEER
    role: Role = Role.ADMIN
    cap: int = NO_CAP
    not_after: int = NEVER
    steps: tuple[Grant, ...] = ()
    """Of the keys before it, the founder's first."""
    certificates: tuple[Certificate, ...] = ()

    @property
    def depth(self) -> int:
        """How far it is from the founder, who has 0."""
        return len(self.certificates)

    @property
    def path(self) -> tuple[Grant, ...]:
        """``steps`` and itself."""
        return (*self.steps, self)

    @property
    def most_weight(self) -> float:
        """Of ownership; followers and observers own nothing that others can own."""
        if self.role < Role.LEARNER:
            return 0.0
        return float("inf") if self.cap == NO_CAP else self.cap * CAP_UNIT

    def chain(self) -> Chain:
        """The whole chain; the founder's holds nothing."""
        return Chain(hint_of(self.path[0].subject), self.certificates)


def hint_of(key: PeerId) -> bytes:
    """How a chain names the key at which it begins."""
    return key_of(key)[:HINT_BYTES]


def decode_certificate(data: bytes) -> Certificate:
    """What ``encode`` made.

    Raises:
        CertificateError: another length, kind or role.
    """
    if len(data) != CERTIFICATE_BYTES:
        raise CertificateError(f"a certificate has {CERTIFICATE_BYTES} bytes, not {len(data)}")
    kind, role, key, cap, not_after = _BODY.unpack(data[: _BODY.size])
    try:
        return Certificate(
            kind=Kind(kind),
            role=Role(role),
            subject=peer_id_of(key),
            cap=cap,
            not_after=not_after,
            signature=data[_BODY.size :],
        )
    except ValueError as error:
        raise CertificateError(f"a certificate of a kind that is not known here ({error})") from None


def decode_chain(data: bytes) -> Chain:
    """A chain of at least one certificate.

    Raises:
        CertificateError: malformed, or too long.
    """
    number, rest = divmod(len(data) - HINT_BYTES, CERTIFICATE_BYTES)
    if not 1 <= number <= DEPTH_LIMIT or rest:
        raise CertificateError(f"{len(data)} bytes are no chain of 1 to {DEPTH_LIMIT} certificates")
    cuts = range(HINT_BYTES, len(data), CERTIFICATE_BYTES)
    return Chain(data[:HINT_BYTES], tuple(decode_certificate(data[at : at + CERTIFICATE_BYTES]) for at in cuts))


def signed_bytes(run: RunId, signer: PeerId, certificate: Certificate) -> bytes:
    """What the signer of a certificate signs."""
    return CONTEXT + run.encode() + b"\x00" + key_of(signer) + certificate.body()


def certify(run: RunId, signer: PeerId, certificate: Certificate, sign: Sign) -> Certificate:
    """``certificate`` with the signature that ``signer``'s ``sign`` makes."""
    return Certificate(
        kind=certificate.kind,
        role=certificate.role,
        subject=certificate.subject,
        cap=certificate.cap,
        not_after=certificate.not_after,
        signature=sign(signed_bytes(run, signer, certificate)),
    )


def follow(run: RunId, anchor: Grant, certificates: tuple[Certificate, ...], verify: Verify) -> Grant:
    """What the last of ``certificates`` grants, the first of which ``anchor`` has signed.

    Raises:
        CertificateError: one was not signed by the key before it for this run, or that key may not sign it.
    """
    if anchor.depth + len(certificates) > DEPTH_LIMIT:
        raise CertificateError(f"the chain has more than {DEPTH_LIMIT} certificates")
    grant = anchor
    for certificate in certificates:
        subject = certificate.subject
        if not may_sign(grant, certificate):
            raise CertificateError(f"{grant.subject} may not certify {subject} so")
        if subject in {step.subject for step in grant.path}:
            raise CertificateError(f"{subject} is certified twice in one chain")
        if not verify(grant.subject, signed_bytes(run, grant.subject, certificate), certificate.signature):
            raise CertificateError(f"{grant.subject} has not signed the certificate of {subject} for this run")
        grant = Grant(
            subject=subject,
            kind=certificate.kind,
            role=certificate.role,
            cap=min(grant.cap, certificate.cap),
            not_after=min(grant.not_after, certificate.not_after),
            steps=grant.path,
            certificates=(*grant.certificates, certificate),
        )
    return grant


def may_sign(signer: Grant, certificate: Certificate) -> bool:
    """Rule 2."""
    if signer.kind is Kind.INVITE:
        return certificate.kind is Kind.PEER and certificate.role <= signer.role
    if signer.role is Role.ADMIN:
        return True
    return signer.role > Role.OBSERVER and certificate.kind is Kind.PEER and certificate.role is Role.OBSERVER
