"""The two scripts that README begins with, as they are printed there, by two peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from documents import VOCABULARY, make_texts, write_tokenizer
from scripts import END_S, START_S, invite_of, report
from waiting import wait_until

ROOT = Path(__file__).parents[2]
STATE = Path(".local/state/p2pdiloco")
"""In a user's home."""
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "accelerate", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)

QLORA = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs the extra qlora: pip install -c constraints.txt '.[qlora]'"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, as somebody may have it on the disk, and texts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=2, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):  # texts without an end
        words = torch.randint(2, VOCABULARY, (8, 16))
        model(words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    file = str(write_tokenizer(folder) / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token="</s>", unk_token="[UNK]").save_pretrained(folder)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(600)))
    return folder


def start(script: Path, home: Path, base: Path, *words: str) -> subprocess.Popen[bytes]:
    """One machine's command line."""
    home.mkdir(parents=True)
    changed = {"HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "STEPS": "60"}
    with open(home / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, script, base, base / "texts.jsonl", *words],
            cwd=home,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT), **changed},
        )


def assert_exported(run: str, home: Path, like: str, model: Any) -> None:
    """What ``p2pdiloco export`` writes is the model that the script has saved, which is the swarm's."""
    import torch
    from transformers import AutoModelForCausalLM

    command = ("export", run, "--format", "hf", "--like", like, "--out", "whole")
    done = subprocess.run(
        [sys.executable, "-m", "p2pdiloco", *command],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=END_S,
    )
    assert done.returncode == 0, done.stderr
    assert "transformers.LlamaForCausalLM.from_pretrained('whole')" in done.stdout
    tokens = torch.arange(VOCABULARY)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(home / "whole", local_files_only=True)(tokens).logits
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-5, atol=1e-5)


def chance_of_an_end(base: Path, model: Any) -> float:
    """Mean probability of the end-of-text token after whole texts."""
    import torch
    from transformers import AutoTokenizer

    tokenizer, chances = AutoTokenizer.from_pretrained(base), []
    for text in make_texts(20, seed=2):
        tokens = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            chances.append(float(model(tokens).logits[0, -1].softmax(0)[tokenizer.eos_token_id]))
    return sum(chances) / len(chances)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "run", "options"),
    [
        pytest.param("lora", "fine-tune", [], marks=pytest.mark.long),
        pytest.param("lora", "fine-tune", ["--load-in-4bit"], marks=[pytest.mark.long, QLORA], id="lora-4bit"),
        ("pretrain", "pretrain", []),
    ],
)
def test_it_works_as_printed_by_two_peers(name: str, run: str, options: list[str], base: Path, tmp_path: Path) -> None:
    """``options``: those of the first peer alone."""
    script = ROOT / "peers" / f"{name}.py"
    assert len(script.read_text().splitlines()) < 50
    assert f"python peers/{name}.py MODEL TEXTS.jsonl INVITE" in script.read_text()
    processes = [start(script, tmp_path / "a", base, *options)]
    try:
        founder = tmp_path / "a" / STATE / run
        wait_until(lambda: invite_of(founder), START_S, "an invite")
        wait_until(lambda: "members/invite" in (tmp_path / "a" / "log").read_text(), START_S, "where it is")
        processes.append(start(script, tmp_path / "b", base, invite_of(founder)))
        statuses = [process.wait(END_S) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert statuses == [0, 0], [(tmp_path / one / "log").read_text()[-2000:] for one in "ab"]
    reports = [report(tmp_path / one / STATE / run) for one in "ab"]
    assert reports[0]["digests"] == reports[1]["digests"]
    assert all(one["tokens_trained"] > 0 and one["tokens_unmerged"] == 0 for one in reports)

    from transformers import AutoModelForCausalLM

    if name == "lora":
        from peft import PeftModel

        model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "b" / "tuned")
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "b" / "model")
    if name == "lora":
        before, after = (chance_of_an_end(base, one) for one in (AutoModelForCausalLM.from_pretrained(base), model))
        assert after > 1.1 * before, "it has learned to stop, though the tokenizer pads with the same token"
    assert_exported(run, tmp_path / "b", "tuned" if name == "lora" else str(base), model.eval())
    assert (
        sum(float(p.detach().abs().sum()) for n, p in model.named_parameters() if "lora_B" in n or name != "lora") > 0
    )
