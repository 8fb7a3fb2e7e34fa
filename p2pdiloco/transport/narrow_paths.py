"""Hosts on whose path long packets are lost, usually behind a tunnel with a small MTU that sends no ICMP. Connections
to them use short TCP segments (``sockets.shorten``).

Rules of this file:
1. If the tunnel is on this side, all paths are narrow: EVERYWHERE stands for all hosts. Two narrow paths are a sign of
   it, too.
2. What was found is kept on disk for LIFE_S, so that a restarted peer does not have to find out again. The file is a
   hint: if it is damaged or missing, nothing is known. A wrong entry costs a few per cent of the link.
3. Where long packets came within WIDE_S, none are lost: on a thin line, connections push each other aside.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.util import logs
from p2pdiloco.util.files import read_regular, write_atomically

log = logs.get("transport")

# Number of hosts that are remembered; the oldest is forgotten first.
HOSTS_LIMIT = 256
# Number of narrow paths from which all are taken to be narrow.
MANY = 2
LIFE_S = 7 * 86_400.0
WIDE_S = 600.0
EVERYWHERE = "*"
FILE_LIMIT = 1 << 16
_Hosts = dict[Annotated[str, Meta(max_length=64)], float]


class NarrowPaths:
    """The hosts, and whether all paths are narrow. ``host in paths``: use short segments.

    path: file in which the hosts are kept; None: they are forgotten with this process.
    everywhere: all paths are narrow from the start on.
    """

    def __init__(self, path: Path | None = None, *, everywhere: bool = False) -> None:
        self._path = path
        self._everywhere = everywhere
        # Unix time at which each host was found, the oldest first.
        self._hosts: dict[str, float] = {}
        # The same for hosts to which long packets came.
        self._wide: dict[str, float] = {}
        self._is_saved = True

    def __contains__(self, host: object) -> bool:
        return self.is_everywhere or host in self._hosts

    @property
    def is_everywhere(self) -> bool:
        """True if all paths count as narrow."""
        return self._everywhere or EVERYWHERE in self._hosts or len(self._hosts) >= MANY

    def add(self, host: str) -> bool:
        """Record that the path to ``host`` is narrow, or all are (EVERYWHERE). Return False if it is wide."""
        if time.time() - self._wide.get(host, -WIDE_S) < WIDE_S:
            return False
        _put(self._hosts, host)
        self._is_saved = False
        return True

    def prove(self, host: str) -> None:
        """Record that long packets came to ``host``."""
        _put(self._wide, host)

    def load(self) -> None:
        """Add the hosts in the file. Blocks on the disk."""
        try:
            if self._path is not None:
                found = msgspec.json.decode(read_regular(self._path, FILE_LIMIT), type=_Hosts)
                self._hosts = {host: at for host, at in found.items() if abs(time.time() - at) < LIFE_S}
        except (OSError, msgspec.MsgspecError):
            return

    def save(self) -> None:
        """Write the file, if something was found since the last time. Blocks on the disk."""
        if self._path is None or self._is_saved:
            return
        self._is_saved = True
        try:
            write_atomically(self._path, msgspec.json.encode(self._hosts))
        except OSError as error:
            log.warning("the list of narrow paths cannot be written", path=self._path, error=error)


def _put(hosts: dict[str, float], host: str) -> None:
    """Put ``host`` last, with the present time."""
    hosts.pop(host, None)
    hosts[host] = time.time()
    if len(hosts) > HOSTS_LIMIT:
        del hosts[next(iter(hosts))]
