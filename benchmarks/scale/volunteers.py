"""Hundreds of volunteers behind home lines: how soon and at what cost commits reach them (simulated time, one core).

    python -m benchmarks.scale.volunteers --peers N [N ...] [--mixed] [--churn] [--unreachable 0.3] [--liars 0.1]

A model of 100M parameters in int4 and 48 shards, P = H = 24, tau = 2, steps of 2.0 to 2.2 s, paths of 40 to 60 ms. All
peers start together, and states are tiny. ``--mixed`` draws a line for each peer. With ``--churn``, half of the peers
that go leave in order, half fall silent, and as many others come. With ``--unreachable``, this share of all pairs
connects over relays only. benchmarks/scale/README.md explains the figures.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from random import Random

import msgspec

from benchmarks import bench
from benchmarks.scale import plots
from benchmarks.scale.relays import RelayedNetwork
from benchmarks.scale.worlds import OVERLAP, STEP_S, SYNC_EVERY
from p2pdiloco.peer.codec_selection import line_speed
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol.counted_tokens import TokenCounts, usual_prints
from p2pdiloco.protocol.groups import MOST_TOGETHER
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId
from p2pdiloco.protocol.messages import Commit
from p2pdiloco.protocol.state import LINE_WEIGHTS, ProtocolConfig
from tests.machine_sim.network import LinkQuality, NetworkSetting
from tests.machine_sim.process import PeerSetting, Process
from tests.machine_sim.shared_link_network import Bandwidth
from tests.machine_sim.transcript import Transcript
from tests.machine_sim.world import World
from tests.simulation import topologies

NAME = "scale/volunteers"
PATH = LinkQuality(delay_s=0.04, jitter_s=0.02, bytes_per_s=1e9)
MIXED = {(10.0, 100.0): 20, (20.0, 200.0): 30, (50.0, 300.0): 30, (100.0, 300.0): 12, (500.0, 500.0): 8}
"""Mbit/s up and down: percent of the peers (assumed)."""
DIALABLE_SHARE = 0.2
"""Peers that others can dial; fewer if too few pairs of the others are left for ``--unreachable`` (assumed)."""
SESSION_S, SESSION_SIGMA = 2400.0, 1.0
"""Median of sessions, which are log-normal (assumed)."""
GONE_S = 120.0
"""Time after which no peer remembers one that fell silent."""
START_MOST_S = 900.0
WARM_S = 1.5 * SYNC_EVERY * STEP_S
"""Time until every fragment has had a round."""
DRAIN_S = 60.0
"""Most that the last commits get to reach all peers."""
TOLD_EVERY_S = 10.0


class Spread(msgspec.Struct):
    """A commit on its way."""

    version: int
    made_at: float
    learners: int
    """Learners that train when it is made."""
    contributors: int
    round_s: float
    """From the opening of its round at its owner until it is made."""
    peers: frozenset[PeerId]
    """Peers that have all states when it is made."""
    taken_at: dict[PeerId, float] = {}
    """When each peer applied it, or took a state that holds it."""

    def seconds(self, share: float, living: frozenset[PeerId]) -> float:
        """Return the seconds until this share of its peers had it, without those that went before; infinite if too few
        have it."""
        times = sorted(self.taken_at[peer] for peer in self.peers & self.taken_at.keys())
        needed = math.ceil(share * len(self.peers & (living | self.taken_at.keys())))
        return times[needed - 1] - self.made_at if 0 < needed <= len(times) else math.inf


class Meter(Transcript):
    """Follows commits through a world, instead of writing it down."""

    def __init__(self) -> None:
        super().__init__()
        self.spreads: dict[ShardId, dict[Digest, Spread]] = defaultdict(dict)
        self.payloads = self.payloads_twice = 0
        """Commit payloads that arrived, and those of them whose commit was there."""
        self._had: set[tuple[PeerId, Digest]] = set()

    def write(self, process: Process, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        name, world = process.name, process.world
        if isinstance(event, ev.Received):
            if isinstance(event.message, Commit):
                had = (name, event.message.header.payload)
                self.payloads += 1
                self.payloads_twice += had in self._had
                self._had.add(had)
        elif isinstance(event, ev.Applied):
            version = world.checks.commits[event.shard, event.head].version
            for spread in self.spreads[event.shard].values():
                if spread.version <= version:  # a state that was fetched holds the commits before it
                    spread.taken_at.setdefault(name, world.now)
        elif isinstance(event, ev.Merged):
            for effect in effects:
                if isinstance(effect, ef.Apply) and effect.header.owner == name:
                    self._had.add((name, effect.header.payload))
                    trains = sum(one.learner is not None for one in world.processes.values())
                    opened_at = process.machine.aggregation.collections[event.shard].opened_at or 0.0
                    round_s = world.now - process.clock.when(opened_at)
                    made = (world.now, trains, len(effect.header.contributors), round_s, taking_part(world))
                    self.spreads[event.shard][effect.id] = Spread(effect.header.version, *made)

    def winning(self, world: World, since: float, until: float) -> list[Spread]:
        """Return the commits that were made in this time and are on the heaviest chain of their shard."""
        found = []
        for shard, spreads in self.spreads.items():
            heads = [head for one in world.living() if (head := one.machine.core.chains[shard].head) is not None]
            commit = max(heads, key=lambda head: head.tokens).id
            while (known := world.checks.commits[shard, commit]).header is not None:
                if commit in spreads and since <= spreads[commit].made_at < until:
                    found.append(spreads[commit])
                commit = known.parent
        return found


def taking_part(world: World) -> frozenset[PeerId]:
    """Return the peers that run and have all states."""
    processes = world.processes.values()
    return frozenset(one.name for one in processes if one.machine.core.is_current and not one.is_paused())


class Swarm:
    """A world of volunteers, and who comes and goes there."""

    def __init__(self, peers: int, options: argparse.Namespace) -> None:
        self.options = options
        self.random = Random(f"volunteers {options.seed}")
        fragments = min(SYNC_EVERY, options.shards)
        each = options.shards // fragments
        self.config = ProtocolConfig(
            run=RunId("volunteers"),
            peer=PeerId("v00000"),
            founder=PeerId("v00000"),
            fragments=tuple(tuple(ShardId(f * each + i) for i in range(each)) for f in range(fragments)),
            sync_every=SYNC_EVERY,
            overlap=OVERLAP,
            min_quorum=1,
            grace_share=0.7,
            total_steps=10**9,
            together=options.together,
        )
        self.meter = Meter()
        network = NetworkSetting(redial_s=2.0, patience_s=15.0, is_bounded=True)
        self.world = world = World(options.seed, self._config_of, network, self.meter)
        world.conditions.clock_drift = 1e-4
        self.lines: dict[PeerId, Bandwidth] = {}
        self.need = 2 * options.payload * options.shards / (SYNC_EVERY * STEP_S)
        """Bytes of payloads that a peer sends per second: contributions, and as much of commits."""
        self.network = world.network = RelayedNetwork(world, self.lines, self.need, options.together)
        world.network.default = PATH
        world.network.lines_known_at = 0.0 if options.told_lines else SYNC_EVERY * STEP_S
        world.schedule(world.network.lines_known_at, None, world.network.make_room, None)
        names = [self._add() for _ in range(peers)]
        if peers > options.together:
            self._have_groups(names)
        self.silent = dict[PeerId, float]()
        """Peers that fell silent, and when, until no peer of their group counts them as live."""
        self.silences = list[float]()
        """For how many seconds each of the others was still counted."""
        self.hidden = set[PeerId]()
        """Peers that nobody can dial."""
        self.hidden_share = max(1.0 - DIALABLE_SHARE, math.sqrt(options.unreachable))
        if options.unreachable:
            self._hide(names)

    def _config_of(self, name: PeerId, setting: PeerSetting) -> ProtocolConfig:
        return msgspec.structs.replace(self.config, peer=name, weight=setting.weight)

    def _add(self) -> PeerId:
        """Add a peer that comes now, and return its name."""
        count, given = len(self.lines), self.options
        name = PeerId(f"v{count:05}")
        up, down = given.up, given.down
        if given.mixed:
            up, down = self.random.choices(list(MIXED), list(MIXED.values()))[0]
        line = Bandwidth(up_bytes_per_s=up * 1e6 / 8, down_bytes_per_s=down * 1e6 / 8)
        self.lines[name] = line
        is_liar = int((count + 1) * given.liars) > int(count * given.liars)
        setting = PeerSetting(
            step_s=STEP_S * (1.0 + 0.1 * self.random.random()),
            payload_bytes=given.payload,
            state_bytes=1000,
            weight=LINE_WEIGHTS["fast" if is_liar else line_speed(self.need / line.up_bytes_per_s)],
            keeps_commits=is_liar,
        )
        self.world.add(name, setting, at=self.world.now, is_founder=count == 0)
        return name

    def _have_groups(self, names: Sequence[PeerId]) -> None:
        """The founder's state names all peers as usual contributors, as that of a run does that has grown."""
        disk = self.world.fates.disks[names[0]]
        usual = TokenCounts(usual=tuple(sorted((one, 0) for one in usual_prints(names))))
        states = tuple((msgspec.structs.replace(state, counts=usual), value) for state, value in disk.shards)
        self.world.fates.disks[names[0]] = msgspec.structs.replace(disk, shards=states)

    def _hide(self, names: Sequence[PeerId]) -> None:
        """Draw who cannot be dialled, and which pairs of these cannot connect. The founder can be dialled."""
        count, given = len(names), self.options
        self.hidden |= set(self.random.sample(names[1:], min(count - 1, round(self.hidden_share * count))))
        pairs = list(combinations(sorted(self.hidden), 2))
        apart = min(len(pairs), round(given.unreachable * math.comb(count, 2)))
        self.network.unreachable |= set(self.random.sample(pairs, apart))
        if not given.no_relays:
            self.network.relays |= set(names) - self.hidden

    def _hide_newcomer(self, new: PeerId, others: Sequence[PeerId]) -> None:
        """Draw the same for a peer that comes later."""
        chance = self.options.unreachable / self.hidden_share**2
        apart = {topologies.pair_of(new, one) for one in others if self.random.random() < chance and one in self.hidden}
        if self.options.unreachable and self.random.random() < self.hidden_share:
            self.hidden.add(new)
            self.network.unreachable |= apart
        elif not self.options.no_relays:
            self.network.relays.add(new)

    def begin_churn(self) -> None:
        """From now on peers go and others come: the present ones are somewhere in their sessions."""
        for name in sorted(self.world.processes):
            longer = math.exp(SESSION_SIGMA**2)  # of sessions, long ones are met more often
            self._go_later(name, longer * self.random.random())

    def _go_later(self, name: PeerId, share: float = 1.0) -> None:
        session_s = SESSION_S * self.random.lognormvariate(0.0, SESSION_SIGMA)
        self.world.schedule(self.world.now + share * session_s, None, self._replace, name)

    def _replace(self, name: PeerId) -> None:
        world, random = self.world, self.random
        if world.survives_without(name):
            if random.random() < 0.5:
                world.processes[name].tell(ev.LeaveRequested("asked to"))
            else:
                world.pause(name, 2.0 * GONE_S)
                self.network.silence(name)
                self.silent[name] = world.now
                end = lambda _: world.crash(name, keeps_disk=False, restart_s=None)  # noqa: E731
                world.schedule(world.now + GONE_S, None, end, None)
        others = sorted(world.processes)
        new = self._add()
        self._hide_newcomer(new, others)
        self._go_later(new)

    def watch(self) -> None:
        """Note which silent peers are no longer counted as live."""
        awake = [one.machine.core.membership for one in self.world.processes.values() if not one.is_paused()]
        for name, since in list(self.silent.items()):
            if not any(name in membership.near for membership in awake):
                self.silences.append(self.world.now - since)
                del self.silent[name]


