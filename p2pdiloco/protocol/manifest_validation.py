"""Validation of configurations and manifests. An impossible or too expensive one is refused, with a sentence, before
anything is hashed, allocated or iterated over.

Rules of this file:
1. A manifest comes from an untrusted peer. ``manifest.py`` bounds each field; this module checks fields against each
   other. The cost of an accepted manifest is proportional to its own size and to the cost of a model of that many
   parameters.
2. Paths in a manifest are ignored. The owner of a machine names its files (``--data``, ``--tokenizer``, ``--model``, a
   founder's own TOML file), and no function here or in a caller reads a path from a manifest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec
from msgspec import UNSET

from p2pdiloco.protocol.ids import FragmentId, RunId, digest_of
from p2pdiloco.protocol.manifest import PROTOCOL_VERSION, Manifest, RunConfig
from p2pdiloco.protocol.manifest_defaults import logged, most_logged

# -- Hugging Face model configurations ---------------------------------------------------------------------------------
# Rules of this file:
# 1. Only plain values are accepted, bounded in number, depth and size. Nothing here depends on transformers:
#    ``training/huggingface.py`` checks whether a key exists for a model type when it builds the model.
# 2. Private keys are refused, and so are keys that make transformers fetch or run code, or load other weights:
#    ``auto_map``, ``attn_implementation`` (kernels from the hub), ``quantization_config`` and similar ones.


MAX_BYTES = 1 << 16
MAX_DEPTH = 4
MAX_ITEMS = 1024
MAX_TEXT = 256
MAX_INTEGER = 2**31
MAX_COUNT = 4096
"""Maximum number of modules that are built one by one: layers, heads, experts."""
MAX_BUILT = 1 << 16
"""Maximum of layers times experts."""

_KEY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_COUNT = re.compile(r"(num|n)_")
_MANY = re.compile(r"^(num|n)_.*(layer|expert|block)")
_CHOSEN = re.compile(r"_per_tok|group")
_NOT_COUNTED = frozenset({"n_embd", "n_inner", "n_positions", "n_ctx"})
_REFUSED = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "experts_implementation",
        "name_or_path",
        "quantization_config",
        "trust_remote_code",
        "use_kernels",
        "torch_dtype",
        "dtype",
    }
)


def architecture_problems(config: Mapping[str, object]) -> list[str]:
    """Return the errors in ``model.config``, one sentence each; empty if it is valid."""
    if not isinstance(config.get("model_type"), str) or not _KEY.fullmatch(str(config["model_type"])):
        return ['model.config must have a model_type, such as "llama"']
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 2 <= vocabulary <= 2**20:
        return ["model.config.vocab_size must be a whole number from 2 to 1048576"]
    try:
        size = len(msgspec.msgpack.encode(config))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return [f"model.config has a value that is not plain: {error}"]
    if size > MAX_BYTES:
        return [f"model.config has {size} bytes, at most {MAX_BYTES} are allowed"]
    problems = []
    for key, value in config.items():
        if not _KEY.fullmatch(key):
            problems.append(f"model.config has the key {key[:64]!r}: small letters, digits and underscores are allowed")
        elif key in _REFUSED:
            problems.append(f"model.config.{key} is not allowed: it could fetch code or weights; leave it out")
        else:
            limit = MAX_COUNT if _COUNT.match(key) and key not in _NOT_COUNTED else MAX_INTEGER
            problems += [f"model.config.{key} {problem}" for problem in _value_problems(value, limit, MAX_DEPTH)]
    if not problems and (built := _built(config)) > MAX_BUILT:
        problems.append(f"model.config has {built} layers times experts, at most {MAX_BUILT} are allowed")
    return problems


def _built(config: Mapping[str, object]) -> int:
    """Return layers times experts, including those of nested parts (``text_config``)."""
    built = 1
    for key, value in config.items():
        if isinstance(value, dict):
            built *= _built(value)
        elif isinstance(value, int) and _MANY.search(key) and not _CHOSEN.search(key):
            built *= max(1, value)
    return built


def _value_problems(value: object, limit: int, depth: int) -> list[str]:
    match value:
        case None | bool():
            return []
        case int():
            return [] if abs(value) <= limit else [f"= {value} must be at most {limit}"]
        case float():
            return [] if math.isfinite(value) else [f"= {value} must be finite"]
        case str():
            return [] if len(value) <= MAX_TEXT else [f"has {len(value)} letters, at most {MAX_TEXT} are allowed"]
        case list() | tuple() | dict():
            if not depth or len(value) > MAX_ITEMS:
                return [f"is nested deeper than {MAX_DEPTH}, or has more than {MAX_ITEMS} items"]
            if isinstance(value, dict) and not all(isinstance(k, str) and len(k) <= MAX_TEXT for k in value):
                return ["has keys that are not short strings"]
            items = value.values() if isinstance(value, dict) else value
            return [problem for item in items for problem in _value_problems(item, limit, depth - 1)][:1]
        case _:
            return [f"is a {type(value).__name__}, not a plain value"]


# -- Configurations and manifests --------------------------------------------------------------------------------------


MAX_MANIFEST_BYTES = 1 << 22
MAX_PARAMETERS = 1 << 36
MAX_BATCH_TOKENS = 1 << 26
"""Maximum number of tokens in one step of a learner."""
MAX_TABLE = 1 << 28
"""Maximum number of elements in the tables of rotary positions."""


def decode_manifest(data: bytes, run: RunId) -> Manifest:
    """Decode and validate a manifest that another peer sent.

    Raises:
        ValueError: it does not match the digest ``run``, is malformed, or describes an impossible run.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest has {len(data)} bytes, more than the {MAX_MANIFEST_BYTES} allowed")
    found = RunId(digest_of(data))
    if found != run:
        raise ValueError(
            f"the manifest's digest is {found}, the run is {run}: it was altered, or belongs to another run"
        )
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except RecursionError as error:
        raise ValueError("the manifest is nested too deeply") from error
    if manifest.protocol != PROTOCOL_VERSION:
        raise ValueError(
            f"the run speaks protocol {manifest.protocol} and this release {PROTOCOL_VERSION}: "
            "use the release that started it"
        )
    problems = config_problems(manifest.config, tensors=len(manifest.tensors)) or manifest_problems(manifest)
    if problems:
        raise ValueError("; ".join(problems))
    return manifest


