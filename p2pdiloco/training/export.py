"""Exports of a run's global parameters: for Hugging Face transformers, for peft (adapters), or as plain tensors.

Rules of this file:
1. Only data is written: safetensors and JSON. No code goes with a model, and none is needed to load it.
2. The built-in transformer is a Llama (RMSNorm, rotary halves, SwiGLU, no biases). Its matrices are split and renamed;
   no number changes. If it reads bytes, this needs neither transformers nor tokenizers.
3. A folder appears whole or not at all. In an existing folder only the files of an earlier export are replaced.
4. Every export describes itself (``ABOUT``): the run, its step, and the number of merged tokens.
5. A model or an adapter is written completely. Tensors that the run did not train come from the weights that it began
   with; otherwise the export is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from p2pdiloco.protocol.manifest import DataConfig, Layout, Manifest, ModelConfig, RunConfig
from p2pdiloco.training.dataset_files import PATTERNS, CorpusError
from p2pdiloco.training.gguf_export import GGUF, write_gguf
from p2pdiloco.training.huggingface import import_transformers
from p2pdiloco.training.model_card import CARD
from p2pdiloco.training.models import NO_BASE, NORM_EPS, ROTARY_BASE, build, build_model, feed_width
from p2pdiloco.training.parameters import (
    FlatParameters,
    compared,
    describe_lacking_buffers,
    named_buffers,
    named_parameters,
    trainable,
)
from p2pdiloco.training.script_models import (
    ADAPTER_CONFIG,
    adapter_settings,
    adapter_tensors,
    complete_model,
    find_folder,
    has_adapters,
    merge,
)
from p2pdiloco.training.tokenized_dataset import load_tokenizer, read_tokenizer

Format = Literal["hf", "safetensors", "peft", "gguf"]
ABOUT = "p2pdiloco.json"
TORN = f"{ABOUT}.torn"
WEIGHTS = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"
_BYTES = 256


class ExportError(ValueError):
    """An export cannot be written or loaded. The message says why and what to do. A subclass of ``ValueError``."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an export."""

    run: str
    name: str
    step: int
    """Global step."""
    tokens: int
    """Number of tokens merged in it."""
    format: Format
    model: ModelConfig
    base: str = ""
    """For ``hf`` of a run of scripts: the folder with the tensors that the run did not train."""
    has_tokenizer: bool = False
    reads_tokens: bool = False
    """True if the built-in model reads tokens of a tokenizer.json, not bytes."""
    separator: str = ""
    """Token at the end of each text that the built-in model was trained on."""
    files: tuple[str, ...] = ()
    """Names of the other files of the export."""
    buffers: tuple[str, ...] = ()
    """Names of the buffers in it, as the script of one peer had them: peers do not exchange buffers."""


def tensors_of(manifest: Manifest, theta: Tensor) -> dict[str, Tensor]:
    """Return the trainable tensors by name, in the model's own order, as views of ``theta``, the run's flat float32
    vector."""
    layout = Layout.of(manifest)
    starts = dict(zip(layout.order, layout.starts, strict=True))
    return {
        spec.name: theta[starts[i] : starts[i] + spec.elements].view(spec.shape)
        for i, spec in enumerate(manifest.tensors)
    }


def check_built(config: RunConfig) -> None:
    """Check that the run's model can be built here.

    Raises:
        ExportError: it belongs to a script.
    """
    if config.model.kind == "external":
        raise ExportError(
            f"the model of run {config.name} is defined by its training scripts: export it with --format safetensors "
            "and load that into the script's model (p2pdiloco.load_into(model, FOLDER))"
        )


def built(manifest: Manifest, theta: Tensor, base: str | None = None) -> nn.Module:
    """Build the run's model with these parameters: float32 on the CPU, in evaluation mode.

    ``base``: the folder with the weights that adapters are for.

    Raises:
        ValueError: the model belongs to a script, or cannot be built here.
    """
    check_built(manifest.config)
    model = build(manifest.config.model, manifest.config.seed, manifest.tensors, base)
    flat = FlatParameters(trainable(model), manifest.tensors, Layout.of(manifest))
    flat.copy_from(theta, flat.everything)
    return model.eval()


