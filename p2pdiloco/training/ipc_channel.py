"""The learner's end of the socket to its node. Training never waits for it.

Rules of this file:
1. ``exchange`` sends what the socket accepts, reads what is there, and returns. It is the only call at a training
   step's boundary. Whether it really never waited is measured: if the kernel's count of the thread's voluntary context
   switches grew, the time in which the thread neither computed nor queued for a processor is time that it slept. Sleeps
   of at least SLEEP_S are added to ``blocked_s``; shorter ones are locks inside the kernel.
2. ``wait`` sleeps until there is something to do. It is for a learner that makes no steps.
3. The send queue is bounded: beyond 64 KiB no ``Progress`` is accepted; beyond 1 MiB no command is read, so that no
   further answers arise.
4. The end of the stream means that the node is dead: ``is_closed``.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import time
import weakref
from typing import NamedTuple

from p2pdiloco.wire import learner_ipc

_PROGRESS_LIMIT = 64 << 10
_READ_LIMIT = 1 << 20
_READ_BYTES = 64 << 10
# Maximum number of reads in one exchange. The rest waits for the next.
_READS = 64

SLEEP_S = 0.001
# Linux: nanoseconds on a processor, nanoseconds runnable but waiting for one, time slices.
_SCHEDSTAT = "/proc/thread-self/schedstat"
_THREAD = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)


class _Clock(NamedTuple):
    """A thread's clocks at one moment, in seconds."""

    switches: int
    """Number of voluntary context switches so far."""
    busy_s: float
    """Time spent computing or waiting for a processor."""
    wall_s: float


def _open_schedstat() -> int | None:
    try:
        return os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # not Linux: time in the run queue counts as sleep


class Channel:
    """Receives commands and sends answers over a connected stream socket, which it makes non-blocking."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = learner_ipc.Decoder[learner_ipc.FromNode](learner_ipc.FromNode)
        self._outgoing = bytearray()
        self.is_closed = False
        self._schedstat = _open_schedstat()
        if self._schedstat is not None:
            weakref.finalize(self, os.close, self._schedstat)
        # Wall time that ``exchange`` slept, since the owner last set this to 0.
        self.blocked_s = 0.0

    def post(self, message: learner_ipc.FromLearner) -> bool:
        """Queue ``message`` for the next exchange. Returns False for a ``Progress`` if there is no room."""
        if isinstance(message, learner_ipc.Progress) and len(self._outgoing) > _PROGRESS_LIMIT:
            return False
        self._outgoing += learner_ipc.encode(message)
        return True

    def exchange(self) -> list[learner_ipc.FromNode]:
        """Send and read what is possible now, without waiting. Returns the commands that arrived, in order.

        Raises:
            ValueError: the node violated the protocol.
        """
        before = self._clock()
        self._send()
        commands = self._receive()
        after = self._clock()
        if after.switches != before.switches:
            slept_s = (after.wall_s - before.wall_s) - (after.busy_s - before.busy_s)
            self.blocked_s += slept_s if slept_s >= SLEEP_S else 0.0
        return commands

    def _clock(self) -> _Clock:
        queued_s = 0.0
        if self._schedstat is not None:
            queued_s = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        switches = resource.getrusage(_THREAD).ru_nvcsw
        return _Clock(switches, time.thread_time() + queued_s, time.perf_counter())

    def wait(self, most_s: float) -> None:
        """Sleep until the socket can be read, or written if something is queued, at most ``most_s``. Do not call it
        while steps are made."""
        reading = select.POLLIN if len(self._outgoing) <= _READ_LIMIT else 0
        self._poll(reading | (select.POLLOUT if self._outgoing else 0), most_s)

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued, for at most ``timeout_s``. Returns True if everything was sent. For a learner that
        ends."""
        deadline = time.monotonic() + timeout_s
        while self._outgoing and not self.is_closed and (left := deadline - time.monotonic()) > 0:
            self._poll(select.POLLOUT, left)
            self._send()
        return not self._outgoing

    def _poll(self, wanted: int, most_s: float) -> None:
        """Wait until the socket is ready for ``wanted``, or its other end is closed.

        Not ``select.select``: it accepts no descriptor from 1,024 on, and a node with many connections hands on such
        ones.
        """
        poll = select.poll()
        poll.register(self._socket, wanted)
        poll.poll(1000 * most_s)

    def _send(self) -> None:
        try:
            while self._outgoing:
                sent = self._socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.is_closed = True

    def _receive(self) -> list[learner_ipc.FromNode]:
        commands: list[learner_ipc.FromNode] = []
        for _ in range(_READS):
            if self.is_closed or len(self._outgoing) > _READ_LIMIT:
                break
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_closed = not data
            commands += self._decoder.feed(data)
        return commands
