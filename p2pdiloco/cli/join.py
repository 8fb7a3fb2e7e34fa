"""``p2pdiloco join``: Find a run by an invite or the address of a directory node, download its manifest and state
from its peers, and train.
"""

from __future__ import annotations

import argparse

from p2pdiloco.cli import peer_options
from p2pdiloco.node import learner_process
from p2pdiloco.node.launcher import join
from p2pdiloco.protocol.ids import RunId
from p2pdiloco.swarm.run_lookup import LookupFailedError
from p2pdiloco.wire.directory_records import RunRecord


def prepare(arguments: argparse.Namespace) -> None:
    """Before there is an event loop: fork the built-in learner, if this peer trains with it."""
    if not arguments.learner and not getattr(arguments, "follow", False):
        learner_process.bear()


async def run(arguments: argparse.Namespace) -> int:
    """Join and train."""
    options = peer_options.peer_options(arguments, arguments.state)
    directory = peer_options.directory_options(arguments, arguments.address)
    identity = peer_options.open_identity(arguments)
    with identity.hold():
        return peer_options.report_ending(
            await join(arguments.run, options, directory, identity, choose, peer_options.say)
        )


def choose(runs: dict[RunId, RunRecord]) -> RunId:
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
    listing = "\n".join(lines)
    while (answer := peer_options.ask(f"{listing}\nwhich run? [1-{len(ordered)}] ")) is not None:
        if answer.isdecimal() and 1 <= int(answer) <= len(ordered):
            return ordered[int(answer) - 1][0]
    raise LookupFailedError(f"there are several runs, name one with --run:\n{listing}")
