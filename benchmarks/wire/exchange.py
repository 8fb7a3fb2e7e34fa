"""One exchange of a whole model among peers (reduce and spread), side by side with what others offer.

    python -m benchmarks.wire.exchange --system p2pdiloco --peers 4 --parameters 100e6 --codec int4 --link 1gbit
    python -m benchmarks.wire.exchange --all --passes 2 --json out/exchange.jsonl --plot out/exchange.png

Rules of this file:
1. Every peer is a process of its own, on shaped links in a network namespace of its own (``links``, needs root).
2. A figure is the median of the rounds after one warm-up. With ``--passes 2`` the systems take turns (A B C A B C), so
   that a change in the machine's load meets all of them.
3. The clock runs from the first peer's start to the last peer's end. hivemind's runs for the all-reduce alone, without
   its matchmaking; p2pdiloco's includes the outer step, digests and signatures, which the others do not have.
4. A round whose result is wrong, or that differs between peers, fails the benchmark.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import bench
from benchmarks.wire import links, plots
from benchmarks.wire.baselines import environments
from benchmarks.wire.line import Message

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900.0
ERRORS = {"int4": 0.25, "int8": 0.02, "bf16": 0.005, "fp32": 1e-5, "fp16": 0.002, "uint8": 0.05, "bytes": 0.0}
"""Largest relative error of the result, by codec."""
RAW_BYTES = {"int4": 0.46, "int8": 0.9, "bf16": 1.6, "fp32": 4.0}
"""Bytes per parameter that ``raw`` moves, where p2pdiloco has not been measured in the same run."""


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
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[queue.Queue[Message | None]] = []

    def __enter__(self) -> Swarm:
        with contextlib.ExitStack() as stack:
            places = stack.enter_context(links.network(self.case.link, self.case.peers))
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
        cpu = self._cpu_s()
        done = self.ask_all({"do": "go"})
        cpu = self._cpu_s() - cpu
        after = self.ask_all({"do": "check"})
        self._judge(done, after)
        peers = self.case.peers
        sent = [a["sent"] - b["sent"] for a, b in zip(after, before, strict=True)]
        received = [a["received"] - b["received"] for a, b in zip(after, before, strict=True)]
        share = 1 / peers if self.case.link == "lo" else 1  # one loopback for all
        wall = max(d["ended"] for d in done) - min(d["began"] for d in done)
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

    def _busy_share(self, after: Sequence[Message]) -> float | None:
        rate = links.RATES[self.case.link]
        seconds = sum(a.get("busy_s", 0.0) for a in after)
        if rate is None or not seconds:
            return None
        return float(sum(a["busy_bytes"] for a in after) * 8 / seconds / rate)

    def _judge(self, done: Sequence[Message], after: Sequence[Message]) -> None:
        case, failed = self.case, [d["reason"] for d in done if not d["ok"]]
        if failed:
            raise BenchmarkError(f"{case.name}: an exchange failed: {failed}")
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
            env={**os.environ, "OMP_NUM_THREADS": "1"} if system.environment else None,
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

    def _cpu_s(self) -> float:
        """Of all peers with their children."""
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


def measure(cases: Sequence[Case], rounds: int, passes: int, *, is_verbose: bool) -> Iterator[tuple[Case, list[Round]]]:
    """Each case's rounds, each pass with a warm-up of its own.

    Raises:
        BenchmarkError, links.LinkError, environments.SetupError
    """
    bytes_per_parameter = dict(RAW_BYTES)
    found: dict[Case, list[Round]] = {case: [] for case in cases}
    for number in range(passes):
        for case in cases:
            wanted = rounds * (number + 1) // passes - rounds * number // passes
            with Swarm(case, bytes_per_parameter.get(case.codec, 0.0), is_verbose=is_verbose) as swarm:
                swarm.exchange()
                found[case] += [swarm.exchange() for _ in range(wanted)]
            load = os.getloadavg()[0]
            print(f"{time.strftime('%H:%M:%S')} load {load:.2f}  {case.link} {case.name}", file=sys.stderr)
            if case.system == "p2pdiloco":
                scale = 2 * (case.peers - 1) / case.peers * case.parameters
                bytes_per_parameter[case.codec] = statistics.median(r.payload for r in found[case]) / scale
            if number == passes - 1:
                yield case, found[case]


def figures(case: Case, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians, and what follows from them."""

    def median(name: str) -> float:
        return float(statistics.median(getattr(r, name) for r in rounds))

    wall, fragment = median("wall_s"), 4 * case.parameters
    rate = links.payload_rate(case.link)
    wire = median("sent") * case.peers
    shares = [r.busy_share for r in rounds if r.busy_share is not None]
    return {
        "wall_s": wall,
        "wall_s_min": min(r.wall_s for r in rounds),
        "wall_s_max": max(r.wall_s for r in rounds),
        "whole_s": median("whole_s"),
        "sent_bytes": median("sent"),
        "received_bytes": median("received"),
        "payload_bytes": median("payload"),
        "bytes_per_parameter": median("payload") / (2 * (case.peers - 1) / case.peers * case.parameters),
        "payload_gbit_per_s": median("payload") * 8 / wall / 1e9,
        "link_share": None if rate is None else median("payload") * 8 / wall / rate,
        "busy_share": statistics.median(shares) if shares else None,
        "cpu_s": median("cpu_s"),
        "cpu_s_per_wire_gb": median("cpu_s") / (wire / 1e9),
        "cores": median("cpu_s") / wall,
        **(_memory(rounds, fragment) if median("peak_rss") else dict.fromkeys(MEMORY)),
        "error": max(r.error for r in rounds),
    }


