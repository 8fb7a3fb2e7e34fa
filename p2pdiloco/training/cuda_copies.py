"""Copies between a CUDA device and the shared vectors that neither the training thread nor its stream waits for.

Rules of this file:
1. What is copied to the host is the parameters of now: they are cloned on the training's stream (a copy inside the
   device), and only the clone travels, on the side stream.
2. The shared vectors are page-locked where CUDA allows it; copies are then asynchronous. Where it does not they are
   slower, and as correct.
3. Whoever asks gets a question back, ``Finished``: whether the host's memory may be read or written by now.
4. Clones and what comes to the device take STAGED_BYTES of it at most: who wants more, as when a model is loaded whole,
   waits for what is under way.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor

Finished: TypeAlias = Callable[[], bool]
"""Whether a copy has ended; it stays true."""

STAGED_BYTES = 512 << 20
"""More than a fragment's of a billion parameters in 24."""
BATCH_BYTES = 32 << 20
"""Copied between two questions whether there is room."""

log = logging.getLogger("p2pdiloco")


class CudaCopies:
    """One stream beside the training's, on ``device`` (CUDA)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged: deque[tuple[torch.cuda.Event, int]] = deque()
        """What is on the device for a copy's sake: until when, and bytes."""

    def pin(self, vector: Tensor) -> None:
        """Page-lock the memory of ``vector``; if CUDA refuses, copies are slower. Undone by ``unpin``."""
        size = vector.numel() * vector.element_size()
        code = int(torch.cuda.cudart().cudaHostRegister(vector.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        if code:
            log.warning(
                f"CUDA does not lock {size / 1e6:.0f} MB of memory (error {code}): copies to and from the device are "
                "slower; raise the limit of locked memory (ulimit -l), or leave more memory free"
            )
            self._forget_error()

    def unpin(self, vector: Tensor) -> None:
        """To be called before the memory goes."""
        self._stream.synchronize()
        if int(torch.cuda.cudart().cudaHostUnregister(vector.data_ptr())):  # type: ignore[no-untyped-call]
            self._forget_error()  # it was not locked

    def to_host(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Finished:
        """Begin to copy each first tensor (device) to the second (host, float32) as it is now."""
        for batch, size in _batches(pairs):
            self._make_room(size)
            clones = [(view.to(torch.float32, copy=True), target) for view, target in batch]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for clone, target in clones:
                    target.copy_(clone, non_blocking=True)
                    clone.record_stream(self._stream)
            self._staged.append((self._stream.record_event(), size))
        return _ended(self._stream.record_event())

    def to_device(self, pairs: Iterable[tuple[Tensor, Tensor]], take: Callable[[Tensor, Tensor], object]) -> Finished:
        """``take(view, copy)`` for each first tensor (device) and a copy of the second (host), on the training's
        stream, which waits for the copies; this thread does not."""
        training = torch.cuda.current_stream(self._device)
        for batch, size in _batches(pairs):
            self._make_room(size)
            with torch.cuda.stream(self._stream):
                moved = [source.to(self._device, non_blocking=True) for _, source in batch]
            training.wait_event(self._stream.record_event())
            for (view, _), tensor in zip(batch, moved, strict=True):
                tensor.record_stream(training)
                take(view, tensor)
            self._staged.append((training.record_event(), size))
        return _ended(self._stream.record_event())

    def _make_room(self, size: int) -> None:
        """For ``size`` bytes more on the device."""
        staged = self._staged
        while staged:
            event, _ = staged[0]
            if not event.query() and sum(one for _, one in staged) + size <= STAGED_BYTES:  # type: ignore[no-untyped-call]
                break
            staged.popleft()
            event.synchronize()

    def _forget_error(self) -> None:
        """CUDA keeps a refused call's error, and the next kernel, which has nothing to do with it, would raise it."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def _ended(event: torch.cuda.Event) -> Finished:
    return lambda: bool(event.query())  # type: ignore[no-untyped-call]


def _batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[tuple[Tensor, Tensor]], int]]:
    """Each with its bytes as float32: BATCH_BYTES or a little more, but for the last."""
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += 4 * pair[0].numel()
        if size >= BATCH_BYTES:
            yield batch, size
            batch, size = [], 0
    if batch:
        yield batch, size
