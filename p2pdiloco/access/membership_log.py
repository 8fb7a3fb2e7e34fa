"""Signed statements about members (introductions, that is, a peer's whole chain; bans; closed invites), and about the
end of the run.

An introduction is ``i`` and a chain that begins at the founder. A ban is ``b``, the banned key (32 bytes; a peer's or
an invite's), the banning admin's signature (64), its key (32), and its chain, empty for the founder. The closing of an
invite is ``c`` and the same fields. Before the chain it has a list: the number of peers that stay members (2), and the
first 16 bytes of the key of each, in ascending order. A prolonging of the run is ``p``, the number of steps (of tokens,
in a run with a token budget) at which it ends (8), the signature, the key, and the chain.

Rules of this file:
1. Every peer that knows run and founder can verify a statement. A statement stays valid for ever.
2. The encoding is canonical. Several statements are concatenated, each after its length (2 bytes, big-endian), on the
   wire and on disk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from msgspec import Struct

from p2pdiloco.access.certificates import (
    CHAIN_LIMIT,
    HINT_BYTES,
    CertificateError,
    Grant,
    Kind,
    Role,
    decode_chain,
    follow,
    hint_of,
)
from p2pdiloco.protocol.config import MOST_BUDGET
from p2pdiloco.protocol.ids import PeerId, RunId, digest_of
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.wire.peer_ids import KEY_BYTES, Sign, Verify, key_of, peer_id_of

INTRODUCTION, BAN, CLOSING, PROLONGING = b"i", b"b", b"c", b"p"
_SIGNED = {BAN: "ban", CLOSING: "closing", PROLONGING: "prolonging"}
KEPT_LIMIT = 512
"""Maximum number of peers that a closed invite keeps as members."""
KEPT_BYTES = 16
"""Bytes of each kept key: enough that no other key with the same beginning can be found."""
_KEPT = struct.Struct(">H")
STATEMENT_LIMIT = 1 + 2 * KEY_BYTES + SIGNATURE_BYTES + _KEPT.size + KEPT_LIMIT * KEPT_BYTES + CHAIN_LIMIT
MARK_BYTES = 8
"""Bytes of a statement's digest by which peers name it."""
_LENGTH = struct.Struct(">H")
_END = struct.Struct(">Q")


class Ban(Struct, frozen=True):
    """A ban: ``subject`` is not a member, nor is any peer whose chain contains it.

    With ``kept`` it closes the invite ``subject``: the kept ones of its guests stay members, and no peer is admitted by
    it any more.
    """

    subject: PeerId
    by: Grant
    kept: frozenset[bytes] | None = None
    """First bytes of the keys of peers that stay; None: not a closing."""

    @property
    def is_closing(self) -> bool:
        """True if this closes an invite."""
        return self.kept is not None

    def keeps(self, guest: PeerId) -> bool:
        """Return whether ``guest``, which joined with the invite, stays a member."""
        return self.kept is not None and _kept_key(guest) in self.kept


class Prolonging(Struct, frozen=True):
    """The run ends at ``last``: a number of steps, or of tokens if the run has a token budget."""

    last: int
    by: Grant


def introduction(grant: Grant) -> bytes:
    """Return the statement that introduces the peer of ``grant``."""
    return INTRODUCTION + grant.chain().encode()


def ban(run: RunId, subject: PeerId, by: Grant, sign: Sign) -> bytes:
    """Return the statement with which the admin ``by`` bans ``subject``."""
    return _signed(BAN, run, key_of(subject), b"", by, sign)


def closing(run: RunId, invite: PeerId, kept: Iterable[PeerId], by: Grant, sign: Sign) -> bytes:
    """Return the statement with which the admin ``by`` closes an invite's key to all but the peers in ``kept``.

    Raises:
        ValueError: more than KEPT_LIMIT peers would stay.
    """
    stay = sorted({_kept_key(peer) for peer in kept})
    if len(stay) > KEPT_LIMIT:
        raise ValueError(f"{len(stay)} peers joined with the invite, and at most {KEPT_LIMIT} can be named as staying")
    listed = _KEPT.pack(len(stay)) + b"".join(stay)
    return _signed(CLOSING, run, key_of(invite), listed, by, sign)


def prolonging(run: RunId, last: int, by: Grant, sign: Sign) -> bytes:
    """Return the statement with which the admin ``by`` lets the run end at ``last`` steps or tokens."""
    return _signed(PROLONGING, run, _END.pack(last), b"", by, sign)


def mark_of(statement: bytes) -> bytes:
    """Return the MARK_BYTES that identify a statement."""
    return bytes.fromhex(digest_of(statement))[:MARK_BYTES]


