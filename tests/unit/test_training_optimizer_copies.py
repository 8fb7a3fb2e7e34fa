"""Optimizers of many kinds in two scripts that know half of a problem each: both learn all of it, or the script is told
and nothing of it is merged. The learner's side is the real one; this test is the two nodes."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_training_step_check import Lookahead, MasterWeights, shift_copies
from torch import Tensor, nn

import p2pdiloco
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.protocol.ids import FragmentId
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.training import script_arguments
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.optimizers import Muon
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.training.step_check import StepCheck
from p2pdiloco.wire import learner_ipc

FEATURES = 32
ROUNDS, H = 25, 6
LEARNT, UNKNOWN = 0.03, 0.3
"""Share of the error in the beginning that is left where it was learnt from the other peer, and where it was not."""


class ScheduleFreeSGD(torch.optim.Optimizer):
    """As the package ``schedulefree`` does it: gradients are computed at y, which lies between z and the mean x."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(list(parameters), {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            share = 1.0 / (group["k"] + 1)
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.clone())
                y.lerp_(z, share).add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(y.grad, alpha=group["lr"])
            group["k"] += 1


class WithRate(torch.optim.Optimizer):
    """An optimizer with a learning rate and nothing else to set."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(list(parameters), {"lr": lr})


class MADGRAD(WithRate):
    """Dual averaging: at each step it goes a tenth of the way to the starting point less the sum of all gradients. What
    is lost of another peer's progress in a step is too little to be told."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                x0 = state.setdefault("x0", p.clone())
                total = state.setdefault("s", torch.zeros_like(p)).add_(p.grad, alpha=group["lr"])
                p.lerp_(x0 - total, 0.1)


