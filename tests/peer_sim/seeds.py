"""What a seed stands for: a world, its faults, and how it ends."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Literal

import msgspec

from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, ScheduleConfig
from tests.peer_sim.blackout import Blackout, darkened
from tests.peer_sim.faults import draw_faults, draw_rough, draw_shortages
from tests.peer_sim.lying_owner import LIES
from tests.peer_sim.machine import PeerSetting
from tests.peer_sim.process_faults import schedule
from tests.peer_sim.report import DARK, LYING, PRIVATE, ROUGH, SHORT, Outcome
from tests.peer_sim.world import World, WorldSetting

FURTHER = "further faults 185"
LATE = "late faults 1"
"""What they are drawn from: so that seeds that once failed (regressions.toml) have none, and are the same worlds."""


def draw(seed: int) -> tuple[WorldSetting, Random]:
    """The world of a seed, and what its faults are drawn from."""
    random = Random(f"{seed}/setting")
    count = random.choice((1, 2, 2, 3, 3, 3, 4, 5))
    fragments = random.choice((1, 2, 2, 3))
    sync_every = fragments * random.choice((2, 4, 6))
    base_s = random.choice((0.1, 0.2, 0.4))
    peers = tuple(
        PeerSetting(
            step_s=base_s * random.choice((1.0, 1.0, 1.2, 2.0)),
            tokens_per_step=random.choice((10, 10, 20)),
            is_follower=bool(i) and random.random() < 0.15,
            reattach_s=random.choice((0.0, 10.0, 10.0, 60.0)),
            load_s=0.05 + random.random(),
            clock=(1000.0 * random.random(), 1 + 0.02 * (random.random() - 0.5)),
            tensor_threads=2 + i % 2 if seed % 5 == 4 else 1,
        )
        for i in range(count)
    )
    setting = WorldSetting(
        peers=peers,
        schedule=ScheduleConfig(
            fragments=fragments,
            sync_every=sync_every,
            overlap=min(random.choice((1, 2, 4)), sync_every - 1),
            min_quorum=random.choice((1, 1, 2)),
            grace_share=random.choice((0.0, 0.7, 0.7)),
            together=Random(f"{seed}/groups").choice((2, 3, *(MOST_TOGETHER,) * 4)),
        ),
        outer=OuterConfig(
            learning_rate=random.choice((0.4, 0.5, 1.0)),
            momentum=random.choice((0.0, 0.5, 0.7)),
            bias_correction=seed % 3 > 0,
            merge=random.choice(("rda", "direct")),
            adopt="overwrite" if random.random() < 0.08 else "carry",
            momentum_type="bfloat16" if seed // 2 % 2 else "float32",
        ),
        codec=CodecConfig() if random.random() < 0.15 else CodecConfig(up="bf16", down="bf16"),
        steps=sync_every * random.choice((4, 8, 16)),
        shards_a_fragment=random.choice((1, 2)),
        blocks=random.choice((0, 40)),
        delay_s=random.choice((0.005, 0.02, 0.1)),
        bytes_per_s=random.choice((1e5, 1e6, 1e7)),
        keep_checkpoints=random.choice((1, 2, 2)),
        checkpoint_s=random.choice((2.0, 5.0, 60.0)),
        has_payloads_on_disk=seed % 2 == 1,
        is_thrifty=seed // 4 % 2 == 1,
    )
    return setting, Random(f"{seed}/faults")


def roughened(setting: WorldSetting, random: Random) -> WorldSetting:
    """With what makes rare moments common: copies and links that take their time, machines without a compiler."""
    link_s, copies = random.choice((0.001, 0.05, 0.5)), random.choice((0, 1, 3))
    peers = tuple(
        msgspec.structs.replace(
            peer,
            has_compiler=random.random() < 0.7,
            is_follower=False,
            link_s=min(link_s, peer.step_s),  # else what a learner says of its steps waits longer and longer
            copies=copies,
            is_rough=True,
        )
        for peer in setting.peers
    )
    adopt: Literal["carry", "overwrite"] = "overwrite" if random.random() < 0.2 else "carry"
    return msgspec.structs.replace(setting, peers=peers, outer=msgspec.structs.replace(setting.outer, adopt=adopt))


def with_lying_owner(setting: WorldSetting, random: Random) -> WorldSetting:
    """With at least three peers, one of which lies, and twice as many steps."""
    peers = [*setting.peers, *setting.peers, *setting.peers][: max(3, len(setting.peers))]
    place = random.randrange(len(peers))
    peers[place] = msgspec.structs.replace(peers[place], lie=random.choice(LIES))
    return msgspec.structs.replace(setting, peers=tuple(peers), steps=2 * setting.steps)


def run_seed(seed: int) -> Outcome:
    """One world, from its founding to its end."""
    number = seed % ROUGH
    setting, random = draw(number)
    setting = msgspec.structs.replace(setting, is_private=seed % LYING >= PRIVATE)
    is_dark, is_rough = seed >= DARK, seed % PRIVATE >= ROUGH
    if seed % SHORT >= LYING:
        setting = with_lying_owner(setting, Random(f"{number}/lying"))
    if is_rough:
        setting = roughened(setting, Random(f"{number}/rough setting"))
    if is_dark:
        setting = darkened(setting, Random(f"{number}/dark setting"))
    world = World(number, setting)
    names = list(world.computers)
    typical_s = max(peer.step_s for peer in setting.peers) * setting.steps
    if is_dark:
        faults, typical_s = [], 0.0  # nobody comes late
        cut = Random(f"{number}/blackout")
        world.blackout = Blackout(world, cut, 5.0 + cut.random() * 20.0)
    elif is_rough:
        faults = draw_rough(Random(f"{number}/rough faults"), names, typical_s)
    else:
        further, late = Random(f"{number}/{FURTHER}"), Random(f"{number}/{LATE}")
        faults = draw_faults(random, further, late, names, typical_s)
    if SHORT <= seed < DARK:
        faults = sorted(
            [*faults, *draw_shortages(Random(f"{number}/shortages"), names, typical_s)], key=lambda one: one.at
        )
    for i, name in enumerate(names):
        late_s = 0.0 if i == 0 else 0.2 + random.random() * (typical_s / 3 if random.random() < 0.3 else 0.5)
        world.at(late_s, partial(world.begin, name))
    schedule(world, faults)
    violations = world.run()
    checks = world.checks
    return Outcome(
        seed=seed,
        violations=tuple(violations),
        commits=checks.counted["commits"],
        contributions=checks.counted["contributions"],
        forks=checks.counted["forks"],
        lives=checks.counted["lives"],
        faults=len(faults),
        happened=dict(world.happened),
        audits=checks.counted["audits"],
        undelivered=checks.counted["undelivered"],
        wrong={str(owner): count for owner, count in world.lying_owners.wrong.items()},
        caught={str(owner): count for owner, count in world.lying_owners.caught.items()},
        seconds=world.now,
    )
