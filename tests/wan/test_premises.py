"""Sites behind routers, a firewall, and a path that loses long packets: as real kernels do it. They need root."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from possible import why_not

from benchmarks.netbed import testbed as testbeds
from benchmarks.netbed.namespace_exec import command
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import SHIPPED, TopologyError, address, parse_topology

pytestmark = pytest.mark.xdist_group("wan")  # namespaces are the machine's

NAME = "test-premises"
SITES = (("hub", ""), ("keep", 'nat = "keep"'), ("rand", 'nat = "random"'), ("cgn", 'nat = "cgn"'))
SOURCE = f'name = "{NAME}"\n' + "".join(
    f'[[site]]\nname = "{name}"\n{more}\n'
    for name, more in (*SITES, ("office", 'firewall = "443"'), ("narrow", "mtu = 1400"))
)
HUB, KEEP, RANDOM, CARRIER, OFFICE, NARROW = range(6)
LISTEN = """
import os, socket, sys, threading
def serve(listener):
    while True:
        connection, where = listener.accept()
        connection.sendall(f"{where[0]} {where[1]}\\n".encode())
        threading.Thread(target=take, args=(connection,), daemon=True).start()
def take(connection):
    while data := connection.recv(65536):
        connection.sendall(b"." * (b"!" in data))
listeners = [socket.create_server(("0.0.0.0", port)) for port in (443, 7000)]
for listener in listeners[1:]:
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
print("up", flush=True)
serve(listeners[0])
"""
DIAL = """
import socket, sys
host, port, own, size = sys.argv[1], *map(int, sys.argv[2:])
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
connection.bind(("", own))
connection.settimeout(1.5)
try:
    connection.connect((host, port))
    print(connection.recv(100).decode().strip())
    if size:
        connection.sendall(b" " * size + b"!")
        print(connection.recv(1).decode())
except TimeoutError:
    print("nothing")
"""


def with_rules() -> None:
    source = 'name = "test-prem-p"\n[[site]]\nname = "a"\nnat = "random"\n[[site]]\nname = "b"\n'
    testbeds.up(source.encode())
    testbeds.down("test-prem-p")


@pytest.fixture(scope="module")
def made() -> Iterator[Testbed]:
    if reason := why_not(with_rules):
        pytest.skip(reason)
    made = testbeds.up(SOURCE.encode())
    argv = [sys.executable, "-S", "-c", LISTEN]
    listeners = [
        subprocess.Popen(command(made.site(site), argv), stdout=subprocess.PIPE, text=True) for site in (HUB, KEEP)
    ]
    try:
        for one in listeners:
            assert one.stdout is not None
            assert one.stdout.readline() == "up\n"
        yield made
    finally:
        testbeds.down(NAME)
        for one in listeners:
            one.wait(5)


def dialled(made: Testbed, site: int, host: str, port: int, own: int = 5555, size: int = 0) -> list[str]:
    argv = [sys.executable, "-S", "-c", DIAL, host, str(port), str(own), str(size)]
    done = subprocess.run(command(made.site(site), argv), capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[:-1] or [done.stderr]


def test_a_router_keeps_the_port_or_draws_one(made):
    assert dialled(made, KEEP, address(HUB), 7000) == [f"{address(KEEP)} 5555"]
    assert dialled(made, CARRIER, address(HUB), 7000) == [f"{address(CARRIER)} 5555"]
    (seen,) = dialled(made, RANDOM, address(HUB), 7000)
    host, port = seen.split()
    assert (host, port != "5555") == (address(RANDOM), True)


def test_nobody_dials_into_a_home(made):
    assert dialled(made, HUB, address(KEEP), 7000) == ["nothing"]
    assert dialled(made, RANDOM, address(KEEP), 7000) == ["nothing"]


def test_a_firewall_lets_out_one_port(made):
    assert dialled(made, OFFICE, address(HUB), 7000) == ["nothing"]
    assert dialled(made, OFFICE, address(HUB), 443) == [f"{address(OFFICE)} 5555"]


def test_long_packets_vanish_and_nobody_is_told(made):
    seen = f"{address(NARROW)} 5556"
    assert dialled(made, NARROW, address(HUB), 7000, 5556, size=1000) == [seen, "."]
    assert dialled(made, NARROW, address(HUB), 7000, 5557, size=1400) == [f"{address(NARROW)} 5557", "nothing"]


SPEAK = """
import asyncio, sys
from p2pdiloco.transport.transport import Observer
from p2pdiloco.transport import sockets
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError, Transport
sockets.DEAD_AFTER_S = 2
class Ear(Observer):
    def admit(self, peer, body, size): return body
    def message(self, peer, body, payload): print("came", len(payload), flush=True)
async def main(words):
    listen = words[1] if words[0] == "listen" else ""
    async with Transport(Identity.ephemeral(), listen=listen, run="", version=1).serve(Ear()) as transport:
        if listen:
            print(transport.listen_addresses()[0], flush=True)
            await asyncio.sleep(30)
            return
        peer = await transport.dial(words[1])
        transport.send(peer, b"x", bytes(300_000))
        while peer in transport.peers():
            await asyncio.sleep(0.05)
        await transport.dial(words[1])
        transport.send(peer, b"x", bytes(300_000))
        await asyncio.sleep(1.0)
asyncio.run(main(sys.argv[1:]))
"""


def test_where_long_packets_vanish_segments_become_short(made):
    argv = [sys.executable, "-c", SPEAK]
    listener = subprocess.Popen(
        command(made.site(HUB), [*argv, "listen", f"/ip4/{address(HUB)}/tcp/7100"]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        where = listener.stdout.readline().strip()
        dialler = command(made.site(NARROW), [*argv, "dial", where])
        done = subprocess.run(dialler, capture_output=True, text=True, timeout=40, check=False)
        assert "segments have 1200 bytes" in done.stderr, done.stderr
        assert listener.stdout.readline() == "came 300000\n", done.stderr
    finally:
        listener.kill()
        listener.wait()
        listener.stdout.close()


def test_the_shipped_homes_are_of_three_kinds():
    homes = parse_topology((SHIPPED / "homes.toml").read_bytes())
    assert [site.nat for site in homes.sites] == [None, "keep", "keep", "keep", "random", "cgn", "cgn"]


@pytest.mark.parametrize("line", ['nat = "full-cone"', "mtu = 100", 'firewall = "80"'])
def test_what_a_site_cannot_be_is_refused(line):
    with pytest.raises(TopologyError):
        parse_topology(f'name = "x"\n[[site]]\nname = "a"\n{line}\n[[site]]\nname = "b"\n')
