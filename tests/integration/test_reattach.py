"""A node is killed; its learner trains on, and the node's next life takes it over."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from swarm import advance, contributes, ended, is_alive, learner_of, log_lines, report_of, swarm_in, until, write_config


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
@pytest.mark.timeout(300)
def test_the_learner_of_a_killed_node_is_taken_over_by_the_next(tmp_path: Path) -> None:
    config = write_config(tmp_path, inner_steps=1_000_000, schedule_sync_every=8)
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        bob = swarm.join("B", address, "--reattach-s", "60")
        until(ann, lambda: contributes(ann, bob, 0), what="contributions")
        learner = learner_of(bob)
        assert learner is not None
        bob.kill()
        advance(ann, 3)
        assert is_alive(learner)
        used = learner.cpu_times().user
        advance(ann, 3)
        assert learner.cpu_times().user > used, "it trains"

        ann.refresh()
        version = ann.view.version
        again = swarm.join("B", address)
        until(ann, lambda: contributes(ann, again, version), what="contributions of the learner that was taken over")
        assert learner_of(again) is None, "it started none of its own"
        assert is_alive(learner)
        assert any("trained on while the node was away" in line for line in log_lines(again))
        swarm.stop()
        assert [ended(member) for member in (ann, again)] == [0, 0], log_lines(again)
        assert not is_alive(learner)
        assert report_of(again)["tokens_unmerged"] == 0
