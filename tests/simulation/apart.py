"""``python tests/simulation/apart.py PEERS DIES_AT BACK_AT MAJORITY``: whole peers, of which all but one never meet.

That one dies and comes back at these times (seconds; 0: never). Prints what was violated, how each ended, how many
models and forks there are, as JSON. In a process of its own, as all whole peers (``tests.peer_sim.tuning``).

``python tests/simulation/apart.py stalls SEEDS``: worlds of two to four peers that all meet, in which some stand still
for 4 to 20 seconds when the run ends. Prints each as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from random import Random

from tests.peer_sim.worker import prepare

prepare()

from p2pdiloco.protocol.ids import PeerId  # noqa: E402
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, ScheduleConfig  # noqa: E402
from tests.peer_sim.machine import PeerSetting  # noqa: E402
from tests.peer_sim.world import World, WorldSetting  # noqa: E402
from tests.simulation.topologies import WHOLE, behind_routers  # noqa: E402

STEPS = 240
SETTLED_S = 10.0
"""Until then a peer that met only one may still think that it owns (rule R3b)."""


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
    names = list(world.computers)
    world.network.apart = behind_routers(names, names[:1])
    for number, name in enumerate(names):
        world.at(0.5 * number, partial(world.begin, name))
    return world


def main(peers: int, dies_at: float, back_at: float, *, needs_majority: bool) -> None:
    """See the module."""
    schedule = ScheduleConfig(fragments=1, sync_every=12, overlap=4)
    if needs_majority:
        schedule = ScheduleConfig(fragments=1, sync_every=12, overlap=4, needs_majority=True)
    world = world_of(peers, schedule)
    public, *others = world.computers
    if needs_majority:
        for name in others:
            world.computers[name].is_excused = True  # it loses what they have trained alone
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

    young: list[int] = []
    world.at(SETTLED_S, lambda: young.append(world.checks.counted["forks"]))
    world.at(1.0, look)
    violations = world.run()
    endings = {name: world.checks.endings[name] for name in waited_for if name in world.checks.endings}
    told = {
        "violations": violations,
        "statuses": [ending.status for ending in endings.values()],
        "reasons": [ending.reason for ending in endings.values()],
        "models": len({world.computers[name].last_heads for name in waited_for}),
        "forks": world.checks.counted["forks"] - young[0],
    }
    print(json.dumps(told))


def stand_still(seed: int) -> None:
    """One of the worlds with stalls."""
    random = Random(seed)
    world = world_of(random.choice((2, 3, 4)), ScheduleConfig(fragments=1, sync_every=12, overlap=4))
    world.network.apart = WHOLE

    def stall(name: PeerId, seconds: float) -> None:
        host = world.hosts.get(name)
        if host is not None and not host.is_paused:
            world.harm_until(world.now + seconds)
            host.pause()
            world.at(world.now + seconds, host.resume)

    for _ in range(random.choice((1, 1, 2, 3))):
        world.at(
            40.0 + 14.0 * random.random(), partial(stall, random.choice([*world.computers]), random.uniform(4, 20))
        )
    violations = world.run()
    statuses = [ending.status for ending in world.checks.endings.values()]
    print(json.dumps({"seed": seed, "violations": violations, "statuses": statuses, "seconds": round(world.now)}))


if __name__ == "__main__" and sys.argv[1] == "stalls":
    for number in range(int(sys.argv[2])):
        stand_still(number)
elif __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), needs_majority=sys.argv[4] == "1")
