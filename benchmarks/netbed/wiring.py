"""How a testbed's namespaces are joined: veths, addresses, routes, and the router where there is no netem.

Rules of this file:
1. Site i is 10.99.(i+1).1, its edge 10.99.(i+1).254. Pop i is 10.98.(i+1).254; between pops i < j lies 10.(100+i).j.
2. Interfaces are made inside their namespaces, so that a killed set-up leaves none outside.
3. IPv6 where a site asks for it alone: its own chatter uses the lines.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netbed.namespace_exec import opened_in, own_sys
from benchmarks.netbed.namespaces import TestbedError, configure, create, interface
from benchmarks.netbed.topology import address, address6

MTU = 1500
READY_S = 20.0
NO_PROBING = 2
"""IFA_F_NODAD: nobody else has that address, so it is ready at once."""
TUN_PACKETS = 10_000
"""What waits in a TUN device for the router to read it."""


def wire_site(i: int, site: str, edge: str) -> None:
    """A site, and the edge namespace that its line ends in."""
    create([site, edge])
    for namespace in (site, edge):
        opened_in(namespace, set_up_kernel)

    def work(net: Any) -> None:
        _veth(net, "eth0", "access", edge)
        _up(net, "eth0", address(i))
        net.route("add", dst="default", gateway=f"10.99.{i + 1}.254")

    configure(site, work)
    configure(edge, lambda net: _up(net, "access", f"10.99.{i + 1}.254"))


def wire_ip6(i: int, site: str, edge: str, *, is_alone: bool) -> None:
    """IPv6 for a site whose line is there, up to the router's device; IPv4 goes if it is to be ``is_alone``."""

    def work(net: Any, device: str, host: str, target: str, hop: dict[str, Any]) -> None:
        index = interface(net, device)
        net.addr("add", family=socket.AF_INET6, index=index, address=host, prefixlen=64, flags=NO_PROBING)
        net.route("add", family=socket.AF_INET6, dst=target, **hop)
        if device == "eth0" and is_alone:
            net.flush_addr(index=index, family=socket.AF_INET)

    gateway = address6(i).replace("::1", "::fe")
    for namespace in (site, edge):
        opened_in(namespace, _enable_ip6)
    configure(site, lambda net: work(net, "eth0", address6(i), "default", {"gateway": gateway}))
    configure(edge, lambda net: work(net, "access", gateway, "2a0e:99::/32", {"oif": interface(net, "wan")}))


def _enable_ip6() -> None:
    for name, value in (("all/disable_ipv6", "0"), ("default/disable_ipv6", "0"), ("all/forwarding", "1")):
        Path("/proc/sys/net/ipv6/conf", name).write_text(value)


def wire_pop(i: int, edge: str, pops: Sequence[str]) -> None:
    """netem's place: it is joined to the site's edge and to all pops before it."""
    create([pops[i]])
    opened_in(pops[i], set_up_kernel)

    def at_edge(net: Any) -> None:
        _veth(net, "wan", "wan", pops[i])
        _up(net, "wan", f"10.98.{i + 1}.1")
        net.route("add", dst="10.99.0.0/16", gateway=f"10.98.{i + 1}.254")

    def at_pop(net: Any) -> None:
        _up(net, "wan", f"10.98.{i + 1}.254")
        net.route("add", dst=f"10.99.{i + 1}.0/24", gateway=f"10.98.{i + 1}.1")
        for j in range(i):
            _veth(net, f"to{j}", f"to{i}", pops[j])

    configure(edge, at_edge)
    configure(pops[i], at_pop)


def join_pop(i: int, pops: Sequence[str]) -> None:
    """Addresses and routes on the veths to the other pops."""

    def work(net: Any) -> None:
        for j in range(len(pops)):
            if i != j:
                own, far = (1, 2) if i < j else (2, 1)
                between = f"10.{100 + min(i, j)}.{max(i, j)}"
                _up(net, f"to{j}", f"{between}.{own}")
                net.route("add", dst=f"10.99.{j + 1}.0/24", gateway=f"{between}.{far}")

    configure(pops[i], work)


def start_router(plan: Path, log: Path, edges: Sequence[str]) -> int:
    """The process that carries packets between edges as ``plan`` says.

    Raises:
        TestbedError: it does not start.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.netbed.router", str(plan)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        with process.stdout as output:
            if not select.select([output], [], [], READY_S)[0] or output.readline() != b"READY\n":
                said = log.read_text(errors="replace").strip()
                raise TestbedError(f"the router does not start: {said or f'no answer in {READY_S:.0f} s'}")
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(process.pid, cpus[:1])
        for edge in edges:
            configure(edge, _route_to_tun)
            opened_in(edge, lambda: _spread_receiving(cpus[1:]))
    except BaseException:
        process.kill()
        process.wait()
        raise
    process.returncode = 0  # it stays when we end: no warning about that
    return process.pid


def _route_to_tun(net: Any) -> None:
    index = interface(net, "wan")
    net.link("set", index=index, txqlen=TUN_PACKETS, state="up")
    net.route("add", dst="10.99.0.0/16", oif=index)


def _veth(net: Any, device: str, peer: str, namespace: str) -> None:
    net.link("add", ifname=device, kind="veth", mtu=MTU, peer={"ifname": peer, "net_ns_fd": namespace, "mtu": MTU})


def _up(net: Any, device: str, own: str) -> None:
    index = interface(net, device)
    net.addr("add", index=index, address=own, prefixlen=24)
    net.link("set", index=index, state="up")


def set_up_kernel() -> None:
    """What a namespace of a testbed forwards and remembers."""
    for name, value in (
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/ip_forward", "1"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/tcp_no_metrics_save", "1"),
    ):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            Path("/proc/sys/net", name).write_text(value)


def _spread_receiving(cpus: list[int]) -> None:
    """Have what the router writes received on other processors than its own."""
    if cpus:
        own_sys()
        Path("/sys/class/net/wan/queues/rx-0/rps_cpus").write_text(f"{sum(1 << cpu for cpu in cpus):x}")
