"""Text generation from a run's model or an export of it.

The built-in transformer writes bytes. Other models use transformers' sampling and the run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from p2pdiloco.protocol.manifest import Manifest, RunConfig
from p2pdiloco.training.dataset_files import PATTERNS
from p2pdiloco.training.export import ABOUT, About, ExportError, built, check_built, check_tokenizer, load_model
from p2pdiloco.training.huggingface import import_transformers
from p2pdiloco.training.models import continue_tokens, generate
from p2pdiloco.training.tokenized_dataset import load_tokenizer


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Options for continuing a text."""

    tokens: int = 200
    temperature: float = 0.7
    """0: always the most likely token."""
    seed: int = 0


def check_generation(config: RunConfig, tokenizer: str | None) -> bool:
    """Check that texts can be generated with the run's model, as far as its configuration tells. Return whether it
    reads tokens.

    Raises:
        ExportError: they cannot.
    """
    check_built(config)
    reads_tokens = config.model.kind == "huggingface" or config.data.kind in PATTERNS
    if reads_tokens and tokenizer is None:
        raise ExportError("the run's model reads tokens: give --tokenizer FOLDER, which holds the run's tokenizer.json")
    return reads_tokens


def continue_with(manifest: Manifest, theta: torch.Tensor, prompt: str, how: Sampling, **places: str | None) -> str:
    """Return ``prompt`` with the run's model's continuation; arguments and errors as of ``text_generator``."""
    return text_generator(manifest, theta, **places)(prompt, how)


def text_generator(manifest: Manifest, theta: torch.Tensor, **places: str | None) -> Callable[[str, Sampling], str]:
    """Return a function that continues texts with the run's model, which is built once.

    ``places``: ``model``, the folder with the weights that the run's adapters are for, and ``tokenizer``.

    Raises:
        ValueError: the model or its tokenizer is missing. The message says what to do.
    """
    kind, data = manifest.config.model.kind, manifest.config.data
    reads_tokens = check_generation(manifest.config, places.get("tokenizer"))
    model = built(manifest, theta, places.get("model"))
    if not reads_tokens:
        return partial(_bytes, model)
    folder = Path(str(places["tokenizer"])).expanduser()
    if kind == "transformer":
        check_tokenizer(data, folder)
        return partial(_builtin_tokens, model, folder, data.separator)
    return partial(_tokens, model, _tokenizer(folder))


def continue_with_export(folder: Path, prompt: str, how: Sampling) -> str:
    """Return ``prompt`` with the continuation by a model that ``p2pdiloco export`` has written.

    Raises:
        ValueError: the export cannot be loaded here.
    """
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError) as error:
        raise ExportError(f"{folder / ABOUT} cannot be read ({error}): export the run again") from error
    if about.format == "safetensors" and about.model.kind == "transformer":
        if about.reads_tokens:
            return _builtin_tokens(load_model(folder), folder, about.separator, prompt, how)
        return _bytes(load_model(folder), prompt, how)
    if about.format != "hf":
        raise ExportError(
            f"{folder} has only weights ({about.format}): generate from the run's state folder, or export --format hf"
        )
    transformers = import_transformers(f"{about.name} is exported for transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
    return _tokens(model.eval(), _tokenizer(folder), prompt, how)


def _bytes(model: nn.Module, prompt: str, how: Sampling) -> str:
    given = prompt.encode("utf-8", "surrogateescape")
    return generate(model, given, how.tokens, how.temperature, how.seed).decode("utf-8", "replace")


def _builtin_tokens(model: nn.Module, folder: Path, separator: str, prompt: str, how: Sampling) -> str:
    """Continue ``prompt`` with the built-in transformer, to the end of the text. An empty prompt stands for the
    separator of texts, or a newline."""
    tokenizer = load_tokenizer(_tokenizer_file(folder).read_bytes())
    end = tokenizer.token_to_id(separator) if separator else None
    given = tokenizer.encode(prompt, add_special_tokens=False).ids if prompt else [] if end is None else [end]
    given = given or tokenizer.encode("\n", add_special_tokens=False).ids
    if not given:
        raise ExportError(f"the tokenizer makes no token of {prompt!r}: give another --prompt")
    found = continue_tokens(
        model, given, how.tokens, how.temperature, how.seed, symbols=tokenizer.get_vocab_size(), end=end
    )
    return str(tokenizer.decode(found if prompt else found[len(given) :]))


def _tokenizer_file(folder: Path) -> Path:
    path = folder if folder.is_file() else folder / "tokenizer.json"
    if not path.is_file():
        raise ExportError(f"{folder} has no tokenizer.json: put the run's there, or name its folder with --tokenizer")
    return path


def _tokenizer(folder: Path) -> Any:
    transformers = import_transformers("the model reads tokens")
    path = _tokenizer_file(folder)
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))


@torch.no_grad()
def _tokens(model: Any, tokenizer: Any, prompt: str, how: Sampling) -> str:
    """Continue ``prompt`` with transformers. An empty prompt stands for a newline."""
    given = torch.tensor([tokenizer.encode(prompt or "\n", add_special_tokens=False)])
    if not given.numel():
        raise ExportError(f"the tokenizer makes no token of {prompt!r}: give another --prompt")
    options: dict[str, Any] = {"max_new_tokens": how.tokens, "use_cache": True, "do_sample": how.temperature > 0.0}
    if how.temperature > 0.0:
        options |= {"temperature": how.temperature, "top_k": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        found = model.generate(given, attention_mask=torch.ones_like(given), **options)
    return str(tokenizer.decode(found[0] if prompt else found[0, given.shape[1] :]))
