"""Memory and traffic of fine-tuning well-known models: which card holds them, what a line carries.

    python -m benchmarks.scale.adapters --peers 4 --mbps 20
    python -m benchmarks.scale.adapters --check      # the formula, and a small model on this machine's CPU

Sizes are those of the models that transformers and peft build, without weights. A learner holds

- with adapters (LoRA): the base, and for each adapter parameter 16 bytes (float32, gradient, AdamW);
- with all parameters: 16 bytes for each;
- for one text of 512 tokens the inputs of all blocks (gradient checkpointing) and the logits (float32, three times).

A card also holds 1 GB for CUDA and work space, and counts as its name's number of 10^9 bytes, which leaves 7 % of it to
others. ``--check`` trains a Llama with bitsandbytes on the CPU, and compares what the process held with this formula,
without that 1 GB. A node's memory, beside the learner, is that of ``p2pdiloco plan``.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import peft
import torch
import transformers
from torch import nn

from benchmarks import bench
from benchmarks.memory import residence
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.planner import CODECS, LEARNER_BYTES, Forecast, PeerLines, Wanted, make_plan
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.training import founding_file
from p2pdiloco.training.parameters import trainable, trained_share

TOKENS = 512
CARDS_GB = (8, 12, 16, 24)
WORK_BYTES = 1e9
PACKED = {"4 bits": (4 + 8 / 64 + 32 / (64 * 256)) / 8, "8 bits": 1.0, "16 bits": 2.0}
"""Bytes per weight of the blocks' matrices; all others are in 16 bits. NF4 with double quantization has a scale of 8
bits for 64 weights, and one of 32 bits for 256 scales; LLM.int8 has one scale a row, which is not counted."""
EVERYTHING = "all parameters"
WAYS = (*PACKED, EVERYTHING)
COLUMNS = (
    *((f"GB, {way}", way, ".1f") for way in WAYS),
    ("MB an exchange, each way", "exchange_mb", ".0f"),
    ("minutes", "exchange_min", ".1f"),
    ("node, GB", "node_gb", ".1f"),
)


class Shape(NamedTuple):
    """Published sizes of a model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool = False

    def build(self) -> nn.Module:
        """A Llama of these sizes; Qwen's differ from it by a few biases."""
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**self._asdict()))
        return model


