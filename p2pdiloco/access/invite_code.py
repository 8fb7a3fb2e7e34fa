"""An invite as people paste it: ``p2pdiloco`` and base58 of run, key, certificate and addresses, with a checksum.

What an invite holds, in order: kind (1 byte: a key for whoever has the invite, or a certificate for one peer by name),
run (20), secret (16) or the peer's key (32), role (1), cap (4), not after (4), the first 4 bytes of its signer's key,
signature (64), the key of a directory node (32) and its addresses, checksum (4).

Rules of this file:
1. At most TEXT_LIMIT characters, all letters and digits: one double click marks it, and no chat program bends it. As
   many addresses as fit.
2. A typo is told as one, by the checksum. What decodes encodes to the same text.
3. An invite's key is made of its secret: 16 bytes are as hard to guess as the key. Whoever has the text has the key.
4. Bytes only. The signature is checked by whoever is shown the chain; who joins cannot know the founder's key before it
   has the manifest, which the run's id proves.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Sequence

import base58
from msgspec import Struct

from p2pdiloco.access.certificates import HINT_BYTES, SIGNATURE_BYTES, Kind, Role
from p2pdiloco.protocol.ids import DIGEST_BYTES, PeerId, RunId, digest_of
from p2pdiloco.wire.peer_ids import KEY_BYTES, key_of, peer_id_of

PREFIX = "p2pdiloco"
TEXT_LIMIT = 250
"""Characters."""
TEXT_LEAST = 80
"""Shorter text means something else."""
SECRET_BYTES = 16
CHECKSUM_BYTES = 4
_CHECK_CONTEXT = b"p2pdiloco invite 1"
_TERMS = struct.Struct(">BII")
_PORT = struct.Struct(">H")
_IP4, _IP6, _NAME, _NAME4 = 4, 6, 7, 8
_FAMILIES = {"dns": _NAME, "dns4": _NAME4}
_NAME_FORM = re.compile(r"[A-Za-z0-9._-]{1,253}")


class InviteError(ValueError):
    """The text is no invite; it says why and what to do."""


class Invite(Struct, frozen=True, kw_only=True):
    """An invite (``secret``), or the certificate of one peer (``peer``)."""

    run: RunId
    secret: bytes = b""
    peer: PeerId | None = None
    role: Role
    cap: int
    not_after: int
    hint: bytes
    """How the key of whoever signed it begins."""
    signature: bytes
    directory: PeerId
    """A node of the directory."""
    addresses: tuple[str, ...]
    """Where it listens: multiaddrs without its id, best first."""

    @property
    def kind(self) -> Kind:
        """Of its certificate."""
        return Kind.INVITE if self.peer is None else Kind.PEER

    def initial_peers(self) -> tuple[str, ...]:
        """The addresses with the node's id."""
        return tuple(f"{address}/p2p/{self.directory}" for address in self.addresses)


def is_invite(text: str) -> bool:
    """Whether somebody means an invite, if perhaps not all of one; a run's name is shorter."""
    return text.strip().startswith(PREFIX) and len(text) >= TEXT_LEAST


def encode_invite(invite: Invite) -> str:
    """The text, with as many addresses as fit.

    Raises:
        ValueError: not even one address fits, or it cannot be written so.
    """
    addresses: Sequence[str] = invite.addresses
    while addresses:
        data = _packed(invite, addresses)
        text: str = PREFIX + base58.b58encode(data + _checksum(data)).decode("ascii")
        if len(text) <= TEXT_LIMIT:
            return text
        addresses = addresses[:-1]
    raise ValueError(f"no invite of at most {TEXT_LIMIT} characters has room for the address {invite.addresses[:1]}")


