"""Which parameters travel, under which names, whatever the model is wrapped in."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import p2pdiloco
from p2pdiloco.training.parameters import embedding_names, trainable


def make_model() -> nn.Sequential:
    """An embedding tied to the head, a norm with buffers, and a frozen layer."""
    model = nn.Sequential(nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    head, embedding = model[3], model[0]
    assert isinstance(head, nn.Linear)
    assert isinstance(embedding, nn.Embedding)
    head.weight = embedding.weight
    model[2].requires_grad_(False)
    return model


BARE = ["0.weight", "1.weight", "1.bias"]


def test_tied_weights_travel_once_and_frozen_ones_and_buffers_not() -> None:
    assert [name for name, _ in trainable(make_model())] == BARE
    assert embedding_names(make_model()) == {"0.weight"}


def test_names_are_the_bare_models() -> None:
    model = make_model()
    whole = torch.compile(model, backend="eager")
    assert isinstance(whole, nn.Module)
    assert [name for name, _ in trainable(whole)] == BARE
    inside = make_model()
    part = torch.compile(inside[1], backend="eager")
    assert isinstance(part, nn.Module)
    inside[1] = part
    assert "1._orig_mod.weight" in dict(inside.named_parameters())
    assert [name for name, _ in trainable(inside)] == BARE
    assert embedding_names(whole) == {"0.weight"}
    assert [name for name, _ in trainable(nn.DataParallel(make_model()))] == BARE


def test_a_compiled_model_takes_what_is_copied_into_its_parameters() -> None:
    model = nn.Linear(3, 1, bias=False)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.ones(1, 3)
    compiled(x)
    ((_, parameter),) = trainable(compiled)  # type: ignore[arg-type]
    with torch.no_grad():
        parameter.detach().view(-1).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert compiled(x).item() == 6.0


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(p2pdiloco.DiLoCoError, match="requires a gradient"):
        p2pdiloco.DiLoCo(model, optimizer, run="x", tokens_per_step=8)
    p2pdiloco.DiLoCo(model, optimizer)  # alone, nothing is asked of it


def test_an_optimizer_that_holds_none_of_the_model_is_refused_and_one_that_holds_a_part_is_not(tmp_path: Path) -> None:
    """Several optimizers may each hold a part; a copy that is given instead of the model would never change."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masters = torch.optim.SGD([p.detach().float().clone() for p in model.parameters()], lr=0.1)
    for given, trained_by in ((copy.deepcopy(model), optimizer), (model, masters)):
        with pytest.raises(p2pdiloco.DiLoCoError, match="holds none of the model's trainable parameters"):
            p2pdiloco.DiLoCo(given, trained_by, run="x", tokens_per_step=8, state=tmp_path / "x")
        p2pdiloco.DiLoCo(given, trained_by)  # alone, nothing is asked of it
    p2pdiloco.DiLoCo(
        model, torch.optim.SGD(model[0].parameters(), lr=0.1), run="x", tokens_per_step=8, state=tmp_path / "x"
    )
    assert not list(tmp_path.iterdir())


def test_an_optimizer_whose_steps_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    """Libraries put one around another without torch's hooks: no step would ever count."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer, *, has_hooks: bool) -> None:
            self.param_groups = inner.param_groups
            if has_hooks:
                self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

        def step(self, closure: Any = None) -> None: ...

    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1)  # it replaces the optimizer's step by one of its own
    for has_hooks in (False, True):
        with pytest.raises(p2pdiloco.DiLoCoError, match="give DiLoCo that one"):
            p2pdiloco.DiLoCo(
                model, Around(inner, has_hooks=has_hooks), run="x", tokens_per_step=8, state=tmp_path / "x"
            )
    p2pdiloco.DiLoCo(model, scheduler.optimizer, run="x", tokens_per_step=8, state=tmp_path / "x")


def test_parameters_that_are_replaced_before_the_start_are_refused_there(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = p2pdiloco.DiLoCo(
        model, torch.optim.SGD(model.parameters(), lr=0.1), run="x", tokens_per_step=8, state=tmp_path / "x"
    )
    model[1] = nn.Linear(2, 2)
    with pytest.raises(p2pdiloco.DiLoCoError, match="trainable parameters have changed since DiLoCo was created"):
        outer.start()
    assert not list(tmp_path.iterdir()), "nothing is founded"
