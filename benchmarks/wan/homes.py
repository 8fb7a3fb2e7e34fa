"""Peers in homes behind routers: who joins, whose progress is merged, and what relays carry; needs root.

    python -m benchmarks.wan.homes --json out/homes.json           # topology homes
    python -m benchmarks.wan.homes --kill-bootstrap                # the small public machine dies when all have joined

Real processes are started with the commands of README.md in the sites of a testbed: a bootstrap node in the first site,
which is public, and a peer in each of the others; the second founds the run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from benchmarks.netbed.namespace_exec import command
from benchmarks.netbed.namespaces import kill_inside
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import address, address6, find_topology
from benchmarks.wan.sites import network, on_sigterm
from p2pdiloco.node.resource_guard import pause
from p2pdiloco.protocol.ids import LearnerId, peer_of
from p2pdiloco.util import status_pipe
from p2pdiloco.util.status_pipe import Invited, Listening

START_S = 90.0
POLL_S = 0.1
KEEPS = (None, "keep", "cgn")
"""Routers through which two peers connect directly."""
CONFIG = {
    "name": "homes",
    "access": "open",
    "model.width": 32,
    "model.depth": 1,
    "model.heads": 2,
    "model.context": 32,
    "data.kind": "files",
    "data.pattern": "*.txt",
    "data.held_out_share": 0.3,
    "inner.batch": 256,
    "inner.warmup": 5,
    "schedule.fragments": 2,
    "schedule.sync_every": 24,
    "schedule.overlap": 8,  # of short steps: a second or so, as users have
    "schedule.max_shard": 16384,
    "evaluation.every": 1000,
    "evaluation.samples": 16,
}
TEXT = "swarm trains one model every peer holds the same bits while owners merge what others sent"
WORDS = TEXT.split()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the benchmark writes."""

    topology: str
    joined: int
    """Peers that were connected to all others."""
    peers: int
    joint_s: float
    """From the last peer's start until all were."""
    versions: int
    """Of shards, since all were connected and all learners had begun, and before any left."""
    joint_versions_with_all: float
    fork_share: float
    tokens_merged_share: float
    relayed_bytes: int
    relayed_bytes_between_port_keeping: int
    ways: dict[str, str]
    """How pairs connected: "ann-bob": "punching"."""
    cut_off: list[str]
    """Those that the killed bootstrap relayed to everybody: versions, tokens and models are of the others."""
    statuses: dict[str, int]
    models: int
    """Different ones at the end."""


class Home:
    """A process in a site, and what it told."""

    def __init__(self, made: Testbed, site: int, folder: Path, words: Sequence[str]) -> None:
        self.name = made.topology.sites[site].name
        self.folder = folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log = self.folder / "log"
        words = [words[0], "--state", str(self.folder / "state"), "--log-format", "json", *words[1:]]
        with self._log.open("ab") as log, status_pipe.opened() as (self.reports, status_fd):
            self.process = self.begin(made.site(site), words, log, status_fd)

    @staticmethod
    def begin(namespace: str, words: Sequence[str], log: IO[bytes], status_fd: int) -> subprocess.Popen[bytes]:
        """Start the command that is its process."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        words = [*words, status_pipe.OPTION, str(status_fd)]
        return subprocess.Popen(
            command(namespace, [sys.executable, "-m", "p2pdiloco", *words]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=(status_fd,),
        )

    def told(self) -> str:
        """All that it said."""
        return self._log.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """Of its log."""
        return [json.loads(line) for line in self.told().splitlines() if line.startswith("{") and line.endswith("}")]

    def events(self) -> list[dict[str, Any]]:
        """Of its event log."""
        found = sorted((self.folder / "state").glob("*/metrics.jsonl"))
        return [json.loads(line) for path in found for line in path.read_text().splitlines() if line.endswith("}")]

    def report(self) -> dict[str, Any]:
        """What it wrote at its end."""
        (path,) = (self.folder / "state").glob("*/report.json")
        return dict(json.loads(path.read_text()))

    @property
    def live(self) -> int:
        """Peers connected to it, itself included."""
        return next((event["live"] for event in reversed(self.events()) if event["event"] == "peers"), 1)

    def rest(self, is_resting: bool = True) -> None:
        """Its learner makes no steps, once there is one: its user wants the machine."""
        for manifest in (self.folder / "state").glob("*/manifest.msgpack"):
            pause(manifest.parent, is_paused=is_resting)


class HomesError(Exception):
    """Somebody did not do what it should in time; the text has its last words."""


def wait_for(condition: Callable[[], Any], homes: Sequence[Home], timeout_s: float, what: str) -> Any:
    """What it becomes, once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        dead = [home for home in homes if home.process.poll() not in (None, 0)]
        if dead or time.monotonic() >= deadline:
            words = "\n".join(f"--- {home.name}\n{home.told()[-1500:]}" for home in dead or homes)
            raise HomesError(f"{what}: {'somebody ended' if dead else f'not within {timeout_s:g} s'}\n{words}")
        time.sleep(POLL_S)
    return found


