"""Cost of churn to the protocol: forks, tokens, control traffic, differing views of membership (simulated time).

    python -m benchmarks.protocol.churn [--json FILE] [--hours 4] [--only NAME]

The figures are in benchmarks/protocol/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import msgspec

from benchmarks import bench
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.faults import FaultRates, draw_faults, schedule_faults
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.world import World

Figures = dict[str, float]
PAYLOAD_BYTES = 531_000
"""1M parameters as int4 with a scale for 64 (0.531 bytes each)."""


def swarm(
    peers: int,
    *,
    heartbeat_s: float = 2.0,
    step_s: float = 1.0,
    sync_every: int = 24,
    seed: int = 1,
    jitter_s: float = 0.02,
    fragments: int = 1,
    takeover_s: float | None = None,
) -> World:
    """Peers that train fragments of one shard each over 40 ms links; steps differ by up to a half between peers."""
    random = Random(seed)
    names = [PeerId(f"p{i:03}") for i in range(peers)]
    config = ProtocolConfig(
        run=RunId("churn"),
        peer=names[0],
        fragments=tuple((ShardId(f),) for f in range(fragments)),
        sync_every=sync_every,
        overlap=4,
        min_quorum=max(1, peers // 8),
        grace_share=0.7,
        total_steps=10**9,
        heartbeat_s=heartbeat_s,
    )
    if takeover_s is not None:
        config = msgspec.structs.replace(config, takeover_floor_s=takeover_s, takeover_ceiling_s=takeover_s)

    def make_config(name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(config, peer=name)

    world = World(seed, make_config, NetworkSetting(redial_s=2.0, patience_s=15.0))
    world.conditions.clock_drift = 1e-4
    world.network.default = LinkQuality(delay_s=0.04, jitter_s=jitter_s, bytes_per_s=2.5e7)
    for i, name in enumerate(names):
        setting = PeerSetting(
            step_s=step_s * (1.0 + 0.5 * random.random()), payload_bytes=PAYLOAD_BYTES, state_bytes=8_000_000
        )
        world.add(name, setting, is_founder=i == 0)
    return world


def watch_views(world: World, every_s: float = 1.0) -> list[bool]:
    """Every second: whether two running peers disagree on who is live."""
    differ: list[bool] = []

    def look(_: None) -> None:
        views = {
            frozenset((*process.machine.core.membership.live, process.name))
            for process in world.processes.values()
            if process.machine.core.is_current
        }
        differ.append(len(views) > 1)
        world.schedule(world.now + every_s, None, look, None)

    world.schedule(60.0, None, look, None)
    return differ


def under(rates: FaultRates, hours: float, cut: tuple[float, float] | None = None) -> Figures:
    """16 peers for ``hours`` under ``rates``; optionally 5 of them are cut off between two times."""
    world = swarm(16)
    world.save_all(every_s=300.0)
    names = list(world.settings)
    end = 3600.0 * hours
    schedule_faults(world, draw_faults(Random(2), rates, names, 60.0, end))
    if cut is not None:
        far, near = names[:5], names[5:]
        directions = [(a, b) for a in far for b in near] + [(b, a) for a in far for b in near]
        world.schedule(cut[0], None, world.network.cut, directions)
        world.schedule(cut[1], None, world.network.mend, directions)
    differ = watch_views(world)
    world.run_until(end)
    checks = world.checks
    return {
        "versions": checks.versions,
        "forks": checks.forks,
        "tokens_merged": checks.tokens_merged,
        "tokens_lost_per_million": 1e6 * checks.tokens_lost / max(1, checks.tokens_merged),
        "violations": len(checks.violations),
        "views_differ_share": round(sum(differ) / max(1, len(differ)), 4),
        "seconds_a_version": round(end / max(1, checks.newest[ShardId(0)]), 2),
    }


def control_traffic(peers: int) -> Figures:
    """Messages and bytes for a version of a shard, without faults, with 8 shards of 1M parameters."""
    world = swarm(peers, heartbeat_s=2.0 if peers <= 16 else 1.0, fragments=8)
    world.run_until(90.0)
    network, checks = world.network, world.checks
    network.is_measured = True
    versions, messages = checks.versions, network.messages
    world.run_until(190.0)
    made = max(1, checks.versions - versions)
    return {
        "versions": made,
        "messages_a_version": round((network.messages - messages) / made),
        "control_bytes_a_version": round(network.control_bytes / made),
        "payload_bytes_a_version": round(network.payload_bytes / made),
        "control_share": round(network.control_bytes / network.payload_bytes, 5),
    }


def deadlines(heartbeat_s: float, jitter_s: float) -> Figures:
    """How soon a dead peer is lost whose connections stay silent, and how often a living one is."""
    world = swarm(16, heartbeat_s=heartbeat_s, jitter_s=jitter_s)
    alarms = 0
    counted: dict[PeerId, int] = {}

    def look(_: None) -> None:
        nonlocal alarms
        for name, process in world.processes.items():
            live = len(process.machine.core.membership.live)
            alarms += max(0, counted.get(name, live) - live)
            counted[name] = live
        world.schedule(world.now + 0.1, None, look, None)

    world.schedule(60.0, None, look, None)
    world.run_until(660.0)
    victim = world.processes[PeerId("p015")]
    false_alarms = alarms
    world.pause(victim.name, 1e6)
    stopped_at = world.now
    others = [p for n, p in world.processes.items() if n != victim.name]
    while any(victim.name in p.machine.core.membership.live for p in others) and world.now < stopped_at + 120.0:
        world.run_until(world.now + 0.05)
    return {
        "false_alarms_a_peer_hour": round(false_alarms / 16 * 6, 3),
        "lost_by_all_after_s": round(world.now - stopped_at, 2),
    }


def takeover(seconds: float | None) -> Figures:
    """One of 16 peers is alive and merges, but takes 100 s for it: what its versions wait for, and what haste costs.
    ``seconds`` fixes the takeover time; None measures it, as the protocol does. An hour."""
    world = swarm(16, heartbeat_s=1.0, takeover_s=seconds)
    lame = PeerId("p015")
    world.settings[lame] = msgspec.structs.replace(world.settings[lame], work_s=100.0)
    world.run_until(120.0)
    world.checks.versions = world.checks.forks = 0
    before = dict(world.checks.newest)
    world.network.is_measured, world.network.payload_bytes = True, 0
    world.run_until(world.now + 3600.0)
    made = sum(world.checks.newest.values()) - sum(before.values())
    return {
        "versions_an_hour": made,
        "forks": world.checks.forks,
        "payload_bytes_a_version": round(world.network.payload_bytes / max(1, made)),
        "tokens_lost": world.checks.tokens_lost,
    }


def measurements(hours: float) -> dict[str, Callable[[], Figures]]:
    """All of them, by name."""
    tenth = FaultRates(crash=0.07 / 60, wipe=0.03 / 60)
    hundredth = FaultRates(crash=0.007 / 60, wipe=0.003 / 60)
    found: dict[str, Callable[[], Figures]] = {
        "no churn": lambda: under(FaultRates(), hours),
        "1 % an hour": lambda: under(hundredth, hours),
        "10 % an hour": lambda: under(tenth, hours),
        "10 % a minute": lambda: under(FaultRates(crash=0.07, wipe=0.03, break_=0.2), 0.5),
        "region cut for 10 minutes": lambda: under(FaultRates(), 0.5, (300.0, 900.0)),
    }
    for peers in (4, 16, 64, 256):
        found[f"control traffic, {peers} peers"] = lambda peers=peers: control_traffic(peers)  # type: ignore[misc]
    for heartbeat_s in (0.5, 1.0, 2.0, 5.0):
        for jitter_s in (0.02, 1.0):
            found[f"heartbeat {heartbeat_s} s, jitter {jitter_s} s"] = (
                lambda heartbeat_s=heartbeat_s, jitter_s=jitter_s: deadlines(heartbeat_s, jitter_s)  # type: ignore[misc]
            )
    for seconds in (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, None):
        found[f"takeover after {seconds or 'what was measured'}"] = (
            lambda seconds=seconds: takeover(seconds)  # type: ignore[misc]
        )
    return found


def main() -> None:
    """Measure, print, write."""
    parser = bench.parser(__doc__, has_plot=False)
    parser.add_argument("--hours", type=float, default=4.0, help="simulated hours of churn")
    parser.add_argument("--only", help="measure only cases whose name contains this")
    options = parser.parse_args()
    for name, measure in measurements(options.hours).items():
        if options.only is None or options.only in name:
            figures = measure()
            print(name, figures, flush=True)
            bench.write(options, "protocol/churn", {"name": name}, figures)


if __name__ == "__main__":
    main()
