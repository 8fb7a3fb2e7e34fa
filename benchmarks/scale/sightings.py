"""Observations of a swarm's rounds: when each was announced, committed and applied, and who contributed.

The same events are recorded for a real node and for a simulated process: what its state machine received, and what it
answered. All times are of one clock that all observers share. An observer of a single peer writes JSON; ``gather``
merges these files.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.messages import Contribution


class Sighting(msgspec.Struct):
    """Of one commit."""

    fragment: int
    step: int
    """Of its turn."""
    contributors: int
    steps: float
    """Of a contributor, in the mean."""
    version: tuple[int, int]
    """Shard and number."""
    made_at: float | None = None
    """By its owner."""
    taken_at: list[float] = []
    """By each peer."""


class Sightings(msgspec.Struct):
    """By one peer, or by all."""

    rounds: dict[str, float] = {}
    """By fragment and step: when the first learner was told to copy it."""
    commits: dict[str, Sighting] = {}
    payloads: int = 0
    payload_bytes: int = 0

    def note(
        self, peer: str, at: float, event: ev.Event, effects: Sequence[ef.Effect], fragment_of: Sequence[int]
    ) -> None:
        """An event of ``peer``'s machine. ``fragment_of``: by shard."""
        if isinstance(event, ev.Applied) and event.head in self.commits:
            self.commits[event.head].taken_at.append(at)
        for effect in effects:
            match effect:
                case ef.Snapshot(fragment=fragment, step=step):
                    self.rounds.setdefault(f"{fragment} {step}", at)
                case ef.Apply(header=header, id=name):
                    givers = header.contributors
                    seen = self.commits.setdefault(
                        name,
                        Sighting(
                            fragment_of[header.shard],
                            header.step,
                            len(givers),
                            sum(one.steps for one in givers) / max(1, len(givers)),
                            (header.shard, header.version),
                        ),
                    )
                    if header.owner == peer:
                        seen.made_at = at
                case ef.Send(message=Contribution() as message) if message.payload_bytes:
                    self.payloads += 1
                    self.payload_bytes += message.payload_bytes
                case _:
                    pass


def gather(seen: Iterable[Sightings]) -> Sightings:
    """What all saw."""
    found = Sightings()
    for one in seen:
        for sync_round, at in one.rounds.items():
            found.rounds[sync_round] = min(at, found.rounds.get(sync_round, at))
        for name, commit in one.commits.items():
            known = found.commits.setdefault(name, commit)
            if known is not commit:
                known.taken_at += commit.taken_at
                known.made_at = commit.made_at if known.made_at is None else known.made_at
        found.payloads += one.payloads
        found.payload_bytes += one.payload_bytes
    return found


def figures(seen: Sightings, begin: float, end: float, peers: int) -> dict[str, float]:
    """Return figures of the rounds that were announced from ``begin`` to ``end``, in seconds. ``t50_s`` and ``t99_s``:
    from the making of a commit until so many per cent of all ``peers`` have applied it; infinite if they never have."""
    made, taken, last, contributors, steps = [], [], [], [], []
    versions, spread = set[tuple[int, int]](), {0.5: list[float](), 0.99: list[float]()}
    for commit in seen.commits.values():
        at = seen.rounds.get(f"{commit.fragment} {commit.step}")
        if at is None or not begin <= at < end or commit.made_at is None:
            continue
        made.append(commit.made_at - at)
        taken += [when - at for when in commit.taken_at]
        last.append(max(commit.taken_at, default=commit.made_at) - at)
        contributors.append(commit.contributors)
        steps.append(commit.steps)
        versions.add(commit.version)
        times = sorted(when - commit.made_at for when in commit.taken_at)
        for share, found in spread.items():
            needed = math.ceil(share * peers)
            found.append(times[needed - 1] if needed <= len(times) else math.inf)
    return {
        "versions": len(made),
        "contributors": statistics.fmean(contributors),
        "steps_a_contribution": statistics.fmean(steps),
        "made_s": statistics.median(made),
        "taken_s": statistics.median(taken),
        "taken_by_all_s": statistics.median(last),
        "t50_s": statistics.median(spread[0.5]),
        "t99_s": statistics.median(spread[0.99]),
        "forks": len(made) - len(versions),
        "taken_by_all_90_s": sorted(last)[int(0.9 * len(last))],
    }
