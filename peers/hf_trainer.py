"""An example of the Hugging Face Trainer in a run (needs the extra hf)::

    p2pdiloco bootstrap --listen /ip4/127.0.0.1/tcp/31337
    python -m peers.hf_trainer --state a --run tiny --peer ADDRESS --found      # the first prints an INVITE
    python -m peers.hf_trainer --state b --run tiny --peer INVITE --seed 1      # any number of others
    python -m peers.hf_trainer --state b --run tuned --peer INVITE --lora       # adapters of peft, on a frozen base

A Llama of two small layers learns to continue random walks. With ``--lora`` its random base stands for a pretrained
one, and only the adapters are exchanged. All peers have the same data; each draws its own samples. The integration
tests run this file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from p2pdiloco.integrations.transformers import DiLoCoCallback

VOCABULARY = 32
LENGTH = 16
BATCH = 8


class Walks(Dataset[dict[str, Tensor]]):
    """Sequences of LENGTH tokens, in which each token is one more or one less than the previous one."""

    def __init__(self, seed: int, number: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(0, 2, (number, LENGTH), generator=generator) * 2 - 1
        start = torch.randint(0, VOCABULARY, (number, 1), generator=generator)
        self._walks = (start + steps.cumsum(1)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._walks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._walks[index], "labels": self._walks[index]}


class Seen:
    """Forward hook that collects digests of the batches on which a model is trained."""

    def __init__(self) -> None:
        self.batches: list[str] = []

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Add the digest of the batch with which the model is called."""
        self.batches.append(hashlib.sha256(kwargs["input_ids"].cpu().numpy().tobytes()).hexdigest()[:16])


class Slowly(TrainerCallback):  # type: ignore[misc]
    """Waits at each step, to simulate the step time of a larger model."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Wait for ``step_s``."""
        time.sleep(self.step_s)


def main() -> int:
    """Train, and write the results to ``result.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--found", action="store_true")
    parser.add_argument("--access", choices=["open", "invite", "list"], default="invite")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.04, help="what a larger model would take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    set_seed(0 if options.lora else options.seed)  # a base that is the same everywhere
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model: Any = LlamaForCausalLM(config)
    if options.lora:
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]))
    frozen = float(sum(p.double().sum() for p in model.parameters() if not p.requires_grad))
    loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
    callback = DiLoCoCallback(
        run=options.run,
        initial_peers=options.peer,
        found=options.found,
        access=options.access,
        total_steps=options.steps,
        sync_every=10,
        n_fragments=2,
        state=options.state / "peer",
        node_options=loopback,
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(options.state / "trainer"),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            max_steps=10 if options.run is None else 100 * options.steps,
            learning_rate=3e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Walks(0, 4096),
        callbacks=[callback, Slowly(options.step_s)],
    )
    seen = Seen()
    model.register_forward_pre_hook(seen, with_kwargs=True)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    travelled = [p for p in model.parameters() if p.requires_grad]
    report = {
        "first": float(losses[0]) if losses else None,
        "last": float(losses[-1]) if losses else None,
        "sum": float(sum(p.detach().double().sum() for p in travelled)),
        "travelled": sum(p.numel() for p in travelled),
        "frozen_moved": frozen != float(sum(p.double().sum() for p in model.parameters() if not p.requires_grad)),
        "steps": trainer.state.global_step,
        "batches": seen.batches,
        "logged": trainer.state.log_history[-2],
    }
    (options.state / "result.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
