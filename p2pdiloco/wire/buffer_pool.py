"""Pool of reusable memory for payloads: touching a fresh page costs more than decrypting into it.

Measured on a virtual machine: 1.1 CPU seconds per GB for the first touch of fresh pages, 0.05 for a reused block.

Rules of this file:
1. A block is lent as a memoryview. It returns to the pool by itself once no view of it exists any more (tensors and
   arrays made from the view count). The pool finds out by resizing the memory map, which fails while views exist.
2. Blocks are anonymous memory maps. The kernel allocates a page at its first write, so a payload that is announced but
   never arrives costs nothing.
3. At most ``limit_bytes`` are kept for reuse. Beyond that, the block unused for the longest time is dropped.
"""

from __future__ import annotations

import mmap
from collections import deque

SMALL_BYTES = 256 << 10
"""Smaller blocks are ordinary memory."""
STEPS = 8
"""Number of block sizes per power of two, so that at most an eighth of a block is unused."""


class Blocks:
    """Pool of memory blocks. Only one thread may take blocks; views may be dropped in any thread."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._blocks: deque[mmap.mmap] = deque()
        """Lent and free blocks, the longest unused first."""
        self._bytes = 0

    def take(self, size: int) -> memoryview:
        """Return ``size`` bytes of writable memory with arbitrary content."""
        if size < SMALL_BYTES:
            return memoryview(bytearray(size))
        length = block_bytes(size)
        block = self._find(length) or mmap.mmap(-1, length)
        self._keep(block)
        return memoryview(block)[:size]

    def _find(self, length: int) -> mmap.mmap | None:
        for index, block in enumerate(self._blocks):
            if len(block) == length and _is_free(block):
                del self._blocks[index]
                self._bytes -= length
                return block
        return None

    def _keep(self, block: mmap.mmap) -> None:
        if len(block) > self._limit_bytes:
            return
        self._blocks.append(block)
        self._bytes += len(block)
        while self._bytes > self._limit_bytes:
            self._bytes -= len(self._blocks.popleft())


def block_bytes(size: int) -> int:
    """Return the smallest block size that holds ``size``: a multiple of an eighth of a power of two."""
    step = max(1 << ((size - 1).bit_length() - 1), SMALL_BYTES) // STEPS
    return -(-size // step) * step


def _is_free(block: mmap.mmap) -> bool:
    try:
        block.resize(len(block))
    except BufferError:
        return False
    return True
