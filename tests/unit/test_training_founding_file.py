"""What a script founds its run with comes back whole, in the model's order, and nothing torn is taken."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from torch.testing._internal.two_tensor import TwoTensor

import p2pdiloco
from p2pdiloco.node.run_creation import found_from_script
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.manifest import Layout, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.swarm.run_index import ConfigError
from p2pdiloco.training import founding_file

CONFIG = RunConfig(name="story", model=ModelConfig(kind="external"), schedule=ScheduleConfig(fragments=1, sync_every=4))
NAMED = [("z", torch.arange(6.0).view(2, 3)), ("a", torch.full((4,), 0.5, dtype=torch.bfloat16)), ("m", torch.ones(1))]


def write(folder: Path) -> Path:
    path = folder / founding_file.NAME
    founding_file.write(path, CONFIG, NAMED, frozenset({"a"}))
    return path


def test_it_comes_back_in_the_models_order_as_float32(tmp_path: Path) -> None:
    read = founding_file.read(write(tmp_path))
    assert read.config == CONFIG
    assert read.embeddings == {"a"}
    assert read.shapes == (("z", (2, 3)), ("a", (4,)), ("m", (1,)))
    for (name, tensor), (expected, given) in zip(read.parameters(), NAMED, strict=True):
        assert name == expected
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, given.float())


def test_what_is_written_in_pieces_is_version_zero_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end where they like; parameters may be of any type, and lie in memory as they like."""
    monkeypatch.setattr(founding_file, "PIECE", 5)
    random = torch.Generator().manual_seed(1)
    wide = torch.randn(7, 3, generator=random).t()
    named = [
        ("b", torch.randn(11, generator=random).bfloat16()),
        ("a", wide),
        ("c", torch.randn(5, 5, generator=random)),
    ]
    path = tmp_path / founding_file.NAME
    founding_file.write(path, CONFIG, named, frozenset())
    manifest, initial = found_from_script(path, PeerId("ann"))
    layout, (theta, momentum) = Layout.of(manifest), initial.take()
    for index, start in zip(layout.order, layout.starts, strict=True):
        expected = named[index][1].float().reshape(-1)
        assert torch.equal(theta[start : start + expected.numel()], expected)
    assert not momentum.any()
    plain = safetensors.torch.load_file(path)
    assert all(torch.equal(plain[name], tensor.float()) for name, tensor in named), "others can read it"


class Deadly(torch.Tensor):
    """Whoever writes it is killed."""

    def detach(self) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_script_that_is_killed_while_it_founds_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / founding_file.NAME
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            founding_file.write(path, CONFIG, [*NAMED, ("n", torch.ones(3).as_subclass(Deadly))], frozenset())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [half.name.endswith(".part") for half in tmp_path.iterdir()] == [True], "it had begun"
    with pytest.raises(ConfigError):
        found_from_script(path, PeerId("ann"))
    assert write(tmp_path) == path
    assert list(tmp_path.iterdir()) == [path], "and what it left is gone"
    found_from_script(path, PeerId("ann"))


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
        with pytest.raises(ConfigError, match="remove it, and the script founds its run again"):
            found_from_script(path, PeerId("ann"))
    path.unlink()
    with pytest.raises(ConfigError):
        found_from_script(path, PeerId("ann"))


GIVEN: dict[str, Any] = {
    "run": "story",
    "access": "invite",
    "total_steps": 100,
    "n_fragments": 2,
    "sync_every": 4,
    "fragment_sync_delay": 2,
    "min_quorum": 1,
    "outer_lr": 0.4,
    "outer_momentum": 0.7,
    "codec": "int4",
    "merge": "rda",
}


def test_a_run_that_was_founded_otherwise_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    for quorum in (GIVEN["min_quorum"], 3):
        config = founding_file.settings({**GIVEN, "min_quorum": quorum, "outer_lr": GIVEN["outer_lr"]}, tensors=2)
        founding_file.write_once(
            tmp_path / "f",
            config,
            list(model.named_parameters()),
            frozenset(),
            {"min_quorum": quorum, "outer_lr": None, "total_steps": 900},
        )
        if quorum != 3:
            assert not caplog.records
    assert (
        f"run {GIVEN['run']} was founded with min_quorum={GIVEN['min_quorum']} and keeps these settings; this script "
        "has min_quorum=3, which is ignored"
    ) in caplog.text
    assert founding_file.read(tmp_path / "f").config.schedule.min_quorum == GIVEN["min_quorum"]


