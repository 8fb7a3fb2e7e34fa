"""Checks of ``p2pdiloco doctor`` on this machine, and an estimate of its capacity for a run.

Rules of this file:
1. A finding describes the state; if that is not in order, it also says what to do. ``failure``: a peer does not work
   here; ``warning``: it works badly, or not for long; ``note``: useful to know.
2. The checks change nothing and need no privileges.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec
import psutil

from p2pdiloco.discovery.clock_sync import SharedClock
from p2pdiloco.peer.options import LearnerOptions
from p2pdiloco.protocol.manifest import PROTOCOL_VERSION, Layout, Manifest
from p2pdiloco.protocol.manifest_defaults import momentum_type
from p2pdiloco.training import PASSIVE
from p2pdiloco.training.speed_trial import SpeedTrial
from p2pdiloco.transport.identity import Identity, IdentityError
from p2pdiloco.util.files import LockedError, lock
from p2pdiloco.wire.control_messages import PeerStatus

FREE_DISK_BYTES = 2 << 30
# Minimum limit of open files: two sockets and a memory file for each peer, and the learner's libraries.
LEAST_FILES = 1024
# Load average per core above which the machine counts as busy.
BUSY = 0.75
IP_MTU = 14
TUNNEL_MTU = 1500
LEAST_MTU = 1280
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")

Verdict = Literal["ok", "note", "warning", "failure"]


class Finding(msgspec.Struct, frozen=True):
    """Result of one check."""

    verdict: Verdict
    subject: str
    detail: str
    remedy: str = ""


def checked_here(state: Path, device: str) -> list[Finding]:
    """Run all checks that need no network.

    state: the peer's state folder.
    device: torch device on which it would train.
    """
    return [*(check() for check in LOCAL_CHECKS), accelerator(device), disk(state), folder(state), identity(state)]


def software() -> Finding:
    """Report the versions of Python, the packages and the protocol."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("p2pdiloco", "torch", "hivemind", "uvloop", "zstandard")
    )
    return Finding("ok", "software", f"Python {platform.python_version()}, {packages}, protocol {PROTOCOL_VERSION}")


def machine() -> Finding:
    """Check cores, free memory and load."""
    cores, waiting = os.cpu_count() or 1, os.getloadavg()[0]
    told = f"{cores} cores, {memory_bytes() / 2**30:.1f} GiB of memory free, {platform.platform()}"
    if waiting <= BUSY * cores:
        return Finding("ok", "machine", told)
    return Finding(
        "warning",
        "machine",
        f"{told}; {waiting:.1f} processes compete for the cores already",
        "stop them, or join with --only-when-idle, which pauses while they run",
    )


def memory_bytes() -> int:
    """Return the free memory in bytes, within a container's limit if there is one."""
    free = int(psutil.virtual_memory().available)
    for limit, used in zip(CGROUP_LIMITS, CGROUP_USES, strict=True):
        with suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, free)


def accelerator(device: str) -> Finding:
    """Check that torch supports ``device``."""
    import torch

    kind = torch.device(device).type if device.replace(":", "").isalnum() else device
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if (kind == "cuda" and not has_cuda) or (kind == "mps" and not has_mps):
        return Finding(
            "failure",
            "accelerator",
            f"torch {torch.__version__} sees no device for --device {device}",
            "install the driver and torch's build for it (https://pytorch.org), or train with --device cpu",
        )
    if kind in ("cuda", "mps"):
        return Finding("ok", "accelerator", torch.cuda.get_device_name(0) if has_cuda else "Apple GPU")
    if has_cuda or has_mps:
        better = "cuda" if has_cuda else "mps"
        return Finding("note", "accelerator", "one is available, but training would not use it", f"--device {better}")
    return Finding("note", "accelerator", "torch sees none; training runs on the CPU")


def shared_memory() -> Finding:
    """Check how node and learner would share memory."""
    if hasattr(os, "memfd_create"):
        return Finding("ok", "shared memory", "memfd: node and learner share memory that nothing leaves behind")
    return Finding("note", "shared memory", "no memfd here; an unlinked temporary file is used")


def open_files() -> Finding:
    """Check the limit of open files of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return Finding("ok", "open files", f"{'any number' if soft == resource.RLIM_INFINITY else f'{soft:,}'}")
    way = f"ulimit -n {min(4096, hard) if hard > 0 else 4096}" + (
        "" if hard == resource.RLIM_INFINITY or hard >= LEAST_FILES else ", and more in /etc/security/limits.conf"
    )
    return Finding("warning", "open files", f"at most {soft}: enough for a few peers only", way)


def congestion_control() -> Finding:
    """Check whether an unprivileged socket may use BBR."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return Finding("note", "congestion control", "the system's own; it cannot be chosen here")
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            return Finding("ok", "congestion control", "BBR is available")
        except OSError:
            default = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    return Finding(
        "note",
        "congestion control",
        f"BBR is refused, connections use {default}: slow on long paths that lose packets",
        "as root: modprobe tcp_bbr; sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
    )


