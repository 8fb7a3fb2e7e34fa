"""The paper's goodput table: islands that fail, and the protocol over them."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

from benchmarks.scale import calibration, goodput, regions
from benchmarks.scale.islands import CHIPS, DATA_PARALLEL, ELASTIC, Constants, Island, row, worst
from benchmarks.scale.sightings import Sighting, Sightings, figures
from benchmarks.scale.worlds import make_islands, make_world, measure


@pytest.mark.parametrize(("is_elastic", "published"), [(False, DATA_PARALLEL), (True, ELASTIC)])
def test_the_constants_fit_the_rows_to_which_they_were_fitted(is_elastic: bool, published: tuple[int, ...]) -> None:
    assert worst(row(Constants(), is_elastic=is_elastic, failures=1500), published) < 5.0


def test_work_takes_as_long_as_the_chips_that_are_left_need() -> None:
    island = Island(Random(1), CHIPS[2], Constants())
    at = 0.0
    for _ in range(1000):
        at += island.pace(at, 2.0)
    assert island.failures > 40
    assert island.computed_s(0.0, at) == pytest.approx(2000.0)
    assert island.computed_s(0.0, at) < island.running_s(0.0, at) < at


def test_racks_take_more_than_chips() -> None:
    alike = Constants(slice_chips=16, growth_s=1e6)
    racks = alike._replace(chip_year_s=1e15, racks_year_s=alike.chip_year_s / alike.rack_chips)
    islands = [Island(Random(1), CHIPS[0], constants) for constants in (alike, racks)]
    shares = [island.computed_s(0.0, 1e5) / island.running_s(0.0, 1e5) for island in islands]
    assert abs(islands[0].failures - islands[1].failures) < 100
    assert shares[1] < shares[0]


def test_the_protocol_merges_what_islands_compute() -> None:
    islands = make_islands(CHIPS[3], 4, Constants(), seed=1)
    figures = measure(make_world(islands), islands, 600.0)
    assert figures["goodput"] == pytest.approx(figures["computed"], abs=0.03)  # commits wait for rounds (O5b)
    assert figures["computed"] < 0.95
    assert figures["uptime"] > 0.98
    assert (figures["tokens_lost"], figures["violations"]) == (0, 0)


def test_a_region_that_is_lost_takes_its_share_and_no_more() -> None:
    figures = regions.measured(regions.SHORT._replace(seconds=600.0, around_s=384.0), seed=1)
    assert figures["kept_of_the_others"] > 0.98
    assert figures["back_after_min"] <= 5
    assert figures["are_merged_tokens_kept"]
    assert (figures["tokens_lost"], figures["violations"]) == (0, 0)
    assert 0 < figures["tokens_dead_steps"] < 2 * 24


def test_cells_that_were_made_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "goodput.jsonl"
    monkeypatch.setattr("sys.argv", ["goodput", "--short", "--json", str(told), "--only", "peer fails"])
    goodput.main()
    goodput.main()
    assert len(told.read_text().splitlines()) == 1
    assert "peer fails, M = 4, 1200000" in capsys.readouterr().out


def test_a_simulated_calibration_says_what_its_lines_must_say() -> None:
    """Four peers, a round every two seconds, and lines that carry it: all contribute, a commit needs its bytes'
    time."""
    found = calibration.simulated(calibration.options(["--peers", "4", "--seconds", "48"]), payload=45_000)
    assert found["violations"] == 0
    assert found["versions"] in (24, 25)
    assert found["contributors"] > 3.9
    alone_s = 45_000 * 8 / 4e6
    assert alone_s < found["made_s"] < 2.0
    assert found["made_s"] + 45_000 * 8 / 2e6 < found["taken_by_all_s"] < 3.0
    assert found["forks"] == 0
    assert found["t50_s"] <= found["t99_s"] < found["taken_by_all_s"] - found["made_s"] + 0.5
    exchanged = 2 * 0.75 * 45_000 / 2  # a contribution and a commit, three of four times to somebody else, every 2 s
    audited = 2 * 5 * 45_000 / 2 / 4  # two peers fetch four contributions and the commit, of each version
    assert 0.9 * (exchanged + audited) < found["bytes_per_s"] < 1.2 * (exchanged + audited)


def test_followers_of_a_calibration_take_commits_and_contribute_nothing() -> None:
    words = ["--peers", "6", "--followers", "4", "--seconds", "48", "--jitter-ms", "5"]
    found = calibration.simulated(calibration.options(words), payload=45_000)
    assert (found["violations"], found["forks"]) == (0, 0)
    assert 1.9 < found["contributors"] <= 2.0
    assert found["t50_s"] < found["t99_s"] < 3.0
    with pytest.raises(SystemExit):
        calibration.options(["--peers", "4", "--followers", "4"])


def test_a_commit_that_too_few_have_is_never_everywhere() -> None:
    """And two commits of one version are a fork."""
    seen = Sightings(rounds={"0 1": 10.0})
    for name, taken in (("a", [10.5, 11.0, 11.5, 12.0]), ("b", [10.5])):
        seen.commits[name] = Sighting(0, 1, 4, 24.0, (0, 1), 10.5, taken)
    found = figures(seen, 0.0, 20.0, 4)
    assert found["forks"] == 1
    assert found["t50_s"] == found["t99_s"] == math.inf
    del seen.commits["b"]
    found = figures(seen, 0.0, 20.0, 4)
    assert (found["forks"], found["t50_s"], found["t99_s"]) == (0, 0.5, 1.5)
