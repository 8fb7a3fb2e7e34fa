"""Blockwise quantization of a float32 vector to small encoded bodies, and the reverse.

``formats`` defines the binary format of a body.

Rules of this file:
1. value = symbol * scale is exactly one float32 multiply, so every machine decodes the same bits. Every machine also
   encodes a vector to the same bits, so that a merge can be made again and compared. Sums of squares are therefore
   added in a fixed order (``LANES``).
2. A scale is rounded to bfloat16 *before* it divides, so its rounding costs no accuracy. Scales come last so that zstd
   codes the symbols with one table: 0.9 % fewer bytes than scales first. For the same reason bf16's high bytes, the
   only ones that entropy coding can shrink, are kept apart from its low bytes: 14 % fewer bytes.
3. A thread's calls share its scratch, and its torch is set to one thread (see ``scratch``).
4. The C library (``shard_codec``) is used where it is present. It encodes and decodes to the same bits.

4-bit outer gradients cost no measurable quality (arXiv 2501.18512, section 3.4; arXiv 2604.21428).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.codec import formats, native, shard_codec
from p2pdiloco.codec.formats import (
    BLOCK,
    CHUNK,
    FORMATS,
    HEADER,
    LARGEST,
    LARGEST_BITS,
    LARGEST_BODY,
    VERSION,
    Cut,
    Part,
    Recipe,
    chunk_count,
    largest_bits,
    opened,
    recipe,
    scratch,
)
from p2pdiloco.codec.shard_codec import SAFE_NORMS, Bodies, encoded
from p2pdiloco.protocol.manifest import Codec

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "BLOCK",
    "CHUNK",
    "LARGEST_BODY",
    "Recipe",
    "add_chunk",
    "chunk_count",
    "decode_chunk",
    "decode_chunks",
    "encode_chunk",
    "encode_vector",
    "recipe",
    "squared_norm",
    "sum_of_squares",
]

LANES: Final = 32
"""Partial sums of a sum of squares: element i belongs to sum i modulo this. The C library adds in the same order."""
_SMALLEST_SCALE: Final = 1e-30
"""A block with a smaller scale is encoded as zeros."""


# ---------------------------------------------------------------------------------------------------------- encoding


def encode_vector(recipe: Recipe, x: Tensor, less: Tensor | None = None, room: int = 0) -> Bodies:
    """Encode ``x`` - ``less`` and return one body for each chunk, after ``room`` bytes.

    Both are 1-D float32 on the CPU, of any length; ``less`` must be contiguous.

    Raises:
        ValueError: ``x`` has the wrong type or shape, or a value that is not finite (or beyond the codecs' range,
            6e35).
    """
    if x.dim() != 1 or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"expected a 1-D float32 vector on the CPU, not {x.dtype} of shape {tuple(x.shape)}")
    x = x.detach().contiguous()
    if (found := encoded(recipe, x, less, room)) is not None:
        return found
    memory, ends = bytearray(room), list[int]()
    for start in range(0, x.numel(), CHUNK):
        span = slice(start, start + CHUNK)
        memory += encode_chunk(recipe, x[span], None if less is None else less[span])
        ends.append(len(memory) - room)
    return Bodies.after(room, memoryview(memory), ends)


def encode_chunk(recipe: Recipe, piece: Tensor, less: Tensor | None = None) -> memoryview:
    """Encode ``piece`` - ``less`` and return the body of this chunk; see ``encode_vector``.

    Both are contiguous and have 1 to 256 Ki elements. The body may live in this thread's scratch: use it before the
    next call, on the same thread.
    """
    elements, form = piece.numel(), FORMATS[recipe.codec]
    if (found := encoded(recipe, piece, less)) is not None:
        return found.memory
    if less is not None:
        piece = torch.sub(piece, less, out=scratch.values[:elements])
    if recipe.codec == "bf16":
        return _encode_bf16(piece)
    cut = scratch.cut(form.bits, recipe.block, elements)
    HEADER.pack_into(cut.body, 0, VERSION, form.number, recipe.block, elements)
    rows = [_rows(piece, part, recipe.block) for part in cut.parts]
    for x, part in zip(rows, cut.parts, strict=True):
        if recipe.step:
            _scales_by_rms(recipe, x, part)
        else:
            _scales_by_largest(recipe, x, part, part.wanted)
    for x, part in zip(rows, cut.parts, strict=True):
        _quantize(recipe, x, part)
    formats.pack(cut.symbols, form.bits, cut.packed)
    return cut.body


def _rows(piece: Tensor, part: Part, block: int) -> Tensor:
    """Return a part of a chunk as [blocks, block], padded with zeros."""
    start, elements = part.first * block, part.symbols.numel()
    x = piece[start : start + elements]
    if x.numel() < elements:
        x = torch.cat((x, torch.zeros(elements - x.numel())))
    return x.view(-1, block)


def _encode_bf16(piece: Tensor) -> memoryview:
    elements = piece.numel()
    size = HEADER.size + 2 * elements
    view = scratch.bytes.data[:size]
    HEADER.pack_into(view, 0, VERSION, FORMATS["bf16"].number, 0, elements)
    symbols = scratch.narrow[:elements].copy_(piece)
    _require_finite(largest_bits(symbols) <= LARGEST_BITS)
    formats.split_bytes(symbols.view(torch.int16), scratch.body[HEADER.size : size].view(2, -1))
    return view


def _require_finite(is_finite: bool) -> None:
    if not is_finite:
        raise ValueError(f"not finite: the vector has a NaN, an infinity, or a value beyond {LARGEST:.0e}")


def _quantize(recipe: Recipe, rows: Tensor, part: Part) -> None:
    """Compute the symbols of ``rows``, float32 [blocks, block], from the scales already in ``part``."""
    largest = FORMATS[recipe.codec].largest
    bound = 1.01 * largest  # largest possible value after scaling; 1 % for the scale's rounding
    if recipe.step:
        bound = max(bound, 1.01 * math.sqrt(part.filled) / recipe.step)
    torch.mul(rows, part.inverse, out=part.work)
    if recipe.codec == "e3m0":
        formats.to_exponents(part.work.view(-1), scratch.narrow[: rows.numel()], part.symbols)
        return
    if bound > 127:
        part.work.clamp_(-127, 127)
    part.symbols.copy_(part.work.view(-1).round_())
    if recipe.tail < math.inf:
        _mend_tails(recipe, rows, part)
    if bound > largest:
        part.symbols.clamp_(-largest, largest)


def _scales_by_rms(recipe: Recipe, rows: Tensor, part: Part) -> None:
    norms = part.wanted.copy_(_block_norms(rows, part))
    factor = float(np.float32(recipe.step)) / math.sqrt(part.filled)
    lowest, highest = torch.aminmax(norms)
    if SAFE_NORMS[0] <= float(lowest) and float(highest) <= SAFE_NORMS[1]:  # NaN compares false
        part.scales.copy_(norms.mul_(factor))
        torch.reciprocal(part.inverse.squeeze(1).copy_(part.scales), out=part.inverse.squeeze(1))
        return
    # Blocks of zeros are common in embeddings. All blocks with unusual norms are scaled by their largest value.
    is_sound = (norms >= SAFE_NORMS[0]) & (norms <= SAFE_NORMS[1])
    by_rms = norms * factor
    _scales_by_largest(recipe, rows, part, torch.where(is_sound, by_rms, -1.0))


def _block_norms(rows: Tensor, part: Part) -> Tensor:
    """Return the norms of ``rows``, float32 [blocks], summed in the order of the C library's ``squares_of_block``."""
    squares, whole = torch.mul(rows, rows, out=part.work), part.filled - part.filled % LANES
    lanes, total = torch.zeros(rows.shape[0], LANES), torch.zeros(rows.shape[0])
    for start in range(0, whole, LANES):
        lanes += squares[:, start : start + LANES]
    for column in squares[:, whole : part.filled].unbind(1):
        total += column
    width = LANES // 2
    while width:
        lanes[:, :width] += lanes[:, width : 2 * width]
        width //= 2
    return torch.from_numpy(np.sqrt(total.add_(lanes[:, 0]).numpy()))  # torch's own may be off by the last bit


