"""The situations that a reader wants to understand, each as a short scripted run with its transcript.

Three peers p0 to p2 train one fragment of one shard, H = 4, on a clean network of 20 ms. What follows from a scenario
is written by the protocol, not by the script: tests/golden holds the transcripts.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import PeerId, RunId, ShardId
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting, Process
from tests.machine_sim.transcript import Transcript
from tests.machine_sim.world import World

SETTLED_S = 3.0
"""By then all three train and some versions are made."""
TIE_SEED = 15
"""In this world two cut-off peers commit the same number of tokens."""
P0, P1, P2, P3, P4 = (PeerId(f"p{i}") for i in range(5))
ALL = (P0, P1, P2)


def base_config(**changes: object) -> ProtocolConfig:
    """The scenarios' configuration."""
    config = ProtocolConfig(
        run=RunId("golden"),
        peer=P0,
        fragments=((ShardId(0),),),
        sync_every=4,
        overlap=2,
        min_quorum=1,
        grace_share=0.7,
        total_steps=10**6,
        takeover_ceiling_s=2.0,
        request_s=3.0,
        heartbeat_s=0.5,
    )
    return msgspec.structs.replace(config, **changes)


def make_world(
    config: ProtocolConfig, peers: dict[PeerId, PeerSetting], transcript: Transcript | None, seed: int = 7
) -> World:
    """The first peer founds, the others come at once."""

    def make_config(name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(config, peer=name, weight=setting.weight)

    world = World(seed, make_config, NetworkSetting(redial_s=0.3, patience_s=1.5), transcript)
    world.conditions.directory_lag_s = 0.1
    world.network.default = LinkQuality(delay_s=0.02, jitter_s=0.0)
    for i, (name, setting) in enumerate(peers.items()):
        world.add(name, setting, is_founder=i == 0)
    return world


def three(transcript: Transcript, step_s: tuple[float, float, float] = (0.25, 0.25, 0.25), **changes: object) -> World:
    """Three settled peers; the transcript begins now."""
    peers = {name: PeerSetting(step_s=s) for name, s in zip(ALL, step_s, strict=True)}
    world = make_world(base_config(**changes), peers, transcript)
    world.run_until(SETTLED_S)
    _until_rest(world)
    transcript.lines.clear()
    return world


def _until_rest(world: World) -> None:
    """No round is open, and all heads are equal."""

    def is_at_rest(_: Process) -> bool:
        living = world.living()
        return len({p.states.heads[0] for p in living}) == 1 and not any(
            p.machine.contributions.rounds[0].open for p in living
        )

    _until(world, is_at_rest, 10.0)


def _until(world: World, condition: Callable[[Process], bool], limit_s: float = 5.0) -> Process:
    """Let time pass until a process is in some state.

    Raises:
        AssertionError: it never was.
    """
    end = world.now + limit_s
    while world.now < end:
        for process in world.living():
            if condition(process):
                return process
        world.run_until(world.now + 0.001)
    raise AssertionError("the scenario did not come to its point")


def _is_merging(process: Process) -> bool:
    return bool(process.machine.aggregation.jobs)


def _is_collecting(process: Process) -> bool:
    return bool(process.machine.aggregation.collections[0].given)


def normal_round(transcript: Transcript) -> World:
    """A normal round: announced, contributed to, merged by its owner, committed, applied by all."""
    world = three(transcript)
    version = world.checks.newest[ShardId(0)]
    _until(world, lambda _: world.checks.newest[ShardId(0)] > version + 1)
    return world


def slow_learner(transcript: Transcript) -> World:
    """A slow learner: p2's steps take four times as long. Nobody waits longer than the grace window; p2 contributes its
    fewer steps to a later version."""
    world = three(transcript, (0.25, 0.25, 1.0))
    world.run_until(world.now + 2.5)
    return world


def owner_dies_before_its_commit(transcript: Transcript) -> World:
    """The owner dies while it merges. The others lose it by its broken connections and offer the same contributions to
    the next owner at once: no token is lost."""
    world = three(transcript)
    owner = _until(world, _is_merging)
    transcript.say(f"{owner.name} dies")
    world.crash(owner.name, keeps_disk=True, restart_s=None)
    world.run_until(world.now + 1.0)
    return world


def owner_dies_after_its_commit(transcript: Transcript) -> World:
    """The owner dies when its commit has reached one peer only. The other hears of that head at the next round and
    asks for it."""
    world = three(transcript)
    for name in (P1, P2):  # so that one gets the commit much earlier than the other
        world.network.slow_down((name, P0), LinkQuality(delay_s=0.1))
    owner = _until(world, _is_merging)
    version = world.checks.newest[ShardId(0)]
    first = _until(world, lambda p: p is not owner and _version(p) > version)
    transcript.say(f"{owner.name} dies; only {first.name} has version {version + 1}")
    world.crash(owner.name, keeps_disk=True, restart_s=None)
    world.run_until(world.now + 2.0)
    return world


def _version(process: Process) -> int:
    head = process.machine.core.chains[0].head
    return 0 if head is None else head.version


def takeover_race(transcript: Transcript) -> World:
    """The owner stands still (SIGSTOP) with contributions in hand; the next one takes over and commits. When the first
    goes on it commits, too: a fork, which the heavier head wins."""
    world = three(transcript)
    owner = _until(world, _is_collecting)
    transcript.say(f"{owner.name} stands still for 1.8 s")
    world.pause(owner.name, 1.8)
    world.run_until(world.now + 2.2)
    _until_rest(world)
    return world


def partition_and_heal(transcript: Transcript) -> World:
    """p0 is cut off from p1 and p2 for 2.5 s. Both sides go on; when the cut is over the lighter side takes the heavier
    chain, and its learner keeps what the lighter chain had merged of it (restored) for its next round."""
    world = three(transcript)
    directions = [(P0, P1), (P1, P0), (P0, P2), (P2, P0)]
    transcript.say("the network falls apart: p0 | p1, p2")
    world.network.cut(directions)
    world.run_until(world.now + 2.5)
    transcript.say("the cut is over")
    world.network.mend(directions)
    world.run_until(world.now + 1.0)
    _until_rest(world)
    return world


def join_during_a_round(transcript: Transcript) -> World:
    """p3 comes while a round is open: it gets heads from all, the state from one, and contributes from the next
    round."""
    world = three(transcript)
    _until(world, _is_collecting)
    world.add(P3, PeerSetting(step_s=0.25), world.now)
    world.run_until(world.now + 2.5)
    return world


def refused_stale_contribution(transcript: Transcript) -> World:
    """p2's upload is slow and nobody waits (grace 0): its contribution comes when the version is made, and is refused
    with the newest head; its tokens are in p2's next one."""
    world = three(transcript, grace_share=0.0)
    for name in (P0, P1):
        world.network.slow_down((P2, name), LinkQuality(delay_s=0.15, bytes_per_s=2e4))
    world.run_until(world.now + 2.5)
    return world


def graceful_leave(transcript: Transcript) -> World:
    """p1 is asked to leave: it stops training, opens a round for what is unmerged, and goes when all of it is
    merged."""
    world = three(transcript)
    world.processes[P1].tell(ev.LeaveRequested("asked to"))
    _until(world, lambda _: P1 in world.fates.gone)
    world.run_until(world.now + 0.3)
    return world


def restart_from_checkpoint(transcript: Transcript) -> World:
    """p1 dies and restarts from its disk a second later: it brings its shard, asks for the commits that it missed, and
    its learner starts as a new learner."""
    world = three(transcript)
    world.save(P1)
    world.run_until(world.now + 0.5)
    transcript.say("p1 dies")
    world.crash(P1, keeps_disk=True, restart_s=1.0)
    world.run_until(world.now + 3.0)
    return world


def fork_with_a_tie(transcript: Transcript) -> World:
    """Two peers are cut apart for one round and each commits as many tokens: the larger id wins, everywhere."""
    setting = PeerSetting(step_s=0.25, step_jitter=0.0)
    world = make_world(base_config(), {P0: setting, P1: setting}, transcript, seed=TIE_SEED)
    world.run_until(SETTLED_S)
    _until_rest(world)
    transcript.lines.clear()
    directions = [(P0, P1), (P1, P0)]
    transcript.say("the network falls apart: p0 | p1")
    world.network.cut(directions)
    version = world.checks.newest[ShardId(0)]
    _until(world, lambda _: min(map(_version, world.living())) > version, 8.0)
    heads = [process.machine.core.head(ShardId(0)) for process in world.living()]
    assert heads[0].tokens == heads[1].tokens, "a tie"
    transcript.say("the cut is over")
    world.network.mend(directions)
    _until_rest(world)
    return world


STORIES: dict[str, Callable[[Transcript], World]] = {
    "normal-round": normal_round,
    "slow-learner": slow_learner,
    "owner-dies-before-its-commit": owner_dies_before_its_commit,
    "owner-dies-after-its-commit": owner_dies_after_its_commit,
    "takeover-race": takeover_race,
    "partition-and-heal": partition_and_heal,
    "join-during-a-round": join_during_a_round,
    "refused-stale-contribution": refused_stale_contribution,
    "graceful-leave": graceful_leave,
    "restart-from-checkpoint": restart_from_checkpoint,
    "fork-with-a-tie": fork_with_a_tie,
}


def transcript(name: str) -> str:
    """The scenario's story and transcript.

    Raises:
        KeyError: there is no such scenario.
        AssertionError: it broke an invariant.
    """
    scenario = STORIES[name]
    told = Transcript(is_full=False)
    world = scenario(told)
    assert not world.checks.violations, world.checks.violations
    story = " ".join((scenario.__doc__ or "").split())
    return f"{story}\n\n" + "\n".join(told.lines) + "\n"
