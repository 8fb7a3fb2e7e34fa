"""Held-out loss of honest peers beside members that lie, with the plain mean and with RDA: the chaos plan ``liars``.

    python -m benchmarks.hostile.members --json rows.jsonl --plot plot.png    # every attack, one of four: an hour
    python -m benchmarks.hostile.members --attacks tokens+flip hidden
    python -m benchmarks.hostile.members --peers 5 --liars 2                  # two that merge as a cabal

A row is a merge rule and an attack (``tests/chaos/liars.py``). Rows that ``--json`` has are not made again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import bench, plots
from tests.chaos.liars import MERGES, read_liars_plan, run_plan
from tests.chaos.schedule import find_plan

TITLES = {"direct": "plain mean, every 6 steps", "rda": "RDA, every 24 steps"}
SHOWN = 1.5
"""Ratio at which a bar ends at the latest."""
COLUMNS: tuple[bench.Column, ...] = (
    ("held-out loss", "held_out", ".3f"),
    ("without the liars", "held_out_honest", ".3f"),
    ("ratio", "ratio", ".3f"),
    ("honest tokens at the end", "honest_share", ".0%"),
    ("longest standstill, s", "standstill_s", ".1f"),
    ("honest excluded", "honest_banned", "d"),
    ("honest per counted token", "honest_counted", ".2f"),
    ("contributors", "contributors", ".1f"),
    ("owned by liars", "owned", ".0%"),
    ("named", "named", ""),
)

Table = dict[str, dict[str, Any]]


def measured(options: argparse.Namespace, merge: str, folder: Path) -> Table:
    """The rows of one merge rule by attack, those of earlier included."""
    plan = read_liars_plan(
        find_plan("liars"),
        attacks=options.attacks or (),
        peers=options.peers,
        liars=options.liars,
        merge=merge,
        seed=options.seed,
    )
    first = plan.groups[0]
    name = f"hostile/members/{merge}/{first.liars}-of-{first.peers}"
    found = bench.known(options.json, name, "attack")
    left = tuple(attack for attack in first.attacks if attack not in found)
    if left:
        plan = msgspec.structs.replace(plan, groups=(msgspec.structs.replace(first, attacks=left),))
        for row in run_plan(plan, folder / merge, lambda line: print(line, flush=True)):
            found[row.attack] = msgspec.to_builtins(row)
            bench.write(options, name, {"attack": row.attack}, found[row.attack])
    return {attack: found[attack] for attack in first.attacks}


def draw(tables: dict[str, Table], path: Path) -> None:
    """One group of bars an attack that all merge rules have, one bar a merge rule."""
    names = [name for name in next(iter(tables.values())) if all(name in rows for rows in tables.values())]
    with plots.figure(path, size=(8, 0.45 * len(names) + 1.2), title="Held-out loss beside liars") as axes:
        ratios = {TITLES[merge]: [min(SHOWN, rows[n]["ratio"]) for n in names] for merge, rows in tables.items()}
        series = {title: [100.0 * (ratio - 1.0) for ratio in rows] for title, rows in ratios.items()}
        unit = f"% above the loss without the liar (bars end at {100 * (SHOWN - 1):g})"
        plots.bars(axes, names, series, unit, form="%+.1f")
        axes.axvline(2.0, color="0.5", linewidth=0.8, linestyle="--")
        axes.axvline(0.0, color="black", linewidth=0.8)


def main() -> None:
    """The command line."""
    parser = bench.parser(__doc__, rows="merge rule and attack", has_keep=True)
    parser.add_argument("--seed", type=int, default=1, help="seed of the runs")
    parser.add_argument("--attacks", nargs="+", help="attacks; join several lies by + (default: the plan's)")
    parser.add_argument("--peers", type=int, help="all of them (default: the plan's)")
    parser.add_argument("--liars", type=int, help="of them (default: the plan's)")
    parser.add_argument("--merges", nargs="+", choices=list(MERGES), default=list(MERGES), help="merge rules")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        tables = {merge: measured(options, merge, Path(options.keep or temporary)) for merge in options.merges}
    for merge, rows in tables.items():
        print(f"\n{TITLES[merge]}\n{bench.table('attack', COLUMNS, rows)}")
    if options.plot is not None:
        draw(tables, options.plot)


if __name__ == "__main__":
    main()