def read_statement(run: RunId, founder: Grant, statement: bytes, verify: Verify) -> Grant | Ban | Prolonging:
    """Verify a statement; return the introduced peer's grant, the ban, or the prolonging.

    Raises:
        CertificateError: the statement is malformed or not signed as required.
    """
    if len(statement) > STATEMENT_LIMIT:
        raise CertificateError(f"a statement has at most {STATEMENT_LIMIT} bytes, not {len(statement)}")
    tag, rest = statement[:1], statement[1:]
    if tag == INTRODUCTION:
        grant = _whole(run, founder, rest, verify)
        if grant.kind is not Kind.PEER or grant.role is Role.OBSERVER:
            raise CertificateError("only peers that take part are introduced")
        return grant
    about, signature, signer, rest = _split(tag, rest)
    listed, chain = _split_kept(rest) if tag == CLOSING else (b"", rest)
    by = _whole(run, founder, chain, verify) if chain else founder
    if by.subject != signer or by.kind is not Kind.PEER or by.role is not Role.ADMIN:
        raise CertificateError(f"{signer} may not ban, nor prolong the run")
    if not verify(signer, _signed_bytes(tag, run, signer, about, listed), signature):
        raise CertificateError(f"{signer} has not signed the {_SIGNED[tag]} in this run")
    if tag == PROLONGING:
        (last,) = _END.unpack(about)
        if not 1 <= last <= MOST_BUDGET:
            raise CertificateError(f"a run cannot end at {last} steps or tokens")
        return Prolonging(last, by)
    stay = [listed[at : at + KEPT_BYTES] for at in range(_KEPT.size, len(listed), KEPT_BYTES)]
    if stay != sorted(set(stay)):
        raise CertificateError("the list of peers that keep a closed invite is malformed")
    return Ban(peer_id_of(about), by, frozenset(stay) if tag == CLOSING else None)


def named_in(statement: bytes) -> tuple[PeerId, PeerId, bytes]:
    """Return subject, signer and kind of a statement, without verifying a signature. A prolonging's subject is its
    signer.

    Raises:
        ValueError: the statement is malformed.
    """
    tag, rest = statement[:1], statement[1:]
    if tag == INTRODUCTION:
        *earlier, last = decode_chain(rest).certificates
        return last.subject, earlier[-1].subject if earlier else PeerId(""), tag
    about, _, signer, _ = _split(tag, rest)
    return signer if tag == PROLONGING else peer_id_of(about), signer, tag


def join_statements(statements: Iterable[bytes]) -> bytes:
    """Concatenate statements, each after its length."""
    return b"".join(_LENGTH.pack(len(statement)) + statement for statement in statements)


def split_statements(data: bytes) -> list[bytes]:
    """Reverse ``join_statements``.

    Raises:
        CertificateError: ``data`` is malformed.
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


def last_in(statement: bytes) -> int:
    """Return the end that a prolonging names, without verifying its signature; 0 for other statements."""
    if not statement.startswith(PROLONGING) or len(statement) < 1 + _END.size:
        return 0
    (last,) = _END.unpack(statement[1 : 1 + _END.size])
    return int(last)


def _signed(tag: bytes, run: RunId, about: bytes, listed: bytes, by: Grant, sign: Sign) -> bytes:
    """Return the statement of the kind ``tag`` that ``by`` makes about a key, or about the run's end."""
    signature = sign(_signed_bytes(tag, run, by.subject, about, listed))
    chain = by.chain().encode() if by.depth else b""
    return tag + about + signature + key_of(by.subject) + listed + chain


def _signed_bytes(tag: bytes, run: RunId, signer: PeerId, about: bytes, listed: bytes) -> bytes:
    return f"p2pdiloco {_SIGNED[tag]} 1\x00{run}\x00".encode() + key_of(signer) + about + listed


def _split(tag: bytes, data: bytes) -> tuple[bytes, bytes, PeerId, bytes]:
    """Return what a signed statement is about, the signature, the signer, and the rest."""
    if tag not in _SIGNED:
        raise CertificateError("the statement has an unknown kind")
    signature_at = _END.size if tag == PROLONGING else KEY_BYTES
    signer_at = signature_at + SIGNATURE_BYTES
    end = signer_at + KEY_BYTES
    if len(data) < end:
        raise CertificateError(f"a {_SIGNED[tag]} is cut off")
    return data[:signature_at], data[signature_at:signer_at], peer_id_of(data[signer_at:end]), data[end:]


def _split_kept(data: bytes) -> tuple[bytes, bytes]:
    """Return the list of the peers that keep a closed invite, and the rest."""
    if len(data) < _KEPT.size:
        raise CertificateError("the closing of an invite is cut off")
    (number,) = _KEPT.unpack(data[: _KEPT.size])
    end = _KEPT.size + number * KEPT_BYTES
    if number > KEPT_LIMIT or len(data) < end:
        raise CertificateError("the list of peers that keep a closed invite is malformed")
    return data[:end], data[end:]


def _whole(run: RunId, founder: Grant, data: bytes, verify: Verify) -> Grant:
    chain = decode_chain(data)
    if chain.hint != hint_of(founder.subject):
        raise CertificateError(f"the chain {chain.hint.hex()} does not begin at the founder ({HINT_BYTES} bytes)")
    return follow(run, founder, chain.certificates, verify)


def _kept_key(peer: PeerId) -> bytes:
    return key_of(peer)[:KEPT_BYTES]
