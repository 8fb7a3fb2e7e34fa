"""Which packets a listener's program drops."""

from __future__ import annotations

import socket

from p2pdiloco.transport import connection_setup


def comes_through(family: int, machines: list[str], sender: str) -> bool:
    """What the program says of a packet with such an IP header, as the kernel reads it."""
    offset = connection_setup.IPV4_SENDER if family == socket.AF_INET else connection_setup.IPV6_SENDER
    header = bytes(offset) + socket.inet_pton(family, sender)
    code, at, loaded = connection_setup.filter_program(family, machines), 0, 0
    while True:
        kind, if_true, if_false, constant = code[at]
        at += 1
        if kind == connection_setup.RETURN:
            return bool(constant)
        if kind == connection_setup.LOAD_WORD:
            loaded = int.from_bytes(header[constant - connection_setup.NETWORK_HEADER :][:4], "big")
        else:
            at += if_true if loaded == constant else if_false


def test_a_machine_is_an_address_or_a_line_of_them() -> None:
    machines = ["10.0.0.1", "2001:db8:0:1", "2001:db8:7:0", "10.0.0.9", "2001:db8:7:8"]
    for sender in ("10.0.0.1", "10.0.0.9"):
        assert not comes_through(socket.AF_INET, machines, sender)
    for sender in ("10.0.0.2", "1.0.0.10", "10.0.1.1"):
        assert comes_through(socket.AF_INET, machines, sender)
    for sender in ("2001:db8:0:1::5", "2001:db8:0:1:ffff::", "2001:db8:7::1", "2001:db8:7:8:9::"):
        assert not comes_through(socket.AF_INET6, machines, sender)
    for sender in ("2001:db8::5", "2001:db8:0:2::5", "2001:db9:0:1::5", "2001:db8:7:1::"):
        assert comes_through(socket.AF_INET6, machines, sender)
