"""A member with changed code, among real peers: it declares as much as is believed and gives the opposite of what it
has found; or it puts values of its own into what it merges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(420)
def test_one_of_four_that_declares_most_and_turns_round_does_not_ruin_the_model(tmp_path: Path) -> None:
    """Beside the three honest peers alone, at equal honest tokens. Before weights were capped the loss was 1.2 times
    as high after two merges, 7 times after twelve, and the run ended with 2 % of its budget trained. Before agreement
    counted it was 1.02 to 1.04 times as high, and nobody was told."""
    command = [sys.executable, "-m", "benchmarks.hostile.members", "--steps", "80", "--merge", "rda"]
    command += ["--attacks", "tokens+flip", "--timeout-s", "180", "--json", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rows.jsonl").read_text())["figures"]
    assert found["ratio"] < 1.1
    assert found["named"] == 1, "no honest peer's log names the liar"
    assert found["honest_share"] > 0.5, "one liar of four ended the run early"


@pytest.mark.timeout(420)
def test_one_of_four_that_merges_wrongly_is_found(tmp_path: Path) -> None:
    """It owns some 60 commits of the run if nobody finds out, and one in ten is audited. Logs say who it was."""
    command = [sys.executable, "-m", "benchmarks.hostile.members", "--steps", "100", "--attacks", "merges"]
    command += ["--timeout-s", "180", "--json", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "rows.jsonl").read_text())["figures"]
    assert found["named"] == 1, "no honest peer's log names the liar"
    assert found["ratio"] < 1.1
