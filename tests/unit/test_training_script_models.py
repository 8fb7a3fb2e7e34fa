"""Exports of training scripts' runs, loaded again by the real libraries: the same logits as the swarm's model, or a
refusal that says what to do."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from p2pdiloco.cli.main import main
from p2pdiloco.node.run_creation import make_manifest, version_zero
from p2pdiloco.peer.checkpoint import save
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import LoraConfig, Manifest, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.swarm.run_index import folder_of
from p2pdiloco.training.export import ABOUT, About, ExportError, Format, byte_tokenizer, export
from p2pdiloco.training.founding_file import with_architecture
from p2pdiloco.training.huggingface import read_folder
from p2pdiloco.training.parameters import embedding_names, named_buffers, trainable
from p2pdiloco.training.script_models import find_folder

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "tokenizers", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)
SCRIPTS = ModelConfig(kind="external")
TEXT = torch.tensor([[1, 2, 3, 9, 44, 63, 5]])
SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
Script = Callable[[Any], Any]
"""What a script makes of the base before it trains."""


def llama(folder: Path, **changes: Any) -> Path:
    """A pretrained model's folder. It is as if trained: biases and norms are not what they are in a new model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    given = SHAPE | {"num_attention_heads": 2, "attention_bias": True, "tie_word_embeddings": False} | changes
    moved(LlamaForCausalLM(LlamaConfig(**given)), 1).save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    moved(model, 2).save_pretrained(folder)
    return folder


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    found, told = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found.eval()


@torch.no_grad()
def moved(model: Any, seed: int = 3) -> Any:
    """``model`` after training: each trainable tensor is another one."""
    draws = torch.Generator().manual_seed(seed)
    for _, p in trainable(model):
        p.add_(0.1 * torch.randn(p.shape, generator=draws))
    return model.eval()


def run_of(model: nn.Module, *, is_recorded: bool = True) -> tuple[Manifest, Tensor, Tensor]:
    """A run of scripts that trained ``model``: its manifest, global parameters and momentum."""
    embeddings, parameters = embedding_names(model), trainable(model)
    named = [(name, p.shape, name in embeddings) for name, p in parameters]
    config = RunConfig(name="mine", model=SCRIPTS, schedule=ScheduleConfig(fragments=1))
    if is_recorded:
        config = with_architecture(config, model)
    return make_manifest(config, PeerId("founder"), named, parameters)


def written(
    model: nn.Module,
    out: Path,
    wanted: Format,
    *,
    is_recorded: bool = True,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
    **places: Path,
) -> list[str]:
    """``export`` of that run. ``is_recorded``: as the runs of today, it has its model's configuration."""
    manifest, theta, _ = run_of(model, is_recorded=is_recorded)
    about = About(run=manifest.run, name="mine", step=7, tokens=99, format=wanted, model=SCRIPTS)
    given = {name: str(place) for name, place in places.items()}
    return export(manifest, theta, out, about, buffers=buffers, **given)  # type: ignore[arg-type]


def adapted(name: str = "default", **settings: Any) -> Script:
    def script(base: Any) -> Any:
        import peft

        given = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights
            return peft.get_peft_model(base, peft.LoraConfig(**given), adapter_name=name)

    return script