class Gathering(NamedTuple):
    """Peers that are connected to each other."""

    bootstrap: Home
    homes: list[Home]
    joint_s: float
    """From the last peer's start until all were."""
    joint_at: float
    """Seconds since 1970."""
    where: Callable[[int], str]
    """What somebody in a site types to join."""
    own: list[str]
    """Options of every peer."""


def _corpus(folder: Path) -> str:
    """Write some text, and return its folder."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(12):
        text = " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(1000))
        (corpus / f"{number}.txt").write_text(text)
    return str(corpus)


@contextmanager
def gathered(
    made: Testbed,
    folder: Path,
    *,
    steps: int = 0,
    hub: Sequence[str] = (),
    absent: Container[int] = (),
    rests: bool = False,
    run: str = "",
    own: Sequence[str] = (),
) -> Iterator[Gathering]:
    """A bootstrap in the first site, with the options ``hub``; the second founds a run, the others but those that are
    ``absent`` join it. With ``rests`` learners make no steps but the founder's first, until they are woken. Whatever
    runs in the sites is killed at the end. ``run``: another run than ``CONFIG``, of so many ``steps``, as TOML;
    ``own``: options of its peers."""
    folder.mkdir(parents=True, exist_ok=True)
    config, own = folder / "run.toml", ["--threads", "1", "--stay-s", "0", "--page", "off", *own]
    config.write_text(run)
    if not run:
        own += ["--data", _corpus(folder)]
        values = CONFIG | {"data.path": own[-1], "inner.steps": steps}
        config.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    sites = range(1, len(made.topology.sites))
    homes: list[Home] = []
    try:
        bootstrap = Home(made, 0, folder, ["bootstrap", *(hub or ["--listen", f"/ip4/{address(0)}/tcp/31337"])])
        listening: Listening = wait_for(lambda: bootstrap.reports.find(Listening), [bootstrap], START_S, "bootstrap")

        def where(site: int) -> str:
            """By IPv6 from where there is nothing else."""
            family = "/ip6/" if made.topology.sites[site].ip == "6" else "/ip4/"
            return next(text for text in listening.addresses if text.startswith(family))

        homes.append(Home(made, sites[0], folder, ["start", str(config), "--bootstrap", where(sites[0]), *own]))
        wait_for(lambda: homes[0].reports.find(Invited), homes, START_S, "the founder's run")
        if rests:
            homes[0].rest()
        joiners = [site for site in sites[1:] if site not in absent]
        homes += [Home(made, site, folder, ["join", where(site), *own]) for site in joiners]
        began = time.monotonic()

        def is_complete() -> bool:
            for home in homes if rests else ():
                home.rest()
            return all(home.live == len(homes) for home in homes)

        wait_for(is_complete, homes, START_S, "all are connected")
        yield Gathering(bootstrap, homes, time.monotonic() - began, time.time(), where, own)
    finally:
        kill_inside([made.site(i) for i in range(len(made.topology.sites))])
        for home in homes:
            home.process.wait()


def train(
    made: Testbed,
    folder: Path,
    *,
    steps: int,
    kills_bootstrap: bool = False,
    hub: Sequence[str] = (),
    rests: bool = False,
) -> Outcome:
    """One run on a testbed that is up. ``hub``: the bootstrap's options; ``rests``: nobody trains before all are in."""
    with gathered(made, folder, steps=steps, hub=hub, rests=rests) as those:
        for home in those.homes if rests else ():
            home.rest(False)
        if kills_bootstrap:
            those.bootstrap.process.kill()
        homes = those.homes
        wait_for(lambda: all(home.process.poll() is not None for home in homes), [], 10 * START_S, "the run's end")
        time.sleep(POLL_S)
        return _outcome(made, those, kills_bootstrap=kills_bootstrap)


