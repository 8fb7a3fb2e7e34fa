"""Failures of whole sites: one of four regions for an hour, one provider for a day, rolling maintenance of all.

    python -m benchmarks.scale.regions --json FILE [--plot FILE] [--short] [--only TEXT]

The protocol's own state machines run in virtual time. Chips do not fail here, so every loss comes from the outage.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

from benchmarks import bench
from benchmarks.scale import plots
from benchmarks.scale.worlds import TOKENS_A_STEP, WARM_UP_S, make_world, merged_tokens, peer_names
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from tests.machine_sim.world import World

SILENT_S = 30.0
"""Power goes, and nobody's connection is reset: so long until the network says that there is nobody."""
BACK_SHARE = 0.98
"""Of the rate before: back at full rate."""


class Outage(NamedTuple):
    """What is gone, and for how long."""

    peers: int
    gone: int
    """The last of them."""
    seconds: float
    step_s: float
    around_s: float
    """Before it, and after it."""
    is_rolling: bool = False
    """In order, one peer after the other, all of them; ``seconds`` for each."""


OUTAGES = {
    "one of four regions for an hour": Outage(peers=16, gone=4, seconds=3600.0, step_s=4.0, around_s=1200.0),
    "one provider (2 of 8) for a day": Outage(peers=8, gone=2, seconds=86400.0, step_s=10.0, around_s=3600.0),
    "rolling maintenance, 5 minutes each": Outage(
        peers=16, gone=16, seconds=300.0, step_s=4.0, around_s=1200.0, is_rolling=True
    ),
    "a day of 64 peers, one of four regions for an hour": Outage(
        peers=64, gone=16, seconds=3600.0, step_s=10.0, around_s=41_400.0
    ),
}
SHORT = Outage(peers=8, gone=2, seconds=900.0, step_s=4.0, around_s=480.0)


def lose(world: World, name: PeerId, seconds: float) -> None:
    """It falls silent; its disk comes back."""
    world.pause(name, SILENT_S)
    world.schedule(
        world.now + SILENT_S, None, lambda _: world.crash(name, keeps_disk=True, restart_s=seconds - SILENT_S), None
    )


def leave(world: World, name: PeerId, seconds: float) -> None:
    """It goes in order, and comes back."""
    process = world.processes.get(name)
    if process is not None:
        process.tell(ev.LeaveRequested("maintenance"))
        world.add(name, world.settings[name], world.now + seconds)


def unmerged(world: World, names: list[PeerId]) -> float:
    """Tokens that die with these learners, a shard."""
    found = 0
    for name in names:
        core = world.processes[name].machine.core
        if core.learner is not None:
            found += sum(core.learner.unmerged(chain.shard) for chain in core.chains)
    return found / len(world.checks.heaviest)


def heads(world: World, name: PeerId) -> list[Digest]:
    """Of all shards, at one peer."""
    core = world.processes[name].machine.core
    return [core.head(ShardId(shard)).id for shard in range(core.config.shards)]


def are_kept(world: World, name: PeerId, before: list[Digest]) -> bool:
    """Whether all that had been merged ``before`` is in the chains of a peer now."""
    for shard, (old, head) in enumerate(zip(before, heads(world, name), strict=True)):
        while head != old:
            known = world.checks.commits.get((ShardId(shard), head))
            if known is None or not known.parent:
                return False
            head = known.parent
    return True


def watched(world: World, until: float, every_s: float = 60.0) -> list[tuple[float, float]]:
    """Merged tokens, each minute."""
    found = []
    while world.now < until and not world.checks.is_over:
        world.run_until(min(until, world.now + every_s))
        found.append((world.now, merged_tokens(world)))
    return found


def rate(points: list[tuple[float, float]]) -> float:
    """Tokens a second."""
    return (points[-1][1] - points[0][1]) / max(1.0, points[-1][0] - points[0][0])


