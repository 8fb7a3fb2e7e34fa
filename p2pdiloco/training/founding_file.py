"""Founding file: a training script's settings and first parameters, from which its node founds the run.

The script writes the file. Its node makes the manifest and version 0 from it. A script thus needs no code of the node.

Rules of this file:
1. It is a safetensors file with the parameters in float32. The settings are in its header.
2. It is written once per state folder. A restarted script founds the same run again, whatever its model's parameters
   are by then. A script that dies while writing leaves nothing that is taken for the file.
3. The script's settings are checked before anything is written, because the file is used again at every start.
4. Neither side holds more than a piece of it in memory: the script has the model there already, and the node builds one
   from it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import UNSET
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from p2pdiloco.codec.digests import as_bytes
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.protocol.manifest_defaults import in_rounds
from p2pdiloco.protocol.manifest_validation import architecture_problems, config_problems
from p2pdiloco.training.config_errors import in_words
from p2pdiloco.training.parameters import frozen_digest, unwrapped
from p2pdiloco.util.files import open_regular, stream_atomically

NAME = "foundation.safetensors"
# Number of parameters that are converted and written at a time.
PIECE = 4 << 20
_HEADER = "p2pdiloco"
# Keys of a transformers model's configuration that tell nothing about the model, or not what it computes.
NOT_RECORDED = frozenset(
    {"dtype", "torch_dtype", "transformers_version", "name_or_path", "use_cache", "quantization_config"}
)
log = logging.getLogger("p2pdiloco")

# The argument of ``p2pdiloco.DiLoCo`` for each of these keys of a configuration.
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
    "outer.merge": "merge",
    "codec.up": "codec",
    "codec.down": "codec",
}


class FoundationError(Exception):
    """The file, or what it should contain, cannot be used. The message says why."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    config: RunConfig
    names: tuple[str, ...]
    """Names of the tensors in the model's own order, which safetensors does not keep."""
    embeddings: frozenset[str]


class Foundation(msgspec.Struct, frozen=True):
    """The content of a founding file, without the parameters."""

    path: Path
    config: RunConfig
    shapes: tuple[tuple[str, torch.Size], ...]
    """Names and shapes of the model's trainable parameters, in its own order."""
    embeddings: frozenset[str]
    """Names of the embeddings, which are merged by the direct mean."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters in that order, float32, one at a time from the file."""
        for name, _ in self.shapes:
            with safe_open(self.path, framework="pt") as file:  # opened for each, to release the mapped memory
                yield name, file.get_tensor(name)


# Defaults of a script that differ from those of a configuration file.
ENDLESS = 10**9


def settings(given: Mapping[str, Any], *, tensors: int, parameters: float = math.inf, share: float = 1.0) -> RunConfig:
    """Return the configuration of a run from arguments of ``p2pdiloco.DiLoCo`` (of _ARGUMENTS, and ``evaluate``;
    those that are None are left out).

    H, P and the outer optimizer get the defaults of a configuration file (``manifest_defaults.in_rounds``), for a model
    of which so many ``tensors`` and ``parameters`` are exchanged, a ``share`` of all parameters. With ``sync_every``
    alone, P is 1.

    Raises:
        FoundationError: an argument is invalid. The message names it and its allowed values.
    """
    written: dict[str, Any] = {"model": {"kind": "external"}, "inner": {"warmup": 0}}
    if given.get("evaluate") is None:
        written["evaluation"] = {"every": 0}
    for key, argument in _ARGUMENTS.items():
        table, _, name = key.rpartition(".")
        if (value := given.get(argument)) is not None:
            (written.setdefault(table, {}) if table else written)[name] = value
    written["inner"].setdefault("steps", ENDLESS)
    schedule = written.setdefault("schedule", {})
    if "sync_every" in schedule:
        schedule.setdefault("fragments", 1)
    try:
        msgspec.json.encode(written, enc_hook=repr)
        config = in_rounds(
            msgspec.convert(written, RunConfig),
            schedule,
            written.get("outer", {}),
            parameters=parameters,
            share=share,
            tensors=tensors,
        )
        problems = config_problems(config, tensors=tensors)
        if given.get("sync_every") is not None and config.schedule.sync_every > config.inner.steps:
            problems.append(
                f"inner.steps = {config.inner.steps} is less than schedule.sync_every = {config.schedule.sync_every}: "
                "nothing would be exchanged before the end"
            )
    except msgspec.ValidationError as error:
        problems = [in_words(error, written, RunConfig)]
    except UnicodeEncodeError as error:
        problems = [f"{error.object!r} is not valid text: it has half of a surrogate pair"]
    if problems:
        raise FoundationError("; ".join(_of_arguments(problem) for problem in problems))
    return config


