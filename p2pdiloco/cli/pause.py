"""``p2pdiloco pause``: Pause the learners on this machine, to give its processors to others. A pause lasts, also
across restarts, until p2pdiloco pause --end. SIGUSR2 to a peer toggles its pause.
"""

from __future__ import annotations

import argparse

from p2pdiloco.cli import peer_options
from p2pdiloco.node import resource_guard
from p2pdiloco.swarm.run_index import kept_run, kept_runs


async def run(arguments: argparse.Namespace) -> int:
    """Leave a note in the runs' folders, which their peers look at."""
    several = [] if arguments.run else kept_runs(arguments.state)
    for kept in several or [kept_run(arguments.state, arguments.run)]:
        resource_guard.pause(kept.folder, is_paused=not arguments.end)
        what = "continues" if arguments.end else "is paused until p2pdiloco pause --end"
        peer_options.say(f"run {kept.manifest.config.name} ({kept.folder}): training here {what}")
    return 0
