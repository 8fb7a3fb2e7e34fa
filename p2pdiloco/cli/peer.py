"""What ``start``, ``join`` and ``resume`` have in common: a peer's own options, and how it ends."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from p2pdiloco.cli.rates import bytes_per_second, up_budget
from p2pdiloco.node.session import DirectoryOptions
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import Ending
from p2pdiloco.runtime.identity import Identity


def add_peer_arguments(sub: argparse.ArgumentParser) -> None:
    """What they share."""
    sub.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps (default: %(default)s)")
    sub.add_argument("--threads", type=int, default=0, help="torch threads for training; 0: torch's choice")
    sub.add_argument(
        "--data", metavar="DIR", help="folder (or file of documents) to train on; a run cannot name one for you"
    )
    sub.add_argument("--tokenizer", metavar="DIR", help="folder with tokenizer.json, if it is not among the data")
    sub.add_argument(
        "--model", metavar="DIR", help="folder with the safetensors that the run's adapters (LoRA) are trained on"
    )
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
    sub.add_argument(
        "--up",
        type=up_budget,
        default="auto",
        metavar="RATE",
        help="send at most this, e.g. 2.5gbit, 100mbit, none (default: auto, 90 %% of what the link is seen to carry)",
    )
    sub.add_argument("--down", type=bytes_per_second, metavar="RATE", help="let others send at most this")
    sub.add_argument(
        "--checkpoint-s",
        type=float,
        default=60.0,
        metavar="T",
        help="at most between checkpoints; cheap ones are written after every turn (default: %(default)s)",
    )
    sub.add_argument("--keep-checkpoints", type=int, default=2, metavar="N", help="newest ones that stay (default: 2)")
    sub.add_argument("--leave-s", type=float, default=20.0, help="seconds that an orderly leave may take")
    sub.add_argument(
        "--reattach-s",
        type=float,
        default=60.0,
        help="seconds that training goes on when the node was killed, waiting for its restart with the same --state; "
        "0: end with it (default: %(default)s)",
    )
    sub.add_argument("--learner", default="", metavar="NAME", help=argparse.SUPPRESS)  # p2pdiloco.DiLoCo's node
    sub.add_argument("--journal", action="store_true", help="record every event, for p2pdiloco replay")


def add_bootstrap_argument(sub: argparse.ArgumentParser) -> None:
    """For those who may be the first of a network."""
    sub.add_argument(
        "--bootstrap",
        "--initial_peers",
        nargs="*",
        default=[],
        metavar="ADDR",
        help="first addresses of the directory; none: be the first",
    )


def peer_options(arguments: argparse.Namespace, folder: Path) -> PeerOptions:
    """The peer's own settings, from the command line."""
    return PeerOptions(
        folder=folder,
        listen=arguments.listen,
        announce=tuple(arguments.announce),
        device=arguments.device,
        data=arguments.data,
        tokenizer=arguments.tokenizer,
        model=arguments.model,
        threads=arguments.threads,
        is_follower=getattr(arguments, "follow", False),
        is_unreachable=arguments.unreachable,
        up_bytes_per_s=arguments.up,
        down_bytes_per_s=arguments.down,
        checkpoint_s=arguments.checkpoint_s,
        keep_checkpoints=arguments.keep_checkpoints,
        leave_s=arguments.leave_s,
        learner=arguments.learner,
        reattach_s=arguments.reattach_s,
        has_journal=arguments.journal,
    )


def open_identity(arguments: argparse.Namespace) -> Identity:
    """The peer's key; a new one at the first time."""
    return Identity.load_or_create(arguments.identity_path or arguments.state / "identity.key")


def directory_options(arguments: argparse.Namespace, initial_peers: list[str]) -> DirectoryOptions:
    """How the peer takes part in the directory."""
    return DirectoryOptions(
        listen=tuple(arguments.host_maddrs),
        announce=tuple(arguments.announce_maddrs),
        initial_peers=tuple(initial_peers),
    )


def say(line: str) -> None:
    """To the user, at once."""
    print(line, flush=True)


def end(ending: Ending) -> int:
    """Say how it ended; the exit status."""
    if ending.status:
        print(f"p2pdiloco: {ending.reason}", file=sys.stderr)
    else:
        say(f"ended: {ending.reason}")
    return ending.status