def up_budget() -> Finding:
    """Check whether the default upload budget can be measured on this system."""
    if platform.system() == "Linux":
        return Finding("ok", "up budget", "without --up it is 90 % of what the link is seen to carry; the log tells it")
    return Finding(
        "note", "up budget", "this kernel does not tell what was delivered: no limit without --up", "give --up RATE"
    )


def send_buffers(path: Path = Path("/proc/sys/net/ipv4/tcp_wmem")) -> Finding:
    """Check the largest send buffer of one connection."""
    if not path.exists():
        return Finding("note", "send buffers", "the system's own")
    largest = int(path.read_text().split()[2])
    at_100_ms = largest * 8 / 0.1 / 1e6
    if largest >= 16 << 20:
        return Finding(
            "ok", "send buffers", f"up to {largest >> 20} MiB: {at_100_ms:,.0f} Mbit/s for one connection at 100 ms"
        )
    return Finding(
        "note",
        "send buffers",
        f"up to {largest >> 20} MiB: about {at_100_ms / 1.5:,.0f} Mbit/s for one connection at 100 ms",
        "as root, for long fast paths: sysctl net.ipv4.tcp_wmem='4096 65536 67108864'",
    )


LOCAL_CHECKS: tuple[Callable[[], Finding], ...] = (
    software,
    machine,
    shared_memory,
    open_files,
    congestion_control,
    up_budget,
    send_buffers,
)


def disk(state: Path, needs_bytes: int = FREE_DISK_BYTES) -> Finding:
    """Check the disk of the state folder. ``needs_bytes``: space that the run needs."""
    existing = next(path for path in (state, *state.parents) if path.exists())
    if not existing.is_dir():
        return Finding("failure", "state folder", f"{existing} is a file", "give another one with --state")
    if not os.access(existing, os.W_OK):
        return Finding("failure", "state folder", f"{state} is not writable", "give another one with --state")
    free = shutil.disk_usage(existing).free
    told = f"{state}, {free / 1e9:,.1f} GB free, {needs_bytes / 1e9:,.1f} needed at most"
    if free >= needs_bytes:
        return Finding("ok", "state folder", told)
    remedy = "make room, give a folder on another disk with --state, or keep fewer with --keep-checkpoints 1"
    return Finding("failure" if free < needs_bytes / 3 else "warning", "state folder", told, remedy)


def folder(state: Path) -> Finding:
    """Report the peers that use this state folder now: at most one can run per folder and run."""
    users = []
    for path in sorted(state.glob("*/lock")):
        try:
            os.close(lock(path))
        except LockedError as error:
            users.append(f"{path.parent.name} (process {error})")
        except OSError:
            continue
    if not users:
        return Finding("ok", "peers here", "none runs with that state folder")
    return Finding(
        "note", "peers here", f"running: {', '.join(users)}", "for another peer of the same run, give another --state"
    )


def identity(state: Path) -> Finding:
    """Check the file of the peer's key."""
    path = state / "identity.key"
    if not path.exists():
        return Finding("ok", "identity", "none yet: the first start makes one")
    try:
        Identity.load_or_create(path)
    except (IdentityError, OSError) as error:
        return Finding(
            "failure", "identity", str(error), "restore it, or move it away: the peer then gets a new identity"
        )
    if path.stat().st_mode & 0o077:
        return Finding("warning", "identity", f"others on this machine may read {path}", f"chmod 600 {path}")
    return Finding("ok", "identity", str(path))


def clock(told: SharedClock) -> Finding:
    """Compare this machine's clock with the time of the directory's nodes."""
    if told.is_wrong:
        what, remedy = told.describe().split(". ", 1)
        return Finding("warning", "clock", what, remedy)
    if not told.witnesses:
        return Finding("note", "clock", "no node of the directory reported its time")
    nodes = f"{told.witnesses} directory node{'s' * (told.witnesses != 1)}"
    return Finding("ok", "clock", f"within {abs(told.ahead_s):.1f} s of {nodes}")


