"""Bindings to the C kernels of the codec (``native.c``). Without the compiled library, torch computes the same results.

A call releases the GIL. The caller keeps the vectors alive during the call and is responsible for their lengths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, Final

import numpy as np

REVISION: Final = 3
"""Revision of the library that this release calls; a library compiled from other sources is not used."""


def _load() -> ctypes.CDLL | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                is_ours = ctypes.c_int32.in_dll(library, "revision").value == REVISION
            except (OSError, ValueError):  # compiled for another machine, or an older one
                return None
            return library if is_ours else None
    return None


LIBRARY: Final = _load()
is_used = LIBRARY is not None
"""Whether the codec calls the library. Simulations and tests set it to False, to compute by torch alone."""

BYTES: Final[Any] = np.ctypeslib.ndpointer(np.uint8, ndim=1, flags="C_CONTIGUOUS")
INT16: Final[Any] = np.ctypeslib.ndpointer(np.int16, ndim=1, flags="C_CONTIGUOUS")
INT64: Final[Any] = np.ctypeslib.ndpointer(np.int64, ndim=1, flags="C_CONTIGUOUS")
FLOAT32: Final[Any] = np.ctypeslib.ndpointer(np.float32, ndim=1, flags="C_CONTIGUOUS")
FLOAT64: Final[Any] = np.ctypeslib.ndpointer(np.float64, ndim=1, flags="C_CONTIGUOUS")
_VECTORS: Final = (BYTES, INT16, INT64, FLOAT32, FLOAT64)


def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return the library's function ``name``, which takes ``arguments`` (ctypes types, or the vector types above).

    A vector is passed to C as its address and its number of elements. Call the function only while ``is_used``.
    It raises ``ctypes.ArgumentError`` for a vector of another dtype or one that is not contiguous.
    """
    if LIBRARY is None:
        return _missing
    found = getattr(LIBRARY, name)
    found.restype = result
    kinds: list[Any] = []
    for kind in arguments:
        kinds += [kind, ctypes.c_int64] if kind in _VECTORS else [kind]
    found.argtypes = kinds

    def call(*values: Any) -> Any:
        passed = []
        for value in values:
            passed += [value, value.size] if isinstance(value, np.ndarray) else [value]
        return found(*passed)

    return call


def _missing(*_: Any) -> Any:
    raise AssertionError("the C library is not compiled: native.is_used is False")


squares = function("squares", ctypes.c_double, FLOAT32)
"""Sum of the squares of a vector, in float64."""
outer_step = function("outer_step", None, FLOAT32, FLOAT32, FLOAT32, ctypes.c_float, ctypes.c_float)
"""``outer_optimizer.outer_step`` with momentum in float32."""
outer_step_narrow = function(
    "outer_step_narrow", None, FLOAT32, INT16, FLOAT32, ctypes.c_float, ctypes.c_float, ctypes.c_float
)
"""``outer_optimizer.outer_step`` with momentum in bfloat16, as the int16 of its bits."""
