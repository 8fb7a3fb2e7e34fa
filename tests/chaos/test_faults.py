"""Faults that need more than a signal: what they take is missing, and comes back."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.chaos.faults import ProcessLimit, process_limit_problem

FORKS = """
import os, sys
for _ in sys.stdin:
    try:
        child = os.fork()
    except BlockingIOError:
        print("no", flush=True)
        continue
    if not child:
        os._exit(0)
    os.wait()
    print("yes", flush=True)
"""


@pytest.mark.skipif(bool(process_limit_problem()), reason=process_limit_problem())
def test_a_limited_process_starts_no_other_until_the_limit_is_lifted() -> None:
    """Also as root."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdin is not None
        assert it.stdout is not None

        def starts_another() -> str:
            print(file=it.stdin, flush=True)
            return it.stdout.readline().strip()

        assert starts_another() == "yes"
        limit = ProcessLimit(psutil.Process(it.pid))
        assert starts_another() == "no"
        limit.lift()
        assert starts_another() == "yes"
        it.stdin.close()
