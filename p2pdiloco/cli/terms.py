"""How long something lasts, as people write it: ``90m``, ``12h``, ``30d``."""

from __future__ import annotations

import argparse
import re

UNITS = {"m": 60, "h": 3600, "d": 86400}


def lifetime(text: str) -> int:
    """Seconds. For argparse.

    Raises:
        argparse.ArgumentTypeError: not a time.
    """
    found = re.fullmatch(r"([1-9]\d{0,5})([mhd])", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 90m, 12h or 30d")
    return int(found[1]) * UNITS[found[2]]