class EightBitAdam(WithRate):
    """As bitsandbytes does it: the moments are kept as 8-bit numbers with a scale for each block."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                moments = []
                for name, beta, value in (("m", 0.9, p.grad), ("r", 0.95, p.grad.square())):
                    words, scale = state.get(name, (torch.zeros_like(p, dtype=torch.int8), torch.ones(())))
                    kept = words.float().mul_(scale)
                    kept = (kept.square() if name == "r" else kept).lerp_(value, 1 - beta)  # of r: the root
                    moments.append(kept / (1 - beta ** state["step"]))
                    root = kept.sqrt() if name == "r" else kept
                    scale = root.abs().max().clamp(min=1e-12) / 127
                    state[name] = (root.div(scale).round().to(torch.int8), scale)
                p.sub_(moments[0] / (moments[1].sqrt() + 1e-3), alpha=group["lr"])


class EightBitLion(WithRate):
    """As bitsandbytes does it: the momentum is kept as 8-bit numbers with a scale, and only signs are applied."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                words, scale = self.state[p].get("m", (torch.zeros_like(p, dtype=torch.int8), torch.ones(())))
                kept = words.float().mul_(scale)
                p.sub_(kept.lerp(p.grad, 0.1).sign_(), alpha=group["lr"])
                kept.lerp_(p.grad, 0.01)
                scale = kept.abs().max().clamp(min=1e-12) / 127
                self.state[p]["m"] = (kept.div_(scale).round_().to(torch.int8), scale)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization (arXiv 2010.01412) as the best-known implementation (davda54/sam) has it, line by
    line: it climbs in place, and then puts other memory into the parameters (``p.data = ...``)."""

    def __init__(
        self, params: Iterable[Tensor], base_optimizer: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: Any
    ) -> None:
        super().__init__(list(params), dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = torch.norm(torch.stack([grad.norm(p=2) for grad in grads]), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))  # climb to the local maximum "w + e(w)"
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data = self.state[p]["old_p"]  # get back to "w" from "w + e(w)"
        self.base_optimizer.step()  # do the actual "sharpness-aware" update
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)  # the closure should do a full forward-backward pass
        self.first_step(zero_grad=True)
        closure()
        self.second_step()


class Peer:
    """A script whose data tell of one half of the features, with the hooks that ``DiLoCo`` has."""

    def __init__(self, half: int, made: Callable[[nn.Module], Any], on_update: Any, *, is_in_two: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(FEATURES, 4, bias=False)
        self.target = torch.randn(4, FEATURES)
        self.mine = slice(half * FEATURES // 2, (half + 1) * FEATURES // 2)
        self.seeds = torch.Generator().manual_seed(half)
        self.given, self.is_in_two = made(self.model), is_in_two
        (self.optimizer,) = script_arguments.stepping([self.given], has_hook=on_update is not None)
        named = list(self.model.named_parameters())
        tensors = tensor_specs([(name, p.shape, False) for name, p in named], 1, math.inf)
        layout = make_layout(tensors, 1, 1 << 20, "direct")
        if on_update is not None:
            on_update = lambda p, change, of=on_update: of(self.optimizer, p, change)  # noqa: E731
        on_update = script_arguments.on_update(on_update, [self.optimizer])
        self.check = StepCheck(self.model, [self.optimizer], named)
        self.vectors = SharedVectors.create(layout.elements)
        self.socket, theirs = socket.socketpair()
        flat, channel = FlatParameters(named, tensors, layout), Channel(theirs)
        self.everything = flat.everything
        self.link = NodeLink(
            flat,
            self.vectors,
            channel,
            last_step=10**6,
            doubt=self.check.problem,
            on_update=on_update,
        )
        self.command(learner_ipc.Begin(step=0))
        self.optimizer.register_step_pre_hook(lambda *_: self.check.before())
        self.optimizer.register_step_post_hook(self.boundary)
        self.check.rest()

    def boundary(self, *_: object) -> None:
        self.check.after()
        self.link.stepped(8, None, 0.1)
        assert self.link.boundary()
        self.check.rest()

    def command(self, message: learner_ipc.FromNode) -> None:
        self.socket.sendall(learner_ipc.encode(message))

    def gradients(self) -> None:
        x = torch.zeros(16, FEATURES)
        x[:, self.mine] = torch.randn(16, FEATURES // 2, generator=self.seeds)
        self.given.zero_grad()
        (self.model(x) - x @ self.target.T).square().mean().backward()

    def step(self) -> None:
        self.gradients()
        if not isinstance(self.given, SAM):
            self.given.step()
        elif self.is_in_two:
            self.given.first_step()
            self.gradients()
            self.given.second_step()
        else:
            self.given.step(self.gradients)

    def error(self, of: slice) -> float:
        weight = next(self.model.parameters()).detach()
        return float((weight - self.target)[:, of].square().mean() / self.target[:, of].square().mean())

    def close(self) -> None:
        self.socket.close()
        self.vectors.close()


def train_two(
    made: Callable[[nn.Module], Any], on_update: Any = None, *, is_in_two: bool = False
) -> tuple[list[float], str]:
    """Each peer's error in the half that only the other one knows, and what was told.

    The nodes merge the mean of what both have done since the last round, and what is doubted not at all.
    """
    peers = [Peer(half, made, on_update, is_in_two=is_in_two) for half in (0, 1)]
    old = [next(peer.model.parameters()).detach().flatten().clone() for peer in peers]
    for _ in range(ROUNDS):
        for peer in peers:
            for step in range(H):
                if step == H - 1:
                    peer.command(learner_ipc.Snapshot(fragment=FragmentId(0), step=0))
                peer.step()
        changes = [peer.vectors.snapshot - before for peer, before in zip(peers, old, strict=True)]
        merged = [change for change in changes if bool(change.isfinite().all())]
        total = sum(merged, torch.zeros_like(changes[0]))  # each knows a half: their sum is the common direction
        for index, (peer, change) in enumerate(zip(peers, changes, strict=True)):
            own = change if bool(change.isfinite().all()) else torch.zeros_like(change)
            peer.vectors.shift.copy_(total - own)
            peer.command(learner_ipc.Shift(shards=peer.everything, replace=False))
            peer.step()
            own = change if bool(change.isfinite().all()) else torch.zeros_like(change)
            old[index] = peer.vectors.snapshot + total - own
    told = peers[0].check.problem()
    errors = [peers[0].error(peers[1].mine), peers[1].error(peers[0].mine)]
    for peer in peers:
        peer.close()
    return errors, told


def schedule_free(kind: str, **options: Any) -> Callable[[nn.Module], Any]:
    """An optimizer of the package ``schedulefree``, which only some machines have."""

    def made(model: nn.Module) -> Any:
        optimizer = getattr(pytest.importorskip("schedulefree"), kind)(model.parameters(), **options)
        optimizer.train()
        return optimizer

    return made


def accelerated(model: nn.Module) -> Any:
    """As accelerate's users have it."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    return accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.5))


