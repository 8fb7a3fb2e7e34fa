"""Shared parts of all benchmarks: options, result rows, medians and tables.

    options = bench.parser(__doc__, rows="system").parse_args()
    bench.write(options, "wan/speed", {"system": "ddp"}, figures)
    print(bench.table("system", COLUMNS, {"ddp": figures}))

``plots.py`` draws, and ``record.py`` adds versions, commit and machine to each row. Every benchmark has ``--json``,
which appends rows, and most have ``--plot``. A row's settings are all options except output locations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record

ROOT = Path(__file__).parents[1]
PLACES = ("json", "plot", "beside", "keep", "judge", "verbose")
"""Options that change no figure."""

Column = tuple[str, str, str]
"""Title, name of the figure, format."""
Figures = Mapping[str, Any]


class _Help(argparse.HelpFormatter):
    """Tells defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, is_told = action.help or "", action.default not in (None, False, argparse.SUPPRESS)
        return f"{text} (default: %(default)s)" if text and is_told and "(default" not in text else text


def parser(
    doc: str | None, *, rows: str = "row", has_plot: bool = True, has_keep: bool = False
) -> argparse.ArgumentParser:
    """A benchmark's command line, to which it adds its own options. ``doc``: its module's; the first sentence is told.
    ``rows``: of what there is one in ``--json``."""
    text = " ".join((doc or "").split("\n\n")[0].split())
    found = argparse.ArgumentParser(prog=_name(), description=text, formatter_class=_Help)
    found.add_argument("--json", type=Path, metavar="FILE", help=f"append one JSON object per {rows}")
    if has_plot:
        found.add_argument("--plot", type=Path, metavar="FILE", help="write a plot (PNG)")
    if has_keep:
        found.add_argument("--keep", metavar="FOLDER", help="keep logs and state in this folder")
    return found


def _name() -> str:
    path = Path(sys.argv[0]).resolve()
    if not path.is_relative_to(ROOT / "benchmarks"):
        return path.name
    return "python -m " + ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def settings(options: argparse.Namespace) -> dict[str, object]:
    """What a row's figures depend on."""
    given = {name: value for name, value in vars(options).items() if name not in PLACES}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def write(options: argparse.Namespace, name: str, more: Mapping[str, object], figures: Figures) -> record.Row:
    """Append a row to ``--json``, if that is wanted; the row. ``more``: settings beyond the options."""
    row = record.row(name, {**settings(options), **more}, figures)
    if options.json is not None:
        record.append(options.json, [row])
    return row


def known(path: Path | None, name: str, key: str) -> dict[str, dict[str, Any]]:
    """What ``--json`` has of the benchmark ``name`` from earlier, by the setting ``key``: it need not be made again."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["settings"][key]: row["figures"] for row in rows if row["benchmark"] == name}


def fill(
    options: argparse.Namespace, name: str, key: str, works: Iterable[tuple[str, Callable[[], dict[str, Any]]]]
) -> dict[str, dict[str, Any]]:
    """The figures of all of ``works`` whose names have ``--only`` in them: from earlier, or made and written now."""
    found = known(options.json, name, key)
    for title, work in works:
        if options.only in title and title not in found:
            print(title, "...", flush=True)
            found[title] = work()
            write(options, name, {key: title}, found[title])
    return found


def medians(runs: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
    """Of each figure; None where a run has none."""
    found: dict[str, float | None] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        found[name] = None if None in values else statistics.median(value for value in values if value is not None)
    return found


def table(corner: str, columns: Sequence[Column], rows: Mapping[str, Figures]) -> str:
    """Markdown, in columns that are equally wide; what was not measured is a dash."""
    lines = [[corner, *(title for title, _, _ in columns)]]
    lines += [[name, *(_cell(one.get(key), form) for _, key, form in columns)] for name, one in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    return "\n".join([shown[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *shown[1:]])


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
