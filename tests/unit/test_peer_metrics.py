"""A peer's event log and its line of progress."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from p2pdiloco.node.learner_process import LOG_BYTES as LEARNER_LOG
from p2pdiloco.peer import metrics as metrics_module
from p2pdiloco.peer.metrics import Metrics, progress_fields
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.script_node import LOG_BYTES as NODE_LOG
from p2pdiloco.util.files import older
from p2pdiloco.wire.control_messages import PeerStatus
from p2pdiloco.wire.learner_ipc import Progress

STATUS = PeerStatus(
    run=RunId("a" * 40),
    name="tiny",
    peer="12D3KooW",
    phase="training",
    step=120,
    total_steps=480,
    known=5,
    live=3,
    participating=2,
    weight_averaged=2,
    version_min=9,
    version_max=10,
    heads_mark=1,
    tokens_trained=1000,
    tokens_merged=900,
    tokens_per_second=2034.4,
    train_loss=2.41237,
    held_out_loss=2.6,
    held_out_step=110,
    bytes_up=12_300_000,
    bytes_down=1,
    blocked_s=0.0,
)


def progress(steps: int, tokens: int, loss: float = 2.0) -> Progress:
    return Progress(steps=steps, tokens=tokens, loss=loss, step_time_s=0.5, overhead_s=0.01, blocked_s=0.0)


def test_one_line_of_progress() -> None:
    line = " ".join(f"{key}={value}" for key, value in progress_fields(STATUS).items())
    assert line == (
        "step=120 of=480 loss=2.412 held_out=2.6 held_out_step=110 tokens_per_s=2034 live=3 participating=2 "
        "versions=9-10 up_mb=12.3"
    )


def test_a_follower_has_no_loss() -> None:
    fields = progress_fields(msgspec.structs.replace(STATUS, train_loss=None, held_out_loss=None))
    assert "loss" not in fields
    assert "held_out" not in fields


def test_a_reward_is_shown_if_the_script_reports_one(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.progress(msgspec.structs.replace(progress(1, 100), reward=0.25), step=1, sent_bytes=0)
        assert metrics.reward == 0.25
    assert progress_fields(msgspec.structs.replace(STATUS, reward=0.25))["reward"] == 0.25
    assert "reward" not in progress_fields(STATUS)


def test_who_does_not_train_has_no_rate() -> None:
    assert "tokens_per_s" not in progress_fields(msgspec.structs.replace(STATUS, tokens_per_second=0.0))


def test_totals_go_on_over_the_lives_of_learners(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        metrics.learner_began()
        metrics.progress(progress(1, 100), step=1, sent_bytes=0)
        metrics.progress(progress(2, 200), step=2, sent_bytes=0)
        metrics.learner_began()
        metrics.progress(progress(1, 100), step=3, sent_bytes=0)
        assert (metrics.tokens, metrics.steps) == (300, 3)
        assert metrics.compute_s == 1.5
        assert metrics.tokens_per_second == 200.0


def test_faults_are_counted_by_kind(tmp_path: Path) -> None:
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        for kind in ("payload", "payload", "commit"):
            metrics.report_fault("12D3KooW", kind, "its digest does not match")
        assert metrics.faults == {"payload": 2, "commit": 1}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["event"], line["what"]) for line in lines] == [
        ("fault", "payload"),
        ("fault", "payload"),
        ("fault", "commit"),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a file that is always full")
def test_a_full_disk_costs_lines_and_not_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "open_regular", os.open)
    with Metrics(Path("/dev/full")) as metrics:
        metrics.write("started")
        metrics.write("current")


def test_the_event_log_stays_within_its_bound_over_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "MOST_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    for life in range(3):
        with Metrics(path) as metrics:
            for number in range(40):
                metrics.write("thing", life=life, number=number)
    files = [*older(path), path]
    assert len(files) == 1 + metrics_module.KEPT
    assert all(file.stat().st_size <= 1000 for file in files)
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [(line["life"], line["number"]) for line in lines] == [
        divmod(120 - len(lines) + index, 40) for index in range(len(lines))
    ], "the newest ones, without a gap"


def test_rates_and_losses_follow_slowly_and_a_new_life_counts_from_zero(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.learner_began()
    metrics.progress(progress(1, 100, loss=2.0), step=1, sent_bytes=0)
    assert (metrics.tokens_per_second, metrics.loss) == (200.0, 2.0), "the first says all that is known"
    metrics.progress(progress(2, 300, loss=3.0), step=2, sent_bytes=0)
    assert metrics.tokens_per_second == pytest.approx(200.0 + 0.1 * (400.0 - 200.0))
    assert metrics.loss == pytest.approx(2.1)
    metrics.learner_began()
    metrics.progress(progress(1, 50, loss=2.0), step=3, sent_bytes=0)
    assert metrics.tokens == 350
    assert metrics.steps == 3
    assert metrics.compute_s == pytest.approx(1.5)
    assert metrics.overhead_s == pytest.approx(0.03)


@pytest.mark.long
@pytest.mark.heavy
def test_a_weeks_event_logs_have_less_than_a_hundred_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time: four steps a second, a round of 13 shards of four contributors each minute. What learners say
    (two files) and a script's node, which tells its progress every 5 s, come on top."""
    clock = SimpleNamespace(now=1.8e9)
    told = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now, process_time=lambda: 0.0)
    monkeypatch.setattr(metrics_module, "time", told)
    contributors = {f"12D3KooW{'a' * 44}/{number:016x}": 8192 for number in range(4)}
    before = 0
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        for second in range(7 * 86400):
            clock.now += 1.0
            metrics.progress(progress(4 * second, 4096 * second), step=second, sent_bytes=1000 * second)
            if second % 60 == 0:
                for shard in range(13):
                    metrics.write("commit", shard=shard, version=second, head="f" * 40, contributors=contributors)
            if second == 86400:
                before = sum(path.stat().st_size for path in tmp_path.iterdir())
    after = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert before > 20e6, "a day fills some of it"
    others = 2 * LEARNER_LOG + NODE_LOG + 7 * 17280 * 220
    assert after + others < 100e6
