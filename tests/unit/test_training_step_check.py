"""Optimizers that start from what is in the parameters, and those that do not, at real steps of theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from p2pdiloco.training.optimizers import Muon
from p2pdiloco.training.step_check import SHIFTS, TIMES, StepCheck

EVERY = 3
"""Steps between two shifts, as many as H has by default."""
WINDOW = EVERY * (SHIFTS + 2)
"""Steps of the whole check, and some more."""
ROUND = EVERY * (TIMES + 1) + 1
"""Steps within which a copy is told."""
Made = Callable[[nn.Module], optim.Optimizer]


class MasterWeights(optim.Optimizer):
    """As for mixed precision: a copy in float32 is trained, and written into the parameters."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(list(parameters), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float().clone())
                master.add_(p.grad.float(), alpha=-group["lr"])
                p.copy_(master)


class Lookahead(optim.Optimizer):
    """Each k-th step goes a share of the way from the slow weights to the fast ones."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, k: int, alpha: float) -> None:
        super().__init__(list(parameters), {"lr": lr})
        self.k, self.alpha, self.steps = k, alpha, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.add_(p.grad, alpha=-group["lr"])
                if self.steps % self.k == 0:
                    p.copy_(slow.lerp_(p, self.alpha))


class OldStyle(optim.SGD):
    """Writes to ``p.data``, as optimizers of before did."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"])


class Bench:
    """A model, its optimizer, and the hooks as the wrapper has them; others move the parameters now and then."""

    def __init__(
        self,
        made: Made,
        *,
        dtype: torch.dtype = torch.float32,
        shift: float = 0.01,
        is_linear: bool = False,
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 8)] if is_linear else [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)]
        self.model = nn.Sequential(*layers).to(dtype)
        self.optimizer = made(self.model)
        self.check = StepCheck(self.model, [self.optimizer], list(self.model.named_parameters()))
        self.shift = shift
        self.steps = 0
        self.optimizer.register_step_pre_hook(lambda *_: self.check.before())
        self.optimizer.register_step_post_hook(self.boundary)
        self.check.rest()

    def boundary(self, *_: Any) -> None:
        self.check.after()
        self.steps += 1
        if self.shift and self.steps % EVERY == 0:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.add_(torch.randn_like(p) * self.shift)
        self.check.rest()

    def loss(self) -> Tensor:
        x = torch.randn(32, 16, dtype=next(self.model.parameters()).dtype)
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(x) - x[:, :8].sin()).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def step(self, *, closure: bool = False) -> None:
        if closure and self.steps % 2:
            self.optimizer.step(closure=self.loss)  # type: ignore[arg-type]
        elif closure:
            self.optimizer.step(self.loss)  # type: ignore[arg-type]
        else:
            self.loss()
            self.optimizer.step()

    def problems(self, steps: int, after: Callable[[], None] = lambda: None, *, closure: bool = False) -> list[str]:
        """What is told at each step."""
        told = []
        for _ in range(steps):
            self.step(closure=closure)
            after()
            told.append(self.check.problem())
        return told


def matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


