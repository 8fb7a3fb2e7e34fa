"""What the kernel drops for us: connections of machines by their addresses, at real sockets."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from p2pdiloco.net.abuse_limits import SHUT_OUT, machine_of
from p2pdiloco.transport import connection_setup, sockets
from p2pdiloco.transport.addresses import parse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone drops what comes to a socket")

SOON_S = 0.3
"""In which a connection on this machine is there."""


@pytest.fixture(params=["/ip4/0.0.0.0/tcp/0", "/ip6/::1/tcp/0"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    try:
        found = sockets.listen(parse(request.param))
    except OSError as error:
        pytest.skip(str(error))
    with found:
        yield found


def is_heard(listener: socket.socket, sender: str) -> bool:
    """Does a connection from there come, and what it says?"""
    port = listener.getsockname()[1]
    with socket.socket(listener.family) as caller:
        caller.settimeout(SOON_S)
        caller.bind((sender, 0))
        with suppress(TimeoutError):
            caller.connect(("::1" if listener.family == socket.AF_INET6 else "127.0.0.1", port))
            caller.sendall(b"hello")
        with suppress(BlockingIOError):
            accepted, where = listener.accept()
            with accepted:
                connection_setup.unblock(accepted)
                assert where[0] == sender
                accepted.settimeout(10.0)
                return accepted.recv(5) == b"hello"
    return False


def test_who_is_shut_out_is_not_heard_and_everybody_else_is(listener: socket.socket) -> None:
    if listener.family == socket.AF_INET6:
        shut_out, heard = ["::1"], []
        others = ["2001:db8::1", "0:0:0:1::", "0:1::"]
    else:
        shut_out, heard = ["127.0.0.1", "127.0.0.9", "127.200.100.50"], ["127.0.0.2", "127.0.1.1"]
        others = ["255.255.255.255", "1.0.0.127"]
    for sender in shut_out + heard:
        assert is_heard(listener, sender)
    assert connection_setup.block(listener, [machine_of(host) for host in shut_out + others])
    assert [is_heard(listener, sender) for sender in shut_out] == [False] * len(shut_out)
    assert [is_heard(listener, sender) for sender in heard] == [True] * len(heard)
    assert connection_setup.block(listener, [machine_of(host) for host in others])
    for sender in shut_out + heard:
        assert is_heard(listener, sender)
    assert connection_setup.block(listener, [])
    assert is_heard(listener, shut_out[0])


def test_the_kernel_takes_as_many_as_are_ever_shut_out(listener: socket.socket) -> None:
    """A program counts as memory of its socket's, of which there is 20 KB at least."""
    machines = [f"255.254.{number // 256}.{number % 256}" for number in range(SHUT_OUT)]
    machines += [f"ffff:fffe:ffff:{number:x}" for number in range(SHUT_OUT)]
    assert connection_setup.block(listener, machines)
    assert is_heard(listener, "::1" if listener.family == socket.AF_INET6 else "127.0.0.1")
