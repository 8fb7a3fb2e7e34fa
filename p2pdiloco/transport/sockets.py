"""TCP sockets: options, listeners, the kernel's measurements of a connection, and explanations of failed dials.

Rules of this file:
1. SO_RCVBUF and SO_SNDBUF are never set, because that switches off the kernel's autotuning.
2. TCP_NOTSENT_LOWAT keeps the kernel's queue of *unsent* bytes short, whatever the window is. Data then waits in this
   process, where control overtakes bulk.
3. The kernel notices a dead path within DEAD_AFTER_S, whether data is in flight (TCP_USER_TIMEOUT) or not (keepalive).
4. Options that a kernel lacks are skipped: they matter for speed, not for correctness.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import psutil

from p2pdiloco.net.bandwidth import Path
from p2pdiloco.transport import addresses
from p2pdiloco.transport.addresses import Address, of_socket
from p2pdiloco.util import logs

DEAD_AFTER_S = 20
UNSENT_BYTES = 32 << 10
"""Measured beside slices of 128 KiB at 2.5 Gbit/s: a request under bulk takes 1.4 ms, with 128 KiB here 1.6 to 2.0."""
SHORT_BYTES = 1200
"""Largest segment on a path on which longer packets are lost."""
SO_MAX_PACING_RATE = 47
"""Linux; the socket module has no name for it."""
UNLIMITED_RATE = 2**64 - 1
TCP_INFO_BYTES = 256
ROUND_TRIP_OFFSET = 68
"""Offset of tcpi_rtt (microseconds) in Linux's struct tcp_info."""
ACKED_OFFSET = 120
"""Offset of tcpi_bytes_acked (64 bits; Linux 4.1)."""
LEAST_ROUND_TRIP_OFFSET = 148
"""Offset of tcpi_min_rtt (microseconds, over some minutes; Linux 4.9)."""
CONGESTION_NAME_BYTES = 16
BACKLOG = 1024


class DialError(Exception):
    """A dial failed. The text says why."""


class WrongPeerError(DialError):
    """Another peer than expected answers there, or somebody is in between. The text says which."""


class PeerRefused(DialError):  # noqa: N818
    """The other side refused this peer. The text is its reason."""


def check_numeric(address: Address) -> None:
    """Check that an address is numeric. Names are for dialling only.

    Raises:
        ValueError: the address has a name.
    """
    if address.family not in ("ip4", "ip6"):
        raise ValueError(f"listen on a numeric address, for example /ip4/0.0.0.0/tcp/{address.port}, not on {address}")


def listen(address: Address) -> socket.socket:
    """Return a listening, non-blocking socket.

    Raises:
        OSError: the port is in use, or the address is not this machine's; the text names the address.
        ValueError: the address has a name.
    """
    check_numeric(address)
    family = socket.AF_INET if address.family == "ip4" else socket.AF_INET6
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        if address.family == "ip6":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    return listener


def sharing_port(family: int, port: int, *, is_narrow: bool = False) -> socket.socket:
    """Return a non-blocking TCP socket on a local port (0: any free one) that this process may use several times.

    is_narrow: its segments must be short.

    Raises:
        OSError: the port is in use by a process that does not share it.
    """
    raw = socket.socket(family, socket.SOCK_STREAM)
    try:
        raw.setblocking(False)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        raw.bind(("", port))
        if is_narrow:
            shorten(raw)
    except OSError:
        raw.close()
        raise
    return raw


def local_addresses(listener: socket.socket) -> list[Address]:
    """Return the addresses at which to reach ``listener``: for a wildcard all of this machine, loopback last."""
    return reachable(of_socket(*listener.getsockname()[:2]))


def reachable(listening: Address) -> list[Address]:
    """Return the addresses at which others may reach a listener at ``listening``, which must have a port."""
    host, port = listening.host, listening.port
    if host not in ("0.0.0.0", "::"):
        return [of_socket(host, port)]
    found = _own_hosts(socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6)
    return [of_socket(text, port) for text in found or ["127.0.0.1" if host == "0.0.0.0" else "::1"]]


def _own_hosts(family: int) -> list[str]:
    """Return this machine's addresses, loopback last, without link-local ones."""
    nics = [nic for nics in psutil.net_if_addrs().values() for nic in nics]
    found = dict.fromkeys(nic.address for nic in nics if nic.family == family and "%" not in nic.address)
    return sorted(found, key=is_loopback)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address; False for a name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def everywhere(port: int = 0) -> tuple[str, ...]:
    """Return multiaddrs to listen at all addresses of this machine; IPv6 only if it has one that others may reach."""
    has_ip6 = any(not is_loopback(host) for host in _own_hosts(socket.AF_INET6))
    return (f"/ip4/0.0.0.0/tcp/{port}", *([f"/ip6/::/tcp/{port}"] if has_ip6 else []))


