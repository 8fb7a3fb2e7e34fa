"""Data sources of a peer: named by the user of its machine, or shipped with the program, never by a manifest. They
are shown to the user and looked for before anything is fetched for them."""

from __future__ import annotations

from importlib.util import find_spec

from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.training.corpus import STDLIB_MAX_BYTES
from p2pdiloco.training.dataset_files import PATTERNS, find_files, pattern_of
from p2pdiloco.training.huggingface import EXTRA, ArchitectureError
from p2pdiloco.training.tokenized_dataset import read_tokenizer


def tell_sources(config: RunConfig, data: str | None, tokenizer: str | None, model: str | None) -> list[str]:
    """Lines for the user of a peer that is about to join: the data, and the weights, that its learner will read.

    Raises:
        CorpusError: the data, or the run's tokenizer, are not here; the message says which option names them.
        ArchitectureError: so is the model that the run's adapters are for.
    """
    if config.model.kind == "external":
        return []
    check_extras(config)
    if config.model.lora is not None and model is None:
        raise ArchitectureError(
            "the run trains adapters (LoRA) on a model whose weights do not travel: give --model FOLDER, with the "
            "founder's safetensors"
        )
    root, files = find_files(config.data, data)
    if config.data.kind in PATTERNS:
        read_tokenizer(config.data, data, tokenizer)
    if config.data.kind == "stdlib" and data is None:
        told = f"trains on the Python library of this machine: {root}, {STDLIB_MAX_BYTES >> 20} MiB of it at most"
    else:
        told = f"trains on {len(files):,} files below {root} that match {pattern_of(config.data)!r} (--data)"
    return [told] if model is None else [told, f"adapters are trained on the weights in {model} (--model)"]


def check_extras(config: RunConfig) -> None:
    """Whether the libraries that a run needs are installed; before anything else is complained of.

    Raises:
        ArchitectureError: one is not.
    """
    needed = ["transformers"] if config.model.kind == "huggingface" else []
    needed += ["peft"] if config.model.lora is not None else []
    needed += ["tokenizers"] if config.data.kind in PATTERNS else []
    needed += ["pyarrow"] if config.data.kind == "parquet" else []
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ArchitectureError(f"run {config.name} needs {', '.join(missing)}: {EXTRA}")
