"""The Hugging Face Trainer and Lightning's, with the real packages, in two processes that train one model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from scripts import END_S, FOUND, QUICKLY, events, held, report, until_founded, until_trained
from swarm import swarm_in

ROOT = Path(__file__).parents[2]
HF = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)
LIGHTNING = pytest.mark.skipif(
    find_spec("lightning") is None,
    reason="needs the extra lightning: pip install -c constraints.txt '.[lightning]'",
)
TRL = pytest.mark.skipif(find_spec("trl") is None, reason="needs trl (pip install trl), which no extra has")


DEFAULT_STEPS = 200
"""Number of steps that a joining script gives, which differs from the run's."""


def start(program: str, state: Path, *arguments: str) -> subprocess.Popen[str]:
    state.mkdir(parents=True)
    with open(state / "script.log", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"peers.{program}", "--state", str(state), *QUICKLY, *arguments],
            stdout=output,
            stderr=output,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )


SFT = """
import json, sys, time
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer
import torch
from p2pdiloco.integrations.transformers import DiLoCoCallback

half, state, *peers = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
words = ["<pad>", "<eos>", "<user>", "<bot>", *(f"w{i}" for i in range(64))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} {% endfor %}"
    "{{ eos_token }}"
)
answers = {n: (n * 7 + 3) % 64 for n in range(16)}
mine = list(answers)[:8] if half == "0" else list(answers)[8:]

def talk(n):
    said = {"role": "user", "content": f"w{n}"}, {"role": "assistant", "content": f"w{answers[n]}"}
    return {"messages": list(said)}

class Slowly(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        time.sleep(0.01)

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes))
loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
options = {"run": "sft", "initial_peers": peers, "found": half == "0", "access": "open", "wait_for_peers": 2}
callback = DiLoCoCallback(**options, total_steps=400, state=f"{state}/peer", node_options=loopback)
arguments = SFTConfig(
    f"{state}/trainer", max_steps=10**5, per_device_train_batch_size=4, learning_rate=5e-3, packing=True, max_length=64,
    lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
)
data = Dataset.from_list([talk(n) for n in mine] * 160)
SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback, Slowly()]).train()
with torch.no_grad():
    said = model.eval()(torch.tensor([[2, 4 + n, 3] for n in answers])).logits[:, -1].argmax(-1) - 4
with open(f"{state}/result.json", "w") as file:
    json.dump({"right": sum(a == b for a, b in zip(said.tolist(), answers.values()))}, file)
"""


@HF
@TRL
@pytest.mark.timeout(900)
def test_two_sft_trainers_of_trl_learn_both_halves(tmp_path: Path) -> None:
    """Chats, packed; each peer has half of the questions, and knows all answers in the end."""
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        scripts = []
        for half, name in enumerate("ab"):
            (tmp_path / name).mkdir()
            with open(tmp_path / name / "script.log", "w") as output:
                command = [sys.executable, "-c", SFT, str(half), str(tmp_path / name), address]
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                scripts.append(subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, env=environment))
            until_founded(tmp_path / "a" / "peer")
        try:
            statuses = [script.wait(END_S) for script in scripts]
        finally:
            for script in scripts:
                script.kill()
    assert statuses == [0, 0], [(tmp_path / name / "script.log").read_text()[-3000:] for name in "ab"]
    assert [json.loads((tmp_path / name / "result.json").read_text())["right"] for name in "ab"] == [16, 16]
    reports = [report(tmp_path / name / "peer") for name in "ab"]
    assert reports[0]["tokens_merged"] == sum(one["tokens_trained"] for one in reports)


def train_two(program: str, folder: Path, steps: int, *extra: str) -> tuple[list[Any], list[Any]]:
    """What the scripts and what their peers report, after both have trained to the end."""
    with swarm_in(folder / "swarm") as swarm:
        address = swarm.start_bootstrap()
        common = ("--run", "tiny", "--peer", address, *extra)
        scripts = [start(program, folder / "a", *common, *FOUND, "--steps", str(steps))]
        try:
            until_founded(folder / "a" / "peer")
            with held(scripts[0].pid, program):
                scripts.append(start(program, folder / "b", *common, "--seed", "1"))
                until_trained(folder / "b" / "peer")
            statuses = [script.wait(END_S) for script in scripts]
        finally:
            for script in scripts:
                if script.poll() is None:
                    script.kill()
                    script.wait()
    said = [(folder / name / "script.log").read_text() for name in "ab"]
    assert statuses == [0, 0], [log[-3000:] for log in said]
    assert ["keeps these settings; this script has access='invite'" in log for log in said] == [False, True]
    is_told = f"run tiny ends at step {steps}, and this script's total_steps=" in said[1]
    assert is_told == (steps != DEFAULT_STEPS), "the other one is told what it has otherwise"
    assert not any("frozen parameters" in log for log in said), "one base"
    results = [json.loads((folder / name / "result.json").read_text()) for name in "ab"]
    reports = [report(folder / name / "peer") for name in "ab"]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert results[0]["sum"] == results[1]["sum"], "both models hold the swarm's parameters"
    assert all(one["tokens_trained"] > 0 and one["tokens_unmerged"] == 0 for one in reports)
    assert reports[0]["tokens_merged"] == sum(one["tokens_trained"] for one in reports)
    return results, reports


def losses_shown(folder: Path) -> list[float | None]:
    return [event["loss"] for event in events(folder / "peer", "progress")]


@HF
@pytest.mark.timeout(900)
def test_two_hugging_face_trainers_train_one_model(tmp_path: Path) -> None:
    results, reports = train_two("hf_trainer", tmp_path, 400)
    assert all(result["last"] < 0.8 * result["first"] for result in results)
    for result, told in zip(results, reports, strict=True):  # two micro-batches of 8 texts of 16 tokens a step
        assert told["tokens_trained"] == result["steps"] * 2 * 8 * 16
    batches = [set(result["batches"]) for result in results]
    assert len(batches[0]) > 200
    assert not batches[0] & batches[1], "one dataset, and no batch in common"
    assert {"swarm/loss", "swarm/peers", "swarm/version", "swarm/share", "swarm/sent_mb"} <= set(results[0]["logged"])
    shown = losses_shown(tmp_path / "a")
    assert shown[0] is None or shown[0] > 0.0, "no loss is known before the Trainer logs one"
    assert shown[-1] == pytest.approx(results[0]["last"], rel=0.3)


@pytest.mark.long
@HF
@pytest.mark.timeout(900)
def test_of_a_lora_only_the_adapters_travel(tmp_path: Path) -> None:
    results, _ = train_two("hf_trainer", tmp_path, 200, "--lora")
    assert all(0 < result["travelled"] < 12_000 and not result["frozen_moved"] for result in results)
    assert all(result["last"] < result["first"] for result in results)


@pytest.mark.long
@LIGHTNING
@pytest.mark.timeout(900)
def test_two_lightning_trainers_train_one_model(tmp_path: Path) -> None:
    results, reports = train_two("lightning_module", tmp_path, 600)
    assert all(result["last"] < 0.5 * result["first"] for result in results)
    for result, told in zip(results, reports, strict=True):
        assert told["tokens_trained"] == result["steps"] * 16
    assert losses_shown(tmp_path / "a")[-1] is not None
