"""What User-Mode Linux's first process needs and a minimal machine has no program for: load modules, switch off."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

MODULES = ("drivers/net/veth", "net/sched/sch_netem", "net/sched/sch_tbf", "drivers/net/ifb")
FINIT_MODULE = 313  # of x86-64, where User-Mode Linux runs
POWER_OFF = 0x4321FEDC


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.argv[1] == "off":
        os.sync()
        libc.reboot(POWER_OFF)
    folder = Path("/usr/lib/uml/modules", platform.release(), "kernel")
    for name in MODULES:
        with (folder / f"{name}.ko").open("rb") as module:
            if libc.syscall(FINIT_MODULE, module.fileno(), b"", 0):
                print(name, os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
