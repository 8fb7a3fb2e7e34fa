"""How far learners end behind data parallel, by steps, size, number of learners and H: cells, and a law fitted to them.

1. Two kinds of cells. ``SIZES`` train on 20 bytes (tokens) per parameter, with a batch that grows with the model: what
   a user would do, but steps and size grow together. ``equal`` cells have the same batch at every size, and the same
   numbers of steps, which tells the two apart; some are of another text (prose).
2. Validation chooses each row's learning rate, and test is shown (``claims``). A row of ``SIZES`` is trained at three
   rates, and at more as long as the best is the lowest or the highest; a row of ``equal`` at two.
3. Cells are what ships: Muon, a rate that falls in a line to zero, int4 both ways, the robust merge; but the outer
   momentum is in float32.
4. The law of a rule is gap = a (M / 8)^b (steps / 1000)^c ((H + 2) / 8)^d (N / 100,000)^e (window / 64)^f, times a
   constant for prose, by least squares on logarithms; d comes from cells that differ in H alone, if there are any. Its
   intervals hold 90 % of fits to resampled points. They say nothing of a floor that the gap may have.
5. The largest size, and the cells of ``HELD``, are held back: the law is not fitted to them, and their gaps are printed
   beside the predictions. Large sizes want a GPU (``--device cuda``); ``equal`` cells compute in float32 there, as on a
   CPU.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.plots import figure
from benchmarks.quality import runner
from benchmarks.quality.bases import as_shipped
from benchmarks.quality.claims import Cells, Claim, beyond_edge, is_at_edge, measured, table, tuned
from benchmarks.quality.questions import ANY_LENGTH, EVERY_THREE, LINE, apart, causes, defaults
from benchmarks.quality.report import by_seed, seedless
from benchmarks.quality.settings import Setting

CONTEXT = 64
TOKENS_PER_PARAMETER = 20
SEEDS = (1, 2)
LEARNERS = (8, 4, 2, 16)
RULES: dict[str, dict[str, Any]] = {"mean every 6": ANY_LENGTH, "RDA every 24": LINE, "mean every 3": EVERY_THREE}
LAWS = {"mean": "direct", "RDA": "rda"}
"""The merge rule of each law."""
ALL_RATES = (0.26, 0.46, 0.8, 1.4, 2.4, 4.2, 7.3)
"""Multiples of 0.1 / sqrt(width), which is near Muon's best rate for data parallel."""
RATES = ALL_RATES[2:5]
"""Those that every row of ``SIZES`` is trained at."""
H_COLUMN = 3
"""Index of H among ``Point.logarithms``."""
LENGTHS = (0.5, 0.75)
"""Shares of the budget for which data parallel is trained, too: token efficiency is read from them."""
BATCHES = (0.25, 0.5, 2.0)
"""Shares of a size's batch at which data parallel and ``EIGHT`` learners with the first rule are trained, too, where
the learners can share them."""
EIGHT = 8
WARMUP = 0.05
RESAMPLED = 1000
INTERVAL = 0.9


class Size(NamedTuple):
    """One size of the built-in transformer, and how it is trained."""

    parameters: int
    width: int
    depth: int
    heads: int
    batch: int
    """Windows per step, of all learners together."""
    data: str = "same"
    length: int = 0
    """Steps; 0: those of ``TOKENS_PER_PARAMETER``."""

    @property
    def steps(self) -> int:
        """Steps of the whole budget."""
        return self.length or TOKENS_PER_PARAMETER * self.parameters // (self.batch * CONTEXT)

    def of_batch(self, share: float) -> Size:
        """Return this size with so much of its batch, and as many more steps."""
        return self._replace(batch=round(share * self.batch))

    @property
    def batches(self) -> list[Size]:
        """This size, and the same with its other batches."""
        return [self, *(one for one in map(self.of_batch, BATCHES) if one.batch % EIGHT == 0)]

    def cell(self, rate: float, **changes: Any) -> Setting:
        """Return what ships for this size, at a multiple of the usual learning rate, with ``changes``."""
        shape = {name: getattr(self, name) for name in ("width", "depth", "heads", "data")}
        length = {"context": CONTEXT, "batch": self.batch, "steps": self.steps, "warmup": round(WARMUP * self.steps)}
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
HELD_BACK = Size(2_755_008, 192, 6, 12, 256, "packages")
"""Another text and a larger model than the law is fitted to, to test what it predicts."""
EQUAL_BATCH = 32
STEPS = (500, 1000, 2000, 4000)
PROSE_STEPS = (500, 2000)
"""Steps of ``equal`` cells of prose; there is text for no more."""


