"""How each kind of fault is done to real processes and links, and undone.

Rules of this file:
1. Nothing is asked of the peers: signals, limits of the kernel, and the relays before them.
2. What is the case now decides: ``strike`` says in one sentence what it did, or raises ``NotNow`` with the reason.
   Nobody's processes are taken while no other peer could carry the run on (but in a blackout).
3. As root can write everywhere, a folder that cannot be written is a file of its name in its place, until the fault
   ends. A limit on processes (RLIMIT_NPROC) does not bind root either, whose node goes into a cgroup that allows none.
4. A full disk is a limit on the size of the files that the node writes (RLIMIT_FSIZE): checkpoints, journal and event
   log fail with EFBIG, without root. The log for people may grow a little, so that it can tell.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from p2pdiloco.demo.local_swarm import Member
from p2pdiloco.peer.host import PART
from p2pdiloco.training import NAME
from tests.chaos.fault_proxy import Network, slow_down
from tests.chaos.schedule import Fault, Plan

NO_DESCRIPTORS = 3
"""Only standard input, output and error have lower numbers."""
ASIDE = ".aside"
"""Suffix of files and folders in whose place nothing can be written."""
LOG_ROOM_BYTES = 32 << 10
WRITE_S, WRITE_LOOK_S = 15.0, 0.001
"""How long, and how often, a checkpoint's half-written file is looked for."""
SPOILT_PIECES = 1
"""Of each link of a peer; one is enough to end a connection."""


class NotNow(Exception):  # noqa: N818
    """The fault cannot be done to what is there now."""


class Peer:
    """One peer over all its processes."""

    def __init__(self, name: str, region: str, port: int) -> None:
        self.name = name
        self.region = region
        self.port = port
        self.member: Member | None = None
        self.is_stopped = False
        self.is_leaving = False
        """Whether it was asked to leave."""
        self.back_at: float | None = None
        """When it is to be started again, on the runner's clock."""
        self.follows: str | None = None
        """Whom it waits for before that."""
        self.tries = 0
        self.fault: int | None = None
        """From which it is coming back."""
        self.hunt: int | None = None
        """The fault that kills it in its next checkpoint."""

    @property
    def is_up(self) -> bool:
        """Its node process is there."""
        return self.member is not None and self.member.is_running

    @property
    def is_current(self) -> bool:
        """This process has a whole state."""
        return self.is_up and self.member is not None and self.member.view.current_at >= self.member.began_unix

    @property
    def is_training(self) -> bool:
        """This process's learner has made steps."""
        return self.is_current and self.member is not None and self.member.view.trained_at >= self.member.began_unix

    @property
    def is_sound(self) -> bool:
        """Whether it can continue the run."""
        return self.is_training and not self.is_stopped and not self.is_leaving

    def node(self) -> psutil.Process:
        """Its node.

        Raises:
            NotNow: it is not there.
        """
        if not self.is_up or self.member is None:
            raise NotNow(f"{self.name} is not running")
        return psutil.Process(self.member.process.pid)

    def learner(self) -> psutil.Process:
        """Its learner.

        Raises:
            NotNow: it is not there.
        """
        self.node()
        assert self.member is not None
        ours, found = f"{self.member.folder.absolute()}/", []
        for process in psutil.process_iter():  # a learner that outlived a node is no child of the next one
            with contextlib.suppress(psutil.Error):
                arguments = process.cmdline()
                is_ours = process.name() == NAME and any(f"{os.path.abspath(a)}/".startswith(ours) for a in arguments)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        if not found:
            raise NotNow(f"{self.name} has no learner now")
        return max(found, key=lambda process: process.create_time())


