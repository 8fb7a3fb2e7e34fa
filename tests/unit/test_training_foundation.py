"""What a script founds its run with comes back whole, in the model's order, and nothing torn is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from p2pdiloco.node.foundation import found_from_script
from p2pdiloco.node.kept_runs import ConfigError
from p2pdiloco.protocol.identifiers import PeerId
from p2pdiloco.protocol.manifest import ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.training import foundation

CONFIG = RunConfig(name="story", model=ModelConfig(kind="external"), schedule=ScheduleConfig(fragments=1, sync_every=4))
NAMED = [("z", torch.arange(6.0).view(2, 3)), ("a", torch.full((4,), 0.5, dtype=torch.bfloat16)), ("m", torch.ones(1))]


def write(folder: Path) -> Path:
    path = folder / foundation.NAME
    foundation.write(path, CONFIG, NAMED, frozenset({"a"}))
    return path


def test_it_comes_back_in_the_models_order_as_float32(tmp_path: Path) -> None:
    read = foundation.read(write(tmp_path))
    assert read.config == CONFIG
    assert read.embeddings == {"a"}
    assert [name for name, _ in read.named] == ["z", "a", "m"]
    for (_, tensor), (_, given) in zip(read.named, NAMED, strict=True):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, given.float())


def test_of_one_founder_it_always_makes_the_same_run(tmp_path: Path) -> None:
    path = write(tmp_path)
    first, second = (found_from_script(path, PeerId("ann"))[0] for _ in range(2))
    assert first.run == second.run
    assert [(t.name, t.merge) for t in first.tensors] == [("z", "rda"), ("a", "direct"), ("m", "rda")]
    assert found_from_script(path, PeerId("bob"))[0].run != first.run, "the founder is named in the manifest"


def test_a_torn_one_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    for torn in (b"", data[:20], data[:-1], data.replace(b"story", b"st\\ry")):
        path.write_bytes(torn)
        with pytest.raises(ConfigError, match="remove it, and the script founds its run anew"):
            found_from_script(path, PeerId("ann"))
    path.unlink()
    with pytest.raises(ConfigError):
        found_from_script(path, PeerId("ann"))
