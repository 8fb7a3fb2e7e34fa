"""The node process of a training script: started with the script, restarted when it dies, found by the next script. Or
the node that has started the script.

Rules of this file:
1. A state folder has one script and one node at a time.
2. The node outlives its script by ``RETURN_S``. So a script that was killed and is started again (``torchrun
   --max-restarts``, a supervisor, a person) continues as the same peer. A script that ends normally ends its node, too.
3. The node has a session of its own, so that signals to the script's process group do not reach it.
4. A node that dies is restarted at once, later after pauses that double. It is the same peer, since identity and
   checkpoints are in the folder. After ``RESTARTS`` restarts in a row the script continues alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from p2pdiloco.access.invite_code import PREFIX, VARIABLE, clean_invite, decode_invite, is_invite
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.timing import Backoff
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_link import FAREWELL_S, NodeLink
from p2pdiloco.training.node_reconnect import IS_POSSIBLE, NodeConnection, NodeListener, learner_socket_name
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.util import status_pipe
from p2pdiloco.util.files import (
    LockedError,
    lock,
    make_state_folder,
    open_regular,
    read_regular,
    rotate,
    write_atomically,
)
from p2pdiloco.util.logs import printable
from p2pdiloco.util.status_pipe import Exited, Farewell, Invited, PageAt, StatusMessage, StatusReader
from p2pdiloco.wire.learner_ipc import Failed, ForPeople

log = logging.getLogger("p2pdiloco")

# Timeout for a started node to connect to its script.
JOIN_S = 600.0
# Timeout of a node's shutdown, without writing the state. The node's own limits are 20 s, and 60 s at the end of a run.
LEAVE_S = 90.0
# Bytes per parameter that a node writes at the end, and the speed of a slow disk on a machine short of memory.
WRITTEN_BYTES, WRITTEN_BYTES_PER_S = 8, 50e6
# Time for which the node of a dead script waits for the next one.
RETURN_S = 120.0
# Maximum number of restarts in a row before the script continues alone.
RESTARTS = 5
# Shortest and longest pause before a restart. There is no pause after the first death in a row.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
# A node that has run this long counts as stable, and earlier deaths no longer count.
STABLE_S = 600.0
NODE_LOG = "node.log"
# Size of the log from which a new node begins a new file.
LOG_BYTES = 4 << 20
# Exit status of a node that has reached no other peer (``cli/main.py``).
NOBODY_THERE = 3
_LOOK_S = 0.05


def _show(message: StatusMessage) -> None:
    is_notebook = "ipykernel" in sys.modules  # its output is shown to the person who runs it
    shown = str(message) if sys.stderr.isatty() or is_notebook else message.public
    print(printable(shown, keeps="\n"), file=sys.stderr, flush=True)  # noqa: T201


def leaving_s(parameters: int, options: Sequence[str] = ()) -> float:
    """Return the seconds that a node may take to shut down before it is killed.

    ``parameters``: size of the model; ``options``: the node's, of which ``--leave-s`` counts.
    """
    words = [part for option in options for part in option.split("=", 1)]
    given_s = 0.0
    if "--leave-s" in words[:-1]:
        with contextlib.suppress(ValueError):  # the node refuses it
            given_s = float(words[words.index("--leave-s") + 1])
    return LEAVE_S + max(0.0, given_s) + parameters * WRITTEN_BYTES / WRITTEN_BYTES_PER_S


class ScriptNodeError(Exception):
    """The node cannot be started or reached. The message says why, and what to do."""


class NodeRequest(NamedTuple):
    """Settings of a script's node."""

    name: str
    """The run's name."""
    peers: tuple[str, ...]
    """Addresses of the directory, or an invite."""
    foundation: Path | None
    """File from which the run is founded; None: the node joins the run."""
    options: tuple[str, ...]
    """Further arguments of the node's command line."""
    stay_s: float = 0.0
    """Seconds for which the node serves the model after the end of the run."""

    @classmethod
    def of(
        cls,
        run: str,
        peers: str | Sequence[str],
        found: bool | None,
        foundation: Path,
        options: Sequence[str],
        stay_s: float,
    ) -> NodeRequest:
        """Make the settings from the arguments of a script.

        Args:
            peers: addresses or invites; a single one may be a str.
            found: whether to found the run here; None: only if there are no peers.
            foundation: file from which the run would be founded.

        Raises:
            InviteError: an invite is malformed.
        """
        if isinstance(peers, str):
            peers = (peers,) if peers else ()
        peers = tuple(clean_invite(peer) if peer.strip().startswith(PREFIX) else peer for peer in peers)
        is_founder = not peers if found is None else found
        options = (*options, *(("--stay-s", str(stay_s)) if stay_s else ()))
        return cls(run, peers, foundation if is_founder else None, options, stay_s)


