"""``p2pdiloco pause``: Let this machine's peers rest: their learners make no steps, and give others the processors. It
lasts, also over restarts, until p2pdiloco pause --end. SIGUSR2 to a peer does the same, and ends it, in turns."""

from __future__ import annotations

import argparse

from p2pdiloco.cli import peer
from p2pdiloco.cli.complaints import complaining
from p2pdiloco.node import guest
from p2pdiloco.node.kept_runs import ConfigError, folder_of, manifest_here, manifests_here


async def run(arguments: argparse.Namespace) -> int:
    """Leave a note in the runs' folders, which their peers look at."""
    with complaining(repair=(ConfigError, ValueError), nobody=()):
        several = [] if arguments.run else manifests_here(arguments.state)
        for manifest in several or [manifest_here(arguments.state, arguments.run)]:
            folder = folder_of(arguments.state, manifest.run)
            guest.pause(folder, is_paused=not arguments.end)
            what = "goes on" if arguments.end else "rests until p2pdiloco pause --end"
            peer.say(f"run {manifest.config.name} ({folder}): its peer here {what}")
    return 0
