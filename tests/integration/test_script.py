"""``p2pdiloco.DiLoCo`` in two training scripts of users: processes of their own, with their own models and loops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from swarm import swarm_in
from waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "peers" / "own_script.py"


def start(state: Path, *arguments: str) -> subprocess.Popen[str]:
    state.mkdir(parents=True)
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "--state", str(state), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_without_a_run_the_script_trains_alone(tmp_path: Path) -> None:
    script = start(tmp_path / "a")
    out, _ = script.communicate(timeout=120)
    assert script.returncode == 0, out
    assert json.loads((tmp_path / "a" / "result.json").read_text())["step"] == 0


@pytest.mark.timeout(300)
def test_two_scripts_train_one_model(tmp_path: Path) -> None:
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        founder = start(tmp_path / "a", "--run", "sines", "--peer", address, "--found", "--steps", "800")
        told = tmp_path / "a" / "node.log"
        wait_until(lambda: told.exists() and "to join from another machine" in told.read_text(), what="the run")
        other = start(tmp_path / "b", "--run", "sines", "--peer", address, "--seed", "1")
        outputs = [script.communicate(timeout=200)[0] for script in (founder, other)]
        logs = [(tmp_path / name / "node.log").read_text()[-3000:] for name in "ab"]
        assert [script.returncode for script in (founder, other)] == [0, 0], (outputs, logs)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in "ab"]
    assert results[0]["sum"] == results[1]["sum"], "the same global parameters"
    assert all(result["last"] < 0.5 * result["first"] for result in results)
    assert all(result["step"] >= 800 for result in results)
    reports = [json.loads(next((tmp_path / name).glob("*/report.json")).read_text()) for name in "ab"]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert all(report["tokens_trained"] > 0 and report["tokens_unmerged"] == 0 for report in reports)
    assert sum(report["tokens_trained"] for report in reports) == reports[0]["tokens_merged"]


def test_what_cannot_be_joined_is_told(tmp_path: Path) -> None:
    script = start(
        tmp_path / "a",
        "--run",
        "sines",
        "--peer",
        "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWFSxUGZZjFqcpQ45DybQHngVbUqSdcw7BTBmba9W7aYfj",
    )
    out, _ = script.communicate(timeout=120)
    assert script.returncode != 0
    assert "DiLoCoError: the node ended with status 3" in out
    assert "none of the initial peers answers" in out
