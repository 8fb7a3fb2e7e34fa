"""Training script of ``benchmarks.memory.together``: a model that changes in place, without gradients or optimizer.

A step scales a sixth of the model's matrices by ``GROWTH`` and then sleeps, so the nodes have the processors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

import p2pdiloco

LAYERS = 24
ROUND = 24
GROWTH = 1.01
"""bfloat16 rounds anything less than a 256th away: nothing would be given, and payloads would have no bytes."""
STOPPED = "all steps are made"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class Creep(torch.optim.Optimizer):
    """Multiplies."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One."""
        self._steps += 1
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if index % 6 == self._steps % 6:
                    parameter.mul_(GROWTH)


def model_of(parameters: int) -> nn.Module:
    """Square bfloat16 matrices of about so many parameters."""
    side = max(8, int((parameters / LAYERS) ** 0.5) // 8 * 8)
    layers = [nn.Linear(side, side, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)  # what is regular would be compressed to nothing
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Found the run, and train it to its end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("state", type=Path)
    parser.add_argument("--parameters", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = model_of(int(options.parameters))
    optimizer = Creep(model.parameters())
    with p2pdiloco.DiLoCo(
        model,
        optimizer,
        run="together",
        found=True,
        tokens_per_step=1000,
        total_steps=options.steps,
        sync_every=ROUND,
        n_fragments=ROUND,
        fragment_sync_delay=3,
        state=options.state,
        node_options=("--listen", LOOPBACK, "--directory-listen", LOOPBACK),
    ) as outer:
        while not outer.is_complete:
            optimizer.step()
            time.sleep(options.step_s)
        print(STOPPED, flush=True)


if __name__ == "__main__":
    main()
