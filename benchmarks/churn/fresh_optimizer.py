"""Loss of a learner that returns without the state of its inner optimizer.

    python -m benchmarks.churn.fresh_optimizer --json out/fresh.jsonl --plot out/fresh.png

One learner trains, then continues in four ways on the same batches: with its own state, with a state that is some steps
old (its last save), with a fresh optimizer that warms up, and with a fresh optimizer at full rate. Model, optimizers,
learning rate, clipping and corpus are those of the built-in learner. Figures are gaps in held-out loss to the first
way: mean and standard error over seeds, which share batches and held-out windows.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks import bench
from benchmarks.plots import figure
from p2pdiloco.node.run_creation import SHIPPED
from p2pdiloco.protocol.manifest import DataConfig, RunConfig
from p2pdiloco.training.corpus import Batches, load_corpus
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import held_out_loss
from p2pdiloco.training.models import build_model, loss
from p2pdiloco.training.optimizers import inner_optimizers, learning_rate

AT = (1, 5, 10, 20, 50, 100, 200)
"""Steps after coming back."""
WAYS = ("own state", "old state", "fresh, warmed up", "fresh, full rate")
OLD = 50
"""Steps since the save."""
SAMPLES = 256

Optimizers = list[torch.optim.Optimizer]


def train(
    config: RunConfig, model: nn.Module, optimizers: Optimizers, batches: Batches, steps: range, own_steps: int
) -> None:
    """Inner steps, as the learner makes them. ``own_steps``: what the optimizers have made before."""
    for index, step in enumerate(steps):
        value = loss(model, next(batches))
        value.backward()  # type: ignore[no-untyped-call]
        if config.inner.clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config.inner, step, own_steps + index)
            optimizer.step()
            optimizer.zero_grad()


def one(config: RunConfig, corpus: Corpus, seed: int, before: int) -> dict[str, list[float]]:
    """All ways with one seed: held-out losses at ``AT``."""
    inner, context = config.inner, config.model.context
    model = build_model(config.model, seed)
    optimizers = inner_optimizers(model, inner)
    batches = Batches(corpus, context, inner.batch, f"fresh/{seed}")
    train(config, model, optimizers, batches, range(before - OLD), 0)
    old = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
    train(config, model, optimizers, batches, range(before - OLD, before), before - OLD)
    newest = [optimizer.state_dict() for optimizer in optimizers]
    found: dict[str, list[float]] = {}
    for way in WAYS:
        mine = copy.deepcopy(model)
        again = inner_optimizers(mine, inner)
        if not way.startswith("fresh"):
            for optimizer, state in zip(again, newest if way == "own state" else old, strict=True):
                optimizer.load_state_dict(copy.deepcopy(state))
        own = 0 if way == "fresh, warmed up" else before
        data = Batches(corpus, context, inner.batch, f"fresh/{seed}/after")
        done, losses = 0, []
        for at in AT:
            train(config, mine, again, data, range(before + done, before + at), own + done)
            done = at
            losses.append(held_out_loss(mine, corpus, context, SAMPLES, "cpu"))
        found[way] = losses
        print(f"seed {seed}  {way:<17} " + " ".join(f"{value:.4f}" for value in losses), flush=True)
    return found


def gaps(found: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Relative to the way with its own state: mean and standard error over seeds, at each of ``AT``."""
    figures: dict[str, Any] = {"steps": AT}
    for way in WAYS[1:]:
        shares = [[a / b - 1.0 for a, b in zip(f[way], f[WAYS[0]], strict=True)] for f in found]
        columns = list(zip(*shares, strict=True))
        figures[way] = [round(statistics.fmean(column), 5) for column in columns]
        figures[f"{way}: error"] = [
            round(statistics.stdev(column) / math.sqrt(len(column)), 5) if len(column) > 1 else None
            for column in columns
        ]
    return figures


def plot(path: Path, figures: dict[str, Any]) -> None:
    """Gaps over steps."""
    with figure(path, size=(7, 4)) as axes:
        for way in WAYS[1:]:
            errors = [100 * (error or 0.0) for error in figures[f"{way}: error"]]
            axes.errorbar(AT, [100 * gap for gap in figures[way]], errors, label=way, marker="o", capsize=3)
        axes.set(xscale="log", xlabel="inner steps after coming back", ylabel="held-out loss against the own state, %")
        axes.set_xticks(AT, [str(at) for at in AT])
        axes.axhline(0.0, color="#9aa5b1", linewidth=0.8)
        axes.legend()


def main() -> None:
    """Measure, print, write."""
    parser = bench.parser(__doc__)
    parser.add_argument("--config", type=Path, default=SHIPPED / "stdlib-tiny.toml", help="configuration of the run")
    parser.add_argument("--before", type=int, default=400, help="steps before the learner leaves")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = msgspec.toml.decode(options.config.read_bytes(), type=RunConfig)
    corpus = load_corpus(DataConfig(kind="stdlib"), context=config.model.context)
    figures = gaps([one(config, corpus, seed, options.before) for seed in range(options.seeds)])
    print(json.dumps(figures, indent=1))
    bench.write(options, "churn/fresh_optimizer", {"config": options.config.name}, figures)
    if options.plot is not None:
        plot(options.plot, figures)


if __name__ == "__main__":
    main()