HONEST: dict[str, Made] = {
    "sgd": lambda m: optim.SGD(m.parameters(), lr=0.1),
    "sgd, far too fast": lambda m: optim.SGD(m.parameters(), lr=20.0),
    "momentum": lambda m: optim.SGD(m.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda m: optim.AdamW(m.parameters(), lr=1e-3),
    "adamw, far too fast": lambda m: optim.AdamW(m.parameters(), lr=1.0, foreach=False),
    "adamw that decays a lot": lambda m: optim.AdamW(m.parameters(), lr=1.0, weight_decay=0.5),
    "fused": lambda m: optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "a rate that is a tensor": lambda m: optim.AdamW(m.parameters(), lr=torch.tensor(0.1), weight_decay=0.5),
    "muon": lambda m: Muon(matrices(m), lr=0.1),
    "muon, far too fast": lambda m: Muon(matrices(m), lr=2.0),
    "rprop": lambda m: optim.Rprop(m.parameters(), lr=0.1),
    "adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.1),
    "writes to data": lambda m: OldStyle(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", HONEST)
def test_an_optimizer_that_starts_from_the_parameters_is_never_told(name: str, dtype: torch.dtype) -> None:
    assert set(Bench(HONEST[name], dtype=dtype).problems(WINDOW)) == {""}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("rate", [0.4, 4.0, 7.9])
def test_a_rate_that_pulls_the_others_progress_back_at_once_is_honest(rate: float, *, closure: bool) -> None:
    """At 4 a single step undoes a shift of this linear model, as master weights would: its own data want that."""
    bench = Bench(lambda m: optim.SGD(m.parameters(), lr=rate), shift=1.0, is_linear=True)
    assert set(bench.problems(WINDOW, closure=closure)) == {""}


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_calls_its_closure_often_is_let_alone(search: str | None) -> None:
    """It puts parameters back by itself, which is its way of looking around."""
    bench = Bench(lambda m: optim.LBFGS(m.parameters(), line_search_fn=search))
    assert set(bench.problems(20, closure=True)) == {""}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize(("rate", "shift"), [(1e-3, 1e-3), (1e-3, 1.0), (0.1, 0.01), (1.0, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_master_weights_are_told_within_a_round(
    rate: float, shift: float, dtype: torch.dtype, *, closure: bool
) -> None:
    bench = Bench(lambda m: MasterWeights(m.parameters(), rate), shift=shift, dtype=dtype)
    told = bench.problems(ROUND, closure=closure)
    assert set(told[: EVERY * TIMES - 1]) == {""}
    assert "restores its own copy" in told[-1]


def shift_copies(optimizer: optim.Optimizer, p: Tensor, change: Tensor) -> None:
    """What a script gives as ``on_update``."""
    for word in ("master", "slow"):
        if word in optimizer.state[p]:
            optimizer.state[p][word].add_(change)


def test_a_copy_that_is_put_back_between_steps_after_each_shift_is_told() -> None:
    """A loop of its own has the copy: nothing is changed there as long as nobody else gives anything."""
    bench = Bench(HONEST["sgd"], shift=0.05)
    masters = [p.detach().clone() for p in bench.model.parameters()]

    @torch.no_grad()
    def put_back() -> None:
        for master, p in zip(masters, bench.model.parameters(), strict=True):
            master.add_(p.grad, alpha=-0.1)
            p.copy_(master)

    assert "restores its own copy" in bench.problems(ROUND, put_back)[-1]


@torch.no_grad()
def clip(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.clamp_(-0.05, 0.05)


@torch.no_grad()
def normalize(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.div_(p.norm(dim=-1, keepdim=True))


@torch.no_grad()
def limit_norm(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.mul_((0.5 / p.norm(dim=-1, keepdim=True)).clamp(max=1.0))


@torch.no_grad()
def prune(bench: Bench) -> None:
    """Nine of ten elements are masked, the same ones each time."""
    for p in bench.model.parameters():
        p.mul_(torch.arange(p.numel()).view_as(p) % 10 == 0)


@torch.no_grad()
def prune_all_but_few(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.mul_(torch.arange(p.numel()).view_as(p) % 64 == 0)


def prune_now_and_then(bench: Bench) -> None:
    """In the very step after each shift."""
    if bench.steps % EVERY == 0:
        prune(bench)


@torch.no_grad()
def threshold(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.copy_(nn.functional.softshrink(p, 0.02))


@torch.no_grad()
def swap(bench: Bench) -> None:
    """An average is put in for an evaluation, and taken out."""
    own = [p.detach().clone() for p in bench.model.parameters()]
    for p in bench.model.parameters():
        p.mul_(0.9)
    for p, before in zip(bench.model.parameters(), own, strict=True):
        p.copy_(before)


def second(bench: Bench) -> None:
    """Of another optimizer, which the script has besides."""
    for p in bench.model.parameters():
        p.grad = p.grad.sign()  # type: ignore[union-attr]
    optim.SGD(bench.model.parameters(), lr=1e-3).step()


CONSTRAINTS = [clip, normalize, limit_norm, prune, prune_all_but_few, prune_now_and_then, threshold]


@pytest.mark.parametrize("between", [*CONSTRAINTS, swap, second])
@pytest.mark.parametrize("made", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("shift", [0.001, 0.01, 0.1])
def test_what_scripts_do_between_steps_is_honest(between: Callable[[Bench], None], made: str, shift: float) -> None:
    bench = Bench(HONEST[made], shift=shift)
    assert set(bench.problems(WINDOW, lambda: between(bench))) == {""}


@pytest.mark.parametrize("within", CONSTRAINTS)
@pytest.mark.parametrize("made", ["sgd", "momentum", "adamw"])
def test_a_constraint_that_is_a_part_of_the_step_is_honest(within: Callable[[Bench], None], made: str) -> None:
    """It is applied in a hook of the optimizer's, before the node's work."""
    benches: list[Bench] = []

    def make(model: nn.Module) -> optim.Optimizer:
        optimizer = HONEST[made](model)
        optimizer.register_step_post_hook(lambda *_: within(benches[0]))
        return optimizer

    benches.append(Bench(make))
    assert set(benches[0].problems(WINDOW)) == {""}


def test_parameters_that_are_set_on_purpose_are_honest() -> None:
    """As by ``load_global`` after each round, of which half is of others who go nowhere."""
    bench = Bench(HONEST["sgd"], shift=0.0)
    theirs = copy.deepcopy(bench.model)

    @torch.no_grad()
    def load() -> None:
        if bench.steps % 5 == 0:
            for p, other in zip(bench.model.parameters(), theirs.parameters(), strict=True):
                p.copy_(other.lerp_(p, 0.5))
            bench.check.on_parameters_set()

    assert set(bench.problems(WINDOW, load)) == {""}


def test_a_model_whose_copy_is_trained_is_told_until_it_is_trained_itself() -> None:
    bench = Bench(HONEST["adamw"], shift=0.01)
    trained = copy.deepcopy(bench.model)
    for _ in range(WINDOW + 6):
        trained(torch.randn(4, 16)).sum().backward()
        bench.optimizer.step()
    assert "changed no parameter" in bench.check.problem()
    bench.step()
    assert bench.check.problem() == ""


@pytest.mark.parametrize("rows", [0, 2])
def test_a_step_without_gradients_now_and_then_is_no_trouble(rows: int) -> None:
    """Of an optimizer that sums them up by itself, and of a table of which few rows are ever trained."""
    model = nn.Embedding(4096, 128) if rows else nn.Linear(16, 16)
    optimizer = OldStyle(model.parameters(), lr=0.1) if rows else optim.SGD(model.parameters(), lr=0.1)
    check = StepCheck(model, [optimizer], list(model.named_parameters()))
    check.rest()
    for step in range(40):
        is_due = bool(rows) or step % 8 == 0
        for p in model.parameters():
            p.grad = None
            if is_due:
                p.grad = torch.zeros_like(p)
                p.grad[:: 32 if rows else 1] = 1.0
        check.before()
        optimizer.step()
        check.after()
        check.rest()
        assert check.problem() == ""


def test_sparse_gradients_are_taken() -> None:
    model = nn.Embedding(64, 16, sparse=True)
    optimizer = optim.SparseAdam(model.parameters(), lr=0.1)
    check = StepCheck(model, [optimizer], list(model.named_parameters()))
    check.rest()
    for _ in range(WINDOW):
        model(torch.arange(32)).sum().backward()  # type: ignore[no-untyped-call]
        check.before()
        optimizer.step()
        check.after()
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight) * 0.01)
        check.rest()
        assert check.problem() == ""


def test_a_parameter_anywhere_in_the_model_that_is_replaced_is_told_by_its_name() -> None:
    """Other memory of the same parameter is followed (SAM), as long as it is of the same kind."""
    bench = Bench(HONEST["sgd"])
    middle = bench.model[2]
    assert isinstance(middle, nn.Linear)
    middle.weight.data = middle.weight.data.clone()
    assert bench.problems(3)[-1] == ""
    middle.weight.data = middle.weight.data.t().contiguous().t()
    assert "parameter 2.weight has another device, shape or memory layout" in bench.check.problem()
    middle.weight.data = middle.weight.data.contiguous()
    assert bench.check.problem() == ""
    middle.weight = nn.Parameter(middle.weight.detach().clone())
    assert "parameter 2.weight was replaced in the model" in bench.check.problem()


def test_the_check_is_over_after_the_first_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on a step costs nothing."""
    bench = Bench(HONEST["sgd"])
    bench.problems(WINDOW)
    monkeypatch.setattr(bench.check, "_read", None)
    bench.problems(5)
