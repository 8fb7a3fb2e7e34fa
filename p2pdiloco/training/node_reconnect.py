"""Reconnects a learner whose node has died with the node's next life.

A Unix socket in Linux's abstract namespace, named by the peer's folder: it leaves no file behind. Whoever connects must
be the same user, and brings the new shared memory along; the connection is then the learner's link. A training script
is told the run first.

Rules of this file:
1. Nothing here waits: a learner looks at its step boundaries.
2. A learner that nobody has found within its patience ends; a script trains on alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time

from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire.learner_ipc import Welcome

IS_POSSIBLE = sys.platform == "linux"
CONNECT_S = 0.05
_CREDENTIALS = struct.Struct("3i")


class Found:
    """The node's next life; a script is also told which run it is."""

    def __init__(self, connection: socket.socket, memory_fd: int, manifest: bytes = b"") -> None:
        self._connection = connection
        self._memory_fd = memory_fd
        self.manifest = manifest

    def attach(self, elements: int) -> tuple[SharedVectors, Channel]:
        """The memory and the link that it has brought along; once.

        Raises:
            ValueError: the memory is not that of ``elements`` parameters.
        """
        return SharedVectors.attach(self._memory_fd, elements), Channel(self._connection)

    def dismiss(self) -> None:
        """It is not what was looked for."""
        self._connection.close()
        os.close(self._memory_fd)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Reunion:
    """The learner's side. Not open until its node is lost."""

    def __init__(self, name: str, patience_s: float, *, is_script: bool = False) -> None:
        self._address = b"\0" + name.encode()
        self._patience_s = patience_s
        self._is_script = is_script
        self._listener: socket.socket | None = None
        self._visitor: socket.socket | None = None
        self._memory_fd = -1
        """What the visitor has brought."""
        self._welcome = Welcome()
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
            if not self._has_said_all(self._visitor):
                return None
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            self._dismiss()
            return None
        found = Found(self._visitor, self._memory_fd, self._welcome.manifest)
        self._visitor, self._memory_fd = None, -1
        self.close()
        return found

    def _has_said_all(self, visitor: socket.socket) -> bool:
        """Read what is there; whether that is all.

        Raises:
            OSError: nothing is there (BlockingIOError), or the visitor has gone.
            ValueError: it says something else.
        """
        if self._memory_fd < 0:
            data, fds, _, _ = socket.recv_fds(visitor, 1, 1)
            if not data or len(fds) != 1:
                raise ValueError("a visitor brings the shared memory")
            self._memory_fd = fds[0]
        while self._is_script and (missing := self._welcome.missing()):
            self._welcome.take(visitor.recv(missing))
        return True

    def _dismiss(self) -> None:
        if self._visitor is not None:
            self._visitor.close()
            self._visitor = None
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
        self._welcome = Welcome()

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
