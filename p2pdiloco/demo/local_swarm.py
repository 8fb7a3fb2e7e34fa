"""A swarm of real processes on this machine, for the demo, the chaos runs and the integration tests.

The processes are started with the commands that a user types, and observed through each peer's event log.

Rules of this file:
1. Every process has the swarm's mark in its environment, so that leftover processes can be counted and killed.
2. The processes die with the process that started them, even if that is killed by SIGKILL (Linux). A process that is
   stopped (SIGSTOP) needs ``tests/chaos/reaper.py``.
3. A process reports over its status pipe when it is up, and how to join it. Its printed output is not parsed.
4. For a wrong clock, ``tests/chaos/wrong_clock/`` comes first in the import path of a process. It changes only Python's
   clock, which a peer reads.
5. A peer's folder outlives its processes: the next process on it is the same peer. A report that it would
   overwrite is kept under a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from p2pdiloco.observability.log_reader import LOG, Tail
from p2pdiloco.util import status_pipe
from p2pdiloco.util.files import make_private_folder, open_regular
from p2pdiloco.util.process import die_with_parent
from p2pdiloco.util.status_pipe import Invited, Listening, Message, StatusPipeError

# Environment variable that every process of one swarm inherits.
MARK = "P2PDILOCO_SWARM"
START_S = 60.0
STOP_S = 30.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class SwarmError(Exception):
    """The swarm cannot continue. The message is for the user."""


class View:
    """State of one peer according to its event log, ``metrics.jsonl``."""

    def __init__(self) -> None:
        self.peer = ""
        self.step = 0
        self.version = 0
        self.tokens = 0
        self.merged_tokens = 0
        self.loss: float | None = None
        # Seconds of its learner in steps, between steps, and of these waiting for the network.
        self.compute_s = self.overhead_s = self.blocked_s = 0.0
        self.live = 1
        self.sent_bytes = 0
        # Unix time at which it last had a complete state.
        self.current_at = 0.0
        # Unix time of its learner's first progress; 0: none yet.
        self.began_training_at = 0.0
        # Unix time of its learner's last progress.
        self.trained_at = 0.0
        # (Unix time, loss, version) of each evaluation.
        self.held_out: list[tuple[float, float, int]] = []
        self.commits: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def apply(self, line: dict[str, Any]) -> None:
        """Update the state by one line of the event log."""
        match line["event"]:
            case "started":
                self.peer = line["peer"]
            case "current":
                self.current_at = line["time"]
            case "progress":
                self.trained_at = line["time"]
                self.began_training_at = self.began_training_at or self.trained_at
                self.tokens, self.loss, self.blocked_s = line["tokens"], line["loss"], line["blocked_s"]
                self.compute_s, self.overhead_s = line["compute_s"], line["overhead_s"]
                self.step, self.sent_bytes = max(self.step, line["step"]), line["sent_bytes"]
            case "peers":
                self.live = line["live"]
            case "evaluation":
                self.held_out.append((line["time"], line["loss"], line["version"]))
            case "commit":
                self.step = max(self.step, line["step"])
                if line["shard"] == 0:
                    self.version, self.merged_tokens = line["version"], line["tokens"]
                    self.commits.append(line)
            case "note" if line["level"] == "warning":
                self.warnings.append(line["text"])
            case _:
                pass


class Member:
    """One process of the swarm, with its folder and its state."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        mark: str,
        environment: Mapping[str, str] | None = None,
        clock_off_s: float = 0.0,
    ) -> None:
        """
        Args:
            environment: additional environment variables of its process.
            clock_off_s: lead of its wall clock in seconds, by which the times in its event log are corrected.
        """
        self.name = name
        self.folder = folder
        self.log_path = folder / "log.txt"
        self.view = View()
        self.was_killed = False
        self.began_unix = time.time()
        self._clock_off_s = clock_off_s
        self._tails: dict[Path, Tail] = {}
        make_private_folder(folder)
        with open(self.log_path, "ab", opener=open_regular) as log, status_pipe.opened() as (self.reports, status_fd):
            self._log_began = log.tell()
            variables = {**os.environ, MARK: mark, **(environment or {})}
            self.process = self.begin([*arguments, "--state", str(folder)], log, variables, status_fd)

    @staticmethod
    def begin(
        arguments: Sequence[str], log: IO[bytes], environment: dict[str, str], status_fd: int
    ) -> subprocess.Popen[bytes]:
        """Start the command of its process."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "p2pdiloco", *arguments, status_pipe.OPTION, str(status_fd)],
            pass_fds=(status_fd,),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl+C must reach only the starting process, which then ends this one
            preexec_fn=die_with_parent,
        )

    @property
    def is_running(self) -> bool:
        """True while its node process runs."""
        return self.process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status of its node process; None while it runs."""
        return self.process.poll()

    @property
    def ended_badly(self) -> bool:
        """True if it ended with an error and was not killed on purpose."""
        return not self.was_killed and self.process.poll() not in (None, 0)

    def kill(self) -> None:
        """Send SIGKILL to the node process only; learner and daemon must notice by themselves."""
        self.was_killed = True
        self.process.kill()
        self.process.wait()

    def run_folder(self) -> Path | None:
        """Return the run's folder in this peer's state folder, or None if there is none yet."""
        found = sorted(self.folder.glob(f"*/{LOG}"), key=lambda path: path.stat().st_mtime)
        return found[-1].parent if found else None

    def wait_for(self, kind: type[Message], timeout_s: float = START_S) -> Message:
        """Wait for its first report of this kind, and return it.

        Raises:
            SwarmError: the process ended before, or the report takes too long.
        """
        try:
            return self.reports.wait_for(kind, timeout_s)
        except StatusPipeError as error:
            tail = "\n".join(self.output()[-5:])
            raise SwarmError(f"{self.name} did not start ({error}), its log ends with:\n{tail}") from error

    def output(self) -> list[str]:
        """Return the lines that this process has printed."""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_began)
            return log.read().decode(errors="replace").splitlines()

    def refresh(self) -> None:
        """Read the new lines of its event log."""
        folder = self.run_folder()
        if folder is None:
            return
        if folder not in self._tails:
            self._tails[folder] = Tail(folder / LOG, from_begin=True)
        for event in self._tails[folder].new():
            self.view.apply({**event, "time": event["time"] - self._clock_off_s})

    def report(self) -> dict[str, Any] | None:
        """Return the report that it wrote at its end, or None."""
        folder = self.run_folder()
        path = None if folder is None else folder / "report.json"
        return None if path is None or not path.exists() else json.loads(path.read_bytes())

    def line(self) -> str:
        """Return a line for people about its activity and progress."""
        view = self.view
        state = "killed" if self.was_killed else "training" if self.is_running else "done"
        loss = "-" if view.loss is None else f"{view.loss:.3f}"
        return (
            f"    {self.name}  {state:<9} version {view.version:>3}  loss {loss:>6}  {view.tokens:>9,} tokens  "
            f"{view.live} live  overhead {view.overhead_s / max(1e-9, view.compute_s + view.overhead_s):.1%}"
        )


