"""Optimizers that start from what is in the parameters, and those that do not, at real steps of theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from p2pdiloco.training.optimizers import Muon
from p2pdiloco.training.step_check import COVERED_STEPS, IDLE_STEPS, PERIOD, WINDOW, StepCheck

TURN = 24
"""Steps, as many as H has by default."""
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
        copies: Callable[[optim.Optimizer, Tensor, Tensor], None] | None = None,
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 8)] if is_linear else [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 8)]
        self.model = nn.Sequential(*layers).to(dtype)
        self.optimizer = made(self.model)
        self.on_update = None if copies is None else partial(copies, self.optimizer)
        self.check = StepCheck(self.model, self.optimizer, list(self.model.named_parameters()), self.on_update)
        self.shift = shift
        self.steps = 0
        self.seen: list[Tensor] = []
        """Of the first parameter, when gradients are computed."""
        self.optimizer.register_step_pre_hook(lambda _, args, kwargs: self.check.before(args, kwargs))
        self.optimizer.register_step_post_hook(self.boundary)
        self.check.begin()

    def boundary(self, *_: Any) -> None:
        self.check.after()
        self.steps += 1
        if self.shift and self.steps % 7 == 0:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.add_(change := torch.randn_like(p) * self.shift)
                    if self.on_update is not None:
                        self.on_update(p, change.float())
        self.check.rest()

    def loss(self) -> Tensor:
        first = next(self.model.parameters())
        self.seen.append(first.detach().clone())
        x = torch.randn(32, 16, dtype=first.dtype)
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
    assert set(Bench(HONEST[name], dtype=dtype).problems(WINDOW + 8)) == {""}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("rate", [0.4, 4.0, 7.9])
def test_a_rate_that_pulls_the_others_progress_back_at_once_is_honest(rate: float, *, closure: bool) -> None:
    """At 4 a single step undoes a shift of this linear model, as master weights would: its own data want that."""
    bench = Bench(lambda m: optim.SGD(m.parameters(), lr=rate), shift=1.0, is_linear=True)
    assert set(bench.problems(WINDOW + 8, closure=closure)) == {""}


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_calls_its_closure_often_is_let_alone(search: str | None) -> None:
    """It puts parameters back by itself, which is its way of looking around."""
    bench = Bench(lambda m: optim.LBFGS(m.parameters(), line_search_fn=search))
    assert set(bench.problems(20, closure=True)) == {""}


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("rate", [1e-3, 1.0])
def test_master_weights_are_told_within_a_turn(rate: float, shift: float, *, closure: bool) -> None:
    bench = Bench(lambda m: MasterWeights(m.parameters(), rate), shift=shift)
    told = bench.problems(TURN, closure=closure)
    assert "restores its own copy" in told[2]
    assert "100% of a change" in told[2] or "99% of a change" in told[2]


def test_master_weights_of_parameters_in_bfloat16_are_told() -> None:
    told = Bench(lambda m: MasterWeights(m.parameters(), 0.01), dtype=torch.bfloat16).problems(TURN)
    assert "restores its own copy" in told[-1]


def shift_copies(optimizer: optim.Optimizer, p: Tensor, change: Tensor) -> None:
    """What a script gives as ``on_update``."""
    for word in ("master", "slow"):
        if word in optimizer.state[p]:
            optimizer.state[p][word].add_(change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("made", ["master weights", "lookahead"])
def test_copies_that_are_changed_too_are_honest_and_those_that_are_not_are_told(made: str, dtype: torch.dtype) -> None:
    """The probe is in the copies while it is in the parameters, and what is trained is the same without it."""

    def make(model: nn.Module) -> optim.Optimizer:
        if made == "lookahead":
            return Lookahead(model.parameters(), 0.1, 5, 0.5)
        return MasterWeights(model.parameters(), 0.1)

    bench = Bench(make, dtype=dtype, copies=shift_copies)
    assert set(bench.problems(WINDOW)) == {""}
    plain = Bench(make, dtype=dtype, copies=shift_copies)
    plain.check.before = lambda *_: None  # type: ignore[method-assign]
    for _ in range(WINDOW):
        plain.step()
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    for p, same in zip(bench.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, same, rtol=tolerance, atol=tolerance)
    idle = Bench(make, dtype=dtype, copies=lambda *_: None)
    assert "restores its own copy" in idle.problems(WINDOW)[-1]


SLOW = pytest.mark.parametrize(("k", "alpha"), [(1, 0.5), (5, 0.5), (6, 0.8), (10, 0.5)])


@SLOW
def test_lookahead_is_told_within_a_turn(k: int, alpha: float) -> None:
    """All that it does between its slow steps is ordinary."""
    told = Bench(lambda m: Lookahead(m.parameters(), 0.1, k, alpha)).problems(TURN)
    assert told[: 2 * k - 1] == [""] * (2 * k - 1)
    assert "restores its own copy" in told[-1]


@SLOW
@pytest.mark.parametrize("made", [HONEST["sgd"], HONEST["adamw"]], ids=["sgd", "adamw"])
def test_lookahead_around_the_optimizer_is_told_within_a_turn(made: Made, k: int, alpha: float) -> None:
    """Libraries put it around an optimizer, whose hooks are called before its slow step."""
    bench = Bench(made)
    slow = [p.detach().clone() for p in bench.model.parameters()]

    @torch.no_grad()
    def look() -> None:
        if bench.steps % k == 0:
            for one, p in zip(slow, bench.model.parameters(), strict=True):
                p.copy_(one.lerp_(p, alpha))

    assert "restores its own copy" in bench.problems(TURN, look)[-1]


def test_a_copy_that_is_put_back_between_steps_after_each_shift_is_told() -> None:
    """A loop of its own has the copy: nothing is changed there as long as nobody else gives anything."""
    bench = Bench(HONEST["sgd"], shift=0.05)
    masters = [p.detach().clone() for p in bench.model.parameters()]

    @torch.no_grad()
    def put_back() -> None:
        for master, p in zip(masters, bench.model.parameters(), strict=True):
            master.add_(p.grad, alpha=-0.1)
            p.copy_(master)

    assert "restores its own copy" in bench.problems(TURN, put_back)[-1]


@torch.no_grad()
def clip(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.clamp_(-0.05, 0.05)


@torch.no_grad()
def normalize(bench: Bench) -> None:
    for p in bench.model.parameters():
        p.div_(p.norm(dim=-1, keepdim=True))


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


@pytest.mark.parametrize("between", [clip, normalize, swap, second])
def test_what_scripts_do_between_steps_is_honest(between: Callable[[Bench], None]) -> None:
    for made in (HONEST["sgd"], HONEST["momentum"]):
        bench = Bench(made)
        assert set(bench.problems(WINDOW + 8, lambda bench=bench: between(bench))) == {""}  # type: ignore[misc]


def test_parameters_that_are_set_on_purpose_are_honest() -> None:
    """As by ``load_global`` after each turn, of which half is of others who go nowhere."""
    bench = Bench(HONEST["sgd"], shift=0.0)
    theirs = copy.deepcopy(bench.model)

    @torch.no_grad()
    def load() -> None:
        if bench.steps % 5 == 0:
            for p, other in zip(bench.model.parameters(), theirs.parameters(), strict=True):
                p.copy_(other.lerp_(p, 0.5))
            bench.check.on_parameters_set()

    assert set(bench.problems(WINDOW, load)) == {""}


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_are_computed_without_the_probe_and_what_is_trained_is_the_same(*, closure: bool) -> None:
    with_check, without = Bench(HONEST["adamw"], shift=0.0), Bench(HONEST["adamw"], shift=0.0)
    without.check = StepCheck(without.model, without.optimizer, ())
    for bench in (with_check, without):
        torch.manual_seed(1)
        bench.problems(WINDOW, closure=closure)
    assert len(with_check.seen) == len(without.seen) == WINDOW
    for seen, expected in zip(with_check.seen, without.seen, strict=True):
        assert torch.allclose(seen, expected, rtol=0.0, atol=1e-5), "a hundredth of a step"


def test_an_optimizer_that_goes_back_after_its_closure_is_told_and_its_model_not_spoilt() -> None:
    """SAM in a wrapper that p2pdiloco does not know: each probe would be taken off where it is no longer."""

    class GoesBack(OldStyle):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            held = [p for group in self.param_groups for p in group["params"]]
            own = [p.clone() for p in held]
            with torch.enable_grad():
                closure()
            for p, before in zip(held, own, strict=True):
                p.copy_(before - 0.1 * p.grad)

    bench, plain = (Bench(lambda m: GoesBack(m.parameters(), lr=0.1), shift=0.0) for _ in range(2))
    plain.check.before = lambda *_: None  # type: ignore[method-assign]
    for one in (bench, plain):
        torch.manual_seed(1)
        told = one.problems(WINDOW, closure=True)
        assert ("restores its own copy" in told[-1]) == (one is bench)
    pairs = list(zip(bench.model.parameters(), plain.model.parameters(), strict=True))
    assert sum(float((p - same).detach().square().sum()) for p, same in pairs) < 2.0


def test_another_optimizer_that_steps_in_place_of_the_given_one_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As the one inside of a wrapper, or one that a loop was changed to. Another model's is left alone."""
    bench = Bench(HONEST["sgd"], shift=0.0)
    elsewhere = nn.Linear(2, 2)
    for name, model in (("", elsewhere), ("AdamW", bench.model)):
        inside = optim.AdamW(model.parameters())
        for _ in range(COVERED_STEPS):
            inside.step()
        assert [record.message.split(", ")[1] for record in caplog.records] == ([f"but {name} has"] if name else [])
    bench.check.end()