def sizes(largest: int) -> list[Size]:
    """Return the sizes of at most so many parameters."""
    return [size for size in SIZES if size.parameters <= largest]


def equal(largest: int) -> list[Size]:
    """Return the sizes of at most so many parameters at equal batches and steps, and the same on prose."""
    shapes = [size._replace(batch=EQUAL_BATCH, data="same") for size in (*SIZES, HELD_BACK)]
    shapes = [size for size in shapes if size.parameters <= largest]
    code = [size._replace(length=steps) for size in shapes for steps in STEPS]
    small = [size for size in shapes if size.parameters < HELD_BACK.parameters]
    return code + [size._replace(length=steps, data="english") for size in small for steps in PROSE_STEPS]


def equal_rates(size: Size, rule: str) -> tuple[float, ...]:
    """Return the two rates that a row of ``equal`` is trained at; ``rule`` "": data parallel. RDA's best rates are
    lower than those of the mean, and those of small models are higher."""
    lowest = 1 + (rule != "RDA every 24") + (size.width <= 48 and rule != "")
    return ALL_RATES[lowest : lowest + 2]


def equal_cells(largest: int) -> Iterator[Setting]:
    """Yield the cells at equal steps, of ``EIGHT`` learners."""
    for size in equal(largest):
        yield from (size.parallel(rate) for rate in equal_rates(size, ""))
        for name, rule in RULES.items():
            yield from (size.cell(rate, **rule, learners=EIGHT) for rate in equal_rates(size, name))


def cells(largest: int) -> Iterator[Setting]:
    """Yield the cells of ``SIZES`` of at most so many parameters at the three rates, small ones first."""
    for size in sizes(largest):
        for seed in SEEDS:
            yield from (size.parallel(rate, seed=seed) for rate in RATES)
            for m, rule in itertools.product(LEARNERS, RULES.values()):
                yield from (size.cell(rate, **rule, learners=m, seed=seed) for rate in RATES)
        for share in LENGTHS:
            yield from (size.parallel(rate, steps=round(share * size.steps)) for rate in RATES)
        for other in size.batches[1:]:
            yield from (other.parallel(rate) for rate in RATES)
            yield from (other.cell(rate, **ANY_LENGTH, learners=EIGHT) for rate in RATES)
    if largest >= HELD_BACK.parameters:
        yield from (HELD_BACK.parallel(rate) for rate in RATES)
        for rule in RULES.values():
            yield from (HELD_BACK.cell(rate, **rule, learners=EIGHT) for rate in RATES)


def more_cells(largest: int, results: Path = runner.RESULTS) -> Iterator[Setting]:
    """Yield cells at one more rate for each row whose best is at the edge of those trained, until none is."""
    others = [HELD_BACK] if largest >= HELD_BACK.parameters else []
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


def claims(size: Size, learners: Iterable[int] = LEARNERS) -> list[Claim]:
    """Return the rows of one size."""
    length = f" on {size.data}, {size.steps:,} steps" if size.length or size.data != "same" else ""
    return [
        Claim(f"{size.parameters:,}{length}, {name}, M = {m}", seedless(size.cell(RATES[0], **rule, learners=m)))
        for name, rule in RULES.items()
        for m in sorted(learners)
        if size.batch % m == 0
    ]


class Point(NamedTuple):
    """The measured gap of one cell."""

    parameters: int
    steps: int
    learners: int
    sync_every: int
    gap: float
    """Per cent of the loss of data parallel."""
    context: int = CONTEXT
    """Window, in bytes."""
    data: str = "same"

    @property
    def where(self) -> str:
        """Return its cell in words."""
        said = f"{self.parameters:,}, {self.steps:,} steps, H = {self.sync_every}"
        return said if self.learners == EIGHT else f"{said}, M = {self.learners}"

    def is_cell_of(self, other: Point) -> bool:
        """Whether ``other`` was measured in this cell."""
        return self._replace(gap=0.0) == other._replace(gap=0.0)

    @property
    def logarithms(self) -> list[float]:
        """One, the logarithms of M, steps, H, size and window, each by its reference, and whether the text is prose."""
        parts = (self.learners / 8, self.steps / 1e3, (self.sync_every + 2) / 8, self.parameters / 1e5)
        return [1.0, *map(math.log, parts), math.log(self.context / CONTEXT), float(self.data == "english")]


