"""The p2pdiloco program of docs/comparison.md, as printed there, by two peers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import END_S, START_S, invite_of, report
from waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_its_program_trains_one_model_by_two_peers(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    task, program, *_ = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "task.py").write_text(task)
    (tmp_path / "program.py").write_text(program)
    folders = [tmp_path / name / "p2pdiloco" / "sines" for name in "ab"]

    def start(folder: Path, *invite: str) -> subprocess.Popen[bytes]:
        home = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder.parents[1]), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "program.py", *invite]
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **home})

    scripts = [start(folders[0])]
    try:
        wait_until(lambda: invite_of(folders[0]), START_S, "an invite")
        scripts.append(start(folders[1], invite_of(folders[0])))
        assert [script.wait(END_S) for script in scripts] == [0, 0]
    finally:
        for script in scripts:
            script.kill()
            script.wait()
    reports = [report(folder) for folder in folders]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert all(one["tokens_trained"] > 0 and one["tokens_unmerged"] == 0 for one in reports)
