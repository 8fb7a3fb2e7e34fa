"""``p2pdiloco events``: Print the events that peers have logged (metrics.jsonl), as sentences or as JSON. FOLDER is
a peer's state folder (default: --state), a run's folder in it, or the folder of a demo or a chaos run.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import msgspec

from p2pdiloco.cli.errors import as_command_errors
from p2pdiloco.cli.parser import meant
from p2pdiloco.observability.event_schema import BY_NAME
from p2pdiloco.observability.log_reader import Choice, LoggedEvent, Tails, describe
from p2pdiloco.util.logs import escaped

LOOK_S = 0.5


async def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    with as_command_errors(repair=(ValueError,), nobody=()):
        choice = _choice(arguments)
        folder: Path = arguments.folder or arguments.state
        tails = await asyncio.to_thread(Tails, folder)
        before: LoggedEvent | None = None
        for event in tails.before():
            if choice.has(event):
                if arguments.speed and before is not None:
                    await asyncio.sleep(max(0.0, event.at - before.at) / arguments.speed)
                before = event
                _print(event, arguments.json)
        while arguments.follow:
            for event in tails.new():
                if choice.has(event):
                    _print(event, arguments.json)
            await asyncio.sleep(LOOK_S)
    return 0


def _choice(arguments: argparse.Namespace) -> Choice:
    kinds = [kind for kind in (arguments.kind or "").split(",") if kind]
    for kind in kinds:
        if kind not in BY_NAME:
            raise ValueError(f"there is no event {kind}{meant(kind, BY_NAME)}; docs/watching.md lists them")
    since = 0.0 if arguments.since is None else time.time() - arguments.since
    return Choice(kinds, arguments.peer, since)


def _print(event: LoggedEvent, as_json: bool) -> None:
    line = {**event.line, "source": event.source}
    print(escaped(msgspec.json.encode(line).decode()) if as_json else describe(event), flush=True)
