"""How far learners end behind data parallel as models grow: cells of four sizes, and a law fitted to them.

1. Each size trains on 20 bytes (tokens) per parameter. Its batch grows with it, so that steps grow slowly.
2. Each row is trained at three learning rates, and at more as long as the best is the lowest or the highest.
   Validation chooses one of them, and test is shown (``claims``).
3. Cells are what ships: Muon, a rate that falls in a line to zero, int4 both ways, the robust merge; but the outer
   momentum is in float32.
4. The law is gap = a_M * N^-b with one b for all M, by least squares on logarithms. Its intervals hold 90 % of fits to
   resampled points. They say nothing of a floor that the gap may have: four sizes cannot show one.
5. Variants show what the law does not vary: a longer context, and byte pairs instead of bytes.
6. One larger size on another text is held back: the law is not fitted to it, and its gap is printed beside the
   prediction. The largest sizes want a GPU (``--device cuda``). All cells of one size should run on one device, because
   a GPU computes in bfloat16 (README.md).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.quality import runner
from benchmarks.quality.bases import as_shipped
from benchmarks.quality.claims import Cells, Claim, beyond_edge, efficiency, halves, is_at_edge, measured, table, tuned
from benchmarks.quality.questions import ANY_LENGTH, EVERY_THREE, LINE
from benchmarks.quality.report import by_seed, seedless
from benchmarks.quality.settings import Setting

CONTEXT = 64
TOKENS_PER_PARAMETER = 20
SEEDS = (1, 2)
LEARNERS = (8, 4, 2, 16)
RULES: dict[str, dict[str, Any]] = {"mean every 6": ANY_LENGTH, "RDA every 24": LINE, "mean every 3": EVERY_THREE}
"""The first is that of variants and other batches; the last ships for small models."""
ALL_RATES = (0.26, 0.46, 0.8, 1.4, 2.4, 4.2, 7.3)
"""Multiples of 0.1 / sqrt(width), which is near Muon's best rate for data parallel."""
RATES = ALL_RATES[2:5]
"""Those that every row is trained at."""
LENGTHS = (0.5, 0.75)
"""Shares of the budget for which data parallel is trained, too: token efficiency is read from them."""
BATCHES = (0.25, 0.5, 2.0)
"""Shares of a size's batch at which data parallel and ``TUNED_LEARNERS`` with the first rule are trained, too, where
the learners can share them."""
TUNED_LEARNERS = 8
WARMUP = 0.05
PREDICTED = (35_000_000, 150_000_000, 1_000_000_000)
"""Sizes for which the law's gap is printed."""
PUBLISHED = "DiLoCo's scaling laws (arXiv 2503.09799): M = 8 at 35M parameters +3.9 %, falling with size"
RESAMPLED = 2000
INTERVAL = 0.9


class Size(NamedTuple):
    """One size of the built-in transformer."""

    parameters: int
    width: int
    depth: int
    heads: int
    batch: int
    """Windows per step, of all learners together."""
    data: str = "same"
    context: int = CONTEXT
    vocabulary: int = 256

    @property
    def steps(self) -> int:
        """Steps of the whole budget."""
        return TOKENS_PER_PARAMETER * self.parameters // (self.batch * self.context)

    def of_batch(self, share: float) -> Size:
        """Return this size with so much of its batch, and as many more steps."""
        return self._replace(batch=round(share * self.batch))

    @property
    def batches(self) -> list[Size]:
        """This size, and the same with its other batches."""
        return [self, *(one for one in map(self.of_batch, BATCHES) if one.batch % TUNED_LEARNERS == 0)]

    def cell(self, rate: float, **changes: Any) -> Setting:
        """Return what ships for this size, at a multiple of the usual learning rate, with ``changes``."""
        shape = {name: getattr(self, name) for name in ("width", "depth", "heads", "context", "vocabulary", "data")}
        length = {"batch": self.batch, "steps": self.steps, "warmup": round(WARMUP * self.steps)}
        usual = {"learning_rate": round(rate * 0.1 / self.width**0.5, 4), "bounded": True, "agreement": True}
        return as_shipped(**shape | length | LINE | changes | usual)

    def parallel(self, rate: float, **changes: Any) -> Setting:
        """Return data parallel of this size."""
        setting = self.cell(rate, method="parallel", learners=1, **changes)
        return msgspec.structs.replace(setting, bounded=False, agreement=False, correction=False)


