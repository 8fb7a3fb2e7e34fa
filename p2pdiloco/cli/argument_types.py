"""Values as options take them, each with its bounds in its complaint. For argparse."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal


def at_least(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A whole number, ``lowest`` or more; at most ``highest``."""
    bounds = f"of {lowest} or more" if highest is None else f"from {lowest} to {highest}"

    def whole(text: str) -> int:
        is_one = text.lstrip("-").isdecimal() and int(text) >= lowest
        if not is_one or (highest is not None and int(text) > highest):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return int(text)

    return whole


def between(lowest: float, highest: float, unit: str = "") -> Callable[[str], float]:
    """A number in these bounds, of ``unit``."""

    def number(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not lowest <= found <= highest:
            of = f" of {unit}" if unit else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a number{of} from {lowest:g} to {highest:g}")
        return found

    return number


def size(text: str) -> float:
    """Bytes: a number with kb, mb, gb or tb (powers of 1,000)."""
    lower = text.lower()
    for unit, factor in (("kb", 1e3), ("mb", 1e6), ("gb", 1e9), ("tb", 1e12)):
        digits = lower.removesuffix(unit)
        if digits != lower and digits.replace(".", "", 1).isdecimal() and float(digits) > 0:
            return float(digits) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 500mb or 8gb")


def file(text: str) -> Path:
    """The path of a file to write: not known to be a folder before long work is done for it."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file")
    if any(parent.exists() and not parent.is_dir() for parent in path.parents):
        raise argparse.ArgumentTypeError(f"{text!r} lies in a file, not in a folder: mend the path")
    return path


def folder(text: str) -> Path:
    """The absolute path of a folder to write in, which may be missing, as far as that can be known before."""
    path = Path(text).absolute()
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{str(there)!r} is not a folder: name another one")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{str(there)!r} cannot be written: name another folder, or change its owner")
    return path


def page_place(text: str) -> str:
    """An address to serve a page at: a port, perhaps after a host; ``auto``, ``off``."""
    host, _, port = text.rpartition(":")
    if text in ("auto", "off") or (port.isdecimal() and int(port) < 65536 and not host.startswith("/")):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not a port, HOST:PORT, auto or off")


def served_place(text: str) -> str:
    """As ``page_place``, for a page that is certainly served."""
    if text == "off":
        raise argparse.ArgumentTypeError("'off' is not a port, HOST:PORT or auto")
    return page_place(text)


def notified(text: str) -> str:
    """The receiver of alerts: an address, or a command that exists. A missing one would only show when it is needed."""
    return text if text.startswith(("http://", "https://")) else command(text, ", or give an address (https://...)")


def command(text: str, instead: str = "") -> str:
    """A command that exists, with its arguments; no shell. ``instead``: what else may be given."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a command ({error}): close its quotation marks") from None
    if words and shutil.which(words[0]) is None:
        raise argparse.ArgumentTypeError(
            f"there is no command {words[0]!r}: give its path, or make it executable (chmod +x){instead}"
        )
    return text


def cloud(text: str) -> str:
    """A cloud that gives notice before it takes a machine back; ``=ADDRESS`` to ask it elsewhere."""
    if text.partition("=")[0] not in ("aws", "gcp", "azure"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a cloud whose notices are known: aws, gcp, azure")
    return text


# -- Rates -------------------------------------------------------------------------------------------------------------
# Link rates as people write them: ``2.5gbit``, ``100mbit``, ``800kbit``, ``none``; for what is sent also ``auto``.


RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(text: str) -> float | None:
    """Bytes per second; None for ``none``. For argparse.

    Raises:
        argparse.ArgumentTypeError: not a rate.
    """
    if text.lower() == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if found is None or float(found[1]) == 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate: write 2.5gbit, 100mbit, 800kbit or none")
    return float(found[1]) * RATE_UNITS[found[2]] / 8


def up_budget(text: str) -> float | Literal["auto"] | None:
    """As ``bytes_per_second``, and ``auto``. For argparse.

    Raises:
        argparse.ArgumentTypeError: not a rate.
    """
    return "auto" if text.lower() == "auto" else bytes_per_second(text)


def relay_rate(text: str) -> float | Literal["auto"] | None:
    """As ``up_budget``; 0 for ``off``. For argparse.

    Raises:
        argparse.ArgumentTypeError: not a rate.
    """
    return 0.0 if text.lower() == "off" else up_budget(text)


# -- Durations ---------------------------------------------------------------------------------------------------------
# How long something lasts, as people write it: ``90m``, ``12h``, ``30d``.


DURATION_UNITS = {"m": 60, "h": 3600, "d": 86400}


def lifetime(text: str) -> int:
    """Seconds. For argparse.

    Raises:
        argparse.ArgumentTypeError: not a time.
    """
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 90m, 12h or 30d")
    return int(found[1]) * DURATION_UNITS[found[2]]