class Hand:
    """Does faults to ``peers`` and ``network``."""

    def __init__(self, peers: dict[str, Peer], network: Network, plan: Plan) -> None:
        self._peers = peers
        self._network = network
        self._plan = plan
        self._stopped: dict[int, psutil.Process] = {}
        """Saved by the number of the fault."""
        self._limits: dict[int, tuple[int, int]] = {}
        """Limits of starved nodes, by fault."""
        self._groups: dict[int, ProcessLimit] = {}
        """By fault."""
        self._copies: dict[int, dict[str, bytes]] = {}
        """Checkpoint folders, by fault."""

    def strike(self, fault: Fault) -> str:
        """Do it; what was done.

        Raises:
            NotNow: it would be unfair or impossible.
        """
        hit = [self._peers[name] for name in fault.peers]
        who, network = ", ".join(fault.peers), self._network
        match fault.kind:
            case "kill" | "region":
                self._others_must_go_on(fault.peers)
                for peer in hit:
                    _kill(peer)
                return f"SIGKILL to the node of {who}"
            case "blackout" | "power-cut":
                for peer in hit:
                    _kill(peer)
                return "SIGKILL to every node"
            case "leave":
                self._others_must_go_on(fault.peers)
                hit[0].node().send_signal(signal.SIGTERM)
                hit[0].is_leaving = True
                return f"{who} is asked to leave"
            case "kill-saving":
                self._others_must_go_on(fault.peers)
                threading.Thread(target=_kill_in_write, args=(hit[0],), daemon=True, name="kill in a write").start()
                return f"SIGKILL to the node of {who} in the middle of its next checkpoint"
            case "rollback":
                folder = _checkpoints(hit[0])
                self._copies[fault.number] = {path.name: path.read_bytes() for path in folder.iterdir()}
                return f"the checkpoints of {who} are copied, to be put back"
            case "twins":
                self._others_must_go_on(fault.peers)
                _copy_folder(hit[0], twin_of(fault))
                return f"the state folder of {who} is copied, and started beside it"
            case "learner":
                hit[0].learner().kill()
                return f"SIGKILL to the learner of {who}"
            case "stop" | "freeze":
                self._others_must_go_on(fault.peers)
                self._stop(fault, hit[0].node())
                hit[0].is_stopped = True
                return f"SIGSTOP to the node of {who}"
            case "stop-learner":
                self._stop(fault, hit[0].learner())
                return f"SIGSTOP to the learner of {who}"
            case "disk":
                if not hit[0].is_current:
                    raise NotNow(f"{who} is starting, and ends by itself where it cannot write")
                _limit_files(hit[0], _log_bytes(hit[0]) + LOG_ROOM_BYTES)
                return f"the disk of {who} is full"
            case "starve":
                if not hit[0].is_current:
                    raise NotNow(f"{who} is starting, and ends by itself where it cannot open a file")
                learner = hit[0].learner()
                self._limits[fault.number] = hit[0].node().rlimit(psutil.RLIMIT_NOFILE)
                _limit_descriptors(hit[0], NO_DESCRIPTORS)
                learner.kill()
                return f"{who} has no file descriptor left, and its learner is killed"
            case "memory":
                if not hit[0].is_current:
                    raise NotNow(f"{who} is starting, and ends by itself where it finds no memory")
                self._limits[fault.number] = hit[0].node().rlimit(psutil.RLIMIT_AS)
                used = hit[0].node().memory_info().vms
                hit[0].node().rlimit(psutil.RLIMIT_AS, (used, self._limits[fault.number][1]))
                return f"{who} gets no more than its {used >> 20} MiB of address space"
            case "unwritable":
                folder, learner = _checkpoints(hit[0]), hit[0].learner()
                for path in (folder, folder.with_name("learner.log")):
                    path.rename(path.with_name(f"{path.name}{ASIDE}"))
                folder.touch()
                folder.with_name("learner.log").mkdir()
                learner.kill()
                return f"nothing can be written where the checkpoints of {who} were, and its learner is killed"
            case "no-process":
                learner = hit[0].learner()
                self._groups[fault.number] = ProcessLimit(hit[0].node())
                learner.kill()
                return f"{who} can start no process and no thread, and its learner is killed"
            case "cut" | "split":
                for link in network.between(fault.peers):
                    link.cut()
                return f"{who} cut off"
            case "mute":
                for link in network.between(fault.peers, to_them=False):
                    link.cut()
                return f"{who} is not heard"
            case "one-way":
                count = network.deafen(fault.peers[0])
                if not count:
                    raise NotNow(f"{who} has no connection")
                return f"what {who} says on {count} connections goes nowhere"
            case "slow":
                slow = self._plan.slow
                slow_down(network.between(fault.peers), slow.delay_s, slow.bytes_per_s)
                return f"{who} is slow: {slow.delay_s:g} s, {slow.bytes_per_s / 1e3:g} kB/s"
            case "corrupt":
                for link in network.between(fault.peers):
                    link.spoil = SPOILT_PIECES
                return f"bytes to and from {who} spoilt"
            case "break":
                return f"{network.reset(fault.peers[0])} connections of {who} reset"

    def undo(self, fault: Fault) -> None:
        """End a fault that lasts. The runner restarts what was killed."""
        network = self._network
        match fault.kind:
            case "rollback":
                self._others_must_go_on(fault.peers)
                self._put_back(self._peers[fault.peers[0]], self._copies.pop(fault.number))
            case "stop" | "freeze" | "stop-learner":
                self._go_on(fault.number)
                if fault.kind != "stop-learner":
                    self._peers[fault.peers[0]].is_stopped = False
            case "disk":
                _limit_files(self._peers[fault.peers[0]], resource.RLIM_INFINITY)
            case "starve":
                _limit_descriptors(self._peers[fault.peers[0]], self._limits.pop(fault.number)[0])
            case "memory":
                self._peers[fault.peers[0]].node().rlimit(psutil.RLIMIT_AS, self._limits.pop(fault.number))
            case "unwritable":
                _uncover(self._peers[fault.peers[0]])
            case "no-process":
                self._groups.pop(fault.number).lift()
            case "cut" | "split":
                for link in network.between(fault.peers):
                    link.mend()
            case "mute":
                for link in network.between(fault.peers, to_them=False):
                    link.mend()
            case "slow":
                slow_down(network.between(fault.peers), 0.0, None)
            case _:
                pass

    def _others_must_go_on(self, names: Iterable[str]) -> None:
        hit = set(names)
        if not any(peer.is_sound for name, peer in self._peers.items() if name not in hit):
            raise NotNow("nobody else could carry the run on")
        if not any(self._peers[name].is_current for name in hit):
            raise NotNow(f"{', '.join(sorted(hit))} is not back yet")

    def _put_back(self, peer: Peer, files: dict[str, bytes]) -> None:
        """Kill the peer's processes, and give it an old state."""
        folder = _checkpoints(peer)
        with contextlib.suppress(NotNow):
            peer.learner().kill()
        _kill(peer)
        for path in folder.iterdir():
            path.unlink()
        for name, data in files.items():
            (folder / name).write_bytes(data)

    def _stop(self, fault: Fault, process: psutil.Process) -> None:
        process.suspend()
        self._stopped[fault.number] = process

    def _go_on(self, number: int) -> None:
        process = self._stopped.pop(number, None)
        if process is not None and process.is_running():
            process.resume()


