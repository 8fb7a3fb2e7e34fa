"""Data sources of a peer: named by the user of its machine or shipped with the program, never by a manifest.

They are checked and shown to the user before anything is downloaded.
"""

from __future__ import annotations

from importlib.util import find_spec

from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.training.corpus import STDLIB_MAX_BYTES
from p2pdiloco.training.dataset_files import PATTERNS, find_files, pattern_of
from p2pdiloco.training.huggingface import EXTRA, NO_WEIGHTS, ArchitectureError
from p2pdiloco.training.tokenized_dataset import read_tokenizer


def tell_sources(config: RunConfig, data: str | None, tokenizer: str | None, model: str | None) -> list[str]:
    """Return lines that tell a joining user which data and weights the learner will read.

    Raises:
        CorpusError: the data or the run's tokenizer are missing. The message says which option names them.
        ArchitectureError: the model that the run's adapters are for is missing, or a library.
    """
    if config.model.kind == "external":
        return []
    check_extras(config)
    if config.model.lora is not None and model is None:
        raise ArchitectureError(NO_WEIGHTS)
    root, files = find_files(config.data, data)
    if config.data.kind in PATTERNS:
        read_tokenizer(config.data, data, tokenizer)
    if config.data.kind == "stdlib" and data is None:
        told = f"trains on this machine's Python standard library: {root}, at most {STDLIB_MAX_BYTES >> 20} MiB"
    else:
        told = f"trains on {len(files):,} files below {root} that match {pattern_of(config.data)!r} (--data)"
    return [told] if model is None else [told, f"trains adapters for the weights in {model} (--model)"]


def check_extras(config: RunConfig) -> None:
    """Check that the libraries that a run needs are installed.

    Call it first: without them, later checks fail with misleading errors.

    Raises:
        ArchitectureError: a library is missing.
    """
    needed = ["transformers"] if config.model.kind == "huggingface" else []
    needed += ["peft"] if config.model.lora is not None else []
    needed += ["tokenizers"] if config.data.kind in PATTERNS else []
    needed += ["pyarrow"] if config.data.kind == "parquet" else []
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ArchitectureError(f"run {config.name} needs {', '.join(missing)}: {EXTRA}")
