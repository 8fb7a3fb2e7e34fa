"""One worker of any system, in its site: ``python -m benchmarks.wan.worker '{...}'``.

It exchanges one JSON object per line in both directions (``benchmarks.wire.line``). ``connect`` makes it join the
others; ``go`` makes it train from a common moment on, for ``steps`` steps or ``cap_s`` seconds, and report each step.
The end of its input ends it. Snapshots are evaluated after the last step, when link and clock no longer matter.
"""

from __future__ import annotations

import importlib
import os
import time
import warnings
from typing import Any

warnings.filterwarnings("ignore")

import torch  # noqa: E402

from benchmarks.wan.task import BATCH, DATA_PARALLEL, Judge, Snapshot, Task, copies  # noqa: E402
from benchmarks.wire import line  # noqa: E402

SYSTEMS = {
    "ddp": ("benchmarks.wan.systems.collective", "DataParallel"),
    "ddp-bf16": ("benchmarks.wan.systems.collective", "DataParallel"),
    "diloco": ("benchmarks.wan.systems.collective", "SynchronousDiLoCo"),
    "torchft": ("benchmarks.wan.systems.torchft_streaming", "StreamingDiLoCo"),
    "hivemind": ("benchmarks.wan.systems.hivemind_local", "LocalUpdates"),
    "p2pdiloco": ("benchmarks.wan.systems.p2p", "Peer"),
}


def main() -> None:
    """See the module."""
    config = line.begin()
    module, name = SYSTEMS[config["system"]]
    task = Task(config["index"], config["step_s"], config.get("batch", BATCH))
    system: Any = getattr(importlib.import_module(module), name)(config, task)
    line.answer(event="made", address=system.address)
    for command in line.commands():
        match command["do"]:
            case "connect":
                system.connect(command)
                line.answer(event="connected")
            case "go":
                _train(config, task, system, command)
    os._exit(0)


def _train(config: line.Message, task: Task, system: Any, command: line.Message) -> None:
    start, interface = command["at"], config["interface"]
    every = config["snapshot_every"] if config["index"] == 0 else 0
    taken: list[tuple[Snapshot, Snapshot]] = []
    time.sleep(max(0.0, start - time.monotonic()))
    before = line.counters(interface)
    number, blocked_s = 0, 0.0
    task.pace.forget()  # hivemind tries the optimizer out
    while number < command["steps"] and time.monotonic() < start + command["cap_s"]:
        began, compute_end, loss = task.step(system.model, number, system.step)
        number += 1
        ended = time.monotonic()
        is_inside = config["system"] in DATA_PARALLEL  # it waits in the backward pass
        blocked = max(0.0, ended - began - task.pace.step_s) if is_inside else ended - compute_end
        blocked_s += blocked
        counters = line.counters(interface)
        line.answer(
            event="step",
            number=number,
            at=ended - start,
            took=ended - began,
            blocked=blocked,
            loss=loss,
            late=task.pace.late_steps,
            sent=counters["sent"] - before["sent"],
            received=counters["received"] - before["received"],
        )
        if every and number % every == 0:
            at = time.monotonic() - start
            taken.append(((at, number, system.global_parameters()), (at, number, copies(task.model))))
    line.answer(
        event="trained",
        steps=number,
        tokens=number * task.tokens,
        wall_s=time.monotonic() - start,
        blocked_s=blocked_s,
        late_steps=task.pace.late_steps,
        late_s=task.pace.late_s,
        waited_s=task.pace.waited_s,
    )
    if taken:
        judge = Judge(task.corpus)
        for whole, own in taken:
            loss = judge.loss(whole[2])
            is_same = all(torch.equal(a, b) for a, b in zip(whole[2], own[2], strict=True))
            own_loss = loss if is_same else judge.loss(own[2])
            line.answer(event="evaluated", at=whole[0], number=whole[1], whole=loss, own=own_loss)
    system.close()
    line.answer(event="done")


if __name__ == "__main__":
    main()