class ProcessLimit:
    """Keeps ``process`` from starting processes and threads. Those that there are go on."""

    def __init__(self, process: psutil.Process) -> None:
        """Set the limit.

        Raises:
            NotNow: this process is root, and may not make cgroups.
        """
        self._process = process
        self._group: Path | None = None
        if os.geteuid():
            self._limits = process.rlimit(psutil.RLIMIT_NPROC)
            process.rlimit(psutil.RLIMIT_NPROC, (1, self._limits[1]))
            return
        tree = _processes_tree()
        if tree is None:
            raise NotNow(process_limit_problem())
        self._home, self._group = tree / _group_of(process.pid), tree / f"p2pdiloco-chaos-{process.pid}"
        try:
            self._group.mkdir(exist_ok=True)
            (self._group / "pids.max").write_text("0")
            (self._group / "cgroup.procs").write_text(f"{process.pid}")
        except OSError as error:
            raise NotNow(f"no cgroup can be used: {error}") from error

    def lift(self) -> None:
        """End it, also for what the process may have started."""
        if self._group is None:
            self._process.rlimit(psutil.RLIMIT_NPROC, self._limits)
            return
        for pid in (self._group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (self._home / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):  # the process has just been killed
            self._group.rmdir()


def process_limit_problem() -> str:
    """Return why no process can be kept from starting others; empty if each can."""
    if os.geteuid() and hasattr(psutil, "RLIMIT_NPROC"):
        return ""
    tree = _processes_tree()
    is_here = tree is not None and os.access(tree, os.W_OK)
    return "" if is_here else "RLIMIT_NPROC does not bind root, and the cgroup controller pids cannot be used here"


def _processes_tree() -> Path | None:
    """Return the root of the cgroups that limit processes, version 1 or 2."""
    first, second = Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")
    if first.is_dir():
        return first
    control = second / "cgroup.subtree_control"
    return second if control.exists() and "pids" in control.read_text().split() else None


def _group_of(pid: int) -> str:
    """Return a process's cgroup that limits its number, relative to their root."""
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    found = {name: path for _, names, path in lines for name in names.split(",")}
    return found.get("pids", found.get("", "/")).lstrip("/")


def twin_of(fault: Fault) -> str:
    """The name of the copy that a fault starts beside its peer."""
    return f"{fault.peers[0]}-twin-{fault.number}"


def _copy_folder(peer: Peer, name: str) -> None:
    """Copy a peer's folder as a user does who moves it to another machine, and leaves the first one running."""
    assert peer.member is not None
    to = peer.member.folder.with_name(f"peer-{name}")
    for path in sorted(peer.member.folder.rglob("*")):
        if path.is_file() and not path.match("journal*.bin") and path.name not in ("log.txt", "learner.log"):
            with contextlib.suppress(FileNotFoundError):  # the peer goes on writing
                data, copy = path.read_bytes(), to / path.relative_to(peer.member.folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(data)


def _uncover(peer: Peer) -> None:
    """Put back what ``unwritable`` has renamed."""
    assert peer.member is not None
    for aside in peer.member.folder.glob(f"*/*{ASIDE}"):
        path = aside.with_name(aside.name.removesuffix(ASIDE))
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


def _kill(peer: Peer) -> None:
    if peer.member is not None and peer.is_up:
        peer.member.kill()
    peer.is_stopped = False


def _checkpoints(peer: Peer) -> Path:
    """The folder of its checkpoints.

    Raises:
        NotNow: there is none yet.
    """
    found = sorted(peer.member.folder.glob("*/checkpoint")) if peer.member is not None and peer.is_up else []
    if not found:
        raise NotNow(f"{peer.name} has no checkpoint yet")
    return found[-1]


def _kill_in_write(peer: Peer) -> None:
    """Wait for a file that is half-written, and kill whoever writes it."""
    member, until = peer.member, time.monotonic() + WRITE_S
    while member is not None and member.is_running and time.monotonic() < until:
        if any(member.folder.glob(f"*/checkpoint/.*{PART}")):
            member.kill()
            return
        time.sleep(WRITE_LOOK_S)


def _log_bytes(peer: Peer) -> int:
    assert peer.member is not None
    return peer.member.log_path.stat().st_size


def _limit_descriptors(peer: Peer, most: int) -> None:
    """Limit the file descriptors of a peer's node, if it runs. Those that are open stay open."""
    if peer.is_up:
        _, hard = peer.node().rlimit(psutil.RLIMIT_NOFILE)
        peer.node().rlimit(psutil.RLIMIT_NOFILE, (most, hard))


def _limit_files(peer: Peer, size: int) -> None:
    """On the node, which is there, and on its learner, which may be: what it starts later inherits the limit."""
    if not peer.is_up:
        return
    processes = [peer.node()]
    with contextlib.suppress(NotNow):
        processes.append(peer.learner())
    for process in processes:
        _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (size, hard))
