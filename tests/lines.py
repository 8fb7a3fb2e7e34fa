"""How much of ``protocol/`` and ``peer/`` seeds reach: lines of functions, by the simulator that reached them.

    python -m tests.lines                                     # 200 seeds of the machine, 100 of whole peers
    python -m tests.lines --machine 0-999 --whole 0-299 --missing
    python -m tests.lines --floor 90                          # exit status 1 below that (per cent, each package)

Lines that run at import (constants, signatures) do not count: every seed reaches them. Each simulator runs in a fresh
process, since chunks are small in whole peers' worlds, which must be so before anything is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "peer")

Lines = dict[str, set[int]]
"""By file."""


def codes(code: CodeType) -> Iterator[CodeType]:
    """Those of all functions within a module's, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x2:  # CO_NEWLOCALS: a function, and no class
                yield constant
            yield from codes(constant)


def lines_of(code: CodeType) -> set[int]:
    """That can be traced."""
    return {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}


def all_lines(file: Path) -> set[int]:
    """Of all functions in a file."""
    module = compile(file.read_text(), str(file), "exec")
    return {line for code in codes(module) for line in lines_of(code)}


def watch() -> Lines:
    """From now on every line of ours that runs is noted; functions of which all lines were seen cost nothing more."""
    seen: Lines = {str(file): set() for name in PACKAGES for file in (ROOT / "p2pdiloco" / name).glob("*.py")}
    left: dict[CodeType, set[int]] = {}

    def entered(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if code.co_filename not in seen:
            return None
        unseen = left.get(code)
        if unseen is None:
            unseen = left[code] = lines_of(code)
        if not unseen:
            return None
        found = seen[code.co_filename]

        def ran(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
            if event == "line":
                found.add(frame.f_lineno)
                unseen.discard(frame.f_lineno)
            return ran

        return ran

    sys.settrace(entered)
    return seen


def machine(seeds: range) -> None:
    """The machine alone: in mixed worlds, beside liars, and where the model is ruined."""
    from tests.machine_sim.seeds import run_seed

    for seed in seeds:
        run_seed(seed)
        run_seed(seed, scenario="liars")
        run_seed(seed, scenario="ruined")


def whole(seeds: range) -> None:
    """Whole peers."""
    from tests.peer_sim import worker

    worker.prepare()
    for _ in worker.outcomes(seeds):
        pass


def tell(run: Callable[[range], None], seeds: range) -> None:
    """Lines that ``run`` reaches, on stdout, as JSON."""
    seen = watch()
    run(seeds)
    sys.settrace(None)
    json.dump({file: sorted(lines) for file, lines in seen.items()}, sys.stdout)


def reached(run: Callable[[range], None], seeds: range) -> Lines:
    """By ``run``, in a fresh process."""
    program = f"from tests import lines; lines.tell(lines.{run.__name__}, {seeds!r})"
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout
    return {file: set(lines) for file, lines in json.loads(said).items()}


def told(lines: set[int]) -> str:
    """``3-5, 9``."""
    ordered, parts = sorted(lines), []
    for line in ordered:
        if parts and parts[-1][1] == line - 1:
            parts[-1][1] = line
        else:
            parts.append([line, line])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def main() -> int:
    """Run, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="0-199", metavar="A-B")
    parser.add_argument("--whole", default="0-99", metavar="A-B")
    parser.add_argument("--missing", action="store_true", help="the lines that nothing reached")
    parser.add_argument("--floor", type=float, default=0.0, metavar="PERCENT")
    arguments = parser.parse_args()
    runs = []
    for run, text in ((machine, arguments.machine), (whole, arguments.whole)):
        first, _, last = text.partition("-")
        runs.append(reached(run, range(int(first), int(last or first) + 1)))
    by_machine, by_whole = runs
    shares = []
    print(f"{'':<10} {'lines':>6} {'machine':>8} {'whole':>8} {'both':>8}")
    for name in PACKAGES:
        files = sorted((ROOT / "p2pdiloco" / name).glob("*.py"))
        every = {str(file): all_lines(file) for file in files}
        total = sum(map(len, every.values()))
        either = {file: (by_machine[file] | by_whole[file]) & lines for file, lines in every.items()}
        counts = [sum(len(r[file] & lines) for file, lines in every.items()) for r in (by_machine, by_whole, either)]
        print(f"{name:<10} {total:>6} " + " ".join(f"{100 * count / total:>7.1f}%" for count in counts))
        shares.append(100 * counts[-1] / total)
        for file, lines in every.items() if arguments.missing else ():
            if unreached := lines - either[file]:
                print(f"  {Path(file).relative_to(ROOT)}: {told(unreached)}")
    return 1 if min(shares) < arguments.floor else 0


if __name__ == "__main__":
    sys.exit(main())
