"""A run that has finished, or is about to, is prolonged: its peers go on from where they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from swarm import (
    START_S,
    contributors,
    ended,
    learner_of,
    learners_held,
    log_lines,
    printed,
    report_of,
    swarm_in,
    until,
    write_config,
)
from waiting import wait_until

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.util.status_pipe import Invited


def prolong(folder: Path, *end: str) -> str:
    """Run the command ``p2pdiloco prolong``, and return what it prints."""
    command = [sys.executable, "-m", "p2pdiloco", "prolong", str(folder), *end]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=True).stdout


def last_step(member: Member) -> int:
    """The largest step of a commit that it has applied."""
    return max((commit["step"] for commit in member.view.commits), default=0)


@pytest.mark.timeout(300)
def test_a_finished_run_is_prolonged_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A, its founder, and B end at step 40 and are gone. A is resumed until 80, and B comes back with its old state
    folder. While both serve the result, the run is prolonged again."""
    config, serving = write_config(tmp_path, inner_steps=40), "serving the final model"
    with swarm_in(tmp_path) as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        bob = swarm.join("B", address)
        assert [ended(member) for member in (ann, bob)] == [0, 0]
        before = report_of(ann)
        assert before["step"] == before["total_steps"] == 40

        assert "now ends at step 80, no longer at step 40" in prolong(ann.folder, "--steps", "80")
        ann = swarm.launch("A", ["resume", str(ann.folder), "--bootstrap", address], "--stay-s", "300")
        ann.wait_for(Invited, START_S)
        with learners_held(ann):
            bob = swarm.join("B", address, "--stay-s", "300")
            wait_until(lambda: learner_of(bob), START_S, "a peer that comes back")
        for member in (ann, bob):
            wait_until(lambda member=member: printed(member, serving), START_S, f"the end of {member.name}")  # type: ignore[misc]
            member.refresh()
        assert 80 <= last_step(ann) <= 84
        assert report_of(bob)["total_steps"] == 80
        assert report_of(ann)["tokens_merged"] > before["tokens_merged"]
        counted = [commit["tokens"] for commit in ann.view.commits if commit["shard"] == 0]
        assert counted == sorted(counted), "no token from before is lost"

        prolong(ann.folder, "--steps", "120")
        for member in (ann, bob):
            until(member, lambda member=member: last_step(member) >= 120, what="the third end")  # type: ignore[misc]
            assert printed(member, "is prolonged to step 120: going on")
        for after in (40, 84):
            later = [commit for commit in ann.view.commits if commit["step"] > after]
            assert any(len(contributors(commit)) == 2 for commit in later), "both train"
        for member in (ann, bob):
            wait_until(lambda member=member: "\n".join(log_lines(member)).count(serving) == 2, START_S, "the end")  # type: ignore[misc]
        reports = [report_of(member) for member in (ann, bob)]
        assert [report["step"] for report in reports] == [120, 120]
        assert reports[0]["digests"] == reports[1]["digests"]
        assert reports[0]["train_loss"] < 0.7 * before["train_loss"], "the learning rate follows the end"
        swarm.stop()
        assert [ended(member) for member in (ann, bob)] == [0, 0]
