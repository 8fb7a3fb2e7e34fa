"""A thread's working memory for quantizing, cut to the size of a chunk.

Rules of this file:
1. Each thread has its own, made at its first use (about 3.3 MiB) and kept: encoding and decoding allocate nothing that
   grows with a chunk.
2. Torch is set to one thread in each thread that quantizes: two, when other work wants the cores too, took double CPU
   and 10 ms to 1.7 s where one took 4 to 20 ms (they wait for each other after every operation). Use more threads of
   your own instead; they scale, because all work is without the GIL.
3. The cuts are kept as well, for the few lengths and formats that a run has: a tensor's view costs a microsecond, and a
   chunk would need dozens.
"""

from __future__ import annotations

import functools
import struct
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.tensors import kernels
from p2pdiloco.tensors.recipes import BLOCKS, CHUNK

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER: Final = struct.Struct("<BBHI")
LARGEST_BODY: Final = HEADER.size + 2 * CHUNK
"""bf16's. No chunk's body has more bytes."""


def body_bytes(bits: int, block: int, elements: int) -> int:
    """The exact length of the body of one chunk of ``elements``; see ``quantizers``."""
    if not block:
        return HEADER.size + 2 * elements
    return HEADER.size + -(-elements // block) * (block * bits // 8 + 2)


class Part(NamedTuple):
    """A chunk's whole blocks, or its short last one."""

    filled: int
    """Elements in each block; the rest is zeros."""
    work: Tensor
    """float32 [blocks, block]"""
    wanted: Tensor
    """float32 [blocks]: scales before rounding."""
    scales: Tensor
    """bfloat16 [blocks], in the body."""
    inverse: Tensor
    """float32 [blocks, 1]"""
    symbols: Tensor
    """int8 [blocks * block]"""
    first: int
    """The first block's index."""


class Cut:
    """The scratch for chunks of one length in one format with blocks."""

    def __init__(self, scratch: Scratch, bits: int, block: int, elements: int) -> None:
        whole, tail = divmod(elements, block)
        blocks = whole + bool(tail)
        body = scratch.body[: body_bytes(bits, block, elements)]
        self.body = scratch.bytes.data[: body.numel()]
        self.packed = body[HEADER.size : -2 * blocks].view(torch.int8)
        self.scales = body[-2 * blocks :].view(torch.bfloat16)
        self.scale_bits = self.scales.view(torch.int16)
        self.wide = scratch.wanted[:blocks]
        self.symbols = scratch.symbols[: blocks * block]
        self.flat_packed = self.packed.view(torch.uint8).numpy()
        self.flat_scales = self.scales.view(torch.int16).numpy().view(np.uint16)
        self.flat_wide = self.wide.numpy()
        self.parts = tuple(
            Part(
                filled=filled,
                work=scratch.work[first * block : last * block].view(-1, block),
                wanted=scratch.wanted[first:last],
                scales=self.scales[first:last],
                inverse=scratch.inverse[first:last].unsqueeze(1),
                symbols=self.symbols[first * block : last * block],
                first=first,
            )
            for first, last, filled in ((0, whole, block), (whole, blocks, tail))
            if first < last
        )


class Scratch(threading.local):
    """See the module."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.work = torch.empty(CHUNK)
        self.values = torch.empty(CHUNK)
        self.symbols = torch.empty(CHUNK, dtype=torch.int8)
        self.narrow = torch.empty(CHUNK, dtype=torch.bfloat16)
        self.body = torch.empty(LARGEST_BODY, dtype=torch.uint8)
        self.bytes: NDArray[np.uint8] = self.body.numpy()
        self.wanted = torch.empty(CHUNK // BLOCKS[0])
        self.inverse = torch.empty(CHUNK // BLOCKS[0])
        self.squares: NDArray[np.int32] = np.empty(CHUNK // BLOCKS[0], np.int32)
        self.scales: NDArray[np.float32] = np.empty((2, CHUNK // BLOCKS[0]), np.float32)
        self.is_fast = kernels.AVAILABLE
        """Whether ``kernels`` are used."""
        self.cut = functools.lru_cache(maxsize=16)(functools.partial(Cut, self))


scratch: Final = Scratch()
