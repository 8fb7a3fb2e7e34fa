"""Choice of a codec by available bandwidth: the finest one whose transfer fits into the given time.

A payload names its codec, so receivers need not know the choice. Bytes and errors below are of outer gradients of a
small transformer (``python -m benchmarks.wire.codec`` measures them); only their order and the sizes matter here.

Rules of this file:
1. The module is pure: sizes and rates in, a rung of the ladder out.
2. No codec coarser than the run allows is ever chosen, however slow the link.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from p2pdiloco.codec.formats import FORMATS, Recipe, recipe
from p2pdiloco.protocol.manifest import Coarsest, CodecChoice, CodecConfig, Step


class Rung(NamedTuple):
    """A recipe with its size and its error."""

    name: Coarsest
    recipe: Recipe
    bytes_per_parameter: float
    relative_error: float
    """||gradient - decoded|| / ||gradient||."""


LADDER: Final = (
    Rung("bf16", recipe("bf16"), 1.35, 0.002),
    Rung("int8", recipe("int8"), 0.96, 0.006),
    Rung("int4", recipe("int4"), 0.43, 0.12),
    Rung("int4-coarse", recipe("int4", 1.0), 0.27, 0.28),
    Rung("int2", recipe("int2"), 0.21, 0.40),
)
"""All rungs, the finest first."""
FAST_BYTES_PER_S: Final = 100e6
"""Rate to a peer above which sending is faster than Huffman codes. For int4 they take sender and receiver together a
second of a core for each 100 MB that they save. Measured: 98 MB for int4, 42 for int8, 140 for int2, 563 for bf16
(benchmarks/notes.md)."""
_DOWN: Final = {"int2": Rung("int2", recipe("int4", 1.6), 0.21, 0.46)}
"""Rungs that differ for a merged update: three levels would cut off its largest values, which nothing averages out
(benchmarks/quality/README.md)."""


def downward(rung: Rung) -> Rung:
    """Return the rung that an owner uses for merged updates where a learner would use ``rung``."""
    return _DOWN.get(rung.name, rung)


def is_dense(how: Recipe) -> bool:
    """Return whether Huffman coding saves little because symbols nearly fill their bits.

    It saves a sixth of int4's bytes and a fifteenth of int8's. It saves a third of bf16's bytes and half of int4's at
    step 1.0, which costs less than sending and receiving them.
    """
    return how.codec in ("int4", "int8") and how.step <= FORMATS[how.codec].step


def choose(parameters: float, *, bytes_per_s: float | None, time_s: float, coarsest: Coarsest) -> Rung:
    """Return the finest rung that sends ``parameters`` within ``time_s``, or ``coarsest`` if none does.

    ``bytes_per_s`` is the available bandwidth; None means that the link is not known to be a limit.
    """
    allowed = LADDER[: 1 + [rung.name for rung in LADDER].index(coarsest)]
    if bytes_per_s is None:
        return allowed[0]
    fitting = (rung for rung in allowed if parameters * rung.bytes_per_parameter <= bytes_per_s * time_s)
    return next(fitting, allowed[-1])


def downward_recipes(codec: CodecConfig) -> list[Recipe]:
    """Return the recipes by which an owner of this run may encode a merged update."""
    if codec.down != "auto":
        return [fixed(codec.down, codec.down_step)]
    allowed = LADDER[: 1 + [rung.name for rung in LADDER].index(codec.coarsest)]
    return [downward(rung).recipe for rung in allowed]


def fixed(codec: CodecChoice, step: Step | None) -> Recipe:
    """Return the recipe of a run's fixed codec. For "auto", return a default for callers that do not choose."""
    return recipe("int4") if codec == "auto" else recipe(codec, step)