def strike(world: World, outage: Outage, names: list[PeerId]) -> tuple[float, float]:
    """Let it happen from now on; when it is over, and the tokens that die with it."""
    if not outage.is_rolling:
        gone = names[-outage.gone :]
        dead = unmerged(world, gone)
        for name in gone:
            lose(world, name, outage.seconds)
        return world.now + outage.seconds, dead
    every_s = outage.seconds + 60.0
    for i, name in enumerate(names):
        world.schedule(world.now + i * every_s, None, lambda n: leave(world, n, outage.seconds), name)
    return world.now + len(names) * every_s, 0.0


def measured(outage: Outage, seed: int) -> dict[str, Any]:
    """One outage: what is merged before, meanwhile and after it."""
    began_at = time.process_time()
    names = peer_names(outage.peers)
    world = make_world(names, seed=seed, step_s=outage.step_s, heartbeat_s=outage.step_s)
    round_s = 24 * outage.step_s
    world.run_until(WARM_UP_S + 3 * round_s)
    curve = [(world.now, merged_tokens(world)), *watched(world, world.now + outage.around_s)]
    before, struck_at, known = rate(curve), world.now, heads(world, names[0])
    over_at, dead = strike(world, outage, names)
    meanwhile = [curve[-1], *watched(world, over_at)]
    after = [meanwhile[-1], *watched(world, over_at + outage.around_s)]
    curve += meanwhile[1:] + after[1:]
    share = 1 - (1 if outage.is_rolling else outage.gone) / outage.peers
    if outage.is_rolling:
        share = 1 - outage.seconds / (outage.seconds + 60.0) / outage.peers
    window = max(2, round(round_s / 60.0))
    back = [
        points[-1][0] - over_at
        for points in (after[i : i + window + 1] for i in range(len(after) - window))
        if rate(points) >= BACK_SHARE * before
    ]
    ideal = TOKENS_A_STEP / outage.step_s * outage.peers
    return {
        "goodput_before": before / ideal,
        "share_there": share,
        "kept": rate(meanwhile) / before,
        "kept_of_the_others": rate(meanwhile) / before / share,
        "back_after_min": back[0] / 60.0 if back else None,
        "tokens_dead": dead,
        "tokens_dead_steps": dead / TOKENS_A_STEP / max(1, outage.gone),
        "are_merged_tokens_kept": float(are_kept(world, names[0], known)),
        "tokens_lost": world.checks.tokens_lost,
        "forks": world.checks.forks,
        "violations": len(world.checks.violations),
        "struck_at": struck_at,
        "over_at": over_at,
        "curve": curve,
        "ideal": ideal,
        "simulated_s": world.now,
        "events": world.events,
        "cpu_s": round(time.process_time() - began_at, 1),
    }


COLUMNS: list[bench.Column] = [
    ("goodput before", "goodput_before", ".1%"),
    ("share there", "share_there", ".1%"),
    ("merged meanwhile", "kept", ".1%"),
    ("of the others' share", "kept_of_the_others", ".1%"),
    ("back after, min", "back_after_min", ".0f"),
    ("steps lost, each of the dead", "tokens_dead_steps", ".1f"),
    ("merged tokens kept", "are_merged_tokens_kept", ".0%"),
    ("forks", "forks", ".0f"),
    ("violations", "violations", ".0f"),
]


def main() -> None:
    """Measure, print, write."""
    parser = bench.parser(__doc__, rows="outage")
    parser.add_argument("--seed", type=int, default=1, help="seed of the world")
    parser.add_argument("--only", default="", help="only outages whose name contains this")
    parser.add_argument("--short", action="store_true", help="one short outage, as a quick check")
    options = parser.parse_args()
    wanted = {"two of eight for a quarter of an hour": SHORT} if options.short else OUTAGES
    works = ((name, partial(measured, outage, options.seed)) for name, outage in wanted.items())
    found = bench.fill(options, "scale/regions", "outage", works)
    print(bench.table("outage", COLUMNS, found))
    if options.plot is not None:
        plots.regions(options.plot, found)


if __name__ == "__main__":
    main()
