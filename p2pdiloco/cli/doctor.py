"""``p2pdiloco doctor``: Check what this machine can do as a peer, and say how to mend what it cannot. With an address
it also checks that the directory answers from here, what it knows, and which of its peers can be dialled."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from p2pdiloco.node.lookup import (
    DirectoryOptions,
    LookupFailedError,
    dial_any,
    list_runs,
    observer_transport,
    open_directory,
)
from p2pdiloco.node.whereabouts import looked_up
from p2pdiloco.protocol.manifest import PROTOCOL_VERSION
from p2pdiloco.runtime.dht import CLOCK
from p2pdiloco.runtime.directory import Directory, DirectoryError
from p2pdiloco.runtime.identity import Identity
from p2pdiloco.runtime.shared_clock import SharedClock
from p2pdiloco.runtime.sockets import everywhere
from p2pdiloco.wire import libzstd

FREE_DISK_BYTES = 2 << 30
PATIENCE_S = 6.0

Verdict = Literal["ok", "note", "FAIL"]


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    verdict: Verdict
    subject: str
    detail: str
    remedy: str = ""


async def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 if one of them failed."""
    findings = [check() for check in LOCAL_CHECKS]
    findings.append(_disk(arguments.state))
    findings += await _directory(arguments.address, tuple(arguments.listen or everywhere()))
    width = max(len(f.subject) for f in findings)
    for finding in findings:
        print(f"{finding.verdict:<5} {finding.subject:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"{'':<5} {'':<{width}}  -> {finding.remedy}")
    return 1 if any(f.verdict == "FAIL" for f in findings) else 0


def _versions() -> Finding:
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("p2pdiloco", "torch", "hivemind", "uvloop", "zstandard")
    )
    decoder = ", the system's libzstd decodes" if libzstd.AVAILABLE else ""
    return Finding(
        "ok", "software", f"Python {platform.python_version()}, {packages}{decoder}, protocol {PROTOCOL_VERSION}"
    )


def _machine() -> Finding:
    memory = psutil.virtual_memory().total / 2**30
    return Finding("ok", "machine", f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, {platform.platform()}")


def _accelerator() -> Finding:
    import torch

    if torch.cuda.is_available():
        return Finding("ok", "accelerator", f"{torch.cuda.get_device_name(0)}: use --device cuda")
    if torch.backends.mps.is_available():
        return Finding("ok", "accelerator", "Apple GPU: use --device mps")
    return Finding("note", "accelerator", "none that torch sees; training runs on the CPU")


def _shared_memory() -> Finding:
    if hasattr(os, "memfd_create"):
        return Finding("ok", "shared memory", "memfd: node and learner share memory that nothing leaves behind")
    return Finding("note", "shared memory", "no memfd here; an unlinked temporary file is used")


def _congestion_control() -> Finding:
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


def _link() -> Finding:
    """Whether the default budget can be learned here."""
    if platform.system() == "Linux":
        return Finding("ok", "up budget", "without --up it is 90 % of what the link is seen to carry; the log tells it")
    return Finding(
        "note", "up budget", "this kernel does not tell what was delivered: no limit without --up", "give --up RATE"
    )


def _send_buffer() -> Finding:
    path = Path("/proc/sys/net/ipv4/tcp_wmem")
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
    _versions,
    _machine,
    _accelerator,
    _shared_memory,
    _congestion_control,
    _link,
    _send_buffer,
)


def _disk(folder: Path) -> Finding:
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        return Finding("FAIL", "state folder", f"{folder} is not writable", "give another one with --state")
    verdict: Verdict = "ok" if free > FREE_DISK_BYTES else "note"
    return Finding(
        verdict, "state folder", f"{folder}, {free / 2**30:.0f} GiB free; a checkpoint has 8 bytes a parameter"
    )


def _clock(clock: SharedClock) -> Finding:
    """This machine's clock against those of the directory's nodes."""
    if clock.is_wrong:
        what, remedy = clock.sentence().split(". ", 1)
        return Finding("note", "clock", what, remedy)
    if not clock.witnesses:
        return Finding("note", "clock", "no node of the directory told its time")
    return Finding("ok", "clock", f"within {abs(clock.ahead_s):.1f} s of {clock.witnesses} nodes of the directory")


async def _reach(directory: Directory, listen: tuple[str, ...]) -> Finding:
    """Whether others could dial a peer here."""
    try:
        is_dialable, sentence = await looked_up(directory, listen, PATIENCE_S)
    except OSError as error:
        return Finding("FAIL", "reach", f"cannot listen at {', '.join(listen)}: {error.strerror or error}")
    return Finding("ok" if is_dialable else "note", "reach", sentence)


async def _directory(addresses: list[str], listen: tuple[str, ...]) -> list[Finding]:
    """Start the libp2p daemon, join the directory, look for runs, dial their peers."""
    options = DirectoryOptions(listen=everywhere(), initial_peers=tuple(addresses))
    try:
        async with open_directory(Identity.ephemeral(), options, None) as directory:
            findings = [
                Finding("ok", "libp2p daemon", f"starts; visible as {', '.join(directory.visible_addresses()[:2])}")
            ]
            if not addresses:
                return findings
            findings.append(Finding("ok", "directory", "answers"))
            findings.append(_clock(CLOCK))
            findings.append(await _reach(directory, listen))
            runs = await list_runs(directory, patience_s=PATIENCE_S)
            if not runs:
                findings.append(
                    Finding("note", "runs", "the directory knows none", "start one: p2pdiloco start CONFIG.toml")
                )
            for run_id, record in runs.items():
                async with observer_transport(Identity.ephemeral()) as transport:
                    try:
                        peers = await dial_any(directory, transport, run_id, patience_s=PATIENCE_S)
                        findings.append(
                            Finding("ok", f"run {record.name}", f"{len(peers)} peers can be dialled from here")
                        )
                    except LookupFailedError as error:
                        findings.append(
                            Finding("FAIL", f"run {record.name}", str(error), "is its port forwarded and open?")
                        )
            return findings
    except DirectoryError as error:
        return [Finding("FAIL", "directory", " ".join(str(error).split()))]