def export(
    manifest: Manifest,
    theta: Tensor,
    folder: Path,
    about: About,
    *,
    base: str | None = None,
    tokenizer: str | None = None,
    like: str | None = None,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
    card: str = "",
) -> list[str]:
    """Write the model into ``folder`` in ``about.format``; return the names of the written files.

    Files of an earlier export in the folder are removed, others are not.

    Args:
        base: as for ``built``; for runs of scripts the weights that they began with.
        tokenizer: a folder whose tokenizer the export gets. Default, for runs of scripts: that of ``like`` or ``base``.
        like: for runs of scripts, a folder with the configuration of the same model, or of its adapters.
        buffers: for runs of scripts, the model's buffers, as this machine's script saved them.
        card: the model card, if one is to be written.

    Raises:
        ExportError: the run has no such format, does not use these folders, or ``folder`` holds something else.
        ValueError: the model cannot be built here, or would be incomplete.
        OSError: it cannot be written.
    """
    folder = folder.resolve()  # if it is a link, write beside its target, so that a rename stays on one file system
    config, half = manifest.config.model, folder.with_name(f"{folder.name}.{os.urandom(4).hex()}.part")
    _check_replaceable(folder)
    check_export(manifest.config, about.format, base, tokenizer, like)
    about = _with_tokens(about, manifest.config)
    half.mkdir(parents=True)
    try:
        folders: list[Path] = []  # that may have the tokenizer
        if config.kind == "external" and about.format in ("hf", "gguf"):
            about, folders = _write_completed(manifest, theta, half, about, like, base, buffers)
        elif config.kind == "external" and about.format == "peft":
            folders = _write_scripts_adapters(manifest, theta, half, about, like, base)
        elif config.kind == "external":
            about = msgspec.structs.replace(about, buffers=tuple(buffers))
            _save(tensors_of(manifest, theta) | dict(buffers), half / WEIGHTS, about)
        else:
            _writer(config, about.format)(manifest, theta, half, about, base)
        if tokenizer is not None:
            folders.insert(0, _tokenizer_folder(tokenizer))
        _save_tokenizer(folders, half, about.separator)
        if config.kind != "transformer" and about.format != "safetensors":
            _save_generation(folders, half)
        if about.separator:
            _name_end(half, about.separator)
        about = msgspec.structs.replace(about, has_tokenizer=(half / "tokenizer.json").is_file())
        if about.format == "gguf":
            _make_gguf(half, about)
        if card:
            (half / CARD).write_text(card, encoding="utf-8")
        about = msgspec.structs.replace(about, files=tuple(sorted(path.name for path in half.iterdir())))
        (half / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)))
        _replace(folder, half, about.files)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return sorted((*about.files, ABOUT))


def default_format(config: ModelConfig) -> Format:
    """Return the format that an export of this model has unless the user names one."""
    if config.kind == "external":
        return "safetensors"
    return "hf" if config.lora is None else "peft"


def check_export(config: RunConfig, wanted: Format, base: str | None, tokenizer: str | None, like: str | None) -> None:
    """Check that the run has this format and uses these folders, as far as its configuration tells.

    Raises:
        ExportError: it does not.
    """
    _check_used(config.model, wanted, base, like)
    if config.model.kind != "external":
        _writer(config.model, wanted)
    if tokenizer is not None:
        _check_used_tokenizer(config, tokenizer)


def check_adapters(manifest: Manifest, wanted: Format, like: str | None) -> None:
    """Check that it is known how a script's adapters are applied, if this format needs that.

    Raises:
        ArchitectureError: it is not.
    """
    is_scripts = manifest.config.model.kind == "external" and wanted != "safetensors"
    if is_scripts and has_adapters(spec.name for spec in manifest.tensors):
        adapter_settings(like)


# -- formats -----------------------------------------------------------------------------------------------------------

_Write = Callable[[Manifest, Tensor, Path, About, str | None], None]


def _check_used(config: ModelConfig, wanted: Format, base: str | None, like: str | None) -> None:
    """Check that the run's model uses the given folders."""
    if config.kind == "external":
        if wanted == "safetensors" and (like or base):
            raise ExportError(
                "--like and --model complete what a run of scripts trained to a whole model or adapter: add --format "
                "hf or --format peft. For the trained tensors alone (--format safetensors) leave them out"
            )
    elif like is not None:
        raise ExportError("--like is for runs of training scripts; this run's manifest defines its model: leave it out")
    elif base is not None and config.lora is None:
        raise ExportError(NO_BASE)


def _check_used_tokenizer(config: RunConfig, place: str) -> None:
    """Check that a tokenizer is the run's."""
    if config.model.kind == "transformer" and config.data.kind not in PATTERNS:
        raise ExportError(
            "the run's model reads bytes, and its exports have a tokenizer of bytes: leave --tokenizer out"
        )
    check_tokenizer(config.data, Path(place).expanduser())


