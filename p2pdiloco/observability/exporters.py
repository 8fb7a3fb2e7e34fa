"""Hands a node's numbers to a program that draws experiments, in a process of its own::

    python -m p2pdiloco.observability.exporters tensorboard:DIR | wandb:PROJECT | trackio:PROJECT | otlp:URL

Rules of this file:
1. The node writes one JSON object a line to standard input, and nothing of what happens here touches it: libraries,
   their threads and their networks live and die in this process.
2. A library is imported when it is chosen. One that is missing is named with the extra that has it, before a peer runs.
3. Names are those of ``/metrics`` (``prometheus.py``), without their prefix but for OpenTelemetry; the step is the
   run's global step.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import msgspec

PREFIX = "p2pdiloco_"
COMPLAINT = b"p2pdiloco: "
"""Begins what the node's user should read at once."""
POST_S = 10.0
OTLP_PATH = "/v1/metrics"
KINDS = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "otlp": ""}
"""And the library of each, which is the extra's name, too."""


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """What a node tells, every few seconds."""

    run: str
    name: str
    peer: str
    at: float
    """Unix time in seconds."""
    step: int
    values: dict[str, float]
    counters: tuple[str, ...] = ()
    """Those that only grow, in one life of the node."""


class Exporter(Protocol):
    """To one program. Whatever it raises ends this process, and nothing else."""

    def log(self, line: Numbers) -> None:
        """Take it."""

    def close(self) -> None:
        """Nothing comes any more."""


class TargetError(ValueError):
    """It cannot be logged there; the message says what to do."""


def split(target: str) -> tuple[str, str]:
    """Kind and place.

    Raises:
        TargetError: there is no such kind, no place is named, or its library is not installed.
    """
    kind, _, place = target.partition(":")
    if kind not in KINDS or not place:
        raise TargetError(f"{target!r}: write tensorboard:DIR, wandb:PROJECT, trackio:PROJECT or otlp:URL")
    if kind == "otlp" and not place.startswith(("http://", "https://")):
        raise TargetError(f"{target!r}: write otlp:http://HOST:4318, a collector's address for OTLP over HTTP")
    if KINDS[kind] and find_spec(KINDS[kind]) is None:
        raise TargetError(f"{kind} is not installed here: pip install 'p2pdiloco[{kind}]'")
    return kind, place


def opened(target: str, first: Numbers) -> Exporter:
    """Ready for lines like ``first``.

    Raises:
        TargetError: as of ``split``.
    """
    kind, place = split(target)
    exporters: dict[str, Callable[[str, Numbers], Exporter]]
    exporters = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "otlp": Otlp}
    return exporters[kind](place, first)


class TensorBoard:
    """Event files below DIR, a folder a peer."""

    def __init__(self, place: str, first: Numbers) -> None:
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        module = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = module.EventFileWriter(f"{place}/{first.name}-{first.peer[-6:]}")

    def log(self, line: Numbers) -> None:
        """As of ``Exporter``."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
        self._writer.add_event(self._event(wall_time=line.at, step=line.step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """As of ``Exporter``."""
        self._writer.close()


class Wandb:
    """A run a peer, in a group of the run's name; its environment variables are Weights & Biases' own."""

    def __init__(self, place: str, first: Numbers) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=place,
            group=first.name,
            name=f"{first.name}-{first.peer[-6:]}",
            config={"run": first.run, "peer": first.peer},
            settings=self._wandb.Settings(console="off"),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, line: Numbers) -> None:
        """As of ``Exporter``."""
        self._run.log({**line.values, "step": line.step})

    def close(self) -> None:
        """As of ``Exporter``."""
        self._run.finish()


class Trackio:
    """Likewise, in trackio's own folder, or where its environment variables say."""

    def __init__(self, place: str, first: Numbers) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        name = f"{first.name}-{first.peer[-6:]}"
        self._trackio.init(project=place, name=name, config={"run": first.run, "peer": first.peer})

    def log(self, line: Numbers) -> None:
        """As of ``Exporter``."""
        self._trackio.log(line.values, step=line.step)

    def close(self) -> None:
        """As of ``Exporter``."""
        self._trackio.finish()


class Otlp:
    """To an OpenTelemetry collector, by OTLP over HTTP with JSON, which needs no library. What it does not take is
    lost, and the next is tried."""

    def __init__(self, place: str, first: Numbers) -> None:
        self._address = place.rstrip("/")
        if not self._address.endswith(OTLP_PATH):
            self._address += OTLP_PATH
        self._began = first.at
        self._is_told = False

    def log(self, line: Numbers) -> None:
        """As of ``Exporter``."""
        data = msgspec.json.encode(otlp_body(line, self._began))
        asked = urllib.request.Request(self._address, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=POST_S):
                self._is_told = False
        except (OSError, urllib.error.URLError) as error:
            if not self._is_told:
                what = f"the collector at {self._address} takes nothing ({error}): is it running, with OTLP over HTTP?"
                sys.stderr.buffer.write(COMPLAINT + what.encode() + b"\n")
                sys.stderr.flush()
            self._is_told = True

    def close(self) -> None:
        """As of ``Exporter``."""


def otlp_body(line: Numbers, began: float) -> dict[str, object]:
    """What the protocol calls an ExportMetricsServiceRequest, in its JSON."""
    now = str(round(line.at * 1e9))

    def metric(name: str, value: float) -> dict[str, object]:
        point: dict[str, object] = {"asDouble": value, "timeUnixNano": now}
        if name not in line.counters:
            return {"name": PREFIX + name, "gauge": {"dataPoints": [point]}}
        point["startTimeUnixNano"] = str(round(began * 1e9))
        return {
            "name": PREFIX + name,
            "sum": {"dataPoints": [point], "aggregationTemporality": 2, "isMonotonic": True},
        }

    told = {"service.name": "p2pdiloco", "service.instance.id": line.peer, "p2pdiloco.run": line.name}
    attributes = [{"key": key, "value": {"stringValue": value}} for key, value in told.items()]
    metrics = [metric(name, value) for name, value in line.values.items()]
    scope = {"scope": {"name": "p2pdiloco"}, "metrics": metrics}
    return {"resourceMetrics": [{"resource": {"attributes": attributes}, "scopeMetrics": [scope]}]}


def main(argv: list[str] | None = None) -> int:
    """Until standard input ends."""
    (target,) = sys.argv[1:] if argv is None else argv
    exporter: Exporter | None = None
    with contextlib.suppress(KeyboardInterrupt):  # a terminal's Ctrl+C is for the node, which then closes our input
        for text in sys.stdin.buffer:
            line = msgspec.json.decode(text, type=Numbers)
            exporter = exporter or opened(target, line)
            exporter.log(line)
    if exporter is not None:
        exporter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
