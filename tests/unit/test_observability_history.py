"""What a peer's events add up to."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from p2pdiloco.observability.event_schema import LONGEST, sentence
from p2pdiloco.observability.history import (
    KEPT_HEADLINES,
    MOST_COLUMNS,
    MOST_LANES,
    QUIET_S,
    Curve,
    LaneBook,
    RunHistory,
)
from p2pdiloco.observability.snapshot import RunSnapshot, Title

ANN, BOB, CID = (f"12D3KooW{letter * 44}" for letter in "ABC")


def chronicle(*elements: int, total_steps: int = 100) -> RunHistory:
    return RunHistory(Title(run="r" * 40, name="story", me=ANN), elements, total_steps)


def commit(at: float, version: int, owner: str, shard: int = 0, **given: int) -> dict[str, Any]:
    peers = {"ann": ANN, "bob": BOB, "cid": CID}
    contributors = {f"{peers[name]}/1": tokens for name, tokens in given.items()}
    return {"time": at, "event": "commit", "shard": shard, "version": version, "head": "h", "step": 8 * version} | {
        "tokens": 1000 * version,
        "owner": owner,
        "contributors": contributors,
    }


def progress(at: float, tokens: int, loss: float | None = 2.0) -> dict[str, Any]:
    return {
        "time": at,
        "event": "progress",
        "step": 3,
        "steps": 3,
        "tokens": tokens,
        "sent_bytes": 700,
        "loss": loss,
    } | {
        "step_time_s": 0.1,
        "compute_s": 1.0,
        "overhead_s": 0.25,
        "blocked_s": 0.0,
        "node_cpu_s": 0.125,
    }


def test_who_gave_and_who_merged_is_counted_once_whoever_tells() -> None:
    told = chronicle(300, 100)
    for source in (ANN, BOB):
        told.take(commit(10.0, 1, BOB, ann=100, bob=300), source)
        told.take(commit(11.0, 1, ANN, shard=1, bob=400), source)
    picture = told.picture(12.0)
    rows = {row.peer: row for row in picture.peers}
    assert picture.peers[0].is_me
    assert (rows[ANN].merged, rows[BOB].merged) == (75, 325), "a shard counts by its size"
    assert rows[BOB].share == pytest.approx(325 / 400)
    assert (rows[ANN].commits, rows[BOB].commits) == (1, 1)
    assert [(m.shard, m.owner, m.contributors, m.tokens) for m in picture.merges] == [
        (1, ANN, 1, 400),
        (0, BOB, 2, 400),
    ]
    assert picture.course.tokens_merged == 1000
    assert [(s.shard, s.version, s.at) for s in picture.shards] == [(0, 1, 10.0), (1, 1, 11.0)]


def test_progress_is_a_rate_and_a_curve_and_silence_is_gone() -> None:
    told = chronicle(1)
    for second in range(5):
        told.take(progress(float(second), 500 * second))
    picture = told.picture(4.0)
    assert picture.course.tokens_per_s == pytest.approx(500.0)
    assert picture.course.done == pytest.approx(0.03)
    assert picture.peers[0].words is not None
    assert len(told.history().train) == 5
    quiet = told.picture(4.0 + QUIET_S + 1.0)
    assert quiet.peers[0].words is None
    assert quiet.course.swarm_tokens_per_s == 0.0


def test_a_prolonged_run_is_shown_until_its_new_end() -> None:
    told = chronicle(300, total_steps=8)
    told.take(commit(10.0, 3, BOB, ann=100))
    assert (told.picture(10.0).course.step, told.picture(10.0).course.done) == (8, 1.0)
    told.take({"time": 11.0, "event": "end", "last_step": 48})
    course = told.picture(11.0).course
    assert (course.step, course.total_steps, course.done) == (24, 48, 0.5)


def test_headcount_and_rows_agree_from_the_first_event_to_the_last() -> None:
    told = chronicle(1)

    def live() -> dict[str, bool]:
        picture = told.picture(moment)
        rows = {row.peer: row.is_live for row in picture.peers}
        assert (picture.headcount.known, picture.headcount.live) == (len(rows), sum(rows.values()))
        assert picture.headcount.participating == sum(row.is_participating for row in picture.peers)
        assert all(row.is_live for row in picture.peers if row.words is not None or row.is_participating)
        return rows

    moment = 1.0
    told.take({"time": 1.0, "event": "started", "peer": ANN, "run": "r", "is_new": False})
    told.take({"time": 1.0, "event": "joined", "peer": BOB, "live": 2})
    told.take({"time": 1.0, "event": "joined", "peer": CID, "live": 3})
    assert live() == {ANN: True, BOB: True, CID: True}, "also before anybody contributes"
    told.take({"time": 2.0, "event": "left", "peer": CID, "live": 2})
    told.take(progress(2.0, 100), BOB)
    told.take(commit(3.0, 1, ANN, ann=200, bob=200))
    moment = 100.0
    assert live() == {ANN: True, BOB: True}, "a live peer may be slow; one that gave nothing and left is not shown"
    told.take(progress(100.0, 500))
    told.take(progress(100.5, 900) | {"sent_bytes": 9000})
    assert told.picture(100.5).link.up_per_s > 0.0
    told.take({"time": 101.0, "event": "ended", "status": 0, "reason": "complete"})
    moment = 101.5
    assert live() == {ANN: False, BOB: True}
    assert told.picture(moment).link.up_per_s == 0.0
    told.take({"time": 101.0, "event": "left", "peer": ANN, "live": 1}, BOB)
    told.take({"time": 102.0, "event": "ended", "status": 0, "reason": "complete"}, BOB)
    moment = 102.5
    assert live() == {ANN: False, BOB: False}, "the run has ended, although both contributed a moment ago"


def test_a_peer_is_gone_when_this_one_says_so_or_when_nothing_is_heard_of_it() -> None:
    told = chronicle(1)
    told.take(commit(3.0, 1, ANN, ann=200, bob=200))
    rows = [{row.peer: row.is_live for row in told.picture(at).peers} for at in (4.0, 4.0 + QUIET_S)]
    assert rows == [{ANN: True, BOB: True}, {ANN: False, BOB: False}], "its log does not say who is live"
    told.take({"time": 40.0, "event": "joined", "peer": BOB, "live": 2})
    told.take({"time": 41.0, "event": "left", "peer": BOB, "live": 1}, CID)
    assert {row.peer: row.is_live for row in told.picture(41.0).peers}[BOB], "another peer may have lost it alone"
    told.take({"time": 42.0, "event": "left", "peer": BOB, "live": 1})
    assert not {row.peer: row.is_live for row in told.picture(42.0).peers}[BOB]


def test_a_held_out_loss_is_a_point_once() -> None:
    told = chronicle(1)
    for _ in range(3):
        told.take({"time": 1.0, "event": "evaluation", "version": 2, "tokens": 900, "step": 16, "loss": 3.5})
    assert told.history().held_out == ((900.0, 1.0, 3.5),)
    assert told.picture(2.0).course.held_out_loss == 3.5


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"event": "commit"},
        {"time": "x", "event": "progress"},
        {"time": 1, "event": ["commit"]},
        {"time": 1, "event": "commit", "shard": 0, "version": 1, "owner": ANN, "tokens": 1, "contributors": []},
        commit(1.0, 1, ANN, shard=1 << 40),
        {"time": 1.0, "event": "evaluation", "version": 2, "tokens": 900, "step": 16, "loss": None},
        {"time": 1.0, "event": "fault", "what": "x"},
    ],
)
def test_what_is_malformed_is_left_out(line: dict[str, Any]) -> None:
    told = chronicle(1)
    before = msgspec.json.encode(told.picture(5.0).shards)
    told.take(line)
    assert msgspec.json.encode(told.picture(5.0).shards) == before
    assert not told.picture(5.0).peers


def test_what_others_say_is_one_bounded_line_with_short_names() -> None:
    hostile = "\n<script>alert(1)</script>\x1b[2J" + "x" * 9999
    told = sentence({"time": 1.0, "event": "learner-lost", "reason": hostile})
    assert told is not None
    assert len(told.text) == LONGEST
    assert told.text.isprintable()
    lost = sentence({"time": 1.0, "event": "note", "level": "info", "topic": "fork", "text": f"of {ANN}: 1"})
    assert lost is not None
    assert lost.text == "a fork healed: of AAAAAA: 1"
    assert sentence({"event": "codec"}) is None


def test_headlines_and_counts_are_bounded() -> None:
    told = chronicle(1)
    for number in range(500):
        told.take({"time": float(number), "event": "fault", "peer": BOB, "what": f"kind {number % 200}"})
    picture = told.picture(500.0)
    assert len(picture.headlines) == KEPT_HEADLINES
    assert picture.headlines[0].at == 499.0, "the newest first"
    assert len(picture.counts) <= 64
    assert picture.counts["fault: kind 1"] == 3


def test_who_came_and_went_is_a_mark_of_the_history() -> None:
    told = chronicle(1)
    told.take({"time": 1.0, "event": "joined", "peer": BOB, "live": 2})
    told.take({"time": 5.0, "event": "left", "peer": BOB, "live": 1})
    told.take({"time": 5.0, "event": "left", "peer": CID, "live": 1}, BOB)
    assert [(m.at, m.level) for m in told.history().marks] == [(1.0, "good"), (5.0, "warning")]
    assert told.history().marks[1].text == "BBBBBB left; 1 peer is live"


def test_a_curve_covers_all_of_a_long_run_in_few_points_and_has_the_newest() -> None:
    curve = Curve(most=100)
    for number in range(100_003):
        curve.add(number, number, 1.0)
    points = list(curve)
    assert 50 <= len(points) <= 101
    assert (points[0][0], points[-1][0]) == (0, 100_002)
    steps = {b[0] - a[0] for a, b in itertools.pairwise(points[:-1])}
    assert len(steps) == 1, "evenly spaced"
    curve.add(float("nan"), 1.0, 1.0)
    assert list(curve) == points


def test_lanes_widen_and_lose_nothing() -> None:
    book = LaneBook()
    for second in range(1000):
        book.add_tokens("ann", 100.0 + second, 3)
        book.merged("bob", 100.0 + second)
    given, _ = book.lanes["ann"]
    assert (sum(given), sum(book.lanes["bob"][1])) == (3000, 1000)
    assert len(given) <= MOST_COLUMNS
    assert book.column_s == 8.0
    for number in range(2 * MOST_LANES):
        book.add_tokens(f"peer {number}", 1200.0, 1)
    assert len(book.lanes) == MOST_LANES


def test_a_picture_is_json_and_back() -> None:
    told = chronicle(1)
    told.take(commit(1.0, 1, ANN, ann=5, bob=6))
    told.take(progress(1.0, 500))
    picture = told.picture(2.0)
    assert msgspec.json.decode(msgspec.json.encode(picture), type=RunSnapshot) == picture


def test_a_round_beyond_the_last_step_is_no_step_of_the_run() -> None:
    told = chronicle(100)
    told.take(commit(10.0, 13, ANN, ann=100))
    course = told.picture(11.0).course
    assert (course.step, course.total_steps, course.done) == (100, 100, 1.0)
