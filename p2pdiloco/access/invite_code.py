"""Text form of an invite: ``p2pdiloco`` and base58 of run, key, certificate and addresses, with a checksum.

An invite contains, in order: kind (1 byte: an invite key, or a certificate for one named peer), run (20), secret (16)
or the peer's key (32), role (1), cap (4), not after (4), uses (2), the first 4 bytes of its signer's key, signature
(64), the key of a directory node (32) and its addresses, further nodes in the same way, checksum (4).

Rules of this file:
1. An invite has at most TEXT_LIMIT characters, all letters and digits. A double click selects it, and chat programs
   leave it intact. It contains as many addresses as fit.
2. The checksum detects typos. Decoding and encoding again gives the same text.
3. An invite's key derives from its secret; 16 bytes are as hard to guess as the key. Whoever has the text has the key.
4. The module handles bytes only. The peer that is shown the chain verifies the signature. A joining peer cannot: it
   learns the founder's key from the manifest, which the run's id proves.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import struct
from collections.abc import Sequence

import base58
from msgspec import Struct

from p2pdiloco.access.certificates import HINT_BYTES, Kind, Role, are_uses_valid
from p2pdiloco.protocol.ids import DIGEST_BYTES, PeerId, RunId, digest_of
from p2pdiloco.protocol.messages import SIGNATURE_BYTES
from p2pdiloco.wire.peer_ids import KEY_BYTES, key_of, peer_id_of

PREFIX = "p2pdiloco"
VARIABLE = "P2PDILOCO_INVITE"
"""Environment variable from which commands take an invite, or addresses, unless they are given one."""
TEXT_LIMIT = 400
"""Maximum characters of an invite."""
TEXT_LEAST = 80
"""Shorter text is not meant as an invite."""
SECRET_BYTES = 16
CHECKSUM_BYTES = 4
_CHECK_CONTEXT = b"p2pdiloco invite 2"
_TERMS = struct.Struct(">BIIH")
_PORT = struct.Struct(">H")
_IP4, _IP6, _NAME, _NAME4 = 4, 6, 7, 8
_NODE = 1
"""Stands before the key of a further node."""
_FAMILIES = {"dns": _NAME, "dns4": _NAME4}
_NAME_FORM = re.compile(r"[A-Za-z0-9._-]{1,253}")


class InviteError(ValueError):
    """The text is not an invite. The message says why, and what to do."""


class Invite(Struct, frozen=True, kw_only=True):
    """An invite key (``secret``), or the certificate of one named peer (``peer``)."""

    run: RunId
    secret: bytes = b""
    peer: PeerId | None = None
    role: Role
    cap: int
    not_after: int
    uses: int = 1
    """Number of peers that it admits."""
    hint: bytes
    """First bytes of the signer's key."""
    signature: bytes
    directory: PeerId
    """Id of a directory node."""
    addresses: tuple[str, ...]
    """Multiaddrs of the directory node without its id, best first."""
    others: tuple[str, ...] = ()
    """Multiaddrs of further nodes, with their ids; those of one node follow each other."""

    @property
    def kind(self) -> Kind:
        """Kind of its certificate."""
        return Kind.INVITE if self.peer is None else Kind.PEER

    def initial_peers(self) -> tuple[str, ...]:
        """Return the addresses of the directory nodes, with their ids."""
        return (*(f"{address}/p2p/{self.directory}" for address in self.addresses), *self.others)


def is_invite(text: str) -> bool:
    """Return whether ``text`` is meant as an invite, even if incomplete. Names of runs are shorter."""
    return text.strip().startswith(PREFIX) and len(text) >= TEXT_LEAST


def encode_invite(invite: Invite) -> str:
    """Return the text of ``invite``, with as many addresses as fit.

    Raises:
        ValueError: not even one address fits, or a field cannot be encoded.
    """
    addresses: Sequence[str] = invite.initial_peers()
    while addresses:
        data = _packed(invite, addresses)
        text: str = PREFIX + base58.b58encode(data + _checksum(data)).decode("ascii")
        if len(text) <= TEXT_LIMIT:
            return text
        addresses = addresses[:-1]
    raise ValueError(f"no invite of at most {TEXT_LIMIT} characters has room for the address {invite.addresses[:1]}")


