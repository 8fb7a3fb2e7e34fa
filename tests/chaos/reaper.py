"""Ends a swarm whose runner was killed: ``python -m tests.chaos.reaper MARK``, with a pipe as standard input.

A process stopped by SIGSTOP hears no signal but SIGKILL, so the kernel's own SIGTERM at its parent's death would leave
it there for ever. The end of the pipe says that the runner is gone; whatever bears the mark is then killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from p2pdiloco.demo.local_swarm import marked_processes

ROUNDS = 20
PAUSE_S = 0.25


@contextlib.contextmanager
def reaper(mark: str) -> Iterator[None]:
    """Inside the block: what bears ``mark`` is killed, should this process be."""
    command: Sequence[str] = [sys.executable, "-m", "tests.chaos.reaper", mark]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield
        assert process.stdin is not None
        process.stdin.close()


def main(mark: str) -> int:
    """Wait for the end of standard input, then kill until nothing is left; the exit status."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    for _ in range(ROUNDS):
        left = marked_processes(mark)
        if not left:
            return 0
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        time.sleep(PAUSE_S)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
