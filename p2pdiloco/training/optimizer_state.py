"""Saves the learner's own state on its peer's disk: the inner optimizer and its position in the data.

Global parameters are not saved here; the swarm has them. The file therefore never has to match a version: optimizer
moments that are some steps older than the parameters are still far better than none.

Rules of this file:
1. Only small values are copied at a step boundary. A thread reads and writes the optimizer's tensors piece by piece
   while training continues. The file thus mixes neighbouring steps, which does no harm (see above). Only one write runs
   at a time.
2. A file that does not fit the model exactly, or is not finite, is not used at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from p2pdiloco.training.corpus import Batches
from p2pdiloco.util.files import Buffer, read_regular, stream_atomically

STEPS = "steps"
DATA = "data"
# Number of elements that are read at once.
PIECE = 1 << 20
# Names of the types in safetensors.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class InnerStateError(Exception):
    """The file cannot be used. The message says why."""


def take(optimizers: Sequence[torch.optim.Optimizer], batches: Batches, steps: int) -> dict[str, Tensor]:
    """Return the optimizers' tensors per parameter, the data's random state, and ``steps``, the steps that they have
    made.

    Counters are copied. Tensors as large as a parameter are the optimizers' own, not copies.
    """
    taken = {STEPS: torch.tensor([steps]), DATA: batches.state()}
    for index, (optimizer, parameter) in enumerate(_parameters(optimizers)):
        for name, value in optimizer.state.get(parameter, {}).items():
            taken[f"{index}.{name}"] = value.detach().to("cpu", copy=True) if value.dim() == 0 else value.detach()
    return taken


def put(taken: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], batches: Batches) -> int:
    """Restore ``optimizers`` and ``batches`` from the result of ``take``; return the steps.

    Raises:
        InnerStateError: it is not of this model and these optimizers. Nothing is changed.
    """
    states: list[dict[str, Tensor]] = []
    kinds: set[tuple[int, tuple[str, ...]]] = set()
    for index, (optimizer, parameter) in enumerate(_parameters(optimizers)):
        own = {key.partition(".")[2]: value for key, value in taken.items() if key.startswith(f"{index}.")}
        fits = {value.shape for value in own.values()} <= {parameter.shape, torch.Size([])}
        if not fits or not all(bool(torch.isfinite(value).all()) for value in own.values()):
            raise InnerStateError(f"the state of parameter {index} has another shape, or values that are not finite")
        states.append(own)
        kinds.add((id(optimizer), tuple(sorted(own))))
    if len(kinds) > len(optimizers) or any(key.startswith(f"{len(states)}.") for key in taken):
        raise InnerStateError("it belongs to another model")
    try:
        steps = int(taken[STEPS].item())
        batches.set_state(taken[DATA])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise InnerStateError(f"the steps or the position in the data are missing: {error}") from error
    for (optimizer, parameter), state in zip(_parameters(optimizers), states, strict=True):
        if state:
            optimizer.state[parameter] = {
                name: value.clone() if value.dim() == 0 and math.prod(parameter.shape) != 1 else value.to(parameter)
                for name, value in state.items()
            }
    return steps


def parts(taken: Mapping[str, Tensor]) -> Iterator[Buffer]:
    """Yield the parts of a safetensors file of ``taken``. Each tensor is read when its part is requested."""
    entries, at = {}, 0
    for name, value in taken.items():
        size = value.numel() * value.element_size()
        entries[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for value in taken.values():
        flat = value.reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            piece = flat[start : start + PIECE].to("cpu").contiguous()
            yield piece.view(torch.uint8).numpy().data


class InnerStateFile:
    """Reads and writes inner states at ``path``. ``write`` replaces a file atomically."""

    def __init__(self, path: Path, write: Callable[[Path, Iterable[Buffer]], None] = stream_atomically) -> None:
        self._path = path
        for half in path.parent.glob(f".{path.name}.*.part"):  # left by an earlier life that was killed while writing
            with contextlib.suppress(OSError):
                half.unlink()
        self._write = write
        self._thread: threading.Thread | None = None
        # Why the last write failed. The reader clears it after reporting it.
        self.trouble = ""

    def read(self) -> dict[str, Tensor] | None:
        """Return the saved state; None if there is none.

        Raises:
            InnerStateError: the file cannot be read.
        """
        try:
            taken: dict[str, Tensor] = safetensors.torch.load(read_regular(self._path))
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            raise InnerStateError(str(error)) from error
        return taken

    @property
    def is_busy(self) -> bool:
        """True while a write is running."""
        return self._thread is not None and self._thread.is_alive()

    def keep(self, taken: Mapping[str, Tensor]) -> None:
        """Begin to write ``taken`` in the background. The process does not end before it is written."""
        self._thread = threading.Thread(target=self._run, args=(dict(taken),), name="inner state")
        self._thread.start()

    def join(self) -> None:
        """Wait for the running write."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, taken: dict[str, Tensor]) -> None:
        try:
            self._write(self._path, parts(taken))
        except OSError as error:
            self.trouble = f"the inner optimizer's state was not saved; the previous one is kept: {error}"


def _parameters(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[torch.optim.Optimizer, Tensor]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield optimizer, parameter