MEMORY = (
    "idle_rss_by_tenth",
    "idle_rss_per_float32",
    "peak_rss_per_float32",
    "exchange_rss_per_float32",
    "rss_growth_per_float32",
)


def _memory(rounds: Sequence[Round], fragment: float) -> dict[str, Any]:
    """Of the largest peer: bytes at each tenth of the rounds; in units of the exchanged parameters in float32 before,
    at most, what an exchange adds, and what all rounds added."""
    return {
        "idle_rss_by_tenth": [int(rounds[(len(rounds) - 1) * tenth // 10].idle_rss) for tenth in range(11)],
        "idle_rss_per_float32": statistics.median(r.idle_rss for r in rounds) / fragment,
        "peak_rss_per_float32": max(r.peak_rss for r in rounds) / fragment,
        "exchange_rss_per_float32": max(r.peak_rss - r.idle_rss for r in rounds) / fragment,
        "rss_growth_per_float32": (rounds[-1].idle_rss - rounds[len(rounds) // 5].idle_rss) / fragment,
    }


COLUMNS = (
    ("wall s", "wall_s", ".3f"),
    ("min", "wall_s_min", ".3f"),
    ("max", "wall_s_max", ".3f"),
    ("MB sent", "sent_mb", ".1f"),
    ("B/param", "bytes_per_parameter", ".3f"),
    ("Gbit/s", "payload_gbit_per_s", ".2f"),
    ("% link", "link_share", ".0%"),
    ("% busy", "busy_share", ".0%"),
    ("CPU s", "cpu_s", ".2f"),
    ("CPU s/GB", "cpu_s_per_wire_gb", ".2f"),
    ("+RSS/f32", "exchange_rss_per_float32", ".2f"),
    ("RSS/f32", "peak_rss_per_float32", ".2f"),
    ("error", "error", ".1e"),
    ("x p2pdiloco", "times_p2pdiloco", ".2f"),
)


def table(results: Sequence[tuple[Case, dict[str, Any]]]) -> str:
    """For people; the last column is how many times as long as p2pdiloco's first case on the same link it took."""
    ours: dict[str, float] = {}
    for case, found in results:
        if case.system == "p2pdiloco":
            ours.setdefault(case.link, found["wall_s"] or 0.0)
    rows = {}
    for case, found in results:
        times = found["wall_s"] / ours[case.link] if ours.get(case.link) and found["wall_s"] else None
        rows[f"{case.link} {case.name}"] = {**found, "sent_mb": found["sent_bytes"] / 1e6, "times_p2pdiloco": times}
    return bench.table("link, system", COLUMNS, rows)


def all_cases(peers: int, parameters: int) -> list[Case]:
    """The issue's table."""
    wanted = {
        "lo": ["p2pdiloco int4", "hivemind uint8", "hivemind fp16", "torchft fp32", "p2pdiloco bf16", "raw int4"],
        "1gbit": ["p2pdiloco int4", "hivemind uint8", "torchft fp32", "p2pdiloco bf16", "raw int4"],
        "200mbit": ["p2pdiloco int4", "p2pdiloco bf16", "raw int4"],
        "2.5gbit": ["p2pdiloco int4", "p2pdiloco bf16", "raw int4"],
    }
    return [
        Case(system, codec, link, peers, parameters)
        for link, names in wanted.items()
        for system, codec in (name.split() for name in names)
    ]


def main() -> int:
    """The command line."""
    options = _options()
    peers, parameters = options.peers, int(options.parameters)
    if options.all:
        cases = [case for case in all_cases(peers, parameters) if options.only in (None, case.link)]
    else:
        system = SYSTEMS[options.system]
        codec = options.codec or system.codecs[0]
        if codec not in system.codecs:
            print(f"{options.system} has the codecs {', '.join(system.codecs)}, not {codec}", file=sys.stderr)
            return 2
        cases = [Case(options.system, codec, options.link, peers, parameters, options.merge)]
    results = []
    rows = []
    try:
        for case, rounds in measure(cases, options.rounds, options.passes, is_verbose=options.verbose):
            found = figures(case, rounds)
            results.append((case, found))
            rows.append(bench.write(options, "wire/exchange", case._asdict(), found))
    except (BenchmarkError, links.LinkError, environments.SetupError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if results:
            print(table(results))
        if rows and options.plot:
            plots.exchange(options.plot, rows)
    return 0


def _options() -> argparse.Namespace:
    parser = bench.parser(__doc__)
    parser.add_argument("--all", action="store_true", help="the whole table; --only LINK for one link of it")
    parser.add_argument("--only", choices=links.RATES, help="with --all")
    parser.add_argument("--system", choices=SYSTEMS, default="p2pdiloco")
    parser.add_argument("--codec", help="int4, int8, bf16; hivemind: uint8, fp16, fp32; torchft: fp32")
    parser.add_argument("--link", choices=links.RATES, default="lo")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=5, help="after one warm-up")
    parser.add_argument("--passes", type=int, default=1, help="share the rounds out: all systems, then all again")
    parser.add_argument("--merge", choices=["rda", "direct"], default="rda")
    parser.add_argument("--verbose", action="store_true", help="let the peers write to standard error")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
