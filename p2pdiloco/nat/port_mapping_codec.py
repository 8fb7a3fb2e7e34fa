"""Codec of the port mapping protocols NAT-PMP (RFC 6886) and PCP (RFC 6887), for TCP and IPv4.

Rules of this file:
1. Bytes only. A datagram that does not answer the request raises ValueError, and the caller waits for the next one:
   other hosts can send to this port, too.
2. A lifetime of 0 releases a port.
"""

from __future__ import annotations

import ipaddress
import struct
from typing import NamedTuple

NONCE_BYTES = 12
TCP = 6
ANSWER = 0x80
# Protocol versions: the first byte of a message.
NAT_PMP, PCP = 0, 2
# Opcodes: two of NAT-PMP, and one of PCP.
ADDRESS, MAP_TCP, MAP = 0, 2, 1
# Longest datagram of PCP.
LONGEST_BYTES = 1100
_PMP_ASK = struct.Struct(">BBHHHL")
_PMP_ADDRESS = struct.Struct(">BBHL4s")
_PMP_MAPPED = struct.Struct(">BBHLHHL")
_PMP_HEAD = struct.Struct(">BBH")
_PCP_ASK = struct.Struct(">BBHL16s")
_PCP_ANSWER = struct.Struct(">BBBBLL12x")
_PCP_MAP = struct.Struct(f">{NONCE_BYTES}sB3xHH16s")
_PMP_RESULTS = {
    1: "does not support this version",
    2: "is configured to map no ports",
    3: "has no external address",
    4: "has no port left",
    5: "does not support this operation",
}
_PCP_RESULTS = {
    1: "does not support this version",
    2: "is configured to map no ports",
    3: "does not understand the request",
    4: "does not support this operation",
    8: "has no port left",
    9: "does not map TCP ports",
    11: "cannot map the requested port",
    12: "found another NAT between this machine and itself",
}


class Granted(NamedTuple):
    """A mapped port of the router. ``host`` is its external address, or "" for NAT-PMP, which reports it separately."""

    host: str
    port: int
    life_s: int


class Denied(NamedTuple):
    """A refusal by the router. ``reason`` is a predicate of the router, as in "has no port left"."""

    reason: str


def encode_address_request() -> bytes:
    """Return a NAT-PMP request for the external address of the router."""
    return bytes((NAT_PMP, ADDRESS))


def encode_nat_pmp_request(port: int, wanted: int, life_s: int) -> bytes:
    """Return a NAT-PMP request to map port ``wanted`` of the router (0: any) to our ``port``."""
    return _PMP_ASK.pack(NAT_PMP, MAP_TCP, 0, port, wanted, life_s)


def encode_pcp_request(own: str, port: int, wanted: int, life_s: int, nonce: bytes) -> bytes:
    """Return a PCP request to map port ``wanted`` of the router (0: any) to our ``port``.

    own: local address from which the request is sent.
    nonce: random bytes that later requests repeat to prove that the mapping is ours.
    """
    head = _PCP_ASK.pack(PCP, MAP, 0, life_s, _ipv4_mapped(own))
    return head + _PCP_MAP.pack(nonce, TCP, port, wanted, _ipv4_mapped("0.0.0.0"))


def decode_address(data: bytes) -> str | Denied:
    """Decode an answer to ``encode_address_request``.

    Raises:
        ValueError: the datagram is something else.
    """
    if (denied := _denied_nat_pmp(data, ADDRESS)) is not None:
        return denied
    if len(data) != _PMP_ADDRESS.size:
        raise ValueError("not a NAT-PMP answer to an address request")
    return str(ipaddress.IPv4Address(_PMP_ADDRESS.unpack(data)[4]))


def decode_nat_pmp(data: bytes, port: int) -> Granted | Denied:
    """Decode a NAT-PMP answer about our ``port``.

    Raises:
        ValueError: the datagram is something else.
    """
    if (denied := _denied_nat_pmp(data, MAP_TCP)) is not None:
        return denied
    if len(data) != _PMP_MAPPED.size:
        raise ValueError("not a NAT-PMP answer to a mapping request")
    *_, inner, outer, life_s = _PMP_MAPPED.unpack(data)
    if inner != port:
        raise ValueError("a NAT-PMP answer about another port")
    return Granted("", outer, life_s)


def decode_pcp(data: bytes, port: int, nonce: bytes) -> Granted | Denied:
    """Decode a PCP answer about our ``port``, or the NAT-PMP answer of a router that does not know PCP.

    Raises:
        ValueError: the datagram is something else.
    """
    if len(data) >= _PMP_HEAD.size and data[0] == NAT_PMP and data[1] & ANSWER:
        return Denied("supports only NAT-PMP")
    if not _PCP_ANSWER.size <= len(data) <= LONGEST_BYTES or data[:2] != bytes((PCP, ANSWER | MAP)):
        raise ValueError("not a PCP answer to a mapping request")
    *_, result, life_s, _ = _PCP_ANSWER.unpack_from(data)
    if len(data) < _PCP_ANSWER.size + _PCP_MAP.size:
        raise ValueError("a PCP answer that is cut short")
    echoed, protocol, inner, outer, host = _PCP_MAP.unpack_from(data, _PCP_ANSWER.size)
    if (echoed, protocol, inner) != (nonce, TCP, port):
        raise ValueError("a PCP answer to another request")
    if result:
        return Denied(_PCP_RESULTS.get(result, f"refuses (PCP result {result})"))
    outside = ipaddress.IPv6Address(host)
    return Granted(str(outside.ipv4_mapped or outside), outer, life_s)


def _denied_nat_pmp(data: bytes, opcode: int) -> Denied | None:
    if len(data) < _PMP_HEAD.size or data[:2] != bytes((NAT_PMP, ANSWER | opcode)):
        raise ValueError("not a NAT-PMP answer to this request")
    result = _PMP_HEAD.unpack_from(data)[2]
    return Denied(_PMP_RESULTS.get(result, f"refuses (NAT-PMP result {result})")) if result else None


def _ipv4_mapped(host: str) -> bytes:
    return bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(host).packed
