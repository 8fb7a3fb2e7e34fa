"""An example of Lightning's Trainer in a run (needs the extra lightning)::

    p2pdiloco bootstrap --listen /ip4/127.0.0.1/tcp/31337
    python -m peers.lightning_module --state a --run sines --peer ADDRESS --found      # the first prints an INVITE
    python -m peers.lightning_module --state b --run sines --peer INVITE --seed 1      # any number of others

A small network learns a sum of sines. The integration tests run this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from p2pdiloco.integrations.lightning import DiLoCoCallback

BATCH = 16


class Sines(LightningModule):  # type: ignore[misc]
    """The model, its loss and its optimizer."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the squared error of a batch."""
        (x,) = batch
        loss: Tensor = (self.layers(x).squeeze(1) - x.sin().sum(1)).square().mean()
        self.losses.append(float(loss.detach()))
        time.sleep(self.step_s)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> int:
    """Train, and write the results to ``result.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--found", action="store_true")
    parser.add_argument("--access", choices=["open", "invite", "list"], default="invite")
    parser.add_argument("--step-s", type=float, default=0.04, help="what a larger model would take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(options.seed)
    module = Sines(options.step_s)
    loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
    callback = DiLoCoCallback(
        run=options.run,
        tokens=lambda batch: len(batch[0]),
        initial_peers=options.peer,
        found=options.found,
        access=options.access,
        total_steps=options.steps,
        sync_every=10,
        n_fragments=2,
        state=options.state / "peer",
        node_options=loopback,
    )
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        max_steps=10 if options.run is None else 100 * options.steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=options.state,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=BATCH, shuffle=True))
    report = {
        "first": module.losses[0],
        "last": sum(module.losses[-20:]) / len(module.losses[-20:]),
        "sum": float(sum(p.detach().double().sum() for p in module.parameters())),
        "steps": trainer.global_step,
    }
    (options.state / "result.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
