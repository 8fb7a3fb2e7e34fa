"""``python -m benchmarks.netbed``: Run commands in sites of a throttled network on this machine. ``up`` makes the
network that a TOML file describes (namespaces, tc; needs root) and measures it, ``link`` measures it again and prints
the matrix, ``exec`` runs a command in one site, ``play`` puts its scheduled changes in force, ``down`` removes it,
``clean`` removes all that killed tools left. Nothing runs on a link that is off by more than 5 %."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from benchmarks.netbed import kernel_features, namespace_exec, tcp_relays, testbed, trace, verification
from benchmarks.netbed.namespaces import TestbedError, need_root
from benchmarks.netbed.report import matrix
from benchmarks.netbed.testbed import Testbed
from benchmarks.netbed.topology import Change, Topology, TopologyError, address, find_topology, parse_topology
from p2pdiloco.cli.argument_types import file
from p2pdiloco.cli.errors import FAILED, NOBODY_THERE, REPAIR, CommandError, as_command_errors
from p2pdiloco.cli.main import program

LEAVE_S = 10.0
"""What an interrupted command has to end."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program; returns its exit status."""
    return program("python -m benchmarks.netbed", __doc__, add_arguments, run, argv)


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the program's arguments."""
    actions = sub.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, help_text: str, *, file: bool = True) -> Any:
        made = actions.add_parser(name, help=help_text)
        if file:
            made.add_argument("topology", metavar="TOPOLOGY", help="TOML file, or the name of a shipped one")
        return made

    makers = [
        action("up", "make the network, measure it, leave it up"),
        action("link", "measure each line and path, print the matrix; makes the network for that if it is down"),
        action("exec", "run a command in a site; makes the network for that if it is down"),
    ]
    for made in makers:
        made.add_argument("--engine", choices=["netem", "router"], help="who delays and loses (default: the best)")
    for made in (makers[0], makers[2]):
        made.add_argument("--unverified", action="store_true", help="do not measure; do not report figures from it")
    makers[1].add_argument("--json", type=file, metavar="FILE", help="write what was measured there, too")
    makers[2].add_argument("--play", action="store_true", help="play the scheduled changes while the command runs")
    makers[2].add_argument("site", metavar="SITE")
    makers[2].add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    action("play", "put the scheduled changes in force, each at its time")
    relay = action("relay", "without root: shape in this process what goes through its TCP relays")
    relay.add_argument("servers", nargs="*", metavar="SITE=HOST:PORT", help="what others reach; none: only measure")
    action("down", "remove the network")
    action("clean", "remove all that testbeds left here: namespaces, interfaces, processes", file=False)
    action("probe", "say what this kernel has, and what would be used", file=False)


