"""``p2pdiloco export``: Write a run's model to files for other programs: a folder for Hugging Face transformers
(hf), adapters for peft, or plain safetensors. The run may continue meanwhile. Use fetch first if the run's peers are
on other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import msgspec

from p2pdiloco.cli import peer_options
from p2pdiloco.node.results import find_result
from p2pdiloco.training.export import ABOUT, WEIGHTS, About, Format, default_format
from p2pdiloco.training.gguf_export import GGUF


async def run(arguments: argparse.Namespace) -> int:
    """Write, and say how to load it."""
    await asyncio.to_thread(_export, arguments)
    return 0


def _export(arguments: argparse.Namespace) -> None:
    result = find_result(arguments.source, arguments.state, arguments.run)
    config = result.checkpoint.manifest.config
    wanted: Format = arguments.format or default_format(config.model)
    folder: Path = arguments.out or Path(config.name)
    files = result.write(
        folder,
        wanted,
        base=arguments.model,
        tokenizer=arguments.tokenizer,
        like=arguments.like,
        license=arguments.license,
    )
    peer_options.say(
        f"{folder}: run {config.name} at step {result.step}, {result.tokens:,} tokens merged ({', '.join(files)})"
    )
    if wanted == "hf":
        peer_options.say(
            f"  to load it   transformers.{_loader(folder, config.model.kind)}.from_pretrained({str(folder)!r})"
        )
    elif wanted == "gguf":
        peer_options.say(f"  to load it   llama-cli -m {folder / GGUF}")
    elif wanted == "peft":
        peer_options.say(f"  to load it   peft.PeftModel.from_pretrained(base_model, {str(folder)!r})")
    elif config.model.kind == "transformer":
        peer_options.say(f"  to load it   p2pdiloco.load_model({str(folder)!r})")
    else:
        weights = str(folder / WEIGHTS)
        peer_options.say(f"  to load it   p2pdiloco.load_into(model, {weights!r})")
    written = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    if written.buffers:
        peer_options.say(f"  its buffers (such as {written.buffers[0]}) are those of this machine's script")
    elif wanted == "peft" and (buffers := result.buffers()):
        peer_options.say(f"  an adapter has no buffers (such as {next(iter(buffers))}): they stay those of its base")
    if wanted in ("hf", "gguf"):
        if base := written.base:
            peer_options.say(
                f"  what the run did not train is from {base}: the scripts must have begun with the same weights, "
                "which is not checked"
            )
        if not written.has_tokenizer:
            peer_options.say("  its tokenizer is not there: give --tokenizer FOLDER, with the run's tokenizer.json")


def _loader(folder: Path, kind: str) -> str:
    """The class of transformers that loads the folder: a script's model need not be a causal language model."""
    if kind != "external":
        return "AutoModelForCausalLM"
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0])
