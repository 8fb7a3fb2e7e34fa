"""``native.c``, where the installation has compiled it: kernels without a compiler of their own, which would be half a
second of every start.

Rules of this file:
1. A function of the library is called like the Python function of its name, by whose signature (as numba writes it) its
   arguments are checked and passed on: of a vector its address and its length.
2. It runs without the GIL, on vectors that their caller holds. Lengths are the caller's to get right, as with numba.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from ctypes import addressof
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import numpy as np

REVISION = 2
"""Of the library that this release is made for; one that was compiled from other sources is not used."""
_SCALARS: dict[str, Any] = {
    "boolean": ctypes.c_bool,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
    "void": None,
}
_SHORT = {"bytes_": "uint8[::1]", "symbols_": "int8[::1]"}
_BYTES = ctypes.c_char * 0
_SIGNATURE = re.compile(r"(\w+)\((.*)\)")


def _load() -> ctypes.CDLL | None:
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            try:
                library = ctypes.CDLL(str(path))
                is_ours = ctypes.c_int32.in_dll(library, "revision").value == REVISION
            except (OSError, ValueError):  # of another machine, or an older one
                return None
            return library if is_ours else None
    return None


LIBRARY = _load()


def _address(vector: Any) -> int:
    """A third of the time that ``vector.ctypes`` takes, which alone can tell it of what may not be written."""
    found: int = addressof(_BYTES.from_buffer(vector)) if vector.flags.writeable else vector.ctypes.data
    return found


def function(name: str, signature: str) -> Callable[..., Any] | None:
    """The library's function of that name, if it has one."""
    found = None if LIBRARY is None else getattr(LIBRARY, name, None)
    if found is None:
        return None
    parsed = _SIGNATURE.fullmatch(signature)
    assert parsed is not None, signature
    kinds = [_SHORT.get(kind.strip(), kind.strip()) for kind in parsed[2].split(",")]
    vectors = [np.dtype(kind.removesuffix("[::1]")) if kind.endswith("[::1]") else None for kind in kinds]
    found.restype = _SCALARS[parsed[1]]
    found.argtypes = [
        passed
        for kind, dtype in zip(kinds, vectors, strict=True)
        for passed in ((_SCALARS[kind],) if dtype is None else (ctypes.c_void_p, ctypes.c_int64))
    ]

    def call(*given: Any) -> Any:
        passed = []
        for value, dtype in zip(given, vectors, strict=True):
            if dtype is None:
                passed.append(value)
                continue
            if value.dtype != dtype or not value.flags.c_contiguous:
                raise TypeError(f"{name} takes a contiguous vector of {dtype}, not {value.dtype} {value.strides}")
            passed += (_address(value), value.size)
        return found(*passed)

    return call
