"""Goodput while chips fail: data parallel, elastic data parallel and p2pdiloco, beside the paper's table.

    python -m benchmarks.scale.goodput --json FILE [--plot FILE] [--short] [--only TEXT] [--hours 16]

Cells that are in ``--json`` are not made again. islands.py simulates islands of chips, worlds.py the protocol in
virtual time. docs/results.md has the table.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import bench
from benchmarks.scale import plots
from benchmarks.scale.islands import CHIPS, DATA_PARALLEL, DECOUPLED, ELASTIC, Constants, alone
from benchmarks.scale.worlds import HUB, Figures, make_islands, make_world, measure
from p2pdiloco.protocol.ids import PeerId

PEERS = (2, 4, 8, 16, 32, 64)
PEER_HOURS = 16.0
"""Simulated: this many hours over the peers of a cell, at least a quarter of one and at most four."""
SYNCER_OUT_S, SYNCER_EVERY_S = 300.0, 1800.0
"""Where the syncer fails, and where one of our peers does."""

Cell = tuple[str, Callable[[], dict[str, Any]]]


def hours_of(peers: int) -> float:
    """Of a cell."""
    return min(4.0, max(0.25, PEER_HOURS / peers))


def published(system: str, chips: int) -> float | None:
    """The paper's cell, %."""
    rows = {"data parallel": DATA_PARALLEL, "elastic data parallel": ELASTIC}
    rows |= {f"p2pdiloco, M = {peers}": row for peers, row in DECOUPLED.items()}
    return rows[system][CHIPS.index(chips)] if system in rows else None


def by_data_parallel(chips: int, *, is_elastic: bool, failures: int) -> Figures:
    """One island, no protocol."""
    return alone(chips, Constants(), is_elastic=is_elastic, failures=failures)


def by_protocol(chips: int, peers: int, hours: float, seed: int, fault: str = "") -> Figures:
    """The machine's own figures. ``fault``: the hub merges and never fails ("hub"), or it fails ("hub fails"), or one
    peer after the other does ("peer fails")."""
    islands = make_islands(chips, peers, Constants(), seed)
    world = make_world(islands, seed=seed, has_hub=fault.startswith("hub"))
    if fault.endswith("fails"):
        hit = [HUB] if fault.startswith("hub") else list(islands)
        for i in range(int(hours * 3600 / SYNCER_EVERY_S)):
            at = 600.0 + i * SYNCER_EVERY_S

            def crash(name: PeerId) -> None:
                world.crash(name, keeps_disk=True, restart_s=SYNCER_OUT_S)

            world.schedule(at, None, crash, hit[i % len(hit)])
    return measure(world, islands, 3600 * hours, told=lambda share: print(f"{share:4.0%}", end="\r", file=sys.stderr))


def cells(options: Namespace) -> Iterator[Cell]:
    """Name and work of each."""
    chips_wanted = (CHIPS[3],) if options.short else CHIPS
    for chips in chips_wanted:
        for system, is_elastic in (("data parallel", False), ("elastic data parallel", True)):
            failures = 500 if options.short else 10_000
            yield (
                f"{system}, {chips}",
                lambda c=chips, e=is_elastic, f=failures: by_data_parallel(c, is_elastic=e, failures=f),  # type: ignore[misc]
            )
    for peers in (2, 4) if options.short else PEERS:
        for chips in chips_wanted if peers <= 16 else CHIPS[-2:]:
            hours = 0.1 if options.short else options.hours or hours_of(peers)
            yield (
                f"p2pdiloco, M = {peers}, {chips}",
                lambda c=chips, p=peers, h=hours: by_protocol(c, p, h, options.seed),  # type: ignore[misc]
            )
    peers, hours = (4, 0.1) if options.short else (8, 2.0)
    for fault in ("hub", "hub fails", "peer fails"):
        yield (
            f"{fault}, M = {peers}, {CHIPS[3]}",
            lambda f=fault, p=peers, h=hours: by_protocol(CHIPS[3], p, h, options.seed, f),  # type: ignore[misc]
        )


PERCENTS = ("goodput", "computed", "stopped", "chips_away", "uptime")
COLUMNS: list[bench.Column] = [
    ("goodput, %", "goodput_percent", ".1f"),
    ("paper, %", "published", ".0f"),
    ("computed, %", "computed_percent", ".1f"),
    ("islands stopped, %", "stopped_percent", ".1f"),
    ("slices away, %", "chips_away_percent", ".1f"),
    ("uptime, %", "uptime_percent", ".1f"),
    ("tokens lost", "tokens_lost", ".0f"),
    ("contributors a commit", "contributors", ".2f"),
    ("steps a contribution", "staleness_steps", ".1f"),
    ("versions", "versions", ".0f"),
    ("forks", "forks", ".0f"),
    ("violations", "violations", ".0f"),
]


def shown(name: str, figures: Figures) -> dict[str, Any]:
    """A row of the table."""
    system, _, chips = name.rpartition(", ")
    percents = {f"{key}_percent": 100 * figures[key] for key in PERCENTS if key in figures}
    return {**figures, **percents, "published": published(system, int(chips))}


def main() -> None:
    """Make what is missing, tell all."""
    parser = bench.parser(__doc__, rows="cell")
    parser.add_argument("--seed", type=int, default=1, help="seed of the world")
    parser.add_argument(
        "--hours", type=float, help="simulated hours per cell (default: 16 / peers, between 0.25 and 4)"
    )
    parser.add_argument("--only", default="", help="only cells whose name contains this")
    parser.add_argument("--short", action="store_true", help="one short cell, as a quick check")
    options = parser.parse_args()
    found = bench.fill(options, "scale/goodput", "cell", cells(options))
    rows = {name: shown(name, one) for name, one in found.items()}
    print(bench.table("system, chips", COLUMNS, rows))
    if options.plot is not None:
        plots.goodput(options.plot, rows)


if __name__ == "__main__":
    main()