HELD = (Point(80_112, 1000, 4, 3, 0.0),)
"""Cells that were predicted before they were run."""


class Law(NamedTuple):
    """The gap at M = 8, 1,000 steps, H = 6, 100,000 parameters and windows of 64 bytes of code, in per cent, exponents
    of these five, and the logarithm of prose's constant."""

    gap_at_reference: float
    learners: float
    steps: float
    sync_every: float
    size: float
    window: float = 0.0
    prose: float = 0.0

    def gap(self, point: Point) -> float:
        """Return the gap that the law has for a point, in per cent."""
        _, *logarithms = point.logarithms
        return self.gap_at_reference * math.exp(sum(map(operator.mul, self[1:], logarithms)))


def fit(points: Iterable[Point]) -> Law | None:
    """Return the law that fits best; None if no two sizes have a gap above zero. An exponent of what does not vary is
    zero."""
    usable = [point for point in points if point.gap > 0.0]
    if len({point.parameters for point in usable}) < 2:
        return None
    columns = np.array([point.logarithms for point in usable])
    gaps = np.log([point.gap for point in usable])
    found = np.zeros(columns.shape[1])
    varies = [0, *(i for i in range(1, columns.shape[1]) if np.ptp(columns[:, i]) > 0)]
    of_h = _of_h(usable, columns, gaps)
    if of_h is not None:
        varies.remove(H_COLUMN)
        found[H_COLUMN] = of_h
        gaps = gaps - of_h * columns[:, H_COLUMN]
    found[varies] = np.linalg.lstsq(columns[:, varies], gaps, rcond=None)[0]
    reference, *exponents = map(float, found)
    return Law(math.exp(reference), *exponents)


def _of_h(points: Sequence[Point], columns: np.ndarray, gaps: np.ndarray) -> float | None:
    """Return the exponent of H by cells that differ in it alone; None if there are none."""
    alike: dict[Point, list[int]] = {}
    for index, point in enumerate(points):
        alike.setdefault(point._replace(sync_every=0, gap=0.0), []).append(index)
    above = below = 0.0
    for same in alike.values():
        x = columns[same, H_COLUMN] - columns[same, H_COLUMN].mean()
        above += float(x @ gaps[same])
        below += float(x @ x)
    return above / below if below > 1e-9 else None


