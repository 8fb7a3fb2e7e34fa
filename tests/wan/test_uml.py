"""The netem path in a real kernel that has netem; see uml.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("wan")  # namespaces are the machine's


@pytest.mark.skipif(os.environ.get("P2PDILOCO_UML") != "1", reason="takes most of a minute: P2PDILOCO_UML=1")
@pytest.mark.skipif(shutil.which("linux.uml") is None, reason="no User-Mode Linux here: apt install user-mode-linux")
def test_the_testbed_agrees_with_its_file_where_netem_is():
    script = Path(__file__).parent / "uml.sh"
    done = subprocess.run([script, sys.executable], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout
    assert "netem in the kernel" in done.stdout
    assert "every line and path is as asked for" in done.stdout
