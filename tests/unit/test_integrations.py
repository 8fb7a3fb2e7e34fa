"""The callbacks without a run, and without their libraries."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


@pytest.mark.parametrize(("name", "library"), [("transformers", "transformers"), ("lightning", "lightning.pytorch")])
def test_without_the_library_the_line_to_type_is_told(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"p2pdiloco.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'p2pdiloco\["):
        importlib.import_module(f"p2pdiloco.integrations.{name}")


class Words(nn.Module):
    """Takes what a Hugging Face model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        return torch.as_tensor(x).sum()


class Outer:
    """Stands where the run is."""

    def __init__(self) -> None:
        self.tokens = 0

    def count(self, tokens: int) -> None:
        self.tokens += tokens


@pytest.mark.heavy
def test_tokens_are_what_the_model_sees_while_it_trains() -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations.transformers import DiLoCoCallback

    callback, model, outer = DiLoCoCallback(run=None), Words(), Outer()
    callback.outer = outer  # type: ignore[assignment]
    model.register_forward_pre_hook(callback._count, with_kwargs=True)
    ids = torch.zeros(3, 5, dtype=torch.int64)
    model(input_ids=ids)
    model(ids)
    assert outer.tokens == 30
    model(inputs_embeds=torch.zeros(3, 5, 4))
    assert outer.tokens == 45, "vectors count by their places"
    model.eval()
    model(input_ids=ids)
    model.train()
    with torch.no_grad():
        model(input_ids=ids)
    assert outer.tokens == 45, "evaluation is no training"


@pytest.mark.heavy
def test_without_a_run_nothing_happens() -> None:
    pytest.importorskip("transformers", reason="needs the extra hf: pip install '.[hf]'")
    from p2pdiloco.integrations.transformers import DiLoCoCallback

    callback, model = DiLoCoCallback(run=None), Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control: Any = SimpleNamespace(should_training_stop=False)
    nobody: Any = None
    callback.on_train_begin(nobody, nobody, control, model=model, optimizer=optimizer)
    model(input_ids=torch.zeros(1, 1, dtype=torch.int64)).backward()
    optimizer.step()
    callback.on_step_end(nobody, nobody, control)
    callback.on_train_end(nobody, nobody, control)
    assert not control.should_training_stop
    assert not model._forward_pre_hooks
