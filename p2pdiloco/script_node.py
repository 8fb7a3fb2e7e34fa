"""The node process of a training script: started beside it, restarted when it dies, found again by the next script.

Rules of this file:
1. One script a state folder at a time; one node, too.
2. The node outlives its script by ``RETURN_S``, so that a script that was killed and is started again (``torchrun
   --max-restarts``, a supervisor, a person) goes on as the same peer. A script that ends in order takes it along.
3. The node is a session of its own: what is sent to the script's process group does not reach it.
4. A node that dies is started again, at once and then after pauses that double; it is the same peer, since identity and
   checkpoints lie in the folder. After ``RESTARTS`` in short order the script trains on alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from p2pdiloco.access.invite_code import PREFIX, VARIABLE, clean_invite, decode_invite, is_invite
from p2pdiloco.protocol.ids import RunId, digest_of
from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.timing import Backoff
from p2pdiloco.training.node_reconnect import Found, Reunion
from p2pdiloco.util import status_pipe
from p2pdiloco.util.files import LockedError, lock, rotate
from p2pdiloco.util.logs import printable
from p2pdiloco.util.status_pipe import Exited, Invited, PageAt, StatusReader

log = logging.getLogger("p2pdiloco")

JOIN_S = 600.0
"""How long a node may take until it meets its script."""
LEAVE_S = 90.0
"""How long leaving may take beside writing the state: the node's deadlines are 20 s, and 60 s at the end of a run."""
WRITTEN_BYTES, WRITTEN_BYTES_PER_S = 8, 50e6
"""What a node writes at the end for each parameter, and how fast on a slow disk of a machine short of memory."""
RETURN_S = 120.0
"""How long the node of a script that died waits for the next one."""
RESTARTS = 5
"""How often in a row a node is restarted before the script trains on alone."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Before a node is started again. After the first death in a row there is no pause."""
STABLE_S = 600.0
"""A node that ran this long is sound: earlier deaths no longer count."""
NODE_LOG = "node.log"
LOG_BYTES = 4 << 20
"""A node that starts with a log larger than this begins another file."""
NOBODY_THERE = 3
"""Exit status of a node that found nobody (``cli/main.py``)."""
_LOOK_S = 0.05


def leaving_s(parameters: int) -> float:
    """Seconds that a leaving node of a model of ``parameters`` has, before it is killed."""
    return LEAVE_S + parameters * WRITTEN_BYTES / WRITTEN_BYTES_PER_S


class ScriptNodeError(Exception):
    """There is no node; the message says why and what to do."""


class Wish(NamedTuple):
    """The part that a script's node is to take in a run."""

    name: str
    """The run's name."""
    peers: tuple[str, ...]
    """Addresses of the directory, or an invite."""
    foundation: Path | None
    """The file that the run is founded from; None: the node joins it."""
    options: tuple[str, ...]
    """Further words of the node's command line."""
    stay_s: float = 0.0
    """How long the node serves the model after the run's end."""

    @classmethod
    def of(
        cls,
        run: str,
        peers: str | Sequence[str],
        found: bool | None,
        foundation: Path,
        options: Sequence[str],
        stay_s: float,
    ) -> Wish:
        """``peers``: one may be a str. ``found``: whether the run is founded here; None: if there are no peers.
        ``foundation``: the file for that.

        Raises:
            InviteError: one of the peers is meant as an invite and is none.
        """
        if isinstance(peers, str):
            peers = (peers,) if peers else ()
        peers = tuple(clean_invite(peer) if peer.strip().startswith(PREFIX) else peer for peer in peers)
        is_founder = not peers if found is None else found
        options = (*options, *(("--stay-s", str(stay_s)) if stay_s else ()))
        return cls(run, peers, foundation if is_founder else None, options, stay_s)


