"""docs/recipes.md as it is printed, by two peers, with those of the tools that are installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from scripts import END_S, START_S, invite_of, report
from waiting import wait_until

ROOT = Path(__file__).parents[2]
RUN = Path(".local/state/p2pdiloco/tune")
STEPS = 60
QUESTIONS = 64
ANSWERS = {f"w{n}": f"w{(7 * n + 3) % QUESTIONS}" for n in range(QUESTIONS)}
AXOLOTL = """
adapter: lora
base_model: base
bf16: false
datasets: [{path: data.jsonl, ds_type: json, type: chat_template}]
learning_rate: 0.01
logging_steps: 2
lora_alpha: 16
lora_mlp_kernel: false
lora_o_kernel: false
lora_qkv_kernel: false
lora_r: 8
lora_target_linear: true
max_steps: 60
micro_batch_size: 8
output_dir: out
plugins: [plugin.Swarm]
sequence_len: 64
use_cpu: true
"""
FACTORY = """
dataset: chats
dataset_dir: .
do_train: true
finetuning_type: lora
learning_rate: 0.01
logging_steps: 2
max_steps: 60
model_name_or_path: base
output_dir: out
overwrite_output_dir: true
per_device_train_batch_size: 8
report_to: none
stage: sft
template: empty
"""
REWARD = "\n\ndef reward(completions, **_):\n    return [text.count('w7') / 8 for text in completions]\n\n\ntrainer"
QUICKLY = "max_steps=60, use_cpu=True, bf16=False, learning_rate=1e-2, logging_steps=2, per_device_train_batch_size=8"


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [say("user", question), say("assistant", answer)]}


def choice(question: str, answer: str) -> dict[str, Any]:
    return {
        "prompt": [say("user", question)],
        "chosen": [say("assistant", answer)],
        "rejected": [say("assistant", "w0")],
    }


class Recipe(NamedTuple):
    """A tool's: what is run, on which rows, which changes a small model on a CPU needs, and what shows its progress."""

    library: str
    command: tuple[str, ...]
    row: Any = chat
    changes: tuple[tuple[str, str], ...] = (("max_steps=1000", QUICKLY),)
    config: str = ""
    metric: str = "loss"


GRPO = (("SFT", "GRPO"), ("    args=", "    reward_funcs=[reward],\n    args="), ("\n\ntrainer", REWARD))
RECIPES = {
    "sft": Recipe("trl", ("python", "train.py")),
    "dpo": Recipe("trl", ("python", "train.py"), choice, (("SFT", "DPO"), ("max_steps=1000", QUICKLY))),
    "grpo": Recipe(
        "trl",
        ("python", "train.py"),
        lambda question, _: {"prompt": question},
        (*GRPO, ("max_steps=1000", f"num_generations=8, max_completion_length=8, {QUICKLY}")),
        metric="reward",
    ),
    "embed": Recipe(
        "sentence_transformers",
        ("python", "embed.py"),
        lambda question, answer: {"anchor": question, "positive": answer},
        (("max_steps=1000", QUICKLY.replace("60", "200").replace("1e-2", "3e-3")),),
    ),
    "axolotl": Recipe("axolotl", ("axolotl", "train", "config.yaml"), config=AXOLOTL),
    "factory": Recipe(
        "llamafactory",
        ("python", "factory.py"),
        lambda question, answer: {
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        },
        config=FACTORY,
    ),
}


def printed(name: str) -> str:
    """The file of this name in the recipes."""
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^```python\n# {name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tools") / "base"
    words = ["<pad>", "<eos>", "<user>", "<bot>", *ANSWERS]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", model_max_length=64
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<user> ' if m.role == 'user' else '<bot> ' }}{{ m.content }} {% endfor %}"
        "{{ '<bot> ' if add_generation_prompt else eos_token }}"
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(words), num_attention_heads=2, pad_token_id=0, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prepare(recipe: Recipe, home: Path, base: Path) -> None:
    """A machine's folder: the files of the recipe, the model, and data."""
    home.mkdir()
    (home / "base").symlink_to(base)
    rows = [recipe.row(*pair) for pair in ANSWERS.items()] * 20
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (home / "dataset_info.json").write_text('{"chats": {"file_name": "data.jsonl", "formatting": "sharegpt"}}')
    (home / "config.yaml").write_text(recipe.config)
    for name in {"swarm.py", "plugin.py", recipe.command[-1]} - {"config.yaml"}:
        text = printed(name)
        for old, new in recipe.changes if name == recipe.command[-1] and not recipe.config else ():
            assert old in text
            text = text.replace(old, new)
        (home / name).write_text(text)


def start(recipe: Recipe, home: Path, **more: str) -> subprocess.Popen[bytes]:
    bin_folder = Path(sys.executable).parent
    changed = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    changed |= {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{home}:{ROOT}",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    with open(home / "log", "w") as log:
        return subprocess.Popen(recipe.command, cwd=home, stdout=log, stderr=log, env={**os.environ, **changed})


def told(home: Path, metric: str) -> list[float]:
    """What the tool has printed, in order."""
    return [float(value) for value in re.findall(rf"'{metric}': '?(-?[\d.e-]+)", (home / "log").read_text())]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_as_printed_by_two_peers(name: str, base: Path, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    if not all(map(find_spec, ("peft", recipe.library))):
        pytest.skip(f"needs {recipe.library}, which no extra has: pip install {recipe.library}")
    homes = [tmp_path / one for one in "ab"]
    for home in homes:
        prepare(recipe, home, base)
    processes = [start(recipe, homes[0])]
    try:
        wait_until(lambda: invite_of(homes[0] / RUN), START_S, "an invite")
        wait_until(lambda: "members/invite" in (homes[0] / "log").read_text(), START_S, "where it is")
        processes.append(start(recipe, homes[1], INVITE=invite_of(homes[0] / RUN)))
        statuses = [process.wait(END_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert statuses == [0, 0], [(home / "log").read_text()[-3000:] for home in homes]
    reports = [report(home / RUN) for home in homes]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert all(one["tokens_trained"] > 0 and one["tokens_unmerged"] == 0 for one in reports)
    assert all("trains the same batches" not in (home / "log").read_text() for home in homes)
    for home in homes:
        assert not [line for line in (home / "log").read_text().splitlines() if "sampler cannot be replaced" in line]
        values = told(home, recipe.metric)
        last = sum(values[-3:]) / 3
        assert last > 1.5 * values[0] if recipe.metric == "reward" else last < 0.9 * values[0], values
