"""Reconnects a learner whose node has died with the next node.

The meeting point is a Unix socket in Linux's abstract namespace, named after the peer's folder, so it leaves no file
behind. Containers that share the host's network share this namespace, so the name holds the folder's device and inode,
not only its path. A visitor must be the same user, and brings the new shared memory. Its connection then is the
learner's link. A training script first receives the run's manifest.

Rules of this file:
1. Nothing here waits: a learner polls at its step boundaries.
2. A learner that no node has found in time ends; a script trains on alone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from pathlib import Path

from p2pdiloco.protocol.ids import digest_of
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.wire.learner_ipc import Welcome

IS_POSSIBLE = sys.platform == "linux"
CONNECT_S = 0.05
_CREDENTIALS = struct.Struct("3i")


def meeting_place(folder: Path) -> str:
    """Return the name of the socket at which the learner and the node of ``folder`` meet."""
    path = folder.resolve()
    known = str(path)
    with contextlib.suppress(OSError):
        known += f"/{path.stat().st_dev}/{path.stat().st_ino}"
    return f"p2pdiloco-{os.getuid()}-{digest_of(known.encode(errors='surrogateescape'))}"


class Found:
    """A node that has come, with its shared memory. A script also gets the run's manifest."""

    def __init__(self, connection: socket.socket, memory_fd: int, manifest: bytes = b"") -> None:
        self._connection = connection
        self._memory_fd = memory_fd
        self.manifest = manifest

    def attach(self, layout: Layout) -> tuple[SharedVectors, Channel]:
        """Return the memory and the link that the node has brought. Call it once.

        Raises:
            ValueError: the memory is not that of this layout.
        """
        vectors = SharedVectors.attach(self._memory_fd, layout.elements, ring_elements(layout))
        return vectors, Channel(self._connection)

    def dismiss(self) -> None:
        """Close the connection: this is not the expected node."""
        self._connection.close()
        os.close(self._memory_fd)


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process ID and the user ID at the other end of a Unix socket."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


class Reunion:
    """The learner's side. It is not open before its node is lost."""

    def __init__(self, name: str, patience_s: float, *, is_script: bool = False) -> None:
        self._address = b"\0" + name.encode()
        self._patience_s = patience_s
        self._is_script = is_script
        self._listener: socket.socket | None = None
        self._visitor: socket.socket | None = None
        # The shared memory that the visitor has brought.
        self._memory_fd = -1
        self._welcome = Welcome()
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """True while it waits for a node."""
        return self._listener is not None

    @property
    def is_over(self) -> bool:
        """True if no node came in time."""
        return time.monotonic() > self._until

    def open(self) -> bool:
        """Begin to wait for a node. Returns False if that is not possible."""
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
        """Return the next node if it has come; the reunion is then closed."""
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
        """Read what the visitor has sent. Returns True when its greeting is complete.

        Raises OSError if nothing has arrived, or the visitor is gone, ValueError if it sent something else."""
        if self._memory_fd < 0:
            data, fds, _, _ = socket.recv_fds(visitor, 1, 1)
            if not data or len(fds) != 1:
                raise ValueError("the visitor did not send the shared memory")
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
        """Stop waiting."""
        self._dismiss()
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def find_learner(name: str, memory_fd: int) -> socket.socket | None:
    """Connect a node to a learner that waits under ``name``, and send it ``memory_fd``. Returns None if there is
    none."""
    if not IS_POSSIBLE:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_S)  # connect blocks while the queue of a learner in a long step is full
    with contextlib.suppress(OSError):
        connection.connect(b"\0" + name.encode())
        if peer_credentials(connection)[1] == os.getuid():
            socket.send_fds(connection, [b"m"], [memory_fd])
            return connection
    connection.close()
    return None