def has_route(host: str) -> bool:
    """Return whether there is a route to a numeric host, without sending anything; True for a name."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
    except OSError:
        return False
    return True


def tune(connection: socket.socket, *, congestion: str) -> None:
    """Set the options of a TCP socket. ``congestion`` "" leaves the kernel's choice."""
    options = [
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", DEAD_AFTER_S * 1000),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", DEAD_AFTER_S // 2),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", DEAD_AFTER_S // 4),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", 2),
        (socket.IPPROTO_TCP, "TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ]
    for level, name, value in options:
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):
                connection.setsockopt(level, option, value)
    if congestion and hasattr(socket, "TCP_CONGESTION"):
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode("ascii"))


def shorten(raw: socket.socket) -> None:
    """Limit segments to SHORT_BYTES in both directions, on a listener or on a socket before it connects."""
    if hasattr(socket, "TCP_MAXSEG"):
        with suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SHORT_BYTES)


def hang_up(raw: socket.socket) -> None:
    """Shut a socket down in both directions. Its reader then finds the end and closes it."""
    with suppress(OSError):  # closed already
        raw.shutdown(socket.SHUT_RDWR)


def pace(connection: socket.socket, bytes_per_s: float | None) -> None:
    """Limit the kernel's send rate (None: no limit). A change takes effect within 20 ms."""
    rate = UNLIMITED_RATE if bytes_per_s is None else max(1, int(bytes_per_s))
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", rate))


def path_of(connection: socket.socket) -> Path | None:
    """Return the kernel's measurements of a connection's path; None if the kernel has none."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_NAME_BYTES)
        (round_trip_us,) = struct.unpack_from("=I", info, ROUND_TRIP_OFFSET)
        is_local = connection.getpeername()[0] == connection.getsockname()[0]
    except (OSError, AttributeError, struct.error):
        return None
    least_us = struct.unpack_from("=I", info, LEAST_ROUND_TRIP_OFFSET)[0] if len(info) >= 152 else 0
    if not 0 < least_us < round_trip_us:
        least_us = round_trip_us
    is_counted = len(info) >= ACKED_OFFSET + 8
    acked = struct.unpack_from("=Q", info, ACKED_OFFSET)[0] if is_counted else None
    return Path(
        congestion=name.rstrip(b"\0").decode("ascii", "replace"),
        round_trip_s=round_trip_us / 1e6,
        least_round_trip_s=least_us / 1e6,
        acked_bytes=acked,
        is_local=is_local,
    )


def explain(error: BaseException, address: Address) -> str:
    """Return a sentence that says why a connection to ``address`` failed."""
    where = f"{address.host} port {address.port}"
    match error:
        case ConnectionRefusedError():
            return f"refused: nothing listens at {where}"
        case ssl.SSLError():
            return f"{where} does not speak our TLS: is it a p2pdiloco peer? ({error.reason})"
        case TimeoutError():
            return f"no answer from {where} in time"
        case ConnectionError():
            return f"{where} closed the connection"
        case OSError(errno=errno.ENETUNREACH | errno.EHOSTUNREACH):
            return f"no route to {address.host}"
        case _:
            return f"{type(error).__name__}: {error}"


# -- Listeners ---------------------------------------------------------------------------------------------------------
# All sockets at which one process accepts peers.
#
# Rules of this file:
# 1. Where any free port is asked for, all listeners use the same number if possible.
# 2. IPv4 and IPv6 have separate sockets.


class Listeners:
    """Listening sockets of a process, for the multiaddrs ``wanted``; "" or none to accept nothing."""

    def __init__(self, wanted: str | Sequence[str]) -> None:
        texts = [wanted] if isinstance(wanted, str) else wanted
        self._wanted = [addresses.parse(text) for text in texts if text]
        self._sockets: list[socket.socket] = []

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(self._sockets)

    def open(self) -> None:
        """Open all listeners.

        Raises:
            OSError: an address is in use, or not this machine's.
            ValueError: an address has a name.
        """
        try:
            for one in self._wanted:
                self._sockets.append(self._opened(one))
        except BaseException:
            self.close()
            raise

    def _opened(self, wanted: Address) -> socket.socket:
        if self._sockets and not wanted.port:
            with suppress(OSError):
                return listen(msgspec.structs.replace(wanted, port=self._sockets[0].getsockname()[1]))
        return listen(wanted)

    def addresses(self) -> list[Address]:
        """Return the addresses at which to reach this peer: for a wildcard all of the machine, loopback last."""
        found = [address for one in self._sockets for address in local_addresses(one)]
        return sorted(dict.fromkeys(found), key=lambda address: is_loopback(address.host))

    def close(self) -> None:
        """Close all listeners."""
        for one in self._sockets:
            one.close()
        self._sockets.clear()


# -- Congestion control ------------------------------------------------------------------------------------------------
# Reports the congestion control that connections got.


log = logs.get("transport")


class Congestion:
    """Warns once if the kernel refused the congestion control ``wanted``."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._has_warned = False

    def note(self, path: Path | None) -> None:
        """Check the path of a new connection."""
        if self._has_warned or not self._wanted or path is None or path.congestion == self._wanted:
            return
        self._has_warned = True
        log.warning(
            "the kernel refused the requested congestion control: long or lossy paths will be slow",
            wanted=self._wanted,
            used=path.congestion,
        )
