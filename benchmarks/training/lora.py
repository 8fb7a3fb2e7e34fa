"""LoRA adapters trained by one peer and by two, for the same number of steps each.

    python -m benchmarks.training.lora [--steps 600] [--json out/lora.json]

A small Llama has read one text (Python's help topics) and is fine-tuned on another (the standard library's code) by
transformers' Trainer: by one process without a run, then by two with ``DiLoCoCallback``, one thread per process.
Reported are the seconds from the first step to the last, and the held-out loss of the saved adapters, loaded by
``peft.PeftModel``.

Bytes are the tokens. Every eighth piece of text is held out, the same for all processes. The learning rate is the one
of ``RATES`` that is best for one peer alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import bench
from p2pdiloco.swarm.credentials import MemberFiles

PIECE = 128
"""Bytes of a window."""
BATCH = 8
READ_STEPS = 400
RATES = (1e-3, 3e-3)
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
START_S = 120.0


def pieces(text: bytes) -> list[dict[str, Any]]:
    """Windows, as the Trainer takes them."""
    whole = range(0, len(text) - PIECE, PIECE)
    return [{"input_ids": list(text[i : i + PIECE]), "labels": list(text[i : i + PIECE])} for i in whole]


def code() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """To train on, and held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = pieces(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py"))[:60]))
    return [p for i, p in enumerate(found) if i % 8], found[::8][:256]


def make_base(folder: Path) -> None:
    """The model that both begin with."""
    from pydoc_data import topics

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **SIZES))
    _train(model, pieces(" ".join(topics.topics.values()).encode()), folder / "read", 3e-3, READ_STEPS, [])
    model.save_pretrained(folder)


def _train(model: Any, found: list[dict[str, Any]], out: Path, rate: float, steps: int, callbacks: list[Any]) -> float:
    """Seconds from the first step to the last."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not typed for mypy here
        times: tuple[float, ...] = ()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times = (*self.times[:1], time.perf_counter())

    watch = Watch()
    arguments = TrainingArguments(
        str(out),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=rate,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=len(callbacks),
    )
    Trainer(model, arguments, train_dataset=found, callbacks=[*callbacks, watch]).train()
    return watch.times[-1] - watch.times[0]


def tune(base: Path, out: Path, rate: float, steps: int, peers: int, invite: str) -> None:
    """One process: adapters, and how long they took."""
    import peft
    from transformers import LlamaForCausalLM

    from p2pdiloco.integrations.transformers import DiLoCoCallback

    torch.manual_seed(1)
    adapters = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), adapters)
    options: dict[str, Any] = {"run": "lora", "state": out / "state", "wait_for_peers": peers, "n_fragments": 2}
    together = DiLoCoCallback(**options, initial_peers=[invite] if invite else [])
    seconds = _train(model, code()[0], out, rate, steps, [together] if peers > 1 else [])
    model.save_pretrained(out / "tuned")
    (out / "seconds").write_text(f"{seconds}")


def held_out(base: Path, tuned: Path) -> float:
    """Nats a byte of the adapters in ``tuned``."""
    import peft
    from transformers import LlamaForCausalLM

    model = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), str(tuned)).eval()
    windows = torch.tensor([p["input_ids"] for p in code()[1]])
    with torch.no_grad():
        return float(model(input_ids=windows, labels=windows).loss)


def run(base: Path, out: Path, rate: float, steps: int, peers: int) -> bench.Figures:
    """So many processes to their end."""
    processes: list[subprocess.Popen[bytes]] = []
    invite = ""
    for number in range(peers):
        folder = out / str(number)
        folder.mkdir(parents=True)
        what = ["--one", str(base), str(folder), str(rate), str(steps), str(peers), invite]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(folder / "log", "wb") as log:
            command = [sys.executable, "-m", "benchmarks.training.lora", *what]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + START_S
        while number + 1 < peers and not invite and time.monotonic() < deadline:
            members = next((folder / "state").glob("*/members"), None)
            invite = "" if members is None else MemberFiles(members.parent).invite()
            time.sleep(0.2)
    if any(process.wait() for process in processes):
        raise SystemExit(f"a peer failed: see {out}/*/log")
    losses = [held_out(base, out / str(number) / "tuned") for number in range(peers)]
    seconds = [float((out / str(number) / "seconds").read_text()) for number in range(peers)]
    return {"rate": rate, "seconds": max(seconds), "held_out": max(losses)}


COLUMNS = (("rate", "rate", ".0e"), ("seconds", "seconds", ".1f"), ("held-out loss", "held_out", ".4f"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = bench.parser(__doc__, rows="number of peers", has_plot=False, has_keep=True)
    parser.add_argument("--steps", type=int, default=600, help="steps of each peer")
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        base, out, rate, steps, peers, invite = options.one
        tune(Path(base), Path(out), float(rate), int(steps), int(peers), invite)
        return 0
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-lora-") as temporary:
        folder = Path(options.keep or temporary)
        make_base(folder / "base")
        alone = [run(folder / "base", folder / f"one-{rate}", rate, options.steps, 1) for rate in RATES]
        best = min(alone, key=lambda figures: figures["held_out"])
        found = {"1": best, "2": run(folder / "base", folder / "two", best["rate"], options.steps, 2)}
    for peers, figures in found.items():
        bench.write(options, "training/lora", {"peers": int(peers)}, figures)
    print(bench.table("peers", COLUMNS, found))
    return int(found["2"]["held_out"] >= found["1"]["held_out"])


if __name__ == "__main__":
    sys.exit(main())
