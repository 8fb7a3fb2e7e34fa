"""The node of a training script: a process beside it, found again by the script's next life.

Rules of this file:
1. One script a state folder at a time; one node, too.
2. The node outlives its script by ``RETURN_S``, so that a script that was killed and is started again (``torchrun
   --max-restarts``, a supervisor, a person) goes on as the same peer. A script that ends in order takes it along.
3. The node is a session of its own: what is sent to the script's process group does not reach it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from p2pdiloco.protocol.identifiers import digest_of
from p2pdiloco.runtime.files import LockedError, lock

RETURN_S = 120.0
"""How long the node of a script that died waits for the next one."""
NODE_LOG = "node.log"


class FolderInUseError(Exception):
    """Another script has the state folder; the message says which and what to do."""


class Companion:
    """The node that belongs to the training script of ``folder``."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            FolderInUseError: another script has this folder now.
            OSError: it cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        try:
            self._lock = lock(folder / "script.lock", is_inherited=False)
        except LockedError as error:
            raise FolderInUseError(
                f"the state folder {folder} is in use by another training script (process {error}): "
                "stop it, or give this script a folder of its own (state=...)"
            ) from error
        self.name = f"p2pdiloco-script-{os.getuid()}-{digest_of(str(folder.resolve()).encode())}"
        """Where the node looks for the script (``training/reunion.py``)."""
        self._process: psutil.Process | None = None
        self._is_child = False

    def find(self) -> bool:
        """Whether the node of the script's last life is there; it is ours then."""
        try:
            process = psutil.Process(int((self._folder / "node.pid").read_text()))
            if self.name in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                self._process = process
        except (OSError, ValueError, psutil.Error):
            return False
        return self._process is not None

    def start(self, arguments: Sequence[str]) -> None:
        """Start ``p2pdiloco`` with ``arguments``, and those that make it this script's.

        Raises:
            OSError: it cannot be started.
        """
        command = [
            sys.executable,
            "-P",
            "-m",
            "p2pdiloco",
            *arguments,
            "--state",
            str(self._folder),
            "--learner",
            self.name,
        ]
        with open(self._folder / NODE_LOG, "ab") as output:
            self._process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._is_child = True
        (self._folder / "node.pid").write_text(str(self._process.pid))

    @property
    def ending(self) -> str:
        """How it ended, in a sentence with its last words; empty while it lives."""
        if self._process is None:
            return "it was never started"
        if self._is_child:
            status = self._process.poll()
            if status is None:
                return ""
        elif self._process.is_running():
            return ""
        else:
            status = "unknown"
        lines = (self._folder / NODE_LOG).read_text(errors="replace").splitlines()
        return f"the node ended with status {status}: {lines[-1] if lines else 'it said nothing'}"

    def signal(self, number: signal.Signals) -> None:
        """Send it, if it lives."""
        if self._process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, if it is known; a node that does not end is killed after ``timeout_s``. The folder is then
        free."""
        status: int | None = None
        if self._process is not None:
            try:
                status = self._process.wait(timeout_s)
            except psutil.TimeoutExpired:
                self.signal(signal.SIGKILL)
                status = self._process.wait()
            self._process = None
        self.leave_alone()
        return status

    def leave_alone(self) -> None:
        """The folder is free for the script's next life; the node, if there is one, waits for that."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
