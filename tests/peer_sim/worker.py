"""Seeds in a process of their own, an outcome a line, as JSON: see ``report``, which starts it.

``python -m tests.peer_sim.worker BUG SEED...``; without a bug: ''
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator

from tests.peer_sim import tuning


def main() -> None:
    """Run them."""
    prepare(sys.argv[1])
    for outcome in outcomes(map(int, sys.argv[2:])):
        sys.stdout.write(outcome.decode() + "\n")
        sys.stdout.flush()


def prepare(bug: str = "") -> None:
    """Before anything else of ours is imported; with one of ``tests.seeded_bugs.peer`` in the program, or none."""
    if bug:
        from tests.seeded_bugs.inject import plant
        from tests.seeded_bugs.peer import BUGS

        plant(next(known for known in BUGS if known.name == bug))
    tuning.install()
    warnings.simplefilter("ignore")
    logging.getLogger("p2pdiloco").setLevel(logging.CRITICAL + 1)


def outcomes(seeds: Iterable[int]) -> Iterator[bytes]:
    """Of every seed, encoded."""
    import msgspec
    import torch

    from tests.peer_sim.seeds import run_seed

    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage
    for seed in seeds:
        yield msgspec.json.encode(run_seed(seed))


if __name__ == "__main__":
    main()
