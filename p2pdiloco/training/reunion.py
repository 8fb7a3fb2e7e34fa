"""Where a learner whose node has died is found by the node's next life.

A Unix socket in Linux's abstract namespace, named by the peer's folder: it leaves no file behind. Whoever connects must
be the same user, and brings the new shared memory along; the connection is then the learner's link.

Rules of this file:
1. Nothing here waits: a learner looks at its step boundaries.
2. A learner that nobody has found within its patience ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from typing import NamedTuple

IS_POSSIBLE = sys.platform == "linux"
CONNECT_S = 0.05
_CREDENTIALS = struct.Struct("3i")


class Found(NamedTuple):
    """The node's next life."""

    connection: socket.socket
    memory_fd: int


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Reunion:
    """The learner's side. Not open until its node is lost."""

    def __init__(self, name: str, patience_s: float) -> None:
        self._address = b"\0" + name.encode()
        self._patience_s = patience_s
        self._listener: socket.socket | None = None
        self._visitor: socket.socket | None = None
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it looks out for a node."""
        return self._listener is not None

    @property
    def is_over(self) -> bool:
        """Whether nobody came in time."""
        return time.monotonic() > self._until

    def open(self) -> bool:
        """Look out for a node from now on; False if that is not possible."""
        if not IS_POSSIBLE:
            return False
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(self._address)
            listener.listen(1)
        except OSError:
            listener.close()
            return False
        self._listener, self._until = listener, time.monotonic() + self._patience_s
        return True

    def poll(self) -> Found | None:
        """The node's next life, if it is there; then the reunion is closed."""
        assert self._listener is not None
        if self._visitor is None:
            try:
                self._visitor, _ = self._listener.accept()
            except OSError:
                return None
            self._visitor.setblocking(False)
            if peer_credentials(self._visitor)[1] != os.getuid():
                self._dismiss()
                return None
        try:
            data, fds, _, _ = socket.recv_fds(self._visitor, 1, 1)
        except BlockingIOError:
            return None
        except OSError:
            self._dismiss()
            return None
        if not data or len(fds) != 1:
            self._dismiss()
            return None
        connection, self._visitor = self._visitor, None
        self.close()
        return Found(connection, fds[0])

    def _dismiss(self) -> None:
        if self._visitor is not None:
            self._visitor.close()
            self._visitor = None

    def close(self) -> None:
        """Look out no more."""
        self._dismiss()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def find_learner(name: str, memory_fd: int) -> socket.socket | None:
    """The node's side: the link to a learner that waits under ``name``, which now has ``memory_fd``; None if none
    does."""
    if not IS_POSSIBLE:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)  # a learner in a long step leaves its queue of visitors full
    with contextlib.suppress(OSError):
        connection.connect(b"\0" + name.encode())
        if peer_credentials(connection)[1] == os.getuid():
            socket.send_fds(connection, [b"m"], [memory_fd])
            return connection
    connection.close()
    return None
