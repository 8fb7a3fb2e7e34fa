"""What was measured, as a table to read: a row for each site with its line, and the round trips to the others."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.netbed.topology import Topology, rate_text
from benchmarks.netbed.verification import Check

WRONG = " !"


def matrix(topology: Topology, checks: Sequence[Check]) -> str:
    """Measured figures, each with its error; ``!`` marks what is off."""
    found: dict[tuple[str, str], Check] = {(check.kind, check.where): check for check in checks}
    names = [site.name for site in topology.sites]
    rows = [["", "up", "down", *names]]
    for i, site in enumerate(topology.sites):
        row = [site.name, *(_rate(found[kind, site.name]) for kind in ("up", "down"))]
        for j, other in enumerate(names):
            where = f"{names[min(i, j)]}-{names[max(i, j)]}"
            row.append("-" if i == j else _path(found, where, site.name, other))
        rows.append(row)
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(check.note for check in checks if check.kind in ("up", "down")):
        lines.append("* as fast as all the others together; the line itself is faster and cannot be filled")
    lines.append("round trips in ms; +- jitter; loss in that direction")
    return "\n".join(lines)


def _rate(check: Check) -> str:
    return f"{rate_text(check.measured)} ({check.error:+.1%}){'*' if check.note else ''}{_mark(check)}"


def _path(found: dict[tuple[str, str], Check], where: str, source: str, target: str) -> str:
    trip = found[("round trip", where)]
    text = f"{trip.measured * 1e3:.1f}{_mark(trip)}"
    if jitter := found.get(("jitter", where)):
        text += f" +-{jitter.measured * 1e3:.1f}{_mark(jitter)}"
    loss = found.get(("loss", f"{source} to {target}")) or found.get(("loss", where))
    if loss is not None and (loss.wanted or loss.measured):
        text += f" {loss.measured:.2%}{_mark(loss)}"
    return text


def _mark(check: Check) -> str:
    return "" if check.is_right else WRONG
