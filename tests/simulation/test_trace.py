"""The command that follows one contribution from the socket to the learner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STATIONS = {"transport/tls_connection", "net/session", "protocol/aggregation", "codec/merge", "training/node_link"}


def test_a_contribution_is_followed_from_the_socket_to_the_learner() -> None:
    command = [sys.executable, "-m", "tests.peer_sim.trace", "--files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    files = {line.split()[1] for line in done.stdout.splitlines()[1:]}
    assert files >= STATIONS
