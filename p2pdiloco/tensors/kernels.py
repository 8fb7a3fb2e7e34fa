"""int4 in one pass over memory, where numba is installed (``pip install p2pdiloco[fast]``).

Rules of this file:
1. Same bits as the torch path, which stays the reference: only elementwise IEEE operations are here, without
   ``fastmath``; norms are torch's in both. A test compares the two.
2. Whole chunks with an even number of blocks only, so that the two halves of a packed byte have one scale each for a
   whole block. Everything else, blocks with heavy tails too, takes torch's path.
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
def _pack_block(
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
    """``packed`` = the symbols round(x * inverse), at most ``largest``. ``is_wild`` [blocks] tells which blocks have
    one that was as large as ``suspicious`` before; 0 if none."""
    half = inverse.size // 2
    shift = half * block
    wild = 0
    for b in range(half):
        i = b * block
        low, high = x[i : i + block], x[shift + i : shift + i + block]
        two = _pack_block(low, high, inverse[b], inverse[b + half], largest, suspicious, packed[i : i + block])
        is_wild[b] = two & 1
        is_wild[b + half] = two >> 1
        wild |= two
    return wild


@_compiled("void(int8[::1], float32, float32, float32[::1], float32[::1])")
def _unpack_block(
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
    half = scales.size // 2
    shift = half * block
    for b in range(half):
        i = b * block
        low, high = out[i : i + block], out[shift + i : shift + i + block]
        _unpack_block(packed[i : i + block], scales[b], scales[b + half], low, high)
