"""``p2pdiloco start``: Found a run from a TOML file (make and publish its manifest and version 0) and train it. Started
again with the same configuration and --state, it goes on from its checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from p2pdiloco.cli import peer
from p2pdiloco.cli.complaints import complaining
from p2pdiloco.node.founding import ConfigError, find_run, read_config
from p2pdiloco.node.session import start, start_from_script
from p2pdiloco.peer.checkpoint import CheckpointError
from p2pdiloco.runtime.directory import DirectoryError
from p2pdiloco.runtime.identity import IdentityError


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Its own arguments."""
    sub.add_argument("config", metavar="CONFIG", help="TOML file, or a shipped one's name, such as stdlib-tiny")
    peer.add_bootstrap_argument(sub)
    peer.add_peer_arguments(sub)


async def run(arguments: argparse.Namespace) -> int:
    """Found and train."""
    with complaining(repair=(ConfigError, CheckpointError, IdentityError, ValueError), nobody=(DirectoryError,)):
        config = None if arguments.learner else read_config(find_run(arguments.config))
        identity = peer.open_identity(arguments)
        with identity.hold():
            directory = peer.directory_options(arguments, arguments.bootstrap)
            if config is None:  # p2pdiloco.DiLoCo's node: it is given a foundation
                options = peer.peer_options(arguments, arguments.state)
                ending = await start_from_script(Path(arguments.config), options, directory, identity, peer.say)
            else:
                options = peer.peer_options(arguments, arguments.state / config.name)
                ending = await start(config, options, directory, identity, peer.say)
            return peer.end(ending)
