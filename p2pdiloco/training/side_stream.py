"""Copies between a CUDA device and the shared vectors that neither the training thread nor its stream waits for.

Rules of this file:
1. What is copied to the host is the parameters of now: they are cloned on the training's stream (a copy inside the
   device), and only the clone travels, on the side stream.
2. The shared vectors are page-locked where CUDA allows it; copies are then asynchronous. Where it does not they are
   slower, and as correct.
3. Whoever asks gets a question back, ``Finished``: whether the host's memory may be read or written by now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Finished: TypeAlias = Callable[[], bool]
"""Whether a copy has ended; it stays true."""


class SideStream:
    """One stream beside the training's, on ``device`` (CUDA)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, vector: Tensor) -> None:
        """Page-lock the memory of ``vector``; if CUDA refuses, nothing changes. Undone by ``unpin``."""
        size = vector.numel() * vector.element_size()
        torch.cuda.cudart().cudaHostRegister(vector.data_ptr(), size, 0)  # type: ignore[no-untyped-call]

    def unpin(self, vector: Tensor) -> None:
        """To be called before the memory goes."""
        self._stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(vector.data_ptr())  # type: ignore[no-untyped-call]

    def to_host(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Finished:
        """Begin to copy each first tensor (device) to the second (host, float32) as it is now."""
        clones = [(view.to(torch.float32, copy=True), target) for view, target in pairs]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for clone, target in clones:
                target.copy_(clone, non_blocking=True)
                clone.record_stream(self._stream)
        return _ended(self._stream.record_event())

    def to_device(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Finished]:
        """Copies of ``sources`` (host) for the training's stream, which waits for them; this thread does not."""
        training = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = [source.to(self._device, non_blocking=True) for source in sources]
        finished = self._stream.record_event()
        training.wait_event(finished)
        for tensor in moved:
            tensor.record_stream(training)
        return moved, _ended(finished)


def _ended(event: torch.cuda.Event) -> Finished:
    return lambda: bool(event.query())  # type: ignore[no-untyped-call]
