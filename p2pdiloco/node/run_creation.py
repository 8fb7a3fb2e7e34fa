"""Founds a run: reads a configuration file, and makes the manifest and version 0 of the state."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import UNSET
from torch import nn

from p2pdiloco.codec.digests import StateForm, state_digest
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.peer.options import PeerOptions
from p2pdiloco.peer.peer import InitialState
from p2pdiloco.protocol.chain import genesis_head
from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import (
    BlockSpec,
    HeldOut,
    Layout,
    Manifest,
    RunConfig,
    TensorSpec,
    make_layout,
)
from p2pdiloco.protocol.manifest_defaults import completed, in_rounds, with_usual_inner, without_left_out
from p2pdiloco.protocol.manifest_validation import config_problems, manifest_problems, without_places
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.training import founding_file
from p2pdiloco.training.config_errors import in_words
from p2pdiloco.training.corpus import cut_into_blocks, load_corpus
from p2pdiloco.training.data_sources import check_extras
from p2pdiloco.training.dataset_files import CorpusError
from p2pdiloco.training.evaluation import shared_samples
from p2pdiloco.training.huggingface import ArchitectureError, read_folder
from p2pdiloco.training.models import NO_BASE, build
from p2pdiloco.training.parameters import embedding_names, trainable
from p2pdiloco.training.tokenized_dataset import with_tokenizer
from p2pdiloco.wire.control_messages import StateProof

SHIPPED = Path(__file__).parents[1] / "runs"


def find_run(text: str) -> Path:
    """Return the configuration file at the path ``text``, or the shipped one of that name.

    Raises:
        ConfigError: neither exists.
    """
    path = Path(text)
    if path.exists() and not path.is_dir():
        return path
    shipped = {file.stem: file for file in SHIPPED.glob("*.toml")}
    if text in shipped:
        return shipped[text]
    near = difflib.get_close_matches(path.stem, shipped, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    what = "a folder, not a file" if path.is_dir() else "no such file"
    raise ConfigError(f"{text}: {what}; {hint}shipped with p2pdiloco: {', '.join(sorted(shipped))}")


def read_config(path: Path) -> RunConfig:
    """Read and check a run's TOML file.

    Raises:
        ConfigError: the file does not exist or is not TOML, a key is unknown, a value is out of bounds, or a
            combination is not possible.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return decode_config(data, path)


def decode_config(data: bytes, path: Path) -> RunConfig:
    """Decode and check the text of a run's TOML file. ``path`` names the file in error messages.

    Raises:
        ConfigError: the text is not TOML, a key is unknown, a value is out of bounds, or a combination is not possible.
    """
    try:
        config = msgspec.toml.decode(data, type=RunConfig)
        written = msgspec.toml.decode(data)
        config = in_rounds(config, written.get("schedule", {}), written.get("outer", {}))
        config = with_usual_inner(config, written.get("inner", {}))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {in_words(error, msgspec.toml.decode(data), RunConfig)}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}): write lines such as inner.steps = 400") from error
    problems = config_problems(config)
    inner, schedule = config.inner, config.schedule
    if schedule.sync_every > inner.steps and inner.tokens is UNSET:
        problems.append(
            f"schedule.sync_every = {schedule.sync_every} is more than inner.steps = {inner.steps}: nothing would ever "
            f"be exchanged; write inner.steps = {40 * schedule.sync_every}, or a smaller schedule.sync_every"
        )
    if config.model.kind == "external":
        problems.append('model.kind = "external" is for training scripts, which found their runs with p2pdiloco.DiLoCo')
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def with_own_places(options: PeerOptions, config: RunConfig) -> PeerOptions:
    """Return a founder's options, with folders from the TOML file where the command line names none."""
    path = config.data.path if config.data.kind != "stdlib" else ""
    learner = msgspec.structs.replace(
        options.learner,
        data=options.learner.data or path or None,
        tokenizer=options.learner.tokenizer or config.data.tokenizer or None,
        model=options.learner.model or (config.model.folder if config.model.lora is not None else None),
    )
    return msgspec.structs.replace(options, learner=learner)


