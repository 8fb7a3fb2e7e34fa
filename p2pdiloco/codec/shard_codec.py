"""A shard's bodies in one piece of memory, and calls of the C library (``native``) on one or all of them.

The library supports int4, int8 and bf16.

Rules of this file:
1. A call does the same as ``quantization``, ``merge`` and ``outer_optimizer`` do chunk by chunk with torch, with the
   same bits, and nothing else.
2. A call that cannot be done (no library, another codec, a malformed body) returns None or False before it changes
   anything. The caller then works chunk by chunk, which raises the error for a malformed body.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_bool, c_double, c_float, c_int64
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from torch import Tensor

from p2pdiloco.codec import native
from p2pdiloco.codec.formats import CHUNK, FORMATS, HEADER, Recipe, body_bytes
from p2pdiloco.codec.native import BYTES, FLOAT32, FLOAT64, INT16, INT64

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

SAFE_NORMS = (1e-15, 1e18)
"""Norms of a block whose squares can neither vanish nor overflow."""
_NOTHING = np.empty(0, np.float32)
_NO_BODIES = np.empty(0, np.uint8)
_BITS = {FORMATS[codec].number: FORMATS[codec].bits for codec in ("int4", "int8", "bf16")}
"""Bits of a symbol, by the numbers of the codecs that the library reads."""

_FACTORS = (c_float,) * 3
_VECTORS = (FLOAT32, FLOAT32, INT16)
"""Parameters, and momentum in float32 or bfloat16, one of them empty."""

_square = native.function("square_shard", c_bool, BYTES, c_int64, FLOAT64)
_sum = native.function("sum_shard", c_double, INT64, INT64, FLOAT32, FLOAT32)
_step = native.function("step_shard", c_bool, BYTES, BYTES, *_VECTORS, FLOAT32, c_bool, *_FACTORS)
_aside = native.function("step_aside", c_bool, BYTES, *_VECTORS, *_VECTORS, *_FACTORS)
_decode = native.function("decode_body", c_bool, BYTES, c_bool, c_float, FLOAT32)
_encode = native.function("encode_shard", c_bool, FLOAT32, FLOAT32, c_int64, c_int64, *(c_float,) * 5, BYTES)


class Bodies(Sequence[memoryview]):
    """Bodies of a vector's chunks, one after the other in ``whole``; read-only.

    ``ends`` holds the end of each body in ``whole``. ``memory`` ends with the bodies and may begin with room for bytes
    that the caller writes before them.
    """

    def __init__(self, whole: memoryview, ends: Sequence[int], memory: memoryview | None = None) -> None:
        self._whole = whole
        self._ends = ends
        self.memory = whole if memory is None else memory

    @classmethod
    def after(cls, room: int, memory: memoryview, ends: Sequence[int]) -> Bodies:
        """Return the bodies that lie in ``memory`` after ``room`` bytes."""
        return cls(memory[room:], ends, memory)

    @classmethod
    def of(cls, body: Buffer) -> Bodies:
        """Return the body of a single chunk as a sequence."""
        whole = memoryview(body).cast("B")
        return cls(whole, [len(whole)])

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        end = self._ends[index]
        return self._whole[self._ends[index - 1] if index else 0 : end]

    def values(self, elements: int) -> NDArray[np.uint8] | None:
        """Return the bytes of all bodies; None unless they hold ``elements`` in one codec and block size."""
        if len(self._whole) < HEADER.size:
            return None
        _, number, block, _ = HEADER.unpack_from(self._whole)
        bits = _BITS.get(number)
        if bits is None or (block == 0) != (bits == 16) or _ends(bits, block, elements) != list(self._ends):
            return None
        return np.frombuffer(self._whole, np.uint8)


def _ends(bits: int, block: int, elements: int) -> list[int]:
    chunk, (whole, rest) = body_bytes(bits, block, CHUNK), divmod(elements, CHUNK)
    found = [chunk * (i + 1) for i in range(whole)]
    return [*found, chunk * whole + body_bytes(bits, block, rest)] if rest else found


def encoded(recipe: Recipe, x: Tensor, less: Tensor | None = None, room: int = 0) -> Bodies | None:
    """Encode ``x`` - ``less``, both float32 [n], contiguous, after ``room`` bytes; None if the library cannot."""
    form = FORMATS[recipe.codec]
    if not native.is_used or form.number not in _BITS or (recipe.codec == "int4") != (recipe.step > 0.0):
        return None
    ends = _ends(form.bits, recipe.block, x.numel())
    memory = np.empty(room + (ends[-1] if ends else 0), np.uint8)
    is_done = _encode(
        x.numpy(),
        _NOTHING if less is None else less.numpy(),
        form.number,
        recipe.block,
        recipe.step,
        recipe.tail,
        float(form.largest),
        *SAFE_NORMS,
        memory[room:],
    )
    return Bodies.after(room, memory.data, ends) if is_done else None


def squared_norms(bodies: Sequence[Any], elements: int) -> list[float] | None:
    """Return the squared norm of each chunk, in float64; None if the library cannot."""
    if not native.is_used or not isinstance(bodies, Bodies) or (values := bodies.values(elements)) is None:
        return None
    squares = np.empty(len(bodies))
    return squares.tolist() if _square(values, elements, squares) else None


def weighted_sum(gradients: Sequence[Sequence[Any]], factors: Sequence[float], out: Tensor) -> float | None:
    """Compute ``out``, float32 [n], as the sum of factor * gradient, in order, from the gradients' bodies.

    Return its squared norm; None if the library cannot.
    """
    if not native.is_used or not gradients:
        return None
    found = [g.values(out.numel()) if isinstance(g, Bodies) else None for g in gradients]
    values = [v for v in found if v is not None]
    if len(values) < len(gradients):
        return None
    addresses, sizes = [v.ctypes.data for v in values], [v.size for v in values]
    given = np.array(addresses, np.int64), np.array(sizes, np.int64), np.array(factors, np.float32)
    total: float = _sum(*given, out.numpy())
    return total if total >= 0.0 else None


def stepped(
    bodies: Sequence[Any],
    own: Sequence[Any] | None,
    theta: Tensor,
    momentum: tuple[NDArray[np.float32], NDArray[np.int16]],
    buffer: Tensor | None,
    is_added: bool,
    factors: tuple[float, float, float],
) -> bool:
    """Do ``outer_optimizer.step_shard``. Return False, without any change, if the library cannot take these bodies.

    ``factors`` are the learning rate, the momentum factor and ``outer_optimizer.carry``.
    """
    if not native.is_used or not isinstance(bodies, Bodies) or not isinstance(own, Bodies | None):
        return False
    values = bodies.values(theta.numel())
    mine = _NO_BODIES if own is None else own.values(theta.numel())
    if values is None or mine is None:
        return False
    to = _NOTHING if buffer is None else buffer.numpy()
    return bool(_step(values, mine, theta.numpy(), *momentum, to, is_added, *factors))


def stepped_aside(
    body: Buffer,
    vectors: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int16]],
    new: tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int16]],
    factors: tuple[float, float, float],
) -> bool:
    """Do ``outer_optimizer.step_aside`` with one chunk's body. Return False, without any change, if it cannot."""
    return native.is_used and bool(_aside(_values(body), *vectors, *new, *factors))


def decoded(body: Buffer, out: Tensor, factor: float | None = None) -> bool:
    """Write one chunk's values to ``out``, or add ``factor`` times them. Return False if it cannot."""
    return native.is_used and bool(_decode(_values(body), factor is not None, factor or 0.0, out.numpy()))


def _values(body: Buffer) -> NDArray[np.uint8]:
    raw = memoryview(body).cast("B")
    return np.frombuffer(raw, np.uint8) if len(raw) else _NO_BODIES