def path_mtu(host: str, port: int) -> Finding:
    """Check the path MTU to a host as far as this machine knows it. No packet is sent."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.connect(address)
            level = socket.IPPROTO_IP if family == socket.AF_INET else socket.IPPROTO_IPV6
            name = IP_MTU if family == socket.AF_INET else 24
            mtu = struct.unpack("i", probe.getsockopt(level, name, 4))[0]
    except (OSError, AttributeError, struct.error) as error:
        return Finding("note", "packets", f"the system does not tell the largest one to {host} ({error})")
    return judged_mtu(mtu, host)


def judged_mtu(mtu: int, host: str) -> Finding:
    """Judge a path MTU of so many bytes."""
    if mtu >= TUNNEL_MTU:
        return Finding("ok", "packets", f"up to {mtu:,} bytes to {host}")
    if mtu >= LEAST_MTU:
        return Finding("note", "packets", f"at most {mtu:,} bytes to {host}: a tunnel or a VPN; peers adapt to it")
    return Finding(
        "warning",
        "packets",
        f"at most {mtu:,} bytes to {host}",
        f"raise the MTU of the interface (ip link) to at least {LEAST_MTU:,}",
    )


# -- Capacity of this machine ------------------------------------------------------------------------------------------
# Estimates what this machine would contribute to a run, and whether it has the memory and disk for it.
# Rules of this section:
# 1. The speed is measured with the run's model, data and steps, in a separate process (``training/speed_trial.py``).
#    The rest is arithmetic with known sizes.
# 2. The speeds that other peers report are used only for a percentage.


COMMAND = (sys.executable, "-P", "-m", "p2pdiloco.training.speed_trial")
NODE_BYTES_A_PARAMETER, NODE_BYTES = 9, 45 << 20
# Memory of a process that has loaded Python and torch.
PROCESS_BYTES = 250 << 20
# Sizes on disk (docs/operating.md): parameters and bfloat16 momentum; AdamW's state; recent payloads; commits since the
# oldest kept checkpoint, at most.
CHECKPOINT_BYTES_A_PARAMETER = 6
CHECKPOINTS = 4  # two that are kept, a known-good one, and one being written
INNER_STATE_BYTES_A_PARAMETER = 8
PAYLOAD_BYTES_A_PARAMETER = 27
COMMIT_BYTES_A_PARAMETER = 58
LOG_BYTES = 100 << 20
# Bytes sent per parameter in one exchange, one way: int4 with its scales (docs/results.md).
SENT_BYTES_A_PARAMETER = 0.44
# Time limit beyond the steps themselves, for loading torch, data and model.
LIMIT_S = 240.0


class MachineEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated contribution and needs of this machine, for ``--json``. None: not known."""

    tokens_per_s: float | None = None
    share: float | None = None
    """Share of this machine in the training speed of all peers, this one included."""
    memory_bytes: int = 0
    disk_bytes: int = 0
    up_bytes_per_s: float | None = None