def _outcome(made: Testbed, those: Gathering, *, kills_bootstrap: bool) -> Outcome:
    bootstrap, homes, joint_at = those.bootstrap, those.homes, those.joint_at
    reports = {home.name: home.report() for home in homes}
    named = {report["peer"]: name for name, report in reports.items()}
    ways: dict[str, str] = {}
    for home in homes:
        for line in home.lines():
            if line["event"] == "connected" and line["peer"] in named:
                ways["-".join(sorted((home.name, named[line["peer"]])))] = line.get("by", "dialling")
    statuses = {home.name: home.process.returncode for home in homes}
    cut_off = [home.name for home in homes if kills_bootstrap and _is_relayed_to_all(home.name, ways)]
    homes = [home for home in homes if home.name not in cut_off]
    reports = {home.name: reports[home.name] for home in homes}
    together = {report["peer"] for report in reports.values()}
    events = {home.name: home.events() for home in homes}
    first_end = min(event["time"] for some in events.values() for event in some if event["event"] == "ended")
    told = [event for some in events.values() for event in some if event["event"] == "commit"]
    merged_of = {event["head"]: {str(peer_of(LearnerId(one))) for one in event["contributors"]} for event in told}
    all_times = [event["time"] for event in told if merged_of[event["head"]] >= together]
    all_at = min(all_times, default=joint_at)
    commits: dict[tuple[int, int], dict[str, set[str]]] = {}
    for event in told:
        if max(all_at, joint_at) <= event["time"] < first_end - 1.0:
            commits.setdefault((event["shard"], event["version"]), {})[event["head"]] = merged_of[event["head"]]
    joint = sum(any(peers >= together for peers in heads.values()) for heads in commits.values())
    relayed, keeping = 0, 0
    sites = {one: site for i, site in enumerate(made.topology.sites) for one in (address(i), address6(i))}
    for line in (line for home in [bootstrap, *homes] for line in home.lines()):
        if line["event"] == "relayed":
            relayed += line["bytes"]
            keeping += line["bytes"] * all(sites[host].nat in KEEPS for host in line["between"].split("-"))
    given = {event["head"]: event["contributors"] for event in told if event["shard"] == 0}
    of_cut_off = sum(
        tokens for some in given.values() for one, tokens in some.items() if peer_of(LearnerId(one)) not in together
    )
    merged = max(report["tokens_merged"] for report in reports.values()) - of_cut_off
    return Outcome(
        topology=made.topology.name,
        joined=sum(
            max((e["live"] for e in some if e["event"] == "peers"), default=1) == len(statuses)
            for some in events.values()
        ),
        peers=len(homes),
        joint_s=round(those.joint_s, 2),
        versions=len(commits),
        joint_versions_with_all=joint / max(1, len(commits)),
        fork_share=sum(len(heads) > 1 for heads in commits.values()) / max(1, len(commits)),
        tokens_merged_share=merged / max(1, sum(report["tokens_trained"] for report in reports.values())),
        relayed_bytes=relayed,
        relayed_bytes_between_port_keeping=keeping,
        ways=ways,
        cut_off=cut_off,
        statuses=statuses,
        models=len({tuple(report["digests"]) for report in reports.values()}),
    )


def _is_relayed_to_all(name: str, ways: dict[str, str]) -> bool:
    return {way for pair, way in ways.items() if name in pair.split("-")} <= {"relay"}


def main() -> int:
    """Make the testbed, measure it, train on it, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--topology", default="homes", help="name of a topology (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="global steps (default: %(default)s)")
    parser.add_argument("--kill-bootstrap", action="store_true", help="kill the bootstrap node when all have joined")
    parser.add_argument("--unverified", action="store_true", help="do not measure the links first")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    on_sigterm()
    source = find_topology(options.topology).read_text()
    with (
        tempfile.TemporaryDirectory(prefix="p2pdiloco-homes-") as folder,
        network(source, is_verified=not options.unverified) as made,
    ):
        outcome = train(made, Path(folder), steps=options.steps, kills_bootstrap=options.kill_bootstrap)
    text = json.dumps(msgspec.to_builtins(outcome), indent=2)
    print(text)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
