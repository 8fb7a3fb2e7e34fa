"""The bootstrap's machine dies when all are in: a member that can be dialled takes its place for who was relayed and
for who comes; two in one home meet there. Real processes, real routers' address translation. It needs root."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.wan.homes import START_S, Home, gathered, wait_for
from benchmarks.wan.sites import network
from p2pdiloco.testbed.namespaces import TestbedError
from p2pdiloco.testbed.topology import address

pytestmark = [pytest.mark.xdist_group("wan"), pytest.mark.heavy]  # namespaces are the machine's

SOURCE = """
name = "test-second"
[[site]]
name = "hub"
[[site]]
name = "ann"
nat = "keep"
[[site]]
name = "kim"
nat = "random"
[[site]]
name = "pub"
"""
HUB, ANN, KIM, PUBLIC = range(4)
IN_A_HOME = "192.168.1.2"


def ways(home: Home, other: Home) -> list[tuple[str, str]]:
    """By what the two were connected, and at which host, in order."""
    short = other.lines()[0]["self"]
    return [
        (line.get("by", "dialling"), line["address"].split("/")[2])
        for line in home.lines()
        if line["event"] == "connected" and line["peer"].endswith(short)
    ]


def test_a_member_that_can_be_dialled_takes_the_dead_bootstraps_place(tmp_path: Path) -> None:
    try:
        with network(SOURCE, is_verified=False) as made, gathered(made, tmp_path, steps=100_000) as those:
            ann, kim, public = those.homes
            assert ways(kim, ann)[-1] == ("relay", address(HUB)), "the bootstrap is asked first"
            there = ("relay", address(PUBLIC))
            those.bootstrap.process.kill()
            wait_for(lambda: ways(kim, ann)[-1] == there, those.homes, START_S, "they meet elsewhere")
            wait_for(lambda: all(home.live == 3 for home in those.homes), those.homes, START_S, "all are connected")
            where = next(line["address"] for line in public.lines() if line["event"] == "directory is up")
            bob = Home(made, ANN, tmp_path / "bob", ["join", where, *those.own])  # in the same home as ann
            those.homes.append(bob)
            wait_for(lambda: all(home.live == 4 for home in those.homes), those.homes, START_S, "a newcomer is in")
            assert ways(bob, kim)[-1] == there
            assert ways(bob, ann)[-1] == ("dialling", IN_A_HOME)
    except TestbedError as error:
        pytest.skip(str(error))
