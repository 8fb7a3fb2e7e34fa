"""Exports against the swarm's model: ``python -m benchmarks.exports --json FILE`` (half a minute).

For each kind of run and each format, ``p2pdiloco export`` writes the model, another library loads it, and its logits
are compared with those of the model that the run trained. One JSON object a line: ``kind``, ``format``, ``logit_error``
(the largest difference; null where nothing is written), ``refused``, and for a refusal ``reason``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import p2pdiloco
from benchmarks import record
from p2pdiloco.cli.main import main as command
from p2pdiloco.node.run_creation import make_manifest, version_zero
from p2pdiloco.peer.checkpoint import save
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training.founding_file import with_architecture
from p2pdiloco.training.gguf_export import GGUF
from p2pdiloco.training.models import build_model
from p2pdiloco.training.parameters import embedding_names, trainable

FORMATS = {"transformers": "hf", "peft": "peft", "safetensors": "safetensors", "gguf": "gguf"}
TEXT = torch.tensor([[1, 2, 3, 9, 44, 63, 5]])
SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
BUILT_IN = ModelConfig(width=16, depth=2, heads=2, context=16)


class Run(NamedTuple):
    """A run's model as it was trained, and the folders that its export needs."""

    model: Any
    begun: Callable[[], nn.Module]
    """Makes the model as the script had it before it trained."""
    base: Path | None = None
    like: Path | None = None
    config: ModelConfig = ModelConfig(kind="external")


@torch.no_grad()
def moved(model: Any) -> Any:
    """Return ``model`` as training leaves it: every trainable tensor is another one."""
    draws = torch.Generator().manual_seed(3)
    for _, p in trainable(model):
        p.add_(0.1 * torch.randn(p.shape, generator=draws))
    return model.eval()


def make_base(folder: Path, kind: str = "Llama", **changes: Any) -> Path:
    """Write a small pretrained model, in which no tensor is as a new model has it."""
    import transformers

    torch.manual_seed(1)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = getattr(transformers, f"{kind}Config")(**(SHAPE | heads | changes))
    moved(getattr(transformers, f"{kind}ForCausalLM")(config)).save_pretrained(folder)
    return folder


def load_transformers(folder: Path, **options: Any) -> Any:
    """Load an export, and refuse one that is not complete.

    Raises:
        AssertionError: a tensor is missing or does not fit.
    """
    from transformers import AutoModelForCausalLM

    found, told = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, output_loading_info=True, dtype=torch.float32, **options
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return found.eval()


def script(folder: Path, change: Callable[[Any], Any] = lambda base: base, **base: Any) -> Run:
    """A run of a script that trains what ``change`` makes of a base."""
    place = make_base(folder / "base", **base)

    def begun() -> Any:
        torch.manual_seed(5)  # adapters begin at random
        return change(load_transformers(place))

    model, like = moved(begun()), None
    if hasattr(model, "peft_config"):
        model.save_pretrained(folder / "tuned")
        like = next((folder / "tuned").rglob("adapter_config.json")).parent
    return Run(model, begun, place, like)


def with_adapters(name: str = "default", **settings: Any) -> Callable[[Any], Any]:
    """Return a function that adds adapters to a base."""

    def change(base: Any) -> Any:
        import peft

        given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings
        return peft.get_peft_model(base, peft.LoraConfig(**given), adapter_name=name)

    return change


def without_first_layer(base: Any) -> Any:
    """Freeze the first layer, as a script does that trains a part of its model."""
    base.model.layers[0].requires_grad_(False)
    return base


def built_in(folder: Path) -> Run:
    """A run of the built-in transformer."""
    return Run(moved(build_model(BUILT_IN, 3)), lambda: build_model(BUILT_IN, 0), config=BUILT_IN)