def test_a_script_that_wants_another_end_is_told_how_to_prolong_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for wanted in (None, 100):
        founding_file.tell_end("story", wanted, 100, tmp_path)
        assert not caplog.records
    founding_file.tell_end("story", 900, 100, tmp_path)
    assert "ends at step 100, and this script's total_steps=900 is ignored. Its founder" in caplog.text
    assert f"p2pdiloco prolong {tmp_path} --steps N" in caplog.text


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("run", "a b/c", "run = 'a b/c': write a text of letters, digits, dots, dashes and underscores"),
        ("run", "..", "letters, digits, dots, dashes and underscores, and not . or .."),
        ("run", "\ud800", "is not valid text: it has half of a surrogate pair"),
        ("codec", "\ud800", "is not valid text: it has half of a surrogate pair"),
        ("run", "x" * 65, "write a text with a length of at most 64"),
        ("access", "all", "access = 'all': choose one of invite, list, open"),
        ("total_steps", 0, "total_steps = 0: write a whole number of at least 1"),
        ("total_steps", "many", "total_steps = 'many': write a whole number"),
        ("n_fragments", 0, "n_fragments = 0: write a whole number of at least 1"),
        ("n_fragments", 3, "sync_every = 4 must be a multiple of n_fragments = 3"),
        ("n_fragments", 4, "n_fragments = 4 must be at most the model's 2 tensors"),
        ("sync_every", 0, "sync_every = 0: write a whole number of at least 1"),
        ("fragment_sync_delay", 4, "fragment_sync_delay = 4 must be less than sync_every = 4"),
        ("min_quorum", 0, "min_quorum = 0: write a whole number of at least 1"),
        ("outer_lr", 0.0, "outer_lr = 0.0: write a number above 0.0"),
        ("outer_momentum", 1.0, "outer_momentum = 1.0: write a number below 1.0"),
        ("total_steps", 3, "total_steps = 3 is less than sync_every = 4"),
        ("merge", "mean", "merge = 'mean': choose one of direct, rda"),
        ("codec", "int3", "codec = 'int3': choose one of auto, bf16, e3m0, int2, int4, int8"),
    ],
)
def test_what_a_script_cannot_have_is_said_with_its_argument_before_anything_is_written(
    tmp_path: Path, argument: str, value: object, said: str
) -> None:
    with pytest.raises(founding_file.FoundationError) as error:
        founding_file.settings({**GIVEN, argument: value}, tensors=2)
    assert said in str(error.value)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(p2pdiloco.DiLoCoError) as told:
        p2pdiloco.DiLoCo(model, optimizer, tokens_per_step=8, state=tmp_path / "state", **{**GIVEN, argument: value})
    assert str(told.value) == str(error.value)
    assert not (tmp_path / "state").exists()


def test_what_a_script_may_have_is_what_its_node_reads(tmp_path: Path) -> None:
    config = founding_file.settings(GIVEN, tensors=3)
    assert (config.name, config.inner.steps, config.inner.warmup, config.codec.down) == ("story", 100, 0, "int4")
    assert (config.model.kind, config.evaluation.every, config.outer.learning_rate) == ("external", 0, 0.4)
    path = tmp_path / founding_file.NAME
    founding_file.write(path, config, NAMED, frozenset())
    assert founding_file.read(path).config == config


def test_it_is_written_once_and_not_taken_for_another_runs(tmp_path: Path) -> None:
    path = tmp_path / founding_file.NAME
    founding_file.write_once(path, CONFIG, NAMED, frozenset(), {})
    first = path.read_bytes()
    founding_file.write_once(path, CONFIG, [("z", torch.ones(2, 3))], frozenset(), {})
    assert path.read_bytes() == first, "the run that was founded goes on"
    with pytest.raises(
        founding_file.FoundationError, match=r"belongs to run story, .*give run other a folder of its own \(state="
    ):
        founding_file.write_once(path, msgspec.structs.replace(CONFIG, name="other"), NAMED, frozenset(), {})
    assert path.read_bytes() == first


class Adapted(torch.nn.Module):
    """A frozen base with something that is trained."""

    def __init__(self, base: torch.nn.Module, name: str = "") -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapter = torch.nn.Linear(2, 2)
        self.config = SimpleNamespace(name_or_path=name)


