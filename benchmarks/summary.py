"""One table of what exchanges, nodes, starts and lines cost, from the benchmarks that measure them.

    python -m benchmarks.summary [--only WORDS] [--beside TREE] [--json FILE]

Runs each benchmark below with its usual settings, one after the other, and shows one figure of each row that it wrote:
beside the most that is asked, and beside another system where one was measured in the same run. Measures whose
benchmark wrote no such row are named, and the exit status is then 1. ``--only exchange`` runs those whose names have
that word. All of them take about twenty minutes; those of lines need root. With ``--beside``, a worktree of
another commit, in which ``pip install -e .`` has built the library, does each of them in turn with this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import bench, record
from benchmarks.overhead import SCRIPT, SHIPPED

COLUMNS: tuple[bench.Column, ...] = (
    ("figure", "figure", ".3g"),
    ("asked", "asked", ".3g"),
    ("other system", "peer", ".3g"),
    ("other commit", "beside", ".3g"),
    ("ratio", "ratio", ".2f"),
    ("load", "load", ".1f"),
)

SYSTEMS = (("p2pdiloco", "int4"), ("gloo", "bf16"))


class Measure(NamedTuple):
    """One row: a figure of one row that a benchmark writes."""

    name: str
    command: str
    """Module below ``benchmarks``, and its options."""
    key: str
    """Name of the figure in that row."""
    asked: float
    """Largest figure that is good enough."""
    where: Mapping[str, object] = {}
    """Settings by which the row is found."""
    peer: Mapping[str, object] | None = None
    """Settings by which the other system's row is found."""
    unit: float = 1.0
    """Divisor of the figure, for other units than the benchmark's."""


def _exchange(link: str, title: str, asked: float) -> Measure:
    ours, gloo = ({"system": system, "codec": codec, "link": link} for system, codec in SYSTEMS)
    command = f"wire.exchange --all --among p2pdiloco gloo --only {link} --rounds 3"
    return Measure(f"exchange of 100M parameters, {title}: s (gloo bf16)", command, "wall_s", asked, ours, gloo)


KERNELS = "wire.kernels --elements 1e7"
ALONE = ("overhead --rounds 2 --seconds 20", "lost", 1.0)
MEASURES = (
    _exchange("200mbit", "200 Mbit/s", 2.0),
    _exchange("1gbit", "1 Gbit/s", 0.53),
    _exchange("2.5gbit", "2.5 Gbit/s", 0.56),
    _exchange("lo", "loopback", 0.5),
    Measure("exchange, arithmetic alone, 2 peers: CPU s", "wire.arithmetic", "sum_s", 0.34),
    Measure("encode: ns a parameter (torch)", KERNELS, "encode", 0.5, {"by": "C"}, {"by": "torch"}, 10.0),
    Measure("outer step: ns a parameter (torch)", KERNELS, "step_bfloat16", 0.65, {"by": "C"}, {"by": "torch"}, 10.0),
    Measure("node at rest, 30M: bytes a parameter", "memory --rounds 20", "at_rest_bytes_per_parameter", 7.7 + 50 / 30),
    Measure("start: CPU s to the first step", "churn.starts", "cpu_s", 2.5, {"what": f"{bench.ROOT.name}: start"}),
    Measure("join: CPU s to the first step", "churn.starts", "cpu_s", 2.5, {"what": f"{bench.ROOT.name}: join"}),
    Measure("one peer alone, stdlib-tiny: % slower than a plain loop", *ALONE, {"way": SHIPPED}, unit=-0.01),
    Measure("one peer alone, with DiLoCo: % slower", *ALONE, {"way": SCRIPT}, unit=-0.01),
    Measure("a shard version, 2 peers: CPU ms each", "scale.growth --peers 2", "cpu_ms", 1.5),
    Measure("16 idle peers: kB/s each", "wire.idle", "bytes_per_s", 4.0, unit=1e3),
)


def find(rows: Iterable[Mapping[str, Any]], where: Mapping[str, object]) -> Mapping[str, Any] | None:
    """Return the last row that has the settings ``where``."""
    found = None
    for row in rows:
        if all(row["settings"].get(name) == value for name, value in where.items()):
            found = row
    return found


def summarize(
    measure: Measure, rows: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]] = (), tree: str = ""
) -> dict[str, float | None] | None:
    """Return the figures of one measure, from what its benchmark wrote here, and ``beside``, in the folder ``tree``.

    None: it wrote none here.
    """
    own = find(rows, measure.where)
    if own is None or own["figures"].get(measure.key) is None:
        return None
    other = None if measure.peer is None else find(rows, measure.peer)
    there = None if other is None else other["figures"].get(measure.key)
    its_names = {name: str(value).replace(f"{bench.ROOT.name}:", f"{tree}:") for name, value in measure.where.items()}
    other_commit = find(beside, its_names)
    before = None if other_commit is None else other_commit["figures"].get(measure.key)
    return {
        "figure": own["figures"][measure.key] / measure.unit,
        "beside": None if before is None else before / measure.unit,
        "ratio": None if not before else own["figures"][measure.key] / before,
        "asked": measure.asked,
        "peer": None if there is None else there / measure.unit,
        "load": own["load_1min"],
    }


def run(command: str, folder: Path, tree: Path = bench.ROOT) -> list[dict[str, Any]]:
    """Run a benchmark of ``tree``; return the rows that it wrote. Some end with status 1 when they miss a target, and
    have rows."""
    module, *options = command.split()
    path = folder / "rows.jsonl"
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", f"benchmarks.{module}", *options, "--json", str(path)]
    subprocess.run(words, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, stdout=sys.stderr, check=False)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, record."""
    parser = bench.parser(__doc__, rows="measure", has_plot=False)
    parser.add_argument("--only", default="", metavar="WORDS", help="measures whose names have these words")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="worktree of another commit, measured in turn")
    options = parser.parse_args(argv)
    wanted = [measure for measure in MEASURES if options.only in measure.name]
    if not wanted:
        print(f"no measure has {options.only!r} in its name: {'; '.join(m.name for m in MEASURES)}", file=sys.stderr)
        return 2
    found: dict[str, Mapping[str, Any]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for command in dict.fromkeys(measure.command for measure in wanted):
            print(f"benchmarks.{command} ...", file=sys.stderr, flush=True)
            rows, beside, tree = run(command, Path(folder)), list[dict[str, Any]](), ""
            if options.beside is not None:
                tree = options.beside.resolve().name
                beside = run(command, Path(folder), options.beside.resolve())
            for measure in wanted:
                if measure.command == command:
                    figures = summarize(measure, rows, beside, tree)
                    if figures is None:
                        failed.append(measure.name)
                        continue
                    found[measure.name] = figures
                    if options.json is not None:
                        record.append(options.json, [record.row("summary", {"measure": measure.name}, figures)])
    print(bench.table("measure", COLUMNS, found))
    if failed:
        print(f"not measured: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
