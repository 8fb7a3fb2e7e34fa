"""Quality laboratory: what codec, merge rule and schedule cost in loss (README.md has the method).

python -m benchmarks.quality list             sweeps, and how many of their cells have results
python -m benchmarks.quality run SWEEP ...    run the cells of these sweeps that have no result yet
python -m benchmarks.quality table            what is claimed: one row each, with baselines
python -m benchmarks.quality report           all other tables and plots
python -m benchmarks.quality scale            the gap to data parallel at four sizes, and its law (resumable)
python -m benchmarks.quality rule             what the product chooses by planned steps, against the best other row
python -m benchmarks.quality fine-tune        adapters and whole models against one machine (resumable)
python -m benchmarks.quality tie              real processes compared with the laboratory
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.netbed.namespaces import TestbedError
from benchmarks.netbed.topology import TopologyError
from benchmarks.quality import claims, fine_tuning, law, report, rule, runner, sweeps, tie
from benchmarks.wan.homes import HomesError
from p2pdiloco.demo.local_swarm import SwarmError
from p2pdiloco.training.learner_options import device_of


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality",
        description="Quality laboratory: what codec, merge rule and schedule cost in loss.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run sweeps")
    run.add_argument("sweeps", nargs="+", choices=sorted(sweeps.SWEEPS))
    run.add_argument("--eager", action="store_true", help="without torch.compile (slower after the first minute)")
    commands.add_parser("list", help="list the sweeps")
    report_ = commands.add_parser("report", help="print all tables and draw the plots")
    report_.add_argument("--plots", type=Path, help="folder for the plots, e.g. docs/plots")
    table = commands.add_parser("table", help="print one row per claim: loss, gap, token efficiency")
    table.add_argument("--json", type=Path, help="append the rows to this file")
    scale = commands.add_parser("scale", help="run the missing cells of the scaling law, and print it")
    scale.add_argument(
        "--largest",
        type=int,
        default=law.SIZES[-1].parameters,
        metavar="PARAMETERS",
        help=f"largest size; {law.HELD_BACK.parameters} adds the one that the law is tested on (default: %(default)s)",
    )
    scale.add_argument("--table", action="store_true", help="run nothing: print what is there")
    scale.add_argument("--eager", action="store_true", help="without torch.compile")
    scale.add_argument("--json", type=Path, help="append the rows to this file")
    commands.add_parser("rule", help="compare the product's choice of H and merge with all other rows at its bytes")
    scale.add_argument("--plots", type=Path, help="folder for the plot of gap and token efficiency by steps")
    tune = commands.add_parser("fine-tune", help="run the missing cells of the fine-tuning, and print its table")
    tune.add_argument("--table", action="store_true", help="run nothing: print what is there")
    for command in (run, scale, tune):
        command.add_argument("--device", default="cpu", help="of the learners: cpu, cuda (default: %(default)s)")
    tie_ = commands.add_parser("tie", help="compare with real processes")
    tie_.add_argument("--out", type=Path, default=Path("out/quality/tie"))
    tie_.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    tie_.add_argument("--json", type=Path, help="append the results to this file")
    tie_.add_argument(
        "--time-limit", type=float, default=600.0, metavar="SECONDS", help="limit for one run of real processes"
    )
    tie_.add_argument(
        "--line",
        metavar="RATE",
        help="a small model with the shipped defaults, each peer behind a line of this rate, as 20mbit (needs root)",
    )
    tie_.add_argument(
        "--round-trip", type=float, default=60.0, metavar="MS", help="with --line, in ms (default: %(default)s)"
    )
    tie_.add_argument("--peers", type=int, default=2, help="with --line, a core each (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.command in ("run", "scale", "fine-tune"):
        try:
            device_of(options.device)
        except ValueError as error:
            parser.error(str(error))
    if options.command == "tie" and options.peers < 2:
        parser.error(f"--peers {options.peers}: a run that is compared has 2 or more")
    match options.command:
        case "run":
            runner.work(sweeps.cells(options.sweeps), is_compiled=not options.eager, device=options.device)
        case "report":
            report.print_tables()
            if options.plots:
                report.draw(options.plots)
        case "table":
            print("\n".join(claims.table(options.json)))
        case "scale":
            if not law.sizes(options.largest):
                parser.error(f"--largest {options.largest}: the smallest size has {law.SIZES[0].parameters} parameters")
            if not options.table:
                wanted, there = [*law.cells(options.largest), *law.equal_cells(options.largest)], runner.rows()
                print(f"{sum(cell not in there for cell in wanted)} of {len(wanted)} cells are missing", flush=True)
                how: dict[str, Any] = {"is_compiled": not options.eager, "device": options.device}
                runner.work(itertools.chain(law.cells(options.largest), law.more_cells(options.largest)), **how)
                runner.work(law.equal_cells(options.largest), **how, is_narrow=False)
            print("\n".join(law.lines(options.largest, options.json)))
            if options.plots:
                law.draw(options.plots, options.largest)
        case "rule":
            print("\n".join(rule.lines()))
        case "fine-tune":
            if not options.table:
                runner.work(fine_tuning.cells(), device=options.device)
            print("\n".join(fine_tuning.lines()))
        case "tie":
            try:
                line = tie.Line(options.line, options.round_trip, options.peers) if options.line else None
                return 0 if tie.tie(options.out, options.seeds, options.json, options.time_limit, line) else 1
            except (SwarmError, HomesError, TestbedError, TopologyError) as error:
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
