"""GGUF files, as the gguf package and transformers read them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import byte_pairs
from benchmarks.byte_pairs import END
from p2pdiloco.training.gguf_export import GGUF, write_gguf

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "tokenizers", "gguf"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)
TEXT = "def main(): naïve ☃ 12345 it's\n\n  two"
SHAPE: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def model_in(folder: Path, kind: str, **changes: Any) -> Any:
    """A model as transformers has saved it, in which no tensor is as a new model has it."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(folder)
    return model.eval()


def tokenizer_in(folder: Path) -> None:
    byte_pairs.write([TEXT * 40], 290, folder)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", SHAPE | HEADS | {"rope_theta": 77.0}),
        ("Mistral", SHAPE | HEADS | {"sliding_window": None}),
        ("Qwen2", SHAPE | HEADS),
        ("Qwen3", SHAPE | HEADS | {"head_dim": 128}),
        ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    ],
)
def test_each_architecture_has_the_same_logits(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = model_in(tmp_path, kind, **changes)
    write_gguf(tmp_path, tmp_path / GGUF, "mine")
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=GGUF, local_files_only=True)
    given = torch.tensor([[1, 2, 3, 9, 44, 63, 5]])
    with torch.no_grad():
        torch.testing.assert_close(found(given).logits, model(given).logits, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_is_in_the_file_with_the_end_of_text(tmp_path: Path) -> None:
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer_in(tmp_path)
    end = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).convert_tokens_to_ids(END)
    model_in(tmp_path, "Llama", **(SHAPE | HEADS), eos_token_id=end, bos_token_id=None)
    write_gguf(tmp_path, tmp_path / GGUF, "mine")
    fields = GGUFReader(tmp_path / GGUF).fields
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == end
    assert not fields["tokenizer.ggml.add_bos_token"].contents()
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    assert len(tokens) == len(kinds) == 300, "as many as the model has"
    assert (tokens[end], kinds[end], kinds[-1]) == (END, 3, 5)
    there = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    (tmp_path / "alone").mkdir()
    (tmp_path / GGUF).rename(tmp_path / "alone" / GGUF)
    again = AutoTokenizer.from_pretrained(tmp_path / "alone", gguf_file=GGUF, local_files_only=True)
    assert again(TEXT)["input_ids"] == there(TEXT)["input_ids"]


def test_a_model_stops_at_the_same_tokens_as_in_transformers(tmp_path: Path) -> None:
    """Those of generation_config.json. config.json's first one may be another token, which the model never says."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    tokenizer_in(tmp_path)
    end = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True).convert_tokens_to_ids(END)
    model_in(tmp_path, "Llama", **(SHAPE | HEADS), eos_token_id=[7, 8], bos_token_id=None)
    for ends, written in (
        (9, {"eos": 9}),
        ([5, end], {"eos": end, "eot": 5}),  # the tokenizer's own first
        ([5, 6, end], {"eos": end, "eot": 5, "eom": 6}),
        (None, {"eos": 7, "eot": 8}),
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        write_gguf(tmp_path, tmp_path / GGUF, "mine")
        fields = GGUFReader(tmp_path / GGUF).fields
        names = ("eos", "eot", "eom")
        keys = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in names}
        assert {name: key.contents() for name, key in keys.items() if key is not None} == written
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2, 3, 4]}))
    with pytest.raises(ValueError, match=r"stops at 4 tokens .*GGUF holds 3.*convert_hf_to_gguf\.py"):
        write_gguf(tmp_path, tmp_path / GGUF, "mine")


def test_a_tokenizer_of_bytes_has_what_llama_cpp_requires(tmp_path: Path) -> None:
    """A list of merges, and ends of text: without these it takes token 11, a byte of text."""
    from gguf import GGUFReader

    from p2pdiloco.training.export import byte_tokenizer

    model_in(tmp_path, "Llama", **(SHAPE | HEADS | {"vocab_size": 256}), eos_token_id=None, bos_token_id=None)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))
    write_gguf(tmp_path, tmp_path / GGUF, "mine")
    fields = GGUFReader(tmp_path / GGUF).fields
    assert fields["tokenizer.ggml.merges"].contents()
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 0
    assert not fields["tokenizer.ggml.add_bos_token"].contents()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Llama", {"attention_bias": True}, "attention_bias = True"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type = 'linear'",
        ),
        ("Mistral", {"sliding_window": 8}, "sliding_window = 8"),
        ("Gemma", {}, "this is a gemma"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model_in(tmp_path, kind, **(SHAPE | HEADS | changes))
    with pytest.raises(ValueError, match=rf"{said}.*convert_hf_to_gguf\.py"):
        write_gguf(tmp_path, tmp_path / GGUF, "mine")


def test_how_a_text_is_cut_is_told_to_llama_cpp(tmp_path: Path) -> None:
    from gguf import GGUFReader
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer_in(tmp_path)
    model_in(tmp_path, "Llama", **(SHAPE | HEADS), eos_token_id=0)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": PRETOKENIZE_REGEX}, "behavior": "Isolated", "invert": False}
    many = split | {"pattern": {"Regex": PRETOKENIZE_REGEX.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)}}
    digits = {"type": "Digits", "individual_digits": True}
    for first, cut in ((split, "qwen2"), (many, "llama-bpe"), (digits, "smollm")):
        bytes_after = told["pre_tokenizer"] | {"use_regex": cut == "smollm"}
        steps = {"type": "Sequence", "pretokenizers": [first, bytes_after]}
        (tmp_path / "tokenizer.json").write_text(json.dumps(told | {"pre_tokenizer": steps}))
        write_gguf(tmp_path, tmp_path / GGUF, "mine")
        assert GGUFReader(tmp_path / GGUF).fields["tokenizer.ggml.pre"].contents() == cut


def test_a_tokenizer_of_another_kind_or_model_is_refused(tmp_path: Path) -> None:
    tokenizer_in(tmp_path)
    model_in(tmp_path, "Llama", **(SHAPE | HEADS | {"vocab_size": 64}))
    with pytest.raises(ValueError, match=r"has \d+ tokens, and the model 64"):
        write_gguf(tmp_path, tmp_path / GGUF, "mine")
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    for odd in (
        told | {"pre_tokenizer": {"type": "Metaspace"}},
        told | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, told["pre_tokenizer"]]}},
        told | {"model": told["model"] | {"type": "Unigram"}},
        told | {"normalizer": {"type": "Lowercase"}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(odd))
        with pytest.raises(ValueError, match=r"this one is another.*convert_hf_to_gguf\.py"):
            write_gguf(tmp_path, tmp_path / GGUF, "mine")