SIZES = (
    Size(26_232, 24, 2, 2, 16),
    Size(80_112, 48, 2, 3, 32),
    Size(279_600, 80, 3, 5, 64),
    Size(869_504, 128, 4, 8, 128),
)
VARIANTS = {
    "context 128, 16 windows": Size(80_112, 48, 2, 3, 16, context=128),
    "context 128, 32 windows": Size(80_112, 48, 2, 3, 32, context=128),
    "byte pairs (2,048)": Size(252_144, 48, 2, 3, 64, vocabulary=2048),
}
"""Other forms of the second size, of which data parallel and ``TUNED_LEARNERS`` with the first rule are trained."""
HELD_BACK = Size(2_755_008, 192, 6, 12, 256, "packages")
"""Another text and a larger model than the law is fitted to, to test what it predicts."""
HELD_BACK_LEARNERS = 8


def sizes(largest: int) -> list[Size]:
    """Return the sizes of at most so many parameters."""
    return [size for size in SIZES if size.parameters <= largest]


def variants(largest: int) -> dict[str, Size]:
    """Return the variants of sizes of at most so many parameters."""
    widths = {size.width for size in sizes(largest)}
    return {name: one for name, one in VARIANTS.items() if one.width in widths}


def cells(largest: int) -> Iterator[Setting]:
    """Yield the cells of all sizes of at most so many parameters at the three rates, small ones first."""
    for size in sizes(largest):
        for seed in SEEDS:
            yield from (size.parallel(rate, seed=seed) for rate in RATES)
            for m, rule in itertools.product(LEARNERS, RULES.values()):
                yield from (size.cell(rate, **rule, learners=m, seed=seed) for rate in RATES)
        for share in LENGTHS:
            yield from (size.parallel(rate, steps=round(share * size.steps)) for rate in RATES)
        for other in [*size.batches[1:], *(one for one in VARIANTS.values() if one.width == size.width)]:
            yield from (other.parallel(rate) for rate in RATES)
            rule = next(iter(RULES.values()))
            yield from (other.cell(rate, **rule, learners=TUNED_LEARNERS) for rate in RATES)
    if largest >= HELD_BACK.parameters:
        yield from (HELD_BACK.parallel(rate) for rate in RATES)
        for rule in RULES.values():
            yield from (HELD_BACK.cell(rate, **rule, learners=HELD_BACK_LEARNERS) for rate in RATES)


def more_cells(largest: int, results: Path = runner.RESULTS) -> Iterator[Setting]:
    """Yield cells at one more rate for each row whose best is at the edge of those trained, until none is."""
    others = [*variants(largest).values(), *([HELD_BACK] if largest >= HELD_BACK.parameters else [])]
    for size in [*itertools.chain.from_iterable(one.batches for one in sizes(largest)), *others]:
        rates = [size.cell(rate).learning_rate for rate in ALL_RATES]
        for _, setting in _rows(size):
            for _ in rates:
                found = by_seed(runner.rows(results))
                beyond = beyond_edge(found, setting, rates)
                if beyond is None:
                    break
                for seed in sorted(found[tuned(found, setting)]):
                    yield msgspec.structs.replace(beyond, seed=seed)


def _rows(size: Size) -> list[Claim]:
    return [*claims(size), Claim(f"{size.parameters:,}, data parallel", seedless(size.parallel(RATES[0])))]


