"""The reference runs' configuration files are sound and describe the models that their comments promise."""

from pathlib import Path

import msgspec
import pytest

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.node.run_creation import SHIPPED, find_run, read_config
from p2pdiloco.protocol.manifest import RunConfig
from p2pdiloco.protocol.manifest_validation import config_problems
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.training.models import build_model, named_tensors

PARAMETERS = {"stdlib-tiny": 869_504, "stdlib-10m": 10_818_432, "text-files": 4_951_296}
FILES = sorted(path for path in SHIPPED.glob("*.toml") if path.stem in PARAMETERS)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_reference_run(path: Path) -> None:
    config = msgspec.toml.decode(path.read_bytes(), type=RunConfig)
    assert config.name == path.stem
    specs = tensor_specs(named_tensors(build_model(config.model, config.seed)), config.schedule.fragments)
    assert config_problems(config, tensors=len(specs)) == []
    assert {s.fragment for s in specs} == set(range(config.schedule.fragments))
    assert sum(s.elements for s in specs) == PARAMETERS[config.name]


def test_a_shipped_one_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_config(find_run("stdlib-tiny")).name == "stdlib-tiny"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    assert find_run("mine.toml") == Path("mine.toml")


def test_a_typo_is_told_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"did you mean stdlib-tiny\?.*shipped with p2pdiloco: .*text-files"):
        find_run("stdlib-tinny.toml")
    with pytest.raises(ConfigError, match="no such file; shipped"):
        find_run("something/else.toml")