def found(config: RunConfig, founder: PeerId, options: PeerOptions) -> tuple[Manifest, InitialState]:
    """Return a new run's manifest and version 0.

    options: name the data, tokenizer and model (``with_own_places``).

    Raises:
        ConfigError: corpus or model cannot be used, or there are more fragments than tensors.
    """
    if options.learner.model and config.model.lora is None:
        raise ConfigError(NO_BASE)
    try:
        check_extras(config)
        data = with_tokenizer(config.data, options.learner.data, options.learner.tokenizer)
        config = msgspec.structs.replace(config, data=data)
        corpus = load_corpus(data, options.learner.data, options.learner.tokenizer, context=config.model.context)
        model: nn.Module | None = None
        if config.model.folder:
            folder = options.learner.model or config.model.folder
            found_config, model = read_folder(msgspec.structs.replace(config.model, folder=folder), config.seed)
            config = msgspec.structs.replace(config, model=found_config)
        if model is None:
            model = build(config.model, config.seed)
    except (CorpusError, ArchitectureError) as error:
        raise ConfigError(str(error)) from error
    embeddings, parameters = embedding_names(model), trainable(model)
    named = [(name, p.shape, name in embeddings) for name, p in parameters]
    problems = config_problems(config, tensors=len(named))
    if problems:
        raise ConfigError("\n".join(problems))
    blocks = cut_into_blocks(corpus, config.model.context, config.inner.batch, config.data.block)
    shared = shared_samples(config, corpus)
    manifest, theta, momentum = make_manifest(without_places(config), founder, named, parameters, blocks, shared)
    problems = manifest_problems(manifest)
    if problems:
        raise ConfigError("\n".join(problems))
    return manifest, version_zero(manifest, theta, momentum)


def found_from_script(path: Path, founder: PeerId) -> tuple[Manifest, InitialState]:
    """Return manifest and version 0 of the run that a training script founds (``training/founding_file.py``).

    The result is the same at every call.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        given = founding_file.read(path)
    except founding_file.FoundationError as error:
        raise ConfigError(str(error)) from error
    named = [(name, shape, name in given.embeddings) for name, shape in given.shapes]
    manifest, theta, momentum = make_manifest(given.config, founder, named, given.parameters())
    return manifest, version_zero(manifest, theta, momentum)


def is_founded_from(config: RunConfig, written: RunConfig) -> bool:
    """Return whether a run's ``config`` comes from the TOML file ``written``.

    Fields that founding fills in or leaves out are not compared."""
    data = msgspec.structs.replace(config.data, tokenizer_digest=written.data.tokenizer_digest)
    model = written.model if written.model.folder else config.model
    config = without_left_out(config, written)
    return without_places(msgspec.structs.replace(config, data=data, model=model)) == without_places(written)


def make_manifest(
    config: RunConfig,
    founder: PeerId,
    named: Sequence[tuple[str, torch.Size, bool]],
    parameters: Iterable[tuple[str, torch.Tensor]],
    blocks: BlockSpec | None = None,
    held_out: HeldOut | None = None,
) -> tuple[Manifest, torch.Tensor, torch.Tensor]:
    """Return a new run's manifest, global parameters and momentum (float32, flat vectors).

    named: name, shape and whether it is an embedding, of each trainable parameter.
    parameters: names and values of the trainable parameters, in the same order.
    """
    tensors: tuple[TensorSpec, ...] = tensor_specs(named, config.schedule.fragments)
    layout = make_layout(tensors, config.schedule.fragments, config.schedule.max_shard, config.outer.merge)
    config = completed(config, len(layout.shards))
    theta, momentum = torch.zeros(layout.elements), StateForm.of(config.outer).still(layout.elements)
    starts = dict(zip(layout.order, layout.starts, strict=True))
    for index, (_, parameter) in enumerate(parameters):
        place = slice(starts[index], starts[index] + parameter.numel())
        theta[place] = parameter.detach().reshape(-1)
    genesis = tuple(state_digest(theta[s.start : s.stop], momentum[s.start : s.stop]) for s in layout.shards)
    manifest = Manifest(
        founder=founder,
        config=config,
        tensors=tensors,
        genesis=genesis,
        blocks=blocks or BlockSpec(),
        held_out=held_out or UNSET,
    )
    return manifest, theta, momentum


def version_zero(manifest: Manifest, theta: torch.Tensor, momentum: torch.Tensor) -> InitialState:
    """Return the initial state to which the manifest's digests belong."""
    layout = Layout.of(manifest)
    states = (ShardState(genesis_head(manifest.run, s.shard, manifest.genesis[s.shard]), 0, ()) for s in layout.shards)
    return InitialState(tuple(StateProof(state, None, b"") for state in states), theta, momentum)