def decode_invite(text: str) -> Invite:
    """The invite that ``text`` is; white space around it and line breaks in it do not matter. ``clean_invite`` is for
    text that goes on to a file, a command or another program.

    Raises:
        InviteError: it is none, or something else stands beside it.
    """
    text = "".join(text.split())
    if not text.startswith(PREFIX):
        raise InviteError(f"an invite begins with {PREFIX}: copy all of it")
    if len(text) > TEXT_LIMIT:
        raise InviteError(
            f"an invite has at most {TEXT_LIMIT} characters, this one has {len(text)}: copy it again, and nothing else"
        )
    try:
        data = base58.b58decode(text[len(PREFIX) :])
    except ValueError:
        raise InviteError(
            "the invite has a character that none has (0, O, I, l and signs): copy it again, and nothing else"
        ) from None
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise InviteError(
            "the invite has a typo, or a piece of it is missing, or something else stands beside it: copy it again"
        )
    try:
        invite = _unpacked(body)
        for address in invite.addresses:
            _packed_address(address)  # which complains of a name that is none
    except (ValueError, KeyError, struct.error) as error:
        raise InviteError(f"the invite cannot be read ({error}): it is of another release of p2pdiloco") from None
    return invite


def clean_invite(text: str) -> str:
    """``text`` checked and encoded anew: letters and digits alone.

    Raises:
        InviteError: it is no invite, or something else stands beside it.
    """
    return encode_invite(decode_invite(text))


def _packed(invite: Invite, addresses: Sequence[str]) -> bytes:
    holder = invite.secret if invite.peer is None else key_of(invite.peer)
    parts = (
        bytes([invite.kind]),
        bytes.fromhex(invite.run),
        holder,
        _TERMS.pack(invite.role, invite.cap, invite.not_after),
        invite.hint,
        invite.signature,
        key_of(invite.directory),
        *map(_packed_address, addresses),
    )
    return b"".join(parts)


def _unpacked(data: bytes) -> Invite:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        if at > len(data):
            raise ValueError("it is too short")
        return data[at - size : at]

    kind = Kind(take(1)[0])
    run = RunId(take(DIGEST_BYTES).hex())
    secret = take(SECRET_BYTES) if kind is Kind.INVITE else b""
    peer = peer_id_of(take(KEY_BYTES)) if kind is Kind.PEER else None
    role, cap, not_after = _TERMS.unpack(take(_TERMS.size))
    hint, signature, directory = take(HINT_BYTES), take(SIGNATURE_BYTES), peer_id_of(take(KEY_BYTES))
    addresses = []
    while at < len(data):
        family = take(1)[0]
        if family == _IP4:
            host = f"/ip4/{ipaddress.IPv4Address(take(4))}"
        elif family == _IP6:
            host = f"/ip6/{ipaddress.IPv6Address(take(16))}"
        else:
            name = next((name for name, number in _FAMILIES.items() if number == family), "")
            host = f"/{name}/{take(take(1)[0]).decode('ascii')}"
        addresses.append(f"{host}/tcp/{_PORT.unpack(take(2))[0]}")
    if not addresses:
        raise ValueError("it has no address")
    return Invite(
        run=run,
        secret=secret,
        peer=peer,
        role=Role(role),
        cap=cap,
        not_after=not_after,
        hint=hint,
        signature=signature,
        directory=directory,
        addresses=tuple(addresses),
    )


def _packed_address(text: str) -> bytes:
    _, family, host, tcp, port = text.split("/")
    if tcp != "tcp":
        raise ValueError(f"{text} is not a TCP address")
    end = _PORT.pack(int(port))
    if family == "ip4":
        return bytes([_IP4]) + ipaddress.IPv4Address(host).packed + end
    if family == "ip6":
        return bytes([_IP6]) + ipaddress.IPv6Address(host).packed + end
    if _NAME_FORM.fullmatch(host) is None:
        raise ValueError(f"{host!r} is no name of a machine")
    return bytes([_FAMILIES[family], len(host)]) + host.encode("ascii") + end


def _checksum(data: bytes) -> bytes:
    return bytes.fromhex(digest_of(_CHECK_CONTEXT, data))[:CHECKSUM_BYTES]
