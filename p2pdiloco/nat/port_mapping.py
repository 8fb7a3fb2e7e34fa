"""Port mapping: asks the router to forward one of its ports to ours, renews the lease and releases it.

Rules of this file:
1. PCP is tried first, then NAT-PMP, then UPnP (if miniupnpc is installed). Every request tries all of them, since the
   network may have changed.
2. A lease is short and renewed at half its life, so that a killed process does not leave a mapping behind for long.
3. The lease is released at the end, within GIVE_BACK_S.
4. A granted lease is only a hint: whether others can connect is tested by dial-backs (swarm/reachability.py).
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from p2pdiloco.nat import port_mapping_codec
from p2pdiloco.nat.port_mapping_codec import Denied, Granted
from p2pdiloco.util import logs

log = logs.get("gateway")

PORT = 5351
LEASE_S = 1200
RETRY_S = 300.0
# Timeout of each attempt; the request is sent again after it.
TRIES_S = (0.25, 0.5, 1.0)
GIVE_BACK_S = 2.0
UPNP_WAIT_MS = 2000
ROUTES = Path("/proc/net/route")

Answer = TypeVar("Answer")


class GatewayError(Exception):
    """The router gave no port. The message is a predicate of the router, as in "does not answer"."""


class Lease(NamedTuple):
    """A mapped port: the router forwards ``port`` of its external address ``host`` to ours for ``life_s`` seconds."""

    by: str
    host: str
    port: int
    life_s: float


class PortMapping:
    """Keeps a mapping of our TCP ``port`` at the router."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._nonce = os.urandom(port_mapping_codec.NONCE_BYTES)
        self.lease: Lease | None = None
        # Set after the first request, also if that failed.
        self.asked = asyncio.Event()

    async def keep(self, changed: Callable[[], None]) -> None:
        """Request a lease and renew it until cancelled. ``changed`` is called when its port or address changes."""
        while True:
            before = self.lease
            try:
                self.lease = await self._ask(LEASE_S)
            except GatewayError as error:
                self.lease = None
                log.debug("the router maps no port", reason=str(error))
            self.asked.set()
            # Compare all but the remaining lifetime.
            if (self.lease and self.lease[:3]) != (before and before[:3]):
                lease = self.lease or Lease("none any more", "", 0, 0)
                log.info("the router maps a port", by=lease.by, host=lease.host, port=lease.port)
                changed()
            await asyncio.sleep(RETRY_S if self.lease is None else max(1.0, self.lease.life_s / 2))

    async def release(self) -> None:
        """Release the lease, if there is one."""
        if self.lease is None:
            return
        with suppress(GatewayError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await self._ask(0)
        self.lease = None

    async def _ask(self, life_s: int) -> Lease:
        """Request, renew or (``life_s`` 0) release a lease; raises GatewayError if no protocol succeeds."""
        held, reasons = self.lease, []
        wanted = held.port if held else self._port
        gateway = default_gateway()
        for name, way in (("PCP", self._by_pcp), ("NAT-PMP", self._by_nat_pmp)):
            if gateway and (life_s or (held and held.by == name)):
                try:
                    return await way(gateway, wanted, life_s)
                except GatewayError as error:
                    reasons.append(f"{name}: {error}")
        if life_s or (held and held.by == "UPnP"):
            try:
                return await asyncio.to_thread(_by_upnp, self._port, wanted, life_s)
            except GatewayError as error:
                reasons.append(f"UPnP: {error}")
        raise GatewayError("; ".join(reasons))

    async def _by_pcp(self, gateway: str, wanted: int, life_s: int) -> Lease:
        with _open_socket(gateway) as raw:
            question = port_mapping_codec.encode_pcp_request(
                raw.getsockname()[0], self._port, wanted if life_s else 0, life_s, self._nonce
            )
            answer = await _exchange(
                raw, question, lambda data: port_mapping_codec.decode_pcp(data, self._port, self._nonce)
            )
        return _lease("PCP", answer, answer.host if isinstance(answer, Granted) else "")

    async def _by_nat_pmp(self, gateway: str, wanted: int, life_s: int) -> Lease:
        with _open_socket(gateway) as raw:
            host = await _exchange(raw, port_mapping_codec.encode_address_request(), port_mapping_codec.decode_address)
            question = port_mapping_codec.encode_nat_pmp_request(self._port, wanted if life_s else 0, life_s)
            answer = await _exchange(raw, question, lambda data: port_mapping_codec.decode_nat_pmp(data, self._port))
        return _lease("NAT-PMP", answer, host if isinstance(host, str) else "")


def _lease(by: str, answer: Granted | Denied, host: str) -> Lease:
    if isinstance(answer, Denied):
        raise GatewayError(answer.reason)
    return Lease(by, host, answer.port, answer.life_s)


def _open_socket(gateway: str) -> socket.socket:
    """Open a UDP socket that receives only from ``gateway``."""
    raw = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        raw.setblocking(False)
        raw.connect((gateway, PORT))
    except OSError as error:
        raw.close()
        raise GatewayError(f"cannot be reached ({error.strerror})") from error
    return raw


async def _exchange(raw: socket.socket, question: bytes, decode: Callable[[bytes], Answer]) -> Answer:
    """Send ``question``, repeat it if no answer comes, and return the first datagram that ``decode`` accepts."""
    loop = asyncio.get_running_loop()
    try:
        for wait_s in TRIES_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await loop.sock_sendall(raw, question)
                    while True:
                        with suppress(ValueError):
                            return decode(await loop.sock_recv(raw, 2 * port_mapping_codec.LONGEST_BYTES))
    except OSError:
        raise GatewayError("does not support it") from None
    raise GatewayError("does not answer")


def _by_upnp(port: int, wanted: int, life_s: int) -> Lease:
    """Request, renew or release a lease by UPnP, as ``_ask`` does. Blocks, so it runs on a thread."""
    try:
        import miniupnpc
    except ModuleNotFoundError:
        raise GatewayError("was not asked (needs pip install 'p2pdiloco[upnp]')") from None
    found = miniupnpc.UPnP()
    found.discoverdelay = UPNP_WAIT_MS
    try:
        if not found.discover():
            raise GatewayError("does not answer")
        found.selectigd()
        if not life_s:
            found.deleteportmapping(wanted, "TCP")
            return Lease("UPnP", "", 0, 0)
        found.addportmapping(wanted, "TCP", found.lanaddr, port, "p2pdiloco", "", life_s)
        return Lease("UPnP", str(found.externalipaddress() or ""), wanted, life_s)
    except GatewayError:
        raise
    except Exception as error:  # miniupnpc raises bare Exceptions: the router's message, or "Success" for a timeout
        message = str(error)
        raise GatewayError("does not answer" if message == "Success" else f"says: {message}") from error


def default_gateway() -> str | None:
    """Return the IPv4 address of this machine's default gateway, or None if it has none."""
    with suppress(OSError, ValueError, IndexError):
        for line in ROUTES.read_text().splitlines()[1:]:
            _, target, gateway, flags, *_ = line.split()
            if int(target, 16) == 0 and int(flags, 16) & 2:
                return socket.inet_ntoa(struct.pack("=L", int(gateway, 16)))
    return None
