"""Exports that go to the Hugging Face hub, and what comes from there, with a stand-in for it on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hub import TOKEN, Hub, hub_here

from p2pdiloco.training.hub import check_hub

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "datasets", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)


def python(home: Path, hub: Hub, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python as on a machine whose hub is this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN}
    environment |= {"HF_HUB_DISABLE_XET": "1", **variables}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=home, env=environment, capture_output=True, text=True, timeout=150
    )


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("ann/small")
print(model.config.model_type, len(AutoTokenizer.from_pretrained("ann/small")("abc")["input_ids"]))
"""


def test_an_export_goes_to_the_hub_with_its_card_and_comes_back(tmp_path: Path) -> None:
    from benchmarks.exports import built_in, store

    store(built_in(tmp_path), tmp_path / "state")
    words = ("-m", "p2pdiloco", "export", tmp_path / "state", "--format", "hf", "--out", "out", "--license", "mit")
    with hub_here() as hub:
        done = python(tmp_path, hub, *words, "--push-to-hub", "ann/small", "--private")
        assert done.returncode == 0, done.stderr
        assert f"pushed to    {hub.address}/ann/small" in done.stdout
        files = hub.repositories["ann/small"]
        assert hub.created[0].get("private") or hub.created[0].get("visibility") == "private"
        assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
        assert "p2pdiloco.json" not in files
        assert str(tmp_path).encode() not in b"".join(files.values()), "no folder of this machine"
        _, header, text = files["README.md"].decode().split("---\n", 2)
        told = dict(line.split(": ", 1) for line in header.splitlines())
        assert {name: json.loads(value) for name, value in told.items()} == {
            "library_name": "transformers",
            "tags": ["p2pdiloco", "diloco"],
            "license": "mit",
            "pipeline_tag": "text-generation",
        }
        for fact in ("run", "data", "tokens merged", "peers", "held-out loss"):
            assert f"\n| {fact}" in text
        again = python(tmp_path, hub, "-c", LOAD)
        assert again.stdout.split() == ["llama", "3"], again.stderr


@pytest.mark.parametrize(
    ("name", "variables", "said"),
    [
        ("ann/small", {"HF_TOKEN": ""}, "hf auth login"),
        ("ann/small", {"HF_HUB_OFFLINE": "1"}, "unset it"),
        ("small", {}, "must be OWNER/NAME"),
        ("ann/sm all", {}, "--push-to-hub 'ann/sm all'"),
    ],
)
def test_what_cannot_be_pushed_is_refused_at_once(
    name: str, variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    for key, value in ({"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"} | variables).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match=said):
        check_hub(name)


def test_a_refusal_of_the_hub_leaves_the_export_and_says_how_to_go_on(tmp_path: Path) -> None:
    from benchmarks.exports import built_in, store

    store(built_in(tmp_path), tmp_path / "state")
    words = ("-m", "p2pdiloco", "export", tmp_path / "state", "--format", "hf", "--out", "out")
    with hub_here() as hub:
        done = python(tmp_path, hub, *words, "--push-to-hub", "ann/small", HF_TOKEN="hf_wrong")
        assert (done.returncode, done.stderr.count("Traceback")) == (2, 0)
        assert "hf upload ann/small out" in done.stderr
        assert (tmp_path / "out" / "config.json").is_file()


READ = """
from p2pdiloco.integrations.datasets import load_texts
print(list(load_texts("ann/texts")), list(load_texts("hf://datasets/ann/texts")))
"""


def test_a_data_set_is_read_by_its_name(tmp_path: Path) -> None:
    with hub_here() as hub:
        hub.repositories["ann/texts"] = {"train.jsonl": b'{"text": "one"}\n{"text": "two"}\n'}
        done = python(tmp_path, hub, "-c", READ)
        assert done.stdout.split() == ["['one',", "'two']"] * 2, done.stderr[-3000:]
