"""Simulator's network against real peers: both over throttled lines with the same settings.

    python -m benchmarks.scale.calibration --json FILE [--peers 16] [--up 2mbit] [--down 4mbit] [--seconds 150]
    python -m benchmarks.scale.calibration --json FILE --peers 64 --followers 48 --up 50mbit --down 300mbit
        --round-trip-ms 100 --jitter-ms 10 --step-s 4 --overlap 2 --fragments 24 --parameters 2400000

1. Both sides run the protocol's state machine with the same manifest. Real peers are node processes in the sites of a
   throttled network, with learners that wait instead of computing (calibration_peer.py); simulated ones share uplinks.
2. The simulator's payloads have the sizes that the real peers sent, because the bytes of a codec are another question
   (docs/results.md). Everything else is a setting.
3. Counted are the rounds that are announced in the window, and what became of them within ``DRAIN_S`` after it.
4. Real bytes are those of all interfaces, acknowledgements included; simulated ones are messages and payloads with
   headers, those of audits too: a young chain's take as much as its contributions and commits together.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks import bench
from benchmarks.netbed.namespaces import TestbedError, kill_inside
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import address, find_topology, parse_topology
from benchmarks.scale.calibration_peer import SCHEDULE, TOKENS, live, schedule_of
from benchmarks.scale.sightings import Sightings, figures, gather
from benchmarks.wan import sites
from benchmarks.wire import line
from benchmarks.wire.exchange_peer import run_of
from p2pdiloco.peer.options import PeerOptions, protocol_config
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.protocol.state import ProtocolConfig
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting, Process
from tests.machine_sim.shared_link_network import PACKET_BYTES, PAYLOAD_SHARE, Bandwidth, SharedNetwork, share_lines
from tests.machine_sim.transcript import Transcript
from tests.machine_sim.world import World

WARM_UP_S = 30.0
"""Least time until counting begins; every fragment has had a round by then (``warm_up_s``)."""
DRAIN_S = 15.0
PATIENCE_S = 240.0
MEASURED_BYTES = 16
"""That ``Network.measure`` counts for a message beside its body."""
ALLOWED = 0.2


# -- real --------------------------------------------------------------------------------------------------------------


class Peers:
    """Real ones, in the sites of a testbed: forks of this process, which has loaded all that they need."""

    def __init__(self, made: Testbed, config: line.Message, folder: str) -> None:
        """``folder``: for all of theirs, which outlives them, since they are killed."""
        context = multiprocessing.get_context("fork")
        self._pipes = []
        for index in range(config["peers"]):
            ours, theirs = context.Pipe()
            told = {**config, "index": index, "host": address(index), "folder": f"{folder}/{index}"}
            context.Process(target=live, args=(made.site(index), told, theirs), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def answers(self) -> list[line.Message]:
        """One of each.

        Raises:
            BenchmarkError: a peer failed, or does not answer.
        """
        found = []
        for index, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE_S):
                raise sites.BenchmarkError(f"peer {index} does not answer")
            found.append(pipe.recv())
            if "error" in found[-1]:
                raise sites.BenchmarkError(f"peer {index}: {found[-1]['error']}")
        return found

    def ask(self, do: str, **more: object) -> list[line.Message]:
        """All of them."""
        for pipe in self._pipes:
            pipe.send({"do": do, **more})
        return self.answers()


def real(options: argparse.Namespace, config: line.Message) -> dict[str, float]:
    """The real swarm's figures.

    Raises:
        BenchmarkError, TestbedError
    """
    sites.on_sigterm()
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(sites.network(toml_of(options), is_verified=options.verified))
        sites.widen(made)
        folder = stack.enter_context(TemporaryDirectory(prefix="p2pdiloco-calibration-"))
        try:
            peers = Peers(made, config, folder)
            addresses = [one["address"] for one in peers.answers()]
            peers.ask("connect", addresses=addresses)
            made.rewind()
            time.sleep(2.0)
            peers.ask("go")
            time.sleep(warm_up_s(options))
            before = peers.ask("bytes")
            time.sleep(options.seconds)
            after = peers.ask("bytes")
            time.sleep(DRAIN_S)
            seen = gather(one["seen"] for one in peers.ask("told"))
        finally:
            kill_inside([made.site(i) for i in range(options.peers)])
    rates = [(b["sent"] - a["sent"]) / (b["at"] - a["at"]) for a, b in zip(before, after, strict=True)]
    return {
        **figures(seen, before[0]["at"], after[0]["at"], options.peers),
        "bytes_per_s": statistics.fmean(rates),
        "payload": seen.payload_bytes / max(1, seen.payloads),
        "sent_again": sum(b["sent_again"] - a["sent_again"] for a, b in zip(before, after, strict=True))
        / sum(b["segments"] - a["segments"] for a, b in zip(before, after, strict=True)),
        "cpu_cores": sum((b["cpu_s"] - a["cpu_s"]) for a, b in zip(before, after, strict=True)) / options.seconds,
    }


# -- simulated ---------------------------------------------------------------------------------------------------------


class Watcher(Transcript):
    """Notes what machines see, instead of writing it down."""

    def __init__(self, fragment_of: Sequence[int]) -> None:
        super().__init__()
        self.seen = Sightings()
        self._fragment_of = fragment_of

    def write(self, process: Process, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        self.seen.note(process.name, process.world.now, event, effects, self._fragment_of)


def simulated(options: argparse.Namespace, payload: float) -> dict[str, float]:
    """The same swarm in virtual time. ``payload``: bytes."""
    config = config_of(options)
    manifest, _ = run_of(config, schedule_of(config))
    names = [PeerId(f"p{i:03}") for i in range(options.peers)]
    base = protocol_config(manifest, PeerOptions(folder=Path("/nowhere")), names[0])

    def make_config(name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(base, peer=name, expects_learner=setting.has_learner)

    fragment_of = [f for f, shards in enumerate(base.fragments) for _ in shards]
    watcher = Watcher(fragment_of)
    world = World(options.seed, make_config, NetworkSetting(), watcher)
    topology = parse_topology(toml_of(options))
    for a, b in permutations(range(options.peers), 2):
        path = topology.path(a, b)
        least_s = max(0.0, path.round_trip_s / 2 - path.jitter_s)
        quality = LinkQuality(delay_s=least_s, jitter_s=2 * path.jitter_s, bytes_per_s=1e9)
        world.network.qualities[names[a], names[b]] = quality
    lines = [Bandwidth(up_bytes_per_s=one.up_bps / 8, down_bytes_per_s=one.down_bps / 8) for one in topology.sites]
    share_lines(world, dict(zip(names, lines, strict=True)))
    learners = options.peers - options.followers
    for i, name in enumerate(names):
        setting = PeerSetting(
            step_s=options.step_s,
            step_jitter=options.jitter,
            tokens_per_step=TOKENS,
            payload_bytes=round(payload),
            state_bytes=1000,
            has_learner=i < learners,
        )
        world.add(name, setting, at=options.step_s * (i % learners) / learners, is_founder=i == 0)
    begin = 10.0 + warm_up_s(options)
    world.run_until(begin)
    network = world.network
    network.is_measured, messages = True, network.messages
    world.run_until(begin + options.seconds)
    assert isinstance(network, SharedNetwork)
    sent = network.control_bytes + (network.payload_bytes + network.fetched_bytes) / PAYLOAD_SHARE
    sent += (network.messages - messages) * (PACKET_BYTES - MEASURED_BYTES)
    world.run_until(begin + options.seconds + DRAIN_S)
    return {
        **figures(watcher.seen, begin, begin + options.seconds, options.peers),
        "bytes_per_s": sent / options.seconds / options.peers,
        "violations": len(world.checks.violations),
    }


# -- both --------------------------------------------------------------------------------------------------------------


def warm_up_s(options: argparse.Namespace) -> float:
    """Seconds of steps before anything is counted."""
    return max(WARM_UP_S, 1.25 * float(options.sync_every * options.step_s))


def toml_of(options: argparse.Namespace) -> str:
    """The network: a shipped one, or equal lines and paths."""
    if options.topology:
        return find_topology(options.topology).read_text(encoding="utf-8")
    text = sites.topology_toml("calibration", [(options.up, options.down)] * options.peers, {})
    path = f"round_trip_ms = {options.round_trip_ms:g}\njitter_ms = {options.jitter_ms:g}"
    return text.replace("[defaults]", f"[defaults]\n{path}")


def config_of(options: argparse.Namespace) -> line.Message:
    """What all peers are told."""
    names = ("peers", "followers", "parameters", "step_s", "jitter", *SCHEDULE)
    found = {name: getattr(options, name) for name in names} | {"codec": "int4", "merge": "rda"}
    site = parse_topology(toml_of(options)).sites[0]
    for name, rate in (("up_budget", site.up_bps), ("down_budget", site.down_bps)):
        found[name] = getattr(options, name) * rate / 8 if getattr(options, name) else None
    return found


def shards_of(config: line.Message) -> int:
    """Of the model."""
    manifest, _ = run_of(config, schedule_of(config))
    return len(Layout.of(manifest).shards)


COLUMNS: list[bench.Column] = [
    ("contributors", "contributors", ".2f"),
    ("steps each", "steps_a_contribution", ".1f"),
    ("rounds kept", "rounds_kept", ".0%"),
    ("turn to commit, s", "made_s", ".2f"),
    ("to a peer, s", "taken_s", ".2f"),
    ("to all, s", "taken_by_all_s", ".2f"),
    ("9 of 10 to all, s", "taken_by_all_90_s", ".2f"),
    ("half of the peers, s", "t50_s", ".2f"),
    ("99 % of the peers, s", "t99_s", ".2f"),
    ("forks", "forks", ".0f"),
    ("kB/s a peer", "kilobytes", ".1f"),
    ("kB a version and peer", "version_kilobytes", ".1f"),
]


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench.parser(__doc__, rows="setting", has_plot=False)
    parser.add_argument("--peers", type=int, default=16, help="number of peers")
    parser.add_argument("--topology", help="shipped topology or file with as many sites, instead of equal lines")
    parser.add_argument("--up", default="2mbit", help="line rate of each peer, up")
    parser.add_argument("--down", default="4mbit", help="line rate of each peer, down")
    parser.add_argument("--up-budget", type=float, help="--up of each peer, as a share of the line (default: learned)")
    parser.add_argument("--down-budget", type=float, help="--down of each peer, as a share of the line (default: none)")
    parser.add_argument("--round-trip-ms", type=float, default=40.0, help="round trip between two sites")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="largest deviation of a one-way delay")
    parser.add_argument("--followers", type=int, default=0, help="peers, the last ones, that have no learner")
    parser.add_argument("--parameters", type=int, default=1_200_000, help="parameters of the model")
    parser.add_argument("--fragments", type=int, default=12, help="number of fragments (P)")
    parser.add_argument("--max-shard", type=int, default=1 << 20, help="largest shard, in parameters")
    parser.add_argument("--sync-every", type=int, default=24, help="steps between two rounds of a fragment (H)")
    parser.add_argument("--overlap", type=int, default=4, help="overlap in steps (tau)")
    parser.add_argument("--together", type=int, default=MOST_TOGETHER, help="learners that are merged without groups")
    parser.add_argument("--step-s", type=float, default=1.0, help="seconds per step")
    parser.add_argument("--jitter", type=float, default=0.2, help="largest deviation of a step's time, as a share")
    parser.add_argument("--seconds", type=float, default=96.0, help="duration of the measurement")
    parser.add_argument("--seed", type=int, default=1, help="seed of the simulation")
    parser.add_argument("--verified", action="store_true", help="measure all lines first (takes minutes)")
    parser.add_argument("--payload", type=float, help="only simulate, with payloads of this many bytes")
    found = parser.parse_args(argv)
    if not 0 <= found.followers < found.peers:
        parser.error(f"--followers {found.followers}: at least one of {found.peers} peers has a learner")
    return found


def main() -> int:
    """Measure, simulate, compare."""
    given = options()
    config = config_of(given)
    rows: dict[str, dict[str, Any]] = {}
    try:
        if given.payload is None:
            rows["real"] = real(given, config)
    except (sites.BenchmarkError, TestbedError) as error:
        print(error, file=sys.stderr)
        return 1
    rows["simulated"] = simulated(given, given.payload or rows["real"]["payload"])
    rounds = given.seconds / given.step_s / given.sync_every * shards_of(config)
    for one in rows.values():
        one["kilobytes"], one["rounds_kept"] = one["bytes_per_s"] / 1e3, one["versions"] / rounds
        one["version_kilobytes"] = one["kilobytes"] * given.seconds / max(1, one["versions"])
    print(bench.table("", COLUMNS, rows))
    print({name: {key: round(value, 3) for key, value in one.items()} for name, one in rows.items()})
    if given.payload is not None:
        return 0
    wrong = {
        title: rows["simulated"][key] / rows["real"][key] - 1
        for title, key, _ in COLUMNS
        if rows["real"][key] and abs(rows["simulated"][key] / rows["real"][key] - 1) > ALLOWED
    }
    told = ", ".join(f"{title} {error:+.0%}" for title, error in wrong.items())
    print(f"off by more than {ALLOWED:.0%}: {told}" if wrong else f"all within {ALLOWED:.0%}")
    bench.write(given, "scale/calibration", {}, rows)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
