"""The built-in learner's optimizers: which parameters each has, and Muon against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdiloco.protocol.manifest import InnerConfig, ModelConfig
from p2pdiloco.training.models import build_model, loss
from p2pdiloco.training.optimizers import Muon, inner_optimizers, orthogonalized

MODEL = ModelConfig(width=16, depth=1, heads=2, context=16)


def test_adamw_has_everything_once() -> None:
    model = build_model(MODEL, 1)
    [adamw] = inner_optimizers(model, InnerConfig())
    own = [p for group in adamw.param_groups for p in group["params"]]
    assert {id(p) for p in own} == {id(p) for p in model.parameters()}
    assert len(own) == len(list(model.parameters()))


def test_adamw_steps_as_pytorchs() -> None:
    torch.manual_seed(0)
    batch, parameters = torch.randint(0, 64, (4, 17)), []
    for kind in (None, torch.optim.AdamW):
        model = build_model(MODEL, 1)
        [adamw] = inner_optimizers(model, InnerConfig())
        optimizer = adamw if kind is None else kind(adamw.param_groups, fused=True)
        for _ in range(3):
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        parameters.append(nn.utils.parameters_to_vector(model.parameters()))
    assert torch.equal(*parameters)


def test_muon_has_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = build_model(MODEL, 1)
    names = {id(p): name for name, p in model.named_parameters()}
    muon, adamw = inner_optimizers(model, InnerConfig(optimizer="muon"))
    hidden = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert hidden | rest == set(names.values())
    assert not hidden & rest
    assert hidden == {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}


def test_frozen_parameters_have_no_optimizer() -> None:
    model = build_model(MODEL, 1)
    for parameter in model.blocks.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    [adamw] = inner_optimizers(model, InnerConfig(optimizer="muon"))
    assert isinstance(adamw, torch.optim.AdamW)


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6), (3, 8, 5), (3, 5, 12)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(shape)))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(12, 12), (8, 32), (32, 8), (3, 8, 5), (3, 5, 12)])
def test_matrices_of_any_shape_are_orthogonalized_alike(shape: tuple[int, ...]) -> None:
    """By the published iteration in double precision, also where singular values are far apart."""
    torch.manual_seed(0)
    given = torch.randn(shape) * torch.rand(shape[:-1])[..., None] ** 8
    x = given.double() / given.double().norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    assert torch.allclose(orthogonalized(given).double(), x, atol=1e-5)


def test_muon_is_pytorchs_but_for_its_precision() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 10), torch.randn(5, 6, 10)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    muon = Muon([ours], lr=0.01, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        muon.step()
        reference.step()
    moved = (theirs.detach() - start).norm()
    assert float((ours - theirs).detach().norm() / moved) < 0.03, "bfloat16 has 8 bits"


def test_a_model_learns_with_muon() -> None:
    torch.manual_seed(0)
    model = build_model(MODEL, 1)
    optimizers = inner_optimizers(model, InnerConfig(optimizer="muon", learning_rate=5e-3))
    batch = torch.randint(0, 64, (4, 17))
    first = float(loss(model, batch).detach())
    for _ in range(20):
        value = loss(model, batch)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert float(loss(model, batch).detach()) < 0.8 * first


def test_muon_computes_matrices_of_one_shape_together_and_alike() -> None:
    """Two and three dimensions, several shapes, one larger than what is computed together, and one without gradient."""
    shapes = [(8, 12), (12, 8), (8, 12), (2, 8, 12), (8, 12), (2, 8, 12), (200, 100), (200, 100)]
    torch.manual_seed(0)
    together = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    alone = [nn.Parameter(p.detach().clone()) for p in together]
    optimizers = [Muon(together, lr=0.05), *(Muon([p], lr=0.05) for p in alone)]
    for _ in range(3):
        for ours, theirs in zip(together[1:], alone[1:], strict=True):
            gradient = torch.randn(ours.shape)
            ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