MOE: dict[str, Any] = {"kind": "Qwen3Moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
# GGUF files do not say how wide an expert is, and transformers takes its default.
MOE |= {"moe_intermediate_size": 768, "head_dim": 8}
KINDS: dict[str, Callable[[Path], Run]] = {
    "full": lambda folder: script(folder),
    "frozen part": lambda folder: script(folder, without_first_layer),
    "LoRA": lambda folder: script(folder, with_adapters()),
    "DoRA": lambda folder: script(folder, with_adapters("mine", use_dora=True)),
    "modules_to_save": lambda folder: script(folder, with_adapters("mine", modules_to_save=["lm_head"])),
    "token indices": lambda folder: script(folder, with_adapters("mine", trainable_token_indices=[3, 9])),
    "tied embeddings": lambda folder: script(folder, tie_word_embeddings=True),
    "MoE": lambda folder: script(folder, **MOE),
    "built-in": built_in,
}
# Pairs of kind and format that have no meaning, and are refused.
REFUSED = {(kind, "peft") for kind in ("full", "frozen part", "tied embeddings", "MoE", "built-in")}


def store(run: Run, state: Path) -> None:
    """Write the checkpoint of a peer of the run."""
    embeddings, parameters = embedding_names(run.model), trainable(run.model)
    config = RunConfig(name="run", model=run.config, schedule=ScheduleConfig(fragments=1))
    if run.config.kind == "external":
        config = with_architecture(config, run.model)
    named = [(name, p.shape, name in embeddings) for name, p in parameters]
    manifest, theta, momentum = make_manifest(config, PeerId("founder"), named, parameters)
    first = version_zero(manifest, theta, momentum)
    save(folder_of(state, manifest.run) / "checkpoint", manifest, first.shards, theta, momentum, keep=2)


def load_again(run: Run, out: Path, wanted: str) -> Any:
    """Load an export as its users do."""
    if wanted == "transformers":
        return load_transformers(out)
    if wanted == "gguf":
        return load_transformers(out, gguf_file=GGUF)
    if wanted == "peft":
        from peft import PeftModel

        assert run.base is not None
        return PeftModel.from_pretrained(load_transformers(run.base), out).eval()
    if run.config.kind == "transformer":
        return p2pdiloco.load_model(out)
    model = run.begun()
    p2pdiloco.load_into(model, out)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Return the logits of a short text."""
    found = model(TEXT)
    return found if isinstance(found, Tensor) else found.logits


def options_of(run: Run, wanted: str) -> list[str]:
    """Return the options of ``p2pdiloco export`` that the documentation names for such a run."""
    if wanted == "safetensors" or run.base is None:
        return []
    if run.like is not None:
        return ["--like", str(run.like), "--model", str(run.base)]
    return ["--like", str(run.base)]


def cells(folder: Path) -> Iterator[dict[str, object]]:
    """Yield a result for each kind and format."""
    for index, (kind, make) in enumerate(KINDS.items()):
        place = folder / str(index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = make(place)
            store(run, place / "state")
            expected = logits(copy.deepcopy(run.model))
            for wanted, option in FORMATS.items():
                yield {"kind": kind, "format": wanted} | _cell(run, place, wanted, option, expected)


def _cell(run: Run, place: Path, wanted: str, option: str, expected: Tensor) -> dict[str, object]:
    out, told = place / wanted, io.StringIO()
    words = ["export", str(place / "state"), "--format", option, "--out", str(out), *options_of(run, wanted)]
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        status = command(words)
    if status:
        assert not out.exists(), "a refusal leaves nothing"
        return {"logit_error": None, "refused": True, "reason": told.getvalue().splitlines()[-1]}
    found = load_again(run, out, wanted)
    return {"logit_error": float((logits(found) - expected).abs().max()), "refused": False}


def main(arguments: list[str]) -> int:
    """Print the table, and write it as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with tempfile.TemporaryDirectory() as folder:
        for cell in cells(Path(folder)):
            error = "refused" if cell["refused"] else f"{cell['logit_error']:.1e}"
            print(f"{cell['kind']:16} {cell['format']:13} {error:8} {cell.get('reason', '')}", flush=True)
            if options.json is not None:
                record.append(options.json, [record.row("exports", {}, {}) | cell])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