async def tried(manifest: Manifest, options: LearnerOptions, seconds: float) -> SpeedTrial:
    """Run the learner's steps for ``seconds`` in a separate process, and return their speed."""
    with TemporaryDirectory(prefix="p2pdiloco-doctor-") as folder:
        path = Path(folder) / "manifest.msgpack"
        await asyncio.to_thread(path.write_bytes, manifest.encode())
        words = ["--manifest", str(path), "--seconds", str(seconds), "--device", options.device]
        for name, value in (("data", options.data), ("tokenizer", options.tokenizer), ("model", options.model)):
            words += [f"--{name}", str(value)] if value else []
        words += ["--threads", str(options.threads)]
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *words,
            env={**PASSIVE, **os.environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), seconds + LIMIT_S)
        except TimeoutError:
            return SpeedTrial(
                trouble=f"fewer than three steps within {seconds + LIMIT_S:.0f} s: this machine is too slow for the run"
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    try:
        return msgspec.json.decode(out.splitlines()[-1] if out else b"", type=SpeedTrial)
    except msgspec.DecodeError:
        status = process.returncode or 0
        why = f"by signal {-status}" if status < 0 else f"with {status}"
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return SpeedTrial(trouble=f"the learner's process ended {why} ({''.join(last)[:300]}): is there enough memory?")


def judged(
    manifest: Manifest,
    trial: SpeedTrial | None,
    peers: Sequence[PeerStatus],
    state: Path,
    free_memory: int | None = None,
) -> tuple[list[Finding], MachineEstimate]:
    """Return findings for people, and numbers for programs.

    trial: measured speed; None: not measured.
    peers: statuses of the run's peers.
    """
    parameters = Layout.of(manifest).elements
    findings = [_data(trial)] if trial is not None and not trial.trouble else []
    findings.append(_speed(manifest, trial, peers))
    node = NODE_BYTES_A_PARAMETER * parameters + NODE_BYTES + PROCESS_BYTES
    learner = trial.bytes if trial is not None and trial.bytes else 16 * parameters + PROCESS_BYTES
    is_measured = bool(trial is not None and trial.bytes)
    findings.append(_memory(node, learner, is_measured, memory_bytes() if free_memory is None else free_memory))
    checkpoint = CHECKPOINT_BYTES_A_PARAMETER + 2 * (momentum_type(manifest.config.outer) == "float32")
    room = CHECKPOINTS * checkpoint + INNER_STATE_BYTES_A_PARAMETER
    room += PAYLOAD_BYTES_A_PARAMETER + COMMIT_BYTES_A_PARAMETER
    needs = room * parameters + LOG_BYTES
    findings.append(disk(state, needs))
    estimate = MachineEstimate(memory_bytes=node + learner, disk_bytes=needs)
    if trial is not None and trial.step_s:
        up = _up_bytes_per_s(manifest, parameters, trial.step_s, len(peers) + 1)
        told = f"{up * 8 / 1e6:,.2f} Mbit/s needed in each direction on average; --up RATE sets a limit"
        findings.append(Finding("ok", "link", told))
        share = _share(trial.tokens_per_s, peers)
        estimate = msgspec.structs.replace(estimate, tokens_per_s=trial.tokens_per_s, share=share, up_bytes_per_s=up)
    return findings, estimate


def _speed(manifest: Manifest, trial: SpeedTrial | None, peers: Sequence[PeerStatus]) -> Finding:
    if trial is None:
        return Finding("note", "speed", "not measured (--seconds 0)")
    if trial.trouble:
        return Finding("failure", "speed", "a learner cannot train here", trial.trouble)
    told = f"{trial.tokens_per_s:,.0f} tokens/s, {trial.step_s:.3f} s a step ({trial.steps} steps, "
    told += f"{trial.threads} thread{'s' * (trial.threads != 1)})"
    share = _share(trial.tokens_per_s, peers)
    if share is None:
        return Finding("ok", "speed", told)
    told += f"; this machine would train {share:.1%} of the run's tokens"
    left = _left_s(manifest, trial, peers)
    if left is not None and left < 120.0:
        remedy = "the run is nearly over: p2pdiloco fetch downloads its model"
        return Finding("note", "speed", f"{told}; the run ends in {left:.0f} s", remedy)
    if share < 0.01:
        remedy = "join with a GPU (--device), more --threads, or follow with --follow"
        return Finding("note", "speed", f"{told}: a very small share", remedy)
    return Finding("ok", "speed", told)


def _data(trial: SpeedTrial) -> Finding:
    if trial.has_blocks:
        return Finding("ok", "data", "found, and the same as the run's")
    return Finding(
        "note",
        "data",
        "found, but different from the run's: this peer would draw random samples from it",
        "use the founder's files with --data to share the work without repetition",
    )


def _memory(node: int, learner: int, is_measured: bool, free: int) -> Finding:
    how = "measured" if is_measured else "estimated"
    told = f"{(node + learner) / 1e9:.2f} GB needed (node {node / 1e9:.2f}, learner {learner / 1e9:.2f}, {how}), "
    told += f"{free / 1e9:.2f} free"
    if free >= 1.25 * (node + learner):
        return Finding("ok", "memory", told)
    remedy = "stop other programs, use a machine with more memory, or follow without training (--follow)"
    return Finding("warning" if free >= node + learner else "failure", "memory", told, remedy)


def _up_bytes_per_s(manifest: Manifest, parameters: int, step_s: float, peers: int) -> float:
    """Return the mean upload rate: each parameter goes once per round to its owner, and from owners to all others."""
    copies = 1.0 + (peers - 1) / peers
    return SENT_BYTES_A_PARAMETER * parameters * copies / (manifest.config.schedule.sync_every * step_s)


def _share(tokens_per_s: float, peers: Sequence[PeerStatus]) -> float | None:
    others = sum(one.tokens_per_second for one in peers if 0.0 < one.tokens_per_second < math.inf)
    return tokens_per_s / (tokens_per_s + others) if others else None


def _left_s(manifest: Manifest, trial: SpeedTrial, peers: Sequence[PeerStatus]) -> float | None:
    step = max((one.step for one in peers), default=0)
    last_step = max((one.total_steps for one in peers), default=manifest.config.inner.steps)
    return (last_step - step) * trial.step_s if peers else None