def with_architecture(config: RunConfig, model: nn.Module) -> RunConfig:
    """Return ``config`` with the configuration of a transformers model, from which exports build it.

    Configurations that a manifest may not hold are left out.
    """
    bare: Any = unwrapped(model)
    bare = bare.get_base_model() if hasattr(bare, "peft_config") and hasattr(bare, "get_base_model") else bare
    try:
        told = json.loads(bare.config.to_json_string(use_diff=False))
    except (AttributeError, TypeError, ValueError):
        return config
    if not isinstance(told, dict):
        return config
    kept = {key: value for key, value in told.items() if not key.startswith("_") and key not in NOT_RECORDED}
    kinds = (kind for kind in type(bare).__mro__ if kind.__module__.startswith("transformers."))
    kept["architectures"] = [next(kinds, type(bare)).__name__]  # fully_shard and scripts make classes of their own
    if architecture_problems(kept):
        return config
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, config=kept))


def with_frozen(config: RunConfig, model: nn.Module) -> RunConfig:
    """Return ``config`` with the name and the fingerprint of the model's frozen parameters, if it has any."""
    if (digest := frozen_digest(model)) is None:
        return config
    bare: Any = unwrapped(model)
    bare = bare.get_base_model() if hasattr(bare, "peft_config") and hasattr(bare, "get_base_model") else bare
    name = str(getattr(getattr(bare, "config", None), "name_or_path", ""))
    is_of_hub = re.fullmatch(r"[\w.-]{1,63}/[\w.-]{1,64}", name, re.ASCII) and not Path(name).exists()
    told = name if is_of_hub else re.sub(r"\W", "-", type(bare).__name__, flags=re.ASCII)[:128]  # paths do not travel
    norms = frozen_digest(model, norms_only=True) or UNSET
    about = msgspec.structs.replace(config.model, frozen_digest=str(digest), frozen_norms=norms, frozen_name=told)
    return msgspec.structs.replace(config, model=about)


def tell_other_base(run: RunConfig, own: RunConfig) -> None:
    """Warn if a script's frozen parameters are not those of the run's founder."""
    theirs, mine = run.model, own.model
    if UNSET in (theirs.frozen_digest, mine.frozen_digest) or theirs.frozen_digest == mine.frozen_digest:
        return
    if UNSET in (theirs.frozen_norms, mine.frozen_norms):
        what = "a different base, or the same one in another precision (4, 8, 16 bits)"
    elif theirs.frozen_norms == mine.frozen_norms:
        what = "the same base in another precision (4, 8, 16 bits), or fine-tuned with frozen norms"
    else:
        what = "a different base"
    log.warning(
        "run %s trains on the frozen parameters of %s (fingerprint %.8s), this script has those of %s (%.8s): %s. "
        "Peers may load one base in different precisions, but what is trained on two bases fits neither: load the same "
        "base everywhere, from the same source",
        run.name,
        theirs.frozen_name,
        theirs.frozen_digest,
        mine.frozen_name,
        mine.frozen_digest,
        what,
    )


