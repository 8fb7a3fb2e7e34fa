"""Memory and traffic of adapters (LoRA) on well-known bases, by formula: which card holds them, what a line carries.

    python -m benchmarks.scale.adapters --peers 4 --mbps 20

Nothing is measured here. Sizes are those of the models that transformers and peft build, without weights. A card holds
the base (NF4 with double quantization: 4.13 bits per weight of the blocks' matrices; all others in 16 bits), for each
adapter parameter 16 bytes (float32, gradient, AdamW), for one text of 512 tokens the inputs of all blocks (gradient
checkpointing) and the logits (float32, three times), and 1 GB for CUDA and work space.
"""

from __future__ import annotations

import argparse

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import bench
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.planner import CODECS, PeerLines, Wanted, make_plan
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.training import founding_file
from p2pdiloco.training.parameters import trainable, trained_share

TOKENS = 512
PACKED = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes per weight in NF4: a scale of 8 bits for 64 weights, and one of 32 bits for 256 scales."""
BASES = {  # vocabulary, width, inner width, blocks, heads, heads of keys, whether the head is the embedding
    "Llama 3.2 3B": (128_256, 3072, 8192, 28, 24, 8, True),
    "Mistral 7B": (32_000, 4096, 14_336, 32, 32, 8, False),
    "Llama 3.1 8B": (128_256, 4096, 14_336, 32, 32, 8, False),
    "Llama 2 13B": (32_000, 5120, 13_824, 40, 40, 40, False),
}
COLUMNS = (
    ("GB, 4 bits", "packed_gb", ".1f"),
    ("GB, 16 bits", "whole_gb", ".1f"),
    ("MB an exchange, each way", "exchange_mb", ".0f"),
    ("minutes", "exchange_min", ".1f"),
)


def forecast(shape: tuple[int, int, int, int, int, int, bool], peers: int, mbps: float) -> dict[str, float]:
    """One row."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    kinds = (*names, "num_key_value_heads", "tie_word_embeddings")
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**dict(zip(kinds, shape, strict=True))))
        matrices = sum(
            m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"
        )
        base = sum(p.numel() for p in model.parameters())
        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters)
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
    plan = make_plan(wanted, PeerLines(up_bits_per_s=1e6 * mbps, down_bits_per_s=1e6 * mbps))
    exchange_bytes = plan.bytes_a_step * schedule.sync_every
    work = 16 * exchanged + TOKENS * (2 * shape[1] * shape[3] + 12 * shape[0]) + 1e9
    return {
        "packed_gb": (PACKED * matrices + 2 * (base - matrices) + work) / 1e9,
        "whole_gb": (2 * base + work) / 1e9,
        "exchange_mb": exchange_bytes / 1e6,
        "exchange_min": exchange_bytes * 8 / (1e6 * mbps) / 60,
    }


def main() -> None:
    """Print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.adapters", description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--mbps", type=float, default=20.0, help="each way")
    options = parser.parse_args()
    rows = {name: forecast(shape, options.peers, options.mbps) for name, shape in BASES.items()}
    print(bench.table("base", COLUMNS, rows))


if __name__ == "__main__":
    main()
