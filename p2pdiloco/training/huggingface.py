"""Hugging Face models: built from a configuration that is data, never from code or pickles.

Rules of this file:
1. transformers is imported only when needed, and offline. If it is missing, the user is told what to install.
2. A configuration may only have keys that its model type has. ``protocol/manifest_validation.py`` has checked its size
   and values before.
3. The model is first built without memory, and its tensors are compared with the manifest's before anything is
   allocated. Frozen tensors, which no manifest lists, are compared with the peer's own folder.
4. Weights come from safetensors in a peer's own folder, or from the seed. The base model of adapters (LoRA) is never
   sent; its digest must be the manifest's.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from p2pdiloco.protocol.ids import Digest, digest_of
from p2pdiloco.protocol.manifest import LoraConfig, ModelConfig, TensorSpec
from p2pdiloco.protocol.manifest_validation import architecture_problems
from p2pdiloco.training.parameters import MAX_BUFFERS, MOST_TOLD, check_tensors, named_buffers, trainable

EXTRA = "install the extra: pip install 'p2pdiloco[hf]' (in a checkout: pip install -c constraints.txt '.[hf]')"
MAX_CONFIG_BYTES = 1 << 20

# Keys that transformers still accepts but no longer writes.
_OLD_KEYS = frozenset({"rope_theta", "rope_scaling"})
_DROPPED = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})


NO_WEIGHTS = (
    "the run trains adapters (LoRA) on a model whose weights are not sent to peers: give --model FOLDER, with the "
    "founder's safetensors"
)


class ArchitectureError(ValueError):
    """The model cannot be built. The message is for the person who started the peer."""


def build_huggingface(
    config: ModelConfig, seed: int, tensors: Sequence[TensorSpec] | None = None, base: str | None = None
) -> nn.Module:
    """Build a float32 model on the CPU, initialised from ``seed`` by the model's own code.

    Args:
        tensors: the manifest's tensors. Nothing is allocated if the model has others.
        base: the folder with the weights that the manifest's adapters are for.

    Raises:
        ArchitectureError: transformers is missing or does not know this model; there are unknown keys or other tensors;
            the base is missing or is another one.
    """
    transformers = _transformers(str(config.config.get("model_type")))
    own = _config(transformers, config.config)
    try:
        with torch.device("meta"):
            shell = transformers.AutoModelForCausalLM.from_config(own, trust_remote_code=False, dtype=torch.float32)
            base_elements = sum(p.numel() for p in shell.parameters())
            shell = shell if config.lora is None else _with_adapters(shell, config.lora, seed)
    except ArchitectureError:
        raise
    except Exception as error:  # the model's own code raises many types of errors
        raise ArchitectureError(f"transformers cannot build this model: {error}") from error
    buffers = sum(buffer.numel() for buffer in shell.buffers())
    if buffers > MAX_BUFFERS:
        raise ArchitectureError(f"the model has buffers of {buffers} elements; at most {MAX_BUFFERS} are allowed")
    if tensors is not None:
        try:
            check_tensors(trainable(shell), tensors)
        except ValueError as error:
            raise ArchitectureError(
                f"{error}: this version of transformers ({transformers.__version__}) builds another model"
            ) from error
    if config.lora is not None:
        return _adapted(transformers, own, config.lora, seed, base, base_elements)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            own, trust_remote_code=False, dtype=torch.float32
        )
    return model


def read_folder(config: ModelConfig, seed: int) -> tuple[ModelConfig, nn.Module | None]:
    """Read a founder's ``model.folder``: the configuration as data, and the model if the folder has weights.

    The model has the adapters that are to be trained, if any.

    Raises:
        ArchitectureError: the folder cannot be used.
    """
    folder = Path(config.folder).expanduser()
    try:
        with (folder / "config.json").open("rb") as file:
            told = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ArchitectureError(
            f"model.folder = {config.folder!r}: config.json cannot be read ({error}): "
            "name a folder as transformers' save_pretrained writes it"
            + ("" if config.lora is None else ", there or with --model")
        ) from error
    if not isinstance(told, dict) or "auto_map" in told:
        raise ArchitectureError(
            f"model.folder = {config.folder!r} needs code of its own, which p2pdiloco never runs: choose a model "
            "without auto_map"
        )
    transformers = _transformers(str(told.get("model_type")))
    kept = {key: value for key, value in told.items() if not key.startswith("_") and key not in _DROPPED}
    known = _known(transformers, str(told.get("model_type")))
    found = msgspec.structs.replace(
        config, folder="", config={key: value for key, value in kept.items() if key in known and value is not None}
    )
    if problems := architecture_problems(found.config):
        raise ArchitectureError("; ".join(problems))
    model = _weights(transformers, _config(transformers, found.config), folder)
    if config.lora is None:
        if model is not None:
            _check_buffers(transformers, _config(transformers, found.config), model)
        return found, model
    if model is None:
        raise ArchitectureError(f"{folder} has no weights (*.safetensors) for model.lora to train adapters on")
    lora = msgspec.structs.replace(config.lora, base_digest=weights_digest(model))
    return msgspec.structs.replace(found, lora=lora), _with_adapters(model, lora, seed)


def _check_buffers(transformers: Any, own: Any, model: nn.Module) -> None:
    """Check that a pretrained model has no buffers of its own: peers that join would have those of a new model."""
    if not (here := named_buffers(model)):
        return
    new = named_buffers(transformers.AutoModelForCausalLM.from_config(own, trust_remote_code=False))
    if odd := [name for name, buffer in here.items() if not torch.equal(buffer, new[name].to(buffer.dtype))]:
        raise ArchitectureError(
            f"the pretrained {own.model_type} has buffers, which peers do not exchange ({', '.join(odd[:MOST_TOLD])}): "
            "train it with a script that loads the model at every peer, or only adapters (model.lora)"
        )


def weights_digest(model: nn.Module) -> Digest:
    """Return the digest of all parameters' names and float32 values, in the model's order."""
    parts: list[bytes | memoryview] = []
    for name, p in model.named_parameters():
        values = p.detach().contiguous().reshape(-1).numpy().astype("<f4", copy=False)
        parts += [name.encode(), values.data.cast("B")]
    return digest_of(*parts)


def _weights(transformers: Any, own: Any, folder: Path) -> nn.Module | None:
    """Load the float32 model of a folder; None if the folder has no weights."""
    if not list(folder.glob("*.safetensors")):
        if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
            raise ArchitectureError(
                f"{folder} has pickled weights, which are never loaded: convert them to safetensors"
            )
        return None
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=own,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            dtype=torch.float32,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ArchitectureError(f"{folder}: the weights cannot be loaded: {error}") from error
    return model


def _adapted(transformers: Any, own: Any, lora: LoraConfig, seed: int, base: str | None, elements: int) -> nn.Module:
    """Build adapters on the weights of the folder ``base``, which must have the manifest's digest.

    ``elements``: number of elements that the configuration says the base has. If the files have fewer, nothing is
    allocated.
    """
    if base is None:
        raise ArchitectureError(NO_WEIGHTS)
    folder = Path(base).expanduser()
    here = _elements(folder)
    if here < elements:
        raise ArchitectureError(
            f"--model {folder} has weights (*.safetensors) of {here} elements, but the run's base has {elements}: copy "
            "the founder's files there"
        )
    model = _weights(transformers, own, folder)
    assert model is not None, "it has elements"
    found = weights_digest(model)
    if found != lora.base_digest:
        raise ArchitectureError(
            f"the weights in --model {folder} have the digest {found}, but the run's adapters are for "
            f"{lora.base_digest}: copy the founder's files there"
        )
    return _with_adapters(model, lora, seed)


def _elements(folder: Path) -> int:
    """Return the number of elements of all tensors in the folder's safetensors files, from their headers."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as file:
                total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ArchitectureError(f"{path} cannot be read: {error}") from error
    return total


