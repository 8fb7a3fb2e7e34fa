"""The learner as a child process: started, spoken to over a Unix socket, and never left behind.

Rules of this file:
1. The learner program is its own process (``training/learner_main.py``): its crash does not take the node along.
2. Messages are queued in order and written as the socket takes them; the node never waits for its learner.
3. Whatever way the node leaves this block, the child is reaped. A node that is killed does not leave it: its next life
   takes the learner over.
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
from types import TracebackType
from typing import Self

from p2pdiloco.training import PASSIVE, PROGRAM
from p2pdiloco.training.node_reconnect import find_learner, peer_credentials
from p2pdiloco.util import logs, status_pipe
from p2pdiloco.util.files import rotate
from p2pdiloco.util.process import ProcessHandle
from p2pdiloco.wire import learner_ipc

# -- Pre-forked learner ------------------------------------------------------------------------------------------------
# The process that becomes a node's first learner: a fork of the node, made when it had loaded torch and begun nothing,
# so that torch is loaded once for both (a second of processor time, and memory that they share).
#
# Rules of this file:
# 1. It is made before there are threads, an event loop, sockets, or a key: what it shares with its node is code.
# 2. Until it is told to be a learner it waits for that, in a session of its own. A node that ends, or has no use for
#    it, closes its socket, and it ends.
# 3. Later lives are processes of their own from the start (``learner_process.py``): a fork of a node that runs would
#    have threads' locks without the threads. So is the first where the system has no descriptors of processes.


IS_POSSIBLE = sys.platform == "linux"
LONGEST = 1 << 16
"""Bytes of the arguments."""
FDS = ("--socket-fd", "--memory-fd")
"""Of the learner; the third is where it writes."""


class PreforkedLearner:
    """As its node sees it."""

    def __init__(self, pid: int, ours: socket.socket) -> None:
        self._pid = pid
        self._ours = ours

    def become(self, arguments: Sequence[str], link_fd: int, memory_fd: int, output_fd: int) -> ProcessHandle:
        """Be the learner of these arguments.

        Raises:
            OSError: it has ended.
        """
        with self._ours as ours:
            process = ProcessHandle(self._pid, is_own=True)
            socket.send_fds(ours, [json.dumps(list(arguments)).encode()], [link_fd, memory_fd, output_fd])
        return process

    def dismiss(self) -> None:
        """There is a learner already."""
        self._ours.close()


_waiting: PreforkedLearner | None = None
"""This process's."""


def bear() -> None:
    """Make it; see the module's rules for when."""
    global _waiting
    if not IS_POSSIBLE:
        return
    from p2pdiloco.training import learner_main  # now, in the node, that it is there

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: those of OpenBLAS, which knows of forks
        pid = os.fork()
    if pid:
        theirs.close()
        _waiting = PreforkedLearner(pid, ours)
        return
    ours.close()
    status_pipe.writer.close()
    status = 1
    try:
        os.setsid()  # Ctrl+C is for the node
        arguments = _receive_arguments(theirs)
        status = 0 if arguments is None else learner_main.main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 (it must not become a second node)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def take() -> PreforkedLearner | None:
    """It, once."""
    global _waiting
    found, _waiting = _waiting, None
    return found


def _receive_arguments(theirs: socket.socket) -> list[str] | None:
    """In the new process: the learner's arguments, once there are any, with its output where it belongs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with theirs:
        told, fds, _, _ = socket.recv_fds(theirs, LONGEST, len(FDS) + 1)
    if len(fds) != len(FDS) + 1:
        return None
    *given, output = fds
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(fd, standard)
    os.close(nothing)
    os.close(output)
    arguments: list[str] = json.loads(told)
    return [word for name, fd in zip(FDS, given, strict=True) for word in (name, str(fd))] + arguments


# -- Learner process ---------------------------------------------------------------------------------------------------
# The learner as a child process: started, spoken to over a Unix socket, and never left behind.


log = logs.get("learner")

COMMAND = (sys.executable, "-P", "-m", PROGRAM)
"""What the working directory holds is not imported (-P)."""
READ_BYTES = 1 << 16
COMMANDS = 4096
"""Commands that may wait beyond what the socket holds. Only the swarm's steps come without waiting for an answer."""
LOOK_S = 0.2
LOG_BYTES = 4 << 20
"""Of what learners wrote; the next life then begins another file."""
EXIT_S = 5.0
"""How long a learner may take to exit when asked; then it is killed."""


