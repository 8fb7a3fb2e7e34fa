"""The plan of lying members: real peers with changed code beside honest ones, and what counts as harm."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.chaos import liars
from tests.chaos.liars import LiarsPlan, Reference, Row, is_liars_plan, loss_alone, problems_of, read_liars_plan
from tests.chaos.schedule import SHIPPED, PlanError, find_plan

PLAN = read_liars_plan(find_plan("liars"))
HARMLESS = Row(
    attack="flip",
    liars=1,
    peers=4,
    held_out=1.8,
    held_out_honest=1.8,
    ratio=1.0,
    honest_share=1.1,
    ended_early=False,
    standstill_s=0.5,
    shard_standstill_s=2.0,
    honest_banned=0,
    newcomer_s=3.0,
    honest_counted=0.8,
    contributors=3.5,
    owned=0.2,
    named=("liar-0",),
    sent=True,
    seconds=30.0,
)


@pytest.mark.long  # simulation/test_seeds.py has it for the protocol
@pytest.mark.timeout(420)
def test_one_of_four_that_declares_most_and_turns_round_does_not_ruin_the_model(tmp_path: Path) -> None:
    """The lie is sent, the loss is measured at equal honest tokens, and a newcomer gets in. Before weights were capped,
    this attack made the loss 7 times as high after twelve merges, and ended the run with 2 % of its budget trained.
    Before lineages counted tokens by their factors, no newcomer got in."""
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "tests.chaos", "--plan", "liars-short", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--json", str(rows)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = {row["attack"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert list(found) == ["tokens+flip"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"ratio": 1.03}, "1.030 times that without the liars; allowed are 1.02"),
        ({"ratio": math.nan}, "times that without the liars"),
        ({"attack": "tokens+hidden", "ratio": 1.06}, "allowed are 1.05"),
        ({"peers": 5, "liars": 2, "ratio": 1.06}, "allowed are 1.05"),
        ({"ended_early": True, "honest_share": 0.5}, "50% of the honest budget"),
        ({"standstill_s": 10.0}, "no version for 10.0 s"),
        ({"honest_banned": 2}, "excluded: 2"),
        ({"newcomer_s": None}, "an honest newcomer did not get the state"),
    ],
)
def test_each_kind_of_harm_is_a_problem(changes: dict[str, object], problem: str) -> None:
    assert list(problems_of(PLAN, HARMLESS)) == []
    (found,) = problems_of(PLAN, msgspec.structs.replace(HARMLESS, **changes))
    assert problem in found


def test_a_lie_that_hides_may_cost_a_little_more() -> None:
    assert list(problems_of(PLAN, msgspec.structs.replace(HARMLESS, attack="hidden", ratio=1.04))) == []


def test_the_loss_without_liars_is_that_of_as_many_tokens() -> None:
    """By the logarithm of the tokens, between the shortest and the longest run."""
    runs = [Reference(100, 2.0), Reference(100, 2.2), Reference(400, 1.5), Reference(400, 1.3)]
    assert loss_alone(runs, 100) == pytest.approx(2.1)
    assert loss_alone(runs, 200) == pytest.approx(1.75)
    assert loss_alone(runs, 400) == pytest.approx(1.4)
    assert (loss_alone(runs, 1), loss_alone(runs, 9999)) == (loss_alone(runs, 100), loss_alone(runs, 400))
    assert loss_alone(runs[:2], 300) == pytest.approx(2.1)


def test_an_honest_peer_counts_as_excluded_when_it_is_blamed_or_missed() -> None:
    """One that comes back soon, or that had ended, was not missed."""

    def log(*more: dict[str, object]) -> list[dict[str, object]]:
        return [*more, {"event": "ended", "time": 100.0}]

    def left(peer: str, at: float) -> dict[str, object]:
        return {"event": "left", "peer": peer, "time": at}

    back = {"event": "joined", "peer": "b", "time": 55.0}
    fault = {"event": "fault", "peer": "b", "what": "state", "time": 1.0}
    assert set(liars.excluded((), {"a": log(left("b", 50.0)), "b": log()})) == {"b"}
    assert set(liars.excluded((), {"a": log(left("b", 50.0), back), "b": log()})) == set()
    assert set(liars.excluded((), {"a": log(left("b", 95.0)), "b": log()})) == set()
    assert set(liars.excluded((), {"a": log(left("liar", 50.0)), "b": log()})) == set()
    assert set(liars.excluded((), {"a": log(fault), "b": log()})) == {"b"}


def test_other_numbers_of_peers_and_liars_may_be_asked_for() -> None:
    """A group of the plan that has them says how long it runs, and what it is compared with."""
    path = find_plan("liars")
    (found,) = read_liars_plan(path, peers=5, liars=2, attacks=["cabal+flip"]).groups
    (planned,) = [group for group in PLAN.groups if group.peers == 5]
    assert found == msgspec.structs.replace(planned, attacks=("cabal+flip",))
    (found,) = read_liars_plan(path, peers=6).groups
    assert found == msgspec.structs.replace(PLAN.groups[0], peers=6)
    with pytest.raises(PlanError, match="2 of 4 peers lie"):
        read_liars_plan(path, liars=2)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("liars*.toml")), ids=lambda path: path.stem)
def test_shipped_plans_of_liars_are_good(path: Path) -> None:
    assert is_liars_plan(path)
    assert isinstance(read_liars_plan(path, merge="rda", seed=3), LiarsPlan)


def test_a_plan_of_faults_is_none_of_liars() -> None:
    assert not is_liars_plan(find_plan("quick"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ("liars = 1", "more than half must be honest"),
        ("steps = 240", "steps"),
        ('"tokens+flip"', "there is no lie 'moods'"),
        ("width = 64", "width"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused(changed: str, problem: str, tmp_path: Path) -> None:
    text = find_plan("liars").read_text()
    assert changed in text
    instead = {"liars = 1": "liars = 2", "steps = 240": "steps = 0", "width = 64": "width = 0"}
    path = tmp_path / "plan.toml"
    path.write_text(text.replace(changed, instead.get(changed, '"tokens+moods"'), 1))
    with pytest.raises(PlanError, match=problem):
        read_liars_plan(path)