def config_of(model: torch.nn.Module) -> RunConfig:
    return founding_file.with_frozen(CONFIG, model)


def test_a_script_with_another_base_is_told_with_both_names(caplog: pytest.LogCaptureFixture) -> None:
    """One that is the same, in whatever type, is not; nor is one in a run of before, which does not say."""
    base = torch.nn.Linear(300, 200)
    of_hub = config_of(Adapted(base, "org/Base-1B"))
    for same in (copy.deepcopy(base), copy.deepcopy(base).bfloat16(), torch.nn.Linear(300, 200).requires_grad_(False)):
        if same.weight.dtype == torch.float32:
            same.load_state_dict(base.state_dict())
        founding_file.tell_other_base(of_hub, config_of(Adapted(same, "/home/me/base")))
    founding_file.tell_other_base(CONFIG, of_hub)
    founding_file.tell_other_base(of_hub, CONFIG)
    assert not caplog.records
    tuned = copy.deepcopy(base)
    tuned.weight.data *= 1.01
    founding_file.tell_other_base(of_hub, config_of(Adapted(tuned, "/home/me/base")))
    (record,) = caplog.records
    assert "trains on the frozen parameters of org/Base-1B (fingerprint " in record.getMessage()
    assert "this script has those of Adapted (" in record.getMessage(), "no path travels"


class Params4bit(torch.nn.Parameter):
    """As bitsandbytes keeps a weight: two values in a byte, and a scale for each block in ``quant_state``."""

    quant_state: Any


def packed(base: torch.nn.Linear, scale: float = 1.0) -> torch.nn.Linear:
    found = copy.deepcopy(base)
    values = (base.weight.data.flatten() * 8 + 8).clamp(0, 15).byte()
    weight = torch.Tensor._make_subclass(Params4bit, (values[::2] << 4 | values[1::2]).view(-1, 1), False)
    weight.quant_state = SimpleNamespace(absmax=torch.full((4,), scale), shape=base.weight.shape)
    found.weight = weight  # type: ignore[assignment]
    return found


def of_torchao(base: torch.nn.Linear, scale: float = 1.0) -> torch.nn.Linear:
    found = copy.deepcopy(base)
    inner = TwoTensor(base.weight.data.clone(), torch.full_like(base.weight, scale))  # type: ignore[no-untyped-call]
    found.weight = torch.nn.Parameter(inner, requires_grad=False)
    return found


@pytest.mark.parametrize("quantized", [packed, of_torchao])
def test_a_quantized_base_is_told_from_another_one(quantized: Any, caplog: pytest.LogCaptureFixture) -> None:
    """By its packed weights and their scales. Its norms say whether it may be the same base."""

    def run(base: torch.nn.Linear, *norms: float) -> RunConfig:
        layers = [torch.nn.LayerNorm(4) for _ in norms]
        for layer, norm in zip(layers, norms, strict=True):
            torch.nn.init.constant_(layer.weight, norm)
        return config_of(Adapted(torch.nn.Sequential(base, *layers)))

    def told(own: RunConfig) -> str:
        caplog.clear()
        founding_file.tell_other_base(founders, own)
        return caplog.text

    one, other = torch.nn.Linear(60, 40), torch.nn.Linear(60, 40)
    founders = run(quantized(one), 1.0)
    assert not told(run(quantized(one), 1.0))
    for base in (one, quantized(other), quantized(one, scale=2.0)):
        assert "): the same base in another precision (4, 8, 16 bits), or fine-tuned" in told(run(base, 1.0))
        assert "): a different base. " in told(run(base, 2.0))
    assert "): a different base, or the same one in another precision" in told(run(one))


def test_only_what_is_frozen_is_in_the_fingerprint() -> None:
    model = Adapted(torch.nn.Linear(4, 4))
    before = config_of(model)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=RunConfig) == before
    model.adapter.weight.data += 1.0
    assert config_of(model) == before
    assert config_of(torch.nn.Linear(4, 4)) is CONFIG, "nothing is frozen"
    model.base = torch.nn.Linear(4, 4, device="meta").requires_grad_(False)
    assert config_of(model) is CONFIG, "no values to compare"
    assert b"frozen" not in msgspec.msgpack.encode(CONFIG), "manifests of before keep their bytes"
