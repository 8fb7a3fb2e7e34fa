"""``p2pdiloco bootstrap``: Run a directory (DHT) node that peers can use as their first address. It holds no model
and merges nothing; a run continues without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from functools import partial

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.discovery import port_multiplexer
from p2pdiloco.discovery.directory import Directory, DirectoryError
from p2pdiloco.nat.rendezvous_server import RendezvousServer
from p2pdiloco.net.handshake import WIRE_VERSION
from p2pdiloco.swarm.run_lookup import check_directory_addresses
from p2pdiloco.transport import addresses, sockets
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.sockets import everywhere
from p2pdiloco.transport.transport import Observer, Transport
from p2pdiloco.util import logs
from p2pdiloco.util.status_pipe import Listening
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.directory_records import PointRecord

PORT = 31337
LAST_PORT = 65535
ANNOUNCE_S = 15.0
POINT_LIFE_S = 60.0


async def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    listen, rendezvous = arguments.listen or list(everywhere(PORT)), arguments.rendezvous
    for text in arguments.announce:
        addresses.parse(text)
    for text in (*listen, *(rendezvous or ())):
        sockets.check_numeric(addresses.parse(text))
    check_directory_addresses(arguments.bootstrap)
    identity = Identity.load_or_create(arguments.identity or arguments.state / "bootstrap.key")
    logs.speak_as(identity.peer_id)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    transport = Transport(identity, listen=_meeting_addresses(listen, rendezvous), run="", version=WIRE_VERSION)
    server = RendezvousServer(transport, arguments.relay)
    inner, announced = listen, arguments.announce
    if rendezvous and set(listen) <= set(rendezvous):  # both at one port: the daemon listens behind it
        port = _free_port()
        transport.setup.takers[port_multiplexer.FIRST] = port_multiplexer.SharedPort(port).carry
        inner = [f"/ip4/127.0.0.1/tcp/{port}"]
        # A wildcard is no address to tell others.
        announced = announced or [str(one) for text in listen for one in sockets.reachable(addresses.parse(text))]
    directory = Directory(
        identity,
        listen=inner,
        announce=announced,
        initial_peers=arguments.bootstrap,
        cache_path=arguments.state / "bootstrap-directory.json",
    )
    with identity.hold():
        async with directory, transport.serve(Observer()), Tasks() as tasks:
            announce = partial(_announce, directory, transport, arguments.announce)
            tasks.keep(announce, name="announce the rendezvous server")
            peer_options.say(Listening(tuple(directory.visible_addresses())))
            await stop.wait()
            if pairs := server.introducer.relayed_pairs:
                print(
                    f"{pairs} pairs of peers were connected only through this node; they reconnect through another one"
                )
    return 0


def _meeting_addresses(listen: list[str], rendezvous: list[str] | None) -> list[str]:
    """The addresses of the rendezvous server: the user's, or the port after each of the directory's."""
    if rendezvous:
        return rendezvous
    found = []
    for first in map(addresses.parse, listen):
        wanted = msgspec.structs.replace(first, port=first.port + 1 if 0 < first.port < LAST_PORT else 0)
        try:
            sockets.listen(wanted).close()
        except (OSError, ValueError):
            wanted = msgspec.structs.replace(wanted, port=0)  # another one's: any will do, the directory tells which
        found.append(str(wanted))
    return found


def _free_port() -> int:
    with sockets.listen(addresses.parse("/ip4/127.0.0.1/tcp/0")) as probe:
        return int(probe.getsockname()[1])


async def _announce(directory: Directory, transport: Transport, announced: list[str]) -> None:
    """Keep the rendezvous server's record alive; behind a forwarded port its host is the announced one's."""
    port = addresses.parse(transport.listen_addresses()[0]).port
    hosts = [msgspec.structs.replace(addresses.parse(text), port=port, peer=transport.peer_id) for text in announced]
    while True:
        where = [str(one) for one in hosts] or transport.listen_addresses()
        with contextlib.suppress(DirectoryError):
            await directory.publish_point(msgspec.msgpack.encode(PointRecord(tuple(where[:8]))), POINT_LIFE_S)
        await asyncio.sleep(ANNOUNCE_S)