def test_a_step_that_fails_leaves_no_probe() -> None:
    class Failing(optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> None:
            if self.fails:
                raise RuntimeError("out of memory")
            super().step()

    bench = Bench(lambda m: Failing(m.parameters(), lr=0.1), shift=0.0)
    for is_end in (False, True):
        bench.problems(3)
        own = [p.detach().clone() for p in bench.model.parameters()]
        Failing.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.step()
        assert not torch.equal(own[0], next(bench.model.parameters())), "it is there"
        if is_end:
            bench.check.end()
        else:
            with pytest.raises(RuntimeError, match="out of memory"):
                bench.step()
            bench.check.before((bench.optimizer,), {})
            bench.check.end()
        for p, before in zip(bench.model.parameters(), own, strict=True):
            assert torch.allclose(p, before, rtol=0.0, atol=1e-6)
        Failing.fails = False
        bench.check.rest()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_parameters_that_are_no_numbers_spread_to_no_others(value: float) -> None:
    bench = Bench(HONEST["sgd"], shift=0.0)
    first = next(bench.model.parameters())
    own = first.detach().clone()
    for _ in range(4):
        for p in bench.model.parameters():
            p.grad = torch.ones_like(p)
        assert first.grad is not None
        first.grad[::2, 1] = value
        bench.optimizer.step()
    sound = first.isfinite()
    assert int((~sound).sum()) == 32
    assert torch.allclose(first[sound], own[sound] - 0.4, atol=1e-5), "they were trained"


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
    check = StepCheck(model, optimizer, list(model.named_parameters()))
    check.rest()
    for step in range(IDLE_STEPS + 8):
        is_due = bool(rows) or step % 8 == 0
        for p in model.parameters():
            p.grad = None
            if is_due:
                p.grad = torch.zeros_like(p)
                p.grad[:: 32 if rows else 1] = 1.0
        check.before((optimizer,), {})
        optimizer.step()
        check.after()
        check.rest()
        assert check.problem() == ""


@pytest.mark.parametrize("how", ["replaced", "other memory"])
def test_a_parameter_anywhere_in_the_model_that_is_replaced_is_told_by_its_name(how: str) -> None:
    bench = Bench(HONEST["sgd"])
    assert bench.problems(3)[-1] == ""
    middle = bench.model[2]
    assert isinstance(middle, nn.Linear)
    if how == "replaced":
        middle.weight = nn.Parameter(middle.weight.detach().clone())
    else:
        middle.weight.data = middle.weight.data.clone()
    assert "parameter 2.weight is no longer the tensor" in bench.check.problem()


def test_parameters_that_no_optimizer_holds_are_told_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    """Those that a second optimizer has are not among them, nor what a fused one changes unseen."""
    bench = Bench(lambda m: optim.SGD([m[2].weight], lr=0.1), shift=0.01)  # type: ignore[index,union-attr,list-item]
    second = optim.AdamW([bench.model[0].weight, bench.model[0].bias], lr=1e-3, fused=True)  # type: ignore[list-item,union-attr]
    bench.problems(COVERED_STEPS - 1, second.step)
    assert not caplog.records
    bench.problems(PERIOD, second.step)
    assert [record.getMessage()[:75] for record in caplog.records] == [
        "no optimizer that stepped in the last 32 steps holds 2.bias of the model's "
    ]
    assert bench.check.problem() == ""
    bench.check.end()
