"""What a run's model is to other programs: the same numbers, and nothing but data."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import p2pdiloco
from benchmarks import byte_pairs
from benchmarks.byte_pairs import END
from benchmarks.exports import built_in, store
from p2pdiloco.cli.main import main
from p2pdiloco.node.run_creation import make_manifest
from p2pdiloco.protocol.ids import PeerId, RunId
from p2pdiloco.protocol.manifest import DataConfig, LoraConfig, Manifest, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.training.export import ABOUT, About, ExportError, Format, byte_tokenizer, export
from p2pdiloco.training.generation import Sampling, continue_with, continue_with_export
from p2pdiloco.training.models import build_model
from p2pdiloco.training.parameters import (
    BUFFERS,
    MAX_BUFFERS,
    embedding_names,
    read_buffers,
    trainable,
    write_buffers,
)
from p2pdiloco.training.tokenized_dataset import with_tokenizer

HF = pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "tokenizers", "peft"))),
    reason="needs the extra hf: pip install -c constraints.txt '.[hf]'",
)
BYTES = DataConfig()
SMALL = ModelConfig(width=24, depth=2, heads=3, context=16)
TEXT = torch.tensor([list(b"def main(): \x00\xff")])


def founded(config: ModelConfig, model: nn.Module, data: DataConfig = BYTES) -> tuple[Manifest, Tensor]:
    """A run of ``model``, in fragments and shards that cut its tensors."""
    run = RunConfig(name="small", model=config, data=data, schedule=ScheduleConfig(fragments=3, max_shard=1024))
    embeddings, parameters = embedding_names(model), trainable(model)
    named = [(name, p.shape, name in embeddings) for name, p in parameters]
    manifest, theta, _ = make_manifest(run, PeerId("founder"), named, parameters)
    return manifest, theta


def spoken(config: ModelConfig = SMALL) -> tuple[Manifest, Tensor, nn.Module]:
    """A model that is not as it was drawn: a wrong order of its tensors would show in every one."""
    model = build_model(config, 3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5).add_(0.03 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    return *founded(config, model), model


def about(manifest: Manifest, wanted: Format) -> About:
    return About(run=manifest.run, name="small", step=7, tokens=99, format=wanted, model=manifest.config.model)


@torch.no_grad()
def test_the_built_in_transformer_loads_in_three_lines(tmp_path: Path) -> None:
    manifest, theta, model = spoken()
    assert export(manifest, theta, tmp_path / "out", about(manifest, "safetensors")) == ["model.safetensors", ABOUT]
    loaded = p2pdiloco.load_model(tmp_path / "out")
    assert torch.equal(loaded(TEXT), model(TEXT))
    modes = {(tmp_path / "out" / name).stat().st_mode for name in ("model.safetensors", ABOUT)}
    assert len(modes) == 1, "who may read the folder may read the weights"


@HF
@torch.no_grad()
def test_the_built_in_transformer_is_a_llama_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest, theta, model = spoken()
    export(manifest, theta, tmp_path / "out", about(manifest, "hf"))
    told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, output_loading_info=True)
    loaded, information = told
    assert not any(information[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.model_type == "llama"
    torch.testing.assert_close(loaded(TEXT).logits, model(TEXT), rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    for text in ("def f(x):\n\treturn x", "naïve ☃ \x00", " two  blanks ", "<|endoftext|>"):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text


@HF
def test_what_is_generated_is_the_same_from_the_run_and_from_its_exports(tmp_path: Path) -> None:
    manifest, theta, _ = spoken()
    for wanted in ("hf", "safetensors"):
        export(manifest, theta, tmp_path / wanted, about(manifest, wanted))  # type: ignore[arg-type]
    how = Sampling(tokens=8, temperature=0.0)  # within the context: the built-in model looks at no more than that
    texts = {continue_with_export(tmp_path / wanted, "def ", how) for wanted in ("hf", "safetensors")}
    assert texts == {continue_with(manifest, theta, "def ", how)}


@HF
@pytest.mark.usefixtures("own_logging")
@torch.no_grad()
def test_a_built_in_model_that_reads_tokens_goes_out_with_its_tokenizer(tmp_path: Path) -> None:
    """Not with one of bytes, which fits no token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data, folder = DataConfig(kind="text", separator=END, tokenizer_digest=""), tmp_path / "tokenizer"
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("def main(): return main\n" * 40)
    byte_pairs.write(["def main(): return main\n" * 40], 264, folder)
    data = with_tokenizer(data, str(tmp_path / "texts"), str(folder))
    config = msgspec.structs.replace(SMALL, vocabulary=272, context=32)
    model = build_model(config, 3)
    manifest, theta = founded(config, model, data)
    for wanted in ("hf", "safetensors"):
        export(manifest, theta, tmp_path / wanted, about(manifest, wanted), tokenizer=str(folder))  # type: ignore[arg-type]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    tokens = tokenizer("def main(): naïve ☃" + END)["input_ids"]
    assert len(tokens) < len("def main(): naïve ☃".encode())
    assert tokenizer.decode(tokens) == "def main(): naïve ☃" + END
    assert tokens[-1] == tokenizer.eos_token_id == loaded.config.eos_token_id == loaded.generation_config.eos_token_id
    torch.testing.assert_close(
        loaded(torch.tensor([tokens])).logits, model(torch.tensor([tokens])), rtol=1e-5, atol=1e-5
    )
    how = Sampling(tokens=4, temperature=0.0)
    texts = {continue_with_export(tmp_path / wanted, "def ", how) for wanted in ("hf", "safetensors")}
    assert texts == {continue_with(manifest, theta, "def ", how, tokenizer=str(folder))}

    assert "tokenizer.json" not in export(manifest, theta, tmp_path / "none", about(manifest, "hf"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))
    with pytest.raises(ExportError, match=r"the tokenizer\.json here has the digest"):
        export(manifest, theta, tmp_path / "bad", about(manifest, "hf"), tokenizer=str(tmp_path / "other"))
    with pytest.raises(ExportError, match=r"the tokenizer\.json here has the digest"):
        continue_with(manifest, theta, "def ", how, tokenizer=str(tmp_path / "other"))
    manifest, theta, _ = spoken()
    with pytest.raises(ExportError, match=r"reads bytes.*leave --tokenizer out"):
        export(manifest, theta, tmp_path / "bad", about(manifest, "hf"), tokenizer=str(folder))
    assert not (tmp_path / "bad").exists()


