"""Event logs read back and played."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_observability_history import ANN, BOB, commit, progress

from p2pdiloco.observability.log_reader import Player, Recording, RecordingError, lines, player

RUN = "r" * 40


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def started(at: float, peer: str, run: str = RUN) -> dict[str, Any]:
    return {"time": at, "event": "started", "peer": peer, "run": run, "is_new": False}


@pytest.fixture
def swarm(tmp_path: Path) -> Path:
    write(tmp_path / "peer-A" / "run" / "metrics.jsonl", started(100.0, ANN), commit(110.0, 1, BOB, ann=5, bob=7))
    more = (progress(105.0, 500), commit(110.5, 1, BOB, ann=5, bob=7), commit(120.0, 2, ANN, bob=7))
    write(tmp_path / "peer-B" / "run" / "metrics.jsonl", started(101.0, BOB), *more)
    return tmp_path


def test_several_peers_are_one_story(swarm: Path) -> None:
    recording = Recording(swarm)
    assert (recording.me, recording.begins, recording.ends) == (ANN, 100.0, 120.0)
    picture = Player(recording, 120.0, 0.0).picture()
    assert {row.peer: (row.merged, row.commits) for row in picture.peers} == {ANN: (5, 1), BOB: (14, 1)}
    assert picture.playback is not None
    assert picture.playback.ends == 120.0


def test_time_goes_as_fast_as_asked_and_stands_still_at_the_end(swarm: Path) -> None:
    now = 7.0
    played = Player(Recording(swarm), 100.0, 10.0, clock=lambda: now)
    assert not played.picture().merges
    now = 8.1
    assert [m.version for m in played.picture().merges] == [1]
    mark = played.mark
    now = 99.0
    assert played.picture().at == 120.0
    assert played.mark > mark
    assert [m.version for m in played.picture().merges] == [2, 1]


def test_a_looker_chooses_the_moment(swarm: Path) -> None:
    recording = Recording(swarm)
    assert player(recording, {}, 10.0).picture().at < 101.0
    assert player(recording, {"at": "115", "speed": "0"}, 10.0).picture().at == 115.0
    assert player(recording, {"at": "1e300", "speed": "0"}, 10.0).picture().at == 120.0
    for query in ({"at": "x"}, {"at": "nan"}, {"speed": "-1"}, {"speed": "1e9"}, {"speed": "nan"}):
        with pytest.raises(ValueError):
            player(recording, query, 10.0)


def test_what_is_torn_is_left_out_and_what_was_moved_aside_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", progress(3.0, 3))
    write(tmp_path / "metrics.1.jsonl", progress(2.0, 2))
    write(tmp_path / "metrics.2.jsonl", progress(1.0, 1))
    with open(path, "ab") as file:
        file.write(b'{"time": 4.0, "event": "prog\n[1]\n' + b"[" * 5000 + b"\n\xff\xfe\n")
    assert [line["time"] for line in lines(path)] == [1.0, 2.0, 3.0]
    assert [line["time"] for line in lines(path, path.stat().st_size + 10)] == [3.0], "only the newest"


def test_of_several_runs_one_is_played(swarm: Path) -> None:
    write(swarm / "peer-C" / "other" / "metrics.jsonl", started(1.0, "12D3KooWother", "s" * 40))
    assert Recording(swarm).begins == 100.0


def test_where_nothing_is_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no peer has logged anything"):
        Recording(tmp_path)
