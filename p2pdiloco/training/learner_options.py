"""Options of the shipped script and of its speed trial, and what both do before they train."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import msgspec
import torch

from p2pdiloco.protocol.manifest import Manifest
from p2pdiloco.util.files import read_regular

# Niceness of training. Nodes on the same CPU need little time, but soon. Start-up runs at normal priority.
_NICENESS = 5


def parser_of_a_learner(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every learner has."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--manifest", type=Path, required=True, help="the run's manifest, MessagePack")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ...")
    parser.add_argument("--data", help="folder, or a file of documents, to train on")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json, if it is not among the data")
    parser.add_argument("--model", help="folder with the weights that the run's adapters are for")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0: by measured steps")
    return parser


def device_of(name: str) -> torch.device:
    """Return the device that ``--device`` names.

    Raises:
        ValueError: torch does not know it, or does not find it on this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name} is not a device that torch knows: use cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device {name}: torch sees no CUDA device here; install the driver and torch's build for it "
            "(https://pytorch.org), or train with --device cpu"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"--device {name}: torch sees no Apple GPU here, use --device cpu")
    return device


def setting(options: argparse.Namespace) -> tuple[torch.device, Manifest]:
    """Return a learner's device and its run's manifest, and set torch's threads.

    Raises:
        ValueError: the learner cannot train with these options.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")  # TF32 where a GPU has it
    device = device_of(options.device)
    manifest = msgspec.msgpack.decode(read_regular(options.manifest), type=Manifest)
    if manifest.config.model.kind == "external":
        raise ValueError(
            "the run's learners are training scripts: take part with p2pdiloco.DiLoCo, or join with --follow"
        )
    return device, manifest


def be_nice() -> None:
    """Lower this process's priority below that of nodes. Threads that torch makes for its first step inherit it."""
    os.nice(_NICENESS)
    # Linux divides the CPU among sessions before it considers niceness. A node's learner has a session of its own.
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")
