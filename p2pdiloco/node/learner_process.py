"""The learner as a child process: starts it, exchanges messages over a Unix socket, and reaps it.

Rules of this file:
1. The learner is a separate process (``learner.py``), so that its crash does not end the node.
2. Messages are queued in order and written as the socket accepts them; the node never waits for its learner.
3. However the node leaves the context manager, the child is reaped. If the node is killed, the learner survives, and
   the next node process adopts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from p2pdiloco.training import PASSIVE, PROGRAM
from p2pdiloco.training.node_reconnect import find_learner, peer_credentials
from p2pdiloco.util import logs, status_pipe
from p2pdiloco.util.files import open_regular, rotate
from p2pdiloco.util.process import ProcessHandle, let_be_killed_first, memory_kills
from p2pdiloco.wire import learner_ipc

# -- Pre-forked learner ------------------------------------------------------------------------------------------------
# A fork of the node that becomes its first learner. It is made right after the node has loaded torch, so that torch is
# loaded only once for both: this saves a second of CPU time, and they share the memory.
#
# Rules of this section:
# 1. The fork is made before there are threads, an event loop, sockets or a key: both processes share only code.
# 2. The fork waits in a session of its own for the arguments of a learner. It ends when the node ends, or closes its
#    socket because it needs no learner.
# 3. Later learners are started as new processes, since a fork of a running node would inherit the locks of threads that
#    it does not have. The first one is, too, if the system has no process descriptors.


IS_POSSIBLE = sys.platform == "linux"
# Maximum size of the encoded arguments.
LONGEST = 1 << 16
# Options of the learner for the first two descriptors that it receives; the third one is its output.
FDS = ("--socket-fd", "--memory-fd")


class PreforkedLearner:
    """The node's handle of a forked process that waits to become a learner."""

    def __init__(self, pid: int, ours: socket.socket) -> None:
        self._pid = pid
        self.ours = ours

    def become(self, arguments: Sequence[str], link_fd: int, memory_fd: int, output_fd: int) -> ProcessHandle:
        """Make the process a learner with these arguments and descriptors.

        Raises:
            OSError: the process has ended.
        """
        with self.ours as ours:
            process = ProcessHandle(self._pid, is_own=True)
            socket.send_fds(ours, [json.dumps(list(arguments)).encode()], [link_fd, memory_fd, output_fd])
        return process


# The forked process of this node, until ``take``.
_waiting: PreforkedLearner | None = None


def bear() -> None:
    """Fork the process. Call this before there are threads, an event loop, sockets or a key.

    If that fails, the learner is started like every later one: again and again until it succeeds.
    """
    global _waiting
    if not IS_POSSIBLE:
        return
    from p2pdiloco import learner  # before the fork, so that both processes share it

    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: only OpenBLAS has some, and handles forks
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
    if pid:
        theirs.close()
        _waiting = PreforkedLearner(pid, ours)
        return
    ours.close()
    status_pipe.writer.close()
    status = 1
    try:
        os.setsid()  # Ctrl+C must reach only the node
        arguments = _receive_arguments(theirs)
        status = 0 if arguments is None else learner.main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (the fork must not return and run as a second node)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def take() -> PreforkedLearner | None:
    """Return the forked process to the first caller, and None afterwards."""
    global _waiting
    found, _waiting = _waiting, None
    return found


