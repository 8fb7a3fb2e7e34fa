"""What the transport and the exchange measured, from the rows that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import bars, figure

Rows = Sequence[Mapping[str, Any]]


def transport(path: Path, rows: Rows) -> None:
    """Throughput and CPU, deviation from budgets, round trips. What was not measured leaves its panel empty."""

    def of(kind: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        return [(row["settings"], row["figures"]) for row in rows if row["benchmark"] == f"transport {kind}"]

    with figure(path, 3, size=(18, 5), title=f"transport, {conditions(rows)}") as (left, middle, right):
        found = of("throughput")
        speed = {"Gbit/s": [f["gbit_per_s"] for _, f in found]}
        speed["CPU s per GB, both ends"] = [f["cpu_s_per_gb"] for _, f in found]
        bars(left, [size_name(s["payload_bytes"]) for s, _ in found], speed, "one pair over loopback, TLS")

        found = of("budget")
        names = [f"{s['mbit_per_s']} Mbit/s {s['direction']}" for s, _ in found]
        off = {"mean": [100 * f["mean"] for _, f in found]}
        off["worst second"] = [100 * f["worst_second"] for _, f in found]
        bars(middle, names, off, "% off the budget")
        for limit in (-3, 3):
            middle.axvline(limit, color="black", linewidth=0.5)

        found = of("round trip")
        names = ["no budget" if s["up_mbit_per_s"] is None else f"{s['up_mbit_per_s']} Mbit/s" for s, _ in found]
        trips = {"idle": [f["idle_ms"] for _, f in found], "under bulk": [f["bulk_ms"] for _, f in found]}
        trips["1.5 idle + a chunk"] = [1.5 * f["idle_ms"] + (f["chunk_ms"] or 0.0) for _, f in found]
        bars(right, names, trips, "round trip of a request, ms")


def exchange(path: Path, rows: Rows) -> None:
    """Wall time, CPU and bytes by system, grouped by link."""
    names = [f"{row['settings']['link']} {row['settings']['system']} {row['settings']['codec']}" for row in rows]

    def of(field: str, scale: float = 1.0) -> list[float]:
        return [scale * (row["figures"][field] or 0.0) for row in rows]

    with figure(path, 3, size=(18, 5), title=f"one exchange, {conditions(rows)}") as (left, middle, right):
        bars(left, names, {"wall": of("wall_s"), "CPU of all peers": of("cpu_s")}, "seconds")
        bars(middle, names, {"sent": of("sent_bytes", 1e-6)}, "MB sent by a peer")
        bars(right, names, {"CPU": of("cpu_s_per_wire_gb")}, "CPU seconds per GB on the wire")


def size_name(payload_bytes: str) -> str:
    """For an axis, or a table."""
    return "raw TLS socket" if payload_bytes == "raw" else f"{int(payload_bytes) >> 10} KiB"


def conditions(rows: Rows) -> str:
    """Commit and machine, for a title."""
    if not rows:
        return "nothing measured"
    loads, machine = [row["load_1min"] for row in rows], rows[0]["machine"]
    cores = f"{machine['cores']} cores {machine['cpu']}"
    return f"{rows[0]['commit'][:10]}, {cores}, load {min(loads):.1f}-{max(loads):.1f}"