def decode_invite(text: str) -> Invite:
    """Decode an invite. White space around it and line breaks in it are ignored.

    Use ``clean_invite`` for text that is passed on to a file, a command or another program.

    Raises:
        InviteError: ``text`` is not an invite, or contains other text.
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
            "the invite contains a character that invites never have (0, O, I, l, punctuation): copy it again, alone"
        ) from None
    body, checksum = data[:-CHECKSUM_BYTES], data[-CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise InviteError(
            "the invite has a typo, or a piece of it is missing, or other text stands beside it: copy it again, alone"
        )
    try:
        invite = _unpacked(body)
        for address in invite.initial_peers():
            _packed_address(address.partition("/p2p/")[0])  # raises ValueError for an invalid host name
    except (ValueError, KeyError, struct.error) as error:
        raise InviteError(f"the invite comes from another release of p2pdiloco ({error}): ask for a new one") from None
    return invite


def clean_invite(text: str) -> str:
    """Check ``text`` and return it in canonical form: letters and digits only.

    Raises:
        InviteError: ``text`` is not an invite, or contains other text.
    """
    return encode_invite(decode_invite(text))


def _packed(invite: Invite, places: Sequence[str]) -> bytes:
    """Return the bytes of ``invite`` with these of its addresses."""
    addresses, node = list[bytes](), invite.directory
    for place in places:
        bare, _, peer = place.partition("/p2p/")
        if peer != node:
            node = PeerId(peer)
            addresses.append(bytes([_NODE]) + key_of(node))
        addresses.append(_packed_address(bare))
    holder = invite.secret if invite.peer is None else key_of(invite.peer)
    parts = (
        bytes([invite.kind]),
        bytes.fromhex(invite.run),
        holder,
        _TERMS.pack(invite.role, invite.cap, invite.not_after, invite.uses),
        invite.hint,
        invite.signature,
        key_of(invite.directory),
        *addresses,
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
    role, cap, not_after, uses = _TERMS.unpack(take(_TERMS.size))
    if not are_uses_valid(kind, uses):
        raise ValueError(f"it has {uses} uses")
    hint, signature, directory = take(HINT_BYTES), take(SIGNATURE_BYTES), peer_id_of(take(KEY_BYTES))
    found: list[tuple[PeerId, str]] = []
    node, is_new = directory, False
    while at < len(data):
        family = take(1)[0]
        if family == _NODE:
            other = peer_id_of(take(KEY_BYTES))
            if is_new or other == node:
                raise ValueError("a node has no address, or is there twice")
            node, is_new = other, True
            continue
        if family == _IP4:
            host = f"/ip4/{ipaddress.IPv4Address(take(4))}"
        elif family == _IP6:
            host = f"/ip6/{ipaddress.IPv6Address(take(16))}"
        else:
            name = next((name for name, number in _FAMILIES.items() if number == family), "")
            host = f"/{name}/{take(take(1)[0]).decode('ascii')}"
        found.append((node, f"{host}/tcp/{_PORT.unpack(take(2))[0]}"))
        is_new = False
    own = [address for _, address in itertools.takewhile(lambda one: one[0] == directory, found)]
    if not own or is_new:
        raise ValueError("a node has no address")
    return Invite(
        run=run,
        secret=secret,
        peer=peer,
        role=Role(role),
        cap=cap,
        not_after=not_after,
        uses=uses,
        hint=hint,
        signature=signature,
        directory=directory,
        addresses=tuple(own),
        others=tuple(f"{address}/p2p/{node}" for node, address in found[len(own) :]),
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
        raise ValueError(f"{host!r} is not a valid host name")
    return bytes([_FAMILIES[family], len(host)]) + host.encode("ascii") + end


def _checksum(data: bytes) -> bytes:
    return bytes.fromhex(digest_of(_CHECK_CONTEXT, data))[:CHECKSUM_BYTES]