def _scales_by_largest(recipe: Recipe, rows: Tensor, part: Part, known: Tensor) -> None:
    """Scale blocks by their largest value where ``known`` has no positive scale.

    ``known`` may be ``part.wanted``, which is overwritten; then all blocks are scaled by their largest value.
    """
    absmax = torch.amax(torch.abs(rows, out=part.work), dim=1)
    _require_finite(float(absmax.max()) <= LARGEST)  # NaN compares false
    wanted = absmax.div_(FORMATS[recipe.codec].largest)
    if known is not part.wanted:
        wanted = torch.where(known > 0.0, known, wanted)
    part.scales.copy_(wanted.masked_fill_(wanted < _SMALLEST_SCALE, 0.0))
    part.inverse.copy_(_inverse(part.scales))


def _inverse(scales: Tensor) -> Tensor:
    """Return 1 / scales, [blocks, 1]. A scale of zero marks a block of zeros; its inverse 1 rounds the content to 0."""
    wide = scales.float()
    return wide.masked_fill_(wide == 0.0, 1.0).reciprocal_().unsqueeze(1)


def _mend_tails(recipe: Recipe, rows: Tensor, part: Part) -> None:
    """Scale those blocks by their largest value for which clipping would cost more.

    The symbols are clipped only at 127 so far. Scanning them to find candidates is four times faster than scanning the
    values.
    """
    suspicious = min(127.0, 0.99 * recipe.tail // recipe.step)
    lowest, highest = torch.aminmax(part.symbols)
    if int(highest) < suspicious and int(lowest) > -suspicious:
        return
    largest, grid = FORMATS[recipe.codec].largest, part.symbols.view(rows.shape)
    where = (grid.abs().amax(1) >= suspicious).nonzero().squeeze(1)
    absmax = rows[where].abs_().amax(1)
    is_heavy = absmax * recipe.step > recipe.tail * part.scales[where].float()
    where = where[is_heavy]
    part.scales[where] = (absmax[is_heavy] / largest).to(torch.bfloat16)
    scaled = rows[where].mul_(_inverse(part.scales[where]))
    grid[where] = scaled.round_().clamp_(-largest, largest).to(torch.int8)


# ---------------------------------------------------------------------------------------------------------- decoding


def decode_chunks(bodies: Iterable[Buffer], out: Tensor) -> Tensor:
    """Dequantize the bodies of one vector, in order, into ``out`` (1-D contiguous float32 on the CPU); return it.

    Raises:
        ValueError: a body does not belong to its chunk of ``out``, or there are too few or too many. ``out`` may then
            be partly overwritten.
    """
    start = 0
    for body in bodies:
        if start >= out.numel():
            raise ValueError(f"got more bodies than the {chunk_count(out.numel())} of {out.numel()} elements")
        decode_chunk(body, out[start : start + CHUNK])
        start += CHUNK
    if start < out.numel():
        raise ValueError(f"got only {start // CHUNK} of {chunk_count(out.numel())} bodies")
    return out


def decode_chunk(body: Buffer, out: Tensor) -> Tensor:
    """Dequantize one chunk's body into ``out``, which has exactly its elements; return it.

    Raises:
        ValueError: the body is malformed or does not hold ``out.numel()`` finite parameters.
    """
    _require_chunk(out)
    if shard_codec.decoded(body, out):
        return out
    cut, codec, block = opened(body, out.numel())
    if cut is None:
        out.copy_(scratch.narrow[: out.numel()])
    else:
        _unpack(cut, codec)
        _multiply(cut, block, out)
    return out


def add_chunk(body: Buffer, factor: float, out: Tensor) -> None:
    """Add ``factor`` times the dequantized body to ``out``, each operation rounded; see ``decode_chunk``."""
    _require_chunk(out)
    if shard_codec.decoded(body, out, factor):
        return
    values = scratch.values[: out.numel()]
    decode_chunk(body, values)
    out.add_(values.mul_(factor))


def squared_norm(body: Buffer, elements: int) -> float:
    """Return the squared norm of one chunk's vector, in float64; the same bits with and without the C library.

    For codecs with scales it is computed from the symbols, whose sums of squares are exact, block after block.

    Raises:
        ValueError: as for ``decode_chunk``.
    """
    if (found := shard_codec.squared_norms(Bodies.of(body), elements)) is not None:
        return found[0]
    cut, codec, block = opened(body, elements)
    if cut is None:
        values = scratch.narrow[:elements].float()
        return _sum_of_squares(torch.nn.functional.pad(values, (0, -elements % LANES)))
    _unpack(cut, codec)
    work = scratch.work[: cut.symbols.numel()]
    sums = work.copy_(cut.symbols).square_().view(-1, block).sum(1, dtype=torch.float64)
    squares = sums.numpy() * np.square(cut.flat_wide, dtype=np.float64)
    return float(np.add.accumulate(squares)[-1])


def sum_of_squares(vector: Tensor) -> float:
    """Return the sum of the squares of a contiguous float32 vector, in float64; the same bits on every machine."""
    return float(native.squares(vector.numpy())) if native.is_used else _sum_of_squares(vector)


def _sum_of_squares(vector: Tensor) -> float:
    """Do what the C library's ``squares`` does, in the same order."""
    values, whole = vector.numpy(), vector.numel() - vector.numel() % LANES
    lanes, total = np.zeros(LANES), 0.0
    for start in range(0, whole, CHUNK):
        squares = np.square(values[start : min(start + CHUNK, whole)], dtype=np.float64).reshape(-1, LANES)
        squares[0] += lanes
        lanes = np.add.accumulate(squares)[-1]
    for square in (*np.square(values[whole:], dtype=np.float64).tolist(), *lanes.tolist()):
        total += square
    return total


def _require_chunk(out: Tensor) -> None:
    if out.dim() != 1 or out.dtype != torch.float32 or not out.is_contiguous() or not 0 < out.numel() <= CHUNK:
        raise ValueError(f"a chunk must be a contiguous float32 vector of 1 to {CHUNK} elements")


def _unpack(cut: Cut, codec: Codec) -> None:
    formats.unpack(cut.packed, FORMATS[codec].bits, cut.symbols)
    if codec == "e3m0":
        formats.from_exponents(cut.symbols, scratch.narrow.view(torch.uint8)[: 2 * cut.symbols.numel()])


def _multiply(cut: Cut, block: int, out: Tensor) -> None:
    """Compute out[i] = symbols[i] * scales[i // block]."""
    out.copy_(cut.symbols[: out.numel()])
    start = 0
    for part in cut.parts:
        rows = out[start : start + part.wanted.numel() * block]
        start += rows.numel()
        rows.view(-1, part.filled).mul_(part.wanted.unsqueeze(1))
