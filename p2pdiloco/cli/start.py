"""``p2pdiloco start``: Create a run from a TOML file and train it. If --state already holds a run with the same
configuration, continue that run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.join import prepare as prepare
from p2pdiloco.node.launcher import start, start_from_script
from p2pdiloco.node.run_creation import find_run, read_config
from p2pdiloco.node.run_folder import NameTakenError
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.protocol.manifest import Name, RunConfig
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.wire.directory_records import RunRecord


async def run(arguments: argparse.Namespace) -> int:
    """Found and train."""
    config = None if arguments.learner else _config(arguments)
    directory = peer_options.directory_options(arguments, arguments.bootstrap)
    options = peer_options.peer_options(arguments, arguments.state)
    identity = peer_options.open_identity(arguments)
    with identity.hold():
        if config is None:  # p2pdiloco.DiLoCo's node: it is given a foundation
            ending = await start_from_script(Path(arguments.config), options, directory, identity, peer_options.say)
        else:
            decide = _decider(arguments, config)
            ending = await start(config, options, directory, identity, decide, peer_options.say)
        return peer_options.report_ending(ending)


def _config(arguments: argparse.Namespace) -> RunConfig:
    config = read_config(find_run(arguments.config))
    if arguments.access is not None:
        config = msgspec.structs.replace(config, access=arguments.access)
    if arguments.name is None:
        return config
    try:
        return msgspec.structs.replace(config, name=msgspec.convert(arguments.name, Name))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--name {arguments.name}: write letters, digits, dots, dashes, at most 64") from error


def _decider(arguments: argparse.Namespace, config: RunConfig) -> Callable[[RunId, RunRecord], str]:
    def decide(run: RunId, record: RunRecord) -> str:
        """Another run of that name is live: return the name to found this one under, or nothing to join it."""
        address = " ".join(arguments.bootstrap) or "ADDR"
        another = f"{config.name[:60]}-2"
        told = f"a run called {record.name} ({run[:12]}, {record.parameters:,} parameters) is being trained already"
        question = f"{told}\njoin it, or found another one called {another}? [join/found] "
        while (answer := peer_options.ask(question)) is not None:
            if answer and "join".startswith(answer.lower()):
                return ""
            if answer and "found".startswith(answer.lower()):
                return another
        raise NameTakenError(
            f"{told}. To take part in it: p2pdiloco join {address} --run {run[:12]}. To found another one: "
            f"p2pdiloco start {arguments.config} --bootstrap {address} --name {another}"
        )

    return decide
