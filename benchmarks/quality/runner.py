"""Runs cells of the laboratory one after the other and keeps their results on disk.

A result is written as one line as soon as it is there, and a cell that has a line is not run again. So a run may be
stopped, and several processes may share a list: a file with a process's id claims a cell. A cell that fails is reported
and skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from benchmarks import record
from benchmarks.quality.laboratory import Laboratory
from benchmarks.quality.settings import Setting, from_row, to_row

RESULTS = Path(__file__).parent / "results" / "rows.jsonl"
CLAIMS = Path("out/quality/claims")


def rows(path: Path = RESULTS) -> dict[Setting, dict[str, Any]]:
    """The figures of all cells that were run, but for those of questions that are decided."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = ((from_row(line["settings"]), line["figures"]) for line in lines)
    return {setting: figures for setting, figures in found if setting is not None}


def work(
    cells: Iterable[Setting],
    path: Path = RESULTS,
    *,
    is_compiled: bool = True,
    device: str = "cpu",
    is_narrow: bool = True,
) -> None:
    """Run those cells that nobody has run or is running; see ``Laboratory`` for the options."""
    for setting in cells:
        if setting in rows(path) or not _claim(setting):
            continue
        if setting in rows(path):  # done while we claimed it
            continue
        began, cpu = time.monotonic(), time.process_time()
        try:
            result = Laboratory(setting, is_compiled=is_compiled, device=device, is_narrow=is_narrow).run()
        except (ValueError, RuntimeError) as error:
            print(f"failed: {changes(setting)}: {error}", flush=True)
            continue
        figures: dict[str, Any] = {key: round(value, 6) for key, value in result.figures.items()}
        figures["by_window"] = [round(float(x), 4) for x in result.losses]
        if device != "cpu":
            name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
            figures["device"] = name if is_narrow else f"{name}, float32"
        figures["cpu_s"] = round(time.process_time() - cpu, 1)
        figures["wall_s"] = round(time.monotonic() - began, 1)
        record.append(path, [record.row("quality", to_row(setting), figures)])
        print(f"{figures['loss']:.4f}  {figures['cpu_s']:6.1f} CPU s  {changes(setting)}", flush=True)


def changes(setting: Setting) -> str:
    """What differs from the defaults."""
    standard = to_row(Setting())
    return " ".join(f"{key}={value}" for key, value in to_row(setting).items() if value != standard[key]) or "defaults"


def _claim(setting: Setting) -> bool:
    CLAIMS.mkdir(parents=True, exist_ok=True)
    path = CLAIMS / hashlib.blake2b(msgspec.json.encode(setting), digest_size=10).hexdigest()
    try:
        if path.exists() and not _is_alive(int(path.read_text() or 0)):
            path.unlink()
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except (FileExistsError, FileNotFoundError, ValueError):
        return False
    return True


def _is_alive(pid: int) -> bool:
    return pid != os.getpid() and bool(psutil.pid_exists(pid))
