"""Reconnects a learner whose node has died with the next node.

The learner listens on a Unix socket in Linux's abstract namespace, which leaves no file behind. The socket is named
after the peer's folder. Containers that share the host's network share this namespace, so the name holds the folder's
device and inode, not only its path. The node that connects must belong to the same user, and sends the new shared
memory. Its connection then is the learner's link. A training script first receives the run's manifest.

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


def learner_socket_name(folder: Path) -> str:
    """Return the name of the socket on which the learner of ``folder`` waits for its next node."""
    path = folder.resolve()
    known = str(path)
    with contextlib.suppress(OSError):
        known += f"/{path.stat().st_dev}/{path.stat().st_ino}"
    return f"p2pdiloco-{os.getuid()}-{digest_of(known.encode(errors='surrogateescape'))}"


class NodeConnection:
    """A connection from a new node, with its shared memory. A script also gets the run's manifest."""

    def __init__(self, connection: socket.socket, memory_fd: int, manifest: bytes = b"") -> None:
        self._connection = connection
        self._memory_fd = memory_fd
        self.manifest = manifest

    def attach(self, layout: Layout) -> tuple[SharedVectors, Channel]:
        """Return the memory and the link that the node has sent. Call it once.

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


class NodeListener:
    """Waits for the learner's next node. It is closed until the node is lost."""

    def __init__(self, name: str, patience_s: float, *, is_script: bool = False) -> None:
        self._address = b"\0" + name.encode()
        self._patience_s = patience_s
        self._is_script = is_script
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        # The shared memory that came over this connection.
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

    def poll(self) -> NodeConnection | None:
        """Return the connection to the next node if there is one; the listener is then closed."""
        assert self._listener is not None
        if self._connection is None:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return None
            self._connection.setblocking(False)
            if peer_credentials(self._connection)[1] != os.getuid():
                self._drop()
                return None
        try:
            if not self._has_received_all(self._connection):
                return None
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            self._drop()
            return None
        found = NodeConnection(self._connection, self._memory_fd, self._welcome.manifest)
        self._connection, self._memory_fd = None, -1
        self.close()
        return found

    def _has_received_all(self, connection: socket.socket) -> bool:
        """Read what the node has sent. Returns True when its welcome is complete.

        Raises OSError if nothing has arrived, or the node is gone, ValueError if it sent something else."""
        if self._memory_fd < 0:
            data, fds, _, _ = socket.recv_fds(connection, 1, 1)
            if not data or len(fds) != 1:
                raise ValueError("the node did not send the shared memory")
            self._memory_fd = fds[0]
        while self._is_script and (missing := self._welcome.missing()):
            self._welcome.take(connection.recv(missing))
        return True

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1
        self._welcome = Welcome()

    def close(self) -> None:
        """Stop waiting."""
        self._drop()
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
