"""A port of the router's is asked for, leads here, and is given back: real routers' address translation. Needs root."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.netbed import testbed as testbeds
from benchmarks.netbed.namespace_exec import command
from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import address
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import Listening

pytestmark = pytest.mark.xdist_group("wan")  # namespaces are the machine's

NAME = "test-mapping"
SOURCE = f'name = "{NAME}"\n' + "".join(
    f'[[site]]\nname = "{name}"\n{more}\n' for name, more in (("hub", ""), ("ann", 'nat = "keep"'))
)
HUB, HOME = range(2)
ASK = """
import asyncio, socket, sys
from p2pdiloco.nat.port_mapping import PortMapping
async def main():
    asked = asyncio.Event()
    listener = socket.create_server(("0.0.0.0", 7000))
    router = PortMapping(7000)
    keeping = asyncio.create_task(router.keep(asked.set))
    await asyncio.wait_for(asked.wait(), 15.0)
    print(*router.lease[:3], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    keeping.cancel()
    await router.release()
    print("given back", flush=True)
asyncio.run(main())
"""
DIAL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1.0)"


@pytest.fixture(scope="module")
def made() -> Iterator[Testbed]:
    try:
        made = testbeds.up(SOURCE.encode())
    except (TestbedError, OSError) as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        testbeds.down(NAME)


@contextmanager
def started(namespace: str, *argv: str, pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    pipe, words = subprocess.PIPE, command(namespace, [sys.executable, *argv])
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, pass_fds=pass_fds)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def is_let_in(made: Testbed, port: int) -> bool:
    argv = [sys.executable, "-S", "-c", DIAL, address(HOME), str(port)]
    return subprocess.run(command(made.site(HUB), argv), stderr=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(("protocol", "name"), [("pcp", "PCP"), ("nat-pmp", "NAT-PMP")])
def test_a_routers_port_leads_here_until_it_is_given_back(made: Testbed, protocol: str, name: str) -> None:
    router = f"{made.site(HOME)}.home"
    with started(router, "-m", "tests.wan.mapper", router, protocol, "1") as mapper:
        assert line(mapper) == "up"
        with started(made.site(HOME), "-c", ASK) as asker:
            assert line(asker) == f"{name} {address(HOME)} 7000"
            assert is_let_in(made, 7000)
            asker.communicate("\n")
        assert not is_let_in(made, 7000)
        mapper.terminate()
        assert mapper.communicate()[0].split("\n")[0] == "7000 leads to 192.168.1.2 7000"


def test_a_user_is_told_what_the_router_maps(made: Testbed, tmp_path: Path) -> None:
    """By who has dialled it there."""
    router = f"{made.site(HOME)}.home"
    listen = ("--listen", f"/ip4/{address(HUB)}/tcp/31337", "--state", str(tmp_path))
    with status_pipe.opened() as (reports, fd), ExitStack() as stack:
        bootstrap = ("-m", "p2pdiloco", "bootstrap", *listen, status_pipe.OPTION, str(fd))
        stack.enter_context(started(made.site(HUB), *bootstrap, pass_fds=(fd,)))
        mapper = stack.enter_context(started(router, "-m", "tests.wan.mapper", router, "pcp"))
        assert line(mapper) == "up"
        known = reports.wait_for(Listening, 60.0).addresses[0]
        with started(made.site(HOME), "-m", "p2pdiloco", "doctor", known) as doctor:
            found = doctor.communicate(timeout=150)[0]
    assert "reachable from outside at " in found, found
    assert ", which the router maps to this machine (PCP)" in found, found
