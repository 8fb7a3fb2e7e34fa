"""``p2pdiloco resume``: Continue a run whose peers have all stopped, from the checkpoints in their state folders: of
each shard, the version in which most tokens are merged. Other peers then join again, in any order.
"""

from __future__ import annotations

import argparse

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.join import prepare as prepare
from p2pdiloco.node.launcher import resume


async def run(arguments: argparse.Namespace) -> int:
    """Continue the run."""
    options = peer_options.peer_options(arguments, arguments.state)
    directory = peer_options.directory_options(arguments, arguments.bootstrap)
    identity = peer_options.open_identity(arguments)
    with identity.hold():
        return peer_options.report_ending(
            await resume(arguments.folders, arguments.run, options, directory, identity, peer_options.say)
        )
