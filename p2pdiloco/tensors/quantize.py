"""Blockwise quantizers: one float32 vector to bytes and back.

A body (all integers little-endian)::

    version  uint8    1
    codec    uint8    1 = int4, 2 = int8, 3 = bf16
    block    uint16   elements that share one scale: 256 (bf16: 0)
    elements uint64   n
    scales   bfloat16[ceil(n / block)]           (bf16: none)
    symbols  int4: for each chunk of 256 Ki elements, padded with zeros to whole blocks of m elements in all, m / 2
                   bytes: element i in the low and element m / 2 + i in the high nibble, two's complement
             int8: int8[n]
             bf16: bfloat16[n]

Rules of this file:
1. value = symbol * scale: exactly one float32 multiply, so every machine decodes the same bits. Encoding need not be
   reproducible: only one peer encodes a payload.
2. The scale is rounded to bfloat16 *before* it divides, so its rounding costs no accuracy: 2 bytes for a block instead
   of 4, with float32's range.
3. int4's step is 0.335 times the block's root mean square, which is near the best for a bell-shaped block (it clips
   beyond 2.35 rms); a block with one value beyond 6 rms (a rare token's row in an embedding) takes absmax / 7 instead,
   because there clipping would cost more than the coarser step does. int8's step is absmax / 127.
4. A body comes from a hostile peer. ``decode`` reads nothing before the header, the length and every scale are checked,
   and what it returns is finite.
5. Temporary memory is a few MiB whatever n is (and 4 bytes for each scale).

The halves are packed rather than neighbours because that is six times faster (whole vectors at a time), and 4-bit outer
gradients cost no measurable quality (arXiv 2501.18512, section 3.4; arXiv 2604.21428).
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.protocol.manifest import Codec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

VERSION: Final = 1
BLOCK: Final = 256
CHUNK: Final = 1 << 18
"""Elements encoded at a time; a part of int4's format."""
HEADER: Final = struct.Struct("<BBHQ")

_IDS: Final[dict[Codec, int]] = {"int4": 1, "int8": 2, "bf16": 3}
_LARGEST_SYMBOL: Final[dict[Codec, int]] = {"int4": 7, "int8": 127}
_RMS_STEP: Final = 0.335
_HEAVY_TAIL: Final = 6.0
_SMALLEST_SCALE: Final = 1e-30
"""A block whose step is smaller is all zeros."""
_LARGEST_SCALE: Final = 2.0**119
"""128 steps of this size are still finite."""


