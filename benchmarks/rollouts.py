"""Reward of GRPO (TRL) by two peers, beside one machine alone at equal steps.

    python -m benchmarks.rollouts [--python PATH] [--steps 80] [--seeds 0 1 2 3] [--ways WAY ...] [--json FILE]

A model with random weights (0.1M parameters) is rewarded for the share of words in its answer that have the prompt's
parity. ``alone``: each of two machines trains by itself; ``together``: the two are peers, which divide the prompts;
``served``: so, and a follower publishes, and peers/rollouts.py generates for both. Reward: mean of 512 answers by
the model at the end, sampled with the same seed. Needs TRL in the interpreter ``--python``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench

WORDS = 32
LENGTH = 8
START_S, LIMIT_S = 500.0, 1200.0
STATE = Path(".local/state/p2pdiloco/tune")


def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Return the share of each completion's words that have its prompt's parity."""
    pairs = zip(prompts, completions, strict=True)
    return [sum(int(word[1:]) % 2 == int(prompt[1:]) % 2 for word in text.split()) / LENGTH for prompt, text in pairs]


def make_base(folder: Path) -> None:
    """Write a model with random weights, and its tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{n}" for n in range(WORDS))]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(words), num_attention_heads=2, pad_token_id=0, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def train(options: argparse.Namespace) -> None:
    """Train in this process, and print the reward of the model at the end."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from p2pdiloco.integrations.transformers import DiLoCoCallback
    from peers.rollouts import rollouts

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained("base")
    prompts = [f"w{n}" for n in range(WORDS)]
    run = None if options.way == "alone" else "tune"
    callback = DiLoCoCallback(
        run=run, initial_peers=options.invite.split(), wait_for_peers=2, node_options=("--page", "off")
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained("base"),
        reward,
        args=GRPOConfig(
            *("out",),
            max_steps=options.steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=LENGTH,
            learning_rate=3e-3,
            logging_steps=10,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            seed=options.seed,
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts * 100}),
        processing_class=tokenizer,
        callbacks=[callback] if run else [],
        rollout_func=rollouts(options.url) if options.url else None,
    )
    trainer.train()
    torch.manual_seed(0)
    asked = prompts * (512 // WORDS)
    given = tokenizer(asked, return_tensors="pt")
    model = trainer.model.eval()
    found = model.generate(
        input_ids=given["input_ids"],
        attention_mask=given["attention_mask"],
        max_new_tokens=LENGTH,
        do_sample=True,
        top_k=0,
    )
    texts = tokenizer.batch_decode(found[:, 1:], skip_special_tokens=True)
    print(json.dumps({"reward": statistics.mean(reward(asked, texts))}), flush=True)


def start(options: argparse.Namespace, home: Path, way: str, seed: int, *more: str) -> subprocess.Popen[bytes]:
    """Start one machine's training."""
    home.mkdir()
    (home / "base").symlink_to(home.parent / "base")
    words = [
        options.python,
        "-m",
        "benchmarks.rollouts",
        "--way",
        way,
        "--seed",
        str(seed),
        "--steps",
        str(options.steps),
    ]
    return begin([*words, *more], home)


def begin(words: Sequence[str], home: Path) -> subprocess.Popen[bytes]:
    """Start a command of a machine."""
    told = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(bench.ROOT)}
    with open(home / f"log-{Path(words[2]).name}", "wb") as log:
        return subprocess.Popen(words, cwd=home, stdout=log, stderr=log, env={**os.environ, **told})


def found_in(home: Path) -> float:
    """Return the reward that a machine has printed."""
    return float(json.loads((home / "log-benchmarks.rollouts").read_text().splitlines()[-1])["reward"])


def wait_for(path: Path, pattern: str, process: subprocess.Popen[bytes]) -> Path:
    """Wait for a file.

    Raises:
        SystemExit: it does not come.
    """
    deadline = time.monotonic() + START_S
    while not (found := list(path.glob(pattern))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"there is no {path / pattern}: see the logs beside it")
        time.sleep(0.2)
    return found[0]


def measure(options: argparse.Namespace, folder: Path, way: str, seed: int) -> dict[str, Any]:
    """Return the rewards of both machines' models."""
    folder.mkdir()
    make_base(folder / "base")
    homes, url, processes, others = [folder / "a", folder / "b"], "", [], []
    if way == "served":
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
    more = ["--url", url] if url else []
    try:
        processes.append(start(options, homes[0], way, seed, *more))
        if way != "alone":
            invite = wait_for(homes[0] / STATE, "*/members/invite", processes[0]).read_text().strip()
            more += ["--invite", invite]
        if way == "served":
            (folder / "f").mkdir()
            follow = [
                options.python,
                "-m",
                "p2pdiloco",
                "join",
                invite,
                "--follow",
                "--publish",
                "pub",
                "--publish-s",
                "2",
            ]
            follow += ["--format", "hf", "--tokenizer", str(folder / "base"), "--page", "off"]
            others.append(begin(follow, folder / "f"))
            wait_for(folder / "f", "pub/latest", others[0])
            place = url.removeprefix("http://")
            others.append(begin([options.python, "-m", "peers.rollouts", "pub", place], folder / "f"))
        processes.append(start(options, homes[1], way, seed + 1000, *more))
        statuses = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in [*processes, *others]:
            process.kill()
            process.wait()
    if statuses != [0, 0]:
        raise SystemExit(f"{way}: {statuses}; logs:\n" + (homes[0] / "log-benchmarks.rollouts").read_text()[-3000:])
    return {"a": found_in(homes[0]), "b": found_in(homes[1])}


def main() -> int:
    """Measure, compare."""
    parser = bench.parser(__doc__, rows="way and seed", has_plot=False)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has TRL")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--ways", nargs="+", default=["alone", "together", "served"])
    # This program starts itself with these.
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--invite", default="", help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        train(options)
        return 0
    rows = {}
    with tempfile.TemporaryDirectory(prefix="p2pdiloco-rollouts-") as place:
        for seed in options.seeds:
            for way in options.ways:
                title = f"{way}, seed {seed}"
                rows[title] = measure(options, Path(place) / title.replace(", seed ", "-"), way, seed)
                bench.write(options, "rollouts", {"way": way, "seed": seed}, rows[title])
                print(json.dumps({title: rows[title]}), file=sys.stderr, flush=True)
    print(bench.table("", (("reward, machine A", "a", ".3f"), ("machine B", "b", ".3f")), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