class ScriptNode:
    """The node process of the training script whose state is in ``folder``."""

    def __init__(self, folder: Path, wish: Wish) -> None:
        """Lock the folder; no node is started yet.

        Raises:
            ScriptNodeError: another script has this folder now, or it has several runs of that name.
            OSError: it cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        try:
            self._lock = lock(folder / "script.lock", is_inherited=False)
        except LockedError as error:
            raise ScriptNodeError(
                f"the state folder {folder} is in use by another training script (process {error}): "
                "stop it, or give this script a folder of its own (state=...)"
            ) from error
        self.meeting_place = f"p2pdiloco-script-{os.getuid()}-{digest_of(str(folder.resolve()).encode())}"
        """Name of the socket over which node and script find each other (``training/node_reconnect.py``)."""
        self.log_path = folder / NODE_LOG
        self._wish = wish
        if wish.foundation is not None and not wish.foundation.exists() and self._kept_run() is not None:
            log.warning(
                "%s has run %s, which was founded elsewhere: it goes on. To begin anew, choose another run=",
                folder,
                wish.name,
            )
            self._wish = wish._replace(foundation=None)
        self._process: psutil.Process | None = None
        self._is_child = False
        self._is_resumed = False
        self._reports: StatusReader | None = None
        """Messages of the node process, if this script has started it."""
        self._log_began = 0
        """Offset in the log at which that process began."""
        self._began = time.monotonic()
        self._losses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        """Lives that the node lost in a row."""
        self._is_ending = False
        self._again_at = 0.0
        """When the node that died is to be started again; 0: none has died."""

    @property
    def is_founder(self) -> bool:
        """Whether the node founds the run, or founded it before."""
        return self._wish.foundation is not None

    def connect(self) -> Found:
        """Connect to the node that the script's last process left, or start one; it names its run.

        Raises:
            ScriptNodeError: the node did not come up, or nobody is there to join.
        """
        reunion = Reunion(self.meeting_place, JOIN_S, is_script=True)
        if not reunion.open():
            raise ScriptNodeError("training scripts need Linux (abstract Unix sockets)")
        try:
            is_new = not self._find_running()
            if is_new:
                self._start(self._start_or_join_command())
            while (found := reunion.poll()) is None:
                if self._has_found_nobody() and (kept := self._kept_run()) is not None:
                    log.warning(
                        "nobody of run %s answers: it goes on here, from the state in %s", self._wish.name, self._folder
                    )
                    self._start(self._resume(kept))
                elif ending := self.ending:
                    raise ScriptNodeError(ending)
                if reunion.is_over:
                    raise ScriptNodeError(f"the node did not come up within {JOIN_S:.0f} s; its log is {self.log_path}")
                time.sleep(_LOOK_S)
        finally:
            reunion.close()
        if is_new and self._reports is not None:
            for message in self._reports.poll():
                if isinstance(message, Invited | PageAt):
                    print(printable(str(message)), file=sys.stderr, flush=True)  # noqa: T201 - for the script's user
        return found

    def restart_if_ended(self, run: RunId) -> bool:
        """Restart a node that has ended, after a pause; False once it has died too often. Call it again and again while
        there is no link to the node."""
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
                log.warning("the node died %s times in a row, the last time so: %s", RESTARTS + 1, self.ending)
                self._is_ending = True
                return False
            self._again_at = now + (pause_s if self._losses.failures > 1 else 0.0)
        if now >= self._again_at:
            self._again_at = 0.0
            is_joiner = self._wish.foundation is None
            peers = () if self._status == NOBODY_THERE else self._wish.peers
            is_here = is_joiner and run in self._runs_here()
            self._start(self._resume(run, *peers) if is_here else self._start_or_join_command())
        return True

    def _start_or_join_command(self) -> list[str]:
        wish = self._wish
        if wish.foundation is not None:
            return ["start", str(wish.foundation), "--bootstrap", *wish.peers]
        if not wish.peers and (kept := self._kept_run()) is not None:
            return self._resume(kept)
        if not wish.peers:
            raise ScriptNodeError(
                f"found=False, and nobody to join: give initial_peers, an invite to run {wish.name} or an address"
            )
        return ["join", "--run", wish.name]  # whom to join stands in the environment, which other users cannot see

    def _resume(self, run: str, *peers: str) -> list[str]:
        """The command of a node that has a state of the run, though all others may be gone. With ``peers``, one of them
        has to answer; without, the node looks for peers that it has met before, and goes on if it finds none."""
        self._is_resumed = True
        return ["resume", str(self._folder), "--run", run, *(("--bootstrap", *peers) if peers else ())]

    def _kept_run(self) -> RunId | None:
        """The run of this name of which the folder has a state; with an invite, the run that it is to.

        Raises:
            ScriptNodeError: there are several.
        """
        invites = set()
        for word in filter(is_invite, self._wish.peers):
            invites.add(decode_invite(word).run)
        found = [run for run in self._runs_here() if not invites or run in invites]
        if len(found) > 1:
            self.release_folder()
            raise ScriptNodeError(
                f"{self._folder} has several runs called {self._wish.name} ({', '.join(run[:12] for run in found)}): "
                "give the invite to one of them (initial_peers=), or this script a folder of its own (state=)"
            )
        return found[0] if found else None

    def _runs_here(self) -> list[RunId]:
        """The runs of this name of which the folder has a state."""
        found = []
        for path in self._folder.glob("*/checkpoint/manifest.msgpack"):
            with contextlib.suppress(OSError, ValueError):
                manifest = msgspec.msgpack.decode(path.read_bytes(), type=Manifest)
                if manifest.config.name == self._wish.name and any(path.parent.glob("state-*.json")):
                    found.append(manifest.run)
        return found

    def _has_found_nobody(self) -> bool:
        """Whether the node has ended because nobody else of the run answers, and was not yet resumed without them."""
        return self._is_child and not self._is_resumed and bool(self.ending) and self._status == NOBODY_THERE

    def _find_running(self) -> bool:
        """Take over the node that the script's last process left; False if there is none."""
        try:
            process = psutil.Process(int((self._folder / "node.pid").read_text()))
            if self.meeting_place in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                self._process = process
        except (OSError, ValueError, psutil.Error):
            return False
        return self._process is not None

    def _start(self, arguments: Sequence[str]) -> None:
        """Start ``p2pdiloco`` with ``arguments``, and with the options that make it this script's node.

        Raises:
            OSError: it cannot be started.
        """
        command = [sys.executable, "-P", "-m", "p2pdiloco", *arguments, *self._wish.options]
        command += ["--state", str(self._folder), "--learner", self.meeting_place, "--reattach-s", str(RETURN_S)]
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_BYTES:
            rotate(self.log_path, keep=1, most_bytes=LOG_BYTES)
        with open(self.log_path, "ab") as output, status_pipe.opened() as (self._reports, status_fd):
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
        (self._folder / "node.pid").write_text(str(self._process.pid))

    def _environment(self) -> dict[str, str]:
        """The environment of the node, with the invite or the addresses to join by."""
        return {**os.environ, VARIABLE: " ".join(self._wish.peers)}

    @property
    def ending(self) -> str:
        """How the node ended, in a sentence with the reason; empty while it runs."""
        status = self._status
        return "" if status is None else self.describe_exit(status)

    def describe_exit(self, status: int | str) -> str:
        """A sentence with the exit status and the reason. Other peers' words may be in it: control characters are
        replaced."""
        exited = None if self._reports is None else self._reports.find(Exited)
        reason = printable(self._last_log_line() if exited is None else exited.reason, keeps="\n")
        return f"the node ended with status {status}: {reason}"

    def _last_log_line(self) -> str:
        """The reason of a node that reports none: it crashed, or an earlier process of the script had started it."""
        with open(self.log_path, "rb") as file:
            file.seek(self._log_began)
            lines = file.read().decode(errors="replace").split("\n")
        return next(filter(None, reversed(lines)), "it said nothing")

    @property
    def _status(self) -> int | str | None:
        """The node's exit status, "unknown" if it was no child of this process; None while it runs."""
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
        """Send a signal to the node, and start no other one."""
        self._is_ending = True
        self.send(number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the node has ended, and release the folder; returns the exit status, if it is known. A node that
        does not end is killed ``timeout_s`` after the time that it is to stay."""
        status: int | None = None
        if self._process is not None:
            try:
                status = self._process.wait(timeout_s + self._wish.stay_s)
            except psutil.TimeoutExpired:
                self.send(signal.SIGKILL)
                status = self._process.wait()
            self._process = None
        self.release_folder()
        return status

    def release_folder(self) -> None:
        """Unlock the folder for the script's next process; a node that runs waits for that."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Return:
    """Waits for the node of a script whose link is lost, and restarts it, for the same run."""

    def __init__(self, companion: ScriptNode, manifest: bytes) -> None:
        """``manifest``: the run's, encoded, as the node has sent it."""
        self._companion = companion
        self._manifest = manifest
        self._run = RunId(digest_of(manifest))
        self._reunion = Reunion(companion.meeting_place, JOIN_S, is_script=True)
        self._is_in_vain = False

    @property
    def is_open(self) -> bool:
        """Whether the script waits for its node now."""
        return self._reunion.is_open

    @property
    def is_over(self) -> bool:
        """Whether the script has given up waiting."""
        return self._is_in_vain or self._reunion.is_over

    def open(self) -> bool:
        """Begin to wait; False if this system cannot."""
        if not self._reunion.open():
            return False
        log.warning("the node is gone; training goes on while it is started again (see %s)", self._companion.log_path)
        return True

    def poll(self) -> Found | None:
        """The restarted node, if it has connected."""
        if not self._companion.restart_if_ended(self._run):
            self._is_in_vain = True
            return None
        found = self._reunion.poll()
        if found is None:
            return None
        if found.manifest != self._manifest:
            log.warning("the node came back with another run")
            found.dismiss()
            self._companion.stop(signal.SIGKILL)
            self._is_in_vain = True
            return None
        log.warning("the node is back")
        return found

    def close(self) -> None:
        """Stop waiting."""
        self._reunion.close()
