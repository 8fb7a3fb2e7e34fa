"""Shared memory of a node and its learner: the global parameters, and two rings of slots for what is in flight.

Rules of this file:
1. ``theta`` holds the global parameters in the flat layout (written by the node; the learner reads it to evaluate).
   ``shift`` goes from node to learner, ``snapshot`` from learner to node. Each has a slot per shard, and every slot
   holds the largest shard, so that the node can put any shard into any slot and reuse few. Its messages say where a
   shard is. Rule 2 of ``wire/learner_ipc.py`` says who may write when.
2. The memory has no name. It lives as long as a process maps it or holds its file descriptor, so SIGKILL leaves nothing
   behind.
3. Memory that was never written costs nothing: a follower without a learner pays only for ``theta``, and a ring only
   for the slots that were used. Memory that is no longer in use can be given back; it then reads as zero on both sides.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from p2pdiloco.protocol.manifest import Layout

Vectors: TypeAlias = "SharedVectors | NoVectors"

_PAGE = 4096


def slot_elements(layout: Layout) -> int:
    """Return the elements from one slot to the next: the largest shard, in whole pages, so that each slot can be
    page-locked."""
    return _stride(_largest(layout)) // 4


def ring_elements(layout: Layout) -> int:
    """Return the elements of ``shift`` and of ``snapshot``: a slot per shard."""
    return (len(layout.shards) - 1) * slot_elements(layout) + _largest(layout)


def _largest(layout: Layout) -> int:
    return max(shard.elements for shard in layout.shards)


def _stride(elements: int) -> int:
    """Return the bytes of ``elements`` float32, in whole pages."""
    return -(-4 * elements // _PAGE) * _PAGE


def _size(elements: int, ring: int) -> int:
    return _stride(elements) + 2 * _stride(ring)


class SharedVectors:
    """``theta`` of ``elements`` float32, ``shift`` and ``snapshot`` of ``ring`` each; zero when new."""

    def __init__(self, fd: int, elements: int, ring: int = 0) -> None:
        """``ring``: see ``ring_elements``; 0: ``elements``, which is enough for one shard."""
        ring = ring or elements
        # The file descriptor to hand to the learner. Closed by ``close``, or with the last reference to this object.
        self.fd = fd
        self.elements = elements
        self._memory = memory = mmap.mmap(fd, _size(elements, ring))
        self._begins = {"shift": _stride(elements), "snapshot": _stride(elements) + _stride(ring)}
        self.theta = torch.frombuffer(memory, dtype=torch.float32, count=elements)
        self.shift, self.snapshot = (
            torch.frombuffer(memory, dtype=torch.float32, count=ring, offset=begin) for begin in self._begins.values()
        )
        self._closing = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, elements: int, ring: int = 0) -> SharedVectors:
        """Create vectors of zeros.

        Raises:
            ValueError: ``elements`` is not positive.
            OSError: there is not enough memory, or no place for a temporary file.
        """
        if elements < 1:
            raise ValueError(f"elements = {elements} must be at least 1")
        fd = _nameless_file()
        try:
            os.ftruncate(fd, _size(elements, ring or elements))
            return cls(fd, elements, ring)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, elements: int, ring: int = 0) -> SharedVectors:
        """Map the vectors behind ``fd``, which another process created. Takes ownership of ``fd``.

        Raises:
            ValueError: the memory is not that of ``elements`` parameters.
        """
        size, expected = os.fstat(fd).st_size, _size(elements, ring or elements)
        if size != expected:
            raise ValueError(
                f"the shared memory has {size} bytes, but {elements} parameters need {expected}: "
                "is the manifest that of another run?"
            )
        return cls(fd, elements, ring)

    def give_back(self, vector: Literal["shift", "snapshot"], start: int, stop: int) -> None:
        """Give the memory of elements ``start`` to ``stop`` back to the system, as far as it is whole pages."""
        begin = self._begins[vector]
        give_back(self._memory, begin + 4 * start, begin + 4 * stop)

    def close(self) -> None:
        """Close the file descriptor and drop the vectors. The memory is released with the last tensor over it."""
        if self._closing.alive:
            self._closing()
            self.theta = self.shift = self.snapshot = Tensor()
            del self._memory

    def __enter__(self) -> SharedVectors:
        return self

    def __exit__(self, *_: object) -> None:
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
