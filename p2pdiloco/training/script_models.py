"""Script models: completes the tensors that a run of training scripts trained to a model for transformers or peft.

Such a run knows the names and shapes of the tensors that it trained, and the configuration of a transformers model. The
model's class comes from there or from a config.json, its adapters (LoRA) from an adapter_config.json, and every other
tensor from the weights that the scripts began with, as safetensors. Names, shapes and configuration must fit, and a
model that would be incomplete is refused. It cannot be checked that the weights are those that the scripts began with,
because they are never sent.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from p2pdiloco.training.huggingface import EXTRA, ArchitectureError, import_transformers
from p2pdiloco.training.parameters import MOST_TOLD, compared, describe_lacking_buffers, named_buffers

ADAPTER_CONFIG = "adapter_config.json"
BY_HAND = (
    "Or export --format safetensors, load that into the script's own model (p2pdiloco.load_into(model, FOLDER)), and "
    "save it there"
)

# Matches peft's name of a trained tensor. The group is the adapter's name.
_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save|trainable_tokens_delta)\.([^.]+)")
# Prefix of all names in a ``PeftModel``.
_PEFT = "base_model.model."
# Values of ``init_lora_weights``, besides true and false, that do not change the base's weights.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
# Keys of a configuration that do not change what a trained model computes.
_IRRELEVANT = re.compile(
    r"token_id|drop|initializer|^_|name_or_path|dtype|version|use_cache|architectures|output_|return_dict|id2label|"
    r"label2id|pretraining_tp|problem_type|tokenizer|task|quantization"
)


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether any of these tensors is a low-rank adapter (LoRA)."""
    return any(".lora_" in name for name in names)


class CompleteModel(NamedTuple):
    """The complete model of a run of scripts."""

    model: Any
    """A transformers model, float32, on the CPU."""
    folder: Path | None
    """Folder with the weights that the scripts began with, if one was given."""
    takes_weights: bool
    """True if any of the model's weights come from that folder."""


def complete_model(
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    recorded: Mapping[str, Any],
    like: str | None,
    base: str | None,
) -> CompleteModel:
    """Build the complete model: the trained tensors, the buffers, and all others from ``base``. Adapters are merged.

    Args:
        tensors: the trained tensors, by the script's names.
        buffers: the script's buffers; empty if its machine has not saved any.
        recorded: the configuration that the run records; empty if it has none.
        like: folder with the model's config.json, or with the adapters' adapter_config.json.
        base: folder with the weights that the scripts began with, or their name in this machine's Hugging Face cache.
            Default: ``like``, or for adapters the base that their adapter_config.json names.

    Raises:
        ArchitectureError: transformers, peft, a folder, weights or buffers are missing, or they belong to another
            model. The message says what to do.
    """
    if not has_adapters(tensors):
        return _complete_plain(tensors, buffers, recorded, like, base)
    name, tensors, settings, folder = _read_adapter(tensors, like, base)
    buffers = _named_as_peft(buffers)
    own, kind = _architecture(folder)
    _check_recorded(own, recorded, str(folder))
    model, absent = _load(own, kind, folder)
    # A module of modules_to_save needs no weights in the base.
    trained = {one.removeprefix(_PEFT).replace(f".modules_to_save.{name}.", ".") for one in tensors}
    _check_complete(absent - trained - set(named_buffers(model)), kind, folder, len(tensors))
    adapted = _with_adapter(model, settings, name)
    _check_same(tensors, adapted, kind, f"{folder} with the adapters of {like}")
    _copy(tensors, buffers, adapted)
    return CompleteModel(merge(adapted), folder, True)


def adapter_tensors(
    tensors: Mapping[str, Tensor], recorded: Mapping[str, Any], like: str | None, base: str | None
) -> tuple[dict[str, Tensor], Path]:
    """Return the trained tensors under the names of peft's files, and the base's folder. Arguments as for
    ``complete_model``.

    Only the base's config.json is read.

    Raises:
        ArchitectureError: as ``complete_model``; also if the run trained tensors that peft does not save with adapters.
    """
    name, tensors, settings, folder = _read_adapter(tensors, like, base)
    own, kind = _architecture(folder)
    _check_recorded(own, recorded, str(folder))
    with torch.device("meta"):
        adapted = _with_adapter(_build(own, kind, folder), settings, name)
    _check_same(tensors, adapted, kind, f"{folder} with the adapters of {like}")
    import peft

    first = {id(p): one for one, p in adapted.named_parameters()}
    every = {one: first[id(p)] for one, p in adapted.named_parameters(remove_duplicate=False)}
    state = {one: tensors[trained] for one, trained in every.items() if trained in tensors}  # tied ones by each name
    try:
        files: dict[str, Tensor] = peft.get_peft_model_state_dict(
            adapted, state_dict=state, adapter_name=name, save_embedding_layers=False
        )
    except KeyError as error:
        raise ArchitectureError(
            f"peft saves {error} with an adapter, but the run did not train it: export --format hf, which merges the "
            f"adapters. {BY_HAND}"
        ) from error
    kept = {id(tensor) for tensor in files.values()}
    if left := [one for one, tensor in tensors.items() if id(tensor) not in kept]:
        raise ArchitectureError(
            f"the run also trained {_some(left)}, which peft does not save with an adapter: export --format hf, which "
            f"merges the adapters. {BY_HAND}"
        )
    # safetensors refuses one tensor under two names
    return {one: tensor.clone() for one, tensor in files.items()}, folder


