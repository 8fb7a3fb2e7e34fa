"""Link rates as people write them: ``2.5gbit``, ``100mbit``, ``800kbit``, ``none``; for what is sent also ``auto``."""

from __future__ import annotations

import argparse
import re
from typing import Literal

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


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
    return float(found[1]) * UNITS[found[2]] / 8


def up_budget(text: str) -> float | Literal["auto"] | None:
    """As ``bytes_per_second``, and ``auto``. For argparse.

    Raises:
        argparse.ArgumentTypeError: not a rate.
    """
    return "auto" if text.lower() == "auto" else bytes_per_second(text)
