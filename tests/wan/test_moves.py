"""A laptop changes networks while it trains: another router, another kind of address translation, another address of
its own. Real processes, real routers' address translation. It needs root."""

from __future__ import annotations

from pathlib import Path

import hasty
import pytest

from benchmarks.netbed.namespaces import TestbedError, configure, interface
from benchmarks.netbed.nat_routers import INSIDE, OUT
from benchmarks.netbed.testbed import Testbed
from benchmarks.wan.homes import Home, gathered, wait_for
from benchmarks.wan.sites import network

pytestmark = [pytest.mark.xdist_group("wan"), pytest.mark.heavy, pytest.mark.long]  # namespaces are the machine's

SOURCE = hasty.homes("test-moves", ann="keep", bob="keep", cafe="random")
HUB, ANN, BOB, CAFE = range(4)


def move(made: Testbed, laptop: int, place: int, host: int) -> None:
    """The machine of one site leaves its router, and is behind that of another, whose own machine has gone."""
    site = made.site(laptop)

    def arrive(net) -> None:
        index = interface(net, OUT)
        net.addr("add", index=index, address=f"{INSIDE}.{host}", prefixlen=24)
        net.link("set", index=index, state="up")
        net.route("add", dst="default", gateway=f"{INSIDE}.1")

    configure(site, lambda net: net.link("del", index=interface(net, OUT)))
    configure(made.site(place), lambda net: net.link("set", index=interface(net, OUT), net_ns_fd=site))
    configure(site, arrive)


def meetings(home: Home, other: Home) -> list[str]:
    short = other.lines()[0]["self"]
    met = [line for line in home.lines() if line["event"] == "connected" and line["peer"].endswith(short)]
    return [line.get("by", "dialling") for line in met]


def test_a_laptop_that_moves_while_it_trains_is_met_again_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty.begin(monkeypatch)
    try:
        with (
            network(SOURCE, is_verified=False) as made,
            gathered(made, tmp_path, steps=100_000, absent={CAFE}, rests=True) as those,
        ):
            ann, bob = those.homes
            for home in those.homes:
                home.rest(False)
            hasty.trains(those, ann, bob)
            before = len(meetings(ann, bob))
            assert meetings(ann, bob)[-1] == "punching"
            move(made, BOB, CAFE, 77)
            wait_for(lambda: len(meetings(ann, bob)) > before, those.homes, hasty.WAIT_S, "they meet again")
            hasty.trains(those, ann, bob)
            assert meetings(ann, bob)[-1] == "relay", "the cafe draws ports"
            reports = [hasty.leaves(bob), hasty.leaves(ann)]
            assert [report["tokens_unmerged"] for report in reports] == [0, 0]
            assert reports[-1]["tokens_merged"] == sum(report["tokens_trained"] for report in reports)
            assert len(meetings(ann, bob)) <= before + 2
            assert not any("refuses us" in line["event"] or "twin" in line["event"] for line in ann.lines())
            assert "another process" not in ann.told() + bob.told()
    except TestbedError as error:
        pytest.skip(str(error))
