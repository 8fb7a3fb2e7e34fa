"""The quality laboratory::

python -m benchmarks.quality run SWEEP ...    run the cells of these sweeps that are not in the results yet
python -m benchmarks.quality list             the sweeps, and how much of each is there
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.quality import runner, sweeps


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description="The quality laboratory.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run sweeps")
    run.add_argument("sweeps", nargs="+", choices=sorted(sweeps.SWEEPS))
    run.add_argument("--eager", action="store_true", help="without torch.compile (slower, but for the first minute)")
    commands.add_parser("list", help="the sweeps")
    options = parser.parse_args(argv)
    match options.command:
        case "run":
            runner.work(sweeps.cells(options.sweeps), is_compiled=not options.eager)
        case _:
            there = runner.rows()
            for name in sweeps.SWEEPS:
                found = sweeps.cells([name])
                print(f"{name:12} {sum(cell in there for cell in found):3} of {len(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
