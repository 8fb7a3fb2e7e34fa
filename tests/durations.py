"""``python -m tests.durations FILE.xml``: which tests take longest, as pytest has recorded (``--junitxml``).

Prints the slowest 20, the sum, and writes what ``tests/conftest.py`` orders tests by.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

LEAST_S = 2.0
"""Shorter ones are not kept."""
NAMED = 20
OUT = Path(__file__).parent / "durations.json"


def main(path: str) -> None:
    """Read, print, write."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(path).iter("testcase"):
        words = case.get("classname", "").split(".")
        file = "/".join(word for word in words if word[:1].islower()) + ".py"
        classes = [word for word in words if word[:1].isupper()]
        name = re.sub(r"((?<=\])@\w+\]|@\w+)$", "", case.get("name", ""))  # xdist's group, within the brackets, too
        found["::".join([file, *classes, name])] = round(float(case.get("time", "0")), 1)
    slowest = sorted(found.items(), key=lambda item: -item[1])
    for test, seconds in slowest[:NAMED]:
        print(f"{seconds:7.1f} s  {test}")
    print(f"{sum(found.values()):7.1f} s  in all, {len(found)} tests")
    OUT.write_text(json.dumps({test: seconds for test, seconds in slowest if seconds >= LEAST_S}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
