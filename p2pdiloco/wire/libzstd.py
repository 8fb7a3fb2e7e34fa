"""The system's libzstd, where there is one: it decodes Huffman codes with assembly, which the ``zstandard`` package is
built without. On x86-64 a chunk takes a fifth less time with it, and half of it when the core is shared.

Rules of this file:
1. Optional: without it, with an old one, or on another architecture (no assembly there), ``zstandard`` decodes.
2. Only functions of the C interface that has been stable since version 1.0. What a frame states was checked by
   ``compression.decompress``: the output is as large as that, and zstd writes no further.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from typing import Final

import numpy as np

_NAMES: Final = {"linux": "libzstd.so.1", "darwin": "libzstd.1.dylib"}
_OLDEST: Final = 10502
"""1.5.2; the assembly came with 1.5.1."""
_SIZE: Final = ctypes.c_size_t


def _load() -> ctypes.CDLL | None:
    name = _NAMES.get(sys.platform)
    if name is None or platform.machine() != "x86_64":
        return None
    try:
        library = ctypes.CDLL(name)
        library.ZSTD_versionNumber.restype = ctypes.c_uint
        if library.ZSTD_versionNumber() < _OLDEST:
            return None
        library.ZSTD_createDCtx.restype = ctypes.c_void_p
        library.ZSTD_freeDCtx.argtypes = (ctypes.c_void_p,)
        library.ZSTD_isError.argtypes = (_SIZE,)
        library.ZSTD_findFrameCompressedSize.argtypes = (ctypes.c_void_p, _SIZE)
        library.ZSTD_findFrameCompressedSize.restype = _SIZE
        library.ZSTD_decompressDCtx.argtypes = (ctypes.c_void_p, ctypes.c_void_p, _SIZE, ctypes.c_void_p, _SIZE)
        library.ZSTD_decompressDCtx.restype = _SIZE
    except (OSError, AttributeError):
        return None
    return library


_library = _load()
AVAILABLE: Final = _library is not None


class Decoder:
    """One thread's decoder. Only where AVAILABLE."""

    def __init__(self) -> None:
        assert _library is not None
        self._library = _library  # for __del__, which may run when modules are gone
        self._context = _library.ZSTD_createDCtx()
        if not self._context:
            raise MemoryError("no memory for zstd")

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.ZSTD_freeDCtx(self._context)

    def decode(self, frame: memoryview, out: memoryview) -> None:
        """Put the content of ``frame``, of which its header says that it is as long as ``out``, there.

        Raises:
            ValueError: it is not, or ``frame`` is no single whole frame.
        """
        source, to, size = np.frombuffer(frame, np.uint8), np.frombuffer(out, np.uint8), len(out)
        at, given = source.ctypes.data, source.size
        if self._library.ZSTD_findFrameCompressedSize(at, given) != given:  # an error is larger than any size
            raise ValueError("the payload is no single whole zstd frame")
        found = self._library.ZSTD_decompressDCtx(self._context, to.ctypes.data, size, at, given)
        if self._library.ZSTD_isError(found):
            raise ValueError("the payload is a broken zstd frame")
        if found != size:
            raise ValueError(f"the payload has {found} bytes where it stated {size}")
