"""What ``doctor`` finds of this machine, before any run is looked at.

Rules of this file:
1. A finding says what is the case; one that is not in order says what to do. ``failure``: a peer does not work here;
   ``warning``: it works badly, or not for long; ``note``: it is good to know.
2. Nothing is changed, and nothing needs a privilege.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from p2pdiloco.codec import compression
from p2pdiloco.discovery.clock_sync import SharedClock
from p2pdiloco.protocol.manifest import PROTOCOL_VERSION
from p2pdiloco.transport.identity import Identity, IdentityError
from p2pdiloco.util.files import LockedError, lock

FREE_DISK_BYTES = 2 << 30
LEAST_FILES = 1024
"""Open at once: two sockets and a memory a peer, and the learner's libraries."""
BUSY = 0.75
"""Processes that want a core, for each core."""
IP_MTU = 14
TUNNEL_MTU = 1500
LEAST_MTU = 1280
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")

Verdict = Literal["ok", "note", "warning", "failure"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    verdict: Verdict
    subject: str
    detail: str
    remedy: str = ""


def checked_here(state: Path, device: str) -> list[Finding]:
    """All of this module that needs no network; ``state``: the peer's folder, ``device``: where it is to train."""
    return [*(check() for check in LOCAL_CHECKS), accelerator(device), disk(state), folder(state), identity(state)]


def software() -> Finding:
    """Versions."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("p2pdiloco", "torch", "hivemind", "uvloop", "zstandard")
    )
    decoder = ", the system's libzstd decodes" if compression.AVAILABLE else ""
    return Finding(
        "ok", "software", f"Python {platform.python_version()}, {packages}{decoder}, protocol {PROTOCOL_VERSION}"
    )


def machine() -> Finding:
    """Cores and memory, and who wants them."""
    cores, waiting = os.cpu_count() or 1, os.getloadavg()[0]
    told = f"{cores} cores, {memory_bytes() / 2**30:.1f} GiB of memory free, {platform.platform()}"
    if waiting <= BUSY * cores:
        return Finding("ok", "machine", told)
    return Finding(
        "warning",
        "machine",
        f"{told}; {waiting:.1f} processes want the cores already",
        "what a learner reaches here is what they leave: join --only-when-idle rests while they run, or stop them",
    )


def memory_bytes() -> int:
    """Free for a peer, also within a container's limit."""
    free = int(psutil.virtual_memory().available)
    for limit, used in zip(CGROUP_LIMITS, CGROUP_USES, strict=True):
        with suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(0, free)


def accelerator(device: str) -> Finding:
    """What torch would train on."""
    import torch

    kind = torch.device(device).type if device.replace(":", "").isalnum() else device
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if (kind == "cuda" and not has_cuda) or (kind == "mps" and not has_mps):
        return Finding(
            "failure",
            "accelerator",
            f"torch {torch.__version__} sees none for --device {device}",
            "install the driver and torch's build for it (https://pytorch.org), or train with --device cpu",
        )
    if kind in ("cuda", "mps"):
        return Finding("ok", "accelerator", torch.cuda.get_device_name(0) if has_cuda else "Apple GPU")
    if has_cuda or has_mps:
        better = "cuda" if has_cuda else "mps"
        return Finding("note", "accelerator", "there is one, and training would not use it", f"--device {better}")
    return Finding("note", "accelerator", "none that torch sees; training runs on the CPU")


def shared_memory() -> Finding:
    """Between node and learner."""
    if hasattr(os, "memfd_create"):
        return Finding("ok", "shared memory", "memfd: node and learner share memory that nothing leaves behind")
    return Finding("note", "shared memory", "no memfd here; an unlinked temporary file is used")


def open_files() -> Finding:
    """How many a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return Finding("ok", "open files", f"{'any number' if soft == resource.RLIM_INFINITY else f'{soft:,}'}")
    way = f"ulimit -n {min(4096, hard) if hard > 0 else 4096}" + (
        "" if hard == resource.RLIM_INFINITY or hard >= LEAST_FILES else ", and more in /etc/security/limits.conf"
    )
    return Finding("warning", "open files", f"{soft} at once: enough for few peers alone", way)


def congestion_control() -> Finding:
    """Whether an unprivileged socket gets BBR."""
    if not hasattr(socket, "TCP_CONGESTION"):
        return Finding("note", "congestion control", "the system's own; it cannot be chosen here")
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
            return Finding("ok", "congestion control", "BBR can be had for each connection")
        except OSError:
            default = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
    return Finding(
        "note",
        "congestion control",
        f"BBR is refused, connections use {default}: slow on long paths that lose packets",
        "as root: modprobe tcp_bbr; sysctl net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'",
    )


def up_budget() -> Finding:
    """Whether the default budget can be learned here."""
    if platform.system() == "Linux":
        return Finding("ok", "up budget", "without --up it is 90 % of what the link is seen to carry; the log tells it")
    return Finding(
        "note", "up budget", "this kernel does not tell what was delivered: no limit without --up", "give --up RATE"
    )


def send_buffers(path: Path = Path("/proc/sys/net/ipv4/tcp_wmem")) -> Finding:
    """Of one connection."""
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
    """Where a peer keeps its checkpoints; ``needs_bytes``: what a run's take."""
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
    """Whether peers run there now: one running peer a folder and run."""
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
        "note", "peers here", f"running: {', '.join(users)}", "for another peer of the same run give another --state"
    )


def identity(state: Path) -> Finding:
    """The peer's key."""
    path = state / "identity.key"
    if not path.exists():
        return Finding("ok", "identity", "none yet: the first start makes one")
    try:
        Identity.load_or_create(path)
    except (IdentityError, OSError) as error:
        return Finding(
            "failure", "identity", str(error), "restore it, or move it away: the peer is a new one to others then"
        )
    if path.stat().st_mode & 0o077:
        return Finding("warning", "identity", f"others on this machine may read {path}", f"chmod 600 {path}")
    return Finding("ok", "identity", str(path))


def clock(told: SharedClock) -> Finding:
    """This machine's clock against those of the directory's nodes."""
    if told.is_wrong:
        what, remedy = told.sentence().split(". ", 1)
        return Finding("warning", "clock", what, remedy)
    if not told.witnesses:
        return Finding("note", "clock", "no node of the directory told its time")
    return Finding("ok", "clock", f"within {abs(told.ahead_s):.1f} s of {told.witnesses} nodes of the directory")


def path_mtu(host: str, port: int) -> Finding:
    """The largest packet that leaves here for a host, as this machine knows it; no packet is sent."""
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
    """Of that many bytes."""
    if mtu >= TUNNEL_MTU:
        return Finding("ok", "packets", f"of {mtu:,} bytes to {host}")
    if mtu >= LEAST_MTU:
        return Finding("note", "packets", f"of {mtu:,} bytes to {host}: a tunnel or a VPN; peers take care of that")
    return Finding(
        "warning",
        "packets",
        f"of {mtu:,} bytes alone to {host}",
        f"raise the MTU of the interface (ip link), {LEAST_MTU:,} at least",
    )
