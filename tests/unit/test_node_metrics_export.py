"""Numbers reach programs that draw experiments, each the real one where it is installed; none of them, slow, broken or
missing, is a reason for a node to wait or fail."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from test_observability_history import ANN, chronicle, commit, progress

from p2pdiloco.node import metrics_export
from p2pdiloco.node.metrics_export import MetricsExport, numbers_of
from p2pdiloco.observability import exporters
from p2pdiloco.observability.exporters import Numbers, TargetError, parse_target
from p2pdiloco.observability.prometheus import METRICS
from p2pdiloco.observability.snapshot import RunSnapshot

pytestmark = pytest.mark.heavy


def picture() -> RunSnapshot:
    told = chronicle(1)
    told.take(commit(1.0, 1, ANN, ann=100, bob=300))
    told.take(progress(1.0, 500))
    shown = told.picture(2.0)
    return msgspec.structs.replace(shown, course=msgspec.structs.replace(shown.course, train_loss=float("nan")))


async def told_until(targets: list[str], is_enough: Callable[[], bool]) -> None:
    async with MetricsExport(targets, picture, every_s=0.02):
        async with asyncio.timeout(60):
            while not is_enough():  # noqa: ASYNC110
                await asyncio.sleep(0.02)


def test_a_line_has_the_numbers_that_are_known_by_the_names_of_metrics() -> None:
    line = numbers_of(picture())
    assert set(line.values) <= {metric.name for metric in METRICS}
    assert "train_loss" not in line.values, "what is no number stays here"
    assert line.values["merged_tokens_total"] == 1000
    assert "merged_tokens_total" in line.counters
    assert msgspec.json.decode(msgspec.json.encode(line), type=Numbers) == line


def test_a_collector_hears_of_it_over_http_and_may_refuse(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    heard: list[Any] = []

    async def hear(request: web.Request) -> web.Response:
        heard.append(ExportMetricsServiceRequest.FromString(await request.read()))
        return web.Response(status=400 if len(heard) == 1 else 200)

    async def whole() -> None:
        app = web.Application()
        app.router.add_post("/v1/metrics", hear)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        await told_until([f"otlp:http://127.0.0.1:{port}"], lambda: len(heard) >= 3)
        await runner.cleanup()

    with caplog.at_level("WARNING", logger="p2pdiloco"):
        asyncio.run(whole())
    assert caplog.text.count("does not accept metrics (Failed to export metrics batch code: 400") == 1
    (resource,) = heard[-1].resource_metrics
    about = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert about["service.name"] == "p2pdiloco"
    assert about["service.instance.id"] == picture().title.me
    (scope,) = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}
    assert set(metrics) == {f"p2pdiloco_{name}" for name in numbers_of(picture()).values}
    assert metrics["p2pdiloco_step"].HasField("gauge")
    merged = metrics["p2pdiloco_merged_tokens_total"].sum
    assert merged.is_monotonic
    assert merged.data_points[0].as_double == 1000


def test_nobody_waits_for_one_that_is_gone_or_does_not_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole(code: str, is_over: Callable[[asyncio.subprocess.Process], bool]) -> None:
        monkeypatch.setattr(metrics_export, "COMMAND", (sys.executable, "-c", code))
        async with asyncio.timeout(60), MetricsExport(["wandb:x"], picture, every_s=0.001) as told:
            (process,) = told._processes
            while not is_over(process):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for _ in range(100):
                told._send()
            assert process.stdin is not None
            assert process.stdin.transport.get_write_buffer_size() < 20_000

    def is_full(process: asyncio.subprocess.Process) -> bool:
        assert process.stdin is not None
        return process.stdin.transport.get_write_buffer_size() >= 10_000

    monkeypatch.setattr(metrics_export, "END_S", 0.2)
    monkeypatch.setattr(metrics_export, "MOST_WAITING", 10_000)
    asyncio.run(whole("import time; time.sleep(3600)", is_full))
    with caplog.at_level("WARNING", logger="p2pdiloco"):
        asyncio.run(whole("import sys; sys.exit('the disk is full')", lambda process: process.returncode is not None))
    assert "the disk is full" in caplog.text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("tensorboard", "write tensorboard:DIR"),
        ("tensorboard:", "write tensorboard:DIR"),
        ("mlflow:x", "write tensorboard:DIR"),
        ("otlp:localhost:4318", "write otlp:http://HOST:4318"),
        ("otlp:http://localhost:4318", "pip install 'p2pdiloco[otlp]'"),
        ("tensorboard:x", "pip install 'p2pdiloco[tensorboard]'"),
        ("wandb:x", "pip install 'p2pdiloco[wandb]'"),
        ("trackio:x", "pip install 'p2pdiloco[trackio]'"),
    ],
)
def test_what_cannot_be_used_is_said_before_a_peer_runs(
    target: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporters, "find_spec", lambda _: None)
    with pytest.raises(TargetError, match=said.replace("[", r"\[")):
        parse_target(target)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = tmp_path.glob("*/events*")
    asyncio.run(
        told_until([f"tensorboard:{tmp_path}"], lambda: any(path.stat().st_size for path in tmp_path.glob("*/*")))
    )
    read = EventAccumulator(str(next(found).parent))
    read.Reload()
    assert read.Scalars("merged_tokens_total")[0].value == 1000


def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setattr(metrics_export, "END_S", 60.0)
    asyncio.run(told_until(["wandb:p2pdiloco"], lambda: any(tmp_path.glob("wandb/offline-run-*/*.wandb"))))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"merged_tokens_total" in path.read_bytes()


def test_trackio_keeps_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(metrics_export, "END_S", 60.0)
    asyncio.run(told_until(["trackio:p2pdiloco"], lambda: any(tmp_path.glob("*.db"))))
    (path,) = tmp_path.glob("*.db")
    with sqlite3.connect(path) as base:
        assert any("merged_tokens_total" in str(row) for row in base.execute("select * from metrics"))
