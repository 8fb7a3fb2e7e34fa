"""What was reached, kept in the repository: scores, survivors accepted with a reason each, and what killed the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SCORES = HERE / "baseline.json"
KILLED = HERE / "killed.json"
NO_REASON = "not looked at yet"


class Baseline(NamedTuple):
    """``accepted``: survivors by id, with a reason each; ``killed``: mutants by id, with the test that killed each."""

    packages: dict[str, dict[str, float]]
    accepted: dict[str, str]
    killed: dict[str, str]


def read() -> Baseline:
    """As it is committed; empty if it is not there."""
    scores = json.loads(SCORES.read_text()) if SCORES.exists() else {"packages": {}, "accepted": {}}
    killed = json.loads(KILLED.read_text()) if KILLED.exists() else {}
    return Baseline(scores["packages"], scores["accepted"], killed)


def accept(runs: Iterable[dict[str, Any]]) -> None:
    """Take runs into the baseline: later ones count where they judged the same mutant. New survivors have no reason
    yet, and do not count as accepted before somebody gives one."""
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
            counted = [name for name in alive if accepted[name] == NO_REASON]
            packages[card["package"]] = {
                "score": round(dead / max(1, dead + len(alive)), 4),
                "score_but_accepted": round(dead / max(1, dead + len(counted)), 4),
                "judged": dead + len(alive),
                "reached": card["reached"],
                "mutants": card["total"],
                "seed": run["seed"],
            }
    _write(SCORES, {"packages": packages, "accepted": accepted})
    _write(KILLED, killed)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
