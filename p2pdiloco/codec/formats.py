"""Binary format of one chunk's body, and the checks before any of it is used.

A vector is cut into chunks of 256 Ki elements. Each chunk becomes one self-contained body (all integers
little-endian)::

    version  uint8    2
    codec    uint8    1 = int4, 2 = int8, 3 = bf16, 4 = int2, 5 = e3m0
    block    uint16   elements that share one scale (bf16: 0)
    elements uint32   n, at most 256 Ki
    symbols  padded with zeros to whole blocks, packed as ``pack`` does   (bf16: n high bytes, n low bytes)
    scales   bfloat16[ceil(n / block)]                                       (bf16: none)

Rules of this file:
1. A body may come from a hostile peer. Its header, its length and every scale are checked before anything is used, so
   the values that ``quantization`` decodes are finite.
2. An opened body lives in this thread's scratch (see ``scratch``): use it before opening the next one.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.protocol.manifest import Codec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer


# -- Payload formats ---------------------------------------------------------------------------------------------------
# A payload's encoding has three parameters: codec, step, block.
#
# Rules of this file:
# 1. A recipe's ``step`` is a block's scale in units of its root mean square. A larger step gives smaller symbols, which
#    zstd turns into fewer bytes. It is a smooth way to trade bytes for error.
# 2. A block may hold a value so large that clipping it would cost more than coarser symbols do, such as a rare token's
#    row in an embedding. Such a block is scaled by its largest value instead. With step 0 all blocks are.
# 3. int2 has three levels (-1, 0, 1). On outer gradients four levels lose to int4 with step 1.2, and three beat int4
#    with step 1.5 (benchmarks/notes.md).


CHUNK: Final = 1 << 18
"""Elements of a chunk; the last one of a vector may be shorter."""
BLOCK: Final = 256
"""Elements that share a scale, unless a recipe says otherwise. Blocks of 512 and 1,024 save 0.004 and 0.006 bytes a
parameter, and a large value costs more of them their precision (benchmarks/notes.md)."""
BLOCKS: Final = (64, 128, 256, 512, 1024, 2048, 4096)


class Format(NamedTuple):
    """Constants of a codec."""

    number: int
    """The codec's number in the header."""
    bits: int
    largest: int
    """Symbols lie in [-largest, largest]."""
    step: float
    """Default step: the least error for its bytes on outer gradients; 0: blocks are scaled by their largest value."""


FORMATS: Final[dict[Codec, Format]] = {
    "int4": Format(1, 4, 7, 0.4),
    "int8": Format(2, 8, 127, 0.0),
    "bf16": Format(3, 16, 0, 0.0),
    "int2": Format(4, 2, 1, 1.224),
    "e3m0": Format(5, 4, 64, 0.0),
}
"""int4's step 0.4 takes 0.428 bytes a parameter at a relative error of 0.12; 0.335 takes 0.456 at 0.115. int2's 1.224
is the Lloyd-Max point of three levels: 0.200 bytes at 0.433 (benchmarks/notes.md)."""


class Recipe(NamedTuple):
    """Parameters of an encoder, made by ``recipe``. A decoder does not need them."""

    codec: Codec
    step: float
    """A block's scale in units of its root mean square; 0: scale by the largest value."""
    block: int
    """Elements that share a scale; 0: no scales (bf16)."""
    tail: float
    """A block with a value beyond this many root mean squares is scaled by that value."""


