"""Certificates: permissions of a key in a run, signed along a chain that begins at the founder's key.

A certificate is 108 bytes: kind (1), role (1), key (32), weight cap (4), not after (4), uses (2), signature (64).
Numbers are big-endian. The signature covers a context string, the run's id, the signer's key and the first 44 bytes.
So a certificate is valid for one run, one signer and one key. A chain consists of the first 4 bytes of the key at which
it begins, and its certificates. The last one is its holder's.

Rules of this file:
1. The encoding is canonical, and every length is fixed: decoding and encoding again gives the same bytes.
2. The founder may sign every certificate. An admin peer may sign invites and peers of any role. An invite's key may
   sign peers of at most the invite's role. Any other peer may sign observers, for its own requests to the run.
   Nobody else may sign.
3. Permissions never grow along a chain. A grant has the smallest cap and the earliest end of its chain.
4. An invite says how many peers it admits: 1 to USES_LIMIT. A peer's certificate always says 1.
5. The module handles bytes and values only; keys and clocks come from outside.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from msgspec import Struct
from msgspec.structs import replace

from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.wire.peer_ids import Sign, Verify, key_of, peer_id_of

CONTEXT = b"p2pdiloco certificate 2\x00"
_BODY = struct.Struct(">BB32sIIH")
CERTIFICATE_BYTES = _BODY.size + SIGNATURE_BYTES
HINT_BYTES = 4
"""Bytes of the first key that a chain names; the key is looked up among the few that may begin a chain."""
DEPTH_LIMIT = 7
"""Maximum number of certificates in a chain: an admin by invite, three times, and an observer."""
CHAIN_LIMIT = HINT_BYTES + DEPTH_LIMIT * CERTIFICATE_BYTES
"""Maximum bytes of a chain."""
NO_CAP = NEVER = 0xFFFF_FFFF
CAP_UNIT = 0.001
"""Unit of ``Certificate.cap``, in ownership weight."""
USES_LIMIT = 256
"""Maximum number of peers that an invite may admit."""


class CertificateError(ValueError):
    """A chain grants nothing. The text says why."""


class Kind(IntEnum):
    """Kind of key that a certificate is for."""

    INVITE = 1
    """The key of an invite: its holder can certify a peer."""
    PEER = 2


class Role(IntEnum):
    """Permissions of a peer; each role includes those before it."""

    OBSERVER = 0
    """May request the manifest and the status."""
    FOLLOWER = 1
    """May track the global model."""
    LEARNER = 2
    """May contribute."""
    ADMIN = 3
    """May invite and ban."""


class Certificate(Struct, frozen=True, kw_only=True):
    """One certificate of a chain."""

    kind: Kind
    role: Role
    subject: PeerId
    """The certified key, as a peer id; also for an invite."""
    cap: int = NO_CAP
    """Maximum ownership weight, in CAP_UNIT."""
    not_after: int = NEVER
    """End of validity, in seconds since 1970."""
    uses: int = 1
    """Number of peers that an invite admits; 1 for a peer."""
    signature: bytes = b""

    def body(self) -> bytes:
        """Return the signed bytes, without run and signer."""
        return _BODY.pack(self.kind, self.role, key_of(self.subject), self.cap, self.not_after, self.uses)

    def encode(self) -> bytes:
        """Return the encoding: CERTIFICATE_BYTES bytes."""
        return self.body() + self.signature


class Chain(Struct, frozen=True):
    """Certificates from a key that begins with ``hint`` to their holder's key."""

    hint: bytes
    certificates: tuple[Certificate, ...]

    def encode(self) -> bytes:
        """Return the encoding that travels."""
        return self.hint + b"".join(certificate.encode() for certificate in self.certificates)


class Grant(Struct, frozen=True, kw_only=True):
    """Verified permissions of a key, with the certificates that lead to it from the founder's (empty: the founder)."""

    subject: PeerId
    kind: Kind = Kind.PEER
    role: Role = Role.ADMIN
    cap: int = NO_CAP
    not_after: int = NEVER
    uses: int = 1
    steps: tuple[Grant, ...] = ()
    """Grants of the keys before it, the founder's first."""
    certificates: tuple[Certificate, ...] = ()

    @property
    def depth(self) -> int:
        """Number of certificates between the founder (0) and this key."""
        return len(self.certificates)

    @property
    def path(self) -> tuple[Grant, ...]:
        """``steps`` and this grant itself."""
        return (*self.steps, self)

    @property
    def most_weight(self) -> float:
        """Maximum ownership weight. Followers and observers have 0: they own only if no other peer can."""
        if self.role < Role.LEARNER:
            return 0.0
        return float("inf") if self.cap == NO_CAP else self.cap * CAP_UNIT

    def chain(self) -> Chain:
        """Return the whole chain; the founder's has no certificates."""
        return Chain(hint_of(self.path[0].subject), self.certificates)