def check_tokenizer(data: DataConfig, place: Path) -> None:
    """Check that ``place`` (tokenizer.json, or its folder) is the tokenizer of a run that records one.

    Raises:
        ExportError: it is another one.
    """
    if not data.tokenizer_digest:
        return
    try:
        read_tokenizer(data, None, str(place))
    except CorpusError as error:
        raise ExportError(f"--tokenizer {place}: {error}") from error


def _writer(config: ModelConfig, wanted: Format) -> _Write:
    if wanted == "safetensors":
        return _write_tensors
    if wanted == "peft":
        if config.lora is None:
            raise ExportError("the run trains a whole model, not adapters (LoRA): export it with --format hf")
        return _write_lora
    return _write_llama if config.kind == "transformer" else _write_pretrained


def _make_gguf(folder: Path, about: About) -> None:
    """Replace an export for transformers by one GGUF file."""
    before = list(folder.iterdir())
    write_gguf(folder, folder / GGUF, about.name)
    for path in before:
        path.unlink()


def _write_tensors(manifest: Manifest, theta: Tensor, folder: Path, about: About, base: str | None) -> None:
    _save(tensors_of(manifest, theta), folder / WEIGHTS, about)


def _write_pretrained(manifest: Manifest, theta: Tensor, folder: Path, about: About, base: str | None) -> None:
    """Write the model with transformers. Adapters are merged into their base."""
    model: Any = built(manifest, theta, base)
    if manifest.config.model.lora is not None:
        model = merge(model)
    model.config.use_cache = True  # off in training
    with _system_errors(folder):
        model.save_pretrained(folder)


def _write_lora(manifest: Manifest, theta: Tensor, folder: Path, about: About, base: str | None) -> None:
    lora = manifest.config.model.lora
    assert lora is not None
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    _write_json(folder / ADAPTER_CONFIG, told)
    tensors = tensors_of(manifest, theta)  # peft leaves the adapter's name out of its files
    _save({name.replace(".default.", "."): t for name, t in tensors.items()}, folder / ADAPTERS, about)


def _write_completed(
    manifest: Manifest,
    theta: Tensor,
    folder: Path,
    about: About,
    like: str | None,
    base: str | None,
    buffers: Mapping[str, Tensor],
) -> tuple[About, list[Path]]:
    """Write the complete model of a run of scripts. Also return the folders that it is made from."""
    found = complete_model(tensors_of(manifest, theta), buffers, manifest.config.model.config, like, base)
    with _system_errors(folder):
        found.model.save_pretrained(folder)
    folders = [] if like is None else [find_folder(like, "--like")]
    folders += [] if found.folder is None else [found.folder]
    base = str(found.folder) if found.takes_weights else ""
    return msgspec.structs.replace(about, base=base, buffers=tuple(named_buffers(found.model))), folders


def _write_scripts_adapters(
    manifest: Manifest, theta: Tensor, folder: Path, about: About, like: str | None, base: str | None
) -> list[Path]:
    """Write the adapters of a run of scripts. Return the folders of their settings and of their base."""
    tensors = tensors_of(manifest, theta)
    if not has_adapters(tensors):
        raise ExportError("none of the run's tensors is a low-rank adapter (LoRA): export it with --format safetensors")
    adapters, own_base = adapter_tensors(tensors, manifest.config.model.config, like, base)
    _save(adapters, folder / ADAPTERS, about)
    settings = find_folder(str(like), "--like")
    shutil.copyfile(settings / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
    return [settings, own_base]


def _write_llama(manifest: Manifest, theta: Tensor, folder: Path, about: About, base: str | None) -> None:
    """Write the built-in transformer as a Llama model of transformers."""
    config = manifest.config.model
    _save(llama_tensors(tensors_of(manifest, theta)), folder / WEIGHTS, about)
    _write_json(folder / "config.json", llama_config(config))
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.7})
    if about.reads_tokens:
        return
    _write_json(folder / "tokenizer.json", byte_tokenizer(config.vocabulary))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context}
    _write_json(folder / "tokenizer_config.json", told | {"clean_up_tokenization_spaces": False})


def _with_tokens(about: About, config: RunConfig) -> About:
    """Return ``about`` with what the built-in model reads."""
    reads_tokens = config.model.kind == "transformer" and config.data.kind in PATTERNS
    separator = config.data.separator if reads_tokens else ""
    return msgspec.structs.replace(about, reads_tokens=reads_tokens, separator=separator)


