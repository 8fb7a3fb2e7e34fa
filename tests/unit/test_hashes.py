"""What a checked install takes is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)==([\w.+]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    found = PIN.findall((ROOT / name).read_text())
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_hashes_are_of_the_versions_that_are_tested() -> None:
    """`make hashes` writes them anew."""
    assert pins("hashes.txt") == pins("constraints.txt")


def test_every_version_has_hashes() -> None:
    requirements = (ROOT / "hashes.txt").read_text().replace("\\\n", " ").splitlines()
    named = [line for line in requirements if "==" in line]
    assert len(named) == len(pins("hashes.txt"))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", line) for line in named)
