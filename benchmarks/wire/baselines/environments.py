"""Virtual environments of the baselines, created at first use, because their pinned versions must not touch ours.

``python -m benchmarks.wire.baselines.environments`` creates all of them under ``out/venvs``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2] / "out" / "venvs"
BASELINES = ("hivemind", "torchft")
TORCH = "2.13.0"
"""Installed first, as its CPU build: what comes after is content with it, and would pull gigabytes otherwise."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class SetupError(Exception):
    """The environment cannot be made; the text says why."""


def python_of(baseline: str) -> Path:
    """The interpreter of the environment, which is made if it is not there.

    Raises:
        SetupError: pip failed.
    """
    folder = ROOT / baseline
    python, requirements = folder / "bin" / "python", HERE / f"{baseline}.txt"
    ready = folder / "ready.txt"
    if ready.exists() and ready.read_text() == requirements.read_text():
        return python
    print(f"making {folder} (once) ...", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "-q"]
    try:
        _run([*pip, f"torch=={TORCH}+cpu"])
    except SetupError:
        _run([*pip, f"torch=={TORCH}", "--index-url", CPU_INDEX])
    _run([*pip, "-r", str(requirements)])
    shutil.copyfile(requirements, ready)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    for name in BASELINES:
        print(python_of(name))
