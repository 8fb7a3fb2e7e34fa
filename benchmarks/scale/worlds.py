"""Simulated worlds in which each learner is an island of many chips, under the protocol's own state machines.

All figures are counted in the heaviest chains and their commits after a warm-up, never computed. Invariants are checked
as in every simulated world; a violation is part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import msgspec

from benchmarks.scale.islands import Constants, Island
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.world import World
from tests.simulation import topologies

Figures = dict[str, float]
STEP_S = 2.0
"""Of a whole island; assumed (the paper says none)."""
SYNC_EVERY, FRAGMENTS, OVERLAP = 24, 24, 2
"""The paper's defaults: a fragment's round at each step."""
TOKENS_A_STEP = 10
WARM_UP_S, JOIN_S = 240.0, 10.0
"""Until all have joined and every fragment has had some rounds: the longer of the first, and of the second for each
peer (64 train after 480 s, since each fetches its state)."""
HUB = PeerId("hub")


def peer_names(peers: int) -> list[PeerId]:
    """In the order in which they are founded."""
    return [PeerId(f"p{i:03}") for i in range(peers)]


def make_world(
    islands: dict[PeerId, Island] | list[PeerId],
    *,
    seed: int = 1,
    step_s: float = STEP_S,
    heartbeat_s: float = 4.0,
    has_hub: bool = False,
) -> World:
    """All peers at the beginning, with islands, or with machines that do not fail. ``has_hub``: all merging is done by
    one peer without a learner, which alone hears all, as with a central syncer: nobody else merges, nobody alone."""
    names = list(islands)
    config = ProtocolConfig(
        run=RunId("scale"),
        peer=names[0],
        fragments=tuple((ShardId(f),) for f in range(FRAGMENTS)),
        sync_every=SYNC_EVERY,
        overlap=OVERLAP,
        min_quorum=1,
        grace_share=0.7,
        total_steps=10**9,
        heartbeat_s=heartbeat_s,
        needs_majority=has_hub,
    )

    def make_config(name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(config, peer=name, weight=setting.weight)

    world = World(seed, make_config, NetworkSetting(redial_s=2.0, patience_s=15.0))
    world.network.default = LinkQuality(delay_s=0.03, jitter_s=0.01, bytes_per_s=1e9)
    setting = PeerSetting(
        step_s=step_s,
        step_jitter=0.02,
        tokens_per_step=TOKENS_A_STEP,
        payload_bytes=1_000_000,
        state_bytes=1_000_000_000,
        weight=0.0 if has_hub else 1.0,
    )
    if has_hub:
        world.add(HUB, msgspec.structs.replace(setting, has_learner=False, weight=1.0), is_founder=True)
        world.schedule(0.0, None, world.network.part, topologies.behind_routers([*names, HUB], [HUB]))
    for i, name in enumerate(names):
        world.add(name, setting, at=0.1 * i, is_founder=i == 0 and not has_hub)
    if isinstance(islands, dict):
        world.conditions.paces.update((name, island.pace) for name, island in islands.items())
    world.save_all(every_s=300.0)
    return world


def make_islands(chips: int, peers: int, constants: Constants, seed: int) -> dict[PeerId, Island]:
    """Equal ones."""
    return {name: Island(Random(f"{seed} {name} {chips}"), chips // peers, constants) for name in peer_names(peers)}


def merged_tokens(world: World) -> float:
    """All that was declared and merged, by the heaviest chains, a shard."""
    found = 0
    for shard in zip(*(process.machine.core.chains for process in world.living()), strict=True):
        _, merged = max((0 if chain.head is None else chain.head.tokens, chain.counts.merged) for chain in shard)
        found += merged
    return found / len(world.checks.heaviest)


def measure(
    world: World,
    islands: dict[PeerId, Island],
    seconds: float,
    *,
    step_s: float = STEP_S,
    told: Callable[[float], None] | None = None,
) -> Figures:
    """Let ``seconds`` pass after the warm-up, and count."""
    began_at = time.process_time()
    world.run_until(max(WARM_UP_S, JOIN_S * len(islands)))
    checks, start = world.checks, world.now
    merged, versions, forks, known = merged_tokens(world), checks.versions, checks.forks, set(checks.commits)
    while world.now < start + seconds and not checks.is_over:
        world.run_until(min(start + seconds, world.now + 300.0))
        if told is not None:
            told((world.now - start) / seconds)
    span = world.now - start
    ideal = span / step_s * TOKENS_A_STEP * len(islands)
    headers = [c.header for key, c in checks.commits.items() if key not in known and c.header is not None]
    steps = [c.steps for header in headers for c in header.contributors]
    computed = sum(island.computed_s(start, world.now) for island in islands.values())
    running = sum(island.running_s(start, world.now) for island in islands.values())
    return {
        "goodput": (merged_tokens(world) - merged) / ideal,
        "computed": computed / span / len(islands),
        "stopped": 1.0 - running / span / len(islands),
        "chips_away": (running - computed) / span / len(islands),
        "uptime": any_running(islands, start, world.now),
        "tokens_lost": checks.tokens_lost,
        "contributors": sum(len(header.contributors) for header in headers) / max(1, len(headers)),
        "staleness_steps": sum(steps) / max(1, len(steps)),
        "versions": checks.versions - versions,
        "forks": checks.forks - forks,
        "violations": len(checks.violations),
        "events": world.events,
        "simulated_s": span,
        "cpu_s": round(time.process_time() - began_at, 1),
    }


def any_running(islands: dict[PeerId, Island], start: float, end: float, every_s: float = 1.0) -> float:
    """The share of time in which at least one island computes."""
    looks = int((end - start) / every_s)
    running = sum(any(island.rate(start + i * every_s) > 0 for island in islands.values()) for i in range(looks))
    return running / max(1, looks)
