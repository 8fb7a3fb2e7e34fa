"""A founder's TOML file: what of it travels, and whether it is that of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from p2pdiloco.node.foundation import found, is_founded_from, with_own_places
from p2pdiloco.node.kept_runs import ConfigError
from p2pdiloco.peer.options import LearnerOptions, PeerOptions
from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.protocol.manifest import DataConfig, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.protocol.soundness import decode_manifest


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
