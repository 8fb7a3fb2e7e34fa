"""Merge rules against members that lie: the laboratory of ``benchmarks.quality`` with some learners that contribute
what an attacker would.

    python -m benchmarks.hostile.rules                                   # 1 of 4, plain mean, every attack: ten minutes
    python -m benchmarks.hostile.rules --learners 8 --liars 2 --merge rda --rules shipped bounds

A row is a rule and an attack: the held-out loss, and its ratio to the loss of the same run in which the liars
contribute nothing, by the shipped rule. Both runs have the same honest tokens. ``honest`` has no liars: its ratio is to
the rule ``bounds``, and shows what a rule costs. Everything else is the product's: int4 both ways, quorum, outer step.
The liars know all honest contributions of a merge, and each other. They declare as many tokens and steps as a peer
accepts (rule P3a), and send vectors a hundred times as long as honest ones where their attack allows it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks import bench
from benchmarks.quality import data
from benchmarks.quality.exchange import pack
from benchmarks.quality.laboratory import Contribution, Laboratory
from benchmarks.quality.learners import Group, Round
from benchmarks.quality.settings import Setting
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.training.dataset_files import Corpus

LONG: Final = 100.0
MOST_STEPS, MOST_BATCHES = 64, 16
"""Rounds of steps, and run's batches a step, that rule P3a lets a contribution declare."""
STALE_ROUNDS: Final = 10

RULES: dict[str, dict[str, Any]] = {
    "shipped": {"bounded": True, "agreement": True},
    "bounds": {"bounded": True},
    "none": {},
}
"""``bounds``: weights and lengths are bounded by the others' medians, and agreement does not count. ``none``: declared
weights, any length."""
MERGES: dict[str, dict[str, Any]] = {
    "direct": {"outer_rate": 1.0, "outer_momentum": 0.0, "merge": "direct", "sync_every": 6},
    "rda": {"outer_rate": 0.7, "outer_momentum": 0.4, "merge": "rda", "sync_every": 24, "correction": True},
}
CASES: dict[str, dict[str, Any]] = {
    "equal": {},
    "parts": {"data": "parts"},
    "languages": {"data": "languages"},
    "speeds": {"speeds": (1.0, 1.0, 2.0, 4.0)},
    "one-fast": {"speeds": (1.0, 1.0, 1.0, 8.0)},
    "away": {"absent": 0.5},
}
Attack = Callable[["LyingLaboratory", ShardId, int, Tensor, Tensor], Tensor]
"""Makes a liar's gradient from the shard, the liar's index, its own gradient, and all honest ones."""