def held_back(rule: str) -> Claim:
    """Return the row that no law is fitted to."""
    setting = HELD_BACK.cell(RATES[0], **RULES[rule], learners=HELD_BACK_LEARNERS)
    return Claim(f"held back: {HELD_BACK.parameters:,}, {rule}, M = {HELD_BACK_LEARNERS}", seedless(setting))


def variant(name: str) -> Claim:
    """Return the row of a variant, which no law is fitted to."""
    setting = VARIANTS[name].cell(RATES[0], **next(iter(RULES.values())), learners=TUNED_LEARNERS)
    return Claim(f"{name}: {VARIANTS[name].parameters:,}, {next(iter(RULES))}, M = {TUNED_LEARNERS}", seedless(setting))


def claims(size: Size) -> list[Claim]:
    """Return the rows of one size."""
    return [
        Claim(f"{size.parameters:,}, {name}, M = {m}", seedless(size.cell(RATES[0], **rule, learners=m)))
        for name, rule in RULES.items()
        for m in sorted(LEARNERS)
        if size.batch % m == 0
    ]


class Point(NamedTuple):
    """The measured gap of one cell."""

    parameters: int
    learners: int
    gap: float
    """Per cent of the loss of data parallel."""


class Law(NamedTuple):
    """gap = factors[M] * N^-exponent, in per cent."""

    exponent: float
    factors: Mapping[int, float]

    def gap(self, parameters: float, learners: int) -> float:
        """Return the gap that the law has for so many parameters and learners."""
        return self.factors[learners] * math.pow(parameters, -self.exponent)


def fit(points: Iterable[Point]) -> Law | None:
    """Return the law that fits best; None if no M has two sizes with a gap above zero."""
    groups: dict[int, list[tuple[float, float]]] = {}
    for parameters, learners, gap in points:
        if gap > 0.0:
            groups.setdefault(learners, []).append((math.log(parameters), math.log(gap)))
    means = {m: tuple(map(statistics.fmean, zip(*group, strict=True))) for m, group in groups.items()}
    square = product = 0.0
    for m, group in groups.items():
        for x, y in group:
            square += (x - means[m][0]) ** 2
            product += (x - means[m][0]) * (y - means[m][1])
    if square < 1e-9:
        return None
    exponent = -product / square
    return Law(exponent, {m: math.exp(y + exponent * x) for m, (x, y) in means.items()})


def fits(points: Sequence[Point], seed: int = 0) -> list[Law]:
    """Return fits to points that are drawn anew, with replacement, among those of the same M."""
    draw, found = random.Random(seed), []
    usable = [point for point in points if point.gap > 0.0]
    groups = [[p for p in usable if p.learners == m] for m in sorted({p.learners for p in usable})]
    for _ in range(RESAMPLED):
        law = fit(p for group in groups for p in draw.choices(group, k=len(group)))
        if law is not None:
            found.append(law)
    return found


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the limits of the middle 90 %."""
    ordered = sorted(values)
    cut = round((1.0 - INTERVAL) / 2.0 * (len(ordered) - 1))
    return ordered[cut], ordered[-1 - cut]


def points(found: Cells, rule: str, largest: int) -> list[Point]:
    """Return all gaps of a merge rule that were measured, one for each size, M and seed."""
    return [
        Point(size.parameters, claim.setting.learners, gap)
        for size in sizes(largest)
        for claim in claims(size)
        if f", {rule}, " in claim.name
        for gap in measured(found, claim).get("to_parallel", ())
    ]


def at_best_batches(found: Cells, size: Size) -> str:
    """Return the gap of ``TUNED_LEARNERS`` if they and data parallel each have their best batch of those that both were
    trained with; "" if that is one. Validation chooses, and test is shown, both with seed 1."""
    rule = next(iter(RULES.values()))
    tried = []
    for one in size.batches:
        pair = (one.parallel(RATES[0]), one.cell(RATES[0], **rule, learners=TUNED_LEARNERS))
        runs = [found.get(tuned(found, seedless(cell)), {}) for cell in pair]
        if all(SEEDS[0] in of_one for of_one in runs):
            tried.append([(*halves(of_one[SEEDS[0]]), one.batch) for of_one in runs])
    if len(tried) < 2:
        return ""
    (_, alone, least), (_, together, most) = (min(losses) for losses in zip(*tried, strict=True))
    windows = ", ".join(str(batch) for batch in sorted(pair[0][2] for pair in tried))
    gap = 100.0 * (together / alone - 1.0)
    share = _efficiency(found, size, together) if least == size.batch else None
    shown = "" if share is None else f", token efficiency {share:.0%}"
    return f"{size.parameters:,} ({windows}): data parallel {least}, M = {TUNED_LEARNERS} {most}: {gap:+.2f} %{shown}"


def _efficiency(found: Cells, size: Size, loss: float) -> float | None:
    """Return the share of the budget after which data parallel with this size's batch has a test loss."""
    curve = {}
    for steps in (size.steps, *(round(share * size.steps) for share in LENGTHS)):
        runs = found.get(tuned(found, seedless(size.parallel(RATES[0], steps=steps))), {})
        if SEEDS[0] in runs:
            curve[steps] = halves(runs[SEEDS[0]])[1]
    return efficiency(loss, curve, size.steps)


