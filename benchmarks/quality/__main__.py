"""The quality laboratory::

python -m benchmarks.quality run SWEEP ...    run the cells of these sweeps that are not in the results yet
python -m benchmarks.quality list             the sweeps, and how much of each is there
python -m benchmarks.quality table            what is claimed: one row each, with baselines
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.quality import claims, report, runner, sweeps, tie
from p2pdiloco.demo.local_swarm import SwarmError


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description="The quality laboratory.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run sweeps")
    run.add_argument("sweeps", nargs="+", choices=sorted(sweeps.SWEEPS))
    run.add_argument("--eager", action="store_true", help="without torch.compile (slower, but for the first minute)")
    commands.add_parser("list", help="the sweeps")
    report_ = commands.add_parser("report", help="tables and plots")
    report_.add_argument("--plots", type=Path, help="a folder for the plots, e.g. docs/plots")
    table = commands.add_parser("table", help="every claim's row: three seeds, test split, token efficiency")
    table.add_argument("--json", type=Path, help="append the rows here")
    tie_ = commands.add_parser("tie", help="compare with real processes")
    tie_.add_argument("--out", type=Path, default=Path("out/quality/tie"))
    tie_.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    tie_.add_argument("--json", type=Path, help="append rows of results here")
    tie_.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="of one real run")
    options = parser.parse_args(argv)
    match options.command:
        case "run":
            runner.work(sweeps.cells(options.sweeps), is_compiled=not options.eager)
        case "report":
            report.print_tables()
            if options.plots:
                report.draw(options.plots)
        case "table":
            print("\n".join(claims.table(options.json)))
        case "tie":
            try:
                return 0 if tie.tie(options.out, options.seeds, options.json, options.time_limit) else 1
            except SwarmError as error:
                print(f"the tie failed: {error}", file=sys.stderr)
                return 1
        case _:
            there = runner.rows()
            for name in sweeps.SWEEPS:
                found = sweeps.cells([name])
                print(f"{name:12} {sum(cell in there for cell in found):3} of {len(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