def settings_of(model: Any, folder: Path) -> Path:
    """Where the script's ``save_pretrained`` put adapter_config.json."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return next(folder.rglob("adapter_config.json")).parent


@torch.no_grad()
def assert_same(found: Any, model: Any) -> None:
    torch.testing.assert_close(found(TEXT).logits, model(TEXT).logits, rtol=1e-5, atol=1e-5)


ADAPTERS: dict[str, Script] = {
    "plain": adapted(),
    "named": adapted("mine"),
    "saved head": adapted("mine", modules_to_save=["lm_head"]),
    "saved embedding": adapted(modules_to_save=["embed_tokens"]),
    "tokens": adapted("mine", trainable_token_indices=[3, 9]),
    "dora": adapted("mine", use_dora=True, use_rslora=True),
    "adapted embedding": adapted(target_modules=["embed_tokens", "q_proj"]),
    "adapted head": adapted(target_modules=["lm_head", "q_proj"]),
    "biases": adapted(bias="all"),
    "embedding saved for both": adapted(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "embedding adapted for both": adapted(target_modules=["embed_tokens"], ensure_weight_tying=True),
    "patterns": adapted(rank_pattern={"v_proj": 2}, alpha_pattern={"q_proj": 3}),
}


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ADAPTERS)
@torch.no_grad()
def test_adapters_of_every_kind_go_out_merged_and_for_peft(kind: str, is_tied: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    base = llama(tmp_path / "base", tie_word_embeddings=is_tied)
    model = moved(ADAPTERS[kind](loaded(base)))
    assert (loaded(base)(TEXT).logits - model(TEXT).logits).abs().max() > 1e-2, "what was trained does something"
    like = settings_of(model, tmp_path / "tuned")

    files = written(model, tmp_path / "whole", "hf", like=like, base=base)
    assert "adapter_config.json" not in files, "it would have the adapters looked for again"
    whole = loaded(tmp_path / "whole")
    assert_same(whole, model)
    assert whole.config.tie_word_embeddings == (whole.lm_head.weight is whole.model.embed_tokens.weight)

    assert written(model, tmp_path / "adapters", "peft", like=like, base=base)[0] == "adapter_config.json"
    assert_same(PeftModel.from_pretrained(loaded(base), tmp_path / "adapters").eval(), model)


@torch.no_grad()
def test_adapters_on_transposed_matrices_and_those_that_the_model_itself_holds(tmp_path: Path) -> None:
    """GPT-2 has Conv1D and tied embeddings; ``model.add_adapter`` makes no PeftModel."""
    from peft import LoraConfig as Settings
    from peft import PeftModel

    base = gpt2(tmp_path / "base")
    model = loaded(base)
    model.add_adapter(Settings(r=4, target_modules=["c_attn"], fan_in_fan_out=True), adapter_name="mine")
    moved(model)
    assert not any(name.startswith("base_model.") for name, _ in trainable(model))
    like = settings_of(model, tmp_path / "tuned")
    written(model, tmp_path / "whole", "hf", like=like, base=base)
    assert_same(loaded(tmp_path / "whole"), model)
    written(model, tmp_path / "adapters", "peft", like=like, base=base)
    assert_same(PeftModel.from_pretrained(loaded(base), tmp_path / "adapters").eval(), model)


def whole(base: Any) -> Any:
    return base


def without_first_layer(base: Any) -> Any:
    base.model.layers[0].requires_grad_(False)
    return base


def head_alone(base: Any) -> Any:
    base.requires_grad_(False)
    base.model.norm.requires_grad_(True)
    return base


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("script", [whole, without_first_layer, head_alone])
def test_what_a_script_did_not_train_is_the_bases(script: Script, is_tied: bool, tmp_path: Path) -> None:
    base = llama(tmp_path / "base", tie_word_embeddings=is_tied)
    model = moved(script(loaded(base)))
    (base / "tokenizer.json").write_text(json.dumps(byte_tokenizer(64)))
    assert "tokenizer.json" in written(model, tmp_path / "out", "hf", like=base)
    assert_same(loaded(tmp_path / "out"), model)
    told = msgspec.json.decode((tmp_path / "out" / ABOUT).read_bytes(), type=About)
    assert told.base == ("" if script is whole else str(base))

    (tmp_path / "config").mkdir()
    shutil.copy(base / "config.json", tmp_path / "config")
    if script is whole:
        written(model, tmp_path / "again", "hf", like=tmp_path / "config")
    else:
        with pytest.raises(ValueError, match=r"lacks others of this LlamaForCausalLM.*give --model FOLDER"):
            written(model, tmp_path / "again", "hf", like=tmp_path / "config")
        assert not (tmp_path / "again").exists()
        written(model, tmp_path / "again", "hf", like=tmp_path / "config", base=base)
    assert_same(loaded(tmp_path / "again"), model)


def test_a_base_may_have_another_shape_where_the_run_has_trained(tmp_path: Path) -> None:
    """As a script with new tokens has it."""
    base = llama(tmp_path / "base")
    model = loaded(base)
    model.model.layers[0].requires_grad_(False)
    model.resize_token_embeddings(66, mean_resizing=False)
    model.config.save_pretrained(tmp_path / "config")
    moved(model)
    written(model, tmp_path / "out", "hf", like=tmp_path / "config", base=base)
    assert_same(loaded(tmp_path / "out"), model)


def test_weights_in_several_files_are_read_and_pickles_are_not(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    model = moved(without_first_layer(loaded(base)))
    loaded(base).save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    written(model, tmp_path / "out", "hf", like=tmp_path / "parts")
    assert_same(loaded(tmp_path / "out"), model)

    next((tmp_path / "parts").glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        written(model, tmp_path / "none", "hf", like=tmp_path / "parts")

    torch.save(loaded(base).state_dict(), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="pickles, which are never loaded"):
        written(model, tmp_path / "none", "hf", like=base)
    assert not (tmp_path / "none").exists()


def test_a_base_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    """Whether the run trained adapters or a part of the model. transformers fills it at random."""
    base = llama(tmp_path / "base")
    models = [moved(adapted()(loaded(base))), moved(without_first_layer(loaded(base)))]
    like = settings_of(models[0], tmp_path / "tuned")
    weights = safetensors.torch.load_file(base / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    safetensors.torch.save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    for model, folder in zip(models, (like, base), strict=True):
        with pytest.raises(ValueError, match=r"lacks .*\(model\.layers\.0\.mlp\.up_proj\.weight\).*--model FOLDER"):
            written(model, tmp_path / "out", "hf", like=folder, base=base)
    written(models[0], tmp_path / "out", "peft", like=like, base=base)


@pytest.mark.parametrize("wanted", ["hf", "peft"])
def test_a_base_of_another_model_is_refused(wanted: Format, tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    other, narrow, short = (
        gpt2(tmp_path / "other"),
        llama(tmp_path / "narrow", hidden_size=8),
        llama(tmp_path / "short", num_hidden_layers=1),
    )
    model = moved(adapted()(loaded(base)))
    like = settings_of(model, tmp_path / "tuned")
    for folder, said in (
        (other, "peft cannot put"),
        (narrow, "is not the model that"),
        (short, "is not the model that"),
    ):
        with pytest.raises(ValueError, match=rf"{said}.*--model"):
            written(model, tmp_path / "out", wanted, is_recorded=False, like=like, base=folder)
    for odd in (
        adapted(r=2),
        adapted(target_modules=["q_proj"]),
        adapted(target_modules=["q_proj", "v_proj", "k_proj"]),
    ):
        with pytest.raises(ValueError, match=r"is not the model that the run trained.*--like"):
            written(odd(loaded(base)), tmp_path / "out", wanted, is_recorded=False, like=like, base=base)
    assert not (tmp_path / "out").exists()


def test_a_configuration_of_another_model_is_refused(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    tied, narrow = llama(tmp_path / "tied", tie_word_embeddings=True), llama(tmp_path / "narrow", hidden_size=8)
    for script in (whole, without_first_layer):
        model = moved(script(loaded(base)))
        for folder, said in (
            (gpt2(tmp_path / "other"), r"model\.\S+ is not in the model.*--format safetensors"),
            (narrow, r"is \(8,\) here and \(16,\) there"),
            (tied, r"lm_head\.weight is not in the model"),
        ):
            with pytest.raises(ValueError, match=said):
                written(model, tmp_path / "out", "hf", is_recorded=False, like=folder)
    with pytest.raises(ValueError, match=r"is a llama, but --model .* a gpt2"):
        written(model, tmp_path / "out", "hf", is_recorded=False, like=base, base=tmp_path / "other")
    with pytest.raises(ValueError, match=r"or has them in other shapes \(model\.layers\.0\."):
        written(model, tmp_path / "out", "hf", is_recorded=False, like=base, base=narrow)
    told = json.loads((base / "config.json").read_text())
    for kind in ("MineForCausalLM", "Trainer"):
        (base / "config.json").write_text(json.dumps(told | {"architectures": [kind]}))
        with pytest.raises(ValueError, match=rf"{kind}.*never run here"):
            written(model, tmp_path / "out", "hf", is_recorded=False, like=base)
    (base / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no config\.json that transformers can use"):
        written(model, tmp_path / "out", "hf", is_recorded=False, like=base)
    assert not (tmp_path / "out").exists()


ALIKE = {"num_attention_heads": 2, "tie_word_embeddings": False}


def test_what_a_run_records_needs_no_configuration_and_refuses_another(tmp_path: Path) -> None:
    """Architectures may have the same tensors and compute something else with them."""
    from transformers import MistralConfig, MistralForCausalLM

    base = llama(tmp_path / "base", attention_bias=False)
    other = tmp_path / "other"
    MistralForCausalLM(MistralConfig(**(SHAPE | ALIKE), num_key_value_heads=2, sliding_window=2)).save_pretrained(other)
    turned = llama(tmp_path / "turned", attention_bias=False, rope_theta=99.0)
    for script in (whole, without_first_layer, adapted()):
        model = moved(script(loaded(base)))
        given = {"like": settings_of(model, tmp_path / "tuned")} if script not in (whole, without_first_layer) else {}
        for folder, said in (
            (other, "other is a mistral, but the run's scripts train a llama"),
            (turned, r"rope_parameters\.rope_theta is 99\.0 here and 10000\.0 there.*scripts' model"),
        ):
            with pytest.raises(ValueError, match=said):
                written(model, tmp_path / "out", "hf", **({"base": folder} | given))
        written(model, tmp_path / "out", "hf", **({"base": base} | given))
        assert_same(loaded(tmp_path / "out"), model)

    model = moved(loaded(base))
    assert "config.json" in written(model, tmp_path / "alone", "hf")
    assert_same(loaded(tmp_path / "alone"), model)
    with pytest.raises(ValueError, match=r"not the others of this LlamaForCausalLM \(model\.layers\.0.*--model FOLDER"):
        written(moved(without_first_layer(loaded(base))), tmp_path / "none", "hf")


def test_the_class_that_is_recorded_is_transformers_own(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):  # as fully_shard makes one
        pass

    model = loaded(llama(tmp_path / "base"))
    model.__class__ = Mine
    written(moved(model), tmp_path / "out", "hf")
    assert_same(loaded(tmp_path / "out"), model)


@pytest.mark.parametrize("told", [{"vocab_size": -1}, {"note": "x" * 300}, {"list": [[[[[1]]]]]}])
def test_a_configuration_that_no_manifest_may_hold_is_not_recorded(told: dict[str, Any], tmp_path: Path) -> None:
    model = loaded(llama(tmp_path / "base"))
    assert with_architecture(RunConfig(name="mine", model=SCRIPTS), model).model.config["vocab_size"] == 64
    model.config.update(told)
    assert with_architecture(RunConfig(name="mine", model=SCRIPTS), model).model == SCRIPTS


def test_a_quantized_model_is_recorded_as_it_is_unpacked_since_exports_are_so(tmp_path: Path) -> None:
    base, wrong = llama(tmp_path / "base"), llama(tmp_path / "wrong", rms_norm_eps=0.1)
    model = moved(adapted()(loaded(base)))
    like = settings_of(model, tmp_path / "tuned")
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    for wanted in ("hf", "peft"):
        written(model, tmp_path / wanted, wanted, like=like, base=base)
        with pytest.raises(ValueError, match=r"rms_norm_eps is 0\.1 here"):
            written(model, tmp_path / "none", wanted, like=like, base=wrong)


def test_who_gives_too_little_is_told_what_to_give(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    model = moved(adapted("mine")(loaded(base)))
    like = settings_of(model, tmp_path / "tuned")
    for places in ({}, {"like": base}, {"base": base}, {"like": tmp_path / "tuned", "base": base}):
        for wanted in ("hf", "peft"):
            with pytest.raises(ValueError, match=r"--like FOLDER, with their adapter_config\.json.*FOLDER/NAME"):
                written(model, tmp_path / "out", wanted, **places)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"is not a folder, and no model .* give --like FOLDER"):
        written(model, tmp_path / "out", "hf", like=tmp_path / "nowhere")

    written(model, tmp_path / "out", "hf", like=like)
    assert_same(loaded(tmp_path / "out"), model)  # adapter_config.json names the base
    told = json.loads((like / "adapter_config.json").read_text())
    for named, said in (("no/such-model", "no/such-model is not a folder"), (None, "give --model FOLDER")):
        (like / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": named}))
        with pytest.raises(ValueError, match=said):
            written(model, tmp_path / "out", "hf", like=like)
    for odd, said in (
        (told | {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'.*--format safetensors"),
        (told | {"peft_type": "IA3"}, "not for low-rank adapters"),
        ({"peft_type": "NONE"}, "cannot be read"),
    ):
        (like / "adapter_config.json").write_text(json.dumps(odd))
        with pytest.raises(ValueError, match=said):
            written(model, tmp_path / "out", "hf", like=like, base=base)


def test_what_peft_does_not_keep_is_merged_or_refused(tmp_path: Path) -> None:
    """A script may train more of its model beside the adapters, or two adapters, or freeze a part of one."""
    base = llama(tmp_path / "base")
    model = adapted()(loaded(base))
    like = settings_of(model, tmp_path / "tuned")
    model.base_model.model.lm_head.requires_grad_(True)
    moved(model)
    written(model, tmp_path / "out", "hf", like=like, base=base)
    assert_same(loaded(tmp_path / "out"), model)
    with pytest.raises(ValueError, match=r"also trained base_model\.model\.lm_head\.weight.*--format hf"):
        written(model, tmp_path / "adapters", "peft", like=like, base=base)

    model = adapted()(loaded(base))
    for name, p in model.named_parameters():
        p.requires_grad_("lora_B" in name)
    for wanted in ("hf", "peft"):
        with pytest.raises(ValueError, match=r"lora_A\.default\.weight is trained only here"):
            written(model, tmp_path / "out", wanted, like=like, base=base)  # type: ignore[arg-type]

    model = adapted()(loaded(base))
    model.add_adapter("second", model.peft_config["default"])
    for _, p in model.named_parameters():
        p.requires_grad_(True)
    with pytest.raises(ValueError, match=r"several adapters \(default, second\).*--format safetensors"):
        written(model, tmp_path / "out", "hf", like=like, base=base)


def test_a_name_of_the_hub_is_looked_for_in_the_cache_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # where ../../etc is nothing
    repository = tmp_path / "cache" / "models--someone--small"
    base = llama(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert find_folder("someone/small", "--model") == base
    model = moved(without_first_layer(loaded(base)))
    written(model, tmp_path / "out", "hf", like=Path("someone/small"))
    assert_same(loaded(tmp_path / "out"), model)
    for name in ("someone/large", "../../etc", "a b"):
        with pytest.raises(ValueError, match="is not a folder, and no model"):
            find_folder(name, "--model")


@torch.no_grad()
def test_a_run_that_names_its_model_is_merged_though_its_embeddings_are_tied(tmp_path: Path) -> None:
    """An adapter on one of two modules that share weights changed both."""
    base = llama(tmp_path / "base", tie_word_embeddings=True)
    wanted = ModelConfig(
        kind="huggingface", folder=str(base), lora=LoraConfig(rank=2, targets=("lm_head", "q_proj")), context=16
    )
    config, model = read_folder(wanted, 4)
    assert model is not None
    moved(model)
    embeddings, parameters = embedding_names(model), trainable(model)
    named = [(name, p.shape, name in embeddings) for name, p in parameters]
    manifest, theta, _ = make_manifest(RunConfig(name="toml", model=config), PeerId("founder"), named, parameters)
    about = About(run=manifest.run, name="toml", step=7, tokens=99, format="hf", model=config)
    export(manifest, theta, tmp_path / "out", about, base=str(base))
    assert_same(loaded(tmp_path / "out"), model)


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_who_lacks_a_library_is_told_to_install_it(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama(tmp_path / "base")
    model = moved(adapted()(loaded(base)))
    like = settings_of(model, tmp_path / "tuned")
    monkeypatch.setitem(sys.modules, library, None)
    for wanted in ("hf", "peft"):
        with pytest.raises(ValueError, match=r"pip install 'p2pdiloco\[hf\]'"):
            written(model, tmp_path / "out", wanted, like=like, base=base)  # type: ignore[arg-type]


def test_options_from_which_nothing_is_taken_are_refused(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    model = loaded(base)
    with pytest.raises(ExportError, match="add --format hf"):
        written(model, tmp_path / "out", "safetensors", like=base)
    with pytest.raises(ExportError, match="add --format hf"):
        written(model, tmp_path / "out", "safetensors", base=base)
    small = ModelConfig(width=16, depth=1, heads=2, context=8)
    manifest, theta, _ = run_of(model)
    manifest = msgspec.structs.replace(manifest, config=msgspec.structs.replace(manifest.config, model=small))
    for wanted in ("hf", "safetensors"):
        about = About(run=manifest.run, name="small", step=7, tokens=99, format=wanted, model=small)  # type: ignore[arg-type]
        with pytest.raises(ExportError, match="--like is for runs of training scripts"):
            export(manifest, theta, tmp_path / "out", about, like=str(base))
        with pytest.raises(ExportError, match="--model is for runs that train adapters"):
            export(manifest, theta, tmp_path / "out", about, base=str(base))
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("own_logging")
def test_the_command_says_what_loads_it_and_where_the_rest_is_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import GPT2ForSequenceClassification

    base = gpt2(tmp_path / "base")
    GPT2ForSequenceClassification.from_pretrained(base).save_pretrained(base)
    capsys.readouterr()
    model = GPT2ForSequenceClassification.from_pretrained(base)
    model.transformer.requires_grad_(False)
    manifest, theta, momentum = run_of(moved(model))
    first = version_zero(manifest, theta, momentum)
    save(folder_of(tmp_path / "state", manifest.run) / "checkpoint", manifest, first.shards, theta, momentum, keep=2)
    command = ["export", str(tmp_path / "state"), "--format", "hf", "--out", str(tmp_path / "out")]
    for options, said in (
        ([], "give --model FOLDER"),
        (["--like", str(gpt2(tmp_path / "other"))], "score.weight is not in the model"),
    ):
        assert main([*command, *options]) == 2
        told = capsys.readouterr()
        assert said in told.err
        assert "to load it" not in told.out
    assert main([*command, "--like", str(base)]) == 0
    told = capsys.readouterr()
    assert f"transformers.GPT2ForSequenceClassification.from_pretrained('{tmp_path / 'out'}')" in told.out
    assert f"what the run did not train is from {base}" in told.out
    again = GPT2ForSequenceClassification.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in again.state_dict().items())


def test_a_chat_model_keeps_its_template_its_special_tokens_and_its_ends(tmp_path: Path) -> None:
    """Without the template it does not chat, without the end of a round it does not stop."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    base = tmp_path / "base"
    shape = SHAPE | {"vocab_size": 272, "num_attention_heads": 2, "eos_token_id": [256, 258]}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(base)
    (base / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))
    names = {"eos_token": "<|turn_end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<|turn|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(base / "tokenizer.json"), **names)
    tokenizer.chat_template = "{% for m in messages %}<|round|>{{ m.content }}<|turn_end|>{% endfor %}"
    tokenizer.save_pretrained(base)
    end = tokenizer.eos_token_id
    GenerationConfig(eos_token_id=end, do_sample=True, top_p=0.9).save_pretrained(base)
    messages = [{"role": "user", "content": "hi"}]
    asked = tokenizer.apply_chat_template(messages)["input_ids"]

    adapter = moved(adapted()(loaded(base)))
    like = settings_of(adapter, tmp_path / "tuned")  # as peers/lora.py saves it: without the tokenizer
    whole = {"like": like, "base": base}
    # A run whose founder recorded the model needs nothing but a tokenizer.
    for wanted, model, places in (
        ("hf", adapter, whole),
        ("peft", adapter, whole),
        ("hf", moved(loaded(base)), {"tokenizer": base}),
    ):
        out = tmp_path / f"{wanted}-{len(places)}"
        written(model, out, wanted, **places)  # type: ignore[arg-type]
        found = AutoTokenizer.from_pretrained(out, local_files_only=True)
        assert found.apply_chat_template(messages)["input_ids"] == asked
        assert (found.eos_token, found.pad_token) == ("<|turn_end|>", "<|pad|>")
        assert found("<|turn|>")["input_ids"] == tokenizer("<|turn|>")["input_ids"], "one token"
        generation = GenerationConfig.from_pretrained(out)
        assert (generation.eos_token_id, generation.top_p) == (end, 0.9)
    written(adapter, tmp_path / "gguf", "gguf", **whole)
    fields = GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    assert fields["tokenizer.ggml.eos_token_id"].contents() == end
    assert fields["tokenizer.ggml.padding_token_id"].contents() == tokenizer.pad_token_id
    assert "tokenizer.ggml.eot_token_id" not in fields, "config.json names two others"


def test_a_tokenizer_that_cannot_be_loaded_is_not_left_out(tmp_path: Path) -> None:
    base = llama(tmp_path / "base")
    (base / "tokenizer.json").write_text("{}")
    with pytest.raises(ExportError, match=r"cannot load the tokenizer in .*base.*--tokenizer"):
        written(loaded(base), tmp_path / "out", "hf", like=base)
    assert not (tmp_path / "out").exists()


def test_statistics_without_a_gradient_are_those_of_the_exporting_peer(tmp_path: Path) -> None:
    """The base's, or a new model's, would be taken for trained ones."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    shape: dict[str, Any] = {"num_channels": 1, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    model = ResNetForImageClassification(ResNetConfig(**shape, layer_type="basic"))
    model.save_pretrained(tmp_path / "base")
    images = 5 + 3 * torch.randn(8, 1, 16, 16)
    for _ in range(9):
        model.train()(images)
    buffers = {name: buffer.clone() for name, buffer in named_buffers(moved(model)).items()}
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "config")
    for like in (tmp_path / "base", tmp_path / "config"):
        written(model, tmp_path / "out", "hf", buffers=buffers, like=like)
        found = ResNetForImageClassification.from_pretrained(tmp_path / "out").eval()
        with torch.no_grad():
            torch.testing.assert_close(found(images).logits, model(images).logits)
        with pytest.raises(ValueError, match=r"running_mean.* are missing.*a machine whose script has trained"):
            written(model, tmp_path / "none", "hf", like=like)
