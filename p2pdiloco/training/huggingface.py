"""Hugging Face models of a run's TOML: built from a configuration that is data, never from code or pickles.

Rules of this file:
1. transformers is imported when it is needed, and offline; whoever lacks it is told what to install.
2. A configuration may have only keys that its model type has. ``protocol/architecture.py`` has bounded it before.
3. Before anything is allocated the model is built without memory, and its tensors are compared with the manifest's.
4. Weights come from safetensors in a founder's own folder, or from the seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from p2pdiloco.protocol.architecture import architecture_problems
from p2pdiloco.protocol.manifest import ModelConfig, TensorSpec
from p2pdiloco.training.parameters import check_tensors
from p2pdiloco.training.trainable import trainable

EXTRA = "install the extra: pip install 'p2pdiloco[hf]' (in a checkout: pip install -c constraints.txt '.[hf]')"
MAX_BUFFERS = 1 << 28
"""Elements of buffers (tables of positions and the like) that a model may have."""
MAX_CONFIG_BYTES = 1 << 20

_OLD_KEYS = frozenset({"rope_theta", "rope_scaling"})
"""Understood by transformers, and no longer in its configurations."""
_DROPPED = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})


class ArchitectureError(ValueError):
    """The model cannot be built; the message is for the person who started the peer."""


def build_huggingface(config: ModelConfig, seed: int, tensors: Sequence[TensorSpec] | None = None) -> nn.Module:
    """A float32 model on the CPU, initialised from ``seed`` as its own code does it. With ``tensors``, those of the
    manifest, nothing is allocated if they are not the model's.

    Raises:
        ArchitectureError: transformers is not here or does not know this model; unknown keys; other tensors.
    """
    transformers = _transformers(str(config.config.get("model_type")))
    own = _config(transformers, config.config)
    try:
        with torch.device("meta"):
            shell = transformers.AutoModelForCausalLM.from_config(own, trust_remote_code=False, dtype=torch.float32)
    except Exception as error:  # the model's own code says in many ways that it cannot be built
        raise ArchitectureError(f"transformers cannot build this model: {error}") from error
    buffers = sum(buffer.numel() for buffer in shell.buffers())
    if buffers > MAX_BUFFERS:
        raise ArchitectureError(f"the model has buffers of {buffers} elements, at most {MAX_BUFFERS} are allowed")
    if tensors is not None:
        try:
            check_tensors(trainable(shell), tensors)
        except ValueError as error:
            raise ArchitectureError(
                f"{error}: this version of transformers ({transformers.__version__}) builds another model"
            ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            own, trust_remote_code=False, dtype=torch.float32
        )
    return model


def read_folder(config: ModelConfig) -> tuple[ModelConfig, nn.Module | None]:
    """A founder's ``model.folder``: its configuration as data, and its model if weights are there.

    Raises:
        ArchitectureError: the folder cannot be used.
    """
    folder = Path(config.folder).expanduser()
    try:
        with (folder / "config.json").open("rb") as file:
            told = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ArchitectureError(f"model.folder = {config.folder!r}: config.json cannot be read: {error}") from error
    if not isinstance(told, dict) or "auto_map" in told:
        raise ArchitectureError(f"model.folder = {config.folder!r} needs code of its own, which is never run here")
    transformers = _transformers(str(told.get("model_type")))
    kept = {key: value for key, value in told.items() if not key.startswith("_") and key not in _DROPPED}
    known = _known(transformers, str(told.get("model_type")))
    found = msgspec.structs.replace(
        config, folder="", config={key: value for key, value in kept.items() if key in known and value is not None}
    )
    if problems := architecture_problems(found.config):
        raise ArchitectureError("; ".join(problems))
    if not list(folder.glob("*.safetensors")):
        if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
            raise ArchitectureError(f"{folder} has weights as pickles, which are never loaded: convert to safetensors")
        return found, None
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=_config(transformers, found.config),
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ArchitectureError(f"{folder}: the weights cannot be loaded: {error}") from error
    return found, model


def _transformers(model_type: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise ArchitectureError(f"the run's model is a Hugging Face {model_type}: {EXTRA}") from error
    return transformers


def _known(transformers: Any, model_type: str) -> set[str]:
    try:
        default = transformers.AutoConfig.for_model(model_type)
    except (KeyError, ValueError) as error:
        raise ArchitectureError(f"this version of transformers knows no model_type {model_type!r}") from error
    return {key for key in default.to_dict() if not key.startswith("_")} | _OLD_KEYS


def _config(transformers: Any, config: Mapping[str, Any]) -> Any:
    model_type = str(config["model_type"])
    unknown = sorted(set(config) - _known(transformers, model_type))
    if unknown:
        raise ArchitectureError(f"a {model_type} has no {', '.join(unknown[:5])}: leave it out of model.config")
    try:
        own = transformers.AutoConfig.for_model(
            model_type, **{key: value for key, value in config.items() if key != "model_type"}
        )
    except Exception as error:  # transformers validates in many ways
        raise ArchitectureError(f"model.config is no {model_type}: {error}") from error
    own.use_cache = False
    return own
