"""int4 in one pass over memory, where there is a compiler: one at the installation (``native``) or numba, when this is
imported (``pip install p2pdiloco[fast]``). The outer step with it is in ``step_kernels``.

Rules of this file:
1. What all peers must compute alike has the bits of the torch path, which stays the reference: elementwise IEEE
   operations and sums of integers, without ``fastmath`` (so that no multiply and add become one). Tests compare
   both. Sums of floats, of which only one peer needs the result (a block's scale, a merge's norms), may be reordered.
2. Work goes by half blocks: a packed byte holds an element of each half of the chunk, and a chunk's middle may be that
   of a block. What is between two steps of it stays in the first cache.
3. Packed symbols are read where zstd put them: nothing is copied, and nothing of them is written.
4. By numba they are compiled when this module is imported, and kept on disk; all run without the GIL.
5. What stands here is what ``native.c`` has to do, bit for bit; what takes a body it has under no name of these but for
   whole bodies (``shard_bodies``), so that here it is numba's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from p2pdiloco.codec import native

if TYPE_CHECKING:
    from numpy.typing import NDArray


try:
    numba: Any = import_module("numba") if native.LIBRARY is None else None
except ImportError:
    numba = None

AVAILABLE: Final = native.LIBRARY is not None or numba is not None

RUN: Final = 1024
"""Elements that are worked on at a time, or a half block if that is longer: some vectors of them fill half the first
cache, and what a loop costs to begin does not count."""

F = TypeVar("F", bound=Callable[..., Any])


def compiled(signature: str, *, fastmath: set[str] | bool = False) -> Callable[[F], F]:
    """``bytes_`` and ``symbols_`` in ``signature`` are vectors that may be read-only."""
    if numba is None:

        def library(function: F) -> F:
            return cast(F, native.function(function.__name__, signature) or function)

        return library
    for name, dtype in (("bytes_", "uint8"), ("symbols_", "int8")):
        signature = signature.replace(name, f"Array({dtype}, 1, 'C', readonly=True)")
    made = numba.njit([signature], nogil=True, cache=True, error_model="numpy", fastmath=fastmath)
    return cast(Callable[[F], F], made)


# Slices come in as arguments, not as indices: only then does the compiler know that it may work on whole vectors. Every
# integer operation is cast back, because numba widens it to 64 bits, which is eight times slower. What is updated in
# place has loops of its own: vectors that may be the same are not worked on as whole vectors.


# ---------------------------------------------------------------------------------------------------------- encoding


@compiled("float32(float32[::1])", fastmath={"reassoc", "nsz"})
def _squares(x: NDArray[np.float32]) -> np.float32:
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@compiled("float64(float32[::1])", fastmath={"reassoc", "nsz"})
def squares(x: NDArray[np.float32]) -> float:
    """The sum of the squares, in float64."""
    total = 0.0
    for i in range(x.size):
        total += np.float64(x[i]) * np.float64(x[i])
    return total


@compiled("int32(int32[::1])")
def _largest(bits: NDArray[np.int32]) -> np.int32:
    """Of absolute values, by their bits; those of infinity and NaN are the largest."""
    found = np.int32(0)
    for i in range(bits.size):
        magnitude = np.int32(bits[i] & np.int32(0x7FFFFFFF))
        found = magnitude if magnitude > found else found
    return found


@compiled("int32(int32)")
def to_bfloat16(bits: np.int32) -> np.int32:
    """The bits of a float32, rounded to the nearest bfloat16 (ties to even), still as a float32."""
    odd = np.int32(np.int32(bits >> np.int32(16)) & np.int32(1))
    return np.int32(np.int32(bits + np.int32(np.int32(0x7FFF) + odd)) & np.int32(-65536))


@compiled(
    "boolean(float32[::1], int32[::1], int64, float32, float32, float32, float32, float32, float32[::1], int32[::1])"
)
def scale_int4(
    x: NDArray[np.float32],
    bits: NDArray[np.int32],
    block: int,
    step: float,
    tail: float,
    largest: float,
    smallest_norm: float,
    largest_norm: float,
    scales: NDArray[np.float32],
    scale_bits: NDArray[np.int32],
) -> bool:
    """``scales`` of ``x``, rounded to bfloat16: ``step`` root mean squares, or the largest value / ``largest`` where
    that is beyond ``tail`` root mean squares. ``bits`` and ``scale_bits`` share memory with these. False: a block's
    norm is not within the two bounds (and it is not all zeros); then ``scales`` are not to be used."""
    by_norm = np.float32(step / math.sqrt(block))
    for b in range(scales.size):
        piece = x[b * block : (b + 1) * block]
        norm = np.sqrt(_squares(piece))
        if not (smallest_norm <= norm <= largest_norm):
            if _largest(bits[b * block : (b + 1) * block]):
                return False
            scales[b] = np.float32(0.0)
            continue
        if piece.size < block:
            by_norm = np.float32(step / math.sqrt(piece.size))
        scales[b] = norm * by_norm
        scale_bits[b] = to_bfloat16(scale_bits[b])
        rounded = scales[b]
        scale_bits[b] = _largest(bits[b * block : (b + 1) * block])
        if scales[b] * step > tail * rounded:
            scales[b] /= largest
            scale_bits[b] = to_bfloat16(scale_bits[b])
        else:
            scales[b] = rounded
    return True


@compiled("void(int32[::1], uint16[::1])")
def narrow_scales(scale_bits: NDArray[np.int32], narrow: NDArray[np.uint16]) -> None:
    """float32 scales that are bfloat16 already, as such."""
    for i in range(narrow.size):
        narrow[i] = np.uint16(scale_bits[i] >> np.int32(16))


@compiled("void(float32[::1], float32[::1], float32, float32, float32, uint8[::1])")
def _pack(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    x_inverse: np.float32,
    y_inverse: np.float32,
    largest: float,
    packed: NDArray[np.uint8],
) -> None:
    for i in range(packed.size):
        v = x[i] * x_inverse
        w = y[i] * y_inverse
        v = largest if v > largest else v
        v = -largest if v < -largest else v
        w = largest if w > largest else w
        w = -largest if w < -largest else w
        low = np.int32(np.int32(np.rint(v)) & np.int32(15))
        packed[i] = np.uint8(np.int32(low | np.int32(np.int32(np.rint(w)) << np.int32(4))))


@compiled("void(float32[::1], float32[::1], int64, float32, uint8[::1])")
def pack_int4(
    x: NDArray[np.float32], scales: NDArray[np.float32], block: int, largest: float, packed: NDArray[np.uint8]
) -> None:
    """``packed`` = the symbols round(x / scale), at most ``largest``, padded with zeros."""
    blocks, half = scales.size, block // 2
    inverse = np.empty(blocks, np.float32)
    for b in range(blocks):
        inverse[b] = np.float32(1.0) / scales[b] if scales[b] else np.float32(1.0)
    for h in range(blocks):
        i, j = h * half, (blocks + h) * half
        low, high = x[i : i + half], x[j : j + half]
        if high.size < half:  # the chunk's end
            short_low, short_high = low, high
            low, high = np.zeros(half, np.float32), np.zeros(half, np.float32)
            low[: short_low.size] = short_low
            high[: short_high.size] = short_high
        _pack(low, high, inverse[h >> 1], inverse[(blocks + h) >> 1], largest, packed[i : i + half])


@compiled(
    "boolean(float32[::1], float32[::1], int64, float32, float32, float32, float32, float32, uint8[::1], uint16[::1])"
)
def encode_int4(
    x: NDArray[np.float32],
    less: NDArray[np.float32],
    block: int,
    step: float,
    tail: float,
    largest: float,
    smallest_norm: float,
    largest_norm: float,
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> bool:
    """Symbols and scales (as bfloat16's bits) of ``x`` - ``less``, which has no elements where nothing is subtracted;
    see ``scale_int4`` and ``pack_int4``. False: see ``scale_int4``; ``packed`` and ``scales`` are not to be used."""
    values = x - less if less.size else x
    wide = np.empty(scales.size, np.float32)
    wide_bits = wide.view(np.int32)
    if not scale_int4(
        values, values.view(np.int32), block, step, tail, largest, smallest_norm, largest_norm, wide, wide_bits
    ):
        return False
    narrow_scales(wide_bits, scales)
    pack_int4(values, wide, block, largest, packed)
    return True


# ---------------------------------------------------------------------------------------------------------- decoding


@compiled("boolean(bytes_, int32[::1], int32)")
def widen_scales(raw: NDArray[np.uint8], scale_bits: NDArray[np.int32], largest: int) -> bool:
    """bfloat16 scales (little-endian, anywhere in memory) to float32. False: one is negative, or its bits are more than
    ``largest``."""
    worst = np.int32(0)
    for i in range(scale_bits.size):
        bits = np.int32(np.int32(raw[2 * i]) | np.int32(np.int32(raw[2 * i + 1]) << np.int32(8)))
        worst = bits if bits > worst else worst
        scale_bits[i] = np.int32(bits << np.int32(16))
    return bool(worst <= largest)


@compiled("void(symbols_, boolean, float32[::1])")
def _symbols(packed: NDArray[np.int8], is_high: bool, out: NDArray[np.float32]) -> None:
    if is_high:
        for i in range(out.size):
            out[i] = np.float32(np.int32(np.int32(packed[i]) >> np.int32(4)))
    else:
        for i in range(out.size):
            out[i] = np.float32(np.int32(np.int32(np.int32(packed[i]) << np.int32(28)) >> np.int32(28)))


@compiled("void(float32[::1], float32)")
def _multiply(x: NDArray[np.float32], factor: float) -> None:
    for i in range(x.size):
        x[i] *= factor


@compiled("void(symbols_, boolean, float32[::1], int64, int64, float32[::1])")
def unpacked(
    packed: NDArray[np.int8],
    is_high: bool,
    scales: NDArray[np.float32],
    first: int,
    half: int,
    out: NDArray[np.float32],
) -> None:
    """``out`` = symbol * scale of one side of ``packed``, which begins with half block ``first``."""
    _symbols(packed, is_high, out)
    h = first
    for at in range(0, out.size, half):
        _multiply(out[at : at + half], scales[h >> 1])
        h += 1


@compiled("void(symbols_, float32[::1], int64, float32[::1])")
def unpack_int4(packed: NDArray[np.int8], scales: NDArray[np.float32], block: int, out: NDArray[np.float32]) -> None:
    """``out`` = symbol * scale."""
    half = block // 2
    run = max(RUN, half)
    for side in range(2):
        for at in range(0, packed.size, run):
            begin = side * packed.size + at
            end = begin + packed[at : at + run].size
            unpacked(packed[at : at + run], side == 1, scales, begin // half, half, out[begin:end])


@compiled("void(float32[::1], float32[::1], float32)")
def _add_times(out: NDArray[np.float32], x: NDArray[np.float32], factor: float) -> None:
    for i in range(out.size):
        out[i] += x[i] * factor


@compiled("void(symbols_, float32[::1], int64, float32, float32[::1])")
def add_int4(
    packed: NDArray[np.int8], scales: NDArray[np.float32], block: int, factor: float, out: NDArray[np.float32]
) -> None:
    """``out`` += symbol * scale * factor, each operation rounded."""
    half = block // 2
    run = max(RUN, half)
    room = np.empty(run, np.float32)
    for side in range(2):
        for at in range(0, packed.size, run):
            begin = side * packed.size + at
            to = out[begin : begin + packed[at : at + run].size]
            values = room[: to.size]
            unpacked(packed[at : at + run], side == 1, scales, begin // half, half, values)
            _add_times(to, values, factor)


@compiled("void(symbols_, int64, int32[::1])")
def square_int4(packed: NDArray[np.int8], block: int, sums: NDArray[np.int32]) -> None:
    """``sums`` [blocks] = the sums of the blocks' squared symbols."""
    blocks, half = sums.size, block // 2
    sums[:] = 0
    for h in range(blocks):
        piece = packed[h * half : (h + 1) * half]
        low_sum = high_sum = np.int32(0)
        for i in range(piece.size):
            c = np.int32(piece[i])
            high = np.int32(c >> np.int32(4))
            low = np.int32(np.int32(np.int8(c << np.int32(4))) >> np.int32(4))
            high_sum = np.int32(high_sum + np.int32(high * high))
            low_sum = np.int32(low_sum + np.int32(low * low))
        sums[h // 2] += low_sum
        sums[(blocks + h) // 2] += high_sum


# -- The outer step in one pass ----------------------------------------------------------------------------------------
# The outer step in one pass over memory, with an int4 body decoded on the way; see ``outer`` for what it computes and
# ``kernels`` for the rules.
#
# Momentum is float32, or bfloat16 as the int16 that have its bits (``narrow``); of two arguments for it one is empty.


@compiled("void(float32[::1], float32[::1], float32[::1], float32, float32)")
def outer_step(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    gradient: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
) -> None:
    """See ``outer``: ``gradient`` becomes new - old ``theta``."""
    for i in range(theta.size):
        m = momentum[i] * momentum_factor + gradient[i]
        momentum[i] = m
        t = theta[i]
        new = t - (m * momentum_factor + gradient[i]) * learning_rate
        theta[i] = new
        gradient[i] = new - t


@compiled("void(int16[::1], int32[::1])")
def _widen(narrow: NDArray[np.int16], bits: NDArray[np.int32]) -> None:
    for i in range(bits.size):
        bits[i] = np.int32(np.int32(narrow[i]) << np.int32(16))


@compiled("void(float32[::1], float32[::1], float32)")
def _advance(momentum: NDArray[np.float32], gradient: NDArray[np.float32], momentum_factor: float) -> None:
    for i in range(momentum.size):
        momentum[i] = momentum[i] * momentum_factor + gradient[i]


@compiled("void(int32[::1], int32[::1], int16[::1])")
def _round(bits: NDArray[np.int32], rounded: NDArray[np.int32], narrow: NDArray[np.int16]) -> None:
    for i in range(narrow.size):
        r = to_bfloat16(bits[i])
        rounded[i] = r
        narrow[i] = np.int16(np.int32(r >> np.int32(16)))


@compiled("void(float32[::1], float32[::1], float32[::1], float32[::1], float32, float32, float32)")
def _move(
    theta: NDArray[np.float32],
    exact: NDArray[np.float32],
    rounded: NDArray[np.float32],
    gradient: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    for i in range(theta.size):
        step = (exact[i] * momentum_factor + gradient[i]) + (exact[i] - rounded[i]) * carry
        t = theta[i]
        new = t - step * learning_rate
        theta[i] = new
        gradient[i] = new - t


@compiled("void(float32[::1], int16[::1], float32[::1], float32, float32, float32)")
def outer_step_narrow(
    theta: NDArray[np.float32],
    narrow: NDArray[np.int16],
    gradient: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    """See ``outer``: ``gradient`` becomes new - old ``theta``."""
    run = min(RUN, theta.size)
    exact_bits, rounded_bits = np.empty(run, np.int32), np.empty(run, np.int32)
    exact, rounded = exact_bits.view(np.float32), rounded_bits.view(np.float32)
    for at in range(0, theta.size, RUN):
        t, n, g = theta[at : at + RUN], narrow[at : at + RUN], gradient[at : at + RUN]
        _widen(n, exact_bits[: t.size])
        _advance(exact[: t.size], g, momentum_factor)
        _round(exact_bits[: t.size], rounded_bits[: t.size], n)
        _move(t, exact[: t.size], rounded[: t.size], g, learning_rate, momentum_factor, carry)


@compiled("void(float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], float32, float32)")
def _step_aside(
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    gradient: NDArray[np.float32],
    new_theta: NDArray[np.float32],
    new_momentum: NDArray[np.float32],
    learning_rate: float,
    momentum_factor: float,
) -> None:
    for i in range(theta.size):
        m = momentum[i] * momentum_factor + gradient[i]
        new_momentum[i] = m
        new_theta[i] = theta[i] - (m * momentum_factor + gradient[i]) * learning_rate


@compiled("void(float32[::1], int16[::1], float32[::1], int16[::1])")
def _copy(
    theta: NDArray[np.float32],
    narrow: NDArray[np.int16],
    new_theta: NDArray[np.float32],
    new_narrow: NDArray[np.int16],
) -> None:
    for i in range(theta.size):
        new_theta[i] = theta[i]
    for i in range(narrow.size):
        new_narrow[i] = narrow[i]


@compiled(
    "void(symbols_, float32[::1], int64, float32[::1], float32[::1], int16[::1], float32[::1], float32[::1],"
    " int16[::1], float32, float32, float32)"
)
def step_aside_int4(
    packed: NDArray[np.int8],
    scales: NDArray[np.float32],
    block: int,
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    narrow: NDArray[np.int16],
    new_theta: NDArray[np.float32],
    new_momentum: NDArray[np.float32],
    new_narrow: NDArray[np.int16],
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    """What an outer step with the decoded gradient gives, beside the old values."""
    half = block // 2
    run = max(RUN, half)
    room = np.empty(run, np.float32)
    for side in range(2):
        for at in range(0, packed.size, run):
            begin = side * packed.size + at
            end = begin + packed[at : at + run].size
            old, new = theta[begin:end], new_theta[begin:end]
            gradient = room[: old.size]
            unpacked(packed[at : at + run], side == 1, scales, begin // half, half, gradient)
            if narrow.size:
                _copy(old, narrow[begin:end], new, new_narrow[begin:end])
                outer_step_narrow(new, new_narrow[begin:end], gradient, learning_rate, momentum_factor, carry)
            else:
                m, new_m = momentum[begin:end], new_momentum[begin:end]
                _step_aside(old, m, gradient, new, new_m, learning_rate, momentum_factor)


@compiled("void(float32[::1], float32[::1], boolean)")
def _pass_on(x: NDArray[np.float32], to: NDArray[np.float32], is_added: bool) -> None:
    if is_added:
        for i in range(to.size):
            to[i] += x[i]
    else:
        for i in range(to.size):
            to[i] = x[i]


@compiled(
    "void(symbols_, float32[::1], symbols_, float32[::1], int64, float32[::1], float32[::1], int16[::1], float32[::1],"
    " boolean, float32, float32, float32)"
)
def step_int4(
    packed: NDArray[np.int8],
    scales: NDArray[np.float32],
    own_packed: NDArray[np.int8],
    own_scales: NDArray[np.float32],
    block: int,
    theta: NDArray[np.float32],
    momentum: NDArray[np.float32],
    narrow: NDArray[np.int16],
    buffer: NDArray[np.float32],
    is_added: bool,
    learning_rate: float,
    momentum_factor: float,
    carry: float,
) -> None:
    """The outer step with the decoded gradient, in place; what the parameters moved by, and an own decoded contribution
    (if there is one), goes to ``buffer`` (if there is one), or is added to what that holds."""
    half = block // 2
    run = max(RUN, half)
    room, own_room = np.empty(run, np.float32), np.empty(run, np.float32)
    for side in range(2):
        for at in range(0, packed.size, run):
            begin = side * packed.size + at
            end = begin + packed[at : at + run].size
            old = theta[begin:end]
            change = room[: old.size]
            unpacked(packed[at : at + run], side == 1, scales, begin // half, half, change)
            if narrow.size:
                outer_step_narrow(old, narrow[begin:end], change, learning_rate, momentum_factor, carry)
            else:
                outer_step(old, momentum[begin:end], change, learning_rate, momentum_factor)
            if own_scales.size:
                own = own_room[: old.size]
                unpacked(own_packed[at : at + run], side == 1, own_scales, begin // half, half, own)
                _pass_on(own, change, True)
            if buffer.size:
                _pass_on(change, buffer[begin:end], is_added)