def test_no_byte_is_lost_in_the_tokenizer() -> None:
    tokens = byte_tokenizer(256)["model"]["vocab"]
    assert sorted(tokens.values()) == list(range(256))
    assert len(tokens) == 256
    assert max(byte_tokenizer(100)["model"]["vocab"].values()) == 99, "the model has no more symbols"


@HF
@torch.no_grad()
def test_a_hugging_face_model_goes_out_as_it_came(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from p2pdiloco.training.models import build

    kind = {"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32}
    shape: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}
    config = ModelConfig(kind="huggingface", config=kind | shape, context=16)
    model: Any = build(config, 5)
    manifest, theta = founded(config, model)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))
    export(manifest, theta, tmp_path / "out", about(manifest, "hf"), tokenizer=str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    torch.testing.assert_close(loaded(TEXT).logits, model.eval()(TEXT).logits)
    assert loaded.config.use_cache
    how = Sampling(tokens=4, seed=3)
    text = continue_with(manifest, theta, "def ", how, tokenizer=str(tmp_path))
    assert text == continue_with_export(tmp_path / "out", "def ", how)
    with pytest.raises(ExportError, match="--tokenizer FOLDER"):
        continue_with(manifest, theta, "def ", how)


@HF
@torch.no_grad()
def test_adapters_go_out_for_peft_and_merged(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from p2pdiloco.training.huggingface import read_folder

    LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path / "base")
    wanted = ModelConfig(kind="huggingface", folder=str(tmp_path / "base"), lora=LoraConfig(rank=2), context=16)
    config, adapted = read_folder(wanted, 4)
    assert adapted is not None
    for _, p in trainable(adapted):
        p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    manifest, theta = founded(config, adapted)
    expected = adapted.eval()(TEXT).logits

    export(manifest, theta, tmp_path / "adapters", about(manifest, "peft"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", local_files_only=True)
    assert (base(TEXT).logits - expected).abs().max() > 1e-3, "the adapters do something"
    torch.testing.assert_close(PeftModel.from_pretrained(base, tmp_path / "adapters")(TEXT).logits, expected)

    export(manifest, theta, tmp_path / "whole", about(manifest, "hf"), base=str(tmp_path / "base"))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", local_files_only=True)
    torch.testing.assert_close(whole(TEXT).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_scripts_model_goes_out_under_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    manifest, theta = founded(ModelConfig(kind="external"), model)
    with pytest.raises(ValueError, match=r"give --like FOLDER, with its config\.json"):
        export(manifest, theta, tmp_path / "out", about(manifest, "hf"))
    assert not list(tmp_path.iterdir()), "nothing is left of a failure"
    files = export(manifest, theta, tmp_path / "out", about(manifest, "safetensors"))
    assert files == ["model.safetensors", ABOUT]
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], p) for name, p in model.state_dict().items())
    assert len(written) == 4


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    manifest, theta, _ = spoken()
    precious = tmp_path / "home" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("precious")
    with pytest.raises(ExportError, match="holds no earlier export"):
        export(manifest, theta, precious.parent, about(manifest, "safetensors"))
    with pytest.raises(ExportError, match="is a file"):
        export(manifest, theta, precious, about(manifest, "safetensors"))
    assert precious.read_text() == "precious"
    for _ in range(2):
        export(manifest, theta, tmp_path / "out", about(manifest, "safetensors"))
    told = msgspec.json.decode((tmp_path / "out" / ABOUT).read_bytes(), type=About)
    assert (told.step, told.tokens, told.format) == (7, 99, "safetensors")


def test_an_export_replaces_an_earlier_ones_files_and_no_others(tmp_path: Path) -> None:
    """Somebody may have put notes beside it. Before, they were removed with the folder."""
    manifest, theta, _ = spoken()
    out, outside = tmp_path / "out", tmp_path / "outside"
    assert "config.json" in export(manifest, theta, out, about(manifest, "hf"))
    (out / "notes.txt").write_text("mine")
    outside.write_text("mine, too")
    told = msgspec.json.decode((out / ABOUT).read_bytes(), type=About)
    liar = msgspec.structs.replace(told, files=(*told.files, "../outside"))
    (out / ABOUT).write_bytes(msgspec.json.encode(liar))
    assert export(manifest, theta, out, about(manifest, "safetensors")) == ["model.safetensors", ABOUT]
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "notes.txt", ABOUT]
    assert outside.read_text() == "mine, too"


