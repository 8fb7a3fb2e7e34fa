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
from scripts import END_S, FOUND, QUICKLY, events, held, report, until_founded, until_trained
from swarm import swarm_in

ROOT = Path(__file__).parents[2]
HF = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)
LIGHTNING = pytest.mark.skipif(
    find_spec("lightning") is None,
    reason="needs the extra lightning: pip install -c constraints.txt '.[lightning]'",
)


DEFAULT_STEPS = 200
"""What a script that joins says, against the run's own number."""


def start(program: str, state: Path, *arguments: str) -> subprocess.Popen[str]:
    state.mkdir(parents=True)
    with open(state / "script.log", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"peers.{program}", "--state", str(state), *QUICKLY, *arguments],
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
        scripts = [start(program, folder / "a", *common, *FOUND, "--steps", str(steps))]
        try:
            until_founded(folder / "a" / "peer")
            with held(scripts[0].pid, program):
                scripts.append(start(program, folder / "b", *common, "--seed", "1"))
                until_trained(folder / "b" / "peer")
            statuses = [script.wait(END_S) for script in scripts]
        finally:
            for script in scripts:
                if script.poll() is None:
                    script.kill()
                    script.wait()
    said = [(folder / name / "script.log").read_text() for name in "ab"]
    assert statuses == [0, 0], [log[-3000:] for log in said]
    other = f"was founded with total_steps={steps} and keeps these settings; this script has total_steps="
    assert [other in log for log in said] == [False, steps != DEFAULT_STEPS]
    assert not any("frozen parameters" in log for log in said), "one base"
    results = [json.loads((folder / name / "result.json").read_text()) for name in "ab"]
    reports = [report(folder / name / "peer") for name in "ab"]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert results[0]["sum"] == results[1]["sum"], "both models hold the swarm's parameters"
    assert all(one["tokens_trained"] > 0 and one["tokens_unmerged"] == 0 for one in reports)
    assert reports[0]["tokens_merged"] == sum(one["tokens_trained"] for one in reports)
    return results, reports


def losses_shown(folder: Path) -> list[float | None]:
    return [event["loss"] for event in events(folder / "peer", "progress")]


@HF
@pytest.mark.timeout(900)
def test_two_hugging_face_trainers_train_one_model(tmp_path: Path) -> None:
    results, reports = train_two("hf_trainer", tmp_path, 400)
    assert all(result["last"] < 0.8 * result["first"] for result in results)
    for result, told in zip(results, reports, strict=True):  # two micro-batches of 8 texts of 16 tokens a step
        assert told["tokens_trained"] == result["steps"] * 2 * 8 * 16
    batches = [set(result["batches"]) for result in results]
    assert len(batches[0]) > 200
    assert not batches[0] & batches[1], "one dataset, and no batch in common"
    assert {"swarm/loss", "swarm/peers", "swarm/version", "swarm/share", "swarm/sent_mb"} <= set(results[0]["logged"])
    shown = losses_shown(tmp_path / "a")
    assert shown[0] is None or shown[0] > 0.0, "no loss is known before the Trainer logs one"
    assert shown[-1] == pytest.approx(results[0]["last"], rel=0.3)


@HF
@pytest.mark.timeout(900)
def test_of_a_lora_only_the_adapters_travel(tmp_path: Path) -> None:
    results, _ = train_two("hf_trainer", tmp_path, 200, "--lora")
    assert all(0 < result["travelled"] < 12_000 and not result["frozen_moved"] for result in results)
    assert all(result["last"] < result["first"] for result in results)


@LIGHTNING
@pytest.mark.timeout(900)
def test_two_lightning_trainers_train_one_model(tmp_path: Path) -> None:
    results, reports = train_two("lightning_module", tmp_path, 600)
    assert all(result["last"] < 0.5 * result["first"] for result in results)
    for result, told in zip(results, reports, strict=True):
        assert told["tokens_trained"] == result["steps"] * 16
    assert losses_shown(tmp_path / "a")[-1] is not None
