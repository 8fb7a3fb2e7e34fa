"""The benchmark of many peers behind home lines: its figures mean what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.scale import volunteers
from benchmarks.scale.volunteers import Spread, Swarm, measure, options
from p2pdiloco.planner import commit_turns
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import Commit
from tests.machine_sim.shared_link_network import on_the_line

TINY = ["--shards", "2", "--seconds", "48"]
A, B, C, D = map(PeerId, "abcd")


@pytest.mark.parametrize("peers", [2, 4])
def test_a_commit_takes_what_its_bytes_need_on_an_idle_line(peers: int, tmp_path: Path) -> None:
    """It leaves its owner once for each other peer, and each has it after the path and one job."""
    path = tmp_path / "rows.jsonl"
    assert volunteers.main(["--peers", str(peers), *TINY, "--up", "20", "--json", str(path)]) == 0
    row = json.loads(path.read_text())
    found = row["figures"]
    assert row["settings"]["peers"] == peers
    sent_s = (peers - 1) * on_the_line(900_000) * 8 / 20e6
    assert sent_s + 0.04 < found["t99_s"] <= found["t99_p90_s"] < sent_s + 0.06 + 0.03
    assert (found["versions"], found["connections_most"]) == (2, peers - 1)
    assert (found["fork_share"], found["learners_share"], found["twice_share"]) == (0.0, 1.0, 0.0)
    assert found["start_s"] < 3.0
    assert 0.0 < found["control_share"] < 0.02
    assert 1.0 <= found["bytes_most_over_mean"] < peers


def test_a_picture_is_drawn_of_rows_that_are_there(tmp_path: Path) -> None:
    """Without sizes nothing is measured; a row may lack a figure, as those of other versions do."""
    row = {"t99_s": 2.0, "fork_share": 0.0, "bytes_most_over_mean": 1.5, "connections_most": 7}
    for name, figures in (("before", {**row, "t99_s": None}), ("after", row)):
        rows = [{"benchmark": volunteers.NAME, "settings": {"peers": n}, "figures": figures} for n in (8, 16)]
        (tmp_path / name).write_text("".join(json.dumps(one) + "\n" for one in rows))
    words = ["--peers", "--json", str(tmp_path / "after"), "--beside", str(tmp_path / "before"), "--plot"]
    assert volunteers.main([*words, str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_start_alone_is_measured_until_all_train() -> None:
    found = measure(8, options([*TINY, "--starts"]))
    assert (found["violations"], found["connections_most"]) == (0, 7)
    assert 0.0 < (found["start_s"] or 0.0) < 3.0


def test_volunteers_that_come_and_go_are_counted_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volunteers, "SESSION_S", 200.0)
    found = measure(8, options([*TINY, "--seconds", "96", "--churn", "--mixed", "--unreachable", "0.1"]))
    assert (found["violations"], found["versions"] > 2, found["learners_share"] > 0.5) == (0, True, True)
    assert found["t50_s"] <= found["t99_s"] < 30.0
    assert 1.0 < found["silence_most_s"] < 20.0


def test_a_commit_is_everywhere_when_the_plan_says() -> None:
    found, (turns, hops) = measure(16, options(["--shards", "4", "--seconds", "48"])), commit_turns(16, 1)
    planned_s = turns * on_the_line(900_000) * 8 / 50e6 + 0.05 * hops
    assert found["t99_s"] == pytest.approx(planned_s, rel=0.2)


def test_peers_that_went_before_they_had_a_commit_do_not_count() -> None:
    spread = Spread(1, 10.0, 4, 4, 1.0, frozenset((A, B, C)), {A: 10.0, B: 12.0, D: 11.0})
    assert spread.seconds(0.5, frozenset((A, B, C, D))) == 2.0
    assert spread.seconds(0.99, frozenset((A, B, C, D))) == math.inf
    assert spread.seconds(0.99, frozenset((A, D))) == 2.0


def test_a_peer_that_keeps_commits_sends_only_its_own() -> None:
    swarm = Swarm(2, options([*TINY, "--liars", "0.5"]))
    swarm.world.run_until(60.0)
    names = sorted(swarm.world.processes)
    headers = {known.header.owner: known.header for known in swarm.world.checks.commits.values() if known.header}
    for owner, header in headers.items():
        for name, other in (names, names[::-1]):
            before = swarm.network.messages
            swarm.world.processes[name]._send(ef.Send((other,), Commit(header)))
            assert swarm.network.messages - before == (name in (names[0], owner))
    assert headers.keys() == set(names)


def test_bad_options_are_told_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        ("--plot a.png", "--plot draws the rows of --json: name that file, too"),
        ("--peers", "--beside, and --peers without sizes, are for a plot: name its file (--plot)"),
        ("--json b --plot a.png --beside /no/rows", "--beside /no/rows: there is no such file"),
        (f"--json b/{Path(__file__).name} --plot a.png --beside {__file__}", "these need names of their own"),
        ("--peers 8 1", "--peers 1: a swarm has at least 2"),
        ("--shards 30", "--shards 30: use 1 to 24, or a multiple of 24"),
        ("--up nan", "--up nan: must be positive"),
        ("--liars 1", "--liars 1.0: a share is from 0 to less than 1"),
    ):
        with pytest.raises(SystemExit):
            volunteers.main(words.split())
        assert told in capsys.readouterr().err
