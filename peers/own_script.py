"""An example of a training script with its own model, data and training loop::

    p2pdiloco bootstrap --listen /ip4/127.0.0.1/tcp/31337
    python -m peers.own_script --state a --run sines --peer ADDRESS --found      # the first prints an INVITE
    python -m peers.own_script --state b --run sines --peer INVITE --seed 1      # any number of others
    python -m peers.own_script --state c                                         # alone: nothing changes

A small network learns a sum of sines. One of its layers is frozen, as the base model is with LoRA; another one
(BatchNorm) has statistics, which each peer keeps for itself. The integration tests run this file.
"""

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
    """Train, and write the results to ``result.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-seed", type=int, default=0, help="of the frozen layer")
    parser.add_argument("--run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--found", action="store_true")
    parser.add_argument("--access", choices=["open", "invite", "list"], default="invite")
    parser.add_argument("--spoil-at", type=int, default=0, help="from this step on the loss is NaN")
    parser.add_argument("--leave-s", default="20", help="for how long unmerged progress keeps it from leaving")
    parser.add_argument("--step-s", type=float, default=0.04, help="what a larger model would take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.base_seed)
    frozen = nn.Linear(32, 32).requires_grad_(False)  # as with LoRA: it does not travel, and is the same everywhere
    torch.manual_seed(options.seed)
    before = frozen.weight.clone()
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), frozen, nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
    leaving = ("--leave-s", options.leave_s)
    with p2pdiloco.DiLoCo(
        model,
        optimizer,
        run=options.run,
        initial_peers=options.peer,
        found=options.found,
        access=options.access,
        tokens_per_step=16,
        total_steps=options.steps,
        sync_every=10,
        n_fragments=2,
        state=options.state,
        node_options=(*loopback, *leaving),
    ) as outer:
        first = 0.0
        for step in range(100 * options.steps):
            x = torch.randn(16, 8)
            loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
            if options.spoil_at and step >= options.spoil_at:
                loss = loss * float("nan")
            loss.backward()
            outer.count(16, float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            first = first or float(loss.detach())
            time.sleep(options.step_s)
            if outer.is_complete or (options.run is None and step >= 5):
                break
    outer.load_global()
    assert torch.equal(frozen.weight, before)
    total = float(sum(p.detach().double().sum() for p in model.parameters() if p.requires_grad))
    with torch.no_grad():
        evaluated = model.eval()(torch.linspace(-2, 2, 64).view(8, 8)).flatten().tolist()
        x = torch.randn(4096, 8)
        loss = float((model.train()(x).squeeze(1) - x.sin().sum(1)).square().mean())
    report = {"first": first, "loss": loss, "sum": total, "step": outer.global_step, "evaluated": evaluated}
    (options.state / "result.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