def manifest_problems(manifest: Manifest) -> list[str]:
    """Return the errors in a manifest whose configuration is valid, one sentence each; empty if there are none."""
    config, tensors, blocks = manifest.config, manifest.tensors, manifest.blocks
    if any(t.fragments is not UNSET and not _is_cut_soundly(t.shape, t.fragment, t.fragments) for t in tensors):
        return [
            "the manifest cuts a tensor into more parts than it has rows, or contradicts itself about the first part"
        ]
    if any(not 0 <= fragment < config.schedule.fragments for t in tensors for fragment, _, _ in t.parts()):
        return ["the manifest puts a tensor into a fragment that does not exist"]
    if len({t.name for t in tensors}) < len(tensors):
        return ["the manifest names a tensor twice"]
    elements = sum(t.elements for t in tensors)
    if elements > MAX_PARAMETERS:
        return [f"the manifest's tensors have {elements:,} parameters, at most {MAX_PARAMETERS:,} are allowed"]
    if len(manifest.genesis) != _count_shards(manifest):
        return ["the manifest's list of version-0 digests does not fit its shards"]
    if logged(config.schedule) > most_logged(len(manifest.genesis)):
        return [
            f"schedule.log_length = {config.schedule.log_length} must be at most {most_logged(len(manifest.genesis))} "
            f"with {len(manifest.genesis)} shards: logs are kept in memory"
        ]
    if manifest.held_out is not UNSET and len(manifest.held_out.samples) % (
        manifest.held_out.symbol * (config.model.context + 1)
    ):
        return ["the manifest's held-out samples are cut short"]
    if blocks.number and (not blocks.samples or blocks.samples % config.inner.batch):
        return [
            f"the manifest's blocks of {blocks.samples} samples are not a multiple of the batch, {config.inner.batch}"
        ]
    return []


def _is_cut_soundly(shape: tuple[int, ...], first: FragmentId, fragments: tuple[FragmentId, ...]) -> bool:
    return bool(shape) and shape[0] >= len(fragments) and first == fragments[0]