def fits(points: Sequence[Point], seed: int = 0) -> list[Law]:
    """Return fits to points that are drawn anew, with replacement."""
    draw = random.Random(seed)
    found = (fit(draw.choices(points, k=len(points))) for _ in range(RESAMPLED))
    return [law for law in found if law is not None]


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the limits of the middle 90 %."""
    ordered = sorted(values)
    cut = round((1.0 - INTERVAL) / 2.0 * (len(ordered) - 1))
    return ordered[cut], ordered[-1 - cut]


def _is_held_back(point: Point) -> bool:
    return point.parameters >= HELD_BACK.parameters or any(held.is_cell_of(point) for held in HELD)


def others(largest: int) -> list[Claim]:
    """Return rows of other sweeps (``run defaults causes apart``) with what ships: other windows, M and H."""
    usual = {"inner": "muon", "merge": "direct", "outer_rate": 1.0, "up": "int4", "bounded": True, "overlap": 2}
    plain = {"pools": "", "predicts": 0.0, "inner_momentum": 0.0, "method": "diloco", "outer_momentum": 0.0}
    parameters = {size.width: size.parameters for size in sizes(largest)}
    found: dict[str, Claim] = {}
    for cell in [*defaults(), *causes(), *apart()]:
        if cell.width in parameters and all(getattr(cell, name) == value for name, value in (usual | plain).items()):
            name = f"{parameters[cell.width]:,}, {cell.steps:,} steps, windows of {cell.context}"
            name += f", mean every {cell.sync_every}, M = {cell.learners}"
            found.setdefault(name, Claim(name, seedless(cell)))
    return list(found.values())


def _all_rows(largest: int) -> list[Claim]:
    rows = [claim for size in sizes(largest) for claim in claims(size)]
    rows += [claim for size in equal(largest) for claim in claims(size, [EIGHT])]
    if largest >= HELD_BACK.parameters:
        rows += claims(HELD_BACK, [EIGHT])
    return rows + others(largest)


def _of_rule(rows: Iterable[Claim], merge: str) -> list[Claim]:
    return [row for row in rows if row.setting.merge == merge]


def points(found: Cells, rows: Iterable[Claim]) -> list[Point]:
    """Return the gap of each row and seed that was measured."""
    parameters = {size.width: size.parameters for size in (*SIZES, HELD_BACK)}
    return [
        Point(parameters[cell.width], cell.steps, cell.learners, cell.sync_every, gap, cell.context, cell.data)
        for claim in rows
        for cell in (claim.setting,)
        for gap in measured(found, claim).get("to_parallel", ())
    ]


def lines(largest: int, path: Path | None, results: Path = runner.RESULTS) -> Iterator[str]:
    """Yield the table, the law of each rule, and what it says of the size that is held back. The table's rows are
    appended to ``path``, if there is one; ``results`` has the cells."""
    found = by_seed(runner.rows(results))
    rows = _all_rows(largest)
    yield from table(path, rows, results)
    edges = [row.name for size in sizes(largest) for row in _rows(size) if is_at_edge(found, row.setting)]
    yield "\nbest rate at the edge of those trained: " + ("; ".join(edges) or "none")
    for name, merge in LAWS.items():
        of_rule = points(found, _of_rule(rows, merge))
        fitted = [point for point in of_rule if not _is_held_back(point)]
        law = fit(fitted)
        if law is None:
            yield f"\n{name}: no law, since there are no two sizes"
            continue
        drawn = fits(fitted)
        yield f"\n{name}, {len(fitted)} points: {law.gap_at_reference:.1f} % at M = 8, 1,000 steps, 100,000 parameters"
        for field in Law._fields[1:]:
            low, high = interval(getattr(one, field) for one in drawn)
            yield f"  exponent of {field}: {getattr(law, field):+.2f} (90 %: {low:+.2f} to {high:+.2f})"
        ratios = [point.gap / law.gap(point) for point in fitted if point.gap > 0.0]
        yield f"  measured gaps are {min(ratios):.2f} to {max(ratios):.2f} times those of the law"
        for point in of_rule:
            if _is_held_back(point):
                yield f"  held back: {point.where}: predicted {law.gap(point):+.1f} %, measured {point.gap:+.1f} %"
        for held in HELD:
            if merge == "direct" and not any(map(held.is_cell_of, of_rule)):
                yield f"  held back, not run yet: {held.where}: predicted {law.gap(held):+.1f} %"


COLOURS = {2: "tab:green", 4: "tab:blue", 8: "tab:red", 16: "tab:purple"}


def draw(folder: Path, largest: int, results: Path = runner.RESULTS) -> None:
    """Draw the gap and the token efficiency of the mean every three and every six steps by steps, one colour for each
    number of learners, with the law's line for models of 100,000 parameters that exchange every six steps."""
    found = by_seed(runner.rows(results))
    rows = _all_rows(largest)
    law = fit(point for point in points(found, _of_rule(rows, "direct")) if not _is_held_back(point))
    with figure(folder / "quality-steps.png", 2, size=(10, 4)) as (left, right):
        for m, colour in COLOURS.items():
            for every, marker in ((6, "o"), (3, "^")):
                here = [c for c in _of_rule(rows, "direct") if (c.setting.learners, c.setting.sync_every) == (m, every)]
                shown = [(claim.setting.steps, measured(found, claim)) for claim in here]
                for axes, key in ((left, "to_parallel"), (right, "token_efficiency")):
                    means = [(steps, statistics.fmean(row[key])) for steps, row in shown if row.get(key)]
                    axes.plot(*zip(*means, strict=True) if means else ([], []), marker, color=colour, markersize=4)
            left.plot([], [], "o", color=colour, label=f"M = {m}")
            if law is not None:
                lengths = (250, 4000)
                line = [law.gap(Point(100_000, steps, m, 6, 0.0)) for steps in lengths]
                left.plot(lengths, line, color=colour, linewidth=0.8)
        left.set(xlabel="steps (circles: H = 6, triangles: H = 3)", ylabel="gap to data parallel, %", yscale="log")
        right.set(xlabel="steps", ylabel="token efficiency, %")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xticks((250, 500, 1000, 2000, 4000), ("250", "500", "1,000", "2,000", "4,000"))
            axes.minorticks_off()
        left.set_yticks((0.5, 1, 2, 5, 10, 20), ("0.5", "1", "2", "5", "10", "20"))
        left.legend(fontsize=8)
