"""Crowds: the sweep ``crowd`` of many learners, a law of token efficiency, and what the laws say beyond it.

    python -m benchmarks.quality.crowds
    python -m benchmarks.quality.crowds --errors    # how far merges of groups are from merges of all; a minute or two

1. *Token efficiency* of M learners is the share of their tokens after which data parallel has the same loss
   (``claims``). M learners are worth M times that many machines: those that data parallel would need for the same loss
   in the same time, if its line were no limit.
2. Its law is 1 / efficiency = 1 + a ((M - 1) / 7)^b ((H + 2) / 8)^c (N / 100,000)^d, by least squares on the
   logarithms of 1 / efficiency - 1, from the rows of ``law.SIZES`` and ``claims``, and those of ``crowd`` that merge
   all at once. Steps are not in it: in longer runs the gap is smaller, but the loss falls more slowly, too.
3. The rows of ``law.equal``, which vary in steps alone, are not in the law: what it says of them is a test.
4. ``--errors`` trains learners in groups for ``ERROR_STEPS`` steps. Of the same contributions each time, it also makes
   the merge of all at once, and compares: how long the difference is, and how long what the commit's own rounding
   takes off, both by the length of the merge of all.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.quality import law, runner, sweeps
from benchmarks.quality.bases import as_shipped
from benchmarks.quality.claims import Cells, Claim, claims, halves, measured
from benchmarks.quality.exchange import Contributions, Exchange, pack
from benchmarks.quality.laboratory import Laboratory
from benchmarks.quality.questions import EVERY_THREE, LINE
from benchmarks.quality.report import by_seed, seedless, spread
from benchmarks.quality.settings import Setting
from p2pdiloco.protocol.ids import ShardId
from p2pdiloco.protocol.manifest import MergeRule

NAMES = {"direct": "mean, H = 3", "rda": "RDA, H = 24"}
FAR_LEARNERS = (8, 16, 32, 64, 256, 1024)
FAR_SIZES = (80_112, 2_755_008, 10**8, 7 * 10**9)
PARAMETERS = {size.width: size.parameters for size in (*law.SIZES, law.HELD_BACK)}

ERROR_STEPS = 48
ERROR_RULES: dict[str, dict[str, Any]] = {"mean, H = 3": EVERY_THREE, "RDA, H = 24": {**LINE, "agreement": True}}
ERROR_SHAPES = ((16, 4), (64, 8))


class Efficiency(NamedTuple):
    """Law of token efficiency: 1 / efficiency - 1 at M = 8, H = 6 and 100,000 parameters, and three exponents."""

    excess_at_reference: float
    learners: float
    sync_every: float
    size: float

    def of(self, learners: int, sync_every: int, parameters: float) -> float:
        """Return the token efficiency, as a share."""
        found = self.excess_at_reference * ((learners - 1) / 7) ** self.learners
        found *= ((sync_every + 2) / 8) ** self.sync_every * (parameters / 1e5) ** self.size
        return float(1.0 / (1.0 + found))


def fit(rows: Iterable[tuple[Setting, float]]) -> Efficiency:
    """Return the law that fits best to the token efficiencies, in per cent, of these settings."""
    columns, values = [], []
    for one, share in rows:
        logarithms = ((one.learners - 1) / 7, (one.sync_every + 2) / 8, PARAMETERS[one.width] / 1e5)
        columns.append([1.0, *map(math.log, logarithms)])
        values.append(math.log(100.0 / share - 1.0))
    reference, *exponents = map(float, np.linalg.lstsq(np.array(columns), np.array(values), rcond=None)[0])
    return Efficiency(math.exp(reference), *exponents)


def efficiencies(found: Cells) -> list[tuple[Setting, float]]:
    """Return the mean token efficiency of each row that the law is fitted to, in per cent."""
    of_sizes = (law.claims(size) for size in law.SIZES)
    rows = [*itertools.chain.from_iterable(of_sizes), *(one for one in claims() if one.setting.inner == "muon")]
    rows = [one for one in rows if one.setting.learners > 1 and one.setting.decay_share]
    flat = dict.fromkeys(seedless(one) for one in sweeps.crowd() if one.learners > 1 and one.groups == 1)
    rows += [Claim("", one) for one in flat if one in found]
    shares = ((one.setting, measured(found, one).get("token_efficiency") or [100.0]) for one in rows)
    return [(setting, mean) for setting, share in shares if (mean := statistics.fmean(share)) < 100.0]


def crowd_lines(found: Cells, efficiency: Efficiency) -> Iterator[str]:
    """Yield a row for each cell of the sweep with several learners that was run."""
    yield "| windows, steps | M | rule | seeds | to data parallel, % | token efficiency, % (law) | groups to flat, % |"
    yield "|---|---|---|---|---|---|---|"
    for setting in dict.fromkeys(map(seedless, sweeps.crowd())):
        if setting.method == "parallel" or setting not in found:
            continue
        row = measured(found, Claim("", setting))
        flat = found.get(_flat(setting), {}) if setting.groups > 1 else {}
        pairs = ((halves(runs)[1], halves(flat[seed])[1]) for seed, runs in found[setting].items() if seed in flat)
        to_flat = [100.0 * (grouped / one - 1.0) for grouped, one in pairs]
        shape = f"{setting.batch}, {setting.steps} | {setting.learners}"
        shape += f" ({setting.groups} groups)" if setting.groups > 1 else ""
        known = efficiency.of(setting.learners, setting.sync_every, PARAMETERS[setting.width])
        share = _shown(row["token_efficiency"], ".0f") + f" ({100 * known:.0f})"
        gaps = (_shown(row["to_parallel"], "+.1f"), share, _shown(to_flat, "+.2f"))
        yield f"| {shape} | {NAMES[setting.merge]} | {len(row['seeds'])} | {' | '.join(gaps)} |"


def _flat(setting: Setting) -> Setting:
    return msgspec.structs.replace(setting, groups=1)


def _shown(values: list[float], form: str) -> str:
    return spread(values, form) if values else "-"


def check_lines(found: Cells, efficiency: Efficiency) -> Iterator[str]:
    """Yield the token efficiency of ``law.EIGHT`` learners by size and steps, and that of the law."""
    steps_of = [steps for steps in law.STEPS if steps > min(law.STEPS)]
    yield f"\n| parameters, rule | {' | '.join(f'{steps:,} steps' for steps in steps_of)} | law |"
    yield f"|---|{'---|' * len(steps_of)}---|"
    shares: dict[tuple[int, int, str], dict[int, str]] = {}
    for size in law.equal(law.HELD_BACK.parameters):
        for row in law.claims(size, [law.EIGHT]) if size.data == "same" else ():
            key = (size.parameters, row.setting.sync_every, row.setting.merge)
            share = measured(found, row).get("token_efficiency")
            shares.setdefault(key, {})[size.steps] = _shown(share or [], ".0f")
    for (parameters, sync_every, merge), by_steps in shares.items():
        if set(by_steps.values()) != {"-"}:
            cells = " | ".join(by_steps[steps] for steps in steps_of)
            law_share = 100 * efficiency.of(law.EIGHT, sync_every, parameters)
            yield f"| {parameters:,}, {merge}, H = {sync_every} | {cells} | {law_share:.0f} |"


def far_lines(efficiency: Efficiency) -> Iterator[str]:
    """Yield how many machines ``FAR_LEARNERS`` are worth by the law, by size of the model."""
    yield f"\n| parameters, rule | {' | '.join(f'M = {m:,}' for m in FAR_LEARNERS)} |"
    yield f"|---|{'---|' * len(FAR_LEARNERS)}"
    for parameters, (rule, sync_every) in itertools.product(FAR_SIZES, (("mean", 3), ("RDA", 24))):
        worth = (m * efficiency.of(m, sync_every, parameters) for m in FAR_LEARNERS)
        yield f"| {parameters:,}, {rule}, H = {sync_every} | {' | '.join(f'{one:.1f}' for one in worth)} |"


class Compared(Exchange):
    """Makes merges of groups, and compares them with merges of all."""

    def __init__(self, laboratory: Laboratory) -> None:
        """Take the place of ``laboratory``'s exchange."""
        whole = laboratory.exchange
        super().__init__(laboratory.setting, whole.layout, whole.theta, laboratory.specs)
        self._flat = Exchange(msgspec.structs.replace(laboratory.setting, groups=1), whole.layout, whole.theta.clone())
        self._all = torch.empty(0)
        self.errors: list[tuple[float, float]] = []
        """Errors of each commit: that of grouping, and that of its own rounding."""

    def _by_group(self, rule: MergeRule, shard: ShardId, given: Contributions) -> Contributions:
        self._all = torch.empty(given.gradients[0].elements)
        self._flat._merge(rule, shard, given, self._all)
        return super()._by_group(rule, shard, given)

    def _merge(self, rule: MergeRule, shard: ShardId, given: Contributions, out: Tensor, level: int = 0) -> None:
        super()._merge(rule, shard, given, out, level)
        if level == 0:
            length, rounded = self._all.norm(), pack(self._setting.down, self._all).values
            self.errors.append((float((out - self._all).norm() / length), float((rounded - self._all).norm() / length)))


