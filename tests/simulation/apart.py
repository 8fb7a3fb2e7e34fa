"""``python tests/simulation/apart.py PEERS DIES_AT BACK_AT MAJORITY``: whole peers, of which all but one never meet.

That one dies and comes back at these times (seconds; 0: never). Prints what was violated, how each ended, how many
models and forks there are, as JSON. In a process of its own, as all whole peers (``peersim.knobs``).
"""

from __future__ import annotations

import json
import sys
from functools import partial

from p2pdiloco.peersim.worker import prepare

prepare(None)

from p2pdiloco.peersim.world import PeerSetting, World, WorldSetting  # noqa: E402
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, ScheduleConfig  # noqa: E402

STEPS = 240


def world_of(peers: int, schedule: ScheduleConfig) -> World:
    """Peers with learners on clean lines of 20 ms."""
    setting = WorldSetting(
        peers=tuple(PeerSetting(step_s=0.2, tokens_per_step=10) for _ in range(peers)),
        schedule=schedule,
        outer=OuterConfig(),
        codec=CodecConfig(up="bf16", down="bf16"),
        steps=STEPS,
        shards_a_fragment=1,
        blocks=0,
        delay_s=0.02,
        bytes_per_s=1e7,
    )
    world = World(1, setting)
    names = list(world.identities)
    world.network.unreachable = frozenset(names[1:])
    for number, name in enumerate(names):
        world.at(0.5 * number, partial(world.begin, name))
    return world


def main(peers: int, dies_at: float, back_at: float, *, needs_majority: bool) -> None:
    """See the module."""
    schedule = ScheduleConfig(fragments=1, sync_every=12, overlap=4)
    if needs_majority:
        schedule = ScheduleConfig(fragments=1, sync_every=12, overlap=4, needs_majority=True)
    world = world_of(peers, schedule)
    public, *others = world.identities
    if needs_majority:
        world.excused.update(others)  # they lose what they have trained alone
    if dies_at:
        world.happened["node"] += 1
        world.at(dies_at, partial(world.kill, public, with_learner=True))
    if back_at:
        world.at(back_at, partial(world.begin, public))
    waited_for = {*others, *([public] if back_at or not dies_at else [])}

    def look() -> None:
        if waited_for <= world.checks.endings.keys():
            world.end()
        else:
            world.at(world.now + 1.0, look)

    world.at(1.0, look)
    violations = world.run()
    endings = {name: world.checks.endings[name] for name in waited_for if name in world.checks.endings}
    told = {
        "violations": violations,
        "statuses": [ending.status for ending in endings.values()],
        "reasons": [ending.reason for ending in endings.values()],
        "models": len({world.last_heads[name] for name in waited_for}),
        "forks": world.checks.forks,
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), needs_majority=sys.argv[4] == "1")
