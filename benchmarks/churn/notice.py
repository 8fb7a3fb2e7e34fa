"""Tokens that are lost when a peer leaves because its machine is taken back, and the time it takes to leave.

    python -m benchmarks.churn.notice [--worlds 200] [--tries 20] [--json out/notice.json]

First come simulated worlds of whole peers, each of which loses one peer in order at a random moment. Then a swarm of
three real peers: one after the other gets a spot notice at its metadata address (aws, gcp, azure in turn) or SLURM's
SIGUSR1, and is started again on its folder.

- No other fault is injected; ``python -m tests.machine_sim`` and ``python -m tests.chaos`` do that.
- The leaver's own report is not trusted: lost tokens are those that the remaining peers' marks lack (simulated), or
  that the commits which another peer received lack (real).
- A peer has ``--leave-s`` (20 s) to leave, and notices a cloud's notice within 5 s (``node/shutdown_signals.py``).
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import bench
from benchmarks.churn.processes import WAIT_S, toml, until
from p2pdiloco.demo.local_swarm import Member, Swarm

LEAVE_S = 20.0
NOTICE_S = 30.0
"""The shortest that a large cloud gives; the signal of peers/slurm.sh comes 60 s before the end."""
CONFIG: dict[str, Any] = {
    "name": "notice",
    "model": {"width": 64, "depth": 2, "heads": 2, "context": 64},
    "inner": {"steps": 1_000_000, "batch": 8, "warmup": 5},
    "schedule": {"fragments": 4, "sync_every": 24, "overlap": 6, "max_shard": 16384},
    "evaluation": {"every": 0},
}
SIGNALLED = "slurm"
WAYS = ("aws", SIGNALLED, "gcp", SIGNALLED, "azure", SIGNALLED)


class Left(NamedTuple):
    """One peer that has left."""

    seconds: float
    trained: int
    lost: int
    """Tokens."""
    trouble: str = ""


# -- simulated ---------------------------------------------------------------------------------------------------------


def in_worlds(seeds: range) -> list[tuple[int, Left]]:
    """Run the worlds of ``seeds`` in a process with small vectors (``tests/peer_sim/tuning.py``), one outcome each."""
    command = [sys.executable, "-m", "benchmarks.churn.notice_world", *map(str, seeds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return [(row["seed"], Left(row["seconds"], row["trained"], row["lost"], row["trouble"])) for row in rows]


# -- real --------------------------------------------------------------------------------------------------------------


class Metadata(ThreadingHTTPServer):
    """A cloud's metadata address, of one machine."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.is_taken_back = False
        threading.Thread(target=self.serve_forever, daemon=True, name="metadata").start()

    @property
    def address(self) -> str:
        """For ``--spot CLOUD=ADDRESS``."""
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        self._answer(b"token")

    def do_GET(self) -> None:
        told = self.server.is_taken_back
        if "spot" in self.path:
            self._answer(b'{"action": "terminate"}' if told else b"", 200 if told else 404)
        elif "preempted" in self.path:
            self._answer(b"TRUE" if told else b"FALSE")
        else:
            self._answer(json.dumps({"Events": [{"EventType": "Preempt"}] if told else []}).encode())

    def _answer(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        """Nobody listens."""


class Peers:
    """Three real peers, each in its folder, started again when it has left."""

    def __init__(self, folder: Path) -> None:
        self.swarm = Swarm(folder, ["--leave-s", str(LEAVE_S), "--stay-s", "0"])
        self.metadata: dict[str, Metadata] = {}
        self.members: dict[str, Member] = {}
        config = folder / "run.toml"
        config.write_text(toml(CONFIG))
        self.address = self.swarm.start_bootstrap()
        self.members["A"] = self.swarm.start_founder("A", config, self.address)
        for name in "BC":
            self.begin(name, WAYS[0])

    def begin(self, name: str, way: str) -> None:
        """Start it; if it gets a cloud's notices, beside its metadata address."""
        metadata = self.metadata[name] = Metadata()
        more = () if way == SIGNALLED else ("--spot", f"{way}={metadata.address}")
        self.members[name] = self.swarm.join(name, self.address, *more)

    def all_train(self) -> bool:
        """Whether all have trained in this life."""
        for member in self.members.values():
            member.refresh()
            if not member.is_running:
                raise SystemExit(f"{member.name} ended with status {member.status}: see {member.log_path}")
        return all(m.view.trained_at >= m.began_unix + 1.0 for m in self.members.values())

    def take_back(self, name: str, way: str) -> Left:
        """One machine is taken back."""
        member, began = self.members[name], time.monotonic()
        if way == SIGNALLED:
            member.process.send_signal(signal.SIGUSR1)
        else:
            self.metadata[name].is_taken_back = True
        status = member.process.wait(WAIT_S)
        seconds = time.monotonic() - began
        report = member.report() or {}
        trained, learner = int(report.get("learner_tokens", 0)), report.get("learner")
        witness = self.members["A"]
        deadline, merged = time.monotonic() + 3.0, 0
        while merged < trained and time.monotonic() < deadline:
            witness.refresh()
            merged = sum(commit["contributors"].get(learner, 0) for commit in witness.view.commits)
            time.sleep(0.1)
        trouble = "" if status == 0 and report else f"status {status}"
        return Left(seconds, trained, max(trained - merged, int(report.get("tokens_unmerged", trained))), trouble)


def for_real(tries: int, seed: int, folder: Path) -> list[tuple[str, Left]]:
    """So many peers that leave, one after the other."""
    chance, found = random.Random(seed), []
    peers = Peers(folder)
    try:
        ways = dict.fromkeys("BC", WAYS[0])
        for number in range(tries):
            until(peers.all_train, "all train")
            time.sleep(chance.uniform(0.0, 4.0))  # anywhere between two rounds
            name = "BC"[number % 2]
            left = peers.take_back(name, ways[name])
            found.append((ways[name], left))
            print(f"try {number + 1:>3}, {ways[name]:<6} {_line(left)}", flush=True)
            ways[name] = WAYS[(number + 1) % len(WAYS)]
            peers.begin(name, ways[name])
    finally:
        peers.swarm.stop()
        peers.swarm.kill_leftovers()
    return found


def _line(left: Left) -> str:
    trouble = f", {left.trouble}" if left.trouble else ""
    return f"gone after {left.seconds:5.1f} s, {left.trained:>7,} tokens trained, {left.lost} lost{trouble}"


def summary(title: str, found: list[Left]) -> dict[str, float]:
    """Figures of many, told in a line."""
    seconds = [left.seconds for left in found]
    figures = {
        "tries": len(found),
        "lost_tokens": sum(left.lost for left in found),
        "in_trouble": sum(bool(left.trouble) for left in found),
        "leave_s_median": statistics.median(seconds),
        "leave_s_most": max(seconds),
    }
    print(
        f"{title}: {len(found)} left, {figures['lost_tokens']} of {sum(left.trained for left in found):,} tokens lost, "
        f"gone after {figures['leave_s_median']:.1f} s in the median, {figures['leave_s_most']:.1f} s at most",
        flush=True,
    )
    return figures


def main() -> int:
    """Measure, print, write; exit status 1 if a token was lost, or a peer was late."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--worlds", type=int, default=200, help="number of simulated worlds")
    parser.add_argument("--tries", type=int, default=20, help="departures of real processes")
    parser.add_argument("--seed", type=int, default=1, help="seed of both")
    options = parser.parse_args()
    is_bad = False
    if options.worlds:
        worlds = in_worlds(range(options.seed, options.seed + options.worlds))
        for seed, left in worlds:
            if left.lost or left.trouble or left.seconds > LEAVE_S + 1.0:
                print(f"seed {seed}: {_line(left)}", flush=True)
                is_bad = True
        figures = summary("simulated", [left for _, left in worlds])
        bench.write(options, "churn/notice", {"kind": "simulated"}, figures)
    if options.tries:
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-notice-") as folder:
            real = for_real(options.tries, options.seed, Path(folder))
        is_bad |= any(left.lost or left.trouble or left.seconds > NOTICE_S for _, left in real)
        figures = summary("real", [left for _, left in real])
        bench.write(options, "churn/notice", {"kind": "real"}, figures)
    return int(is_bad)


if __name__ == "__main__":
    sys.exit(main())
