"""One process of ``benchmarks.gpu``: a transformer that trains on noise, alone or as a peer's script.

It prints an object when it is ready, starts when it reads a line, and prints its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import p2pdiloco
from benchmarks.memory import residence
from p2pdiloco.protocol.manifest import ModelConfig
from p2pdiloco.training.models import build_model, loss

HEAD = 64
LARGE = 1e8
"""Parameters, from which a model's vocabulary is as large as a language model's."""
WARM_STEPS = 3
LOOPBACK = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")


def shape(parameters: float, context: int) -> ModelConfig:
    """About so many: 12 times the width squared for each layer, and 11 layers a thousand of width as TinyLlama has."""
    width = max(HEAD, round((parameters * 1000 / (12 * 11)) ** (1 / 3) / HEAD) * HEAD)
    depth, vocabulary = max(2, round(width * 11 / 1000)), 32_000 if parameters > LARGE else 256
    return ModelConfig(width=width, depth=depth, heads=width // HEAD, context=context, vocabulary=vocabulary)


class Clock:
    """Times of steps: by the device's own events, which nobody waits for before the end."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._ticks: list[Any] = []

    def tick(self) -> None:
        """A step has been given to the device."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._ticks.append(event)
        else:
            self._ticks.append(time.perf_counter())

    def steps_s(self) -> list[float]:
        """Between two ticks each."""
        if self._is_cuda:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1e3 for a, b in zip(self._ticks, self._ticks[1:], strict=False)]
        return [b - a for a, b in zip(self._ticks, self._ticks[1:], strict=False)]


def say(**told: object) -> None:
    """To ``benchmarks.gpu``."""
    print(json.dumps(told), flush=True)


def bus(device: torch.device) -> dict[str, float]:
    """GB/s of page-locked copies of 256 MB to and from the device."""
    if device.type != "cuda":
        return {}
    host, there = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True), torch.empty(256 << 20, device=device)
    there = there.to(torch.uint8)
    found = {}
    for name, target, source in (("to_host", host, there), ("to_device", there, host)):
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        found[f"{name}_gb_s"] = host.numel() / statistics.median(times) / 1e9
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parameters", type=float, default=1.1e9)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sync-every", type=int, default=240)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--state", type=Path, help="join the run, with this state folder")
    parser.add_argument("--peers", nargs="*", default=[], help="bootstrap addresses")
    parser.add_argument("--founds", action="store_true")
    parser.add_argument("--after", type=Path, help="start when the run in this state folder has a page")
    parser.add_argument("--wait-for", type=int, default=1)
    parser.add_argument("--group", help="backend of a torch.distributed group of one rank")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    if options.group:
        dist.init_process_group(options.group, init_method=f"file://{options.state}.group", rank=0, world_size=1)
    config = shape(options.parameters, options.context)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(config, 0).to(device, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parameters = sum(p.numel() for p in model.parameters())
    batch = torch.randint(0, 256, (options.batch, options.context + 1), device=device)

    def step() -> None:
        value: Tensor = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    together: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if options.state is not None:
        together = p2pdiloco.DiLoCo(
            model,
            optimizer,
            run="gpu",
            initial_peers=options.peers,
            found=options.founds,
            access="open",
            tokens_per_step=options.batch * options.context,
            sync_every=options.sync_every,
            n_fragments=options.fragments,
            fragment_sync_delay=options.sync_every // options.fragments,
            state=options.state,
            wait_for_peers=options.wait_for,
            node_options=LOOPBACK,
        )
    for _ in range(WARM_STEPS):
        step()
    while options.after is not None and not any(options.after.glob("*/page.port")):
        time.sleep(0.5)
    machine = {**bus(device), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    with together as outer:
        say(parameters=parameters, **machine)
        sys.stdin.readline()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock, before = Clock(device), 0.0 if outer is None else outer.swarm.get("version", 0.0)
        clock.tick()
        host_s = []
        for _ in range(options.steps):
            began = time.perf_counter()
            step()
            host_s.append(time.perf_counter() - began)
            clock.tick()
        times = clock.steps_s()
        longest = sorted(range(len(times)), key=times.__getitem__)[-12:]
        say(
            median_s=statistics.median(times),
            mean_s=statistics.fmean(times),
            worst_s=max(times),
            longest=[(index, times[index], host_s[index]) for index in sorted(longest)],
            rounds=0.0 if outer is None else outer.swarm.get("version", 0.0) - before,
            peers=0 if outer is None else len(outer.peers),
            device_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
            **{f"host_{name}": size for name, size in residence.components().items()},
        )
        sys.stdin.readline()  # nobody leaves while others are measured
    say(ended=True)


if __name__ == "__main__":
    main()