def _receive_arguments(theirs: socket.socket) -> list[str] | None:
    """Wait in the forked process for the learner's arguments, and redirect its output. None: it is not needed."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with theirs:
        encoded, fds, _, _ = socket.recv_fds(theirs, LONGEST, len(FDS) + 1)
    if len(fds) != len(FDS) + 1:
        return None
    *given, output = fds
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, standard)
    os.close(nothing)
    os.close(output)
    arguments: list[str] = json.loads(encoded)
    return [word for name, fd in zip(FDS, given, strict=True) for word in (name, str(fd))] + arguments


# -- Learner process ---------------------------------------------------------------------------------------------------


log = logs.get("learner")

# -P: nothing is imported from the working directory.
COMMAND = (sys.executable, "-P", "-m", PROGRAM)
READ_BYTES = 1 << 16
# Maximum number of queued commands. Only the swarm's steps are sent without waiting for an answer.
COMMANDS = 4096
LOOK_S = 0.2
# Size of the learners' log from which the next learner begins a new file.
LOG_BYTES = 4 << 20
# Time for a learner to exit when asked; then it is killed.
EXIT_S = 5.0


class LearnerProcess:
    """One learner process. Use as ``async with``."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        memory_fd: int,
        heard: Callable[[learner_ipc.FromLearner], None],
        ended: Callable[[str, int], None],
        log_path: Path,
        socket_name: str,
        manifest: bytes | None = None,
        patience_s: float,
    ) -> None:
        """
        Args:
            memory_fd: memory that node and learner share.
            heard: called with each message of the learner.
            ended: called once with the reason and the exit status when the learner is gone.
            socket_name: name of the socket on which a learner of this peer waits to be adopted.
            manifest: the run's encoded manifest if the learner is a training script. It is sent to the script, and no
                process is started in place of the script.
            patience_s: time to wait for a training script.
        """
        self._arguments = arguments
        self._memory_fd = memory_fd
        self._heard = heard
        self._ended = ended
        self._log_path = log_path
        self._socket: socket.socket | None = None
        self._socket_name = socket_name
        self._manifest = manifest
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | ProcessHandle | None = None
        # True if the previous node process started this learner.
        self.is_adopted = False
        self._memory_kills = memory_kills()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue(COMMANDS)
        self._tasks: list[asyncio.Task[None]] = []
        self._reason = ""

    async def __aenter__(self) -> Self:
        """Adopt the learner that the previous node process left behind, or start one.

        Raises:
            OSError: it cannot be started, or there is no training script (TimeoutError).
        """
        ours = self._find()
        if self._manifest is not None:
            deadline = asyncio.get_running_loop().time() + self._patience_s
            while ours is None:
                if asyncio.get_running_loop().time() > deadline:
                    raise TimeoutError(f"no training script was found within {self._patience_s:.0f} s")
                await asyncio.sleep(LOOK_S)
                ours = self._find()
        first = take()
        if ours is None:
            ours = await self._start(first)
            let_be_killed_first(self.pid)  # the node starts another learner, but nobody starts another node
        elif first is not None:
            first.ours.close()  # so that a process that is not needed ends
        ours.setblocking(False)
        if self._manifest is not None:
            self._outgoing.put_nowait(learner_ipc.welcome(self._manifest))
        self._socket = ours
        self._tasks = [
            asyncio.create_task(self._read(), name="learner: read"),
            asyncio.create_task(self._write(), name="learner: write"),
        ]
        return self

    def _find(self) -> socket.socket | None:
        """Return the socket to a live learner that waits for this node, or None."""
        ours = find_learner(self._socket_name, self._memory_fd)
        if ours is not None:
            try:
                self._process = ProcessHandle(peer_credentials(ours)[0])
            except ProcessLookupError:
                ours.close()
                return None
            self.is_adopted = True
        return ours

    async def _start(self, first: PreforkedLearner | None) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            if self._log_path.exists() and self._log_path.stat().st_size > LOG_BYTES:
                rotate(self._log_path, keep=1, most_bytes=LOG_BYTES)
            with open(self._log_path, "ab", opener=open_regular) as output:  # noqa: ASYNC230 (a small local file, once per learner)
                if first is not None:
                    with contextlib.suppress(OSError):  # the forked process was killed: start another one below
                        link_fd, output_fd = theirs.fileno(), output.fileno()
                        self._process = first.become(self._arguments, link_fd, self._memory_fd, output_fd)
                        return ours
                self._process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    "--socket-fd",
                    str(theirs.fileno()),
                    "--memory-fd",
                    str(self._memory_fd),
                    *self._arguments,
                    env=PASSIVE | os.environ,
                    pass_fds=(theirs.fileno(), self._memory_fd),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl+C must reach only the node, which then shuts down gracefully
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if first is not None:
                first.ours.close()  # it has become the learner, or is not needed
        return ours

    async def __aexit__(self, *_: object) -> None:
        """Ask the learner to exit, kill it after EXIT_S, and reap it. A training script is only told, not ended."""
        self.send(learner_ipc.Exit())
        process = self._process
        assert process is not None
        try:
            if self._manifest is not None:
                flushed = asyncio.create_task(self._outgoing.join(), name="learner: goodbye")
                await asyncio.wait([flushed, *self._tasks], timeout=EXIT_S, return_when=asyncio.FIRST_COMPLETED)
                flushed.cancel()
                return
            async with asyncio.timeout(EXIT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._socket is not None:
                self._socket.close()

    @property
    def pid(self) -> int:
        """Process ID of the learner."""
        assert self._process is not None
        return self._process.pid

    def send(self, message: learner_ipc.FromNode) -> None:
        """Queue a command for the learner.

        A full queue means that the learner is stuck. It is then killed, and its end is reported like any other. A
        training script must not be killed by us, so only the link to it is closed."""
        try:
            self._outgoing.put_nowait(learner_ipc.encode(message))
        except asyncio.QueueFull:
            self._reason = f"it did not read its commands, of which {COMMANDS} are waiting"
            self._cut_off()

    def end(self, reason: str) -> None:
        """End a learner that hangs: SIGTERM, and after EXIT_S SIGKILL. Its end is reported with ``reason``."""
        self._reason = f"{reason} and was ended; {self._log_path} may say where it was"
        self._cut_off(signal.SIGTERM)  # it writes to its log where it was
        asyncio.get_running_loop().call_later(EXIT_S, self._cut_off)

    def _cut_off(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill the learner, or close the link to a training script."""
        assert self._process is not None
        if self._manifest is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        with contextlib.suppress(OSError):
            while True:
                await loop.sock_sendall(self._socket, await self._outgoing.get())
                self._outgoing.task_done()

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        assert self._process is not None
        decoder: learner_ipc.Decoder[learner_ipc.FromLearner] = learner_ipc.Decoder(learner_ipc.FromLearner)
        try:
            while data := await loop.sock_recv(self._socket, READ_BYTES):
                for message in decoder.feed(data):
                    if isinstance(message, learner_ipc.Failed):
                        self._reason = message.reason
                    else:
                        self._heard(message)
        except OSError as error:
            self._reason = self._reason or str(error)
        except Exception as error:  # noqa: BLE001 (the top of a task: ``ended`` must be called in any case)
            if not isinstance(error, ValueError):
                log.failure("a message of the learner could not be handled", error)
            self._reason = self._reason or f"its message could not be handled ({error!r})"
            self._cut_off()
        status = 1
        try:
            status = 0 if self._manifest is not None else await self._process.wait()
        except OSError as error:
            self._reason = self._reason or f"its end could not be awaited ({error})"
        reason = self._reason
        if not reason and status == -signal.SIGKILL and memory_kills() > self._memory_kills:
            reason = "the kernel killed it because memory ran out: give this peer more memory, or let it --follow"
        self._ended(reason or f"it ended with status {status}, see {self._log_path}", status)
