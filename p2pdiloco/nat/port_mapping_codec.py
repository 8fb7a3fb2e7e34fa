"""Codec of the port mapping protocols NAT-PMP (RFC 6886) and PCP (RFC 6887), for TCP and IPv4.

Rules of this file:
1. Bytes only. A datagram that does not answer the request raises ValueError: others on the network can send some, too.
2. A lifetime of 0 releases a port.
"""

from __future__ import annotations

import ipaddress
import struct
from typing import NamedTuple

NONCE_BYTES = 12
TCP = 6
ANSWER = 0x80
NAT_PMP, PCP = 0, 2
"""Versions: the first byte of a message."""
ADDRESS, MAP_TCP, MAP = 0, 2, 1
"""Opcodes: two of NAT-PMP, and one of PCP."""
LONGEST_BYTES = 1100
"""Longest datagram of PCP."""
_PMP_ASK = struct.Struct(">BBHHHL")
_PMP_ADDRESS = struct.Struct(">BBHL4s")
_PMP_MAPPED = struct.Struct(">BBHLHHL")
_PMP_HEAD = struct.Struct(">BBH")
_PCP_ASK = struct.Struct(">BBHL16s")
_PCP_ANSWER = struct.Struct(">BBBBLL12x")
_PCP_MAP = struct.Struct(f">{NONCE_BYTES}sB3xHH16s")
_PMP_RESULTS = {
    1: "does not speak this version",
    2: "is set to give no ports",
    3: "has no address itself",
    4: "has no port left",
    5: "gives no ports",
}
_PCP_RESULTS = {
    1: "does not speak this version",
    2: "is set to give no ports",
    3: "does not understand",
    4: "gives no ports",
    8: "has no port left",
    9: "gives no TCP ports",
    11: "cannot give that port",
    12: "sees another address translation on the way to it",
}


class Granted(NamedTuple):
    """A mapped port of the router. ``host``: its external address; "" if the protocol tells that separately."""

    host: str
    port: int
    life_s: int


class Denied(NamedTuple):
    """The router refuses; the reason begins with a verb."""

    reason: str


def encode_address_request() -> bytes:
    """NAT-PMP request for the external address of the router."""
    return bytes((NAT_PMP, ADDRESS))


def encode_nat_pmp_request(port: int, wanted: int, life_s: int) -> bytes:
    """NAT-PMP request to map port ``wanted`` of the router, or any, to our ``port``."""
    return _PMP_ASK.pack(NAT_PMP, MAP_TCP, 0, port, wanted, life_s)


def encode_pcp_request(own: str, port: int, wanted: int, life_s: int, nonce: bytes) -> bytes:
    """PCP request for the same. ``own``: the address that it is sent from; ``nonce`` proves later that the port is
    ours."""
    head = _PCP_ASK.pack(PCP, MAP, 0, life_s, _ipv4_mapped(own))
    return head + _PCP_MAP.pack(nonce, TCP, port, wanted, _ipv4_mapped("0.0.0.0"))


def decode_address(data: bytes) -> str | Denied:
    """Decode an answer to ``encode_address_request``.

    Raises:
        ValueError: it is no such answer.
    """
    if (denied := _denied_nat_pmp(data, ADDRESS)) is not None:
        return denied
    if len(data) != _PMP_ADDRESS.size:
        raise ValueError("no answer of NAT-PMP about an address")
    return str(ipaddress.IPv4Address(_PMP_ADDRESS.unpack(data)[4]))


def decode_nat_pmp(data: bytes, port: int) -> Granted | Denied:
    """Decode an answer of NAT-PMP about our ``port``.

    Raises:
        ValueError: it is no such answer.
    """
    if (denied := _denied_nat_pmp(data, MAP_TCP)) is not None:
        return denied
    if len(data) != _PMP_MAPPED.size:
        raise ValueError("no answer of NAT-PMP about a port")
    *_, inner, outer, life_s = _PMP_MAPPED.unpack(data)
    if inner != port:
        raise ValueError("an answer about another port")
    return Granted("", outer, life_s)


def decode_pcp(data: bytes, port: int, nonce: bytes) -> Granted | Denied:
    """Decode an answer of PCP about our ``port``, or one of NAT-PMP to a request of PCP.

    Raises:
        ValueError: it is no such answer.
    """
    if len(data) >= _PMP_HEAD.size and data[0] == NAT_PMP and data[1] & ANSWER:
        return Denied("speaks NAT-PMP instead")
    if not _PCP_ANSWER.size <= len(data) <= LONGEST_BYTES or data[:2] != bytes((PCP, ANSWER | MAP)):
        raise ValueError("no answer of PCP about a port")
    *_, result, life_s, _ = _PCP_ANSWER.unpack_from(data)
    if len(data) < _PCP_ANSWER.size + _PCP_MAP.size:
        raise ValueError("an answer of PCP without what was asked")
    told, protocol, inner, outer, host = _PCP_MAP.unpack_from(data, _PCP_ANSWER.size)
    if (told, protocol, inner) != (nonce, TCP, port):
        raise ValueError("an answer to somebody else")
    if result:
        return Denied(_PCP_RESULTS.get(result, f"says no ({result})"))
    outside = ipaddress.IPv6Address(host)
    return Granted(str(outside.ipv4_mapped or outside), outer, life_s)


def _denied_nat_pmp(data: bytes, opcode: int) -> Denied | None:
    if len(data) < _PMP_HEAD.size or data[:2] != bytes((NAT_PMP, ANSWER | opcode)):
        raise ValueError("no answer of NAT-PMP to what was asked")
    result = _PMP_HEAD.unpack_from(data)[2]
    return Denied(_PMP_RESULTS.get(result, f"says no ({result})")) if result else None


def _ipv4_mapped(host: str) -> bytes:
    return bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(host).packed
