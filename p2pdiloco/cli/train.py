"""``p2pdiloco start`` and ``p2pdiloco join``: take part in a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from p2pdiloco.node.founding import read_config
from p2pdiloco.node.lookup import LookupFailedError, RunRecord
from p2pdiloco.node.node import Ending
from p2pdiloco.node.options import PeerOptions
from p2pdiloco.node.session import DirectoryOptions, join, start
from p2pdiloco.protocol.identifiers import RunId
from p2pdiloco.runtime.identity import Identity


def add_start(commands: Any) -> argparse.ArgumentParser:
    """Add ``start`` to the parser."""
    sub: argparse.ArgumentParser = commands.add_parser(
        "start",
        help="found a run and train it",
        description="Found a run from a TOML file (make and publish its manifest and version 0) and train it. Started "
        "again with the same configuration and --state, it goes on from its checkpoint.",
    )
    sub.add_argument("config", type=Path, metavar="CONFIG.toml")
    sub.add_argument(
        "--bootstrap",
        "--initial_peers",
        nargs="*",
        default=[],
        metavar="ADDR",
        help="first addresses; none: be the first",
    )
    _add_peer_options(sub)
    sub.set_defaults(run_command=run_start)
    return sub


def add_join(commands: Any) -> argparse.ArgumentParser:
    """Add ``join`` to the parser."""
    sub: argparse.ArgumentParser = commands.add_parser(
        "join",
        help="join a running run",
        description="Find a run through any directory address, get its manifest and state from its peers, and train.",
    )
    sub.add_argument("address", nargs="+", metavar="ADDR", help="multiaddr of any directory node or peer, with /p2p/ID")
    sub.add_argument("--run", metavar="NAME", help="name or beginning of the id, if the directory knows several runs")
    sub.add_argument("--follow", action="store_true", help="track the global model without training")
    _add_peer_options(sub)
    sub.set_defaults(run_command=run_join)
    return sub


def _add_peer_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: %(default)s)")
    sub.add_argument("--threads", type=int, default=0, help="torch threads for training; 0: torch's choice")
    sub.add_argument("--data", metavar="DIR", help="folder to train on instead of the manifest's data.path")
    sub.add_argument(
        "--listen", default="/ip4/0.0.0.0/tcp/0", metavar="MULTIADDR", help="data port (default: %(default)s)"
    )
    sub.add_argument(
        "--announce", action="append", default=[], metavar="MULTIADDR", help="data address to publish (port forwarding)"
    )
    sub.add_argument(
        "--host_maddrs",
        "--directory-listen",
        nargs="*",
        default=["/ip4/0.0.0.0/tcp/0"],
        metavar="MULTIADDR",
        help="directory port",
    )
    sub.add_argument(
        "--announce_maddrs", nargs="*", default=[], metavar="MULTIADDR", help="directory addresses to publish"
    )
    sub.add_argument("--identity_path", type=Path, metavar="FILE", help="key file (default: STATE/identity.key)")
    sub.add_argument("--unreachable", action="store_true", help="behind NAT without forwarding: never own a shard")
    sub.add_argument("--checkpoint-s", type=float, default=60.0, help="seconds between checkpoints")
    sub.add_argument("--leave-s", type=float, default=20.0, help="seconds that an orderly leave may take")
    sub.add_argument("--journal", action="store_true", help="record every event, for p2pdiloco replay")


def _options(arguments: argparse.Namespace, folder: Path) -> PeerOptions:
    return PeerOptions(
        folder=folder,
        listen=arguments.listen,
        announce=tuple(arguments.announce),
        device=arguments.device,
        data=arguments.data,
        threads=arguments.threads,
        is_follower=getattr(arguments, "follow", False),
        is_unreachable=arguments.unreachable,
        checkpoint_s=arguments.checkpoint_s,
        leave_s=arguments.leave_s,
        has_journal=arguments.journal,
    )


def _identity(arguments: argparse.Namespace) -> Identity:
    return Identity.load_or_create(arguments.identity_path or arguments.state / "identity.key")


def _directory(arguments: argparse.Namespace, initial_peers: list[str]) -> DirectoryOptions:
    return DirectoryOptions(
        listen=tuple(arguments.host_maddrs),
        announce=tuple(arguments.announce_maddrs),
        initial_peers=tuple(initial_peers),
    )


async def run_start(arguments: argparse.Namespace) -> int:
    """Found and train."""
    config = read_config(arguments.config)
    identity = _identity(arguments)
    with identity.hold():
        options = _options(arguments, arguments.state / config.name)
        ending = await start(config, options, _directory(arguments, arguments.bootstrap), identity, _say)
    return _end(ending)


async def run_join(arguments: argparse.Namespace) -> int:
    """Join and train."""
    identity = _identity(arguments)
    with identity.hold():
        options = _options(arguments, arguments.state)
        ending = await join(arguments.run, options, _directory(arguments, arguments.address), identity, _choose, _say)
    return _end(ending)


def _say(line: str) -> None:
    print(line, flush=True)


def _end(ending: Ending) -> int:
    if ending.status:
        print(f"p2pdiloco: {ending.reason}", file=sys.stderr)
    else:
        _say(f"ended: {ending.reason}")
    return ending.status


def _choose(runs: dict[RunId, RunRecord]) -> RunId:
    """The only run, or the user's choice.

    Raises:
        LookupFailedError: several, and nobody to ask.
    """
    ordered = sorted(runs.items(), key=lambda item: (item[1].name, item[0]))
    if len(ordered) == 1:
        return ordered[0][0]
    lines = [
        f"  {i + 1}. {record.name}  {run[:12]}  {record.parameters:,} parameters"
        for i, (run, record) in enumerate(ordered)
    ]
    if not sys.stdin.isatty():
        listing = "\n".join(lines)
        raise LookupFailedError(f"there are several runs, name one with --run:\n{listing}")
    print("\n".join(lines))
    while True:
        answer = input(f"which run? [1-{len(ordered)}] ").strip()
        if answer.isdigit() and 1 <= int(answer) <= len(ordered):
            return ordered[int(answer) - 1][0]
