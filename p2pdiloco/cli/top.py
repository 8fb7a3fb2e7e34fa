"""``p2pdiloco top``: Show a run in this terminal, like its page in a browser. WHAT is the address of a page, as a
peer prints it; the state folder of a peer (default: --state), which is shown live while the peer runs; or a folder
with event logs, as for `p2pdiloco page`.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from p2pdiloco.cli.errors import REPAIR, CommandError, as_command_errors
from p2pdiloco.observability import view_sources


async def run(arguments: argparse.Namespace) -> int:
    """Until it is quit."""
    if find_spec("textual") is None:
        raise CommandError(
            "top draws with textual, which is not installed here: pip install 'p2pdiloco[top]'; the same as a page: "
            "the address that the peer prints, or p2pdiloco page FOLDER",
            REPAIR,
        )
    with as_command_errors(repair=(ValueError,), nobody=()):
        source = await view_sources.found(arguments.what or str(arguments.state), arguments.speed)
        if not sys.stdout.isatty():
            raise ValueError("top draws in a terminal, and this output is none: p2pdiloco status --json, or events")
        from p2pdiloco.observability.tui import Top

        await Top(source).run_async()
        return 0
