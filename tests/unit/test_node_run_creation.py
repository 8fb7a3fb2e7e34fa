"""A founder's TOML file: what of it travels, and whether it is that of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import UNSET
from test_training_huggingface import save_llama

from p2pdiloco.node.run_creation import found, is_founded_from, with_own_places
from p2pdiloco.peer.options import LearnerOptions, PeerOptions
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import (
    DataConfig,
    EvaluationConfig,
    HeldOut,
    LoraConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
)
from p2pdiloco.protocol.manifest_validation import decode_manifest
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.training.corpus import held_out_batches, load_corpus
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.evaluation import given_samples, shared_samples


def written(folder: Path, **changes: object) -> RunConfig:
    (folder / "corpus").mkdir(exist_ok=True)
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"file {i} of the corpus\n" * 5)
    config = RunConfig(
        name="founded",
        model=ModelConfig(width=16, depth=1, heads=2, context=8),
        data=DataConfig(kind="files", path=str(folder / "corpus"), pattern="*.txt", held_out_share=0.3),
        schedule=ScheduleConfig(fragments=2, sync_every=4),
    )
    return msgspec.structs.replace(config, **changes)


def test_a_founders_paths_do_not_travel_and_it_finds_its_run_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = written(tmp_path)
    options = with_own_places(PeerOptions(folder=tmp_path / "state"), config)
    manifest, _ = found(config, PeerId("ann"), options)
    assert str(tmp_path).encode() not in manifest.encode()
    assert decode_manifest(manifest.encode(), manifest.run) == manifest
    assert is_founded_from(manifest.config, config)
    elsewhere = msgspec.structs.replace(config.data, path="/moved")
    assert is_founded_from(manifest.config, msgspec.structs.replace(config, data=elsewhere))
    assert not is_founded_from(manifest.config, msgspec.structs.replace(config, seed=1))
    assert is_founded_from(config, config), "a run of a release whose manifests had paths"
    (tmp_path / "state" / "corpus").mkdir(parents=True)
    with pytest.raises(ConfigError, match="give --data FOLDER"):
        found(config, PeerId("ann"), PeerOptions(folder=tmp_path / "state"))


def test_held_out_samples_travel_only_if_they_are_public_or_the_founder_says_so(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = written(tmp_path)
    options = with_own_places(PeerOptions(folder=tmp_path / "state"), config)
    kept, _ = found(config, PeerId("ann"), options)
    assert kept.held_out is UNSET
    assert given_samples(kept) is None
    shared, _ = found(msgspec.structs.replace(config, evaluation=EvaluationConfig(shared=True)), PeerId("ann"), options)
    corpus = load_corpus(config.data, str(tmp_path / "corpus"))
    given = given_samples(decode_manifest(shared.encode(), shared.run))
    assert given is not None
    assert torch.equal(given, torch.cat(list(held_out_batches(corpus, 8, 64))))
    tokens = Corpus(train=corpus.train.int(), held_out=corpus.held_out.int() + 60_000)
    wide = shared_samples(shared.config, tokens)
    assert wide is not None
    assert int(given_samples(msgspec.structs.replace(shared, held_out=wide)).max()) > 60_000  # type: ignore[union-attr]
    negative = HeldOut(symbol=4, samples=b"\xff" * 4 * (shared.config.model.context + 1))
    with pytest.raises(ValueError, match="not tokens"):
        given_samples(msgspec.structs.replace(shared, held_out=negative))
    public = msgspec.structs.replace(config, data=DataConfig(kind="stdlib"))
    assert shared_samples(public, corpus) == shared.held_out
    long = msgspec.structs.replace(config.model, context=1 << 18)
    many = msgspec.structs.replace(shared.config, model=long)
    text = Corpus(train=corpus.train, held_out=corpus.held_out.repeat(2000))
    found_long = shared_samples(many, text)
    assert found_long is not None
    assert len(found_long.samples) == 3 * ((1 << 18) + 1), "as many as there is room for"


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    data = DataConfig(kind="jsonl", path="theirs", tokenizer="tok")
    config = RunConfig(name="x", data=data, model=ModelConfig(kind="huggingface", folder="base"))
    options = PeerOptions(folder=tmp_path)
    own = with_own_places(options, config)
    assert (own.learner.data, own.learner.tokenizer, own.learner.model) == ("theirs", "tok", None)
    given = msgspec.structs.replace(options, learner=LearnerOptions(data="mine", tokenizer="own"))
    assert with_own_places(given, config) == given
    stdlib = RunConfig(name="x", data=DataConfig(kind="stdlib", path="ignored"))
    assert with_own_places(options, stdlib).learner.data is None


def test_adapters_are_founded_on_the_base_of_the_command_line(tmp_path: Path) -> None:
    """Its learner trains on that one: the manifest has its digest, whether the file's folder is there or not."""
    for name in ("transformers", "peft"):
        pytest.importorskip(name, reason="needs the extra hf: pip install '.[hf]'")
    for seed, name in enumerate(("mine", "theirs")):
        save_llama(tmp_path / name, seed)

    def digest(folder: str, given: str | None = None) -> object:
        model = ModelConfig(kind="huggingface", folder=folder, context=8, lora=LoraConfig(targets=("q_proj",)))
        config = written(tmp_path, model=model)
        options = PeerOptions(folder=tmp_path / "state", learner=LearnerOptions(model=given))
        manifest, _ = found(config, PeerId("ann"), with_own_places(options, config))
        assert manifest.config.model.lora is not None
        return manifest.config.model.lora.base_digest

    mine, theirs = str(tmp_path / "mine"), str(tmp_path / "theirs")
    assert digest("nowhere", mine) == digest(theirs, mine) == digest(mine) != digest(theirs)
    with pytest.raises(ConfigError, match=f"{tmp_path}/none.*config.json cannot be read.*--model"):
        digest(mine, str(tmp_path / "none"))


def test_a_base_for_a_run_without_adapters_is_told_before_it_is_founded(tmp_path: Path) -> None:
    options = PeerOptions(folder=tmp_path / "state", learner=LearnerOptions(model="base"))
    config = written(tmp_path)
    with pytest.raises(ConfigError, match="leave it out"):
        found(config, PeerId("ann"), with_own_places(options, config))
