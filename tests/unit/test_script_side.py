"""What a training script and a learner load, and from where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from p2pdiloco.node.learner_process import COMMAND

pytestmark = pytest.mark.heavy

MEMORY_MB = 280
"""Of them torch alone takes 218."""
HEAVY = (
    "hivemind",
    "uvloop",
    "p2pdiloco.node",
    "p2pdiloco.peer",
    "p2pdiloco.transport.transport",
    "p2pdiloco.discovery.directory",
)
LOOK = """
import json, pathlib, sys
import p2pdiloco
p2pdiloco.DiLoCo
status = pathlib.Path("/proc/self/status")
peak = status.read_text().split("VmHWM:")[1].split()[0] if status.exists() else "0"
print(json.dumps({"modules": sorted(sys.modules), "peak_kb": int(peak)}))
"""


TRAIN = """
import sys
import torch
from p2pdiloco.protocol.manifest import InnerConfig, ModelConfig
from p2pdiloco.training.optimizers import inner_optimizers
from p2pdiloco.training.models import build_model, loss
model = build_model(ModelConfig(width=16, depth=1, heads=2, context=8), 1)
optimizers = inner_optimizers(model, InnerConfig(optimizer="muon"))
loss(model, torch.zeros(2, 9, dtype=torch.long)).backward()
for optimizer in optimizers:
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""


def test_a_learner_loads_no_compiler() -> None:
    assert subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_script_loads_neither_node_nor_directory_nor_transport() -> None:
    found = json.loads(subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True).stdout)
    assert "p2pdiloco.diloco" in found["modules"]
    assert [name for name in found["modules"] if name.startswith(HEAVY)] == []
    assert found["peak_kb"] <= MEMORY_MB * 1024


@pytest.mark.parametrize("name", ["peers", "p2pdiloco", "torch", "random"])
def test_what_lies_in_the_working_directory_does_not_become_the_learner(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise SystemExit('this is not what was meant')")
    ended = subprocess.run([*COMMAND, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "A peer's learner" in ended.stdout
