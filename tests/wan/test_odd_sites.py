"""Who has IPv6 alone, and who can dial port 443 alone, trains with a home behind a router: real processes, and one
bootstrap whose directory and meeting point share that port. It needs root."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import hasty
import pytest

from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.topology import TopologyError, address, address6, parse_topology
from benchmarks.wan.homes import gathered
from benchmarks.wan.sites import network

pytestmark = [pytest.mark.xdist_group("wan"), pytest.mark.heavy]  # namespaces are the machine's

SOURCE = """
name = "test-odd"
[[site]]
name = "hub"
ip = "46"
[[site]]
name = "ann"
nat = "keep"
[[site]]
name = "six"
ip = "6"
[[site]]
name = "office"
firewall = "443"
"""
PORTS = (f"/ip4/{address(0)}/tcp/443", f"/ip6/{address6(0)}/tcp/443")


def test_ipv6_alone_and_port_443_alone_meet_a_home_through_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty.begin(monkeypatch)
    hub = [word for where in PORTS for word in ("--listen", where, "--rendezvous", where)]
    try:
        with (
            network(SOURCE, is_verified=False) as made,
            gathered(made, tmp_path, steps=100_000, hub=hub, rests=True) as those,
        ):
            short = {home.lines()[0]["self"]: home.name for home in those.homes}
            met = [
                (frozenset((home.name, short[line["peer"][-6:]])), line.get("by"))
                for home in those.homes
                for line in home.lines()
                if line["event"] == "connected" and line["peer"][-6:] in short
            ]
            assert {by for _, by in met} == {"relay"}
            assert {pair for pair, _ in met} == {frozenset(pair) for pair in combinations(("ann", "six", "office"), 2)}
    except TestbedError as error:
        pytest.skip(str(error))


def test_ipv6_is_for_sites_without_routers() -> None:
    with pytest.raises(TopologyError, match="without nat"):
        parse_topology('name = "x"\n[[site]]\nname = "a"\nip = "6"\nnat = "keep"\n[[site]]\nname = "b"\n')
