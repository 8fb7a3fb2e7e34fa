"""The heap of a node's process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import numpy as np
from p2pdiloco.util.process import bound_heap

if sys.argv[1] == "bounded":
    bound_heap()
kept, together = [], threading.Barrier(8)

def work():
    large = np.ones(8 << 20, np.uint8)
    del large  # from now on, glibc would keep blocks of this size
    together.wait()
    kept.append([np.ones(100_000, np.uint8) for _ in range(20)])
    for _ in range(4):
        np.ones(6 << 20, np.uint8)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
heaps = 0
for line in open("/proc/self/maps"):
    where, access, _, _, _, *name = line.split()
    heaps += access == "rw-p" and not name and int(where.split("-")[0], 16) % (64 << 20) == 0
anonymous = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
print(heaps, anonymous)
"""


def measured(how: str) -> tuple[int, int]:
    """Return a process's heaps, beside its first one, and its memory in kB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    heaps, anonymous = map(int, done.stdout.split())
    return heaps, anonymous


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heaps")
def test_a_node_has_few_heaps_and_keeps_no_large_block_that_is_free() -> None:
    heaps, anonymous = measured("bounded")
    usual_heaps, usual = measured("as usual")
    assert heaps <= 1 < usual_heaps
    assert anonymous < usual - 10_000