def _name_end(folder: Path, separator: str) -> None:
    """Write which token ends a text into the configuration files of a built-in model that reads tokens."""
    if not (folder / "tokenizer.json").is_file():
        return
    end = load_tokenizer((folder / "tokenizer.json").read_bytes()).token_to_id(separator)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            told = json.loads((folder / name).read_text(encoding="utf-8"))
            _write_json(folder / name, told | {"eos_token_id": end})


def llama_config(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' config.json for the built-in transformer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": feed_width(config.width),
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.width // config.heads,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROTARY_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


_RENAMED = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# Names of a block's tensors in a Llama layer. Several names: the tensor's rows are split evenly among them.
_IN_BLOCK = {
    "attention_norm.weight": ("input_layernorm.weight",),
    "attention.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.out.weight": ("self_attn.o_proj.weight",),
    "feed_norm.weight": ("post_attention_layernorm.weight",),
    "feed.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "feed.down.weight": ("mlp.down_proj.weight",),
}


def llama_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the built-in transformer's tensors under Llama's names."""
    found = {}
    for name, tensor in tensors.items():
        if name in _RENAMED:
            found[_RENAMED[name]] = tensor
            continue
        _, block, rest = name.split(".", 2)
        pieces = _IN_BLOCK[rest]
        for piece, part in zip(pieces, tensor.chunk(len(pieces)), strict=True):
            found[f"model.layers.{block}.{piece}"] = part
    return found


def byte_tokenizer(vocabulary: int) -> dict[str, Any]:
    """Return a tokenizer.json whose tokens are bytes: byte-level BPE without merges, with GPT-2's characters for
    bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(_BYTES) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(_BYTES + i) for i, byte in enumerate(hidden)}
    bytes_as_they_are = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": bytes_as_they_are,
        "post_processor": None,
        "decoder": bytes_as_they_are,
        "model": {
            "type": "BPE",
            "vocab": {letters[byte]: byte for byte in range(min(vocabulary, _BYTES))},
            "merges": [],
        },
    }


# -- files -------------------------------------------------------------------------------------------------------------


def _save(tensors: Mapping[str, Tensor], path: Path, about: About) -> None:
    told = {"format": "pt", "p2pdiloco": msgspec.json.encode(about).decode()}
    with _system_errors(path):
        safetensors.torch.save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=told
        )
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read what it writes


@contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Turn a SafetensorError that reports a system error into the OSError that it was."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")


def _check_replaceable(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"--out {folder} is a file: name another folder")
    if folder.exists() and any(folder.iterdir()) and not any((folder / name).exists() for name in (ABOUT, TORN)):
        raise ExportError(f"--out {folder} is not empty and holds no earlier export: name another folder")


def _replace(folder: Path, new: Path, files: tuple[str, ...]) -> None:
    """Replace an earlier export's files by ``files`` and ABOUT of ``new``.

    A crash during the replacement leaves TORN instead of ABOUT, which lists the files of both exports."""
    if not folder.exists():
        new.rename(folder)
        return
    before: tuple[str, ...] = ()
    for name in (ABOUT, TORN):
        with suppress(OSError, ValueError):
            before = msgspec.json.decode((folder / name).read_bytes(), type=About).files
    there = {path.name: path.is_dir() for path in folder.iterdir()}
    others = [name for name in files if there.get(name) or (name in there and before and name not in before)]
    if others:
        raise ExportError(f"--out {folder} holds {', '.join(others)}, not written by an export: name another folder")
    torn = msgspec.structs.replace(msgspec.json.decode((new / ABOUT).read_bytes(), type=About), files=(*files, *before))
    (new / TORN).write_bytes(msgspec.json.encode(torn))
    (new / TORN).replace(folder / TORN)
    (folder / ABOUT).unlink(missing_ok=True)
    for name in files:
        (new / name).replace(folder / name)
    for name in set(before).difference(files):
        with suppress(OSError, ValueError):  # the list may come from a stranger, with names that are not valid here
            if Path(name).name == name and (folder / name).is_file():
                (folder / name).unlink()
    (new / ABOUT).replace(folder / ABOUT)
    (folder / TORN).unlink()


