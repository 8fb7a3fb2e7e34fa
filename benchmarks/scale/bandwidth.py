"""Compute utilization by line rate, by the public bandwidth model (``p2pdiloco/planner.py``).

    python -m benchmarks.scale.bandwidth [--json FILE] [--plot FILE]

Pure arithmetic: the published cells beside ours, what each system needs for 2B to 100B parameters, 2 to 64 peers, 10
Mbit/s to 100 Gbit/s and every codec, and what ``benchmarks.wan.bandwidth`` measured over throttled lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from benchmarks import bench
from benchmarks.scale import plots
from p2pdiloco.planner import SYSTEMS, Training, all_reduced_bits

CODECS = {"bf16": 1.348, "int8": 0.954, "int4": 0.428, "int4-coarse": 0.271, "int2": 0.208}
"""Bytes a parameter, measured (docs/results.md); the paper's int4 is 0.5 without scales and zstd."""
SIZES = (2e9, 5e9, 12e9, 30e9, 100e9)
PEERS = (2, 4, 8, 16, 32, 64)
RATES = tuple(10.0 ** (7 + i / 4) for i in range(17))
"""10 Mbit/s to 100 Gbit/s."""
PAPER = Training(parameters=5e9, peers=8)
Described = TypeVar("Described")
"""Description of a run, of any model."""

Cell = tuple[str, float, float]


def least_rate(utilisation: Callable[[Described, float], float], training: Described, wanted: float = 0.95) -> float:
    """Return the lowest link rate, in bits per second, at which the utilisation is at least ``wanted``."""
    low, high = 1.0, 1e16
    while high / low > 1 + 1e-9:
        rate = (low * high) ** 0.5
        low, high = (low, rate) if utilisation(training, rate) >= wanted else (rate, high)
    return high


def sustained(training: Training, bits_per_s: float) -> float:
    """Return the share of the rounds that a link can carry in this project; 1: fragments leave as fast as they come."""
    return min(1.0, bits_per_s * training.interval_s * training.fragments / all_reduced_bits(training))


def published() -> list[Cell]:
    """What is said, the figure of others, ours; Gbit/s at 95 % (the last: when all is on time)."""
    bf16 = msgspec.structs.replace(PAPER, up_bytes=2.0, down_bytes=2.0)
    dp = least_rate(SYSTEMS["data parallel"], bf16) / 1e9
    streaming = least_rate(SYSTEMS["Streaming DiLoCo"], PAPER) / 1e9
    return [
        ("data parallel, bf16 (paper)", 198.0, dp),
        ("data parallel, bf16 (public simulator)", 196.0, dp),
        ("Streaming, int4, H = P = 24 (public simulator)", 1.38, streaming),
        (
            "Decoupled, int4, one way, all on time (paper)",
            0.84,
            least_rate(SYSTEMS["Decoupled DiLoCo, star"], PAPER, 1) / 1e9,
        ),
    ]


MEASURED_PARAMETERS, MEASURED_PEERS = 3_344_640, 4
"""Of the model and the sites of ``benchmarks.wan.bandwidth``."""
MEASURED = (
    ("data parallel, float32", "data parallel", 1, 4.0, 353.6),
    ("DiLoCo, H = 100, float32", "DiLoCo", 100, 4.0, 55.3),
    ("p2pdiloco, H = P = 24, int4", "p2pdiloco", 24, 0.43, 1.24),
)
"""Measurements on throttled lines (docs/results.md, "Least bandwidth"): system, H, bytes, Mbit a step at 95 %."""


def compared() -> list[Cell]:
    """What was said, Mbit a step as measured over throttled lines, and by the model."""
    found = []
    for name, system, sync_every, parameter_bytes, measured in MEASURED:
        training = Training(
            parameters=MEASURED_PARAMETERS,
            peers=MEASURED_PEERS,
            sync_every=sync_every,
            fragments=24 if system == "p2pdiloco" else 1,
            overlap=4,
            up_bytes=parameter_bytes,
            down_bytes=parameter_bytes,
        )
        found.append((name, measured, least_rate(SYSTEMS[system], training) / 1e6))
    return found


