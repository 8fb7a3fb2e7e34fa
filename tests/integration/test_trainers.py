"""The Hugging Face Trainer and Lightning's, with the real packages, in two processes that train one model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from swarm import swarm_in
from waiting import wait_until

ROOT = Path(__file__).parents[2]
START_S = 200.0
"""Everything that starts torch and these packages, on a busy machine."""
END_S = 350.0
HF = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)
LIGHTNING = pytest.mark.skipif(
    find_spec("lightning") is None,
    reason="needs the extra lightning: pip install -c constraints.txt '.[lightning]'",
)


def start(program: str, state: Path, *arguments: str) -> subprocess.Popen[str]:
    state.mkdir(parents=True)
    with open(state / "script.log", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"peers.{program}", "--state", str(state), *arguments],
            stdout=output,
            stderr=output,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )


def train_two(program: str, folder: Path, steps: int, *extra: str) -> tuple[list[Any], list[Any]]:
    """What the scripts and what their peers report, after both have trained to the end."""
    with swarm_in(folder / "swarm") as swarm:
        address = swarm.start_bootstrap()
        common = ("--run", "tiny", "--peer", address, *extra)
        scripts = [start(program, folder / "a", *common, "--found", "--steps", str(steps))]
        try:
            told = folder / "a" / "peer" / "node.log"
            wait_until(
                lambda: told.exists() and "to join from another machine" in told.read_text(), START_S, what="the run"
            )
            scripts.append(start(program, folder / "b", *common, "--seed", "1"))
            statuses = [script.wait(END_S) for script in scripts]
        finally:
            for script in scripts:
                if script.poll() is None:
                    script.kill()
                    script.wait()
    said = [(folder / name / "script.log").read_text()[-3000:] for name in "ab"]
    assert statuses == [0, 0], (said, told.read_text()[-3000:])
    results = [json.loads((folder / name / "result.json").read_text()) for name in "ab"]
    reports = [json.loads(next((folder / name / "peer").glob("*/report.json")).read_text()) for name in "ab"]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert results[0]["sum"] == results[1]["sum"], "both models hold the swarm's parameters"
    assert all(report["tokens_trained"] > 0 and report["tokens_unmerged"] == 0 for report in reports)
    assert reports[0]["tokens_merged"] == sum(report["tokens_trained"] for report in reports)
    return results, reports


def losses_shown(folder: Path) -> list[float | None]:
    lines = next(folder.glob("peer/*/metrics.jsonl")).read_text().splitlines()
    return [event["loss"] for event in map(json.loads, lines) if event["event"] == "progress"]


@HF
@pytest.mark.timeout(600)
def test_two_hugging_face_trainers_train_one_model(tmp_path: Path) -> None:
    results, reports = train_two("hf_trainer", tmp_path, 400)
    assert all(result["last"] < 0.8 * result["first"] for result in results)
    for result, report in zip(results, reports, strict=True):  # two micro-batches of 8 texts of 16 tokens a step
        assert report["tokens_trained"] == result["steps"] * 2 * 8 * 16
    shown = losses_shown(tmp_path / "a")
    assert shown[0] is None or shown[0] > 0.0, "no loss is known before the Trainer logs one"
    assert shown[-1] == pytest.approx(results[0]["last"], rel=0.2)


@HF
@pytest.mark.timeout(600)
def test_of_a_lora_only_the_adapters_travel(tmp_path: Path) -> None:
    results, _ = train_two("hf_trainer", tmp_path, 200, "--lora")
    assert all(0 < result["travelled"] < 12_000 and not result["frozen_moved"] for result in results)
    assert all(result["last"] < result["first"] for result in results)


@LIGHTNING
@pytest.mark.timeout(600)
def test_two_lightning_trainers_train_one_model(tmp_path: Path) -> None:
    results, reports = train_two("lightning_module", tmp_path, 600)
    assert all(result["last"] < 0.5 * result["first"] for result in results)
    for result, report in zip(results, reports, strict=True):
        assert report["tokens_trained"] == result["steps"] * 16
    assert losses_shown(tmp_path / "a")[-1] is not None
