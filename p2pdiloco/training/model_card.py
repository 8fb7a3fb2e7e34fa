"""Model card: the README.md of an export, with what the run knows about its model.

It is Markdown with YAML at its beginning, as the Hugging Face hub reads it. What the run does not know, such as the
languages, is left to its user. Paths of this machine are not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.protocol.manifest import Manifest, RunConfig

CARD = "README.md"
_LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": "gguf", "safetensors": "p2pdiloco"}
# A name of the hub, as in ``base_model``; paths are no such names.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run's result that are not in its manifest."""

    step: int
    """Global step."""
    last_step: int
    """Global step at which the run ends."""
    tokens: int
    """Number of merged tokens."""
    format: str
    base: str = ""
    """Name of the model that the run began with on the Hugging Face hub; anything else is left out."""
    held_out_loss: tuple[float, int] | None = None
    """Held-out loss of the global model, in nats a token, and the step at which it was measured."""
    peers: int
    """Number of peers whose tokens the last versions have merged."""
    license: str = ""
    """Identifier of the model's license, as the hub has them. Empty: unknown."""


def model_card(manifest: Manifest, facts: Facts) -> str:
    """Return the card of an export."""
    config = manifest.config
    header: dict[str, Any] = {
        "library_name": _LIBRARIES[facts.format],
        "tags": ["p2pdiloco", "diloco"],
        "license": facts.license or "unknown",
    }
    if _is_language_model(config):
        header["pipeline_tag"] = "text-generation"
    if is_hub_name(facts.base):
        header["base_model"] = facts.base
    rows = {
        "run": f"`{config.name}` ({manifest.run})",
        "trained by": "peers of p2pdiloco, with [Decoupled DiLoCo](https://arxiv.org/abs/2604.21428)",
        "parameters trained": f"{sum(tensor.elements for tensor in manifest.tensors):,}",
        "global step": f"{facts.step:,} of {facts.last_step:,}",
        "tokens merged": f"{facts.tokens:,}",
        "peers in the last versions": f"{facts.peers:,}",
        "data": _data(config),
        "held-out loss": _loss(facts),
    }
    table = "".join(f"| {name} | {value} |\n" for name, value in rows.items())
    yaml = "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in header.items())
    return f"---\n{yaml}---\n\n# {config.name}\n\n| | |\n|---|---|\n{table}"


def _loss(facts: Facts) -> str:
    if facts.held_out_loss is None:
        return "not measured"
    loss, step = facts.held_out_loss
    return f"{loss:.4f} nats a token, at step {step:,}"


def is_hub_name(place: str) -> bool:
    """Return whether ``place`` is the name of a repository on the Hugging Face hub, and no folder here."""
    return _HUB_NAME.fullmatch(place) is not None and not Path(place).exists()


def _is_language_model(config: RunConfig) -> bool:
    names = config.model.config.get("architectures", ())
    return config.model.kind != "external" or any("ForCausalLM" in str(name) or "LMHead" in str(name) for name in names)


def _data(config: RunConfig) -> str:
    if config.model.kind == "external":
        return "chosen by each peer's training script"
    kinds: Mapping[str, str] = {"stdlib": "source of Python's standard library", "files": "files, as bytes"}
    told = kinds.get(config.data.kind, f"documents ({config.data.kind}), as tokens")
    return f"{told}; each peer supplied its own"
