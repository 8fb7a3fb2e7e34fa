"""Seeds in a process of their own, an outcome a line, as JSON: see ``report``, which starts it.

``python -m p2pdiloco.peersim.worker FIRST STOP STEP [BUG]``: every STEP-th seed from FIRST, below STOP; with BUG one of
``simulation.planted`` is in the program.
"""

from __future__ import annotations

import logging
import sys
import warnings

from p2pdiloco.peersim import knobs


def main() -> None:
    """Run them."""
    first, stop, step = map(int, sys.argv[1:4])
    for name in sys.argv[4:]:
        _plant(name)
    knobs.install()
    warnings.simplefilter("ignore")
    logging.getLogger("p2pdiloco").setLevel(logging.CRITICAL + 1)

    import msgspec
    import torch

    from p2pdiloco.peersim.seeds import run_seed

    torch.set_num_threads(1)
    for seed in range(first, stop, step):
        sys.stdout.write(msgspec.json.encode(run_seed(seed)).decode() + "\n")
        sys.stdout.flush()


def _plant(name: str) -> None:
    from p2pdiloco.simulation.planted import BUGS
    from p2pdiloco.simulation.planting import plant

    plant(next(bug for bug in BUGS if bug.name == name))


if __name__ == "__main__":
    main()