def _count_shards(manifest: Manifest) -> int:
    """Count the shards that ``Layout.of`` would make, without making them."""
    config = manifest.config
    elements: dict[tuple[int, str], int] = {}
    cut: list[int] = []
    for tensor in manifest.tensors:
        if tensor.fragments is not UNSET:
            cut += [last - first for _, first, last in tensor.parts()]
            continue
        key = tensor.fragment, "direct" if config.outer.merge == "direct" else tensor.merge
        elements[key] = elements.get(key, 0) + tensor.elements
    return sum(-(-size // config.schedule.max_shard) for size in (*elements.values(), *cut))


def without_places(config: RunConfig) -> RunConfig:
    """Return ``config`` without the founder's folders and files, as it is put into the manifest."""
    data = msgspec.structs.replace(config.data, path="", tokenizer="")
    return msgspec.structs.replace(config, data=data, model=msgspec.structs.replace(config.model, folder=""))


def config_problems(config: RunConfig, *, tensors: int | None = None) -> list[str]:
    """Return the errors in ``config``, one sentence each, with the field and the allowed values; empty if it is valid.

    Args:
        tensors: number of tensors of the model; None: not known yet.
    """
    return [*_model_problems(config), *_schedule_problems(config, tensors), *_other_problems(config)]


def _model_problems(config: RunConfig) -> list[str]:
    model, problems = config.model, []
    if model.kind == "transformer":
        if model.width % model.heads or (model.width // model.heads) % 2:
            problems.append(
                f"model.width = {model.width} must be a multiple of 2 * model.heads = {2 * model.heads} (rotary pairs)"
            )
        if model.context * (model.width // model.heads) > MAX_TABLE:
            problems.append(
                f"model.context = {model.context} times model.width / model.heads must be at most {MAX_TABLE}"
            )
    if model.kind == "external" and model.config:
        problems += architecture_problems(model.config)
    if model.kind == "huggingface" and not model.folder:
        problems += architecture_problems(model.config)
    elif model.kind == "huggingface" and model.config:
        problems.append("model.folder and model.config exclude each other: leave one out")
    if model.kind != "external" and {model.frozen_digest, model.frozen_norms, model.frozen_name} != {UNSET}:
        problems.append("model.frozen_digest, frozen_norms and frozen_name are for training scripts: leave them out")
    if model.lora is not None and model.kind != "huggingface":
        problems.append(f'model.lora needs model.kind = "huggingface", it is "{model.kind}"')
    elif model.lora is not None and not model.folder and not model.lora.base_digest:
        problems.append("model.lora needs model.folder, with the weights that its adapters are for")
    return problems


def _schedule_problems(config: RunConfig, tensors: int | None) -> list[str]:
    schedule, problems = config.schedule, []
    if schedule.sync_every < schedule.fragments:
        problems.append(
            f"schedule.sync_every = {schedule.sync_every} must be at least schedule.fragments = {schedule.fragments}: "
            "every fragment needs a step of its own"
        )
    if schedule.sync_every % schedule.fragments:
        problems.append(
            f"schedule.sync_every = {schedule.sync_every} must be a multiple of schedule.fragments = "
            f"{schedule.fragments}, so that rounds are evenly spaced"
        )
    if schedule.overlap >= schedule.sync_every and schedule.sync_every > 1:
        problems.append(
            f"schedule.overlap = {schedule.overlap} must be less than schedule.sync_every = {schedule.sync_every}"
        )
    if tensors is not None and schedule.fragments > tensors:
        problems.append(f"schedule.fragments = {schedule.fragments} must be at most the model's {tensors} tensors")
    return problems


def _other_problems(config: RunConfig) -> list[str]:
    inner, data, problems = config.inner, config.data, []
    if inner.warmup > inner.steps:
        problems.append(f"inner.warmup = {inner.warmup} must be at most inner.steps = {inner.steps}")
    if inner.batch * config.model.context > MAX_BATCH_TOKENS:
        problems.append(
            f"inner.batch = {inner.batch} times model.context = {config.model.context} must be at most "
            f"{MAX_BATCH_TOKENS} tokens a step"
        )
    for name, codec, step in (
        ("up", config.codec.up, config.codec.up_step),
        ("down", config.codec.down, config.codec.down_step),
    ):
        if codec == "auto" and step is not None:
            problems.append(f'codec.{name}_step = {step} has no meaning with codec.{name} = "auto": leave it out')
    if data.pattern.startswith("/") or ".." in data.pattern.split("/"):
        problems.append(f"data.pattern = {data.pattern!r} leaves the data folder: name files below it")
    return problems
