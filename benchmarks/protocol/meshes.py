"""Training in meshes in which not every pair of peers can connect (simulated time, one core).

    python -m benchmarks.protocol.meshes [--json FILE] [--minutes 20] [--worlds 3] [--only NAME]

Eight peers train one shard over 40 ms links (H = 24, a step takes 1 to 1.5 s). Each mesh is simulated ``--worlds``
times, with other pairs and other speeds. The figures are in
benchmarks/protocol/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from benchmarks import bench
from benchmarks.protocol.churn import swarm
from p2pdiloco.protocol.ids import PeerId, ShardId
from tests.machine_sim.world import World
from tests.simulation import topologies
from tests.simulation.topologies import Mesh

Figures = dict[str, float]
PEERS = 8
WARM_S = 60.0
"""Until everybody is there."""
ONE = ShardId(0)


def versions_of(world: World, since: int) -> list[int]:
    """Of the winning chain, how many learners each version after ``since`` holds."""
    found = []
    head = max((p.machine.core.head(ONE) for p in world.living()), key=lambda h: h.tokens)
    known = world.checks.commits[ONE, head.id]
    while known.header is not None and known.version > since:
        found.append(len(known.header.contributors))
        known = world.checks.commits[ONE, known.parent]
    return found


def measured(mesh: Callable[[Random, Sequence[PeerId]], Mesh], minutes: float, worlds: int, peers: int) -> Figures:
    """Over several worlds of this mesh."""
    learners: list[int] = []
    forks = versions = merged = trained = 0
    connected = 0.0
    for seed in range(1, worlds + 1):
        world = swarm(peers, heartbeat_s=1.0, seed=seed)
        names = list(world.settings)
        apart = mesh(Random(f"mesh {seed}"), names)
        connected += 1 - len(apart) / (peers * (peers - 1) / 2)
        world.network.part(apart)
        world.run_until(WARM_S)
        version, forks_before, versions_before = world.checks.newest[ONE], world.checks.forks, world.checks.versions
        world.run_until(WARM_S + 60.0 * minutes)
        assert not world.checks.violations, world.checks.violations
        learners += versions_of(world, version)
        forks += world.checks.forks - forks_before
        versions += world.checks.versions - versions_before
        head = max((p.machine.core.head(ONE) for p in world.living()), key=lambda h: h.tokens)
        merged += head.tokens
        trained += sum(p.machine.core.learner.tokens for p in world.living() if p.machine.core.learner is not None)
    return {
        "pairs_connected": round(connected / worlds, 2),
        "learners_a_commit": round(sum(learners) / max(1, len(learners)), 2),
        "joint_versions_with_all": round(sum(n == peers for n in learners) / max(1, len(learners)), 3),
        "versions": len(learners),
        "forks": forks,
        "fork_share": round(forks / max(1, versions), 4),
        "tokens_merged_share": round(merged / max(1, trained), 3),
    }


MESHES: dict[str, Callable[[Random, Sequence[PeerId]], Mesh]] = {
    "whole": lambda random, peers: topologies.WHOLE,
    "95 % of pairs": lambda random, peers: topologies.share(random, peers, 0.95),
    "90 % of pairs": lambda random, peers: topologies.share(random, peers, 0.9),
    "80 % of pairs": lambda random, peers: topologies.share(random, peers, 0.8),
    "70 % of pairs": lambda random, peers: topologies.share(random, peers, 0.7),
    "50 % of pairs": lambda random, peers: topologies.share(random, peers, 0.5),
    "30 % of pairs": lambda random, peers: topologies.share(random, peers, 0.3),
    "1 public, others behind routers": lambda random, peers: topologies.behind_routers(peers, peers[:1]),
    "2 public, others behind routers": lambda random, peers: topologies.behind_routers(peers, peers[:2]),
    "2 groups and 1 that sees all": lambda random, peers: topologies.groups(random, peers, 2, 1),
    "3 groups and 1 that sees all": lambda random, peers: topologies.groups(random, peers, 3, 1),
}


def main() -> None:
    """Measure, print, write."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--minutes", type=float, default=20.0, help="simulated minutes of each world")
    parser.add_argument("--worlds", type=int, default=3, help="worlds per mesh")
    parser.add_argument("--peers", type=int, default=PEERS, help="number of peers")
    parser.add_argument("--only", help="measure only cases whose name contains this")
    options = parser.parse_args()
    for name, mesh in MESHES.items():
        if options.only is None or options.only in name:
            figures = measured(mesh, options.minutes, options.worlds, options.peers)
            print(name, figures, flush=True)
            bench.write(options, "protocol/meshes", {"name": name, "peers": options.peers}, figures)


if __name__ == "__main__":
    main()