def needed(training: Training) -> dict[str, float]:
    """Gbit/s for 95 %, by system; data parallel and DiLoCo exchange bf16, the star the paper's int4."""
    others = {"data parallel": 2.0, "DiLoCo": 2.0, "Streaming DiLoCo": 0.5, "Decoupled DiLoCo, star": 0.5}
    found = {}
    for name, system in SYSTEMS.items():
        size = others.get(name, training.up_bytes)
        told = msgspec.structs.replace(training, up_bytes=size, down_bytes=others.get(name, training.down_bytes))
        found[name] = least_rate(system, told) / 1e9
    return found


def cells() -> dict[str, dict[str, float]]:
    """Gbit/s for 95 % of all sizes, swarms, codecs; H = P = 24, tau = 2, 1 s a step."""
    found = {}
    for parameters in SIZES:
        for peers in PEERS:
            for codec, size in CODECS.items():
                training = Training(parameters=parameters, peers=peers, up_bytes=size, down_bytes=size)
                found[f"{parameters / 1e9:g}B, M = {peers}, {codec}"] = needed(training)
    return found


def curves(training: Training, rates: Sequence[float] = RATES) -> dict[str, list[float]]:
    """Utilisation, of each system with what it exchanges."""
    bf16 = msgspec.structs.replace(training, up_bytes=2.0, down_bytes=2.0)
    half = msgspec.structs.replace(training, up_bytes=0.5, down_bytes=0.5)
    by_name = {"data parallel": bf16, "DiLoCo": bf16, "p2pdiloco": training}
    return {n: [system(by_name.get(n, half), rate) for rate in rates] for n, system in SYSTEMS.items()}


def main() -> None:
    """Tables."""
    options = bench.parser(__doc__, rows="cell").parse_args()
    columns: list[bench.Column] = [
        ("theirs", "theirs", ".4g"),
        ("the model", "ours", ".4g"),
        ("error, %", "error", "+.1f"),
    ]
    for title, found in (("Gbit/s, 5B, M = 8, 1 s a step", published()), ("Mbit a step, measured", compared())):
        rows = {name: {"theirs": a, "ours": b, "error": 100 * (b / a - 1)} for name, a, b in found}
        print(bench.table(title, columns, rows), end="\n\n")
        for name, figures in rows.items():
            bench.write(options, "scale/bandwidth", {"cell": name}, figures)
    all_cells = cells()
    for name, figures in all_cells.items():
        bench.write(options, "scale/bandwidth", {"cell": name}, figures)
    systems: list[bench.Column] = [(name, name, ".3g") for name in SYSTEMS]
    shown = {name: one for name, one in all_cells.items() if name.startswith(("2B", "12B", "100B")) and "M = 8" in name}
    print(bench.table("Gbit/s for 95 %", systems, shown), end="\n\n")
    training = Training(parameters=12e9, peers=8, up_bytes=CODECS["int4"], down_bytes=CODECS["int4"])
    found_curves = curves(training)
    table = {
        f"{rate / 1e6:,.0f} Mbit/s": {n: 100 * c[i] for n, c in found_curves.items()} for i, rate in enumerate(RATES)
    }
    for i, row in enumerate(table.values()):
        row["rounds"] = 100 * sustained(training, RATES[i])
    percents: list[bench.Column] = [
        *((name, name, ".1f") for name in SYSTEMS),
        ("p2pdiloco: rounds kept", "rounds", ".1f"),
    ]
    print(bench.table("12B, M = 8: utilisation, %", percents, table))
    if options.plot is not None:
        fine = [10.0 ** (7 + i / 32) for i in range(129)]
        plots.bandwidth(options.plot, fine, curves(training, fine))


if __name__ == "__main__":
    main()