def test_what_no_export_has_written_is_in_nobodys_way(tmp_path: Path) -> None:
    """Nothing is lost: what was there is there, and so is the earlier export."""
    manifest, theta, _ = spoken()
    out = tmp_path / "out"
    export(manifest, theta, out, about(manifest, "safetensors"))
    for name, make in (("config.json", Path.mkdir), ("tokenizer.json", lambda path: path.write_text("mine"))):
        make(out / name)
        with pytest.raises(ExportError, match=f"holds {name}, not written by an export"):
            export(manifest, theta, out, about(manifest, "hf"))
        assert sorted(path.name for path in out.iterdir()) == sorted([name, "model.safetensors", ABOUT])
        (out / name).rename(tmp_path / name)
    told = msgspec.json.decode((out / ABOUT).read_bytes(), type=About)
    odd = msgspec.structs.replace(told, files=(*told.files, "x" * 300, "a\0b", "", ".", "..", "model.safetensors/"))
    (out / ABOUT).write_bytes(msgspec.json.encode(odd))
    export(manifest, theta, out, about(manifest, "hf"))
    assert not list(tmp_path.glob("*.part"))


def test_an_export_that_is_cut_off_is_replaced_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says of nothing that it is what it was."""
    manifest, theta, _ = spoken()
    out = tmp_path / "out"
    export(manifest, theta, out, about(manifest, "hf"))
    put = Path.replace

    def fails(self: Path, target: Path) -> Path:
        if self.name == "model.safetensors":
            raise OSError(errno.EIO, "gone")
        return put(self, target)

    for wanted in ("hf", "safetensors"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fails)
            with pytest.raises(OSError, match="gone"):
                export(manifest, theta, out, about(manifest, wanted))
        assert not (out / ABOUT).exists()
    (out / ABOUT).touch()  # as a full disk leaves it
    assert "config.json" in [path.name for path in out.iterdir()]
    export(manifest, theta, out, about(manifest, "safetensors"))
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", ABOUT]


def test_an_export_follows_a_link(tmp_path: Path) -> None:
    """To another file system; its temporary files lie there, too."""
    manifest, theta, _ = spoken()
    (tmp_path / "out").symlink_to(tmp_path / "far" / "away")
    (tmp_path / "far").mkdir()
    for _ in range(2):
        export(manifest, theta, tmp_path / "out", about(manifest, "safetensors"))
        assert (tmp_path / "out").is_symlink()
        assert sorted(path.name for path in (tmp_path / "far/away").iterdir()) == ["model.safetensors", ABOUT]


@pytest.mark.parametrize("wanted", ["safetensors", "hf"])
def test_a_disk_that_takes_no_more_is_the_systems_error(tmp_path: Path, wanted: Format) -> None:
    """As a limit on a file's size is, of which safetensors makes an error of its own."""
    manifest, theta, _ = spoken()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"model.safetensors") as found:
            export(manifest, theta, tmp_path / "out", about(manifest, wanted))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "wanted", "sentence"),
    [(SMALL, "peft", "--format hf"), (ModelConfig(kind="external"), "peft", "--format safetensors")],
)
def test_a_format_that_the_run_has_not_is_refused(
    config: ModelConfig, wanted: Format, sentence: str, tmp_path: Path
) -> None:
    manifest, theta = founded(config, build_model(SMALL, 0))
    with pytest.raises(ExportError, match=sentence):
        export(manifest, theta, tmp_path / "out", about(manifest, wanted))