@functools.lru_cache(maxsize=256)
def recipe(codec: Codec, step: float | None = None, block: int = BLOCK) -> Recipe:
    """Return a recipe. ``step`` None selects the codec's default. For bf16 and E3M0 the step is 0; bf16 has no blocks.

    Raises:
        ValueError: ``step`` or ``block`` is not allowed.
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
    """Return the value, in root mean squares, from which clipping one such value costs more than scaling by it.

    Errors are squared and summed over the block. A step s costs block * s^2 / 12, and at most the loss if all other
    values become 0.
    """
    reach = largest * step
    for at in range(1, 100 * math.isqrt(block)):
        value = reach + at / 100
        clipped = (value - reach) ** 2 + block * step**2 / 12
        scaled = min(block * (value / largest) ** 2 / 12, block - value**2)
        if scaled < clipped:
            return value
    return math.inf


# -- Scratch memory ----------------------------------------------------------------------------------------------------
# A thread's working memory for quantization, for chunks of up to CHUNK elements.
#
# Rules of this file:
# 1. Each thread allocates its own at first use (about 3.3 MiB) and keeps it. Encoding and decoding allocate nothing
#    that grows with a chunk.
# 2. Torch is set to one thread in each thread that quantizes. With two, while other work used the cores, CPU time
#    doubled and calls took 10 ms to 1.7 s instead of 4 to 20 ms, since torch's threads wait for each other after every
#    operation. Use more threads of your own instead: they scale, because all work releases the GIL.
# 3. The cuts are cached for the few lengths and formats of a run. A tensor view costs a microsecond, and a chunk would
#    need dozens.


HEADER: Final = struct.Struct("<BBHI")
LARGEST_BODY: Final = HEADER.size + 2 * CHUNK
"""Size of bf16's body of a full chunk, the largest of all codecs."""