def _of_arguments(problem: str) -> str:
    """Rewrite a sentence about configuration keys as one about arguments."""
    problem = re.sub(r"[a-z]+\.[a-z_]+", lambda key: _ARGUMENTS.get(key[0], key[0]), problem)
    return re.sub(r"^name = ", "run = ", problem)


def write(path: Path, config: RunConfig, named: Sequence[tuple[str, Tensor]], embeddings: frozenset[str]) -> None:
    """Write ``path``, completely or not at all.

    ``named``: the trainable parameters, on any device, of any float type.

    Raises:
        OSError: the disk is full, or the folder is not writable.
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
    for half in path.parent.glob(f".{path.name}.*.part"):  # of a killed script: only one at a time uses this folder
        half.unlink()
    stream_atomically(path, chain((len(text).to_bytes(8, "little") + text,), _pieces(named)))


def _pieces(named: Sequence[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for _, p in named:
        flat = p.detach().reshape(-1)
        for start in range(0, flat.numel(), PIECE):
            yield as_bytes(flat[start : start + PIECE].to("cpu", torch.float32)).data


def write_once(
    path: Path,
    config: RunConfig,
    named: Sequence[tuple[str, Tensor]],
    embeddings: frozenset[str],
    given: Mapping[str, Any],
) -> None:
    """Write the file, unless it exists; then the earlier run continues.

    ``given``: the script's own arguments, which are compared with the earlier run's.

    Raises:
        FoundationError: the folder belongs to another run, or the file cannot be used.
        OSError: as in ``write``.
    """
    if not path.exists():
        return write(path, config, named, embeddings)
    earlier = read(path).config
    if earlier.name != config.name:
        raise FoundationError(
            f"the state folder {path.parent} belongs to run {earlier.name}, which a script founded there: give run "
            f"{config.name} a folder of its own (state=...), or continue with run={earlier.name!r}"
        )
    tell_differences(earlier, given)
    tell_other_base(earlier, config)
    return None


def tell_differences(config: RunConfig, given: Mapping[str, Any]) -> None:
    """Warn if a run's settings differ from the arguments that a script has given (those that are not None).

    ``tell_end`` is for the end, which is not fixed.
    """
    others = {
        argument: _at(config, key)
        for key, argument in _ARGUMENTS.items()
        if key not in ("name", "inner.steps")
        and given.get(argument) is not None
        and given[argument] != _at(config, key)
    }
    if others:
        log.warning(
            "run %s was founded with %s and keeps these settings; this script has %s, which is ignored. To train with "
            "other settings, choose another run=",
            config.name,
            ", ".join(f"{argument}={value!r}" for argument, value in others.items()),
            ", ".join(f"{argument}={given[argument]!r}" for argument in others),
        )


def tell_end(run: str, wanted: int | None, last_step: int, state: Path) -> None:
    """Warn if the run ends at another step than a script has given as ``total_steps`` (None: it has not)."""
    if wanted is not None and wanted != last_step:
        log.warning(
            "run %s ends at step %s, and this script's total_steps=%s is ignored. Its founder, or an admin, can "
            "prolong it: p2pdiloco prolong %s --steps N",
            run,
            last_step,
            wanted,
            state,
        )


def _at(config: RunConfig, key: str) -> object:
    return functools.reduce(getattr, key.split("."), config)


def read(path: Path) -> Foundation:
    """Read a founding file.

    Raises:
        FoundationError: it does not exist, is torn, or of another version.
    """
    try:
        os.close(open_regular(path))  # safetensors would wait for the writer of a FIFO
        with safe_open(path, framework="pt") as file:
            header = msgspec.json.decode((file.metadata() or {})[_HEADER], type=_Header)
            shapes = tuple((name, torch.Size(file.get_slice(name).get_shape())) for name in header.names)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise FoundationError(
            f"{path} cannot be used ({error}): remove it, and the script founds its run again"
        ) from error
    return Foundation(path, header.config, shapes, header.embeddings)
