"""The pictures in docs/states.md are what the code does in seeded worlds. To accept a change: ``make golden``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_net_endpoint import talk
from two_endpoints import World, small_parts
from watch import attributes_of, calls_of

from p2pdiloco.net.connection import CloseState, Connection
from p2pdiloco.protocol.machine import Machine
from tests.machine_sim.seeds import run_seed

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def connection_state(of: Connection) -> str | None:
    if "_overdue_reason" not in vars(of):
        return None
    if of._end.over is not None:
        return "closed"
    if of._end.parting is not None:
        return "parting"
    if of._end.is_retiring:
        return "retiring"
    return "open" if of.remote is not None else "greeting" if of._handshake is not None else "connecting"


def connections() -> str:
    """Two endpoints that both dial, whose connections are cut, and that part."""
    with attributes_of(Connection, connection_state, CloseState) as picture:
        for seed in range(12):
            with small_parts():
                world = World(seed)
                world.meet()
                talk(world, cuts_primaries=True)
                world.run(world.now + 1.0)
                if seed % 2 and world.bob.id in world.ann.endpoint.serving:
                    world.ann.endpoint.disconnect(world.bob.id, "leaving", world.now)
                    world.ann.turn()
                world.run(world.now + 200.0)
    return picture.mermaid()


def peers() -> str:
    """Worlds of mixed faults."""
    with calls_of(Machine, "handle", lambda machine: machine.core.phase()) as picture:
        for seed in range(8):
            run_seed(seed)
    return picture.mermaid()


def learners() -> str:
    """As their peers see them, in worlds of whole peers."""
    command = [sys.executable, "-m", "tests.golden.learners_at_work"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("draw", [connections, peers, learners], ids=lambda draw: draw.__name__)
def test_the_picture_is_what_the_code_does(draw: Callable[[], str], request: pytest.FixtureRequest) -> None:
    drawn = draw()
    page = PAGE.read_text()
    block = re.compile(rf"(<!-- {draw.__name__} -->\n```mermaid\n).*?(```)", re.DOTALL)
    assert len(block.findall(page)) == 1
    if request.config.getoption("--update", default=False):
        page = block.sub(lambda found: found[1] + drawn + found[2], page)
        PAGE.write_text(page)
    found = block.search(page)
    assert found is not None
    assert found[0].split("```mermaid\n")[1][:-3] == drawn, "docs/states.md differs; if that is right: make golden"