def body_bytes(bits: int, block: int, elements: int) -> int:
    """Return the exact length in bytes of the body of one chunk of ``elements``; see ``quantization``."""
    if not block:
        return HEADER.size + 2 * elements
    return HEADER.size + -(-elements // block) * (block * bits // 8 + 2)


class Part(NamedTuple):
    """A chunk's whole blocks, or its short last block."""

    filled: int
    """Elements used in each block; the rest is zeros."""
    work: Tensor
    """float32 [blocks, block]"""
    wanted: Tensor
    """float32 [blocks]: scales before rounding."""
    scales: Tensor
    """bfloat16 [blocks], in the body."""
    inverse: Tensor
    """float32 [blocks, 1]"""
    symbols: Tensor
    """int8 [blocks * block]"""
    first: int
    """Index of the first block."""


class Cut:
    """Views of the scratch for chunks of one length in one format with blocks."""

    def __init__(self, scratch: Scratch, bits: int, block: int, elements: int) -> None:
        whole, tail = divmod(elements, block)
        blocks = whole + bool(tail)
        body = scratch.body[: body_bytes(bits, block, elements)]
        self.body = scratch.bytes.data[: body.numel()]
        self.packed = body[HEADER.size : -2 * blocks].view(torch.int8)
        self.scales = body[-2 * blocks :].view(torch.bfloat16)
        self.scale_bits = self.scales.view(torch.int16)
        self.wide = scratch.wanted[:blocks]
        self.symbols = scratch.symbols[: blocks * block]
        self.flat_wide = self.wide.numpy()
        self.parts = tuple(
            Part(
                filled=filled,
                work=scratch.work[first * block : last * block].view(-1, block),
                wanted=scratch.wanted[first:last],
                scales=self.scales[first:last],
                inverse=scratch.inverse[first:last].unsqueeze(1),
                symbols=self.symbols[first * block : last * block],
                first=first,
            )
            for first, last, filled in ((0, whole, block), (whole, blocks, tail))
            if first < last
        )


class Scratch(threading.local):
    """Working memory of one thread, with a cache of its cuts."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.work = torch.empty(CHUNK)
        self.values = torch.empty(CHUNK)
        self.symbols = torch.empty(CHUNK, dtype=torch.int8)
        self.narrow = torch.empty(CHUNK, dtype=torch.bfloat16)
        self.body = torch.empty(LARGEST_BODY, dtype=torch.uint8)
        self.bytes: NDArray[np.uint8] = self.body.numpy()
        self.wanted = torch.empty(CHUNK // BLOCKS[0])
        self.inverse = torch.empty(CHUNK // BLOCKS[0])
        self.cut = functools.lru_cache(maxsize=16)(functools.partial(Cut, self))


scratch: Final = Scratch()


# -- Bit packing -------------------------------------------------------------------------------------------------------
# Conversion of symbols of a few bits to bytes and back, by whole vectors.
#
# Rules of this file:
# 1. A byte holds one element of each half (4 bits) or quarter (2 bits) of the vector, never neighbours. All operations
#    then work on whole vectors, which is six times faster.
# 2. Symbols are int8 in two's complement. Unpacking extends the sign, so any bytes give symbols in range, and a hostile
#    body needs no check here.
# 3. Nothing is allocated; every function writes into the caller's vectors. Vectors documented as scratch lose their
#    content.
#
# E3M0 (a sign and three bits of exponent, as Streaming DiLoCo sends, arXiv 2501.18512) becomes an int8 symbol, too:
# code 0 is 0, code e is 2^(e-1), so 1, 2, 4 ... 64. Its value is then symbol * scale, as for every other codec.


def pack(symbols: Tensor, bits: int, packed: Tensor) -> None:
    """Pack ``symbols`` int8[m] of ``bits`` each into ``packed`` int8[m * bits / 8]. ``symbols`` become scratch."""
    match bits:
        case 8:
            packed.copy_(symbols)
        case 4:
            low, high = symbols.view(2, -1)
            torch.bitwise_left_shift(high, 4, out=packed)
            packed.bitwise_or_(low.bitwise_and_(15))
        case 2:
            first, second, third, fourth = symbols.view(4, -1)
            torch.bitwise_left_shift(fourth, 6, out=packed)
            packed.bitwise_or_(third.bitwise_and_(3).bitwise_left_shift_(4))
            packed.bitwise_or_(second.bitwise_and_(3).bitwise_left_shift_(2))
            packed.bitwise_or_(first.bitwise_and_(3))


def unpack(packed: Tensor, bits: int, symbols: Tensor) -> None:
    """Reverse ``pack``."""
    match bits:
        case 8:
            symbols.copy_(packed)
        case 4:
            low, high = symbols.view(2, -1)
            torch.bitwise_left_shift(packed, 4, out=low)
            low.bitwise_right_shift_(4)  # an arithmetic shift extends the sign
            torch.bitwise_right_shift(packed, 4, out=high)
        case 2:
            for place, quarter in enumerate(symbols.view(4, -1)):
                torch.bitwise_left_shift(packed, 6 - 2 * place, out=quarter)
                quarter.bitwise_right_shift_(6)


def split_bytes(halves: Tensor, planes: Tensor) -> None:
    """Split ``halves`` int16[m] into ``planes`` uint8[2, m]: high bytes, then low bytes. ``halves`` become scratch."""
    high, low = planes.view(torch.int8)
    low.copy_(halves)  # keeps the low byte
    high.copy_(halves.bitwise_right_shift_(8))


def join_bytes(planes: Tensor, halves: Tensor, room: Tensor) -> None:
    """Reverse ``split_bytes``. ``room`` float32[at least m / 2] is scratch."""
    high, low = planes
    wide = room.view(torch.int16)[: halves.numel()]
    halves.copy_(high).bitwise_left_shift_(8)
    halves.bitwise_or_(wide.copy_(low))


def to_exponents(scaled: Tensor, narrow: Tensor, codes: Tensor) -> None:
    """Convert ``scaled`` float32[m] in about [-64, 64] to E3M0 ``codes`` int8[m] in 0..15 (8 is the sign).

    Each value is rounded to the nearest power of two, and to zero below 3/4. ``scaled`` and ``narrow`` bfloat16[m]
    become scratch.
    """
    halves = narrow.copy_(scaled).view(torch.int16)
    exponents = scaled.view(torch.int16)[: halves.numel()]
    torch.bitwise_and(halves, 0x7FFF, out=exponents)
    # Half a mantissa carries into the exponent from 1.5 up; 127 is bfloat16's exponent of 1.0, which is code 1.
    exponents.add_(0x40 - (126 << 7)).bitwise_right_shift_(7).clamp_(0, 7)
    codes.copy_(exponents.bitwise_or_(halves.bitwise_right_shift_(12).bitwise_and_(8)))


def from_exponents(codes: Tensor, narrow: Tensor) -> None:
    """Convert E3M0 ``codes`` int8[m], sign-extended from 4 bits, to symbols 0, +-1, +-2 ... +-64 in place.

    ``narrow`` uint8[2 m] is scratch.
    """
    exponents, powers = narrow.view(2, -1)
    torch.bitwise_and(codes.view(torch.uint8), 7, out=exponents)
    powers.fill_(1).bitwise_left_shift_(exponents).bitwise_right_shift_(1)
    codes.bitwise_right_shift_(7)  # 0 or -1: two's complement turns a magnitude m into (m ^ -1) - -1
    codes.copy_(powers.view(torch.int8).bitwise_xor_(codes).sub_(codes))


# -- Body of a chunk ---------------------------------------------------------------------------------------------------


if sys.byteorder != "little":
    raise ImportError("p2pdiloco's payloads are little-endian, this machine is not")

VERSION: Final = 2

_CODECS: Final[dict[int, Codec]] = {form.number: codec for codec, form in FORMATS.items()}
LARGEST: Final = 2.0**119
"""Values and scales; 128 times as much is still finite."""
LARGEST_BITS: Final = (119 + 127) << 7
_INFINITE_BITS: Final = 255 << 7


def chunk_count(elements: int) -> int:
    """Return the number of chunks, and so of bodies, of a vector of ``elements``."""
    return -(-elements // CHUNK)


def largest_bits(symbols: Tensor) -> int:
    """Return the bits of the largest absolute value of bfloat16 ``symbols``. Infinity and NaN have larger bits."""
    magnitudes = scratch.work.view(torch.int16)[: symbols.numel()]
    return int(torch.bitwise_and(symbols.view(torch.int16), 0x7FFF, out=magnitudes).max())


def opened(body: Buffer, elements: int) -> tuple[Cut | None, Codec, int]:
    """Check a body and open it: return its cut with packed symbols and scales, its codec and its block.

    bf16 has no cut (None); its values are in ``scratch.narrow``.

    Raises:
        ValueError: the body is malformed, or has values that are not finite.
    """
    raw = memoryview(body).cast("B")
    codec, block = _checked_header(raw, elements)
    # The copy aligns the symbols and protects them: torch cannot read a read-only buffer without a warning.
    np.copyto(scratch.bytes[: len(raw)], np.frombuffer(raw, dtype=np.uint8))
    if codec == "bf16":
        symbols = scratch.narrow[:elements]
        join_bytes(scratch.body[HEADER.size : len(raw)].view(2, -1), symbols.view(torch.int16), scratch.work)
        if largest_bits(symbols) >= _INFINITE_BITS:
            raise ValueError("the body has a value that is not finite")
        return None, codec, block
    cut = scratch.cut(FORMATS[codec].bits, block, elements)
    lowest, highest = torch.aminmax(cut.scale_bits)
    if int(lowest) < 0 or int(highest) > LARGEST_BITS:
        raise ValueError("the body has a scale that is negative, too large or not a number")
    cut.wide.copy_(cut.scales)
    return cut, codec, block


def _checked_header(raw: memoryview, elements: int) -> tuple[Codec, int]:
    if len(raw) < HEADER.size:
        raise ValueError(f"the body has {len(raw)} bytes, its header alone needs {HEADER.size}")
    version, number, block, claimed = HEADER.unpack_from(raw)
    if version != VERSION:
        raise ValueError(f"the body has version {version}, this release reads version {VERSION}")
    codec = _CODECS.get(number)
    if codec is None:
        raise ValueError(f"the body names codec {number}, which does not exist")
    if claimed != elements:
        raise ValueError(f"the body claims {claimed} elements, expected {elements}")
    if block not in ((0,) if codec == "bf16" else BLOCKS):
        raise ValueError(f"the body has blocks of {block} elements, which {codec} does not support")
    expected = body_bytes(FORMATS[codec].bits, block, elements)
    if len(raw) != expected:
        raise ValueError(f"the body has {len(raw)} bytes, {elements} elements in {codec} have {expected}")
    return codec, block
