"""Step time and memory of a learner on a GPU, inside a run and outside; takes a few minutes.

    python -m benchmarks.gpu [--device cuda] [--parameters 1.1e9] [--steps 250] [--seconds 450] [--json out/gpu.json]

Two models of TinyLlama's shape train on noise in bfloat16 on one device: first by themselves (the baseline), then as
two peers with a node each, which exchange the whole model every ``--sync-every`` steps; then one of them as the only
rank of an NCCL group. A row has step times by the device's events, device and host memory, and bytes over the bus. Each
row is written as soon as it is measured; a case that does not end within its share of ``--seconds`` is left out, with a
message. ``--device cpu --parameters 2e5 --steps 20 --sync-every 24 --fragments 12`` is a rehearsal.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks import bench
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import Listening, StatusPipeError

START_S = 30.0
END_S = 60.0
COLUMNS = (
    ("step, ms", "step_ms", ".1f"),
    ("worst, ms", "worst_ms", ".1f"),
    ("to apart", "to_apart", ".3f"),
    ("rounds", "rounds", ".0f"),
    ("device, GB", "device_gb", ".2f"),
    ("host, GB", "host_gb", ".2f"),
    ("bus, MB a step", "bus_mb", ".1f"),
)


class GpuError(Exception):
    """A process failed or was too slow; the message says which, and what it wrote last."""


class Peer:
    """One process of ``benchmarks.gpu.peer``."""

    def __init__(self, name: str, folder: Path, arguments: Sequence[str]) -> None:
        self._name, self._log = name, folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.peer", *arguments],
                cwd=bench.ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True, name=name).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put("")

    def hear(self, deadline: float, others: Sequence[Peer]) -> dict[str, Any]:
        """Return what it says next, unless one of ``others``, without which it may wait for ever, has failed."""
        line = None
        while line is None:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                for other in others:
                    if other._process.poll():
                        raise GpuError(
                            f"{other._name} ended with status {other._process.poll()}: {other._last()}"
                        ) from None
                if time.monotonic() > deadline:
                    raise GpuError(f"{self._name} says nothing in its time: {self._last()}") from None
        if not line:
            raise GpuError(f"{self._name} ended with status {self._process.wait()}: {self._last()}")
        told: dict[str, Any] = json.loads(line)
        return told

    def go(self) -> None:
        """On."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """It should have ended."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def kill(self) -> None:
        """At once."""
        self._process.kill()
        self._process.wait()

    def _last(self) -> str:
        return self._log.read_text(errors="replace")[-2000:].strip() or "it wrote nothing"


@contextlib.contextmanager
def bootstrap(folder: Path) -> Iterator[list[str]]:
    """Addresses of a directory on this machine."""
    log = folder / "bootstrap.log"
    command = ["bootstrap", "--listen", "/ip4/127.0.0.1/tcp/0", "--state", str(folder / "bootstrap")]
    with log.open("wb") as file, status_pipe.opened() as (reports, fd):
        argv = [sys.executable, "-m", "p2pdiloco", *command, status_pipe.OPTION, str(fd)]
        process = subprocess.Popen(argv, stdout=file, stderr=file, pass_fds=(fd,))
    try:
        try:
            listening = reports.wait_for(Listening, START_S)
        except StatusPipeError as error:
            raise GpuError(f"no bootstrap node ({error}): {log.read_text(errors='replace')[-2000:]}") from error
        yield [listening.addresses[0]]
    finally:
        process.kill()
        process.wait()


def run(arguments: Sequence[Sequence[str]], folder: Path, deadline: float) -> list[dict[str, Any]]:
    """What processes with these arguments found, side by side.

    Raises:
        GpuError: one of them failed.
    """
    folder.mkdir()
    peers: list[Peer] = []
    try:
        for number, one in enumerate(arguments):
            peers.append(Peer(f"peer-{number}", folder, one))
        ready = [peer.hear(deadline, peers) for peer in peers]
        for peer in peers:
            peer.go()
        found = [{**told, **peer.hear(deadline, peers)} for told, peer in zip(ready, peers, strict=True)]
        for peer in peers:
            peer.go()
        for peer in peers:
            peer.end()
        return found
    finally:
        for peer in peers:
            peer.kill()


def figures(found: Sequence[dict[str, Any]], apart_s: float | None, sync_every: int) -> dict[str, Any]:
    """One row: the slower of two."""
    slower = max(found, key=lambda one: one["median_s"])
    crossing = 8 * slower["parameters"] / sync_every if slower["rounds"] else 0.0  # float32 up and down
    return {
        "step_ms": 1e3 * slower["median_s"],
        "mean_ms": 1e3 * slower["mean_s"],
        "worst_ms": 1e3 * slower["worst_s"],
        "to_apart": None if apart_s is None else slower["median_s"] / apart_s,
        "rounds": min(one["rounds"] for one in found),
        "device_gb": max(one["device_bytes"] for one in found) / 1e9,
        "host_gb": max(one["host_own"] + one["host_shared"] for one in found) / 1e9,
        "bus_mb": crossing / 1e6,
        **{key: value for key, value in slower.items() if key.startswith(("to_", "device")) and key != "device_bytes"},
        "longest": slower["longest"],
        "parameters": slower["parameters"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False, has_keep=True)
    parser.add_argument("--device", default="cuda", help="torch device")
    parser.add_argument("--parameters", type=float, default=1.1e9, help="parameters of the model, roughly")
    parser.add_argument("--context", type=int, default=1024, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=4, help="samples per step")
    parser.add_argument("--steps", type=int, default=250, help="timed steps; the default covers two exchanges")
    parser.add_argument("--sync-every", type=int, default=120, help="H")
    parser.add_argument("--fragments", type=int, default=24, help="P")
    parser.add_argument("--seconds", type=float, default=450.0, help="time limit of the whole benchmark")
    options = parser.parse_args(argv)
    names = ("device", "parameters", "context", "batch", "steps", "sync_every", "fragments")
    common = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    rows: dict[str, dict[str, Any]] = {}
    began, is_whole = time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-gpu-", ignore_cleanup_errors=True) as temporary:
        folder = Path(options.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with bootstrap(folder) as addresses:
            joined = [*common, "--peers", *addresses, "--wait-for", "2"]
            backend = "nccl" if options.device.startswith("cuda") else "gloo"
            alone = [*common, "--founds", "--state", str(folder / "alone"), "--group", backend, "--peers"]
            cases = {
                "apart": (0.25, [common, common]),
                "together": (
                    0.8,
                    [
                        [*joined, "--state", str(folder / "one"), "--founds"],
                        [*joined, "--state", str(folder / "two"), "--after", str(folder / "one")],
                    ],
                ),
                f"one rank of {backend}": (1.0, [alone]),
            }
            for name, (share, arguments) in cases.items():
                print(f"[{time.monotonic() - began:5.0f} s] {name}", file=sys.stderr, flush=True)
                apart_s = rows["apart"]["step_ms"] / 1e3 if len(arguments) > 1 and "apart" in rows else None
                try:
                    found = run(arguments, folder / name.replace(" ", "-"), began + share * options.seconds)
                except GpuError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    is_whole = False
                    continue
                rows[name] = figures(found, apart_s, options.sync_every)
                bench.write(options, "gpu", {"case": name}, rows[name])
    print(bench.table("", COLUMNS, rows))
    return 0 if is_whole else 1


if __name__ == "__main__":
    raise SystemExit(main())