def lines(largest: int, path: Path | None, results: Path = runner.RESULTS) -> Iterator[str]:
    """Yield the table, the law of each rule, and what the law says of larger models. The table's rows are appended to
    ``path``, if there is one; ``results`` has the cells."""
    found = by_seed(runner.rows(results))
    rows = [claim for size in sizes(largest) for claim in claims(size)]
    rows += map(variant, variants(largest))
    if largest >= HELD_BACK.parameters:
        rows += map(held_back, RULES)
    yield from table(path, rows, results)
    edges = [row.name for size in sizes(largest) for row in _rows(size) if is_at_edge(found, row.setting)]
    yield "\nbest rate at the edge of those trained: " + ("; ".join(edges) or "none")
    tuned_batches = [line for size in sizes(largest) if (line := at_best_batches(found, size))]
    yield f"\n{next(iter(RULES))}, each at its best batch (of windows): " + ("; ".join(tuned_batches) or "not trained")
    for rule in RULES:
        measured_points = points(found, rule, largest)
        law = fit(measured_points)
        if law is None:
            yield f"\n{rule}: no law, since no M has two sizes"
            continue
        drawn = fits(measured_points)
        low, high = interval(one.exponent for one in drawn)
        spread = f"90 %: {low:.2f} to {high:.2f}; {len(measured_points)} points"
        yield f"\n{rule}: gap falls as N^-{law.exponent:.2f} ({spread})"
        for m in sorted(law.factors):
            shown = []
            for parameters in PREDICTED:
                low, high = interval(one.gap(parameters, m) for one in drawn)
                shown.append(f"{parameters / 1e6:,.0f}M {law.gap(parameters, m):+.2f} % ({low:.2f} to {high:.2f})")
            yield f"  M = {m}: " + ", ".join(shown)
        gaps = measured(found, held_back(rule)).get("to_parallel")
        if gaps and HELD_BACK_LEARNERS in law.factors:
            low, high = interval(one.gap(HELD_BACK.parameters, HELD_BACK_LEARNERS) for one in drawn)
            predicted = law.gap(HELD_BACK.parameters, HELD_BACK_LEARNERS)
            yield (
                f"  held back ({HELD_BACK.parameters:,} parameters, another text, M = {HELD_BACK_LEARNERS}): "
                f"predicted {predicted:+.2f} % ({low:.2f} to {high:.2f}), measured {gaps[0]:+.2f} %"
            )
    yield "\n" + PUBLISHED
