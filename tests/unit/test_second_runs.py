"""What ``make test`` runs again: a test may need its second run once, and is listed then."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAKY = """
import pathlib, pytest

@pytest.mark.parametrize("how", ['a "word"', "b"])
@pytest.mark.xdist_group("alone")
def test_in_half_of_the_runs(how):
    runs = pathlib.Path("runs" + how[0])
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) % 2 == 0

def test_sound():
    pass

def test_broken():
    assert pathlib.Path("mended").exists()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--dist", "loadgroup", "--rootdir", str(folder), *words]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.long
@pytest.mark.heavy
def test_a_test_may_need_its_second_run_once(tmp_path: Path) -> None:
    again = ("--last-failed", "-p", "tests.second_runs")
    (tmp_path / "tests").mkdir()
    listed = tmp_path / "tests" / "second_runs.toml"
    listed.write_text("# as in the repository\n")
    (tmp_path / "test_flaky.py").write_text(FLAKY)
    ids = ['test_flaky.py::test_in_half_of_the_runs[a "word"]', "test_flaky.py::test_in_half_of_the_runs[b]"]

    assert run(tmp_path).returncode == 1
    second = run(tmp_path, *again)
    assert second.returncode == 1, "what is broken is broken in its second run"
    assert "test_broken" in second.stdout
    assert list(tomllib.loads(listed.read_text())) == ids, second.stdout
    assert second.stdout.splitlines()[-2:] == listed.read_text().splitlines()[-2:], "the last lines are those to add"

    (tmp_path / "mended").touch()
    assert run(tmp_path).returncode == 1
    third = run(tmp_path, *again)
    assert third.returncode == 1, "what is listed has no second run"
    assert third.stdout.count("needed a second run before") >= 2, third.stdout
    assert (tmp_path / "runsb").read_text() == "...", "and is not run"
