"""``p2pdiloco bootstrap``: Run a DHT node that peers can use as their first address. It holds no model and merges
nothing; a run goes on without it."""

from __future__ import annotations

import argparse
import asyncio
import signal

from p2pdiloco.cli.complaints import complaining
from p2pdiloco.runtime import logs
from p2pdiloco.runtime.directory import Directory, DirectoryError
from p2pdiloco.runtime.identity import Identity, IdentityError


async def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    with complaining(repair=(IdentityError, ValueError), nobody=(DirectoryError,)):
        return await _serve(arguments)


async def _serve(arguments: argparse.Namespace) -> int:
    identity = Identity.load_or_create(arguments.identity or arguments.state / "bootstrap.key")
    logs.speak_as(identity.peer_id)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    directory = Directory(
        identity,
        listen=arguments.listen or ["/ip4/0.0.0.0/tcp/31337"],
        announce=arguments.announce,
        initial_peers=arguments.initial_peers,
        cache_path=arguments.state / "bootstrap-directory.json",
    )
    with identity.hold():
        async with directory:
            print("This directory node is up. To join a run through it, type on another machine:", flush=True)
            for address in directory.visible_addresses():
                print(f"  p2pdiloco join {address}", flush=True)
            print("To found a run:", flush=True)
            for address in directory.visible_addresses()[:1]:
                print(f"  p2pdiloco start CONFIG.toml --bootstrap {address}", flush=True)
            await stop.wait()
    return 0
