"""Traffic of idle peers, directory included; needs root.

    python -m benchmarks.wire.idle [--peers 16] [--settle-s 90] [--seconds 60] [--json out/idle.json]

``--peers`` followers of a tiny run, each with its own directory node and ``A_PROCESS`` to a process, share a network
namespace whose loopback carries nothing else. The figure is the growth of its counter after the first seconds, divided
by peers and seconds; a peer sends and receives that much each, headers of IP and TCP included. The benchmark fails
unless everybody has met everybody before the count begins, and hears everybody afterwards.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks import bench
from benchmarks.wire.line import Message

LIMIT = 5.0
"""kB/s."""
A_PROCESS = 16
"""Peers: of more the first is too slow a bootstrap for the others on a busy machine."""
MEET_S = 240.0
SLICE_S = 10.0
LOOK_S = 1.0


def loopback_bytes() -> int:
    """That this namespace's loopback has carried."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.partition(":")[2].split()[0])


class Peers:
    """All of them, in their processes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Peers:
        boot: list[str] = []
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            for first in range(0, self._number, A_PROCESS):
                config = json.dumps({"peers": min(A_PROCESS, self._number - first), "boot": boot})
                process = subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "benchmarks.wire.idle_peers", config],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._processes.append(process)
                boot = _answer(process)["boot"]
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def have_met(self) -> bool:
        """Whether each hears all others."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("{}\n")
            process.stdin.flush()
        return min(int(_answer(process)["heard"]) for process in self._processes) >= self._number - 1


def _answer(process: subprocess.Popen[str]) -> Message:
    """What it says next.

    Raises:
        RuntimeError: it has ended.
    """
    assert process.stdout is not None
    text = process.stdout.readline()
    if not text:
        raise RuntimeError("some of the peers have ended")
    found: Message = json.loads(text)
    return found


def measured(peers: int, settle_s: float, seconds: float) -> dict[str, float]:
    """Bytes a second and peer.

    Raises:
        TimeoutError: they do not all hear each other.
        RuntimeError: some have ended.
    """
    with Peers(peers) as all_peers:
        began = time.monotonic()
        while not all_peers.have_met():
            if time.monotonic() - began > MEET_S:
                raise TimeoutError("not all have met")
            time.sleep(LOOK_S)
        met_s = time.monotonic() - began
        time.sleep(settle_s)
        slices = []
        for _ in range(max(1, round(seconds / SLICE_S))):
            before, at = loopback_bytes(), time.monotonic()
            time.sleep(SLICE_S)
            slices.append((loopback_bytes() - before) / (time.monotonic() - at) / peers)
            print(f"{slices[-1]:.0f} bytes/s each", flush=True)
        if not all_peers.have_met():
            raise TimeoutError("some have lost each other")
    return {"bytes_per_s": sum(slices) / len(slices), "most": max(slices), "met_s": met_s}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--peers", type=int, default=16, help="number of peers")
    parser.add_argument("--settle-s", type=float, default=90.0, help="seconds between the last meeting and the count")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the count")
    parser.add_argument("--inside", action="store_true", help="run in the current namespace")
    options = parser.parse_args(argv)
    if not options.inside:
        command = [sys.executable, "-m", "benchmarks.wire.idle", "--inside", *(argv or sys.argv[1:])]
        return subprocess.call(["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command])
    try:
        found = measured(options.peers, options.settle_s, options.seconds)
    except (TimeoutError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    bench.write(options, "wire/idle", {}, found)
    each = found["bytes_per_s"] / 1e3
    print(f"{options.peers} peers: {each:.2f} kB/s each, {found['most']:.0f} bytes/s at most in ten seconds")
    print(
        f"all had met after {found['met_s']:.1f} s; {LIMIT:g} kB/s are allowed, {'held' if each <= LIMIT else 'MISSED'}"
    )
    return int(each > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
