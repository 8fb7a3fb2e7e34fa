"""Tokens per second that ``doctor`` predicts, beside what a peer then reaches.

    python -m benchmarks.watch.promise [--rounds 3] [--seconds 20] [--json FILE]

Each round runs ``doctor``, then a peer that joins and trains; meanwhile a follower holds the run, so the measured peer
has the machine to itself. The reached rate comes from the peer's event log, from its learner's 20th step on, over wall
time: copies, merges and all other work of the node are included.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import bench
from p2pdiloco.demo.local_swarm import Swarm
from p2pdiloco.node.run_creation import find_run

LIMIT_S = 120.0
FIRST = 20
"""Steps before it counts: threads are chosen, caches warm."""
ALLOWED = 0.2


def promised(address: str, folder: Path) -> float:
    """Tokens a second, by ``doctor``."""
    command = [sys.executable, "-m", "p2pdiloco", "doctor", address, "--json", "--threads", "1", "--state", str(folder)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S).stdout)
    (estimate,) = told["would_give"].values()
    return float(estimate["tokens_per_s"])


def reached(swarm: Swarm, name: str, address: str, seconds: float) -> float:
    """Tokens a second of a peer that joins, trains for so long and leaves."""
    member, deadline = swarm.join(name, address), time.monotonic() + LIMIT_S
    began: tuple[float, int] | None = None
    while True:
        if not member.is_running or time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not train for {seconds:g} s; its log: {member.log_path}")
        member.refresh()
        view = member.view
        if began is None and view.tokens >= FIRST * tokens_a_step():
            began = view.trained_at, view.tokens
        if began is not None and view.trained_at - began[0] >= seconds:
            member.process.terminate()
            member.process.wait()
            return (view.tokens - began[1]) / (view.trained_at - began[0])
        time.sleep(0.2)


def tokens_a_step() -> int:
    """Of stdlib-tiny."""
    return 8 * 128


def main() -> int:
    """Measure, compare."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of doctor and join")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long a peer's tokens are counted")
    options = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-promise-") as place:
        folder = Path(place)
        text = find_run("stdlib-tiny").read_text(encoding="utf-8").replace("steps = 360", "steps = 100000")
        (folder / "run.toml").write_text(text)
        swarm = Swarm(folder / "swarm")
        try:
            address = swarm.start_bootstrap()
            founder = swarm.start_founder("founder", folder / "run.toml", address)
            follower = swarm.join("follower", address, "--follow")
            while not follower.view.current_at:
                time.sleep(0.2)
                follower.refresh()
            founder.process.terminate()
            founder.process.wait()
            for number in range(options.rounds):
                pairs.append(
                    (promised(address, folder / "new"), reached(swarm, f"p{number}", address, options.seconds))
                )
                print("promised {:,.0f}, reached {:,.0f} tokens/s".format(*pairs[-1]), flush=True)
        finally:
            swarm.stop()
            swarm.kill_leftovers()
    said, made = (statistics.median(column) for column in zip(*pairs, strict=True))
    error = said / made - 1
    bench.write(options, "watch/promise", {}, {"promised": said, "reached": made, "error": error})
    print(f"medians: {said:,.0f} and {made:,.0f} tokens/s, {error:+.1%} ({ALLOWED:.0%} allowed)")
    return int(abs(error) > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