class ScriptNode:
    """The node process of the training script whose state is in ``folder``."""

    def __init__(self, folder: Path, request: NodeRequest) -> None:
        """Lock the folder. This does not start a node yet.

        Raises:
            ScriptNodeError: another script uses this folder, or the folder has several runs of that name.
            OSError: the folder cannot be created or written.
        """
        make_state_folder(folder)
        self._folder = folder
        try:
            self._lock = lock(folder / "script.lock", is_inherited=False)
        except LockedError as error:
            raise ScriptNodeError(
                f"the state folder {folder} is in use by another training script (process {error}): "
                "stop it, or give this script a folder of its own (state=...)"
            ) from error
        # Name of the socket on which the script waits for its node (``training/node_reconnect.py``).
        self.socket_name = f"{learner_socket_name(folder)}-script"
        self.log_path = folder / NODE_LOG
        self._request = request
        if request.foundation is not None and not request.foundation.exists() and self._kept_run() is not None:
            log.warning(
                "%s has run %s, which was founded elsewhere: continuing it. To start a new run, choose another run=",
                folder,
                request.name,
            )
            self._request = request._replace(foundation=None)
        self._process: psutil.Process | None = None
        self._is_child = False
        self._is_resumed = False
        # Status messages of the node process, if this script has started it.
        self._reports: StatusReader | None = None
        # Offset in the log at which that process began.
        self._log_began = 0
        self._began = time.monotonic()
        # Deaths of the node in a row, and the pauses before its restarts.
        self._losses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._is_ending = False
        # Time at which a dead node must be restarted; 0: none has died.
        self._again_at = 0.0

    @property
    def is_founder(self) -> bool:
        """True if the node founds the run, or has founded it before."""
        return self._request.foundation is not None

    @property
    def has_run(self) -> bool:
        """True if the folder has a state of a run of this name."""
        return bool(self._runs_here())

    def connect(self) -> NodeConnection:
        """Connect to the node that the script's previous process left, or start one.

        Returns the connection and the run's manifest.

        Raises:
            ScriptNodeError: the node did not start, or there is nobody to join.
        """
        listener = NodeListener(self.socket_name, JOIN_S, is_script=True)
        if not listener.open():
            raise ScriptNodeError(
                f"another process on this machine waits for the node of {self._folder}: end it, or give this script a "
                "folder of its own (state=...)"
                if IS_POSSIBLE
                else "training scripts need Linux (abstract Unix sockets)"
            )
        try:
            is_new = not self._find_running()
            if is_new:
                self._start(self._start_or_join_command())
            while (found := listener.poll()) is None:
                has_found_nobody = bool(self.ending) and self._status == NOBODY_THERE
                is_first = self._is_child and not self._is_resumed
                if has_found_nobody and is_first and (kept := self._kept_run()) is not None:
                    log.warning(
                        "no peer of run %s answers: continuing from the state in %s", self._request.name, self._folder
                    )
                    self._start(self._resume(kept))
                elif ending := self.ending:
                    raise ScriptNodeError(ending)
                if listener.is_over:
                    raise ScriptNodeError(f"the node did not start within {JOIN_S:.0f} s; its log is {self.log_path}")
                time.sleep(_LOOK_S)
        finally:
            listener.close()
        if is_new and self._reports is not None:
            for message in self._reports.poll():
                if isinstance(message, Invited | PageAt):
                    _show(message)
        return found

    def restart_if_ended(self, run: RunId) -> bool:
        """Restart a node that has ended, after a pause. Returns False once it has died too often.

        Call this repeatedly while there is no link to the node."""
        try:
            return self._restart_if_ended(run)
        except OSError as error:  # the state folder was moved or removed, or there is no memory for a process
            log.warning("the node cannot be restarted: %s", error)
            self._is_ending = True
            return False

    def _restart_if_ended(self, run: RunId) -> bool:
        now = time.monotonic()
        if self._is_ending:
            return False
        if not self._again_at:
            if not self.ending:
                return True
            if now - self._began >= STABLE_S:
                self._losses.reset()
            pause_s = self._losses.next_s()
            if self._losses.failures > RESTARTS:
                log.warning("the node died %s times in a row, the last time because %s", RESTARTS + 1, self.ending)
                self._is_ending = True
                return False
            self._again_at = now + (pause_s if self._losses.failures > 1 else 0.0)
        if now >= self._again_at:
            self._again_at = 0.0
            is_joiner = self._request.foundation is None
            peers = () if self._status == NOBODY_THERE else self._request.peers
            is_here = is_joiner and run in self._runs_here()
            self._start(self._resume(run, *peers) if is_here else self._start_or_join_command())
        return True

    def _start_or_join_command(self) -> list[str]:
        request = self._request
        if request.foundation is not None:
            return ["start", str(request.foundation), "--bootstrap", *request.peers]
        if not request.peers and (kept := self._kept_run()) is not None:
            return self._resume(kept)
        if not request.peers:
            raise ScriptNodeError(
                f"found=False, and nobody to join: give initial_peers, an invite to run {request.name} or an address"
            )
        return ["join", "--run", request.name]  # whom to join stands in the environment, which other users cannot see

    def _resume(self, run: str, *peers: str) -> list[str]:
        """Return the command of a node that has a state of the run.

        With ``peers``, one of them must answer. Without, the node looks for peers that it has met before, and continues
        alone if it finds none."""
        self._is_resumed = True
        return ["resume", str(self._folder), "--run", run, *(("--bootstrap", *peers) if peers else ())]

    def _kept_run(self) -> RunId | None:
        """Return the run of this name (and of the invite, if there is one) of which the folder has a state, or None."""
        invites = set()
        for word in filter(is_invite, self._request.peers):
            invites.add(decode_invite(word).run)
        found = [run for run in self._runs_here() if not invites or run in invites]
        if len(found) > 1:
            self.release_folder()
            raise ScriptNodeError(
                f"{self._folder} has several runs called {self._request.name} "
                f"({', '.join(run[:12] for run in found)}): give the invite to one of them "
                "(initial_peers=), or this script a folder of its own (state=)"
            )
        return found[0] if found else None

    def _runs_here(self) -> list[RunId]:
        """Return the runs of this name of which the folder has a state."""
        found = []
        for path in self._folder.glob("*/checkpoint/manifest.msgpack"):
            with contextlib.suppress(OSError, ValueError):
                manifest = msgspec.msgpack.decode(read_regular(path), type=Manifest)
                if manifest.config.name == self._request.name and any(path.parent.glob("state-*.json")):
                    found.append(manifest.run)
        return found

    def _find_running(self) -> bool:
        """Adopt the node that the script's previous process left; return False if there is none."""
        try:
            process = psutil.Process(int(read_regular(self._folder / "node.pid")))
            if self.socket_name in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                self._process = process
        except (OSError, ValueError, psutil.Error):
            return False
        return self._process is not None

    def _start(self, arguments: Sequence[str]) -> None:
        """Start ``p2pdiloco`` with ``arguments`` and the options that make it this script's node."""
        command = [sys.executable, "-P", "-m", "p2pdiloco", *arguments, *self._request.options]
        command += ["--state", str(self._folder), "--learner", self.socket_name, "--reattach-s", str(RETURN_S)]
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES:
            rotate(self.log_path, keep=1, most_bytes=LOG_BYTES)
        with (
            open(self.log_path, "ab", opener=open_regular) as output,
            status_pipe.opened() as (self._reports, status_fd),
        ):
            self._log_began = output.tell()
            self._process = psutil.Popen(
                [*command, status_pipe.OPTION, str(status_fd)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                pass_fds=(status_fd,),
                start_new_session=True,
            )
        self._is_child = True
        self._began = time.monotonic()
        write_atomically(self._folder / "node.pid", str(self._process.pid).encode())

    def _environment(self) -> dict[str, str]:
        """The environment of the node, with the invite or the addresses to join by."""
        return {**os.environ, VARIABLE: " ".join(self._request.peers)}

    @property
    def ending(self) -> str:
        """Sentence about the end of the node, with its reason; empty while it runs."""
        status = self._status
        return "" if status is None else self.describe_exit(status)

    def describe_exit(self, status: int | str) -> str:
        """Return a sentence with the exit status and the reason.

        Control characters are replaced, since it may contain text from other peers."""
        exited = None if self._reports is None else self._reports.find(Exited)
        reason = printable(self._last_log_line() if exited is None else exited.reason, keeps="\n")
        return f"the node ended with status {status}: {reason}"

    def _last_log_line(self) -> str:
        """Return the last line of the node's log, the best reason of a node that reported none.

        Such a node has crashed, or was started by an earlier process of the script."""
        try:
            with open(self.log_path, "rb", opener=open_regular) as file:
                file.seek(self._log_began)
                lines = file.read().decode(errors="replace").split("\n")
        except OSError as error:
            return f"its log cannot be read ({error})"
        return next(filter(None, reversed(lines)), "its log is empty")

    @property
    def _status(self) -> int | str | None:
        """The node's exit status; "unknown" if it was not a child of this process; None while it runs."""
        if self._process is None:
            return "unknown"
        if self._is_child:
            status: int | None = self._process.poll()
            return status
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        return "unknown"

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the node, if it runs."""
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)

    def stop(self, number: signal.Signals) -> None:
        """Send a signal to the node, and do not restart it any more."""
        self._is_ending = True
        self.send(number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the node has ended, release the folder, and show the node's last message. Returns the exit status,
        or None if it is unknown.

        A node that does not end is killed ``timeout_s`` seconds after its time to serve the model."""
        status: int | None = None
        if self._process is not None:
            try:
                status = self._process.wait(timeout_s + self._request.stay_s)
            except psutil.TimeoutExpired:
                self.send(signal.SIGKILL)
                status = self._process.wait()
            self._process = None
        self.release_folder()
        if self._reports is not None and (farewell := self._reports.find(Farewell)) is not None:
            _show(farewell)
        return status

    def release_folder(self) -> None:
        """Unlock the folder for the script's next process, to which a running node then connects."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class ParentNode:
    """The node that has started this process as its learner (``learner.py``), with what both share."""

    def __init__(
        self, manifest: Path, connection: socket.socket, memory_fd: int, listener: NodeListener | None = None
    ) -> None:
        """
        Args:
            manifest: file of the run's manifest, in the peer's folder.
            memory_fd: memory that node and learner share.
            listener: waits for the next node if this one dies; None: the learner then ends.
        """
        self.manifest = manifest
        self.folder = manifest.parent
        self.listener = listener
        self._channel = Channel(connection)
        self._memory_fd = memory_fd
        # Blocks of data that the node has assigned, the first one in training.
        self.blocks: deque[Block] = deque()
        # Reported when the model is built: whether such blocks can be trained, and steps of the restored optimizer.
        self.has_blocks = False
        self.inner_steps = 0
        # The link of this process, once ``DiLoCo`` has begun.
        self.link: NodeLink | None = None

    def attach(self, layout: Layout) -> tuple[SharedVectors, Channel]:
        """Return the shared memory and the link to the node. Call it once.

        Raises:
            ValueError: the memory is not that of this layout.
        """
        return SharedVectors.attach(self._memory_fd, layout.elements, ring_elements(layout)), self._channel

    def tell(self, message: ForPeople) -> None:
        """Send a message that is meant for people."""
        if self.link is None:
            self._channel.post(message)
        else:
            self.link.tell(message)

    def fail(self, reason: str) -> None:
        """Tell the node why this process ends."""
        reason = reason[:2000].encode(errors="replace").decode()  # a path may have bytes that are no text
        if self.link is not None:
            self.link.fail(reason)
        else:
            self._channel.post(Failed(reason=reason))
            self._channel.flush(FAREWELL_S)


class RestartedNode:
    """Waits for a script's node after the link to it was lost, and restarts it for the same run."""

    def __init__(self, node_process: ScriptNode, manifest: bytes) -> None:
        """``manifest``: the run's encoded manifest, as the node has sent it."""
        self._node_process = node_process
        self._manifest = manifest
        self._run = RunId(digest_of(manifest))
        self._listener = NodeListener(node_process.socket_name, JOIN_S, is_script=True)
        self._is_in_vain = False

    @property
    def is_open(self) -> bool:
        """True while the script waits for its node."""
        return self._listener.is_open

    @property
    def is_over(self) -> bool:
        """True once the script has given up waiting."""
        return self._is_in_vain or self._listener.is_over

    def open(self) -> bool:
        """Begin to wait; return False if this system does not support it."""
        if not self._listener.open():
            return False
        log.warning("the node has died; training continues while it restarts (see %s)", self._node_process.log_path)
        return True

    def poll(self) -> NodeConnection | None:
        """Return the restarted node if it has connected, else None."""
        if not self._node_process.restart_if_ended(self._run):
            self._is_in_vain = True
            return None
        found = self._listener.poll()
        if found is None:
            return None
        if found.manifest != self._manifest:
            log.warning("the node was restarted with another run; training continues without it")
            found.dismiss()
            self._node_process.stop(signal.SIGKILL)
            self._is_in_vain = True
            return None
        log.warning("the node is back")
        return found

    def close(self) -> None:
        """Stop waiting."""
        self._listener.close()
