"""Multiaddrs that sockets can use: ``/ip4/203.0.113.7/tcp/4100/p2p/12D3KooW...``.

Rules of this file:
1. An address has a host (ip4, ip6, dns, dns4), a TCP port, and optionally a peer id. Anything else is refused with a
   sentence that says how to write it.
2. PyPI's ``multiaddr`` (multiformats/py-multiaddr) checks the syntax. hivemind has its own class: pass it strings.
"""

from __future__ import annotations

import ipaddress
from typing import Literal

import msgspec
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2pdiloco.protocol.ids import PeerId

Family = Literal["ip4", "ip6", "dns", "dns4"]
HOW = "write it as /ip4/203.0.113.7/tcp/4100 or /dns/example.org/tcp/4100, with /p2p/<peer id> if you know it"
TEXT_LIMIT = 512
"""Maximum characters of an address."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address at which to dial or to listen."""

    family: Family
    host: str
    port: int
    """TCP port; 0, for listening only, means any free port."""
    peer: PeerId | None = None
    """Peer that must answer there; None: any peer."""

    def __str__(self) -> str:
        suffix = f"/p2p/{self.peer}" if self.peer else ""
        return f"/{self.family}/{self.host}/tcp/{self.port}{suffix}"


def parse(text: str) -> Address:
    """Parse an address.

    Raises:
        ValueError: ``text`` is not a usable multiaddr; the message says how to write one.
    """
    if not text.startswith("/"):
        raise ValueError(f"{text[:TEXT_LIMIT]!r} is not a multiaddr: {_suggestion(text)}")
    if len(text) > TEXT_LIMIT:
        raise ValueError(f"an address has at most {TEXT_LIMIT} characters, this one has {len(text)}")
    try:
        parts = [(protocol.name, value) for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError, LookupError, TypeError) as error:
        why = str(error).rpartition("': ")[2].partition(" (string:")[0]
        raise ValueError(f"{text!r} is not a multiaddr ({why}): {HOW}") from error
    match parts:
        case [("ip4" | "ip6" | "dns" | "dns4" as family, host), ("tcp", port)]:
            return Address(family=family, host=str(host), port=int(port))
        case [("ip4" | "ip6" | "dns" | "dns4" as family, host), ("tcp", port), ("p2p", peer)]:
            return Address(family=family, host=str(host), port=int(port), peer=PeerId(str(peer)))
        case _:
            raise ValueError(f"{text!r} is not a usable TCP address: {HOW}")


def of_socket(host: str, port: int, peer: PeerId | None = None) -> Address:
    """Return the address of a socket's numeric ``host`` (IPv4 mapped in IPv6 becomes IPv4)."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return Address(family="ip4" if ip.version == 4 else "ip6", host=str(ip), port=port, peer=peer)


def _suggestion(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        return HOW
    host = host.strip("[]")
    try:
        return f"write it as {of_socket(host, int(port))}"
    except ValueError:
        return f"write it as /dns/{host}/tcp/{port}"
