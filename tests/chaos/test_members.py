"""A member with changed code, among real peers: it declares as much as is believed and gives the opposite of what it
has found."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.hostile.members import STEP_TOKENS, run

STEPS = 80


@pytest.mark.timeout(420)
def test_one_of_four_that_declares_most_and_turns_round_does_not_ruin_the_model(tmp_path: Path) -> None:
    """Beside the three honest peers alone, at equal honest tokens. Before weights were capped the loss was 1.2 times
    as high after two merges, 7 times after twelve, and the run ended with 2 % of its budget trained."""
    options = argparse.Namespace(peers=4, steps=STEPS, merge="rda", timeout_s=180.0)
    alone = run(tmp_path / "honest", options, 3, ())
    beside = run(tmp_path / "attack", options, 3, ["tokens+flip"])
    last = beside.looks[-1]
    assert last.loss < 1.25 * alone.loss_at(last.tokens)
    assert beside.honest_tokens > 0.5 * STEPS * 3 * STEP_TOKENS, "one liar of four ended the run early"
