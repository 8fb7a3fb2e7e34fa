"""Formats numbers and times for people in a terminal, in the same way as the page (``page.js``)."""

from __future__ import annotations

import time

MINUTE, HOUR, DAY = 60, 3600, 86400


def amount(value: float | None) -> str:
    """Format a number of tokens or parameters: ``1.24 M``."""
    if value is None:
        return "-"
    scaled, unit = _scaled(value, ("", " k", " M", " G", " T"))
    if unit and scaled < 100:
        return f"{scaled:.{2 if scaled < 10 else 1}f}{unit}"
    return f"{round(scaled):,}{unit}"


def volume(value: float) -> str:
    """Format a number of bytes: ``12.5 MB``."""
    scaled, unit = _scaled(value, (" B", " kB", " MB", " GB", " TB"))
    return f"{scaled:.1f}{unit}" if scaled < 100 and unit != " B" else f"{round(scaled)}{unit}"


def percent(value: float | None, digits: int = 1) -> str:
    """Format a fraction from 0 to 1: ``12.5 %``."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def loss(value: float | None) -> str:
    """Format a loss in nats."""
    return "-" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Format a duration: ``3 h 07 min``."""
    whole = round(max(0.0, min(seconds, 1e12)))
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02} s"
    if whole < DAY:
        return f"{whole // HOUR} h {whole % HOUR // MINUTE:02} min"
    return f"{whole // DAY} d {whole % DAY // HOUR} h"


def clock(at: float) -> str:
    """Format a Unix time as the local time of day."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "-"


def _scaled(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    step = 0
    while value >= 1000 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    return value, units[step]
