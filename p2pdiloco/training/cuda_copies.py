"""Copies between a CUDA device and the shared vectors. Neither the training thread nor its stream waits for them.

Rules of this file:
1. A copy to the host captures the parameters at the time of the call: they are cloned on the training stream (a copy
   inside the device), and the side stream transfers the clone.
2. The shared vectors are page-locked if CUDA allows it, which makes copies asynchronous. Otherwise copies are slower
   but equally correct.
3. Each copy returns a function (``Finished``) that says whether it has ended, so that the host's memory may be read or
   overwritten.
4. Clones and incoming data take at most STAGED_BYTES of the device. A larger transfer, such as loading a whole model,
   waits for running copies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor

# Returns whether a copy has ended. Once True, it stays True.
Finished: TypeAlias = Callable[[], bool]

# More than a fragment of a model of a billion parameters in 24 fragments.
STAGED_BYTES = 512 << 20
# Bytes copied between two checks for room.
BATCH_BYTES = 32 << 20

log = logging.getLogger("p2pdiloco")


class CudaCopies:
    """Copies on a side stream of ``device`` (CUDA)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Staged data on the device: the event that ends its use, and its bytes.
        self._staged: deque[tuple[torch.cuda.Event, int]] = deque()

    def pin(self, vector: Tensor) -> None:
        """Page-lock the memory of ``vector`` until ``unpin``. If CUDA refuses, copies are slower."""
        size = vector.numel() * vector.element_size()
        code = int(torch.cuda.cudart().cudaHostRegister(vector.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
        if code:
            log.warning(
                f"CUDA cannot page-lock {size / 1e6:.0f} MB of memory (error {code}), so copies to and from the device "
                "are slower: raise the limit on locked memory (ulimit -l), or leave more memory free"
            )
            self._forget_error()

    def unpin(self, vector: Tensor) -> None:
        """Undo ``pin``. Call it before the memory is released."""
        self._stream.synchronize()
        if int(torch.cuda.cudart().cudaHostUnregister(vector.data_ptr())):  # type: ignore[no-untyped-call]
            self._forget_error()  # it was not locked

    def to_host(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Finished:
        """Begin to copy each first tensor (device) to the second (host, float32), with its present values."""
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
        """Call ``take(view, copy)`` for each first tensor (device) and a copy of the second (host).

        The calls run on the training stream, which waits for the copies. The calling thread does not wait.
        """
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
        """Wait until ``size`` more bytes may be staged on the device."""
        staged = self._staged
        while staged:
            event, _ = staged[0]
            if not event.query() and sum(one for _, one in staged) + size <= STAGED_BYTES:  # type: ignore[no-untyped-call]
                break
            staged.popleft()
            event.synchronize()

    def _forget_error(self) -> None:
        """Clear CUDA's error of a refused call, which the next, unrelated kernel would raise."""
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)


def _ended(event: torch.cuda.Event) -> Finished:
    return lambda: bool(event.query())  # type: ignore[no-untyped-call]


def _batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[tuple[Tensor, Tensor]], int]]:
    """Yield batches of pairs with their size as float32: BATCH_BYTES or a little more each, except for the last."""
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