class LyingLaboratory(Laboratory):
    """A run in which ``liars`` learners, the last ones or one of each so many, contribute what an attack makes."""

    def __init__(self, setting: Setting, text: Corpus, liars: int, attack: str, *, are_spread: bool = False) -> None:
        self.liars, self.attack, self.are_spread = liars, attack, are_spread
        self.generator = torch.Generator().manual_seed(99)
        self.remembered: dict[tuple[str, int, int], Tensor] = {}
        self.past: dict[tuple[int, int], list[Tensor]] = {}
        super().__init__(setting, text)
        self.initial = self.exchange.theta.clone()

    def is_liar(self, index: int) -> bool:
        """Whether the learner of this index lies."""
        if self.are_spread:
            return (index + 1) % (len(self.members) // self.liars) == 0
        return index >= len(self.members) - self.liars

    def random(self, like: Tensor) -> Tensor:
        """A random vector."""
        return torch.randn(like.shape, generator=self.generator)

    def first(self, name: str, shard: ShardId, index: int, value: Tensor) -> Tensor:
        """The first ``value`` that was given for this name, shard and index."""
        return self.remembered.setdefault((name, shard, index), value)

    def moved(self, shard: ShardId) -> Tensor:
        """How far the run has moved the shard's parameters."""
        span = self.exchange.span(shard)
        found: Tensor = self.exchange.theta[span] - self.initial[span]
        return found if float(found.norm()) else torch.ones_like(found)

    def _train(self, group: Group, now: float) -> None:
        if self.attack != "labels":
            super()._train(group, now)
            return
        sound = group.stream.next

        def poisoned() -> Tensor:
            windows = sound()
            for place, member in enumerate(group.members):
                if self.is_liar(member):
                    windows[place] = torch.randint(0, 256, windows[place].shape, generator=self.generator)
            return windows

        group.stream.next = poisoned  # type: ignore[method-assign]
        try:
            super()._train(group, now)
        finally:
            group.stream.next = sound  # type: ignore[method-assign]

    def _sent(self, sync_round: Round, shard: ShardId, index: int) -> Contribution:
        own = super()._sent(sync_round, shard, index)
        if not self.is_liar(index) or self.attack == "honest":
            return own
        if self.attack == "absent":
            return own._replace(steps=0, tokens=0)
        honest = [given.parcels[shard].values for i, given in sync_round.given.items() if not self.is_liar(i)]
        if not own.steps or not honest:
            return own
        name = self.attack
        if name == "mixed":  # a different one each
            name = ("anti-mean", "constant drift", "noise", "flip", "undo", "inner product")[index % 6]
        rows = torch.stack(honest)
        found = ATTACKS[name](self, shard, index, sync_round.given[index].parcels[shard].values, rows)
        if name not in EXACT:
            found = found * (LONG * float(rows.norm(dim=1).mean()) / max(float(found.norm()), 1e-30))
        steps = MOST_STEPS * self.setting.sync_every
        tokens = MOST_BATCHES * self.setting.step_tokens * steps
        return Contribution(pack(self.setting.up, found).gradient, steps, tokens)


def _stale(lab: LyingLaboratory, shard: ShardId, index: int, own: Tensor, honest: Tensor) -> Tensor:
    past = lab.past.setdefault((shard, index), [])
    past.append(own.clone())
    return past[max(0, len(past) - 1 - STALE_ROUNDS)]


def _hidden(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Behind a part of the honest mean, so that the lie's cosine with an honest contribution is ``share`` of theirs."""

    def hide(direction: Tensor, honest: Tensor) -> Tensor:
        unit = honest / honest.norm(dim=1, keepdim=True)
        direction = direction - unit.T @ (torch.linalg.pinv(unit @ unit.T) @ (unit @ direction))
        mean, cosines = unit.mean(0), unit @ unit.T
        others = cosines[~torch.eye(len(unit), dtype=torch.bool)]
        usual = float(others.median()) if len(others) else 1.0
        size = float(mean.norm())
        part = min(1.0, max(0.0, share * usual / size))
        hidden: Tensor = part * mean / size + math.sqrt(1.0 - part**2) * direction / direction.norm()
        return hidden

    return hide


def _against_one(honest: Tensor) -> Tensor:
    """Against the first learner alone and with the others: a median does not see it."""
    unit = honest / honest.norm(dim=1, keepdim=True)
    rest = unit[1:]
    away = unit[0] - rest.T @ (torch.linalg.pinv(rest @ rest.T) @ (rest @ unit[0]))
    toward = rest.mean(0)
    found: Tensor = 0.3 * toward / toward.norm() - 0.95 * away / away.norm()
    return found


_two_thirds, _a_quarter = _hidden(0.67), _hidden(0.26)

ATTACKS: dict[str, Attack] = {
    "flip": lambda lab, shard, index, own, honest: -own,
    "anti-mean": lambda lab, shard, index, own, honest: -honest.mean(0),
    "x10": lambda lab, shard, index, own, honest: 10.0 * own,
    "x1000": lambda lab, shard, index, own, honest: 1000.0 * own,
    "noise": lambda lab, shard, index, own, honest: lab.random(own),
    "random drift": lambda lab, shard, index, own, honest: lab.first("drift", shard, -1, lab.random(own)),
    "constant drift": lambda lab, shard, index, own, honest: torch.ones_like(own),
    "undo": lambda lab, shard, index, own, honest: lab.moved(shard),
    "ALIE": lambda lab, shard, index, own, honest: honest.mean(0) - 1.5 * honest.std(0),
    "inner product": lambda lab, shard, index, own, honest: -0.5 * honest.mean(0),
    "replay": lambda lab, shard, index, own, honest: lab.first("replay", shard, index, own.clone()),
    "stale by 10": _stale,
    "zeros": lambda lab, shard, index, own, honest: torch.zeros_like(own),
    "labels": lambda lab, shard, index, own, honest: own,
    "against one": lambda lab, shard, index, own, honest: _against_one(honest),
    "hidden drift": lambda lab, shard, index, own, honest: _two_thirds(torch.ones_like(own), honest),
    "hidden drift, a quarter": lambda lab, shard, index, own, honest: _a_quarter(torch.ones_like(own), honest),
    "hidden undo": lambda lab, shard, index, own, honest: _two_thirds(lab.moved(shard), honest),
}
"""Sources: ALIE arXiv 1902.06156, inner product arXiv 1903.03936; the others are plain."""
EXACT = ("x10", "x1000", "ALIE", "inner product", "replay", "stale by 10", "zeros", "labels")
"""Attacks of a length of their own. The others are as long as the rule lets them be."""


def setting_of(case: str, merge: str, rule: str, learners: int, steps: int, seed: int, groups: int = 1) -> Setting:
    """The small model of the laboratory."""
    return Setting(
        groups=groups,
        seed=seed,
        learners=learners,
        batch=8 * learners,
        steps=steps,
        inner="muon",
        learning_rate=8e-3,
        final_share=0.0,
        decay_share=0.95,
        warmup=20,
        fragments=6,
        overlap=3,
        max_shard=65536,
        **RULES[rule],
        **MERGES[merge],
        **CASES[case],
    )


def measured(setting: Setting, liars: int, attack: str, *, are_spread: bool = False) -> dict[str, float]:
    """Run one cell; a run that ends in numbers that are none has an infinite loss."""
    text = data.languages() if setting.data == "languages" else data.corpus()
    pieces = text.held_out[: text.held_out.numel() // 4096 * 4096].view(-1, 4096)
    held_out = pieces[:: max(1, len(pieces) // 17)].flatten()
    corpus = Corpus(train=text.train, held_out=held_out)
    laboratory = LyingLaboratory(setting, corpus, liars, attack, are_spread=are_spread)
    try:
        figures = laboratory.run().figures
    except (ValueError, RuntimeError, OverflowError):
        return {"loss": math.inf, "lowered": 0.0}
    loss = figures["loss"]
    return {"loss": loss if math.isfinite(loss) else math.inf, "lowered": figures["lowered_share"]}


def main() -> None:
    """The command line."""
    parser = bench.parser(__doc__, rows="rule and attack", has_plot=False)
    parser.add_argument("--learners", type=int, default=4, help="all of them")
    parser.add_argument("--liars", type=int, default=1, help="of them")
    parser.add_argument("--groups", type=int, default=1, help="whose merges are merged; liars are in the last ones")
    parser.add_argument("--spread", action="store_true", help="liars are in all groups, evenly")
    parser.add_argument("--steps", type=int, default=150, help="inner steps of each learner")
    parser.add_argument("--merge", choices=MERGES, default="direct", help="plain mean every 6 steps, or RDA every 24")
    parser.add_argument("--case", choices=CASES, default="equal", help="the honest learners' data and speeds")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="what bounds a contribution")
    parser.add_argument("--attacks", nargs="+", default=["honest", *ATTACKS, "mixed"], help="names, or honest")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1], help="the loss is their mean")
    options = parser.parse_args()
    if options.liars < 1 or options.learners % options.groups or (options.spread and options.learners % options.liars):
        parser.error("--learners must be a multiple of --groups, and with --spread of --liars")
    cells: dict[tuple[str, str, int], dict[str, float]] = {}

    def cell(rule: str, attack: str, seed: int) -> dict[str, float]:
        key = (rule, attack, seed)
        if key not in cells:
            shape = (options.learners, options.steps, seed, options.groups)
            setting = setting_of(options.case, options.merge, rule, *shape)
            cells[key] = measured(setting, options.liars, attack, are_spread=options.spread)
        return cells[key]

    table: dict[str, dict[str, Any]] = {}
    for attack in options.attacks:
        row: dict[str, Any] = {}
        for rule in options.rules:
            base = ("bounds", "honest") if attack == "honest" else ("shipped", "absent")
            pairs = [(cell(rule, attack, seed), cell(*base, seed)) for seed in options.seeds]
            row[rule] = statistics.fmean(found["loss"] / reference["loss"] for found, reference in pairs)
            figures = {
                "loss": statistics.fmean(found["loss"] for found, _ in pairs),
                "ratio": row[rule],
                "lowered": statistics.fmean(found["lowered"] for found, _ in pairs),
            }
            bench.write(options, "hostile/rules", {"rule": rule, "attack": attack}, figures)
            print(json.dumps({"rule": rule, "attack": attack, **figures}), flush=True)
        table[attack] = row
    columns: list[bench.Column] = [(rule, rule, ".3f") for rule in options.rules]
    print(bench.table("attack", columns, table))


if __name__ == "__main__":
    main()