@torch.no_grad()
def merge(adapted: Any) -> Any:
    """Merge the adapters into the weights, and return the model without peft.

    Tied weights are separated before, since an adapter changes one module's weights and not those of others that share
    them. They are tied again if they are still equal. Otherwise the configuration says that they are not tied.
    """
    seen: set[int] = set()
    for name, p in list(adapted.named_parameters(remove_duplicate=False)):
        if id(p) in seen:
            _put(adapted, name, torch.nn.Parameter(p.clone(), p.requires_grad))
        seen.add(id(p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that weights are no longer tied
        model = adapted.merge_and_unload()
    own, tied = model.state_dict(keep_vars=True), _tied(model).items()
    are_equal = all(torch.equal(own[one], own[other]) for one, other in tied)
    if tied:
        model.config.tie_word_embeddings = are_equal
    for one, other in tied if are_equal else ():
        _put(model, one, own[other])
    return model


# -- parts -------------------------------------------------------------------------------------------------------------


def _complete_plain(
    tensors: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    recorded: Mapping[str, Any],
    like: str | None,
    base: str | None,
) -> CompleteModel:
    shape = like or base
    if shape is None and recorded:
        return _complete_recorded(tensors, buffers, recorded)
    if shape is None:
        raise ArchitectureError(
            "the model is defined by the run's training scripts, and the run does not record its architecture: give "
            "--like FOLDER, with its config.json (model.save_pretrained writes it). If the scripts trained only a part "
            "of it, also give --model FOLDER, with the weights that they began with"
        )
    folder = find_folder(base or shape, "--model" if base else "--like")
    own, kind = _architecture(find_folder(shape, "--like" if like else "--model"))
    _check_recorded(own, recorded, shape)
    if (folder / "config.json").is_file() and (other := _architecture(folder)[0].model_type) != own.model_type:
        raise ArchitectureError(
            f"--like {like} is a {own.model_type}, but --model {base} is a {other}: give folders of the same model"
        )
    model, absent = _load(own, kind, folder)
    _check_same(tensors, model, kind, str(shape))
    _check_complete(absent - tensors.keys() - set(named_buffers(model)), kind, folder, len(tensors))
    _copy(tensors, buffers, model)
    return CompleteModel(model, folder, any(name not in tensors for name, _ in model.named_parameters()))


def _complete_recorded(
    tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], recorded: Mapping[str, Any]
) -> CompleteModel:
    """Build a model that the run trained as a whole, from the configuration that it records."""
    own = _recorded_config(recorded)
    kind = _class_of(own, "the run")
    with torch.device("meta"):
        shell = _build(own, kind, "the run")
    _check_same(tensors, shell, kind, "what the run records")
    if absent := _stored(shell) - tensors.keys() - set(named_buffers(shell)):
        raise ArchitectureError(
            f"the run trained {len(tensors)} tensors, and not the others of this {kind.__name__} ({_some(absent)}): "
            "give --model FOLDER, with the weights that the scripts began with, as safetensors"
        )
    model = _build(own, kind, "the run")
    _copy(tensors, buffers, model)
    return CompleteModel(model, None, False)


def _recorded_config(recorded: Mapping[str, Any]) -> Any:
    try:
        return _transformers().AutoConfig.for_model(**recorded)
    except Exception as error:  # transformers raises many types of errors
        raise ArchitectureError(
            f"this version of transformers cannot use the configuration that the run records ({error}): give --like "
            "FOLDER, with the model's config.json"
        ) from error


def _check_recorded(own: Any, recorded: Mapping[str, Any], where: str) -> None:
    """Check that a configuration computes what the scripts' model does. Two architectures may have the same tensors."""
    if not recorded:
        return
    if own.model_type != recorded["model_type"]:
        raise ArchitectureError(
            f"{where} is a {own.model_type}, but the run's scripts train a {recorded['model_type']}: give --like "
            "and --model folders of the scripts' model"
        )
    here, there = dict(_flat(own.to_dict())), dict(_flat(_recorded_config(recorded).to_dict()))
    odd = [
        f"{key} is {here.get(key)!r} here and {there.get(key)!r} there"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key) and not _IRRELEVANT.search(key)
    ]
    if odd:
        raise ArchitectureError(
            f"{where} (here) is not the model that the run's scripts train (there): {'; '.join(odd[:MOST_TOLD])}. Give "
            "--like and --model folders of the scripts' model"
        )


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _read_adapter(
    tensors: Mapping[str, Tensor], like: str | None, base: str | None
) -> tuple[str, dict[str, Tensor], Any, Path]:
    """Return the adapter's name, its tensors by their names in a PeftModel, its settings, and its base's folder."""
    _transformers()
    try:
        import peft
    except ImportError as error:
        raise ArchitectureError(f"the run trained adapters (LoRA), which needs peft: {EXTRA}") from error
    names = sorted({found[1] for found in map(_ADAPTER.search, tensors) if found})
    if len(names) != 1:
        raise ArchitectureError(
            f"the run trained several adapters ({', '.join(names)}), which is not supported. {BY_HAND}"
        )
    folder = adapter_settings(like)
    try:
        settings = peft.PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArchitectureError(f"{folder / ADAPTER_CONFIG} cannot be read ({error!r}): save it again") from error
    if not isinstance(settings, peft.LoraConfig):
        raise ArchitectureError(
            f"{folder / ADAPTER_CONFIG} is not for low-rank adapters (LoRA), which the run trained: give --like "
            "FOLDER, with the file that the run's script wrote"
        )
    start = settings.init_lora_weights
    if isinstance(start, str) and start not in _PLAIN_STARTS:
        raise ArchitectureError(
            f"the adapters began with init_lora_weights = {start!r}, which also changes the weights that they are for "
            f"or is an adapter of another kind, and the run does not have those weights. {BY_HAND}"
        )
    settings.init_lora_weights, settings.inference_mode = True, False
    given = base or settings.base_model_name_or_path
    if not given:
        raise ArchitectureError("give --model FOLDER, with the model that the run's adapters (LoRA) are for")
    return names[0], _named_as_peft(tensors), settings, find_folder(given, "--model")


