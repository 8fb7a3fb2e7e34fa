"""``p2pdiloco watch``: Watch a run, live or recorded. By default, draw the run in this terminal, as its page in a
browser does: live while the peer runs that WHAT names, else from its event logs. With --page, serve the event logs of a
folder as a page. With --events, print them as sentences or as JSON. A folder is a peer's state folder, a run's folder
in it, or the folder of a demo.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.cli.errors import REPAIR, CommandError
from p2pdiloco.cli.parser import meant
from p2pdiloco.node.dashboard import split_place
from p2pdiloco.observability import view_sources
from p2pdiloco.observability.event_schema import BY_NAME
from p2pdiloco.observability.log_reader import Choice, LoggedEvent, Recording, Tails, describe, player
from p2pdiloco.observability.web_server import PageServer, is_loopback, new_token
from p2pdiloco.util.logs import escaped
from p2pdiloco.util.status_pipe import PageAt

SPEED = 10.0
LOOK_S = 0.5
ONLY_WITH_EVENTS = ("follow", "kind", "peer", "since", "json")


async def run(arguments: argparse.Namespace) -> int:
    """Until it is quit or interrupted, or everything is printed."""
    if arguments.events:
        if arguments.page is not None:
            raise ValueError("--page and --events are two ways to watch: choose one")
        await _print_events(arguments)
        return 0
    for name in ONLY_WITH_EVENTS:
        if getattr(arguments, name):
            raise ValueError(f"--{name} belongs to the list of events: add --events")
    speed = SPEED if arguments.speed is None else arguments.speed
    if arguments.page is not None:
        await _serve_page(_folder(arguments), arguments.page, speed)
    else:
        await _draw(arguments.what or str(arguments.state), speed)
    return 0


def _folder(arguments: argparse.Namespace) -> Path:
    """Return the folder with event logs. Raises ValueError if it is the address of a page."""
    what = arguments.what or arguments.state
    if "://" in str(what):
        raise ValueError(f"{what} is a page already, and --page and --events read event logs: name a folder")
    return Path(what)


# -- In this terminal --------------------------------------------------------------------------------------------------


async def _draw(what: str, speed: float) -> None:
    if find_spec("textual") is None:
        raise CommandError(
            "watch draws with textual, which is not installed here: pip install 'p2pdiloco[watch]'. A browser shows "
            "the same: open the page that the peer prints, or run p2pdiloco watch FOLDER --page auto",
            REPAIR,
        )
    source = await view_sources.found(what, speed)
    if not sys.stdout.isatty():
        raise ValueError(
            "watch draws in a terminal, and this output is none: p2pdiloco watch --events, or status --json"
        )
    from p2pdiloco.observability.tui import Top

    await Top(source).run_async()


# -- As a page ---------------------------------------------------------------------------------------------------------


async def _serve_page(folder: Path, place: str, speed: float) -> None:
    recording = await asyncio.to_thread(Recording, folder)
    host, port = split_place(place)
    token = "" if is_loopback(host) else new_token()
    async with PageServer(lambda query: player(recording, query, speed), host, port or 0, token) as server:
        peer_options.say(PageAt(server.address))
        await asyncio.Event().wait()


# -- As events ---------------------------------------------------------------------------------------------------------


async def _print_events(arguments: argparse.Namespace) -> None:
    choice = _choice(arguments)
    tails = await asyncio.to_thread(Tails, _folder(arguments))
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