async def run(arguments: argparse.Namespace) -> int:
    """One action. All but ``relay`` have the main thread for themselves, so that signals interrupt them anywhere."""
    if arguments.action == "relay":
        with as_command_errors(TopologyError):
            return await _relay(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with as_command_errors(TopologyError):
        try:
            return WORK[arguments.action](arguments)
        except verification.LinkOffError as error:
            raise CommandError(str(error), FAILED) from error
        except TestbedError as error:
            raise CommandError(str(error), REPAIR) from error


def _up(arguments: argparse.Namespace) -> int:
    made = _make(_source(arguments), arguments.engine)
    if not arguments.unverified:
        try:
            _measure(made)
        except BaseException:
            testbed.down(made.topology.name)
            raise
    print(
        f"up: python -m benchmarks.netbed exec {arguments.topology} SITE -- COMMAND; "
        f"python -m benchmarks.netbed down {arguments.topology}"
    )
    return 0


def _link(arguments: argparse.Namespace) -> int:
    source = _source(arguments)
    made, is_ours = _standing_or_made(source, arguments.engine)
    try:
        checks = list(verification.verify(_told(made)))
        wrong = [check for check in checks if not check.is_right]
        made.set_verified(not wrong)
        print(matrix(made.topology, checks))
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            rows = {"topology": made.topology.name, "engine": made.engine, "checks": msgspec.to_builtins(checks)}
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
        if wrong:
            raise verification.LinkOffError(wrong)
        print("every line and path is as asked for")
        return 0
    finally:
        if is_ours:
            testbed.down(made.topology.name)


def _exec(arguments: argparse.Namespace) -> int:
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words or words[0].startswith("-"):
        text = "there is no command" if not words else f"{words[0]}: options go before TOPOLOGY"
        raise CommandError(f"bench exec [OPTIONS] TOPOLOGY SITE -- COMMAND: {text}", REPAIR)
    source = _source(arguments)
    site = parse_topology(source).index(arguments.site)
    made, is_ours = _standing_or_made(source, arguments.engine)
    try:
        if not arguments.unverified and not made.is_verified:
            if not is_ours:
                raise TestbedError(
                    f"{made.topology.name} has not been measured since it was made or changed: "
                    f"python -m benchmarks.netbed link {arguments.topology}, or say --unverified"
                )
            _measure(made)
        return _run_inside(made, site, words, is_playing=arguments.play)
    finally:
        if is_ours:
            testbed.down(made.topology.name)


def _run_inside(made: Testbed, site: int, words: list[str], *, is_playing: bool) -> int:
    peers = " ".join(f"{one.name}={address(i)}" for i, one in enumerate(made.topology.sites))
    environment = os.environ | {
        "P2PBED_SITE": made.topology.sites[site].name,
        "P2PBED_ADDRESS": address(site),
        "P2PBED_PEERS": peers,
    }
    stop = threading.Event()
    player = threading.Thread(target=trace.play, args=(made, stop, _tell), name="trace")
    command = subprocess.Popen(namespace_exec.command(made.site(site), words), env=environment)
    if is_playing:
        player.start()
    try:
        status = command.wait()
    except KeyboardInterrupt:
        command.terminate()
        try:
            status = command.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            command.kill()
            status = command.wait()
    finally:
        stop.set()
        if is_playing:
            player.join()
    return status if status >= 0 else 128 - status


def _play(arguments: argparse.Namespace) -> int:
    made = _must_stand(_source(arguments))
    made.rewind()
    trace.play(made, threading.Event(), _tell)
    return 0


async def _relay(arguments: argparse.Namespace) -> int:
    """Measure, then serve until interrupted."""
    topology = parse_topology(_source(arguments))
    servers = dict(_server(topology, text) for text in arguments.servers)
    if any(route.loss for route in topology.paths.values()):
        _say("losses are not shown: TCP ends at the relay (bench up shows them, as root)")
    _say(f"measuring {len(topology.sites)} lines and {len(topology.paths)} paths in process ...")
    checks = [check async for check in tcp_relays.verify_in_process(topology)]
    print(matrix(topology, checks))
    if wrong := [check for check in checks if not check.is_right]:
        raise CommandError(str(verification.LinkOffError(wrong)), FAILED)
    async with tcp_relays.InProcess(topology, servers) as network:
        for (i, j), port in network.ports.items():
            print(f"from {topology.sites[i].name} to {topology.sites[j].name}: {tcp_relays.HOST}:{port}", flush=True)
        if servers:
            await asyncio.Event().wait()
    return 0


def _server(topology: Topology, text: str) -> tuple[int, tuple[str, int]]:
    site, _, where = text.partition("=")
    host, _, port = where.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise TopologyError(f"{text!r} is not SITE=HOST:PORT")
    return topology.index(site), (host, int(port))


def _down(arguments: argparse.Namespace) -> int:
    name = parse_topology(_source(arguments)).name
    print(f"{name} is down" if testbed.down(name) else f"{name} was not up")
    return 0


def _clean(_: argparse.Namespace) -> int:
    names, killed = testbed.clean()
    print(f"removed {len(names)} namespaces, killed {len(killed)} processes")
    return 0


def _probe(_: argparse.Namespace) -> int:
    found = kernel_features.probe()
    engine = kernel_features.choose_engine(found)
    print(found.sentence())
    print(f"congestion control: {', '.join(found.congestion_controls)}")
    print(f"rates by tbf; delay, jitter and loss by {_who(engine)}")
    return 0


def _make(source: bytes, engine: kernel_features.Engine | None) -> Testbed:
    begin = time.monotonic()
    made = testbed.up(source, engine)
    seconds = time.monotonic() - begin
    _say(
        f"{made.topology.name}: {len(made.topology.sites)} sites in {seconds:.1f} s; rates by tbf, {_who(made.engine)}"
    )
    return made


def _standing_or_made(source: bytes, engine: kernel_features.Engine | None) -> tuple[Testbed, bool]:
    need_root()
    made = testbed.standing(parse_topology(source).name)
    if made is None:
        return _make(source, engine), True
    _must_be_of(made, source)
    if engine not in (None, made.engine):
        raise TestbedError(f"{made.topology.name} is up with the engine {made.engine}: bench down first")
    return made, False


def _must_stand(source: bytes) -> Testbed:
    need_root()
    name = parse_topology(source).name
    made = testbed.standing(name)
    if made is None:
        raise CommandError(f"{name} is not up: python -m benchmarks.netbed up", NOBODY_THERE)
    _must_be_of(made, source)
    return made


def _must_be_of(made: Testbed, source: bytes) -> None:
    if not testbed.is_of(made, source):
        raise TestbedError(f"another topology of the name {made.topology.name} is up: bench down first")


def _measure(made: Testbed) -> None:
    checks = verification.must_agree(_told(made))
    worst = max((abs(check.error) for check in checks if check.kind in ("up", "down", "round trip")), default=0.0)
    _say(f"measured: every line and path is as asked for, rates and round trips within {worst:.1%}")


def _told(made: Testbed) -> Testbed:
    _say(f"measuring {len(made.topology.sites)} lines and {len(made.topology.paths)} paths ...")
    return made


def _tell(seconds: float, change: Change) -> None:
    _say(f"[{seconds:.1f} s] {trace.sentence(change)}")


def _who(engine: kernel_features.Engine) -> str:
    return "netem in the kernel" if engine == "netem" else "the user-space router (this kernel has no netem)"


def _source(arguments: argparse.Namespace) -> bytes:
    path = find_topology(arguments.topology)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TopologyError(f"{path}: {error.strerror}") from error
    try:
        parse_topology(source)
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error
    return source


def _say(text: str) -> None:
    """To standard error: standard output belongs to the command that runs in the site."""
    print(text, file=sys.stderr, flush=True)


WORK: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "link": _link,
    "exec": _exec,
    "play": _play,
    "down": _down,
    "clean": _clean,
    "probe": _probe,
}
"""By action, but for ``relay``."""


if __name__ == "__main__":
    sys.exit(main())
