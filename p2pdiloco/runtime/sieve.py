"""Machines that the kernel does not let through to a listening socket: what comes from them is dropped before it is a
connection, and costs this process nothing.

Rules of this file:
1. Linux alone knows how: a classic BPF program on the listener (SO_ATTACH_FILTER; no rights are needed), which looks at
   the sender's address. Elsewhere, and where the kernel says no, ``close_to`` says so; who accepts closes then.
2. What is accepted inherits the program: ``lift`` takes it off.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
"""Linux; the socket module has no names for them."""
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
"""BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K"""
NETWORK_HEADER = 0x1_0000_0000 - 0x10_0000
"""SKF_NET_OFF: offsets from here on are the IP header's."""
IPV4_SENDER, IPV6_SENDER = 12, 8
EVERYTHING = 0xFFFF_FFFF

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""


def close_to(listener: socket.socket, machines: Sequence[str]) -> bool:
    """From now on nothing of ``machines`` (``net.admission.machine_of``) arrives at ``listener``, of others all; False:
    the kernel does not do that."""
    if sys.platform != "linux":
        return False
    if not machines:
        lift(listener)
        return True
    wanted = program(listener.family, machines)
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in wanted)
    held = ctypes.create_string_buffer(code, len(code))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", len(wanted), ctypes.addressof(held))
        )
    except OSError:
        return False
    return True


def lift(raw: socket.socket) -> None:
    """All comes through."""
    with suppress(OSError):  # there is none
        raw.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def program(family: int, machines: Iterable[str]) -> list[Instruction]:
    """What drops the packets of ``machines``; those of another family never come."""
    if family == socket.AF_INET:
        words = [_words(machine) for machine in machines if ":" not in machine]
        found = [(LOAD_WORD, 0, 0, NETWORK_HEADER + IPV4_SENDER)]
        for (address,) in words:
            found += [(JUMP_IF_EQUAL, 0, 1, address), (RETURN, 0, 0, 0)]
    else:
        found = []
        for high, low in (_words(machine) for machine in machines if ":" in machine):
            found += [
                (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SENDER),
                (JUMP_IF_EQUAL, 0, 3, high),
                (LOAD_WORD, 0, 0, NETWORK_HEADER + IPV6_SENDER + 4),
                (JUMP_IF_EQUAL, 0, 1, low),
                (RETURN, 0, 0, 0),
            ]
    return [*found, (RETURN, 0, 0, EVERYTHING)]


def _words(machine: str) -> tuple[int, ...]:
    """Of an IPv4 address one, of an IPv6 line its two."""
    if ":" in machine:
        return struct.unpack(">II", ipaddress.IPv6Address(f"{machine}::").packed[:8])
    return struct.unpack(">I", ipaddress.IPv4Address(machine).packed)