# The run is open, so that peers join by the bootstrap node's address, without an invite.
OPEN = ("--access", "open")


class Swarm:
    """All processes of one swarm. ``options`` are added to every peer's command."""

    def __init__(self, out: Path, options: Sequence[str] = ()) -> None:
        self.out = out
        self.members: list[Member] = []
        self.bootstrap: Member
        self.mark = uuid.uuid4().hex
        self._options = tuple(options)
        self._started = False

    def __getitem__(self, name: str) -> Member:
        return next(m for m in reversed(self.members) if m.name == name)

    def launch_bootstrap(self) -> Member:
        """Start the bootstrap node, which will report ``Listening``."""
        self.bootstrap = Member("bootstrap", ["bootstrap", "--listen", LOOPBACK], self.out / "bootstrap", self.mark)
        self._started = True
        return self.bootstrap

    def start_bootstrap(self) -> str:
        """Start the bootstrap node and wait for it; returns its address."""
        return self.launch_bootstrap().wait_for(Listening).addresses[0]

    def start_founder(self, name: str, config: Path, address: str, *more: str) -> Member:
        """Start the peer that founds the run, and wait until others can join. ``more``: further options."""
        member = self.launch(name, ["start", str(config), *OPEN, "--bootstrap", address], *more)
        member.wait_for(Invited)
        return member

    def join(self, name: str, address: str, *more: str) -> Member:
        """Start a peer that joins by one address."""
        return self.launch(name, ["join", address], *more)

    def launch(
        self,
        name: str,
        command: Sequence[str],
        *more: str,
        environment: Mapping[str, str] | None = None,
        clock_off_s: float = 0.0,
    ) -> Member:
        """Start a peer, or restart it on its folder as the same peer.

        more: further options. environment, clock_off_s: see ``Member``.
        """
        folder = self.out / f"peer-{name}"
        _number_earlier_files(folder)
        listen = () if "--listen" in more else ("--listen", LOOPBACK)
        words = [*command, *_PEER, *listen, *self._options, *more]
        member = Member(name, words, folder, self.mark, environment, clock_off_s)
        self.members.append(member)
        return member

    def stop(self) -> None:
        """Ask all processes to shut down gracefully, and kill those that do not within ``STOP_S``."""
        everyone = [*self.members, *([self.bootstrap] if self._started else [])]
        for member in everyone:
            if member.is_running:
                member.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for member in everyone:
            try:
                member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            member.refresh()
        self.wait_until_alone()

    def wait_until_alone(self) -> None:
        """Wait up to 5 s for child processes to notice the end of their parents."""
        deadline = time.monotonic() + 5.0
        while self.leftovers() and time.monotonic() < deadline:
            time.sleep(0.1)

    def leftovers(self) -> list[str]:
        """Return the processes of this swarm that still run, as "PID NAME"."""
        return [f"{process.pid} {_name(process)}" for process in marked_processes(self.mark)]

    def kill_leftovers(self) -> None:
        """Kill all processes of this swarm that still run."""
        for process in marked_processes(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the processes with a swarm's mark, without this process and zombies."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.pid != os.getpid() and process.environ().get(MARK) == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return "gone"


def _number_earlier_files(folder: Path) -> None:
    for path in list(folder.glob("*/report.json")):
        number = 1 + len(list(path.parent.glob(f"{path.stem}-*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}-{number}{path.suffix}"))


_PEER = ["--directory-listen", LOOPBACK, "--threads", "1", "--leave-s", "10", "--reattach-s", "0"]
_PEER += ["--stay-s", "0", "--page", "off"]