def test_what_is_no_export_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        p2pdiloco.load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"what is this")
    with pytest.raises(ExportError, match="is not what"):
        p2pdiloco.load_model(tmp_path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ExportError, match="is not what"):
        p2pdiloco.load_model(tmp_path)


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_what_a_script_trained_is_loaded_into_its_model_however_that_is_wrapped(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """``load_state_dict(..., strict=False)`` loads nothing into a compiled model, and says nothing."""
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).requires_grad_(False))
    written = {name: p.detach().clone() for name, p in trained.named_parameters() if p.requires_grad}
    safetensors.torch.save_file(written, tmp_path / "model.safetensors")
    model = wrap(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).requires_grad_(False)))
    frozen = model.get_submodule("1").weight.clone()
    for place in (tmp_path, tmp_path / "model.safetensors"):
        nn.init.zeros_(model.get_submodule("0").weight)
        p2pdiloco.load_into(model, place)
        assert torch.equal(model.get_submodule("0").weight, written["0.weight"])
        assert torch.equal(model.get_submodule("1").weight, frozen)
    for other, said in (
        (nn.Sequential(nn.Linear(2, 4)), r"0.bias is \(4,\) here and \(3,\) there; 0.weight is"),
        (nn.Sequential(nn.Linear(2, 3, bias=False)), "0.bias is not in the model"),
        (nn.Sequential(nn.Linear(2, 3, device="meta")), "without memory"),
    ):
        with pytest.raises(ExportError, match=said):
            p2pdiloco.load_into(other, tmp_path)
    for infers in (nn.Linear(2, 3).requires_grad_(False), nn.Linear(2, 3)):
        whole = nn.Sequential(infers, nn.Linear(3, 1))
        p2pdiloco.load_into(whole, tmp_path)
        assert torch.equal(whole[0].weight, written["0.weight"]), "whatever requires a gradient here"
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ExportError, match="is not what"):
        p2pdiloco.load_into(model, tmp_path)


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


