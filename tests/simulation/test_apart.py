"""Whole peers in meshes that fall apart: what they say at the end."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from p2pdiloco.peer.ending import APART


def told(peers: int, dies_at: float = 0.0, back_at: float = 0.0, *, needs_majority: bool = False) -> dict[str, Any]:
    """What came of it."""
    words = [
        sys.executable,
        "-m",
        "tests.simulation.apart",
        str(peers),
        str(dies_at),
        str(back_at),
        str(int(needs_majority)),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["violations"] == []
    return found


def test_behind_routers_all_train_one_model() -> None:
    """Five peers, of which four meet nobody but the first (rules R): no forks, once it is known who meets whom."""
    found = told(5)
    assert found["statuses"] == [0] * 5
    assert (found["models"], found["forks"]) == (1, 0)


def test_when_the_public_peer_dies_the_others_say_that_there_may_be_two_models() -> None:
    """C6c: each of the two trains on alone, and their models differ; neither ends as if all were well."""
    found = told(3, dies_at=20.0)
    assert found["statuses"] == [APART, APART]
    assert all("2 peers were lost at once" in reason for reason in found["reasons"])
    assert found["models"] == 2


@pytest.mark.parametrize(("dies_at", "back_at"), [(20.0, 30.0), (20.0, 36.0), (22.0, 38.0)])
def test_who_comes_back_before_the_end_makes_one_model_of_both(dies_at: float, back_at: float) -> None:
    """C5a, C6a: nobody leaves before peers that it does not hear have finished, too."""
    found = told(3, dies_at, back_at)
    assert found["statuses"] == [0, 0, 0]
    assert found["models"] == 1


def test_who_stands_still_at_the_end_is_not_taken_for_a_cut() -> None:
    """C6f: nobody says that there may be a second model, and nobody waits for those who have left."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.apart", "stalls", "8"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 8
    assert not [world for world in found if world["violations"] or any(world["statuses"]) or world["seconds"] > 90]


def test_where_a_majority_is_needed_there_is_one_model() -> None:
    """C6e: the two stop at the version that all three had, and say what they have lost."""
    found = told(3, dies_at=20.5, needs_majority=True)  # at 20.0 it has sent a commit that reaches one of them
    assert found["models"] == 1
    assert found["statuses"] == [1, 1]
