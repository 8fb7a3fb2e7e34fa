"""The bootstrap's machine dies when all are in: a member that can be dialled takes its place for who was relayed and
for who comes, who is in a home where another peer is already; and a laptop sleeps. Real processes, real routers'
address translation. It needs root."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import hasty
import pytest

from benchmarks.netbed.namespaces import TestbedError, processes_in
from benchmarks.netbed.topology import address
from benchmarks.wan.homes import START_S, Home, gathered, wait_for
from benchmarks.wan.sites import network

pytestmark = [pytest.mark.xdist_group("wan"), pytest.mark.heavy, pytest.mark.long]  # namespaces are the machine's

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


def relayed_by(home: Home, other: Home) -> list[str]:
    """The hosts through which the two were connected, in order."""
    short = other.lines()[0]["self"]
    return [
        re.split("/", line["address"])[2] if line.get("by") == "relay" else "direct"
        for line in home.lines()
        if line["event"] == "connected" and line["peer"].endswith(short)
    ]


def test_a_member_that_can_be_dialled_takes_the_dead_bootstraps_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty.begin(monkeypatch)
    try:
        with (
            network(SOURCE, is_verified=False) as made,
            gathered(made, tmp_path, steps=100_000, rests=True) as those,
        ):
            ann, kim, public = those.homes
            assert relayed_by(kim, ann)[-1] == address(HUB), "the bootstrap is asked first"
            those.bootstrap.process.kill()
            wait_for(lambda: relayed_by(kim, ann)[-1] == address(PUBLIC), those.homes, START_S, "they meet elsewhere")
            wait_for(lambda: all(home.live == 3 for home in those.homes), those.homes, START_S, "all are connected")
            where = next(line["address"] for line in public.lines() if line["event"] == "directory is up")
            bob = Home(made, ANN, tmp_path / "bob", ["join", where, *those.own])
            those.homes.append(bob)
            wait_for(lambda: all(home.live == 4 for home in those.homes), those.homes, START_S, "a newcomer is in")
            assert relayed_by(bob, kim)[-1] == address(PUBLIC)
            assert relayed_by(bob, ann) == ["direct"], "two in one home need nobody else"
            laptop = processes_in([made.site(KIM)])
            for pid in laptop:
                os.kill(pid, signal.SIGSTOP)
            awake = [ann, public, bob]
            wait_for(lambda: all(home.live == 3 for home in awake), awake, START_S, "a laptop sleeps")
            for pid in laptop:
                os.kill(pid, signal.SIGCONT)
            wait_for(lambda: all(home.live == 4 for home in those.homes), those.homes, START_S, "it is back")
    except TestbedError as error:
        pytest.skip(str(error))
