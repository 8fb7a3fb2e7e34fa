"""What this machine can do for a testbed, found out by trying, not by asking for versions.

Rules of this file:
1. Each queueing discipline is tried in a namespace of its own, which is gone afterwards.
2. The engine is netem where the kernel has it, else the user-space router over TUN devices. Rates are limited by tbf
   either way. What is missing is said in one sentence with its remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.netbed.namespaces import LOOPBACK, PREFIX, TestbedError, configure, create, need_root, remove

Engine = Literal["netem", "router"]


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """What was found."""

    release: str
    tbf: bool
    netem: bool
    ifb: bool
    tun: bool
    uml: bool
    """User-Mode Linux is installed: a place to test the netem path."""
    congestion_controls: tuple[str, ...]

    def sentence(self) -> str:
        """All of it in one line."""
        found = [name for name in ("tbf", "netem", "ifb", "tun", "uml") if getattr(self, name)]
        missing = [name for name in ("tbf", "netem", "ifb", "tun") if not getattr(self, name)]
        text = f"kernel {self.release}: {', '.join(found)}"
        return text + (f"; no {', '.join(missing)}" if missing else "")


def probe() -> Kernel:
    """Try everything.

    Raises:
        TestbedError: not root, no pyroute2, or no namespaces.
    """
    need_root()
    name = f"{PREFIX}probe-{os.getpid()}"
    create([name])
    try:
        tbf, netem, ifb = configure(name, _try)
    finally:
        remove([name])
    folders = [Path(folder) for folder in os.get_exec_path()]
    return Kernel(
        release=os.uname().release,
        tbf=tbf,
        netem=netem,
        ifb=ifb,
        tun=os.access("/dev/net/tun", os.R_OK | os.W_OK),
        uml=any((folder / "linux.uml").exists() for folder in folders),
        congestion_controls=_congestion_controls(),
    )


def choose_engine(kernel: Kernel, wanted: Engine | None = None) -> Engine:
    """Who delays and loses packets: ``wanted``, or the best there is.

    Raises:
        TestbedError: what it needs is missing.
    """
    if not kernel.tbf:
        raise TestbedError(f"{kernel.sentence()}: rates need sch_tbf (CONFIG_NET_SCH_TBF, or modprobe sch_tbf)")
    if wanted == "netem" or (wanted is None and kernel.netem):
        if not kernel.netem:
            raise TestbedError(f"{kernel.sentence()}: netem needs sch_netem (modprobe sch_netem); or --engine router")
        return "netem"
    if not kernel.tun:
        raise TestbedError(f"{kernel.sentence()}: delays need sch_netem (modprobe sch_netem) or /dev/net/tun")
    return "router"


def _try(net: Any) -> tuple[bool, bool, bool]:
    """Whether it takes tbf, netem, an ifb device."""
    return (
        _works(lambda: net.tc("replace", "tbf", LOOPBACK, rate=125_000, burst=10_000, limit=10_000)),
        _works(lambda: net.tc("replace", "netem", LOOPBACK, delay=1_000)),
        _works(lambda: net.link("add", ifname="ifb7", kind="ifb")),
    )


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except Exception as error:
        if getattr(error, "code", None) is None:  # pyroute2's NetlinkError carries the kernel's
            raise
        return False
    return True


def _congestion_controls() -> tuple[str, ...]:
    try:
        return tuple(Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii").split())
    except OSError:
        return ()
