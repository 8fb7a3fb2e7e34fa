"""``python -m tests.simulation.notice SEED...``: whole peers, of which one leaves because its machine is taken back.

The moment is drawn, and nothing else happens. Prints one line of JSON per world, in a process of its own, as all whole
peers (``tests.peer_sim.tuning``). The leaver's own report is not trusted: lost tokens are those that the remaining
peers' marks lack.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.peer_sim.worker import prepare

if TYPE_CHECKING:
    from p2pdiloco.protocol.ids import LearnerId, PeerId
    from tests.peer_sim.world import World


def in_world(seed: int) -> dict[str, Any] | None:
    """One world, whose leaver is drawn; None if it had nobody to lose, or nothing to merge it with."""
    import msgspec

    from tests.peer_sim.seeds import draw
    from tests.peer_sim.world import World

    setting, chance = draw(seed)
    if len(setting.peers) < 2:
        return None
    peers = tuple(msgspec.structs.replace(peer, is_follower=False) for peer in setting.peers)
    setting = msgspec.structs.replace(
        setting, peers=peers, outer=msgspec.structs.replace(setting.outer, adopt="carry"), steps=2 * setting.steps
    )
    world = World(seed, setting)
    names = list(world.computers)
    for name in names:
        world.at(0.0, partial(world.begin, name))
    leaver = chance.choice(names)
    asked: dict[str, Any] = {}

    def ask() -> None:
        host = world.hosts.get(leaver)
        if host is None or host.peer.is_over:
            return
        asked.update(at=world.now, peer=host.peer)
        host.do(lambda: host.peer.request_leave("taken back"))

    typical_s = max(peer.step_s for peer in setting.peers) * setting.steps
    world.at(3.0 + chance.uniform(0.1, 0.6) * typical_s, ask)
    gone_at: list[float] = []
    ended = world.checks.ended

    def note(peer: Any, ending: Any) -> None:
        if peer.config.peer == leaver:
            gone_at.append(world.now)
        ended(peer, ending)

    world.checks.ended = note  # type: ignore[method-assign]
    violations = world.run()
    if not asked or not gone_at:
        return None
    learner = asked["peer"].supervision.learner
    truth = world.learners.truths.get(learner)
    trained = truth.tokens[-1] if truth is not None and truth.tokens else 0
    others = [name for name in names if name != leaver and world.computers[name].last_heads]
    merged = min(_marked(world, name, learner) for name in others)
    return {
        "seed": seed,
        "seconds": gone_at[0] - asked["at"],
        "trained": trained,
        "lost": trained - merged,
        "trouble": "; ".join(violations),
    }


def _marked(world: World, name: PeerId, learner: LearnerId) -> int:
    """Tokens of ``learner`` in the model that ``name`` ended with: of the shard that has the fewest."""
    heads = enumerate(world.computers[name].last_heads)
    return min(world.checks.values[shard, head].marks.get(learner, 0) for shard, head in heads)  # type: ignore[index]


def main() -> None:
    """Those that had somebody to lose."""
    import torch

    torch.set_num_threads(1)
    for seed in map(int, sys.argv[1:]):
        found = in_world(seed)
        if found is not None:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    prepare()
    main()