def error_lines() -> Iterator[str]:
    """Yield how far merges of groups are from merges of all."""
    yield "| rule | M | groups | difference, % | the commit's own rounding, % |"
    yield "|---|---|---|---|---|"
    for (name, way), (m, groups) in itertools.product(ERROR_RULES.items(), ERROR_SHAPES):
        setting = as_shipped(**way, steps=ERROR_STEPS, warmup=ERROR_STEPS // 5, learners=m, groups=groups)
        laboratory = Laboratory(setting)
        laboratory.exchange = compared = Compared(laboratory)
        laboratory.run()
        difference, rounding = (statistics.fmean(values) for values in zip(*compared.errors, strict=True))
        yield f"| {name} | {m} | {groups} | {100 * difference:.1f} | {100 * rounding:.1f} |"


def main() -> None:
    """Print all tables, or those of ``--errors``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--errors", action="store_true", help="compare merges of groups with merges of all")
    if parser.parse_args().errors:
        for line in error_lines():
            print(line, flush=True)
        return
    found = by_seed(runner.rows())
    points = efficiencies(found)
    efficiency = fit(points)
    known = [efficiency.of(s.learners, s.sync_every, PARAMETERS[s.width]) for s, _ in points]
    error = statistics.pstdev(math.log(share / 100 / law) for (_, share), law in zip(points, known, strict=True))
    print("\n".join(crowd_lines(found, efficiency)))
    print(f"\ntoken efficiency, {len(points)} points, off by {100 * error:.0f} %: {efficiency}")
    print("\n".join(check_lines(found, efficiency)))
    print("\n".join(far_lines(efficiency)))


if __name__ == "__main__":
    main()
