"""Meshes in which not every pair can connect: seeds, and what ownership by connectedness is for."""

from __future__ import annotations

import os
from random import Random

import pytest

from benchmarks.protocol.meshes import MESHES, measured
from p2pdiloco.protocol.ids import PeerId
from tests.machine_sim.report import simulate
from tests.simulation.topologies import WHOLE, behind_routers, drawn, groups, parts, share

JOBS = min(2, os.cpu_count() or 1)
PEERS = [PeerId(f"p{i}") for i in range(8)]


@pytest.mark.timeout(300)
def test_partial_and_changing_meshes_break_nothing() -> None:
    """In 49, 287, 384 and 486 a newcomer that was all that joined three parts of a run took nobody's state (H2d)."""
    report = simulate([*range(20), 49, 287, 384, 486, 10109980], "meshes", jobs=JOBS)
    assert not report.violations, "\n".join(f"{v.command}   # {v.sentence}" for v in report.violations)
    assert report.tokens_lost == 0
    assert report.versions > 1000


def test_where_a_tenth_of_the_pairs_do_not_meet_a_version_still_holds_all_learners() -> None:
    """Without rules R 6.7 of 8, and 7 % of all versions are forks."""
    figures = measured(MESHES["90 % of pairs"], minutes=6.0, worlds=1, peers=8)
    assert figures["learners_a_commit"] > 7.8
    assert figures["forks"] == 0
    assert figures["tokens_merged_share"] > 0.9


def test_a_mesh_that_lasts_holds_together() -> None:
    for seed in range(50):
        random = Random(seed)
        for mesh in (drawn(random, PEERS), share(random, PEERS, 0.2), groups(random, PEERS, 3, 1)):
            assert len(parts(PEERS, mesh)) == 1


def test_meshes_are_what_they_are_called() -> None:
    star = behind_routers(PEERS, PEERS[:1])
    assert len(star) == 21
    assert all(PEERS[0] not in pair for pair in star)
    assert len(parts(PEERS, {*star, *((PEERS[0], other) for other in PEERS[1:])})) == 8
    assert parts(PEERS, WHOLE) == [frozenset(PEERS)]
    apart = sum(len(share(Random(seed), PEERS, 0.7)) for seed in range(100)) / 100
    assert 0.25 < apart / 28 < 0.35
