"""Data sets of the Hugging Face hub, with a stand-in for it on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub import Hub, hub_here

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "datasets", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)


def python(home: Path, hub: Hub, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a machine whose hub is this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.address}
    environment |= {"HF_HUB_DISABLE_XET": "1", **variables}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=home, env=environment, capture_output=True, text=True, timeout=150
    )


READ = """
from p2pdiloco.integrations.datasets import load_texts
print(list(load_texts("ann/texts")), list(load_texts("hf://datasets/ann/texts")))
"""


def test_a_data_set_is_read_by_its_name(tmp_path: Path) -> None:
    with hub_here() as hub:
        hub.repositories["ann/texts"] = {"train.jsonl": b'{"text": "one"}\n{"text": "two"}\n'}
        done = python(tmp_path, hub, "-c", READ)
        assert done.stdout.split() == ["['one',", "'two']"] * 2, done.stderr[-3000:]
