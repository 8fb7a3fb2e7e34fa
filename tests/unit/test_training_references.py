"""The reference runs' configuration files are sound and describe the models that their comments promise."""

from pathlib import Path

import msgspec
import pytest

from p2pdiloco.protocol.manifest import RunConfig, config_problems
from p2pdiloco.tensors.fragments import tensor_specs
from p2pdiloco.training.transformer import build_model, named_tensors

FILES = sorted((Path(__file__).parents[2] / "peers").glob("*.toml"))
PARAMETERS = {"stdlib-tiny": 869_504, "stdlib-10m": 10_818_432, "text-files": 4_951_296}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_reference_run(path: Path) -> None:
    config = msgspec.toml.decode(path.read_bytes(), type=RunConfig)
    assert config.name == path.stem
    specs = tensor_specs(named_tensors(build_model(config.model, config.seed)), config.schedule.fragments)
    assert config_problems(config, tensors=len(specs)) == []
    assert {s.fragment for s in specs} == set(range(config.schedule.fragments))
    assert sum(s.elements for s in specs) == PARAMETERS[config.name]