BASES = {
    "Llama 3.2 1B": Shape(128_256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
    "Llama 3.2 3B": Shape(128_256, 3072, 8192, 28, 24, 8, tie_word_embeddings=True),
    "Qwen 2.5 7B": Shape(152_064, 3584, 18_944, 28, 28, 4),
    "Llama 3.1 8B": Shape(128_256, 4096, 14_336, 32, 32, 8),
    "Qwen 2.5 14B": Shape(152_064, 5120, 13_824, 48, 40, 8),
    "Qwen 2.5 32B": Shape(152_064, 5120, 27_648, 64, 40, 8),
}
CHECKED = Shape(16_000, 768, 2048, 3, 12, 12)
CHECKED_TOKENS = 64
"""Few, since matrices in 16 bits are slow on CPUs."""


class Sizes(NamedTuple):
    """Numbers of parameters."""

    base: int
    matrices: int
    """Weights of the blocks' matrices, which quantization packs."""
    adapters: int


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with adapters as ``peers/lora.py`` trains them."""
    adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, adapters)
    return adapted


def sizes_of(model: nn.Module) -> tuple[Sizes, nn.Module]:
    """A model's sizes, and the model with adapters."""
    matrices = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head")
    base = sum(p.numel() for p in model.parameters())
    model = with_adapters(model)
    return Sizes(base, matrices, sum(p.numel() for _, p in trainable(model))), model


def held_bytes(shape: Shape, sizes: Sizes, way: str, tokens: int = TOKENS) -> float:
    """Memory of a learner that trains in one of ``WAYS``, without the card's work space."""
    logits = tokens * 12 * shape.vocab_size
    inputs = tokens * shape.hidden_size * shape.num_hidden_layers
    if way == EVERYTHING:
        return LEARNER_BYTES * sizes.base + 4 * inputs + logits
    packed = PACKED[way] * sizes.matrices + 2 * (sizes.base - sizes.matrices)
    return packed + LEARNER_BYTES * sizes.adapters + 2 * inputs + logits


def plan_of(model: nn.Module, peers: int, mbps: float) -> tuple[Forecast, int]:
    """The plan of the run that a script would found to train this model, and the steps between two exchanges."""
    named = [(name, p.shape, False) for name, p in trainable(model)]
    exchanged = sum(p.numel() for _, p in trainable(model))
    given = {"run": "fine-tune", "total_steps": 1000}
    run = founding_file.settings(given, tensors=len(named), parameters=exchanged, share=trained_share(model))
    schedule = run.schedule
    layout = make_layout(
        tensor_specs(named, schedule.fragments), schedule.fragments, schedule.max_shard, run.outer.merge
    )
    wanted = Wanted(
        fragments=tuple(tuple(layout.shards[s].elements for s in shards) for shards in layout.fragments),
        peers=peers,
        step_s=1.0,
        steps=1000,
        sync_every=schedule.sync_every,
        overlap=schedule.overlap,
        up_bytes=CODECS[0][1],
        down_bytes=CODECS[0][1],
    )
    return make_plan(wanted, PeerLines(up_bits_per_s=1e6 * mbps, down_bits_per_s=1e6 * mbps)), schedule.sync_every


def forecast(shape: Shape, peers: int, mbps: float) -> tuple[dict[str, float], dict[str, float]]:
    """Two rows: adapters, and all parameters."""
    with torch.device("meta"):
        model = shape.build()
        whole = plan_of(model, peers, mbps)
        sizes, model = sizes_of(model)
    needed = {way: (held_bytes(shape, sizes, way) + WORK_BYTES) / 1e9 for way in WAYS}
    rows = []
    for plan, sync_every in (plan_of(model, peers, mbps), whole):
        exchange_bytes = plan.bytes_a_step * sync_every
        rows.append(
            {
                "exchange_mb": exchange_bytes / 1e6,
                "exchange_min": exchange_bytes * 8 / (1e6 * mbps) / 60,
                "node_gb": plan.node_bytes / 1e9,
            }
        )
    adapters, everything = rows
    packed = {way: needed[way] for way in PACKED}
    return packed | adapters, {EVERYTHING: needed[EVERYTHING]} | everything


def largest_on(card_gb: int, rows: dict[str, dict[str, float]]) -> dict[str, str]:
    """The largest model that a card can train, in each way; ``rows`` from small to large."""
    fitting = {way: [name for name, row in rows.items() if row.get(way, 1e9) <= card_gb] for way in WAYS}
    return {way: names[-1].partition(",")[0] for way, names in fitting.items() if names}


def trained_bytes(folder: str, way: str) -> int:
    """Train what ``folder`` holds in this process, and return by how much its memory grew at most."""
    torch.set_num_threads(1)
    loading: dict[str, Any] = {"dtype": torch.float32 if way == EVERYTHING else torch.bfloat16}
    if way == "4 bits":
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
        loading["quantization_config"] = transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)
    elif way == "8 bits":
        loading["quantization_config"] = transformers.BitsAndBytesConfig(load_in_8bit=True)
    before = residence.resident("RssAnon")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}, **loading)
    if way != EVERYTHING:
        model = with_adapters(model)
        model.enable_input_require_grads()  # type: ignore[operator]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for p in model.parameters():
        p.data = p.data.clone()  # from the mapped file into memory
    ctypes.CDLL(None).malloc_trim(0)
    optimizer = torch.optim.AdamW([p for _, p in trainable(model)], lr=1e-4)
    text = torch.arange(CHECKED_TOKENS)[None]
    with residence.Peak("RssAnon") as peak:
        for _ in range(2):
            model(input_ids=text, labels=text).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return peak.most - before


def check() -> Iterable[str]:
    """Lines that compare the formula with measurements, each way in a process of its own."""
    sizes, _ = sizes_of(CHECKED.build())
    yield f"{sizes.base:,} parameters, of which {sizes.matrices:,} can be packed; {sizes.adapters:,} of adapters"
    with tempfile.TemporaryDirectory() as folder:
        CHECKED.build().to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
        rows: dict[str, dict[str, float]] = {}
        for way in WAYS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                measured = pool.apply(trained_bytes, (folder, way))
            computed = held_bytes(CHECKED, sizes, way, CHECKED_TOKENS)
            rows[way] = {"computed": computed / 1e6, "measured": measured / 1e6}
    columns = (("MB computed", "computed", ".0f"), ("MB measured", "measured", ".0f"))
    yield bench.table("base", columns, rows)


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.adapters", description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mbps", type=float, default=20.0, help="each way")
    parser.add_argument("--check", action="store_true", help="measure a small model on the CPU instead")
    options = parser.parse_args()
    if options.check:
        print("\n".join(check()))
        return
    rows: dict[str, dict[str, float]] = {}
    for name, shape in BASES.items():
        rows[name], rows[f"{name}, all"] = forecast(shape, options.peers, options.mbps)
    print(bench.table("model", COLUMNS, rows))
    print()
    cards = {f"{card} GB": largest_on(card, rows) for card in CARDS_GB}
    print(bench.table("largest model on a card of", [(way, way, "") for way in WAYS], cards))


if __name__ == "__main__":
    main()
