"""What this machine would give to a run, and whether it has what that takes: ``doctor``'s answer before joining.

Rules of this file:
1. The speed is measured with the run's model, data and steps, in a process of its own (``training/speed_trial.py``);
   the rest is arithmetic with the sizes that docs/operating.md tells.
2. What others tell of their speed is believed for a percentage, and for nothing else.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from p2pdiloco.node.checkup import Finding, disk, memory_bytes
from p2pdiloco.peer.options import LearnerOptions
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.training import PASSIVE
from p2pdiloco.training.speed_trial import Trial
from p2pdiloco.wire.control_messages import PeerStatus

COMMAND = (sys.executable, "-P", "-m", "p2pdiloco.training.speed_trial")
NODE_BYTES_A_PARAMETER, NODE_BYTES = 9, 45 << 20
PROCESS_BYTES = 250 << 20
"""Python and torch of a node."""
CHECKPOINT_BYTES_A_PARAMETER = 8
INNER_STATE_BYTES_A_PARAMETER = 8
LOG_BYTES = 100 << 20
SENT_BYTES_A_PARAMETER = 0.44
"""Of one exchange: int4 with its scales (docs/wire.md)."""
LIMIT_S = 240.0
"""Beyond the steps themselves: to load torch, data and model."""


class Gift(msgspec.Struct, frozen=True, kw_only=True):
    """In numbers, for ``--json``. None: not known."""

    tokens_per_s: float | None = None
    share: float | None = None
    """Of what all would train then."""
    memory_bytes: int = 0
    disk_bytes: int = 0
    up_bytes_per_s: float | None = None


async def tried(manifest: Manifest, options: LearnerOptions, seconds: float) -> Trial:
    """Make the learner's steps for so long."""
    with TemporaryDirectory(prefix="p2pdiloco-doctor-") as folder:
        path = Path(folder) / "manifest.msgpack"
        await asyncio.to_thread(path.write_bytes, manifest.encode())
        words = ["--manifest", str(path), "--seconds", str(seconds), "--device", options.device]
        for name, value in (("data", options.data), ("tokenizer", options.tokenizer), ("model", options.model)):
            words += [f"--{name}", str(value)] if value else []
        words += ["--threads", str(options.threads)]
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *words,
            env={**PASSIVE, **os.environ},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), seconds + LIMIT_S)
        except TimeoutError:
            return Trial(trouble=f"no three steps within {seconds + LIMIT_S:.0f} s: this machine is too slow for it")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    try:
        return msgspec.json.decode(out.splitlines()[-1] if out else b"", type=Trial)
    except msgspec.DecodeError:
        status = process.returncode or 0
        why = f"by signal {-status}" if status < 0 else f"with {status}"
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return Trial(trouble=f"the learner's process ended {why} ({''.join(last)[:300]}): has it enough memory?")


def judged(
    manifest: Manifest,
    trial: Trial | None,
    peers: Sequence[PeerStatus],
    state: Path,
    free_memory: int | None = None,
    keeps: int = 2,
) -> tuple[list[Finding], Gift]:
    """Findings for people and numbers for programs. ``trial`` None: nothing was tried; ``peers``: what others tell;
    ``keeps``: checkpoints that stay."""
    parameters = Layout.of(manifest).elements
    findings = [_data(trial)] if trial is not None and not trial.trouble else []
    findings.append(_speed(manifest, trial, peers))
    node = NODE_BYTES_A_PARAMETER * parameters + NODE_BYTES + PROCESS_BYTES
    learner = trial.bytes if trial is not None and trial.bytes else 16 * parameters + PROCESS_BYTES
    is_measured = bool(trial is not None and trial.bytes)
    findings.append(_memory(node, learner, is_measured, memory_bytes() if free_memory is None else free_memory))
    room = (keeps + 1) * CHECKPOINT_BYTES_A_PARAMETER + INNER_STATE_BYTES_A_PARAMETER
    needs = room * parameters + LOG_BYTES
    findings.append(disk(state, needs))
    gift = Gift(memory_bytes=node + learner, disk_bytes=needs)
    if trial is not None and trial.step_s:
        up = _up_bytes_per_s(manifest, parameters, trial.step_s, len(peers) + 1)
        findings.append(_link(up))
        share = _share(trial.tokens_per_s, peers)
        gift = msgspec.structs.replace(gift, tokens_per_s=trial.tokens_per_s, share=share, up_bytes_per_s=up)
    return findings, gift


def _speed(manifest: Manifest, trial: Trial | None, peers: Sequence[PeerStatus]) -> Finding:
    if trial is None:
        return Finding("note", "speed", "not measured (--seconds 0)")
    if trial.trouble:
        return Finding("failure", "speed", "a learner cannot train here", trial.trouble)
    told = f"{trial.tokens_per_s:,.0f} tokens/s, {trial.step_s:.3f} s a step ({trial.steps} steps, "
    told += f"{trial.threads} thread{'s' * (trial.threads != 1)})"
    share = _share(trial.tokens_per_s, peers)
    if share is None:
        return Finding("ok", "speed", told)
    told += f": {share:.1%} of what all would train"
    left = _left_s(manifest, trial, peers)
    if left is not None and left < 120.0:
        remedy = "the run is nearly over: p2pdiloco fetch gets what comes out"
        return Finding("note", "speed", f"{told}; the run ends in {left:.0f} s", remedy)
    if share < 0.01:
        remedy = "join with a GPU (--device), more --threads, or follow with --follow"
        return Finding("note", "speed", f"{told}: others hardly feel it", remedy)
    return Finding("ok", "speed", told)


def _data(trial: Trial) -> Finding:
    if trial.has_blocks:
        return Finding("ok", "data", "it is there, and the run's")
    return Finding(
        "note",
        "data",
        "it is not the run's, byte for byte: this peer would train random pieces of its own",
        "give --data as the founder has it, if it is to train what nobody else trains",
    )


def _memory(node: int, learner: int, is_measured: bool, free: int) -> Finding:
    how = "measured" if is_measured else "estimated"
    told = f"{(node + learner) / 1e9:.2f} GB needed (node {node / 1e9:.2f}, learner {learner / 1e9:.2f}, {how}), "
    told += f"{free / 1e9:.2f} free"
    if free >= 1.25 * (node + learner):
        return Finding("ok", "memory", told)
    remedy = "stop what uses it, take a machine with more, or follow without training (--follow)"
    return Finding("warning" if free >= node + learner else "failure", "memory", told, remedy)


def _link(up: float) -> Finding:
    return Finding(
        "ok", "link", f"{up * 8 / 1e6:,.2f} Mbit/s in each direction on average; --up RATE keeps it in bounds"
    )


def _up_bytes_per_s(manifest: Manifest, parameters: int, step_s: float, peers: int) -> float:
    """What a learner sends to owners, and as an owner to all others, of each parameter once in a round of turns."""
    copies = 1.0 + (peers - 1) / peers
    return SENT_BYTES_A_PARAMETER * parameters * copies / (manifest.config.schedule.sync_every * step_s)


def _share(tokens_per_s: float, peers: Sequence[PeerStatus]) -> float | None:
    others = sum(one.tokens_per_second for one in peers if 0.0 < one.tokens_per_second < math.inf)
    return tokens_per_s / (tokens_per_s + others) if others else None


def _left_s(manifest: Manifest, trial: Trial, peers: Sequence[PeerStatus]) -> float | None:
    step = max((one.step for one in peers), default=0)
    return (manifest.config.inner.steps - step) * trial.step_s if peers else None
