"""Local network: peers of a run find each other by multicast DNS (RFC 6762), without any address.

Each peer announces its node of the directory, and listens for those of others.

Rules of this file:
1. Strangers on the network learn that some peer has this address and port. Only those who know the run's id, from an
   invite or a state folder, recognize the run and the peer: key and tag are masked by an HMAC of the run's id and of a
   random salt, which is new in each announcement.
2. What is found is a hint. Its tag covers all of it, so only those who know the run can make one. libp2p's handshake
   then proves the peer's key, and everything else is checked as at any other address.
3. Nothing here stops a peer. Where the directory's node listens on no interface with multicast, this is off.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.transport import addresses
from p2pdiloco.util import logs
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.peer_ids import KEY_BYTES, key_of, peer_id_of

log = logs.get("lan")

SERVICE = "_p2pdiloco._tcp.local."
SALT_BYTES, TAG_BYTES = 16, 16
# Interval between two looks whether this machine's addresses have changed.
LOOK_S = 15.0
# Time for the other peer to answer a question about its announcement.
ASK_S = 3.0
# Maximum number of such questions at a time, and of peers that are reported.
ASKING_MOST, FOUND_MOST = 8, 64


class Announcement(NamedTuple):
    """Announcement of a peer's directory node on the local network, as everybody there can read it."""

    name: str
    """The salt, in hexadecimal."""
    port: int
    hosts: tuple[str, ...]
    """IPv4 addresses."""
    key: bytes
    """The peer's key, masked."""
    tag: bytes


def _hmac(run: RunId, purpose: bytes, *parts: bytes) -> bytes:
    return hmac.digest(run.encode(), b"p2pdiloco lan 1 " + purpose + b"".join(parts), "sha256")


def _masked(run: RunId, salt: bytes, key: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(key, _hmac(run, b"key", salt), strict=True))


def _tag(run: RunId, salt: bytes, masked: bytes, port: int, hosts: Iterable[str]) -> bytes:
    packed = b"".join(sorted(ipaddress.IPv4Address(host).packed for host in hosts))
    return _hmac(run, b"tag", salt, masked, port.to_bytes(2, "big"), packed)[:TAG_BYTES]


def announcement(run: RunId, peer: PeerId, port: int, hosts: Sequence[str], salt: bytes) -> Announcement:
    """Return what ``peer`` tells the network about its directory node at this port of ``hosts``."""
    masked = _masked(run, salt, key_of(peer))
    return Announcement(salt.hex(), port, tuple(hosts), masked, _tag(run, salt, masked, port, hosts))


def recognize(run: RunId, told: Announcement) -> tuple[PeerId, list[str]] | None:
    """Return the peer that announced itself, and its multiaddrs; None unless it is a peer of ``run``."""
    try:
        salt = bytes.fromhex(told.name)
        tag = _tag(run, salt, told.key, told.port, told.hosts)
    except (ValueError, OverflowError):
        return None
    if len(salt) != SALT_BYTES or len(told.key) != KEY_BYTES or not hmac.compare_digest(tag, told.tag):
        return None
    try:
        peer = peer_id_of(_masked(run, salt, told.key))
    except ValueError:
        return None
    return peer, [f"/ip4/{host}/tcp/{told.port}" for host in told.hosts]


def multicast_hosts() -> list[str]:
    """Return this machine's IPv4 addresses on interfaces that are up and have multicast, without loopback."""
    states = psutil.net_if_stats()
    found = []
    for name, where in psutil.net_if_addrs().items():
        flags = states[name].flags.split(",") if name in states else []
        if {"up", "multicast"} <= {*flags} and "loopback" not in flags:
            found += [one.address for one in where if one.family.name == "AF_INET"]
    return sorted(found)


class LanDiscovery:
    """Announces this peer's directory node on the local network, and reports those of other peers of ``run``.

    visible: returns the node's multiaddrs at this moment.
    heard: called with each other peer's id and multiaddrs, again when they change.
    """

    def __init__(
        self,
        run: RunId,
        me: PeerId,
        visible: Callable[[], Sequence[str]],
        heard: Callable[[PeerId, list[str]], None],
    ) -> None:
        self._run = run
        self._me = me
        self._visible = visible
        self._heard = heard
        self._asking = 0
        self._found: dict[PeerId, list[str]] = {}
        # True while it listens.
        self.is_on = False

    async def keep(self) -> None:
        """Announce and listen until cancelled, anew whenever this machine's addresses change."""
        told = ""
        while True:
            hosts, port = self._own()
            if not hosts:
                await asyncio.sleep(LOOK_S)
                continue
            library = await asyncio.to_thread(importlib.import_module, "zeroconf.asyncio")  # not every peer needs it
            try:
                await self._announce_until_changed(library, hosts, port)
            except (OSError, importlib.import_module("zeroconf").Error) as error:
                if told != (told := str(error)):
                    log.info("peers on the local network are not looked for", reason=told)
                await asyncio.sleep(LOOK_S)

    def _own(self) -> tuple[list[str], int]:
        """Return the addresses to announce, and the port."""
        local, ports = {*multicast_hosts()}, dict[str, int]()
        for text in self._visible():
            address = addresses.parse(text)
            if address.family == "ip4" and address.host in local:
                ports.setdefault(address.host, address.port)
        port = next(iter(ports.values()), 0)
        return sorted(host for host, its_port in ports.items() if its_port == port), port

    async def _announce_until_changed(self, library: Any, hosts: list[str], port: int) -> None:
        async with Tasks() as tasks:
            mdns = library.AsyncZeroconf(interfaces=hosts)
            try:
                self.is_on = True

                def changed(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
                    if state_change.name != "Removed" and self._asking < ASKING_MOST:
                        self._asking += 1
                        tasks.spawn(self._ask(library, mdns, name), name="ask on the local network")

                browser = library.AsyncServiceBrowser(mdns.zeroconf, SERVICE, handlers=[changed])
                mine = announcement(self._run, self._me, port, hosts, os.urandom(SALT_BYTES))
                announced = await mdns.async_register_service(
                    library.AsyncServiceInfo(
                        SERVICE,
                        f"{mine.name}.{SERVICE}",
                        port=port,
                        parsed_addresses=hosts,
                        server=f"{mine.name}.local.",  # not this machine's name
                        properties={"k": mine.key, "t": mine.tag},
                    )
                )
                await announced
                log.debug("announced on the local network", hosts=",".join(hosts), port=port)
                while True:
                    await asyncio.sleep(LOOK_S)
                    if self._own() != (hosts, port):
                        await browser.async_cancel()
                        return
            finally:
                self.is_on = False
                await mdns.async_close()

    async def _ask(self, library: Any, mdns: Any, name: str) -> None:
        """Ask who announced ``name``, and report a peer of the run."""
        try:
            info = library.AsyncServiceInfo(SERVICE, name)
            if not await info.async_request(mdns.zeroconf, 1000.0 * ASK_S):
                return
            properties: Mapping[bytes, bytes | None] = info.properties
            hosts = tuple(host for host in info.parsed_addresses() if ":" not in host)
            key, tag = properties.get(b"k") or b"", properties.get(b"t") or b""
            found = recognize(
                self._run, Announcement(name.removesuffix(f".{SERVICE}"), info.port or 0, hosts, key, tag)
            )
            if found is None or found[0] == self._me or self._found.get(found[0]) == found[1]:
                return
            if found[0] in self._found or len(self._found) < FOUND_MOST:
                self._found[found[0]] = found[1]
                log.info("found a peer on the local network", peer=found[0], address=found[1][0])
                self._heard(*found)
        finally:
            self._asking -= 1