def hint_of(key: PeerId) -> bytes:
    """Return the bytes by which a chain names the key at which it begins."""
    return key_of(key)[:HINT_BYTES]


def decode_certificate(data: bytes) -> Certificate:
    """Decode one certificate.

    Raises:
        CertificateError: the length, kind, role or number of uses is not valid.
    """
    if len(data) != CERTIFICATE_BYTES:
        raise CertificateError(f"a certificate has {CERTIFICATE_BYTES} bytes, not {len(data)}")
    kind, role, key, cap, not_after, uses = _BODY.unpack(data[: _BODY.size])
    try:
        certificate = Certificate(
            kind=Kind(kind),
            role=Role(role),
            subject=peer_id_of(key),
            cap=cap,
            not_after=not_after,
            uses=uses,
            signature=data[_BODY.size :],
        )
    except ValueError as error:
        raise CertificateError(f"a certificate has an unknown kind or role ({error})") from None
    if not are_uses_valid(certificate.kind, uses):
        raise CertificateError(f"a certificate of a {certificate.kind.name.lower()} cannot have {uses} uses")
    return certificate


def are_uses_valid(kind: Kind, uses: int) -> bool:
    """Return whether a certificate of this kind may have so many uses (rule 4)."""
    return 1 <= uses <= (USES_LIMIT if kind is Kind.INVITE else 1)


def decode_chain(data: bytes) -> Chain:
    """Decode a chain of at least one certificate.

    Raises:
        CertificateError: the chain is malformed or too long.
    """
    number, rest = divmod(len(data) - HINT_BYTES, CERTIFICATE_BYTES)
    if not 1 <= number <= DEPTH_LIMIT or rest:
        raise CertificateError(
            f"{len(data)} bytes are not a chain of 1 to {DEPTH_LIMIT} certificates of {CERTIFICATE_BYTES} bytes: it is "
            "damaged, or comes from another release of p2pdiloco"
        )
    cuts = range(HINT_BYTES, len(data), CERTIFICATE_BYTES)
    return Chain(data[:HINT_BYTES], tuple(decode_certificate(data[at : at + CERTIFICATE_BYTES]) for at in cuts))


def signed_bytes(run: RunId, signer: PeerId, certificate: Certificate) -> bytes:
    """Return the bytes that the signer of a certificate signs."""
    return CONTEXT + run.encode() + b"\x00" + key_of(signer) + certificate.body()


def certify(run: RunId, signer: PeerId, certificate: Certificate, sign: Sign) -> Certificate:
    """Return ``certificate`` with a signature made by ``sign``, which holds the key of ``signer``."""
    return replace(certificate, signature=sign(signed_bytes(run, signer, certificate)))


def follow(run: RunId, anchor: Grant, certificates: tuple[Certificate, ...], verify: Verify) -> Grant:
    """Verify ``certificates``, the first of which ``anchor`` signed, and return the grant of the last.

    Raises:
        CertificateError: a certificate was not signed by the key before it for this run, or may not be signed by it.
    """
    if anchor.depth + len(certificates) > DEPTH_LIMIT:
        raise CertificateError(f"the chain has more than {DEPTH_LIMIT} certificates")
    grant = anchor
    for certificate in certificates:
        subject = certificate.subject
        if not may_sign(grant, certificate):
            raise CertificateError(f"{grant.subject} may not certify {subject} with this role")
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
            uses=certificate.uses,
            steps=grant.path,
            certificates=(*grant.certificates, certificate),
        )
    return grant


def may_sign(signer: Grant, certificate: Certificate) -> bool:
    """Return whether ``signer`` may sign ``certificate`` (rule 2)."""
    if signer.kind is Kind.INVITE:
        return certificate.kind is Kind.PEER and certificate.role <= signer.role
    if signer.role is Role.ADMIN:
        return True
    return signer.role > Role.OBSERVER and certificate.kind is Kind.PEER and certificate.role is Role.OBSERVER