def adapter_settings(like: str | None) -> Path:
    """Return the folder with the adapters' adapter_config.json.

    Raises:
        ArchitectureError: there is none.
    """
    folder = None if like is None else find_folder(like, "--like")
    if folder is None or not (folder / ADAPTER_CONFIG).is_file():
        raise ArchitectureError(
            "the run trained adapters (LoRA) and does not record how they are applied: give --like FOLDER, with their "
            f"{ADAPTER_CONFIG}{'' if like is None else f' ({like} has none)'}, and --model FOLDER, with the weights "
            "that they are for. In the script, model.save_pretrained(FOLDER) writes that file; for an adapter that is "
            "not named default it is in FOLDER/NAME"
        )
    return folder


def _named_as_peft(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in a PeftModel. ``model.add_adapter`` adds adapters without one."""
    return {name if name.startswith(_PEFT) else _PEFT + name: tensor for name, tensor in tensors.items()}


def find_folder(place: str, option: str) -> Path:
    """Return a folder: ``place`` itself, or that of a model in this machine's Hugging Face cache. Nothing is
    downloaded.

    Raises:
        ArchitectureError: there is neither.
    """
    folder = Path(place).expanduser()
    folder = folder.parent if folder.is_file() else folder
    if folder.is_dir():
        return folder
    with suppress(ImportError, ValueError):  # not a valid name of a repository
        from huggingface_hub import try_to_load_from_cache

        if isinstance(found := try_to_load_from_cache(place, "config.json"), str):
            return Path(found).parent
    raise ArchitectureError(
        f"{place} is not a folder, and no model of that name is in this machine's Hugging Face cache: "
        f"give {option} FOLDER"
    )


def _transformers() -> Any:
    return import_transformers("a model of training scripts is put together by transformers")


def _architecture(folder: Path) -> tuple[Any, Any]:
    """Return a folder's configuration, and transformers' class for it."""
    transformers = _transformers()
    try:
        own = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types of errors
        raise ArchitectureError(
            f"{folder} has no config.json that transformers can use ({error}). Give the folder that the scripts began "
            f"with, or that model.save_pretrained wrote. {BY_HAND}"
        ) from error
    return own, _class_of(own, str(folder / "config.json"))


def _class_of(own: Any, where: str) -> Any:
    transformers = _transformers()
    if own.architectures:
        kind = getattr(transformers, own.architectures[0], None)
    else:
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(own), None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise ArchitectureError(
            f"{where} names a model ({own.architectures or own.model_type}) that transformers "
            f"{transformers.__version__} does not have, and code that comes with a model is never run here. {BY_HAND}"
        )
    return kind


def _build(own: Any, kind: Any, folder: Path | str) -> Any:
    try:
        return kind(own)
    except Exception as error:  # the model's own code raises many types of errors
        raise ArchitectureError(f"transformers cannot build the model of {folder}: {error}") from error


def _load(own: Any, kind: Any, folder: Path) -> tuple[Any, set[str]]:
    """Load the float32 model with a folder's weights, if any; return it with the names of tensors that are not from
    there."""
    if not any((folder / f"model.safetensors{ending}").is_file() for ending in ("", ".index.json")):
        model = _build(own, kind, folder)
        with suppress(OSError, ValueError):
            model.generation_config = _transformers().GenerationConfig.from_pretrained(folder)
        return model, _stored(model)
    try:
        model, told = kind.from_pretrained(
            folder,
            config=own,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # the run may have trained a tensor in another shape, such as a new head
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:  # damaged or incomplete files raise many types of errors
        raise ArchitectureError(
            f"the weights in {folder} cannot be loaded: give the folder that the scripts began with ({error})"
        ) from error
    if getattr(model, "is_quantized", False):
        raise ArchitectureError(
            f"the weights in {folder} are quantized, and a model is exported in 32 bits: give --model FOLDER, with the "
            "16-bit weights that they were made from, or export the adapters alone (--format peft)"
        )
    return model, {*told["missing_keys"], *_names(told["mismatched_keys"])}


def _stored(model: Any) -> set[str]:
    """Return the names of the tensors that a file of the model's weights has; of tied ones the first."""
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return (set(model.state_dict()) - every).union(name for name, _ in model.named_parameters())


def _with_adapter(model: Any, settings: Any, name: str) -> Any:
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about tied weights, which ``merge`` separates
        try:
            return peft.get_peft_model(model, settings, adapter_name=name)
        except Exception as error:  # peft raises many types of errors for adapters that do not fit
            raise ArchitectureError(
                f"peft cannot put the adapters on a {type(model).__name__} ({error}): give --like FOLDER, with the "
                f"{ADAPTER_CONFIG} of the run's script, and --model FOLDER, with the model that they are for"
            ) from error


def _check_same(tensors: Mapping[str, Tensor], model: Any, kind: Any, what: str) -> None:
    """Check that the model has all trained tensors, and no adapter that the run did not train."""
    every = {name: p for name, p in model.named_parameters() if name in tensors or _ADAPTER.search(name)}
    found = {name: tuple(p.shape) for name, p in every.items() if name in tensors or p.requires_grad}
    odd = compared(found, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, "in the model")
    if odd:
        raise ArchitectureError(
            f"{what} (here) is not the model that the run trained (there): {odd}. It is a {kind.__name__}: give --like "
            f"and --model folders of the model that the scripts train. {BY_HAND}"
        )


def _check_complete(absent: set[str], kind: Any, folder: Path, trained: int) -> None:
    if not absent:
        return
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
    raise ArchitectureError(
        f"the run trained {trained} tensors, and {folder} lacks others of this {kind.__name__}, or has them in other "
        f"shapes ({_some(absent)}): "
        "give --model FOLDER, with the weights that the scripts began with, as safetensors"
        + (" (here they are pickles, which are never loaded: save_pretrained converts them)" if pickled else "")
    )


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor], model: Any) -> None:
    """Copy the trained tensors and the buffers into the model, which must have no other buffers."""
    if lacking := describe_lacking_buffers(model, buffers):
        raise ArchitectureError(f"{lacking}. {BY_HAND}")
    own = dict(model.named_parameters())
    for name, tensor in tensors.items():
        own[name].copy_(tensor)
    for name, buffer in named_buffers(model).items():
        buffer.copy_(buffers[name])


def _names(mismatched: Iterable[Any]) -> Iterator[str]:
    """Yield the names of tensors of other shapes: transformers 5 gives them with both shapes, 4 alone."""
    return (one if isinstance(one, str) else one[0] for one in mismatched)


def _tied(model: Any) -> Mapping[str, str]:
    """Return the names of weights that are copies of others, with the names of these."""
    if (every := getattr(model, "all_tied_weights_keys", None)) is not None:
        return dict(every)
    copies = model._tied_weights_keys if model.config.tie_word_embeddings else None  # transformers 4
    embedding = model.get_input_embeddings()
    source = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
    own = model.state_dict()
    return {name: source for name in copies or () if name in own and name != source}


def _put(model: Any, name: str, p: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, p)


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    return ", ".join(every[:MOST_TOLD]) + (f" and {len(every) - MOST_TOLD} more" if len(every) > MOST_TOLD else "")
