"""int4 and the outer step in one pass over memory, where numba is installed (``pip install p2pdiloco[fast]``).

Rules of this file:
1. Same bits as the torch path, which stays the reference: only elementwise IEEE operations and sums of integers are
   here, without ``fastmath`` (so that no multiply and add become one); norms of floats are torch's in both. Tests
   compare the two.
2. Work goes by half blocks: a packed byte holds an element of each half of the chunk, and a chunk's middle may be that
   of a block. Blocks with heavy tails take torch's path.
3. Compiled when this module is imported, and kept on disk by numba; without the GIL when they run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

try:
    import numba
except ImportError:
    numba = None

AVAILABLE: Final = numba is not None

F = TypeVar("F", bound=Callable[..., Any])


def _compiled(*signatures: str) -> Callable[[F], F]:
    if numba is None:
        return lambda function: function
    return cast(
        Callable[[F], F], numba.njit(list(signatures), nogil=True, cache=True, error_model="numpy", fastmath=False)
    )


# Slices come in as arguments, not as indices: only then does the compiler know that it may work on whole vectors. Every
# integer operation is cast back, because numba widens it to 64 bits, which is eight times slower.


@_compiled("int64(float32[::1], float32[::1], float32, float32, float32, float32, uint8[::1])")
def _pack(
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    x_inverse: np.float32,
    y_inverse: np.float32,
    largest: float,
    suspicious: float,
    packed: NDArray[np.uint8],
) -> int:
    low_wild = high_wild = np.int32(0)
    for i in range(packed.size):
        v = np.rint(x[i] * x_inverse)
        w = np.rint(y[i] * y_inverse)
        low_wild = np.int32(low_wild | np.int32(abs(v) >= suspicious))
        high_wild = np.int32(high_wild | np.int32(abs(w) >= suspicious))
        v = largest if v > largest else v
        v = -largest if v < -largest else v
        w = largest if w > largest else w
        w = -largest if w < -largest else w
        packed[i] = np.uint8(np.int32(v) & np.int32(15)) | np.uint8(np.int32(w) << np.int32(4))
    return int(low_wild | (high_wild << 1))


@_compiled("int64(float32[::1], float32[::1], int64, float32, float32, uint8[::1], uint8[::1])")
def pack_int4(
    x: NDArray[np.float32],
    inverse: NDArray[np.float32],
    block: int,
    largest: float,
    suspicious: float,
    packed: NDArray[np.uint8],
    is_wild: NDArray[np.uint8],
) -> int:
    """``packed`` = the symbols round(x * inverse), at most ``largest``, padded with zeros. ``is_wild`` [blocks] tells
    which blocks have one that was as large as ``suspicious`` before; 0 if none."""
    blocks, half = inverse.size, block // 2
    wild = 0
    is_wild[:] = 0
    for h in range(blocks):
        i, j = h * half, (blocks + h) * half
        low, high = x[i : i + half], x[j : j + half]
        if high.size < half:  # the chunk's end
            short_low, short_high = low, high
            low, high = np.zeros(half, np.float32), np.zeros(half, np.float32)
            low[: short_low.size] = short_low
            high[: short_high.size] = short_high
        b, c = h // 2, (blocks + h) // 2
        two = _pack(low, high, inverse[b], inverse[c], largest, suspicious, packed[i : i + half])
        is_wild[b] |= two & 1
        is_wild[c] |= two >> 1
        wild |= two
    return wild


@_compiled("void(int8[::1], float32, float32, float32[::1], float32[::1])")
def _unpack(
    packed: NDArray[np.int8],
    low_scale: np.float32,
    high_scale: np.float32,
    low: NDArray[np.float32],
    high: NDArray[np.float32],
) -> None:
    for i in range(packed.size):
        c = np.int32(packed[i])
        high[i] = np.float32(np.int32(c >> np.int32(4))) * high_scale
        low[i] = np.float32(np.int32(np.int8(c << np.int32(4))) >> np.int32(4)) * low_scale


@_compiled("void(int8[::1], float32[::1], int64, float32[::1])")
def unpack_int4(packed: NDArray[np.int8], scales: NDArray[np.float32], block: int, out: NDArray[np.float32]) -> None:
    """``out`` = symbol * scale."""
    blocks, half = scales.size, block // 2
    for h in range(blocks):
        i, j = h * half, (blocks + h) * half
        low, high = out[i : i + half], out[j : j + half]
        b, c = scales[h // 2], scales[(blocks + h) // 2]
        if high.size == half:
            _unpack(packed[i : i + half], b, c, low, high)
        else:
            whole_low, whole_high = np.empty(half, np.float32), np.empty(half, np.float32)
            _unpack(packed[i : i + half], b, c, whole_low, whole_high)
            low[:] = whole_low[: low.size]
            high[:] = whole_high[: high.size]


@_compiled("void(int8[::1], float32, float32, float32, float32[::1], float32[::1])")
def _add(
    packed: NDArray[np.int8],
    low_scale: np.float32,
    high_scale: np.float32,
    factor: np.float32,
    low: NDArray[np.float32],
    high: NDArray[np.float32],
) -> None:
    for i in range(packed.size):
        c = np.int32(packed[i])
        high[i] += np.float32(np.int32(c >> np.int32(4))) * high_scale * factor
        low[i] += np.float32(np.int32(np.int8(c << np.int32(4))) >> np.int32(4)) * low_scale * factor


@_compiled("void(int8[::1], float32[::1], int64, float32, float32[::1])")
def add_int4(
    packed: NDArray[np.int8], scales: NDArray[np.float32], block: int, factor: np.float32, out: NDArray[np.float32]
) -> None:
    """``out`` += symbol * scale * factor, each operation rounded."""
    blocks, half = scales.size, block // 2
    for h in range(blocks):
        i, j = h * half, (blocks + h) * half
        low, high = out[i : i + half], out[j : j + half]
        b, c = scales[h // 2], scales[(blocks + h) // 2]
        if high.size == half:
            _add(packed[i : i + half], b, c, factor, low, high)
        else:
            whole_low, whole_high = np.empty(half, np.float32), np.empty(half, np.float32)
            whole_low[: low.size] = low
            whole_high[: high.size] = high
            _add(packed[i : i + half], b, c, factor, whole_low, whole_high)
            low[:] = whole_low[: low.size]
            high[:] = whole_high[: high.size]


@_compiled("void(int8[::1], int64, int32[::1])")
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


@_compiled("void(float32[::1], float32[::1], float32[::1], float32, float32)")
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
