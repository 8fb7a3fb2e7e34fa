"""CPU time that a node spends on being watched: event log, pictures, histories, alerts, metrics.

    python -m benchmarks.watch.cost --peers 64 --versions 10

One second of a run with ``--peers`` and ``--versions`` per second is replayed again and again, and each part is timed
by CPU time; shares are of one core. What the node collects besides (status of machine and connections) is not included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from benchmarks.watch.shots import crowd
from p2pdiloco.observability.alerts import Alerts
from p2pdiloco.observability.history import RunHistory, account
from p2pdiloco.observability.log_reader import Recording
from p2pdiloco.observability.prometheus import expose
from p2pdiloco.observability.snapshot import RunSnapshot
from p2pdiloco.peer.metrics import Metrics

WARM_S, TOLD_S = 60, 60
"""Seconds of the run that are told before, and in which it is timed."""
ALERTS_S, HISTORY_S, SCRAPE_S = 5, 2, 15
"""Every so many seconds: alerts, a history for a looker, Prometheus."""


class Costs:
    """Seconds of the processor, by what for."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.times: defaultdict[str, int] = defaultdict(int)
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._took = time.process_time() - self._began

    def of(self, what: str) -> None:
        """What was timed last."""
        self.spent[what] += self._took
        self.times[what] += 1


def measured(chronicle: RunHistory, folder: Path, versions: int, contributors: dict[str, int], owner: str) -> Costs:
    """A minute of the run."""
    costs, alerts = Costs(), Alerts()
    with Metrics(folder / "metrics.jsonl", chronicle.take) as metrics:
        for second in range(WARM_S + TOLD_S):
            if second == WARM_S:
                costs = Costs()
            with costs:
                for number in range(versions):
                    made = second * versions + number
                    metrics.write(
                        "commit",
                        shard=made % 24,
                        version=1000 + made // 24,
                        head="h" * 40,
                        step=1000 + made,
                        tokens=10**9 + 10**6 * made,
                        owner=owner,
                        contributors=contributors,
                    )
            costs.of("events: log and chronicle")
            with costs:
                now = time.time()
                seen = chronicle.picture(now)
                seen = msgspec.structs.replace(seen, account=account(seen, 10.0, None))
            costs.of("a picture each second")
            with costs:
                msgspec.json.encode(seen)
            costs.of("and its JSON, for a looker")
            if second % HISTORY_S == 0:
                with costs:
                    msgspec.json.encode(chronicle.history())
                costs.of(f"a history each {HISTORY_S} s, for a looker")
            if second % ALERTS_S == 0:
                with costs:
                    alerts.look(float(second), _of(chronicle, now))
                costs.of(f"a picture and alerts each {ALERTS_S} s")
            if second % SCRAPE_S == 0:
                with costs:
                    expose(_of(chronicle, now))
                costs.of(f"/metrics each {SCRAPE_S} s")
    return costs


def _of(chronicle: RunHistory, now: float) -> RunSnapshot:
    return chronicle.picture(now)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--peers", type=int, default=64, help="peers of the run (default: 64)")
    parser.add_argument("--versions", type=int, default=10, help="versions per second (default: 10)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        recording = Recording(crowd(Path(made) / "crowd", peers=arguments.peers))
        chronicle = recording.chronicle()
        for event in recording.events:
            chronicle.take(event.line, event.source)
        rows = chronicle.picture(recording.ends).peers
        contributors = {f"{row.peer}/{'1' * 12}": 8192 for row in rows}
        costs = measured(chronicle, Path(made), arguments.versions, contributors, rows[0].peer)
    print(
        f"{arguments.peers} peers, {len(contributors)} contributors a version, {arguments.versions} versions a second"
    )
    total = 0.0
    for what, spent in costs.spent.items():
        total += spent
        print(f"  {what:<36} {1e3 * spent / costs.times[what]:8.3f} ms, {spent / TOLD_S:7.3%} of a core")
    looker = sum(spent for what, spent in costs.spent.items() if "looker" in what or "each second" in what)
    print(f"  {'all':<36} {'':8}     {total / TOLD_S:7.3%} of a core; without a looker {(total - looker) / TOLD_S:.3%}")


if __name__ == "__main__":
    main()
