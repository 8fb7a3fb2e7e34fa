"""What members tell each other of members: introductions (a peer's whole chain) and bans, each signed, one by one.

An introduction is ``i`` and a chain that begins at the founder. A ban is ``b``, the banned key (32 bytes; a peer's or
an invite's), the banning admin's signature (64), its key (32), and its chain, empty for the founder.

Rules of this file:
1. A statement proves itself to whoever knows run and founder; it is good for ever and for nothing else.
2. There is one way to write each. Several travel and lie on the disk one after the other, each with its length (2
   bytes, big-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from msgspec import Struct

from p2pdiloco.protocol.identifiers import PeerId, RunId, digest_of
from p2pdiloco.wire.certificates import (
    CHAIN_LIMIT,
    HINT_BYTES,
    SIGNATURE_BYTES,
    CertificateError,
    Grant,
    Kind,
    Role,
    Sign,
    Verify,
    decode_chain,
    follow,
    hint_of,
)
from p2pdiloco.wire.peer_ids import KEY_BYTES, key_of, peer_id_of

BAN_CONTEXT = b"p2pdiloco ban 1\x00"
INTRODUCTION, BAN = b"i", b"b"
STATEMENT_LIMIT = 1 + 2 * KEY_BYTES + SIGNATURE_BYTES + CHAIN_LIMIT
MARK_BYTES = 8
"""Of a statement's digest: how peers name what they have."""
_LENGTH = struct.Struct(">H")


class Ban(Struct, frozen=True):
    """``subject`` is no member, nor is anybody whose chain goes through it."""

    subject: PeerId
    by: Grant


def introduction(grant: Grant) -> bytes:
    """The statement that introduces the peer of ``grant``."""
    return INTRODUCTION + grant.chain().encode()


def ban(run: RunId, subject: PeerId, by: Grant, sign: Sign) -> bytes:
    """The statement with which the admin ``by`` bans ``subject``."""
    chain = by.chain().encode() if by.depth else b""
    return BAN + key_of(subject) + sign(_banned_bytes(run, by.subject, subject)) + key_of(by.subject) + chain


def mark_of(statement: bytes) -> bytes:
    """MARK_BYTES that name a statement."""
    return bytes.fromhex(digest_of(statement))[:MARK_BYTES]


def read_statement(run: RunId, founder: Grant, statement: bytes, verify: Verify) -> Grant | Ban:
    """What a statement says: who is introduced, or banned.

    Raises:
        CertificateError: malformed, or not signed as it must be.
    """
    if len(statement) > STATEMENT_LIMIT:
        raise CertificateError(f"a statement has at most {STATEMENT_LIMIT} bytes, not {len(statement)}")
    tag, rest = statement[:1], statement[1:]
    if tag == INTRODUCTION:
        grant = _whole(run, founder, rest, verify)
        if grant.kind is not Kind.PEER or grant.role is Role.OBSERVER:
            raise CertificateError("only peers that take part are introduced")
        return grant
    if tag == BAN:
        return _read_ban(run, founder, rest, verify)
    raise CertificateError("a statement of a kind that is not known here")


def named_in(statement: bytes) -> tuple[PeerId, PeerId, bool]:
    """Who is introduced, or banned; by whom; whether it is a ban. No signature was looked at.

    Raises:
        ValueError: malformed.
    """
    tag, rest = statement[:1], statement[1:]
    if tag == BAN and len(rest) >= 2 * KEY_BYTES + SIGNATURE_BYTES:
        signer_at = KEY_BYTES + SIGNATURE_BYTES
        return peer_id_of(rest[:KEY_BYTES]), peer_id_of(rest[signer_at : signer_at + KEY_BYTES]), True
    if tag != INTRODUCTION:
        raise CertificateError("a statement of a kind that is not known here")
    *earlier, last = decode_chain(rest).certificates
    return last.subject, earlier[-1].subject if earlier else PeerId(""), False


def join_statements(statements: Iterable[bytes]) -> bytes:
    """One after the other, each with its length."""
    return b"".join(_LENGTH.pack(len(statement)) + statement for statement in statements)


def split_statements(data: bytes) -> list[bytes]:
    """What ``join_statements`` joined.

    Raises:
        CertificateError: malformed.
    """
    found, at = [], 0
    while at < len(data):
        end = at + _LENGTH.size
        if end > len(data):
            raise CertificateError("a list of statements is cut off")
        begin, end = end, end + _LENGTH.unpack(data[at:end])[0]
        if not begin < end <= min(len(data), begin + STATEMENT_LIMIT):
            raise CertificateError("a list of statements is cut off, or one of them is too long")
        found.append(data[begin:end])
        at = end
    return found


def _read_ban(run: RunId, founder: Grant, data: bytes, verify: Verify) -> Ban:
    signer_at = KEY_BYTES + SIGNATURE_BYTES
    chain_at = signer_at + KEY_BYTES
    if len(data) < chain_at:
        raise CertificateError("a ban is cut off")
    subject, signer = peer_id_of(data[:KEY_BYTES]), peer_id_of(data[signer_at:chain_at])
    by = founder if len(data) == chain_at else _whole(run, founder, data[chain_at:], verify)
    if by.subject != signer or by.kind is not Kind.PEER or by.role is not Role.ADMIN:
        raise CertificateError(f"{signer} may not ban")
    if not verify(signer, _banned_bytes(run, signer, subject), data[KEY_BYTES:signer_at]):
        raise CertificateError(f"{signer} has not signed the ban of {subject} in this run")
    return Ban(subject, by)


def _whole(run: RunId, founder: Grant, data: bytes, verify: Verify) -> Grant:
    chain = decode_chain(data)
    if chain.hint != hint_of(founder.subject):
        raise CertificateError(f"the chain {chain.hint.hex()} does not begin at the founder ({HINT_BYTES} bytes)")
    return follow(run, founder, chain.certificates, verify)


def _banned_bytes(run: RunId, signer: PeerId, subject: PeerId) -> bytes:
    return BAN_CONTEXT + run.encode() + b"\x00" + key_of(signer) + key_of(subject)
