"""A training script as a user would write it: its own model, data and loop; the test gives it a run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import p2pdiloco


def main() -> int:
    """Train, and write what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--found", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    model[2].requires_grad_(False)  # as with LoRA: it does not travel
    frozen = model[2].weight.clone()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--host_maddrs", "/ip4/127.0.0.1/tcp/0")
    with p2pdiloco.DiLoCo(
        model,
        optimizer,
        run=options.run,
        initial_peers=options.peer,
        found=options.found,
        tokens_per_step=16,
        total_steps=options.steps,
        sync_every=10,
        n_fragments=2,
        outer_momentum=0.3,
        state=options.state,
        node_options=loopback,
    ) as outer:
        first = last = 0.0
        for step in range(100 * options.steps):
            x = torch.randn(16, 8)
            loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
            loss.backward()
            outer.count(16, float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            last = float(loss.detach())
            first = first or last
            time.sleep(0.04)  # a larger model would take as long
            if outer.is_complete or (options.run is None and step >= 5):
                break
    outer.load_global()
    assert torch.equal(model[2].weight, frozen)
    total = float(sum(p.detach().double().sum() for p in model.parameters() if p.requires_grad))
    report = {"first": first, "last": last, "sum": total, "step": outer.global_step}
    (options.state / "result.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
