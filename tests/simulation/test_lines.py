"""How much of the protocol and the peer a few seeds reach; all of it: `python -m tests.lines`."""

from __future__ import annotations

import pytest

from tests import lines

FLOORS = {"protocol": 84.0, "peer": 70.0}
"""Per cent of the lines of functions, with these seeds. What falls below is code that no simulated world runs."""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_seeds_reach_most_lines() -> None:
    by_machine, by_whole = lines.reached(lines.machine, range(4)), lines.reached(lines.whole, range(10))
    for name, floor in FLOORS.items():
        total = found = 0
        for file in (lines.ROOT / "p2pdiloco" / name).glob("*.py"):
            every = lines.all_lines(file)
            total += len(every)
            found += len((by_machine[str(file)] | by_whole[str(file)]) & every)
        assert 100 * found / total >= floor, f"{name}: {100 * found / total:.1f} %; see python -m tests.lines --missing"