def pass_time(world: World, until: float, title: str, is_over: Callable[[], bool], step_s: float = 1.0) -> bool:
    """Let time pass, and tell how far it is. Return whether ``is_over`` came true."""
    told_at = time.monotonic()
    while world.now < until and not world.checks.is_over:
        world.run_until(min(until, world.now + step_s))
        if is_over():
            return True
        if time.monotonic() - told_at > TOLD_EVERY_S:
            told_at, made = time.monotonic(), world.checks.versions
            print(f"{title}: {world.now:.0f} s, at most {until:.0f}; {made} versions", file=sys.stderr, flush=True)
    return False


def measure(peers: int, options: argparse.Namespace) -> dict[str, float | None]:
    """Return the figures of one swarm; None: never."""
    swarm = Swarm(peers, options)
    world, meter, network, checks = swarm.world, swarm.meter, swarm.network, swarm.world.checks
    title, began_s, connections = f"{peers} peers", time.process_time(), 0

    def have_all_started() -> bool:
        return all(one.learner is not None and one.machine.core.is_current for one in world.processes.values())

    def look() -> bool:
        """Note what grows or passes meanwhile."""
        nonlocal connections
        connections = max(connections, *(len(process.links) for process in world.processes.values()))
        swarm.watch()
        return False

    def have_all_arrived() -> bool:
        swarm.watch()
        living = taking_part(world)
        return all(spread.seconds(0.99, living) < math.inf for spread in meter.winning(world, since, until))

    has_started = pass_time(world, START_MOST_S, f"{title}, start", have_all_started, 0.1)
    start_s, start_cpu_s = world.now, time.process_time() - began_s
    if options.starts:
        return {
            "shards": options.shards,
            "start_s": round(start_s, 3) if has_started else None,
            "connections_most": max(len(process.links) for process in world.processes.values()),
            "violations": len(checks.violations),
            "start_cpu_s": round(start_cpu_s, 3),
        }
    if options.churn:
        swarm.begin_churn()
    pass_time(world, world.now + WARM_S, f"{title}, warm-up", look)
    versions, forks, before_s = checks.versions, checks.forks, time.process_time()
    sent = {name: network.lines.uplink(name).sent for name in world.processes}
    network.is_measured, meter.payloads, meter.payloads_twice = True, 0, 0
    since, until = world.now, world.now + options.seconds
    pass_time(world, until, title, look)
    network.is_measured, payloads, twice = False, meter.payloads, meter.payloads_twice
    made, forks, cpu_s = checks.versions - versions, checks.forks - forks, time.process_time() - before_s
    sizes = [network.lines.uplink(name).sent - before for name, before in sent.items() if name in world.processes] or [
        1.0
    ]
    pass_time(world, until + DRAIN_S, f"{title}, last commits", have_all_arrived)
    swarm.silences += [world.now - since for since in swarm.silent.values() if since < until]
    spreads, living = meter.winning(world, since, until), taking_part(world)
    t50, t99 = (sorted(s.seconds(share, living) for s in spreads) or [math.inf] for share in (0.5, 0.99))
    for sentence in checks.violations:
        print(f"{title}: {sentence}", file=sys.stderr)
    found: dict[str, float] = {
        "shards": options.shards,
        "start_s": start_s if has_started else math.inf,
        "made_s": statistics.median([s.round_s for s in spreads] or [math.inf]),
        "t50_s": statistics.median(t50),
        "t99_s": statistics.median(t99),
        "t99_p90_s": t99[int(0.9 * len(t99))],
        "fork_share": forks / max(1, made),
        "learners_share": sum(s.contributors for s in spreads) / max(1, sum(s.learners for s in spreads)),
        "bytes_most_over_mean": max(sizes) * len(sizes) / sum(sizes),
        "twice_share": twice / max(1, payloads),
        "connections_most": connections,
        "silence_most_s": max(swarm.silences, default=math.inf),
        "relayed_share": network.relayed_bytes / max(1, network.payload_bytes),
        "control_share": network.control_bytes / max(1, network.payload_bytes),
        "cpu_ms_per_version": 1e3 * cpu_s / max(1, made) / peers,
        "versions": made,
        "violations": len(checks.violations),
        "simulated_s": world.now,
        "start_cpu_s": start_cpu_s,
        "cpu_s": time.process_time() - began_s,
    }
    digits = {name: 5 if name.endswith("_share") else 3 for name in found}
    return {name: None if value == math.inf else round(value, digits[name]) for name, value in found.items()}


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench.parser(__doc__, rows="number of peers")
    parser.add_argument("--beside", type=Path, nargs="+", metavar="FILE", default=[], help="plot their rows, too")
    parser.add_argument("--peers", type=int, nargs="*", metavar="N", default=[8, 16, 64], help="sizes; none: only plot")
    parser.add_argument("--seed", type=int, default=1, help="seed of the world")
    parser.add_argument("--shards", type=int, default=48, help="up to 24, or a multiple of 24; fewer take less time")
    parser.add_argument("--together", type=int, default=MOST_TOGETHER, help="learners that are merged without groups")
    parser.add_argument("--payload", type=int, default=900_000, help="bytes of a contribution or commit")
    parser.add_argument("--seconds", type=float, default=96.0, help="simulated duration of the measurement")
    parser.add_argument("--up", type=float, default=50.0, help="line rate of each peer in Mbit/s, up")
    parser.add_argument("--down", type=float, default=300.0, help="line rate of each peer in Mbit/s, down")
    parser.add_argument("--mixed", action="store_true", help="lines from 10/100 to 500/500 Mbit/s")
    parser.add_argument("--churn", action="store_true", help="sessions have a median of 40 minutes")
    parser.add_argument("--unreachable", type=float, default=0.0, help="share of pairs that connect over relays only")
    parser.add_argument("--no-relays", action="store_true", help="these pairs never connect")
    parser.add_argument("--told-lines", action="store_true", help="relays know their lines at once, as with --up")
    parser.add_argument("--starts", action="store_true", help="end as soon as all peers train")
    parser.add_argument("--liars", type=float, default=0.0, help="share of peers that pass no commit on")
    found = parser.parse_args(argv)
    if found.plot is not None and found.json is None:
        parser.error("--plot draws the rows of --json: name that file, too")
    if found.plot is None and (found.beside or not found.peers):
        parser.error("--beside, and --peers without sizes, are for a plot: name its file (--plot)")
    for path in found.beside:
        if not path.is_file():
            parser.error(f"--beside {path}: there is no such file")
    if len({path.stem for path in (*found.beside, found.json) if path is not None}) <= len(found.beside) and found.plot:
        parser.error("--beside: lines are named as their files, so these need names of their own")
    if min(found.peers, default=2) < 2:
        parser.error(f"--peers {min(found.peers)}: a swarm has at least 2")
    if found.shards < 1 or (found.shards > SYNC_EVERY and found.shards % SYNC_EVERY):
        parser.error(f"--shards {found.shards}: use 1 to {SYNC_EVERY}, or a multiple of {SYNC_EVERY}")
    for name in ("payload", "seconds", "up", "down"):
        if not 0 < getattr(found, name) < math.inf:
            parser.error(f"--{name} {getattr(found, name)}: must be positive")
    for name in ("unreachable", "liars"):
        if not 0.0 <= getattr(found, name) < 1.0:
            parser.error(f"--{name} {getattr(found, name)}: a share is from 0 to less than 1")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each size."""
    given, rows = options(argv), dict[str, dict[str, float | None]]()
    for peers in given.peers:
        rows[str(peers)] = measure(peers, given)
        bench.write(given, NAME, {"peers": peers}, rows[str(peers)])
    for row in list(rows.values())[:1]:
        columns = [(name, name, ".2%" if name.endswith("_share") else "") for name in row]
        print(bench.table("peers", columns, rows), flush=True)
    if given.plot is not None:
        known = {path.stem: bench.known(path, NAME, "peers") for path in (*given.beside, given.json)}
        plots.volunteers(given.plot, {name: {int(n): row for n, row in one.items()} for name, one in known.items()})
    return int(any(row["violations"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
