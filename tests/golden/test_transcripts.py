"""The transcripts beside this file are what the protocol does in eleven situations. To accept a change of behaviour:
``make golden`` and read the difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.machine_sim.scenarios import STORIES, transcript

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", STORIES)
def test_transcript(name: str, request: pytest.FixtureRequest) -> None:
    told = transcript(name)
    path = HERE / f"{name}.txt"
    if request.config.getoption("--update", default=False):
        path.write_text(told)
    assert told == path.read_text(), f"{name} differs; if that is right: make golden"


def test_no_transcript_without_its_scenario() -> None:
    assert sorted(path.stem for path in HERE.glob("*.txt")) == sorted(STORIES)
