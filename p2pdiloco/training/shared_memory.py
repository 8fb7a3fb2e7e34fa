"""Shared memory of a node and its learner: three float32 vectors in the flat layout.

Rules of this file:
1. ``theta`` holds the global parameters (written by the node; the learner reads it to evaluate). ``shift`` goes from
   node to learner, ``snapshot`` from learner to node. Rule 2 of ``wire/learner_ipc.py`` says who may write when.
2. The memory has no name. It lives as long as a process maps it or holds its file descriptor, so SIGKILL leaves nothing
   behind.
3. Memory that was never written costs nothing: a follower without a learner pays only for ``theta``. Memory that is no
   longer in use can be given back; it then reads as zero on both sides.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from types import TracebackType
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Vectors: TypeAlias = "SharedVectors | NoVectors"

_VECTORS = 3
_PAGE = 4096


def _stride(elements: int) -> int:
    """Return the bytes from one vector to the next, in whole pages."""
    return -(-4 * elements // _PAGE) * _PAGE


class SharedVectors:
    """Three vectors of ``elements`` float32 each; zero when new."""

    def __init__(self, fd: int, elements: int) -> None:
        # The file descriptor to hand to the learner. Closed by ``close``, or with the last reference to this object.
        self.fd = fd
        self.elements = elements
        self._memory = memory = mmap.mmap(fd, _VECTORS * _stride(elements))
        self.theta, self.shift, self.snapshot = (
            torch.frombuffer(memory, dtype=torch.float32, count=elements, offset=i * _stride(elements))
            for i in range(_VECTORS)
        )
        self._closing = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, elements: int) -> SharedVectors:
        """Create vectors of zeros.

        Raises:
            ValueError: ``elements`` is not positive.
            OSError: there is not enough memory, or no place for a temporary file.
        """
        if elements < 1:
            raise ValueError(f"elements = {elements} must be at least 1")
        fd = _nameless_file()
        try:
            os.ftruncate(fd, _VECTORS * _stride(elements))
            return cls(fd, elements)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, elements: int) -> SharedVectors:
        """Map the vectors behind ``fd``, which another process created. Takes ownership of ``fd``.

        Raises:
            ValueError: the memory is not that of ``elements`` parameters.
        """
        size = os.fstat(fd).st_size
        if size != _VECTORS * _stride(elements):
            raise ValueError(
                f"the shared memory has {size} bytes, but {elements} parameters need {_VECTORS * _stride(elements)}: "
                "is the manifest that of another run?"
            )
        return cls(fd, elements)

    def give_back(self, vector: Literal["shift", "snapshot"], start: int, stop: int) -> None:
        """Give the memory of elements ``start`` to ``stop`` back to the system, as far as it is whole pages."""
        begin = _stride(self.elements) * (1 if vector == "shift" else 2)
        give_back(self._memory, begin + 4 * start, begin + 4 * stop)

    def close(self) -> None:
        """Close the file descriptor and drop the vectors. The memory is released with the last tensor over it."""
        if self._closing.alive:
            self._closing()
            self.theta = self.shift = self.snapshot = Tensor()
            del self._memory

    def __enter__(self) -> SharedVectors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SpareVector:
    """A vector ``values``, float32 [elements], zero when new. Its memory is allocated when written, and can be given
    back."""

    def __init__(self, elements: int) -> None:
        self._memory = mmap.mmap(-1, _stride(elements))
        self.values = torch.frombuffer(self._memory, dtype=torch.float32, count=elements)

    def give_back(self, start: int, stop: int) -> None:
        """Give memory back, as ``SharedVectors.give_back``."""
        give_back(self._memory, 4 * start, 4 * stop)


def give_back(memory: mmap.mmap, begin: int, end: int) -> None:
    """Give the whole pages from byte ``begin`` to ``end`` of a shared mapping back to the system. They read as zeros
    afterwards.

    Does nothing on systems without MADV_REMOVE (not Linux).
    """
    first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if first < last and hasattr(mmap, "MADV_REMOVE"):
        memory.madvise(mmap.MADV_REMOVE, first, last - first)


def let_go(vector: Tensor) -> None:
    """Give the whole pages of a vector [n] back to the system. Nobody may read the vector again.

    Other parts of its storage stay valid. Does nothing on systems without MADV_REMOVE (not Linux).
    """
    first = -(-vector.data_ptr() // _PAGE) * _PAGE
    size = (vector.data_ptr() + vector.numel() * vector.element_size()) // _PAGE * _PAGE - first
    if size > 0 and hasattr(mmap, "MADV_REMOVE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class NoVectors:
    """Empty vectors, for ranks that do not talk to the node."""

    def __init__(self) -> None:
        self.theta = self.shift = self.snapshot = torch.empty(0)

    def close(self) -> None:
        """Do nothing."""


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("p2pdiloco")
    with tempfile.TemporaryFile(prefix="p2pdiloco-") as file:
        return os.dup(file.fileno())