class LearnerProcess:
    """One life of the learner. ``heard`` gets its messages, ``ended`` one sentence when it is gone."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        memory_fd: int,
        heard: Callable[[learner_ipc.FromLearner], None],
        ended: Callable[[str, int], None],
        log_path: Path,
        reunion: str,
        manifest: bytes | None = None,
        patience_s: float,
    ) -> None:
        """``reunion``: where a learner of this peer waits. With a ``manifest`` that is a training script, which is told
        the run, in whose place no other is started, and for which the node waits ``patience_s``."""
        self._arguments = arguments
        self._memory_fd = memory_fd
        self._heard = heard
        self._ended = ended
        self._log_path = log_path
        self._socket: socket.socket | None = None
        self._reunion = reunion
        self._manifest = manifest
        self._patience_s = patience_s
        self._process: asyncio.subprocess.Process | ProcessHandle | None = None
        self._is_adopted = False
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue(COMMANDS)
        self._tasks: list[asyncio.Task[None]] = []
        self._reason = ""

    async def __aenter__(self) -> Self:
        """Take over the learner that the node's last life left behind, or start the process.

        Raises:
            OSError: it cannot be started, or the training script is not there.
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
        elif first is not None:
            first.dismiss()
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
        """The link to a learner that waits for this node, if there is one and it lives."""
        ours = find_learner(self._reunion, self._memory_fd)
        if ours is not None:
            try:
                self._process = ProcessHandle(peer_credentials(ours)[0])
            except ProcessLookupError:
                ours.close()
                return None
            self._is_adopted = True
        return ours

    async def _start(self, first: PreforkedLearner | None) -> socket.socket:
        ours, theirs = socket.socketpair()
        try:
            if self._log_path.exists() and self._log_path.stat().st_size > LOG_BYTES:
                rotate(self._log_path, keep=1, most_bytes=LOG_BYTES)
            with open(self._log_path, "ab") as output:  # noqa: ASYNC230 (a small local file, once a life)
                if first is not None:
                    with contextlib.suppress(OSError):  # somebody has killed it
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
                    start_new_session=True,  # Ctrl+C is for the node, which then leaves in order
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if first is not None:
                first.dismiss()  # it is the learner now, or not needed
        return ours

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to exit, wait a little, kill it, reap it."""
        self.send(learner_ipc.Exit())
        process = self._process
        assert process is not None
        if self._manifest is not None:
            await self._say_goodbye()
            return
        try:
            async with asyncio.timeout(EXIT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._socket is not None:
                self._socket.close()

    async def _say_goodbye(self) -> None:
        """A training script goes on with its own life: it is told, and left alone."""
        told = asyncio.create_task(self._outgoing.join(), name="learner: goodbye")
        await asyncio.wait([told, *self._tasks], timeout=EXIT_S, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()

    @property
    def is_adopted(self) -> bool:
        """Whether the node's last life started it."""
        return self._is_adopted

    @property
    def pid(self) -> int:
        """Process ID of the learner."""
        assert self._process is not None
        return self._process.pid

    def send(self, message: learner_ipc.FromNode) -> None:
        """Queue a command. A learner that takes none for so long that the queue is full is stuck: it is killed, and its
        end is told like any other. A training script is not ours to kill: the link to it ends."""
        try:
            self._outgoing.put_nowait(learner_ipc.encode(message))
        except asyncio.QueueFull:
            if self._manifest is not None:
                self._reason = f"the training script took no command while {COMMANDS} were waiting"
            else:
                self._reason = f"it took no command while {COMMANDS} were waiting, and was killed"
            self._cut_off()

    def _cut_off(self) -> None:
        """End the learner, or the link to a training script."""
        assert self._process is not None
        if self._manifest is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
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
        except Exception as error:  # noqa: BLE001 (the top of a task: without it nobody would hear of the learner's end)
            if not isinstance(error, ValueError):
                log.failure("what the learner said could not be handled", error)
            self._reason = self._reason or f"what it said could not be handled ({error!r})"
            self._cut_off()
        status = 0 if self._manifest is not None else await self._process.wait()
        self._ended(self._reason or f"it ended with status {status}, see {self._log_path}", status)
