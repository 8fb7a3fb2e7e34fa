"""What was reached, kept in the repository: scores, survivors accepted with a reason each, and what killed the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tests.mutation.operators import mutants_of
from tests.mutation.workers import ROOT

HERE = Path(__file__).parent
SCORES = HERE / "baseline.json"
KILLED = HERE / "killed.json"
NO_REASON = "not looked at yet"


class Baseline(NamedTuple):
    """``accepted``: survivors by id, with a reason each; ``killed``: mutants by id, with the test that killed each."""

    packages: dict[str, dict[str, float]]
    """Of each package's last run."""
    accepted: dict[str, str]
    killed: dict[str, str]


def read() -> Baseline:
    """As it is committed; empty if it is not there."""
    scores = json.loads(SCORES.read_text()) if SCORES.exists() else {"packages": {}, "accepted": {}}
    killed = json.loads(KILLED.read_text()) if KILLED.exists() else {}
    return Baseline(scores["packages"], scores["accepted"], killed)


def accept(runs: Iterable[dict[str, Any]]) -> None:
    """Take runs into the baseline: later ones count where they judged the same mutant. New survivors have no reason
    yet, and do not count as accepted before somebody gives one. What the code no longer has is forgotten."""
    known = read()
    packages, accepted, killed = dict(known.packages), dict(known.accepted), dict(known.killed)
    for run in runs:
        for card in run["cards"]:
            for name in card["killed"]:
                accepted.pop(name, None)
            for name in card["survived"]:
                killed.pop(name, None)
                accepted.setdefault(name, NO_REASON)
            killed.update(card["killed"])
            dead, alive = len(card["killed"]), card["survived"]
            packages[card["package"]] = {
                "score": round(dead / max(1, dead + len(alive)), 4),
                "judged": dead + len(alive),
                "reached": card["reached"],
                "mutants": card["total"],
                "seed": run["seed"],
            }
    there = _mutants_of({name.partition(":")[0] for name in (*accepted, *killed)})
    _write(SCORES, {"packages": packages, "accepted": {n: why for n, why in accepted.items() if n in there}})
    _write(KILLED, {n: by for n, by in killed.items() if n in there})


def _mutants_of(modules: set[str]) -> set[str]:
    paths = {module: ROOT / (module.replace(".", "/") + ".py") for module in modules}
    return {m.id for module, p in paths.items() if p.exists() for m in mutants_of(module, p.read_text())}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
