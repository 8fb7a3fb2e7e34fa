"""Time until a newcomer has every shard, compared with a raw copy of as many bytes over the same links.

    python -m benchmarks.churn.join --link 1gbit --parameters 100e6
    python -m benchmarks.churn.join --link 200mbit --bottleneck up --json out/join.jsonl --plot out/join.png

- Each peer is a process on a shaped link in its own network namespace (``benchmarks.wire.links``; needs root). All
  links have the same rate, so the newcomer's is the bottleneck; with ``--bottleneck up`` each donor may send a quarter
  of it.
- A round has three parts over the same links: the raw copy (one blocking TCP connection per donor, equal shares), a
  join, and a join in which a donor gets SIGKILL when half of the bytes have arrived. Figures are medians of the rounds.
- The benchmark fails if the newcomer's heads differ from the donors'.
- ``--load`` runs a training loop beside donor 0, on a processor of its own, and reports its steps per second and per
  CPU second: this is what serving costs a donor that trains.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench
from benchmarks.plots import bars, figure
from benchmarks.wire import links
from benchmarks.wire.line import Message

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0
UP_SHARE = 0.25
"""Of the newcomer's rate, that each donor may send with ``--bottleneck up``."""


class BenchmarkError(Exception):
    """A process failed, or its result is wrong."""


