"""Exports a node's metrics to an experiment tracker or an OpenTelemetry collector, in a process of its own::

    python -m p2pdiloco.observability.exporters tensorboard:DIR | wandb:PROJECT | trackio:PROJECT | otlp:URL

Rules of this file:
1. The node writes one JSON object a line to standard input. Nothing that happens here affects the node: the libraries,
   their threads and their connections live in this process.
2. A library is imported when its target is chosen. If it is missing, the error names the extra that installs it, before
   a peer runs.
3. Names are those of ``/metrics`` (``prometheus.py``), without their prefix except for OpenTelemetry. The step is the
   run's global step.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, Protocol

import msgspec

PREFIX = "p2pdiloco_"
# Prefix of a line on standard error that the node logs as a warning at once.
COMPLAINT = b"p2pdiloco: "
EXPORT_S = 5.0
OTLP_PATH = "/v1/metrics"
# Module that each kind of target needs. The extra that installs it has the kind's name.
KINDS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "otlp": "opentelemetry.exporter.otlp.proto.http",
}


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a node at one time."""

    run: str
    name: str
    peer: str
    at: float
    """Unix time in seconds."""
    step: int
    values: dict[str, float]
    counters: tuple[str, ...] = ()
    """Names of the values that only grow during one life of the node."""


class Exporter(Protocol):
    """Writes to one target. An exception that it raises ends this process, and nothing else."""

    def log(self, line: Numbers) -> None:
        """Export one line."""

    def close(self) -> None:
        """Hand over what is left; no line follows."""


class TargetError(ValueError):
    """Metrics cannot be logged to this target; the message says what to do."""


def parse_target(target: str) -> tuple[str, str]:
    """Return the kind and the place of ``target``.

    Raises:
        TargetError: there is no such kind, no place is given, or the kind's library is not installed.
    """
    kind, _, place = target.partition(":")
    if kind not in KINDS or not place:
        raise TargetError(f"{target!r}: write tensorboard:DIR, wandb:PROJECT, trackio:PROJECT or otlp:URL")
    if kind == "otlp" and not place.startswith(("http://", "https://")):
        raise TargetError(f"{target!r}: write otlp:http://HOST:4318, a collector's address for OTLP over HTTP")
    if not _is_installed(KINDS[kind]):
        raise TargetError(f"{kind} is not installed here: pip install 'p2pdiloco[{kind}]'")
    return kind, place


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False


def open_exporter(target: str, first: Numbers) -> Exporter:
    """Return the exporter to ``target`` for ``first`` and the lines that follow it.

    Raises:
        TargetError: as ``parse_target``.
    """
    kind, place = parse_target(target)
    exporters: dict[str, Callable[[str, Numbers], Exporter]]
    exporters = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "otlp": Otlp}
    return exporters[kind](place, first)


class TensorBoard:
    """Event files in a folder for each peer below DIR."""

    def __init__(self, place: str, first: Numbers) -> None:
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        module = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._writer: Any = module.EventFileWriter(f"{place}/{first.name}-{first.peer[-6:]}")

    def log(self, line: Numbers) -> None:
        """Export one line."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in line.values.items()]
        self._writer.add_event(self._event(wall_time=line.at, step=line.step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run for each peer, in a group with the run's name. Its own environment variables apply."""

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
        """Export one line."""
        self._run.log({**line.values, "step": line.step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Trackio:
    """A trackio run for each peer, in trackio's own folder, or where its environment variables say."""

    def __init__(self, place: str, first: Numbers) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        name = f"{first.name}-{first.peer[-6:]}"
        self._trackio.init(project=place, name=name, config={"run": first.run, "peer": first.peer})

    def log(self, line: Numbers) -> None:
        """Export one line."""
        self._trackio.log(line.values, step=line.step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class Otlp:
    """Sends metrics to an OpenTelemetry collector, by OTLP over HTTP.

    The SDK's environment variables (``OTEL_EXPORTER_OTLP_HEADERS``, ...) apply. A line that the collector does not
    accept is lost.
    """

    def __init__(self, place: str, first: Numbers) -> None:
        sdk: Any = importlib.import_module("opentelemetry.sdk.metrics")
        export: Any = importlib.import_module("opentelemetry.sdk.metrics.export")
        otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
        self._observation: Any = importlib.import_module("opentelemetry.metrics").Observation
        address = place.rstrip("/")
        self._address = address if address.endswith(OTLP_PATH) else address + OTLP_PATH
        exporter = otlp.OTLPMetricExporter(endpoint=self._address, timeout=EXPORT_S)
        # Nothing is exported by a timer, but each line when it comes (``force_flush``).
        reader = export.PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        about = {"service.name": "p2pdiloco", "service.instance.id": first.peer, "p2pdiloco.run": first.name}
        self._provider = sdk.MeterProvider([reader], resources.Resource.create(about))
        self._meter = self._provider.get_meter("p2pdiloco")
        self._instruments: set[str] = set()
        self._values: dict[str, float] = {}
        self._errors = _ErrorMessages()
        self._is_failing = False
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._errors], False

    def log(self, line: Numbers) -> None:
        """Export one line, and report the first failure in a row."""
        self._values = line.values
        for name in line.values.keys() - self._instruments:
            is_counter = name in line.counters
            create = self._meter.create_observable_counter if is_counter else self._meter.create_observable_gauge
            create(PREFIX + name, callbacks=[self._observe(name)])
            self._instruments.add(name)
        self._errors.messages.clear()
        self._provider.force_flush()
        if self._errors.messages and not self._is_failing:
            complain(
                f"the collector at {self._address} does not accept metrics ({self._errors.messages[-1]}): "
                "is it running, with OTLP over HTTP?"
            )
        self._is_failing = bool(self._errors.messages)

    def close(self) -> None:
        """Shut the SDK down."""
        self._provider.shutdown()

    def _observe(self, name: str) -> Callable[[object], Iterator[Any]]:
        def observe(_: object) -> Iterator[Any]:
            if name in self._values:
                yield self._observation(self._values[name])

        return observe


class _ErrorMessages(logging.Handler):
    """Keeps the error messages of the SDK, which it logs instead of raising."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message of ``record``."""
        self.messages.append(record.getMessage())


def complain(text: str) -> None:
    """Have the node log ``text`` as a warning."""
    sys.stderr.buffer.write(COMPLAINT + text.encode() + b"\n")
    sys.stderr.flush()


def main(argv: list[str] | None = None) -> int:
    """Export each line of standard input until it ends."""
    (target,) = sys.argv[1:] if argv is None else argv
    exporter: Exporter | None = None
    with contextlib.suppress(KeyboardInterrupt):  # a terminal's Ctrl+C is for the node, which then closes our input
        for text in sys.stdin.buffer:
            line = msgspec.json.decode(text, type=Numbers)
            exporter = exporter or open_exporter(target, line)
            exporter.log(line)
    if exporter is not None:
        exporter.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