LEARNING: dict[str, tuple[Callable[[nn.Module], Any], Any]] = {
    "sgd": (lambda m: torch.optim.SGD(m.parameters(), lr=0.5), None),
    "adamw": (lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.0), None),
    "muon": (lambda m: Muon(m.parameters(), lr=0.05), None),
    "8-bit adam": (lambda m: EightBitAdam(m.parameters(), lr=0.03), None),
    "8-bit lion": (lambda m: EightBitLion(m.parameters(), lr=0.03), None),
    "sam": (lambda m: SAM(m.parameters(), torch.optim.SGD, lr=0.5), None),
    "sam, in two halves": (lambda m: SAM(m.parameters(), torch.optim.AdamW, lr=0.05, weight_decay=0.0), None),
    "accelerate": (accelerated, None),
    "schedule-free": (lambda m: ScheduleFreeSGD(m.parameters(), lr=0.5), None),
    "schedulefree.SGD": (schedule_free("SGDScheduleFree", lr=0.5), None),
    "schedulefree.AdamW": (schedule_free("AdamWScheduleFree", lr=0.1, warmup_steps=20), None),
    "schedulefree.RAdam": (schedule_free("RAdamScheduleFree", lr=0.2), None),
    "schedulefree.reference": (schedule_free("AdamWScheduleFreeReference", lr=0.1), None),
    "dual averaging": (lambda m: MADGRAD(m.parameters(), lr=0.3), None),
    "lookahead, with a hook": (lambda m: Lookahead(m.parameters(), 0.5, 5, 0.5), shift_copies),
    "master weights, with a hook": (lambda m: MasterWeights(m.parameters(), 0.5), shift_copies),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of torch that wait for each other take minutes on a busy machine. accelerate keeps its state."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("name", LEARNING)
def test_two_peers_learn_both_halves(name: str) -> None:
    made, on_update = LEARNING[name]
    errors, told = train_two(made, on_update, is_in_two="halves" in name)
    assert told == ""
    assert max(errors) < LEARNT, errors


def test_copies_that_nobody_shifts_are_told_and_nothing_is_merged() -> None:
    errors, told = train_two(lambda m: MasterWeights(m.parameters(), 0.5))
    assert "restores its own copy" in told
    assert min(errors) > UNKNOWN, "what was not merged cannot be learnt from"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda m: Lookahead(m.parameters(), 0.5, 5, 0.5), "Lookahead keeps slow weights"),
        (lambda m: type("Ranger21", (WithRate,), {})(m.parameters(), 0.5), "Ranger21 keeps slow weights"),
        (lambda m: SimpleNamespace(optimizer=Lookahead(m.parameters(), 0.5, 5, 0.5)), "Lookahead keeps slow weights"),
        (lambda m: type("FP16_Optimizer", (WithRate,), {})(m.parameters(), 0.5), "torch.autocast"),
        (lambda m: type("TRAC", (WithRate,), {})(m.parameters(), 0.5), "TRAC keeps the first parameters"),
    ],
)
def test_a_known_optimizer_with_copies_is_refused_with_what_to_do(made: Any, said: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(p2pdiloco.DiLoCoError, match="or add on_update=") as told:
        p2pdiloco.DiLoCo(model, made(model), run="story", tokens_per_step=1, state=tmp_path)
    assert said in str(told.value)
    if isinstance(optimizer := made(model), torch.optim.Optimizer):
        p2pdiloco.DiLoCo(model, optimizer, run="x", tokens_per_step=1, state=tmp_path, on_update=lambda *_: None)


def test_the_runs_model_is_loaded_into_other_memory_or_an_error_told() -> None:
    """SAM puts other memory into the parameters; a model may also be changed so that nothing can be loaded."""
    peer = Peer(0, lambda m: SAM(m.parameters(), torch.optim.SGD, lr=0.5), None, is_in_two=False)
    place = peer.model.weight.data_ptr()
    peer.step()
    assert peer.model.weight.data_ptr() != place
    peer.vectors.theta.copy_(torch.arange(4.0 * FEATURES))
    outer = p2pdiloco.DiLoCo(peer.model, peer.optimizer)
    outer._link, outer._check = peer.link, peer.check
    outer.load_global()
    assert torch.equal(peer.model.weight.detach().view(-1), peer.vectors.theta)
    peer.model.weight = nn.Parameter(torch.zeros(4, FEATURES))
    with pytest.raises(p2pdiloco.DiLoCoError, match=r"weight was replaced in the model .* cannot be loaded"):
        outer.load_global()
    peer.close()
