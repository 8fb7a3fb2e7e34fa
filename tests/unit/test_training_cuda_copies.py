"""Copies from and to a CUDA device, with a stand-in for its runtime: work on a stream is done when somebody waits for
it, or when the test says so. What only a device can show (overlap, speed) is ``benchmarks.gpu``'s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from p2pdiloco.training import cuda_copies
from p2pdiloco.training.cuda_copies import CudaCopies

REFUSED = 712


class Stream:
    """Work in order, which is done later."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.work[self.done - 1]()

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def record_event(self) -> Event:
        return Event(self, len(self.work))

    def synchronize(self) -> None:
        self.run(len(self.work))


class Event:
    """The work of a stream until now."""

    def __init__(self, stream: Stream, until: int) -> None:
        self.stream, self.until = stream, until

    def query(self) -> bool:
        return self.stream.done >= self.until

    def synchronize(self) -> None:
        self.stream.run(self.until)


class Later(TorchDispatchMode):
    """Copies inside go to a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self._stream.work.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class Runtime:
    """Of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.training, self.code, self.has_error = Stream(), 0, False
        self.side: list[Stream] = []
        monkeypatch.setattr(torch.cuda, "Stream", self._stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.training)
        monkeypatch.setattr(torch.cuda, "stream", Later)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch, "ones", self._kernel)
        monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)

    def _stream(self, _: torch.device) -> Stream:
        self.side.append(Stream())
        return self.side[-1]

    def cudaHostRegister(self, *_: int) -> int:  # noqa: N802 - CUDA's name
        self.has_error = self.has_error or self.code != 0
        return self.code

    def cudaHostUnregister(self, _: int) -> int:  # noqa: N802
        return self.cudaHostRegister()

    def _kernel(self, *_: object, **__: object) -> None:
        if self.has_error:
            self.has_error = False
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def test_what_reaches_the_host_is_what_the_parameters_were(cuda: Runtime) -> None:
    """However long the copy takes, and in the run's type."""
    side, host = CudaCopies(torch.device("cpu")), torch.zeros(6)
    parameters = [torch.full((3,), 1.5, dtype=torch.bfloat16), torch.full((3,), 2.0)]
    finished = side.to_host(zip(parameters, (host[:3], host[3:]), strict=True))
    for parameter in parameters:
        parameter.fill_(9.0)  # the next step
    assert not finished()
    assert not host.any()
    cuda.side[0].synchronize()
    assert finished()
    assert host.tolist() == [1.5] * 3 + [2.0] * 3


def test_what_reaches_the_device_is_taken_once_and_after_the_side_stream(cuda: Runtime) -> None:
    side, shift = CudaCopies(torch.device("cpu")), torch.full((6,), 1.0)
    parameters, taken = [torch.zeros(3), torch.zeros(3)], []

    def take(view: Tensor, copy: Tensor) -> None:
        taken.append(cuda.training.work[-1])  # it has been told to wait
        view.add_(copy)

    finished = side.to_device(zip(parameters, (shift[:3], shift[3:]), strict=True), take)
    assert len(taken) == 2
    assert [p.tolist() for p in parameters] == [[1.0] * 3] * 2
    assert finished()


@pytest.mark.parametrize("is_to_host", [True, False])
def test_a_whole_model_takes_only_so_much_of_the_device(
    cuda: Runtime, monkeypatch: pytest.MonkeyPatch, is_to_host: bool
) -> None:
    """What is more waits; a fragment never does."""
    monkeypatch.setattr(cuda_copies, "STAGED_BYTES", 4 * 1000)
    monkeypatch.setattr(cuda_copies, "BATCH_BYTES", 4 * 100)
    side, view, host = CudaCopies(torch.device("cpu")), torch.zeros(50), torch.zeros(50)
    most = 0

    def staged() -> int:
        return sum(size for event, size in side._staged if not event.query())

    def pieces(count: int) -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal most
        for _ in range(count):
            yield view, host
            most = max(most, staged())

    def copy(count: int) -> None:
        if is_to_host:
            side.to_host(pieces(count))
            return
        cuda.training.work.append(lambda: None)  # a step, before which nothing is taken
        side.to_device(pieces(count), torch.Tensor.copy_)

    copy(20)
    stream = cuda.side[0] if is_to_host else cuda.training
    assert stream.done == 0, "nobody waits for so little"
    assert most == 4 * 1000
    copy(200)
    assert most <= 4 * 1000
    assert stream.done
    assert len(side._staged) <= 10


def test_memory_that_cuda_does_not_lock_costs_speed_alone(cuda: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """The error that CUDA keeps would be raised by the training's next kernel."""
    side, vector = CudaCopies(torch.device("cpu")), torch.zeros(1000)
    side.pin(vector)
    assert not caplog.records
    cuda.code = REFUSED
    side.pin(vector)
    assert not cuda.has_error
    assert "error 712" in caplog.text
    assert "ulimit -l" in caplog.text
    side.unpin(vector)
    assert not cuda.has_error
