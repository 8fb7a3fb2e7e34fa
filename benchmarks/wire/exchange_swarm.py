"""Peers of one exchange: processes on shaped links that are driven and checked line by line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.wire import links
from benchmarks.wire.baselines import environments
from benchmarks.wire.line import Message

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900.0
ERRORS = {"int4": 0.25, "int8": 0.02, "bf16": 0.005, "fp32": 1e-5, "fp16": 0.002, "uint8": 0.05, "bytes": 0.0}
"""Largest relative error of the result, by codec."""


class System(NamedTuple):
    """What can be measured."""

    module: str
    environment: str
    """"" for our own."""
    codecs: tuple[str, ...]


SYSTEMS = {
    "p2pdiloco": System("benchmarks.wire.exchange_peer", "", ("int4", "int8", "bf16")),
    "hivemind": System("benchmarks.wire.baselines.hivemind_peer", "hivemind", ("uint8", "fp16", "fp32")),
    "torchft": System("benchmarks.wire.baselines.torchft_peer", "torchft", ("fp32",)),
    "gloo": System("benchmarks.wire.baselines.gloo_peer", "", ("bf16", "fp32")),
    "raw": System("benchmarks.wire.baselines.raw_peer", "", ("int4", "int8", "bf16", "fp32")),
}


class Case(NamedTuple):
    """One system with its settings."""

    system: str
    codec: str
    link: str
    peers: int
    parameters: int
    merge: str = "rda"

    @property
    def name(self) -> str:
        return f"{self.system} {self.codec}"


class Round(NamedTuple):
    """One exchange. Bytes are the largest of all peers, memory too."""

    wall_s: float
    whole_s: float
    """With hivemind's matchmaking; else the same."""
    cpu_s: float
    sent: float
    received: float
    payload: float
    idle_rss: float
    peak_rss: float
    error: float
    busy_share: float | None
    """Interface bytes while payloads waited, as a share of the link."""


class BenchmarkError(Exception):
    """A peer failed, or its result is wrong."""


class Swarm:
    """The peers of one case. ``with Swarm(...) as swarm``."""

    def __init__(self, case: Case, bytes_per_parameter: float, *, is_verbose: bool, module: str = "") -> None:
        """``module``: another peer's program than the system's own."""
        self.case = case
        self._module = module or SYSTEMS[case.system].module
        self._bytes_per_parameter = bytes_per_parameter
        self._is_verbose = is_verbose
        self._stack = contextlib.ExitStack()
        self._folder = ""
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[Message | None]] = []

    def __enter__(self) -> Swarm:
        with contextlib.ExitStack() as stack:
            places = stack.enter_context(links.network(self.case.link, self.case.peers))
            # Peers are killed, and leave hundreds of megabytes behind.
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="p2pdiloco-exchange-"))
            stack.callback(self._end)
            addresses = []
            for index, place in enumerate(places):
                self._start(index, place)
                addresses.append(self._answer(index)["address"])  # hivemind's others are told the first one's
            self.ask_all({"do": "connect", "addresses": addresses})
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def exchange(self) -> Round:
        """One round.

        Raises:
            BenchmarkError: a peer failed, or a result is wrong.
        """
        before = self.ask_all({"do": "prepare"})
        done, cpu = self._go()
        after = self.ask_all({"do": "check"})
        self._judge(after)
        peers = self.case.peers
        sent = [a["sent"] - b["sent"] for a, b in zip(after, before, strict=True)]
        received = [a["received"] - b["received"] for a, b in zip(after, before, strict=True)]
        share = 1 / peers if self.case.link == "lo" else 1  # one loopback for all
        wall = _wall_s(done)
        return Round(
            wall_s=wall,
            whole_s=max(d.get("with_matchmaking_s", wall) for d in done),
            cpu_s=cpu,
            sent=max(sent) * share,
            received=max(received) * share,
            payload=statistics.mean(a["payload"] for a in after),
            idle_rss=max(b["rss"] for b in before),
            peak_rss=max(a["peak"] for a in after),
            error=max(a["error"] for a in after),
            busy_share=self._busy_share(after),
        )

    def exchange_unchecked(self) -> tuple[float, float]:
        """One round whose result is not compared; CPU seconds of all peers, and its time in seconds.

        Raises:
            BenchmarkError: a peer failed.
        """
        self.ask_all({"do": "prepare"})
        done, cpu_s = self._go()
        return cpu_s, _wall_s(done)

    def _go(self) -> tuple[list[Message], float]:
        before = self.cpu_s()
        done = self.ask_all({"do": "go"})
        cpu = self.cpu_s() - before
        if failed := [d["reason"] for d in done if not d["ok"]]:
            raise BenchmarkError(f"{self.case.name}: an exchange failed: {failed}")
        return done, cpu

    def _busy_share(self, after: Sequence[Message]) -> float | None:
        rate = links.RATES[self.case.link]
        seconds = sum(a.get("busy_s", 0.0) for a in after)
        if rate is None or not seconds:
            return None
        return float(sum(a["busy_bytes"] for a in after) * 8 / seconds / rate)

    def _judge(self, after: Sequence[Message]) -> None:
        case = self.case
        if len({a["digest"] for a in after}) > 1:
            raise BenchmarkError(f"{case.name}: the peers' digests differ")
        worst, allowed = max(a["error"] for a in after), ERRORS[case.codec]
        if not worst <= allowed:
            raise BenchmarkError(f"{case.name}: the result has a relative error of {worst:.3g}, {allowed} is allowed")

    def _start(self, index: int, place: links.Place) -> None:
        case, system = self.case, SYSTEMS[self.case.system]
        python = str(environments.python_of(system.environment)) if system.environment else sys.executable
        config = {
            "index": index,
            "peers": case.peers,
            "parameters": case.parameters,
            "codec": case.codec,
            "merge": case.merge,
            "host": place.host,
            "interface": place.interface,
            "is_sampled": case.link != "lo",
            "bytes_per_parameter": self._bytes_per_parameter,
        }
        process = subprocess.Popen(
            place.command([python, "-W", "ignore", "-m", self._module, json.dumps(config)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._is_verbose else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": self._folder, **({"OMP_NUM_THREADS": "1"} if system.environment else {})},
        )
        answers: queue.Queue[Message | None] = queue.Queue()
        self._processes.append(process)
        self._answers.append(answers)

        def read() -> None:
            assert process.stdout is not None
            for text in process.stdout:
                answers.put(json.loads(text))
            answers.put(None)

        threading.Thread(target=read, daemon=True).start()

    def ask_all(self, command: Message) -> list[Message]:
        """Each peer's answer."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        return [self._answer(index) for index in range(len(self._processes))]

    def _answer(self, index: int) -> Message:
        try:
            found = self._answers[index].get(timeout=PATIENCE_S)
        except queue.Empty:
            found = None
        if found is None:
            raise BenchmarkError(f"{self.case.name}: peer {index} gave up; --verbose shows what it says")
        return found

    def private_bytes(self) -> list[int]:
        """Memory of each peer that no other process shares."""
        return [psutil.Process(process.pid).memory_full_info().uss for process in self._processes]

    def cpu_s(self) -> float:
        """CPU seconds of all peers with their children."""
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                for one in (parent, *parent.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        times = one.cpu_times()
                        total += times.user + times.system
        return total

    def _end(self) -> None:
        children = []
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                children += psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()


def _wall_s(done: Sequence[Message]) -> float:
    return float(max(d["ended"] for d in done) - min(d["began"] for d in done))