def body_bytes(codec: Codec, elements: int) -> int:
    """The exact length of a body of ``elements`` parameters."""
    blocks = -(-elements // BLOCK)
    match codec:
        case "int4":
            return HEADER.size + 2 * blocks + blocks * BLOCK // 2
        case "int8":
            return HEADER.size + 2 * blocks + elements
        case "bf16":
            return HEADER.size + 2 * elements


def encode(codec: Codec, x: Tensor) -> bytes:
    """Quantize ``x`` (1-D float32 on the CPU, any length).

    Raises:
        ValueError: ``x`` has the wrong type or shape, or a value that is not finite (or beyond the codec's
            range, 6e35).
    """
    if x.dim() != 1 or x.dtype != torch.float32 or x.device.type != "cpu":
        raise ValueError(f"expected a 1-D float32 vector on the CPU, not {x.dtype} of shape {tuple(x.shape)}")
    x = x.detach().contiguous()
    elements = x.numel()
    body = torch.empty(body_bytes(codec, elements), dtype=torch.uint8)
    block = 0 if codec == "bf16" else BLOCK
    header = HEADER.pack(VERSION, _IDS[codec], block, elements)
    body.numpy()[: HEADER.size] = np.frombuffer(header, dtype=np.uint8)
    payload = body[HEADER.size :]
    if codec == "bf16":
        _encode_bf16(x, payload)
    else:
        _encode_blocks(codec, x, payload)
    return body.numpy().tobytes()


def decode(body: Buffer, elements: int, out: Tensor | None = None) -> Tensor:
    """Dequantize ``body`` into ``out`` (1-D contiguous float32 of ``elements``), or into a new vector.

    Raises:
        ValueError: the body is not that of ``elements`` finite parameters. ``out`` may then be partly overwritten.
    """
    raw = np.frombuffer(memoryview(body), dtype=np.uint8)
    codec = _checked_codec(raw, elements)
    if out is None:
        out = torch.empty(elements, dtype=torch.float32)
    elif out.shape != (elements,) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous float32 vector of {elements} elements")
    payload = raw[HEADER.size :]
    match codec:
        case "bf16":
            _decode_bf16(payload, out)
        case "int8":
            _decode_int8(payload, out)
        case "int4":
            _decode_int4(payload, out)
    return out


# ---------------------------------------------------------------------------------------------------------- encoding


def _encode_bf16(x: Tensor, payload: Tensor) -> None:
    symbols = payload.view(torch.bfloat16)
    work = torch.empty(min(CHUNK, x.numel()))
    for start in range(0, x.numel(), CHUNK):
        piece = x[start : start + CHUNK]
        if not _largest(piece, work) <= _LARGEST_SCALE:  # NaN compares false
            raise ValueError(f"not finite: the vector has a NaN, an infinity, or a value beyond {_LARGEST_SCALE:.0e}")
        symbols[start : start + CHUNK].copy_(piece)


def _largest(piece: Tensor, work: Tensor) -> float:
    """The largest absolute value; NaN if there is one. ``work`` is scratch."""
    return float(torch.abs(piece, out=work[: piece.numel()]).amax())


def _encode_blocks(codec: Codec, x: Tensor, payload: Tensor) -> None:
    elements = x.numel()
    blocks = -(-elements // BLOCK)
    scales = payload[: 2 * blocks].view(torch.bfloat16)
    symbols = payload[2 * blocks :].view(torch.int8)
    largest = _LARGEST_SYMBOL[codec]
    room = min(CHUNK, blocks * BLOCK)
    scaled = torch.empty(room)
    integers = torch.empty(room, dtype=torch.int8)
    for start in range(0, elements, CHUNK):
        piece = x[start : start + CHUNK]
        rows = _padded_rows(piece)
        padded = rows.numel()
        work = scaled[:padded].view(-1, BLOCK)
        step = _steps(codec, rows, work, tail=piece.numel() % BLOCK)
        kept = scales[start // BLOCK : start // BLOCK + rows.shape[0]]
        kept.copy_(step)
        step = kept.float()
        # A step that is zero stands for a block of zeros: dividing by 1 rounds what is in it to the symbol 0.
        torch.mul(rows, step.masked_fill(step == 0.0, 1.0).reciprocal_().unsqueeze(1), out=work)
        work.round_().clamp_(-largest, largest)
        whole = integers[:padded]
        whole.copy_(scaled[:padded])
        if codec == "int8":
            symbols[start : start + piece.numel()].copy_(whole[: piece.numel()])
        else:
            _pack_halves(whole, symbols[start // 2 : start // 2 + padded // 2])


def _padded_rows(piece: Tensor) -> Tensor:
    """``piece`` as rows of one block each; the last is filled up with zeros if it is short."""
    missing = -piece.numel() % BLOCK
    if missing:
        piece = torch.cat((piece, torch.zeros(missing)))
    return piece.view(-1, BLOCK)


def _steps(codec: Codec, rows: Tensor, work: Tensor, *, tail: int) -> Tensor:
    """The step of each row, [rows]; ``tail`` is the number of real elements in the last row if that is short, else 0.

    Raises:
        ValueError: a value is not finite, or too large.
    """
    torch.abs(rows, out=work)
    absmax = torch.amax(work, dim=1)
    step = absmax / _LARGEST_SYMBOL[codec]
    if not bool((absmax <= _LARGEST_SCALE).all()):  # NaN compares false
        raise ValueError(f"not finite: the vector has a NaN, an infinity, or a value beyond {_LARGEST_SCALE:.0e}")
    if codec == "int4":
        rms = torch.linalg.vector_norm(rows, 2, dim=1).mul_(1 / math.sqrt(BLOCK))
        if tail:
            rms[-1] *= math.sqrt(BLOCK / tail)
        # Squares that overflow or vanish make rms infinite or 0: such a block is scaled by absmax as well.
        is_bell = torch.isfinite(rms) & (absmax <= _HEAVY_TAIL * rms)
        step = torch.where(is_bell, rms * _RMS_STEP, step)
    return step.masked_fill_(step < _SMALLEST_SCALE, 0.0)


def _pack_halves(symbols: Tensor, packed: Tensor) -> None:
    """``symbols`` int8[2 h] in [-8, 7] to ``packed`` int8[h]: first half low, second half high."""
    half = packed.numel()
    torch.bitwise_left_shift(symbols[half:], 4, out=packed)
    packed.bitwise_or_(symbols[:half].bitwise_and_(15))


# ---------------------------------------------------------------------------------------------------------- decoding


def _checked_codec(raw: NDArray[np.uint8], elements: int) -> Codec:
    if raw.size < HEADER.size:
        raise ValueError(f"the body has {raw.size} bytes, its header alone needs {HEADER.size}")
    version, number, block, claimed = HEADER.unpack(raw[: HEADER.size].tobytes())
    if version != VERSION:
        raise ValueError(f"the body has version {version}, this release reads version {VERSION}")
    codec = next((name for name, known in _IDS.items() if known == number), None)
    if codec is None:
        raise ValueError(f"the body names codec {number}, which does not exist")
    if claimed != elements:
        raise ValueError(f"the body claims {claimed} elements, expected {elements}")
    if block != (0 if codec == "bf16" else BLOCK):
        raise ValueError(f"the body has blocks of {block}, {codec} does not")
    expected = body_bytes(codec, elements)
    if raw.size != expected:
        raise ValueError(f"the body has {raw.size} bytes, {elements} elements in {codec} have {expected}")
    return codec


def _checked_scales(payload: NDArray[np.uint8], elements: int) -> tuple[Tensor, NDArray[np.uint8]]:
    """The scales, float32[blocks], and the symbols' bytes."""
    size = 2 * -(-elements // BLOCK)
    scales = _widen(payload[:size])
    if not bool(((scales >= 0) & (scales <= _LARGEST_SCALE)).all()):  # NaN compares false
        raise ValueError("the body has a scale that is negative, too large or not a number")
    return torch.from_numpy(scales), payload[size:]


def _widen(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Little-endian bfloat16 bytes to float32: exact, the missing mantissa bits are zeros."""
    return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _decode_bf16(payload: NDArray[np.uint8], out: Tensor) -> None:
    scratch = torch.empty(min(CHUNK, out.numel()), dtype=torch.bfloat16)
    work = torch.empty(scratch.numel())
    for start in range(0, out.numel(), CHUNK):
        piece = out[start : start + CHUNK]
        symbols = scratch[: piece.numel()]
        symbols.view(torch.uint8).numpy()[:] = payload[2 * start : 2 * (start + piece.numel())]
        piece.copy_(symbols)
        if not _largest(piece, work) < math.inf:
            raise ValueError("the body has a value that is not finite")


def _decode_int8(payload: NDArray[np.uint8], out: Tensor) -> None:
    scales, raw = _checked_scales(payload, out.numel())
    scratch = torch.zeros(min(CHUNK, scales.numel() * BLOCK), dtype=torch.int8)
    for start in range(0, out.numel(), CHUNK):
        piece = out[start : start + CHUNK]
        # Through numpy: torch warns about a tensor over read-only bytes, and this copy is what keeps it safe.
        scratch.numpy()[: piece.numel()] = raw[start : start + piece.numel()].view(np.int8)
        _multiply(scratch, scales[start // BLOCK :], piece)


def _decode_int4(payload: NDArray[np.uint8], out: Tensor) -> None:
    scales, raw = _checked_scales(payload, out.numel())
    room = min(CHUNK, scales.numel() * BLOCK)
    symbols = torch.empty(room, dtype=torch.int8)
    scratch = torch.empty(room // 2, dtype=torch.int8)
    for start in range(0, out.numel(), CHUNK):
        piece = out[start : start + CHUNK]
        half = -(-piece.numel() // BLOCK) * BLOCK // 2
        packed = scratch[:half]
        packed.numpy()[:] = raw[start // 2 : start // 2 + half].view(np.int8)
        low, high = symbols[:half], symbols[half : 2 * half]
        torch.bitwise_left_shift(packed, 4, out=low)
        low.bitwise_right_shift_(4)  # of signed integers: the sign comes along
        torch.bitwise_right_shift(packed, 4, out=high)
        _multiply(symbols, scales[start // BLOCK :], piece)


def _multiply(symbols: Tensor, scales: Tensor, piece: Tensor) -> None:
    """piece[i] = symbols[i] * scales[i // BLOCK]; ``symbols`` and ``scales`` may be longer."""
    whole, tail = divmod(piece.numel(), BLOCK)
    end = whole * BLOCK
    if whole:
        torch.mul(symbols[:end].view(-1, BLOCK), scales[:whole].unsqueeze(1), out=piece[:end].view(-1, BLOCK))
    if tail:
        torch.mul(symbols[end : end + tail], scales[whole], out=piece[end:])
