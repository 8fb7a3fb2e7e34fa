"""What can be chosen about a payload: the codec, its step, its block.

Rules of this file:
1. A recipe's ``step`` is a block's scale in units of its root mean square. A coarser one gives smaller symbols, which
   zstd turns into fewer bytes: the smooth way to trade bytes for error.
2. A block with so large a value that clipping it would cost more than coarser symbols do (a rare token's row in an
   embedding) is scaled by its largest value instead; with step 0 all are.
3. int2 has three levels (-1, 0, 1). On outer gradients four levels lose to int4 with step 1.2, and three beat int4 with
   step 1.5 (docs/lab-notes.md).
"""

from __future__ import annotations

import functools
import math
from typing import Final, NamedTuple

from p2pdiloco.protocol.manifest import Codec

CHUNK: Final = 1 << 18
"""Elements of a chunk; the last one of a vector may be shorter."""
BLOCK: Final = 256
"""Elements that share a scale, unless a recipe says otherwise."""
BLOCKS: Final = (64, 128, 256, 512, 1024, 2048, 4096)


class Format(NamedTuple):
    """A codec's constants."""

    number: int
    """In the header."""
    bits: int
    largest: int
    """Symbols lie in [-largest, largest]."""
    step: float
    """The default: the least error for its bytes on outer gradients; 0 where the largest value decides."""


FORMATS: Final[dict[Codec, Format]] = {
    "int4": Format(1, 4, 7, 0.4),
    "int8": Format(2, 8, 127, 0.0),
    "bf16": Format(3, 16, 0, 0.0),
    "int2": Format(4, 2, 1, 1.224),
    "e3m0": Format(5, 4, 64, 0.0),
}


class Recipe(NamedTuple):
    """How to encode; a decoder need not know it. Make it with ``recipe``."""

    codec: Codec
    step: float
    """A block's scale in units of its root mean square; 0: the largest value decides."""
    block: int
    """Elements that share a scale; 0: there are no scales (bf16)."""
    tail: float
    """A block with a value beyond so many root mean squares is scaled by it."""


@functools.lru_cache(maxsize=256)
def recipe(codec: Codec, step: float | None = None, block: int = BLOCK) -> Recipe:
    """``step`` None is the codec's own (int4 0.4, int2 1.224, int8 0). E3M0 and bf16 have none.

    Raises:
        ValueError: an impossible value.
    """
    form = FORMATS[codec]
    step = form.step if step is None else step
    if not (step == 0.0 or 1e-3 <= step <= 16.0):
        raise ValueError(f"step = {step} must be 0 (scale by the largest value) or 0.001 to 16 root mean squares")
    if block not in BLOCKS:
        raise ValueError(f"block = {block} must be one of {BLOCKS}")
    if codec == "bf16":
        return Recipe(codec, 0.0, 0, math.inf)
    if codec == "e3m0" or step == 0.0:
        return Recipe(codec, 0.0, block, math.inf)
    return Recipe(codec, step, block, _tail(form.largest, step, block))


def _tail(largest: int, step: float, block: int) -> float:
    """From which value on (in root mean squares) one such value in a block makes clipping cost more than scaling by it.

    Errors are squared and summed over the block: a step s costs block * s^2 / 12, and never more than what is lost when
    everything but that value becomes 0.
    """
    reach = largest * step
    for at in range(1, 100 * math.isqrt(block)):
        value = reach + at / 100
        clipped = (value - reach) ** 2 + block * step**2 / 12
        scaled = min(block * (value / largest) ** 2 / 12, block - value**2)
        if scaled < clipped:
            return value
    return math.inf
