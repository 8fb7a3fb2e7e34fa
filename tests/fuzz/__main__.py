"""``python -m tests.fuzz``: every decoder of others' bytes, fed with what is nearly well-formed. Exit status 1 if one
does anything but take it or refuse it."""

from __future__ import annotations

import argparse
import random
import sys
import time

from tests.fuzz.decoders import DECODERS
from tests.fuzz.engine import Finding, fuzz, timed


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=random.randrange(2**32), help="default: a fresh one, which is printed"
    )
    parser.add_argument("--decoder", choices=sorted(DECODERS), help="only this one")
    options = parser.parse_args()
    rng, began = random.Random(options.seed), time.monotonic()
    if options.decoder is None:
        counts, findings = timed(rng, options.seconds)
    else:
        counts, findings = _one(options.decoder, rng, options.seconds)
    for name, count in counts.items():
        print(f"{name:<20}{count:>12,}")
    took = time.monotonic() - began
    print(f"{sum(counts.values()):,} inputs in {took:.0f} s, seed {options.seed}: {len(findings)} findings")
    for finding in findings[:20]:
        print(finding)
    return 1 if findings else 0


def _one(name: str, rng: random.Random, seconds: float) -> tuple[dict[str, int], list[Finding]]:
    count, findings, end = 0, [], time.monotonic() + seconds
    while time.monotonic() < end:
        findings += fuzz(name, rng, inputs=500)
        count += 500
    return {name: count}, findings


if __name__ == "__main__":
    sys.exit(main())
