"""Plans and schedules: the same seed gives the same schedule, schedules are fair, and errors name the field."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.chaos import byzantine
from tests.chaos.schedule import (
    BLACKOUT_CALM_S,
    COUNTED,
    LEARNER_LIVES,
    LIES,
    LINK_KINDS,
    RECOVERY_S,
    PlanError,
    draw_schedule,
    find_plan,
    read_plan,
)

RUN = '[run]\nname = "tiny"\ninner = { warmup = 0 }\n'
GOOD = f'name = "good"\npeers = 3\nseconds = 60\n{RUN}'


def written(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "name", ["quick", "short", "half-hour", "as-shipped", "peer-hour", "hostile", "hostile-short", "blackout"]
)
def test_shipped_plans_are_good(name: str) -> None:
    plan = read_plan(find_plan(name))
    assert plan.name == name
    assert draw_schedule(plan, 1).faults


def test_same_seed_same_schedule() -> None:
    plan = read_plan(find_plan("half-hour"))
    one, same, other = (msgspec.json.encode(draw_schedule(plan, seed)) for seed in (7, 7, 8))
    assert one == same
    assert one != other


def test_faults_come_as_often_as_the_plan_says() -> None:
    plan = read_plan(find_plan("half-hour"))
    counts = [len(draw_schedule(plan, seed).faults) for seed in range(10)]
    assert 0.7 * plan.seconds / plan.every_s < sum(counts) / 10 < 1.1 * plan.seconds / plan.every_s
    kinds = {fault.kind for seed in range(10) for fault in draw_schedule(plan, seed).faults}
    assert kinds == {*plan.weights, "blackout"}


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_is_fair(seed: int) -> None:
    plan = read_plan(find_plan("half-hour"))
    faults = draw_schedule(plan, seed).faults
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    assert sorted(fault.at for fault in faults) == [fault.at for fault in faults]
    ordinary = [fault for fault in faults if fault.kind != "blackout" and fault.kind not in LINK_KINDS]
    for fault in ordinary:
        hit = {name for o in ordinary if o.at <= fault.at < o.end + RECOVERY_S for name in o.peers}
        assert len(hit) < plan.peers, "somebody is always whole"
    for dark in (fault for fault in faults if fault.kind == "blackout"):
        assert {*dark.peers} == {*plan.names}
        assert not [f for f in faults if f is not dark and dark.at <= f.at < dark.end + BLACKOUT_CALM_S]
    for name in plan.names:
        assert sum(fault.kind == "learner" and fault.peers == (name,) for fault in faults) <= LEARNER_LIVES


def test_after_a_power_cut_each_peer_comes_back_at_a_time_of_its_own() -> None:
    plan = read_plan(find_plan("blackout"))
    (cut,) = draw_schedule(plan, 1).faults
    assert cut.peers == plan.names
    assert len({*cut.returns_s}) == plan.peers
    assert max(cut.returns_s) == cut.duration_s
    assert draw_schedule(plan, 2).faults[0].returns_s != cut.returns_s


def test_the_command_line_beats_the_file(tmp_path: Path) -> None:
    plan = read_plan(written(tmp_path, GOOD), peers=5, seconds=7.0, together=3)
    assert (plan.peers, plan.seconds) == (5, 7.0)
    assert plan.run is not None
    assert plan.run.schedule.together == 3


def test_a_run_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "elsewhere"')
    plan = read_plan(written(tmp_path, 'name = "good"\npeers = 3\nseconds = 60\nconfig = "run.toml"'))
    assert plan.run is not None
    assert plan.run.name == "elsewhere"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("peers = ", "plan.toml"),
        (GOOD.replace("peers = 3", "peers = 1"), "peers"),
        (GOOD.replace("peers = 3", 'peers = 3\nregions = ["a", "a"]'), "two have the same name"),
        (GOOD.replace("peers = 3", 'peers = 3\nregions = ["a", "b", "c", "d"]'), "at least as many peers"),
        (GOOD.replace("peers = 3", "pears = 3"), "pears"),
        (GOOD.replace("seconds = 60", "seconds = 60\nblackouts = 2"), "blackouts: each needs"),
        (GOOD + "[weights]\nkil = 1\n", "kil"),
        (GOOD + "[weights]\nkill = 0\n", "at least one must be more than 0"),
        (GOOD + "[weights]\nkill = 1\nregion = 1\n", "need two regions"),
        (GOOD + "[weights]\nblackout = 1\n", "say blackouts = N"),
        (GOOD + "[weights]\npower-cut = 1\n", "say power_cuts = N"),
        (GOOD.replace("seconds = 60", "seconds = 60\npower_cuts = 1"), "power_cuts: 1 of them need 80 seconds"),
        (GOOD.replace("seconds = 60", "seconds = 200\npower_cuts = 1\nblackouts = 1"), "power_cuts leave none"),
        (GOOD + "[odd]\nclocks_off_s = [1, 2, 3, 4]\n", "4 of them for 3 peers"),
        (GOOD + "[odd]\nclocks_off_s = [1e12]\n", "clocks_off_s: less than"),
        (GOOD + '[odd]\nhostile = ["", "values", "steps"]\n', "more than half are"),
        (GOOD + '[odd]\nhostile = ["values"]\n', "the first peer is honest"),
        (GOOD + '[odd]\nhostile = ["", "steps+moods"]\n', "no lie 'moods'"),
        (GOOD.replace(RUN, ""), "name a run's file"),
        (GOOD.replace("seconds = 60", 'seconds = 60\nconfig = "nowhere.toml"').replace(RUN, ""), "nowhere.toml"),
        (GOOD.replace("warmup = 0", "warmup = 5000"), "run: "),
    ],
)
def test_errors_name_the_field(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        read_plan(written(tmp_path, text))


def test_an_unknown_plan_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(
        PlanError, match="half-hour, hostile, hostile-short, liars, liars-large, liars-short, peer-hour, quick"
    ):
        find_plan("slow")


def test_each_lie_of_a_plan_is_one_that_changed_code_tells() -> None:
    assert byzantine.LIES.keys() == LIES
    assert COUNTED < LIES
