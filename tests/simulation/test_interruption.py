"""Who has seen enough does not wait for the seeds under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.integration.waiting import wait_until


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_it_at_once(jobs: str) -> None:
    command = [sys.executable, "-m", "tests.machine_sim", "--fresh", "100000", "--jobs", jobs]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("seeds ")
            workers = psutil.Process(process.pid).children
            wait_until(lambda: jobs == "1" or len(workers(recursive=True)) > int(jobs), 60.0, "the workers")
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, said = process.communicate(timeout=30.0)
            assert (process.returncode, said) == (130, "")
        finally:
            process.kill()
