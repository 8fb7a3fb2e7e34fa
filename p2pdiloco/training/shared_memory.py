"""The memory that a node and its learner share: three float32 vectors in the flat layout.

Rules of this file:
1. ``theta`` holds the global parameters (the node writes; the learner reads it to evaluate), ``shift`` goes from node
   to learner, ``snapshot`` from learner to node. Who may write when is ``wire/learner_ipc.py``'s rule 2.
2. The memory has no name: it lives as long as a process maps it or holds its file descriptor. SIGKILL leaves nothing
   behind.
3. Memory that nobody wrote costs nothing: a follower without a learner pays for ``theta`` alone. What is not in use
   any more can be given back; it is zero then, on both sides.
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
    """Bytes from one vector to the next: whole pages."""
    return -(-4 * elements // _PAGE) * _PAGE


class SharedVectors:
    """Three vectors of ``elements`` float32 each; zero when new."""

    def __init__(self, fd: int, elements: int) -> None:
        self.fd = fd
        """The file descriptor to hand to the learner; closed by ``close``, or with the last reference to this."""
        self.elements = elements
        self._memory = memory = mmap.mmap(fd, _VECTORS * _stride(elements))
        self.theta, self.shift, self.snapshot = (
            torch.frombuffer(memory, dtype=torch.float32, count=elements, offset=i * _stride(elements))
            for i in range(_VECTORS)
        )
        self._closing = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, elements: int) -> SharedVectors:
        """New vectors of zeros.

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
        """The vectors behind ``fd``, which another process created. Takes ``fd`` over.

        Raises:
            ValueError: the memory is not that of ``elements`` parameters.
        """
        size = os.fstat(fd).st_size
        if size != _VECTORS * _stride(elements):
            raise ValueError(f"the shared memory has {size} bytes, {elements} parameters need others: wrong manifest?")
        return cls(fd, elements)

    def give_back(self, vector: Literal["shift", "snapshot"], start: int, stop: int) -> None:
        """Elements ``start`` to ``stop`` are not in use: their memory goes, as far as it is whole pages."""
        begin = _stride(self.elements) * (1 if vector == "shift" else 2)
        give_back(self._memory, begin + 4 * start, begin + 4 * stop)

    def close(self) -> None:
        """Close the file descriptor and let go of the vectors. The memory goes when the last tensor over it does."""
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
    """``values``, float32 [elements], zero when new, whose memory comes when it is written and can be given back."""

    def __init__(self, elements: int) -> None:
        self._memory = mmap.mmap(-1, _stride(elements))
        self.values = torch.frombuffer(self._memory, dtype=torch.float32, count=elements)

    def give_back(self, start: int, stop: int) -> None:
        """As ``SharedVectors`` does."""
        give_back(self._memory, 4 * start, 4 * stop)


def give_back(memory: mmap.mmap, begin: int, end: int) -> None:
    """The system takes the whole pages from byte ``begin`` to ``end`` of a shared mapping; they are zeros afterwards.
    Where it does not know how (not Linux) nothing changes."""
    first, last = -(-begin // _PAGE) * _PAGE, end // _PAGE * _PAGE
    if first < last and hasattr(mmap, "MADV_REMOVE"):
        memory.madvise(mmap.MADV_REMOVE, first, last - first)


def let_go(vector: Tensor) -> None:
    """Of a vector [n] that nobody will read again, the system takes the whole pages, though others of its storage are
    still read. Where it does not know how (not Linux) nothing changes."""
    first = -(-vector.data_ptr() // _PAGE) * _PAGE
    size = (vector.data_ptr() + vector.numel() * vector.element_size()) // _PAGE * _PAGE - first
    if size > 0 and hasattr(mmap, "MADV_REMOVE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


class NoVectors:
    """What ranks of an island have that do not talk to the node: vectors of nothing."""

    def __init__(self) -> None:
        self.theta = self.shift = self.snapshot = torch.empty(0)

    def close(self) -> None:
        """Nothing to close."""


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("p2pdiloco")
    with tempfile.TemporaryFile(prefix="p2pdiloco-") as file:
        return os.dup(file.fileno())
