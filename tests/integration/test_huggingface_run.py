"""A run whose TOML names a Hugging Face model, documents and a tokenizer: two peers of real processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import VOCABULARY, make_texts, write_documents, write_tokenizer
from swarm import contributes, ended, learners_held, log_lines, report_of, swarm_in, until, write_config

pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
pytest.importorskip("pyarrow", reason="needs the extra hf: pip install '.[hf]'")

START_S = 200.0
"""Everything that starts torch and transformers, on a busy machine."""

ARCHITECTURE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def write_run(folder: Path, **changes: object) -> Path:
    """A tiny Llama on JSON lines."""
    write_tokenizer(folder / "tok")
    write_documents(folder / "documents", "jsonl", make_texts(400))
    settings: dict[str, Any] = {
        "model_kind": "huggingface",
        "data_kind": "jsonl",
        "data_path": str(folder / "documents"),
        "data_pattern": "",
        "data_tokenizer": str(folder / "tok"),
        "data_separator": "</s>",
        "inner_steps": 60,
        "inner_batch": 8,
        **changes,
    }
    path = write_config(folder, **settings)
    lines = [
        line
        for line in path.read_text().splitlines()
        if not line.startswith(("model.width", "model.depth", "model.heads"))
    ]
    lines += [f"model.config.{key} = {json.dumps(value)}" for key, value in ARCHITECTURE.items()]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.timeout(600)
def test_two_peers_train_a_llama_on_documents_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The founder's are JSON lines. The joiner has other ones elsewhere, with the same tokenizer among them; it gets
    the model from the manifest alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_run(tmp_path)
    elsewhere = write_documents(tmp_path / "elsewhere", "jsonl", make_texts(400, seed=2))
    write_tokenizer(elsewhere)
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        with learners_held(ann):
            bob = swarm.join("B", address, "--data", str(elsewhere))
            until(bob, lambda: any("learner-ready" in line for line in metrics_of(bob)), START_S, "B's learner")
        until(ann, lambda: contributes(ann, bob, 0), START_S, "contributions of B")
        assert [ended(member, START_S) for member in (ann, bob)] == [0, 0], log_lines(bob)
        reports = [report_of(ann), report_of(bob)]
        assert reports[0]["digests"] == reports[1]["digests"]
        assert all(report["tokens_unmerged"] == 0 for report in reports)
        held_out = [loss for _, loss, _ in ann.view.held_out + bob.view.held_out]
        assert min(held_out) < 2.75, "less than ln 15 = 2.71 + what it begins above that"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_peers_fine_tune_adapters_on_weights_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the adapters travel. The joiner has the weights in another folder; who has other weights is told."""
    pytest.importorskip("peft", reason="needs the extra hf: pip install '.[hf]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_run(tmp_path)
    lines = [line for line in config.read_text().splitlines() if not line.startswith("model.config.")]
    lines += [f"model.folder = {json.dumps(str(tmp_path / 'base'))}", "model.lora.rank = 4"]
    config.write_text("\n".join([*lines, "inner.learning_rate = 1e-2"]))
    save_base(tmp_path / "base", 1)
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    save_base(tmp_path / "other", 2)
    data = ("--data", str(tmp_path / "documents"), "--tokenizer", str(tmp_path / "tok"))
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        ann = swarm.start_founder("A", config, address)
        with learners_held(ann):
            eve = swarm.join("E", address, "--model", str(tmp_path / "other"), *data)
            assert ended(eve, START_S) == 2
            assert any("the run's adapters are for" in line for line in log_lines(eve)), log_lines(eve)
            bob = swarm.join("B", address, "--model", str(tmp_path / "copy"), *data)
            until(bob, lambda: any("learner-ready" in line for line in metrics_of(bob)), START_S, "B's learner")
        until(ann, lambda: contributes(ann, bob, 0), START_S, "contributions of B")
        assert [ended(member, START_S) for member in (ann, bob)] == [0, 0], log_lines(bob)
        reports = [report_of(ann), report_of(bob)]
        assert reports[0]["digests"] == reports[1]["digests"]
        held_out = [loss for _, loss, _ in ann.view.held_out + bob.view.held_out]
        assert min(held_out) < 2.70, "random weights, at 2.714, know the 15 symbols; only adapters can have learnt more"


def save_base(folder: Path, seed: int) -> None:
    """Random weights in the place of a pretrained model's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    given = {key: value for key, value in ARCHITECTURE.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**given)).save_pretrained(folder)


def metrics_of(member: Any) -> list[str]:
    folder = member.run_folder()
    path = None if folder is None else folder / "metrics.jsonl"
    return [] if path is None or not path.exists() else path.read_text().splitlines()


def test_who_lacks_the_tokenizer_or_the_extra_is_told_what_to_do(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    (tmp_path / "tok" / "tokenizer.json").unlink()

    def start(*before: str) -> str:
        script = "; ".join((*before, "import runpy; runpy.run_module('p2pdiloco', run_name='__main__')"))
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; {script}", "start", str(config), "--state", str(tmp_path / "state")],
            capture_output=True,
            text=True,
            timeout=170,
        )
        assert done.returncode == 2, done.stderr
        return done.stdout + done.stderr

    assert "put the founder's into the folder of your data" in start()
    write_tokenizer(tmp_path / "tok")
    assert "pip install 'p2pdiloco[hf]'" in start(
        "sys.modules['tokenizers'] = None", "sys.modules['transformers'] = None"
    )
