"""Time that one event keeps the event loop of a peer with many shards busy: state machine and cache sweep.

    python benchmarks/protocol/loop.py [--shards 960] [--fragments 24] [--peers 8] [--seconds 60]

Peers of a simulated world train. The CPU time of each event is measured at one of them, so a busy machine does not
matter. benchmarks/notes.md has the figures.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from itertools import pairwise

import msgspec

from p2pdiloco.peer.payload_cache import SWEEP_S, SWEPT_AT_ONCE, PayloadCache, ShardPayloads
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, RunId, ShardId
from p2pdiloco.protocol.manifest import TensorSpec, make_layout
from p2pdiloco.protocol.state import ProtocolConfig
from p2pdiloco.transport.identity import Identity
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.world import World


def world_of(shards: int, fragments: int, peers: int) -> World:
    """All train at the same pace, over 40 ms links; a fragment is due every two seconds and less."""
    bounds = [shards * f // fragments for f in range(fragments + 1)]
    names = [PeerId(f"p{i:03}") for i in range(peers)]
    config = ProtocolConfig(
        run=RunId("loop"),
        peer=names[0],
        fragments=tuple(tuple(map(ShardId, range(a, b))) for a, b in pairwise(bounds)),
        sync_every=fragments,
        overlap=2,
        min_quorum=peers // 2,
        grace_share=0.7,
        total_steps=10**9,
    )

    def make_config(name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(config, peer=name)

    world = World(1, make_config, NetworkSetting(redial_s=2.0, patience_s=15.0))
    world.network.default = LinkQuality(delay_s=0.02, jitter_s=0.01)
    for i, name in enumerate(names):
        world.add(name, PeerSetting(step_s=1.0), is_founder=i == 0)
    return world


def label_of(event: ev.Event) -> str:
    """An event's kind; of a message its own."""
    return type(event.message).__name__ if isinstance(event, ev.Received) else type(event).__name__


def events_of(world: World, seconds: float) -> dict[str, list[float]]:
    """Processor seconds of the founder's machine, by kind of event."""
    world.run_until(0.0)
    times: dict[str, list[float]] = defaultdict(list)
    machine = next(iter(world.processes.values())).machine
    handle = machine.handle

    def timed(event: ev.Event, now: float) -> list[ef.Effect]:
        began = time.thread_time()
        effects = handle(event, now)
        times[label_of(event)].append(time.thread_time() - began)
        return effects

    machine.handle = timed  # type: ignore[method-assign]
    world.run_until(seconds)
    machine.handle = handle  # type: ignore[method-assign]
    return times


def sweeps_of(world: World, shards: int) -> list[float]:
    """Processor seconds of single sweeps, with the founder's machine as it is and every payload at hand."""
    process = next(iter(world.processes.values()))
    specs = (TensorSpec(name=f"w{s}", shape=(64,), merge="direct", fragment=FragmentId(s)) for s in range(shards))
    payload_cache = PayloadCache(make_layout(tuple(specs), shards, 64, "direct"), Identity.ephemeral(), RunId("run"))
    times = []
    for shard, shelf in enumerate(payload_cache.shards):
        fill(shelf, process.machine.payloads(ShardId(shard)))
    for call in range(1, 1 + -(-shards // SWEPT_AT_ONCE)):
        began = time.thread_time()
        payload_cache.sweep(process.machine, SWEEP_S * call)
        times.append(time.thread_time() - began)
    return times


def fill(shelf: ShardPayloads, payloads: set[Digest]) -> None:
    """What is wanted, and a little that is not."""
    for payload in (*payloads, Digest("one"), Digest("another")):
        shelf.put(payload, b"payload")


def report(label: str, times: list[float]) -> None:
    """A line."""
    times.sort()
    middle, most = times[len(times) // 2], times[-min(len(times), 3)]
    print(f"{label:22} {len(times):8,} {1e3 * middle:10.3f} {1e3 * most:10.3f} {1e3 * times[-1]:10.3f}")


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("shards", 960), ("fragments", 24), ("peers", 8), ("seconds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    world = world_of(given.shards, given.fragments, given.peers)
    gc.disable()
    times = events_of(world, given.seconds)
    print(f"{given.shards} shards, {given.peers} peers; ms of processor time")
    print(f"{'event':22} {'times':>8} {'median':>10} {'third':>10} {'most':>10}")
    for label, found in sorted(times.items(), key=lambda pair: -max(pair[1])):
        report(label, found)
    report("(sweep)", sweeps_of(world, given.shards))


if __name__ == "__main__":
    main()