@torch.no_grad()
def test_statistics_without_a_gradient_go_out_and_are_loaded_again(tmp_path: Path) -> None:
    """A model that has BatchNorm's statistics of a new one answers at random in evaluation mode."""
    images = 5 + 3 * torch.randn(8, 1, 4, 4)
    model = normalized()
    for _ in range(9):
        model(images)
    manifest, theta = founded(ModelConfig(kind="external"), model)
    write_buffers(tmp_path, manifest.run, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    buffers = read_buffers(tmp_path, manifest.run)
    assert not read_buffers(tmp_path, RunId("another")), "a state folder may be used again"
    export(manifest, theta, tmp_path / "out", about(manifest, "safetensors"), buffers=buffers)
    assert set(msgspec.json.decode((tmp_path / "out" / ABOUT).read_bytes(), type=About).buffers) == set(buffers)
    new = normalized()
    p2pdiloco.load_into(new, tmp_path / "out")
    assert torch.equal(new.eval()(images), model.eval()(images))

    export(manifest, theta, tmp_path / "out", about(manifest, "safetensors"))  # of a peer that only fetched the run
    new = normalized()
    with pytest.raises(ExportError, match=r"buffers \(1.running_mean, 1.running_var.* are missing.*strict=False"):
        p2pdiloco.load_into(new, tmp_path / "out")
    p2pdiloco.load_into(new, tmp_path / "out", strict=False)
    assert torch.equal(new.get_submodule("1").get_buffer("running_mean"), torch.zeros(4))


def test_buffers_are_saved_when_they_have_changed_and_never_broken_ones(tmp_path: Path) -> None:
    model, run = normalized(), RunId("mine")
    model.register_buffer("mask", torch.full((3,), -torch.inf))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    write_buffers(tmp_path, run, model)
    assert "cache" not in read_buffers(tmp_path, run), "no state_dict has it"
    first = (tmp_path / BUFFERS).stat().st_ino
    write_buffers(tmp_path, run, model)
    assert (tmp_path / BUFFERS).stat().st_ino == first
    model(torch.full((2, 1, 4, 4), torch.nan))
    write_buffers(tmp_path, run, model)
    assert not read_buffers(tmp_path, run)["1.running_mean"].isnan().any()
    model.register_buffer("weights", torch.zeros(1).expand(MAX_BUFFERS + 1))
    (tmp_path / BUFFERS).write_bytes(b"torn")
    write_buffers(tmp_path, run, model)
    with pytest.raises(ValueError, match=r"is damaged.*remove it"):
        read_buffers(tmp_path, run)


@HF
@pytest.mark.usefixtures("own_logging")
def test_an_export_has_a_card_and_names_no_folder_of_this_machine_beside_one_file(tmp_path: Path) -> None:
    store(built_in(tmp_path), tmp_path / "state")
    out = tmp_path / "out"
    words = ["export", str(tmp_path / "state"), "--format", "hf", "--out", str(out), "--license", "mit"]
    assert main(words) == 0
    shown = b"".join(path.read_bytes() for path in out.iterdir() if path.name != ABOUT)
    assert str(tmp_path).encode() not in shown
    _, header, text = (out / "README.md").read_text().split("---\n", 2)
    told = dict(line.split(": ", 1) for line in header.splitlines())
    assert {name: json.loads(value) for name, value in told.items()} == {
        "library_name": "transformers",
        "tags": ["p2pdiloco", "diloco"],
        "license": "mit",
        "pipeline_tag": "text-generation",
    }
    for fact in ("run", "data", "tokens merged", "peers", "held-out loss"):
        assert f"\n| {fact}" in text
