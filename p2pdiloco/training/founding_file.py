"""File with which a training script creates its run: the settings and the first parameters of its model.

The script writes it, its node reads it and makes of it the manifest and version 0. So a script needs nothing of a node.

Rules of this file:
1. It is a safetensors file with the parameters in float32; the settings lie in its header.
2. It is written once a state folder. A script that is started again founds the run that it founded first, whatever its
   model's parameters are by then. A script that dies in between leaves nothing that is taken for it.
3. What a script asks for is checked before anything is written: what was once written is founded again and again.
4. Neither side holds more of it in memory than a piece: a script has its model there already, a node makes one of it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2pdiloco.codec.digests import as_bytes
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.protocol.manifest_validation import config_problems
from p2pdiloco.training.config_errors import in_words
from p2pdiloco.util.files import stream_atomically

NAME = "foundation.safetensors"
PIECE = 4 << 20
"""Parameters that are converted and written at a time."""
_HEADER = "p2pdiloco"
log = logging.getLogger("p2pdiloco")

_ARGUMENTS = {
    "name": "run",
    "access": "access",
    "inner.steps": "total_steps",
    "schedule.fragments": "n_fragments",
    "schedule.sync_every": "sync_every",
    "schedule.overlap": "fragment_sync_delay",
    "schedule.min_quorum": "min_quorum",
    "outer.learning_rate": "outer_lr",
    "outer.momentum": "outer_momentum",
    "codec.up": "codec",
    "codec.down": "codec",
}
"""What a founder's configuration has under these keys, as ``p2pdiloco.DiLoCo`` calls it."""


class FoundationError(Exception):
    """The file cannot be used, or what it is to hold; the message says why."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    config: RunConfig
    names: tuple[str, ...]
    """Of the tensors, in the model's own order, which safetensors does not keep."""
    embeddings: frozenset[str]


class Foundation(msgspec.Struct, frozen=True):
    """What was read, but for the parameters themselves."""

    path: Path
    config: RunConfig
    shapes: tuple[tuple[str, torch.Size], ...]
    """Names and shapes of the model's trainable parameters, in its own order."""
    embeddings: frozenset[str]
    """Which of them are embeddings: those are merged by the direct mean."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """In that order, float32, from the file: one after the other, none is held."""
        for name, _ in self.shapes:
            with safe_open(self.path, framework="pt") as file:  # anew: what it has mapped goes with it
                yield name, file.get_tensor(name)


def settings(given: dict[str, Any], *, tensors: int) -> RunConfig:
    """The configuration of a run, from arguments of ``p2pdiloco.DiLoCo`` as they were ``given`` (all of _ARGUMENTS);
    the model has so many ``tensors``.

    Raises:
        FoundationError: they are impossible; the message names the argument and what it may be.
    """
    written: dict[str, Any] = {"model": {"kind": "external"}, "inner": {"warmup": 0}, "evaluation": {"every": 0}}
    for key, argument in _ARGUMENTS.items():
        table, _, name = key.rpartition(".")
        (written.setdefault(table, {}) if table else written)[name] = given[argument]
    try:
        msgspec.json.encode(written, enc_hook=repr)
        config = msgspec.convert(written, RunConfig)
        problems = config_problems(config, tensors=tensors)
    except msgspec.ValidationError as error:
        problems = [in_words(error, written, RunConfig)]
    except UnicodeEncodeError as error:
        problems = [f"{error.object!r} is no text: it has half of a character"]
    if problems:
        raise FoundationError("; ".join(_of_arguments(problem) for problem in problems))
    return config


def _of_arguments(problem: str) -> str:
    """A sentence on keys of the configuration as one on arguments."""
    problem = re.sub(r"[a-z]+\.[a-z_]+", lambda key: _ARGUMENTS.get(key[0], key[0]), problem)
    return re.sub(r"^name = ", "run = ", problem)


def write(path: Path, config: RunConfig, named: Sequence[tuple[str, Tensor]], embeddings: frozenset[str]) -> None:
    """Write ``path``, whole or not at all. ``named``: the trainable parameters, on any device, of any float type.

    Raises:
        OSError: the disk is full, the folder is not writable.
    """
    told = msgspec.json.encode(_Header(config, tuple(name for name, _ in named), embeddings)).decode()
    entries: dict[str, object] = {"__metadata__": {_HEADER: told}}
    at = 0
    for name, p in named:
        end = at + 4 * p.shape.numel()
        entries[name] = {"dtype": "F32", "shape": list(p.shape), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    for half in path.parent.glob(f".{path.name}.*.part"):  # of a script that was killed: one at a time has this folder
        half.unlink()
    stream_atomically(path, chain((len(text).to_bytes(8, "little") + text,), _pieces(named)))


def _pieces(named: Sequence[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for _, p in named:
        flat = p.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            yield as_bytes(flat[start : start + PIECE].to("cpu", torch.float32)).data


def write_once(path: Path, config: RunConfig, named: Sequence[tuple[str, Tensor]], embeddings: frozenset[str]) -> None:
    """``write`` it, if it is not there; else the run that was founded goes on.

    Raises:
        FoundationError: that is another run; or the file cannot be used.
        OSError: as ``write``.
    """
    if not path.exists():
        return write(path, config, named, embeddings)
    earlier = read(path).config
    if earlier.name != config.name:
        raise FoundationError(
            f"the state folder {path.parent} is run {earlier.name}'s, which a script has founded there: give run "
            f"{config.name} a folder of its own (state=...), or go on with run={earlier.name!r}"
        )
    if others := [
        f"{argument}={_at(earlier, key)!r}"
        for key, argument in _ARGUMENTS.items()
        if _at(earlier, key) != _at(config, key)
    ]:
        log.warning(
            "run %s was founded with %s, and goes on so: to train with other settings, choose another run=",
            config.name,
            ", ".join(others),
        )
    return None


def _at(config: RunConfig, key: str) -> object:
    return functools.reduce(getattr, key.split("."), config)


def read(path: Path) -> Foundation:
    """What ``write`` wrote.

    Raises:
        FoundationError: it is not there, torn, or of another version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = msgspec.json.decode((file.metadata() or {})[_HEADER], type=_Header)
            shapes = tuple((name, torch.Size(file.get_slice(name).get_shape())) for name in header.names)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise FoundationError(
            f"{path} cannot be used ({error}): remove it, and the script founds its run anew"
        ) from error
    return Foundation(path, header.config, shapes, header.embeddings)