def _with_adapters(model: nn.Module, lora: LoraConfig, seed: int) -> nn.Module:
    """Freeze ``model`` and add adapters initialised from ``seed``."""
    try:
        import peft
    except ImportError as error:
        raise ArchitectureError(f"model.lora needs peft: {EXTRA}") from error
    how = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: nn.Module = peft.get_peft_model(model, how)
        except ValueError as error:
            raise ArchitectureError(f"model.lora.targets: {error}") from error
    return adapted


def import_transformers(why: str) -> Any:
    """Import transformers, in offline mode.

    Raises:
        ArchitectureError: it is not installed. The message begins with ``why`` it is needed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError as error:
        raise ArchitectureError(f"{why}: {EXTRA}") from error
    return transformers


def _transformers(model_type: str) -> Any:
    return import_transformers(f"the run's model is a Hugging Face {model_type}")


def _known(transformers: Any, model_type: str) -> set[str]:
    try:
        default = transformers.AutoConfig.for_model(model_type)
    except (KeyError, ValueError) as error:
        raise ArchitectureError(f"this version of transformers does not know model_type {model_type!r}") from error
    return {key for key in default.to_dict() if not key.startswith("_")} | _OLD_KEYS


def _config(transformers: Any, config: Mapping[str, Any]) -> Any:
    model_type = str(config["model_type"])
    unknown = sorted(set(config) - _known(transformers, model_type))
    if unknown:
        raise ArchitectureError(f"a {model_type} has no key {', '.join(unknown[:5])}: remove it from model.config")
    try:
        own = transformers.AutoConfig.for_model(
            model_type, **{key: value for key, value in config.items() if key != "model_type"}
        )
    except Exception as error:  # transformers raises many types of errors
        raise ArchitectureError(f"model.config is not valid for a {model_type}: {error}") from error
    own.use_cache = False
    return own
