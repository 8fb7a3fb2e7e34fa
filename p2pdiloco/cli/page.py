"""``p2pdiloco page``: Replay the event logs of a run's peers on the page that live peers serve. FOLDER is a peer's
state folder, a run's folder in it, or the folder of a demo or a chaos run.
"""

from __future__ import annotations

import argparse
import asyncio

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import as_command_errors
from p2pdiloco.node.dashboard import split_place
from p2pdiloco.observability.log_reader import Recording, player
from p2pdiloco.observability.web_server import PageServer, is_loopback, new_token
from p2pdiloco.util.status_pipe import PageAt


async def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    with as_command_errors(repair=(ValueError,), nobody=()):
        recording = await asyncio.to_thread(Recording, arguments.folder)
        host, port = split_place(arguments.port)
        token = "" if is_loopback(host) else new_token()
        server = PageServer(lambda query: player(recording, query, arguments.speed), host, port or 0, token)
        async with server:
            peer_options.say(PageAt(server.address))
            await asyncio.Event().wait()
        return 0
