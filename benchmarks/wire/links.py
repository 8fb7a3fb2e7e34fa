"""Shaped links between network namespaces, on which benchmarks run instead of the internet.

A peer has its own network namespace. Its link leads to an *edge* namespace that routes, where tc's token buckets limit
both directions, and from there to a bridge that all edges share::

    peer 0: eth0 -- access [edge 0] backbone -- (bridge) -- backbone [edge 1] access -- eth0 :peer 1
                       ^ tbf: down       ^ tbf: up

1. Both buckets see forwarded traffic. On a sender's own interface the kernel would push back on its socket instead of
   queueing and dropping, which no router on the internet does.
2. A bucket is much deeper than one offloaded packet (64 KiB), otherwise tc segments it in software: measured exact to 5
   Gbit/s with ``burst = max(256 kB, 0.5 ms of rate)``. Each direction queues up to ``QUEUE_S``.
3. Names contain the id of the process that made them. The next process, or ``python -m benchmarks.wire.links clean``,
   removes what a killed one left behind, and leaves alone what a running one uses.
4. The link "lo" is a namespace with nothing but a loopback interface, so that its counters count only this benchmark.
   Without root it is the machine's own loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PREFIX = "p2pwire"
QUEUE_S = 0.05
SMALLEST_BURST = 256 << 10
MTU = 1500
PAYLOAD_SHARE = (MTU - 52) / (MTU + 14)
"""TCP payload in a full packet (IPv4, timestamps), as tc counts it (with the Ethernet header)."""

RATES: dict[str, float | None] = {"lo": None, "200mbit": 200e6, "1gbit": 1e9, "2.5gbit": 2.5e9}
"""Bits per second in each direction; None: not limited."""


class LinkError(Exception):
    """The link cannot be made here; the text says what is missing."""


class Place(NamedTuple):
    """Where one peer runs."""

    namespace: str
    """"" for the machine's own."""
    host: str
    interface: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """``argv``, run there."""
        return [*(["ip", "netns", "exec", self.namespace] if self.namespace else []), *argv]


@contextlib.contextmanager
def network(link: str, peers: int) -> Iterator[list[Place]]:
    """Places for ``peers`` on links of that name; all is removed at the end.

    Raises:
        LinkError: not root, or tools are missing.
    """
    rate = RATES[link]
    if rate is None and os.geteuid() != 0:
        yield [Place("", "127.0.0.1", "lo")] * peers
        return
    if os.geteuid() != 0:
        raise LinkError(f"the link {link} needs root (network namespaces and tc): run as root, or use --link lo")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise LinkError(f"the link {link} needs {' and '.join(missing)}: apt install iproute2")
    clean()
    try:
        yield _loopback(peers) if rate is None else _shaped(rate, peers)
    finally:
        _remove(_mine())


def payload_rate(link: str) -> float | None:
    """Bits of TCP payload that a link carries in one second at most."""
    rate = RATES[link]
    return None if rate is None else rate * PAYLOAD_SHARE


def clean() -> list[str]:
    """Remove what dead processes left; returns the namespaces' names."""
    left = [name for name in _namespaces() if not _is_alive(int(name.split("-")[1]))]
    _remove(left)
    return left


def _loopback(peers: int) -> list[Place]:
    name = f"{PREFIX}-{os.getpid()}-lo"
    _run(f"ip netns add {name}", f"ip -n {name} link set lo up")
    return [Place(name, "127.0.0.1", "lo")] * peers


def _shaped(rate: float, peers: int) -> list[Place]:
    core = f"{PREFIX}-{os.getpid()}-core"
    _run(f"ip netns add {core}", f"ip -n {core} link add bridge type bridge", f"ip -n {core} link set bridge up")
    places = []
    for i in range(peers):
        peer, edge = f"{PREFIX}-{os.getpid()}-{i}", f"{PREFIX}-{os.getpid()}-edge{i}"
        places.append(Place(peer, f"10.77.{i}.1", "eth0"))
        _run(
            f"ip netns add {peer}",
            f"ip netns add {edge}",
            f"ip netns exec {peer} sysctl -qw net.ipv6.conf.default.disable_ipv6=1 net.ipv4.tcp_no_metrics_save=1",
            f"ip netns exec {edge} sysctl -qw net.ipv6.conf.default.disable_ipv6=1 net.ipv4.ip_forward=1",
            f"ip -n {peer} link set lo up",
            f"ip link add eth0 netns {peer} mtu {MTU} type veth peer name access netns {edge} mtu {MTU}",
            f"ip link add backbone netns {edge} type veth peer name port{i} netns {core}",
            f"ip -n {core} link set port{i} master bridge up",
            f"ip -n {peer} addr add 10.77.{i}.1/24 dev eth0",
            f"ip -n {peer} link set eth0 up",
            f"ip -n {edge} addr add 10.77.{i}.254/24 dev access",
            f"ip -n {edge} link set access up",
            f"ip -n {edge} addr add 10.78.0.{i + 1}/24 dev backbone",
            f"ip -n {edge} link set backbone up",
            f"ip -n {peer} route add default via 10.77.{i}.254",
            *(f"ip -n {edge} route add 10.77.{j}.0/24 via 10.78.0.{j + 1}" for j in range(peers) if j != i),
            f"tc -n {edge} qdisc replace dev access root {bucket(rate)}",
            f"tc -n {edge} qdisc replace dev backbone root {bucket(rate)}",
        )
    return places


def bucket(rate: float) -> str:
    """tc's token bucket for ``rate`` bits per second."""
    bytes_per_s = rate / 8
    burst = max(SMALLEST_BURST, int(bytes_per_s * 0.5e-3))
    return f"tbf rate {rate:.0f}bit burst {burst} limit {max(burst, int(bytes_per_s * QUEUE_S))}"


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{PREFIX}-")]


def _mine() -> list[str]:
    return [name for name in _namespaces() if name.startswith(f"{PREFIX}-{os.getpid()}-")]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(namespaces: Sequence[str]) -> None:
    """Kill what still runs in them, then delete them; their interfaces go along."""
    for name in namespaces:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for pid in inside.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*commands: str) -> None:
    done = subprocess.run(["sh", "-ec", "\n".join(commands)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"the network cannot be set up: {done.stderr.strip()}")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wire.links", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["clean"], help="remove what killed benchmarks left behind")
    parser.parse_args()
    if os.geteuid() != 0:
        print("removing namespaces needs root", file=sys.stderr)
        return 2
    print("removed", ", ".join(clean()) or "nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
