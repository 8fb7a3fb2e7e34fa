"""One chunk's body in bytes: what it holds, and what is checked before any of it is read.

A vector is cut into chunks of 256 Ki elements; every chunk becomes one body that says all a decoder needs (all integers
little-endian)::

    version  uint8    2
    codec    uint8    1 = int4, 2 = int8, 3 = bf16, 4 = int2, 5 = e3m0
    block    uint16   elements that share one scale (bf16: 0)
    elements uint32   n, at most 256 Ki
    symbols  padded with zeros to whole blocks, packed as ``bit_layout`` says   (bf16: n high bytes, n low bytes)
    scales   bfloat16[ceil(n / block)]                                       (bf16: none)

Rules of this file:
1. A body comes from a hostile peer. Nothing of it is used before the header, the length and every scale are checked:
   what ``quantizers`` make of it is finite.
2. What is opened lives in this thread's scratch (see ``scratch``): use it before opening the next.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.protocol.manifest import Codec
from p2pdiloco.tensors import bit_layout, kernels
from p2pdiloco.tensors.recipes import BLOCKS, CHUNK, FORMATS
from p2pdiloco.tensors.scratch import HEADER, Cut, body_bytes, scratch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

if sys.byteorder != "little":
    raise ImportError("p2pdiloco's payloads are little-endian, this machine is not")

VERSION: Final = 2

_CODECS: Final[dict[int, Codec]] = {form.number: codec for codec, form in FORMATS.items()}
LARGEST: Final = 2.0**119
"""Values and scales; 128 times as much is still finite."""
LARGEST_BITS: Final = (119 + 127) << 7
_INFINITE_BITS: Final = 255 << 7


def chunk_count(elements: int) -> int:
    """How many bodies a vector of ``elements`` becomes."""
    return -(-elements // CHUNK)


def largest_bits(symbols: Tensor) -> int:
    """The bits of the largest absolute value of bfloat16 ``symbols``; those of infinity and NaN are larger still."""
    magnitudes = scratch.work.view(torch.int16)[: symbols.numel()]
    return int(torch.bitwise_and(symbols.view(torch.int16), 0x7FFF, out=magnitudes).max())


class Packed(NamedTuple):
    """An int4 body as ``kernels`` take it: checked, and not copied."""

    packed: NDArray[np.int8]
    scales: NDArray[np.float32]
    """In this thread's scratch."""
    block: int


def opened_int4(body: Buffer, elements: int, slot: int = 0) -> Packed | None:
    """The body of a chunk, if it is int4 and there are kernels for it. The scales of each ``slot`` (0 or 1) last until
    its next use.

    Raises:
        ValueError: as ``decode_chunk``.
    """
    if not scratch.is_fast:
        return None
    raw = memoryview(body).cast("B")
    codec, block = _checked_header(raw, elements)
    if codec != "int4":
        return None
    blocks = -(-elements // block)
    symbols = len(raw) - HEADER.size - 2 * blocks
    scales = scratch.scales[slot][:blocks]
    found = np.frombuffer(raw, np.uint8, 2 * blocks, HEADER.size + symbols)
    if not kernels.widen_scales(found, scales.view(np.int32), LARGEST_BITS):
        raise ValueError("the body has a scale that is negative, too large or not a number")
    return Packed(np.frombuffer(raw, np.int8, symbols, HEADER.size), scales, block)


def opened(body: Buffer, elements: int) -> tuple[Cut | None, Codec, int]:
    """The checked body's cut, with packed symbols and scales, its codec and its block. bf16 has no cut: its values are
    in ``scratch.narrow``."""
    raw = memoryview(body).cast("B")
    codec, block = _checked_header(raw, elements)
    # The copy aligns the symbols and protects them: torch cannot read a read-only buffer without a warning.
    np.copyto(scratch.bytes[: len(raw)], np.frombuffer(raw, dtype=np.uint8))
    if codec == "bf16":
        symbols = scratch.narrow[:elements]
        bit_layout.join_bytes(scratch.body[HEADER.size : len(raw)].view(2, -1), symbols.view(torch.int16), scratch.work)
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
        raise ValueError(f"the body has blocks of {block}, {codec} cannot")
    expected = body_bytes(FORMATS[codec].bits, block, elements)
    if len(raw) != expected:
        raise ValueError(f"the body has {len(raw)} bytes, {elements} elements in {codec} have {expected}")
    return codec, block
