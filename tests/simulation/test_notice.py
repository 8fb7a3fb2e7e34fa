"""Peers that leave in order because their machine is taken back: nothing that they have trained is lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.heavy

LEAVE_S = 20.0


def test_no_token_of_a_leaver_is_lost_and_it_is_gone_in_time() -> None:
    """Judged by the models of those who stay."""
    command = [sys.executable, "-m", "tests.simulation.notice", *map(str, range(1, 11))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=300)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 5
    assert all(left["trained"] for left in found)
    assert [left for left in found if left["lost"] or left["trouble"] or left["seconds"] > LEAVE_S] == []