class Process:
    """One process of the benchmark, and what it says."""

    def __init__(self, place: links.Place, *, is_verbose: bool, cpus: str, **config: object) -> None:
        """``cpus``: on which it may run, for taskset; "": on all."""
        self.role = config["role"]
        bound = ["taskset", "-c", cpus] if cpus else []
        module = "benchmarks.churn.raw_copy" if str(self.role).startswith("raw") else "benchmarks.churn.join_peer"
        self._process = subprocess.Popen(
            place.command([*bound, sys.executable, "-W", "ignore", "-m", module, json.dumps(config)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if is_verbose else subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self._answers: queue.Queue[Message | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._answers.put(json.loads(text))
        self._answers.put(None)

    def tell(self, **command: object) -> None:
        """Have it do something."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Message:
        """The next thing it says.

        Raises:
            BenchmarkError: it ended, or says nothing.
        """
        with contextlib.suppress(queue.Empty):
            found = self._answers.get(timeout=PATIENCE_S)
            if found is not None:
                return found
        raise BenchmarkError(f"the {self.role} gave up; --verbose shows what it says")

    def ask(self, **command: object) -> Message:
        """Tell, and wait for the answer."""
        self.tell(**command)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()


class Swarm:
    """Donors that hold a run, and a place for newcomers. ``with Swarm(...) as swarm``."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()
        self._config = {"parameters": int(options.parameters), "peers": 1, "codec": "int4", "merge": "rda"}
        self.size = 8 * int(options.parameters)

    def __enter__(self) -> Swarm:
        options = self._options
        with contextlib.ExitStack() as stack:
            self._places = stack.enter_context(links.network(options.link, options.donors + 1))
            rate = links.RATES[options.link]
            if rate is not None and options.bottleneck == "up":
                for index in range(options.donors):
                    _limit_up(self._places[index], rate * UP_SHARE)
            self._stack = stack.pop_all()
            started = [self._start(index, "donor") for index in range(options.donors)]  # at once: it takes long
            self.donors = [(process, process.answer()["address"]) for process in started]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self, index: int, role: str, **more: object) -> Process:
        place = self._places[index]
        config = {**self._config, **more, "role": role, "host": place.host, "interface": place.interface}
        cores = os.cpu_count() or 1
        cpus = "" if not self._options.load or cores < 2 else "0" if role == "load" else f"1-{cores - 1}"
        process = Process(place, is_verbose=self._options.verbose, cpus=cpus, **config)
        self._stack.callback(process.kill)
        return process

    def newcomers(self, count: int) -> list[Process]:
        """Processes that wait to join."""
        started = [self._start(len(self.donors), "newcomer") for _ in range(count)]
        for process in started:
            process.answer()
        return started

    def raw(self) -> Message:
        """Copy the same bytes with nothing but sockets."""
        size = self.size // len(self.donors)
        servers = [self._start(index, "raw-server", bytes=size) for index in range(len(self.donors))]
        addresses = [server.answer()["address"] for server in servers]
        return self._start(len(self.donors), "raw-client", addresses=addresses).answer()

    def join(self, newcomer: Process, *, is_killing: bool) -> Message:
        """A newcomer's join. A donor that is killed is started again.

        Raises:
            BenchmarkError: a process failed, or the newcomer has something else.
        """
        before = [donor.ask(do="cpu") for donor, _ in self.donors]
        newcomer.tell(do="join", addresses=[address for _, address in self.donors])
        newcomer.answer()  # half of it is there
        if is_killing:
            self.donors[-1][0].kill()
        found = newcomer.answer()
        newcomer.kill()
        if found["heads"] != self.donors[0][0].ask(do="heads")["heads"] or found["faults"]:
            raise BenchmarkError(f"the newcomer has something else than the donors: {found}")
        if is_killing:
            process = self._start(len(self.donors) - 1, "donor")
            self.donors[-1] = process, process.answer()["address"]
            return found
        after = [donor.ask(do="cpu") for donor, _ in self.donors]
        pairs = list(zip(before, after, strict=True))
        found["donors_cpu_s"] = sum(a["cpu_s"] - b["cpu_s"] for b, a in pairs)
        found["shares"] = [(a["sent"] - b["sent"]) / self.size for b, a in pairs]
        return found

    def training(self) -> Process:
        """A training loop beside donor 0."""
        process = self._start(0, "load")
        process.answer()
        return process


def _limit_up(place: links.Place, rate: float) -> None:
    """Let what leaves ``place`` be no faster than ``rate`` bits per second."""
    head, _, index = place.namespace.rpartition("-")
    command = f"tc -n {head}-edge{index} qdisc replace dev backbone root {links.bucket(rate)}"
    subprocess.run(command.split(), check=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; medians.

    Raises:
        BenchmarkError, links.LinkError
    """
    raws, joins, killed, steps = [], [], [], []
    with Swarm(options) as swarm:
        for number in range(options.rounds):
            newcomers = swarm.newcomers(1 if options.calm else 2)
            raws.append(swarm.raw())
            print(f"round {number}: raw {json.dumps(raws[-1])}", file=sys.stderr)
            loop = swarm.training() if options.load else None
            marks = [] if loop is None else [loop.ask()]
            if loop is not None:
                threading.Event().wait(options.load)
                marks.append(loop.ask())
            joins.append(swarm.join(newcomers[0], is_killing=False))
            print(f"round {number}: join {json.dumps(joins[-1])}", file=sys.stderr)
            if loop is not None:
                marks.append(loop.ask())
                loop.kill()
                steps.append([_rates(*pair) for pair in itertools.pairwise(marks)])
            if not options.calm:
                killed.append(swarm.join(newcomers[1], is_killing=True))
                print(f"round {number}: killed {json.dumps(killed[-1])}", file=sys.stderr)
        size = swarm.size

    def median(rows: Sequence[Message], name: str) -> float | None:
        return float(statistics.median(row[name] for row in rows)) if rows else None

    raw_s, join_s, killed_s = median(raws, "wall_s"), median(joins, "wall_s"), median(killed, "wall_s")
    assert raw_s is not None
    assert join_s is not None
    donors_cpu_s = median(joins, "donors_cpu_s")
    return {
        "bytes": size,
        "raw_s": raw_s,
        "join_s": join_s,
        "killed_s": killed_s,
        "join_per_raw": join_s / raw_s,
        "killed_per_join": None if killed_s is None else killed_s / join_s,
        "join_mbit_per_s": size * 8 / join_s / 1e6,
        "received_share": statistics.median(row["received"] for row in joins) / size,
        "killed_received_share": statistics.median(row["received"] for row in killed) / size if killed else None,
        "newcomer_cpu_s": median(joins, "cpu_s"),
        "donors_cpu_s": donors_cpu_s,
        "raw_cpu_s": median(raws, "cpu_s"),
        "donor_shares": joins[-1]["shares"],
        "newcomer_peak_bytes": max(row["peak"] for row in joins),
        "steps_per_s": steps,
    }


def _rates(before: Message, after: Message) -> dict[str, float]:
    made = after["steps"] - before["steps"]
    return {
        "per_s": made / (after["wall_s"] - before["wall_s"]),
        "per_cpu_s": made / (after["cpu_s"] - before["cpu_s"]),
    }


COLUMNS = (
    ("raw s", "raw_s", ".2f"),
    ("join s", "join_s", ".2f"),
    ("x raw", "join_per_raw", ".2f"),
    ("killed s", "killed_s", ".2f"),
    ("x join", "killed_per_join", ".2f"),
    ("received", "received_share", ".3f"),
    ("killed: received", "killed_received_share", ".3f"),
    ("CPU s", "newcomer_cpu_s", ".2f"),
    ("donors' CPU s", "donors_cpu_s", ".2f"),
)


def told(figures: Message) -> str:
    """What is not in the table."""
    lines = ["donors' shares: " + " ".join(f"{share:.2f}" for share in figures["donor_shares"])]
    for calm, busy in figures["steps_per_s"]:
        ratios = (f"{unit} {busy[unit] / calm[unit]:.3f}" for unit in ("per_s", "per_cpu_s"))
        lines.append("steps beside a donor that serves, against before: " + ", ".join(ratios))
    return "\n".join(lines)


def plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows of the JSON file as bars."""
    names = [f"{row['settings']['link']} {row['settings']['bottleneck']}" for row in rows]
    with figure(path, 2, size=(12, 5), title="joining a run from three donors") as both:
        for axes, series, unit in zip(both, (TIMES, RATIOS), ("s", ""), strict=True):
            bars(axes, names, {name: [r["figures"][key] or 0.0 for r in rows] for name, key in series.items()}, unit)


TIMES = {"raw copy": "raw_s", "join": "join_s", "join, a donor killed": "killed_s"}
RATIOS = {"join / raw copy (target 1.3)": "join_per_raw", "killed / join (target 1.1)": "killed_per_join"}


def main() -> int:
    """The command line."""
    parser = bench.parser(__doc__)
    parser.add_argument("--link", choices=links.RATES, default="1gbit", help="rate of all links")
    parser.add_argument(
        "--bottleneck",
        choices=["down", "up"],
        default="down",
        help="whose link is the limit: the newcomer (down) or the donors (up)",
    )
    parser.add_argument("--parameters", type=float, default=100e6, help="parameters of the model")
    parser.add_argument("--donors", type=int, default=3, help="number of donors")
    parser.add_argument("--rounds", type=int, default=1, help="rounds; figures are medians")
    parser.add_argument("--calm", action="store_true", help="without the join in which a donor is killed")
    parser.add_argument(
        "--load", type=float, default=0.0, metavar="S", help="train beside donor 0; measure S seconds before the join"
    )
    parser.add_argument("--verbose", action="store_true", help="show the peers' standard error")
    options = parser.parse_args()
    try:
        figures = measure(options)
    except (BenchmarkError, links.LinkError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = [bench.write(options, "churn/join", {}, figures)]
    if options.plot:
        if options.json:
            rows = [json.loads(text) for text in options.json.read_text(encoding="utf-8").splitlines()]
        plot(options.plot, rows)
    print(f"{figures['bytes'] / 1e6:.0f} MB\n" + bench.table("link", COLUMNS, {options.link: figures}))
    print(told(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