def _tokenizer_folder(place: str) -> Path:
    given = Path(place).expanduser()
    given = given.parent if given.is_file() else given
    if not _has_tokenizer(given):
        raise ExportError(f"{given} has no tokenizer.json: name the folder that has it")
    return given


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _save_tokenizer(folders: Iterable[Path], target: Path, end: str) -> None:
    """Write the tokenizer of the first folder that has one, as transformers does: with special tokens and chat
    template.

    ``end``: the token that ends a text, if the tokenizer does not say it.
    """
    given = next(filter(_has_tokenizer, folders), None)
    if given is None:
        return
    transformers = import_transformers("tokenizers are written by transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(given, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types of errors
        raise ExportError(
            f"transformers cannot load the tokenizer in {given} ({error}): name a folder with --tokenizer, as "
            "tokenizer.save_pretrained writes it"
        ) from error
    if end and not tokenizer.eos_token:
        tokenizer.eos_token = end
    tokenizer.save_pretrained(target, save_jinja_files=isinstance(tokenizer.chat_template, str))  # several: a folder
    if (given / "tokenizer.json").is_file():  # byte for byte, since runs record its digest
        shutil.copyfile(given / "tokenizer.json", target / "tokenizer.json")


def _save_generation(folders: Iterable[Path], target: Path) -> None:
    """Write how to generate, such as the tokens at which to stop, as the first folder that says it does."""
    for folder in folders:
        if (folder / "generation_config.json").is_file():
            generation = import_transformers("models are written by transformers").GenerationConfig
            generation.from_pretrained(folder, local_files_only=True).save_pretrained(target)
            return


# -- Loading an export -------------------------------------------------------------------------------------------------


def load_model(folder: str | os.PathLike[str]) -> nn.Module:
    """Load an export of the built-in transformer, written by ``p2pdiloco export --format safetensors``.

    Args:
        folder: The folder that ``export`` wrote, or its ``model.safetensors``.

    Returns:
        The model in float32 on the CPU, in evaluation mode. It maps tokens, int64 of shape [batch, time], to logits,
        float32 of shape [batch, time, vocabulary]. Tokens are bytes: 0 to 255.

    Raises:
        ExportError: The folder has no such export, or one of another kind of model.
        OSError: The file cannot be read.
    """
    path = Path(folder)
    path = path / WEIGHTS if path.is_dir() else path
    try:
        with safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get("p2pdiloco", "")
        config = msgspec.json.decode(told, type=About).model
        if config.kind != "transformer":
            raise ExportError(f"{path} is a {config.kind} model: load it with its own library")
        model = build_model(config, 0)
        model.load_state_dict(safetensors.torch.load_file(path))
    except (SafetensorError, msgspec.DecodeError, RuntimeError) as error:
        raise ExportError(f"{path} is not what `p2pdiloco export --format safetensors` writes: {error}") from error
    return model.eval()


def load_into(model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Load an export into a model of your own: copy each tensor that the run trained to the parameter of that name, and
    the buffers, as the exporting peer had them.

    Other parameters stay as they are. Values are converted to the dtype and device that the model has.

    Args:
        model: The model that the run's scripts trained. It may be compiled, or wrapped in DDP or ``fully_shard``, and
            its parameters may be frozen.
        folder: The folder that ``p2pdiloco export --format safetensors`` wrote, or its ``model.safetensors``.
        strict: Whether the export must have all buffers of the model's ``state_dict``. False: those that it lacks stay
            as they are.

    Raises:
        ExportError: The model lacks a tensor of the export, has one in another shape, or is on the meta device; or the
            export lacks buffers.
        OSError: The file cannot be read.
    """
    path = Path(folder)
    path = path / WEIGHTS if path.is_dir() else path
    try:
        written = safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise ExportError(f"{path} is not what `p2pdiloco export --format safetensors` writes: {error}") from error
    here: dict[str, Tensor] = {**named_parameters(model), **named_buffers(model)}
    if any(tensor.is_meta for tensor in here.values()):
        raise ExportError("the model has tensors without memory (meta): call model.to_empty(device=...) first")
    found = {name: tuple(here[name].shape) for name in written if name in here}
    if odd := compared(found, {name: tuple(values.shape) for name, values in written.items()}, "in the model"):
        raise ExportError(f"{path} does not fit this model: {odd}")
    if strict and (lacking := describe_lacking_buffers(model, written)):
        raise ExportError(
            f"{path}: {lacking}. With strict=False they stay as they are: BatchNorm's statistics then need batches "
            "in training mode"
        )
    with torch.no_grad():
        for name, values in written.items():
            _set(here[name], values)


def _set(p: Any, values: Tensor) -> None:
    if hasattr(p, "device_mesh"):  # sharded by fully_shard; the import is slow
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values.to(p.device, p.dtype), p.device_mesh, p.placements)
    p.copy_(values)
