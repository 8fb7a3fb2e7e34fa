"""Hugging Face models from a configuration that is data: what is built, and what never is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.node.run_creation import is_founded_from, read_config
from p2pdiloco.protocol.manifest import LoraConfig, ModelConfig
from p2pdiloco.protocol.manifest_validation import architecture_problems
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.training.huggingface import ArchitectureError, build_huggingface, read_folder
from p2pdiloco.training.models import build, loss, vocabulary
from p2pdiloco.training.parameters import embedding_names, trainable

CONFIGS = Path(__file__).parents[2] / "p2pdiloco" / "runs"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
}


def llama(**changes: Any) -> ModelConfig:
    return ModelConfig(kind="huggingface", config=LLAMA | changes, context=8)


def test_a_sound_configuration_has_no_problems() -> None:
    assert architecture_problems(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": None}, "must have a model_type"),
        ({"vocab_size": 2**21}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"auto_map": {"AutoModel": "evil--code"}}, "auto_map is not allowed"),
        ({"attn_implementation": "somebody/kernels"}, "attn_implementation is not allowed"),
        ({"_attn_implementation": "somebody/kernels"}, "small letters"),
        ({"quantization_config": {}}, "quantization_config is not allowed"),
        ({"num_hidden_layers": 10**6}, "at most 4096"),
        ({"max_position_embeddings": 2**40}, "at most"),
        ({"rms_norm_eps": float("nan")}, "must be finite"),
        ({"hidden_act": "x" * 1000}, "letters"),
        ({"rope_parameters": {"a": [[[[1]]]]}}, "nested"),
        ({"layer_types": ["x" * 200] * 1000}, "bytes"),
        ({"bos_token_id": b"raw"}, "not a plain value"),
    ],
)
def test_what_is_not_plain_bounded_data_is_refused(changes: dict[str, Any], told: str) -> None:
    problems = architecture_problems(LLAMA | changes)
    assert any(told in problem for problem in problems), problems


def test_the_founder_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\nmodel.kind = "huggingface"\nmodel.config.vocab_size = 10\n')
    with pytest.raises(ConfigError, match="model_type"):
        read_config(path)


def test_without_the_extra_the_line_to_type_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ArchitectureError, match=r"pip install 'p2pdiloco\[hf\]'"):
        build_huggingface(llama(), 0)


@pytest.mark.parametrize("name", ["llama-15m", "llama-125m", "llama-1b"])
def test_the_shipped_configurations_are_sound(name: str) -> None:
    config = read_config(CONFIGS / f"{name}.toml")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    given = {key: value for key, value in config.model.config.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **given))
    size = sum(p.numel() for p in model.parameters())
    told = {"llama-15m": 15e6, "llama-125m": 125e6, "llama-1b": 1.1e9}[name]
    assert abs(size - told) < 0.1 * told
    assert config.schedule.fragments <= len(list(model.parameters()))


def test_the_shipped_fine_tune_is_sound() -> None:
    config = read_config(CONFIGS / "lora.toml")
    assert config.model.lora is not None
    assert config.model.lora.rank == 16
    assert (config.schedule.sync_every, config.outer.merge) == (3, "direct")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('model.kind = "transformer"\nmodel.lora.rank = 4', 'needs model.kind = "huggingface"'),
        (
            'model.kind = "huggingface"\nmodel.config = {model_type = "llama", vocab_size = 9}\nmodel.lora = {}',
            "folder",
        ),
        ('model.kind = "huggingface"\nmodel.folder = "x"\nmodel.lora.targets = []', "targets"),
        ('model.kind = "huggingface"\nmodel.folder = "x"\nmodel.lora.rank = 0', "rank"),
    ],
)
def test_adapters_that_cannot_be_are_told_at_once(tmp_path: Path, lines: str, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n{lines}\n')
    with pytest.raises(ConfigError, match=told):
        read_config(path)


def test_what_founding_fills_in_does_not_make_it_another_run() -> None:
    written = read_config(CONFIGS / "lora.toml")
    data = msgspec.structs.replace(written.data, tokenizer_digest="0" * 40)
    founded = msgspec.structs.replace(written, data=data, model=llama())
    assert is_founded_from(founded, written)
    assert not is_founded_from(msgspec.structs.replace(founded, seed=2), written)
    again = read_config(CONFIGS / "llama-15m.toml")
    assert not is_founded_from(msgspec.structs.replace(again, model=llama()), again)


@pytest.mark.heavy
class TestWithTransformers:
    """Real models."""

    @pytest.fixture(autouse=True)
    def _needs_the_extra(self) -> None:
        pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")

    def test_a_llama_is_built_from_the_seed_and_trains(self) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        a, b, other = (build(llama(), seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), before), "nobody else's random numbers move"
        pairs = zip(trainable(a), trainable(b), strict=True)
        assert all(torch.equal(p, q) for (_, p), (_, q) in pairs)
        assert not torch.equal(next(a.parameters()), next(other.parameters()))
        assert embedding_names(a) == {"model.embed_tokens.weight"}
        assert vocabulary(llama()) == 64
        batch = torch.randint(0, 64, (2, 9))
        value = loss(a, batch)
        assert abs(value.item() - 4.16) < 0.3
        value.backward()  # type: ignore[no-untyped-call]
        assert all(p.grad is not None for _, p in trainable(a))

    def test_unknown_keys_and_types_are_named(self) -> None:
        with pytest.raises(ArchitectureError, match="no key hidden_sise"):
            build(llama(hidden_sise=3), 0)
        with pytest.raises(ArchitectureError, match="does not know model_type 'nonsense'"):
            build(llama(model_type="nonsense"), 0)
        with pytest.raises(ArchitectureError):
            build(llama(num_attention_heads=7, head_dim=None), 0)

    def test_another_model_than_the_manifests_is_refused_before_it_takes_memory(self) -> None:
        named = [(name, p.shape, False) for name, p in trainable(build(llama(), 0))]
        tensors = tensor_specs(named, 2)
        build(llama(), 0, tensors)
        huge = llama(hidden_size=2**20, intermediate_size=2**30)  # petabytes
        with pytest.raises(ArchitectureError, match="another model"):
            build(huge, 0, tensors)

    def test_a_folder_gives_configuration_and_weights(self, tmp_path: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        given = {key: value for key, value in LLAMA.items() if key != "model_type"}
        original = LlamaForCausalLM(LlamaConfig(**given))
        original.save_pretrained(tmp_path)
        config, model = read_folder(ModelConfig(kind="huggingface", folder=str(tmp_path), context=8), 0)
        assert config.folder == ""
        assert config.config["hidden_size"] == 16
        assert model is not None
        assert torch.equal(model.get_input_embeddings().weight, original.get_input_embeddings().weight)  # type: ignore[operator]
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig)
        rebuilt = build(travelled, 0, tensor_specs([(n, p.shape, False) for n, p in trainable(model)], 2))
        assert [n for n, _ in trainable(rebuilt)] == [n for n, _ in trainable(original)]
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(ArchitectureError, match="pickled weights"):
            read_folder(ModelConfig(kind="huggingface", folder=str(tmp_path)), 0)
        (tmp_path / "pytorch_model.bin").unlink()
        told = json.loads((tmp_path / "config.json").read_text())
        assert read_folder(ModelConfig(kind="huggingface", folder=str(tmp_path)), 0)[1] is None
        (tmp_path / "config.json").write_text(json.dumps(told | {"auto_map": {"AutoModel": "code.Model"}}))
        with pytest.raises(ArchitectureError, match="code of its own"):
            read_folder(ModelConfig(kind="huggingface", folder=str(tmp_path)), 0)

    def test_of_a_fine_tune_only_the_adapters_are_trained(self, tmp_path: Path) -> None:
        """On the weights that the manifest has the digest of, and on no others."""
        pytest.importorskip("peft", reason="needs the extra hf: pip install '.[hf]'")
        mine, theirs = tmp_path / "mine", tmp_path / "theirs"
        save_llama(mine, 1)
        lora = LoraConfig(rank=2, targets=("q_proj", "down_proj"))
        config, model = read_folder(ModelConfig(kind="huggingface", folder=str(mine), context=8, lora=lora), 0)
        assert model is not None
        named = trainable(model)
        assert len(named) == 2 * 2 * 2, "two matrices for each of two layers in each of two blocks"
        assert all("lora_" in name for name, _ in named)
        tensors = tensor_specs([(n, p.shape, False) for n, p in named], 2)
        travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ModelConfig)
        with pytest.raises(ArchitectureError, match="give --model FOLDER"):
            build(travelled, 0, tensors)
        save_llama(theirs, 2)
        with pytest.raises(ArchitectureError, match="adapters are for"):
            build(travelled, 0, tensors, str(theirs))
        (theirs / "model.safetensors").unlink()
        with pytest.raises(ArchitectureError, match=r"of 0 elements"):
            build(travelled, 0, tensors, str(theirs))
        huge = msgspec.structs.replace(travelled, config=travelled.config | {"vocab_size": 2**20})  # same adapters
        with pytest.raises(ArchitectureError, match="the run's base has"):
            build(huge, 0, tensors, str(mine))
        with pytest.raises(ValueError, match="leave it out"):
            build(llama(), 0, None, str(mine))
        rebuilt = build(travelled, 0, tensors, str(mine))
        batch = torch.randint(0, 64, (2, 9))
        assert torch.equal(loss(model, batch), loss(rebuilt, batch))
        loss(rebuilt, batch).backward()  # type: ignore[no-untyped-call]
        assert {name for name, p in rebuilt.named_parameters() if p.grad is not None} == {n for n, _ in named}

    def test_targets_that_the_model_does_not_have_are_told(self, tmp_path: Path) -> None:
        pytest.importorskip("peft", reason="needs the extra hf: pip install '.[hf]'")
        save_llama(tmp_path, 1)
        lora = LoraConfig(targets=("nonsense",))
        with pytest.raises(ArchitectureError, match=r"model\.lora\.targets: .*nonsense"):
            read_folder(ModelConfig(kind="huggingface", folder=str(tmp_path), context=8, lora=lora), 0)


def save_llama(folder: Path, seed: int) -> None:
    """Random weights, as the library saves them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    given = {key: value for key, value in LLAMA.items() if key != "model_type"}
    LlamaForCausalLM(LlamaConfig(**given)).save_pretrained(folder)


def test_a_pretrained_model_with_buffers_of_its_own_is_not_founded(tmp_path: Path) -> None:
    """Peers that join build it from its configuration: without a word they would train another model."""
    from transformers import AutoModelForCausalLM

    shape = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
    own = LLAMA | shape | {"model_type": "glm4_moe", "first_k_dense_replace": 1, "tie_word_embeddings": False}
    wanted = ModelConfig(kind="huggingface", folder=str(tmp_path), context=8)
    model: Any = AutoModelForCausalLM.from_config(own_config(own))
    model.save_pretrained(tmp_path)
    assert read_folder(wanted, 0)[1] is not None, "as a new one has them"
    dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].add_(0.1)
    model.save_pretrained(tmp_path)
    with pytest.raises(ArchitectureError, match=r"e_score_correction_bias.*train it with a script"):
        read_folder(wanted, 0)


def own_config(told: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**told)
