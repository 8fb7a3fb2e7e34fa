"""A learner's own state: what is taken comes back; what does not fit is refused whole."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from p2pdiloco.protocol.manifest import InnerConfig
from p2pdiloco.training.corpus import Batches
from p2pdiloco.training.dataset_files import Corpus
from p2pdiloco.training.optimizer_state import PIECE, InnerStateError, InnerStateFile, parts, put, take
from p2pdiloco.training.optimizers import inner_optimizers

Optimizers = list[torch.optim.Optimizer]


def corpus() -> Corpus:
    data = torch.arange(200, dtype=torch.uint8)
    return Corpus(train=data, held_out=data)


def make(width: int = 3, kind: Literal["adamw", "muon"] = "adamw") -> tuple[nn.Module, Optimizers, Batches]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4), nn.Linear(4, 1))
    optimizers = inner_optimizers(model, InnerConfig(optimizer=kind, learning_rate=0.1))
    return model, optimizers, Batches(corpus(), 8, 2, "seed")


def step(model: nn.Module, optimizers: Optimizers, batches: Batches, width: int = 3) -> None:
    value = model(next(batches)[:, :width].float()).square().mean()
    value.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def trained(kind: Literal["adamw", "muon"] = "adamw") -> tuple[nn.Module, Optimizers, Batches]:
    three = make(kind=kind)
    for _ in range(4):
        step(*three)
    return three


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_goes_on_with_the_same_bits(kind: Literal["adamw", "muon"]) -> None:
    model, optimizer, batches = trained(kind)
    taken = {name: value.clone() for name, value in take(optimizer, batches, 4).items()}
    other, fresh, stream = make(kind=kind)
    other.load_state_dict(model.state_dict())
    assert put(taken, fresh, stream) == 4
    for _ in range(3):
        step(model, optimizer, batches)
        step(other, fresh, stream)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_only_what_is_small_is_copied_when_it_is_taken(tmp_path: Path) -> None:
    """Counters are of that moment. The rest is read while it is written, and training does not wait for that."""
    three = trained()
    taken = take(three[1], three[2], 4)
    states = [state for optimizer in three[1] for state in optimizer.state.values()]
    assert states
    places = {value.data_ptr() for value in taken.values()}
    for state in states:
        assert {value.data_ptr() in places for value in state.values() if value.dim()} == {True}
        assert {value.data_ptr() in places for value in state.values() if not value.dim()} <= {False}
    steps = {name: value.clone() for name, value in taken.items() if not value.dim()}
    step(*three)
    state_file = InnerStateFile(tmp_path / "state")
    state_file.keep(taken)
    state_file.join()
    found = state_file.read()
    assert found is not None
    assert all(torch.equal(found[name], value) for name, value in steps.items())
    assert torch.equal(found["0.exp_avg"], next(s["exp_avg"] for s in states))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_is_written_is_what_safetensors_reads(tmp_path: Path, kind: Literal["adamw", "muon"]) -> None:
    _, optimizers, batches = trained(kind)
    taken = {**take(optimizers, batches, 4), "half": torch.arange(5).bfloat16(), "one": torch.tensor(3.0)}
    state_file = InnerStateFile(tmp_path / "state")
    state_file.keep(taken)
    state_file.join()
    found = state_file.read()
    assert found is not None
    assert found.keys() == taken.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in taken.items())


def test_what_is_written_needs_memory_for_a_piece() -> None:
    large = torch.arange(3 * PIECE // 2, dtype=torch.float32)
    header, *rest = parts({"large": large, "small": torch.zeros(3)})
    assert len(header) % 8 == 0
    assert [len(part) for part in rest] == [4 * PIECE, 2 * PIECE, 12]
    assert torch.frombuffer(rest[0], dtype=torch.float32).data_ptr() == large.data_ptr(), "nothing is copied"


def test_an_optimizer_that_has_not_stepped_comes_back_as_such() -> None:
    _, optimizer, batches = make()
    _, other, stream = make()
    assert put(take(optimizer, batches, 0), other, stream) == 0
    assert not any(one.state for one in other)


def bad_shape(taken: dict[str, Tensor]) -> None:
    taken["0.exp_avg"] = torch.zeros(7)


def not_finite(taken: dict[str, Tensor]) -> None:
    taken["1.exp_avg_sq"][0] = float("nan")


def one_parameter_less(taken: dict[str, Tensor]) -> None:
    for name in [n for n in taken if n.startswith("3.")]:
        del taken[name]


def one_parameter_more(taken: dict[str, Tensor]) -> None:
    taken["4.exp_avg"] = torch.zeros(1)


def no_steps(taken: dict[str, Tensor]) -> None:
    del taken["steps"]


def no_position(taken: dict[str, Tensor]) -> None:
    taken["data"] = torch.zeros(3)


@pytest.mark.parametrize(
    "spoil", [bad_shape, not_finite, one_parameter_less, one_parameter_more, no_steps, no_position]
)
def test_what_does_not_fit_changes_nothing(spoil: object) -> None:
    _, optimizer, batches = trained()
    taken = take(optimizer, batches, 4)
    assert callable(spoil)
    spoil(taken)
    _, fresh, stream = make()
    with pytest.raises(InnerStateError):
        put(taken, fresh, stream)
    assert not any(one.state for one in fresh)


def test_the_state_of_another_optimizer_is_refused() -> None:
    _, optimizer, batches = trained("muon")
    _, fresh, stream = make()
    with pytest.raises(InnerStateError):
        put(take(optimizer, batches, 4), fresh, stream)


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    def full(path: Path, parts: object) -> None:
        raise OSError(28, "No space left on device")

    _, optimizer, batches = trained()
    state_file = InnerStateFile(tmp_path / "state", full)
    state_file.keep(take(optimizer, batches, 4))
    state_file.join()
    assert "No space left" in state_file.trouble
    assert state_file.read() is None


def test_what_a_killed_learner_had_half_written_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".learner.safetensors.a1b2.part").write_bytes(b"half")
    (tmp_path / ".state-00000001.safetensors.part").write_bytes(b"the node's")
    InnerStateFile(tmp_path / "learner.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == [".state-00000001.safetensors.part"]
