"""Planted bugs, and the first seed that finds each: a line of JSON for every bug, in a process of its own.

``python -m tests.peer_sim.bug_search FIRST STOP BUG...``: seeds from FIRST, below STOP, for each BUG of
``tests.seeded_bugs.peer``.

Rules of this file:
1. What others wrote is imported once; a bug is planted in a fork, before anything of ours is imported there.
2. A bug that takes its process with it, or keeps it computing for longer than the seeds need, is found, too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from importlib import import_module

FOREIGN = (
    "torch",
    "numpy",
    "msgspec",
    "asyncio",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "safetensors.torch",
)
START_S, SEED_S = 60, 3
"""Of computing: more than a fork, and than a seed, needs."""


def main() -> None:
    """Hunt them."""
    first, stop = map(int, sys.argv[1:3])
    for name in FOREIGN:
        import_module(name)
    for bug in sys.argv[3:]:
        sys.stdout.write(json.dumps({"name": bug, **_found(bug, range(first, stop))}) + "\n")
        sys.stdout.flush()


def _found(bug: str, seeds: range) -> dict[str, object]:
    """``seed`` (None: it survived), ``sentence`` and how many seeds were ``tried``."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        os.dup2(writing, 1)
        _hunt(bug, seeds)
    os.close(writing)
    with os.fdopen(reading) as said:
        lines = said.read().splitlines()
    _, status = os.waitpid(process, 0)
    tried = [json.loads(line) for line in lines]
    found = next((outcome for outcome in tried if outcome["violations"]), None)
    if found is not None:
        return {"seed": found["seed"], "sentence": found["violations"][0], "tried": len(tried)}
    if status and len(tried) < len(seeds):
        hangs = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        sentence = "5: it goes on for ever" if hangs else "5: it takes its process with it"
        return {"seed": seeds[len(tried)], "sentence": sentence, "tried": len(tried) + 1}
    return {"seed": None, "sentence": "", "tried": len(tried)}


def _hunt(bug: str, seeds: range) -> None:
    """In the fork: outcomes on standard output, until one is a violation."""
    limit_s = START_S + SEED_S * len(seeds)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 10))
    status = 1
    try:
        from tests.peer_sim import worker

        worker.prepare(bug)
        for outcome in worker.outcomes(seeds):
            sys.stdout.write(outcome.decode() + "\n")
            sys.stdout.flush()
            if json.loads(outcome)["violations"]:
                break
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
