"""What steps of real optimizers count for: accumulation, skipped steps, schedulers, losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pdiloco.training.step_counter import COVERED_STEPS, LOOK_STEPS, OTHER_STEPS, StepCounter


class Loop:
    """A model, an optimizer, and a hook as the wrapper's."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, scaler: Any = None, **options: Any):
        self.model = nn.Linear(2, 1)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        self.tally = StepCounter([self.optimizer], scaler, 7)
        self.taken: list[tuple[int, float | None, bool]] = []
        self.optimizer.register_step_post_hook(self.note)
        self.tally.begin()

    def note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """As the wrapper's hook."""
        if self.tally.stepped(optimizer):
            self.taken.append(self.tally.take())

    def gradients(self, value: float = 1.0) -> Tensor:
        """A backward pass whose gradients are finite if ``value`` is."""
        loss: Tensor = (self.model(torch.ones(1, 2)) * value).sum()
        return loss


def test_a_step_counts_for_what_was_counted_else_for_the_default() -> None:
    loop = Loop()
    for micro in range(3):  # gradient accumulation
        loop.gradients().backward()
        loop.tally.count(5 + micro, None)
    loop.optimizer.step()
    loop.optimizer.step()
    loop.tally.count(0, None)
    loop.optimizer.step()
    assert loop.taken == [(18, None, True), (7, None, True), (0, None, True)]


def test_a_learning_rate_scheduler_changes_nothing() -> None:
    loop = Loop()
    scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        loop.gradients().backward()
        loop.optimizer.step()
        scheduler.step()
    assert loop.taken == [(7, None, True)] * 3
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_scaler_skips_is_no_step_and_trains_no_tokens(fused: bool) -> None:
    """Unfused optimizers are not called then; fused ones are, and skip by themselves."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop = Loop(torch.optim.AdamW, scaler, fused=fused)
    before = [p.detach().clone() for p in loop.model.parameters()]
    for value, tokens in ((math.inf, 1000), (1.0, 5)):
        loop.optimizer.zero_grad()
        loop.tally.count(tokens, 0.5)
        scaler.scale(loop.gradients(value)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        if value == math.inf:
            assert all(torch.equal(p, b) for p, b in zip(loop.model.parameters(), before, strict=True))
    steps = [(tokens, is_step) for tokens, _, is_step in loop.taken]
    assert steps == ([(0, False), (5, True)] if fused else [(5, True)])
    loop.tally.end()
    assert "step" not in vars(scaler), "the scaler is as it was"


def test_the_scaler_of_another_optimizer_drops_nothing() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loop, other = Loop(scaler=scaler), Loop()
    loop.tally.count(5, None)
    scaler.scale(other.gradients(math.inf)).backward()
    scaler.step(other.optimizer)
    loop.optimizer.step()
    assert loop.taken == [(5, None, True)]


def test_the_loss_is_the_latest_that_is_known() -> None:
    loop = Loop()
    loop.optimizer.step()
    loop.tally.count(1, 3.0)
    loop.optimizer.step()
    loop.optimizer.step()
    loop.tally.report(math.nan)
    loop.optimizer.step()
    loop.optimizer.step()
    losses = [loss for _, loss, _ in loop.taken]
    assert losses[:3] == [None, 3.0, 3.0]
    assert math.isnan(losses[3] or 0.0), "told"
    assert losses[4] == 3.0, "and forgotten"


def test_a_loss_on_a_device_is_read_once_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("p2pdiloco.training.step_counter.time.monotonic", lambda: now)
    loop = Loop()
    for at, value in ((100.0, 4.0), (100.9, 3.0), (101.1, 2.0)):
        now = at
        loop.tally.count(1, torch.tensor(value, requires_grad=True))
        loop.optimizer.step()
    assert [loss for _, loss, _ in loop.taken] == [4.0, 4.0, 2.0]


def test_steps_whose_tokens_nobody_counts_are_told_until_somebody_does() -> None:
    """The merge would give them no weight, and the script would not know."""
    loop = Loop()
    tally = StepCounter([loop.optimizer], None, 0)
    tally.begin()
    for tokens, is_told in ((8, False), (0, False), (0, True), (0, True), (8, False)):
        tally.settle(tokens)
        assert ("outer.count(tokens) before each optimizer.step()" in tally.problem()) is is_told
    tally.end()


def test_an_optimizer_that_takes_the_place_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Two that step in turns, as a GAN's, are none; nor is one of other parameters."""
    loop, other = Loop(), nn.Linear(2, 1)
    loop.gradients().backward()
    second = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    for _ in range(3 * OTHER_STEPS):
        second.step()
        loop.optimizer.step()
        torch.optim.SGD(other.parameters()).step()
    for _ in range(OTHER_STEPS):
        second.step()
    assert not caplog.records
    for _ in range(2 * OTHER_STEPS):
        second.step()
    assert [record.getMessage()[:17] for record in caplog.records] == ["the SGD that p2pd"]
    loop.tally.end()
    caplog.clear()
    loop.optimizer.step()
    for _ in range(2 * OTHER_STEPS):
        second.step()
    assert not caplog.records, "nobody looks any more"


@pytest.mark.parametrize("how", ["frozen", "unfrozen", "added"])
def test_other_parameters_than_in_the_beginning_are_told(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """They would be trained here alone, in silence."""
    model, late = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))
    model.bias.requires_grad_(how != "unfrozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tally = StepCounter([optimizer], None, 7)
    tally.begin()
    for _ in range(2 * LOOK_STEPS):
        tally.take()
    assert not caplog.records
    if how == "added":
        optimizer.add_param_group({"params": [late]})
    else:
        model.bias.requires_grad_(how == "unfrozen")
    for _ in range(3 * LOOK_STEPS):
        tally.take()
    assert [record.getMessage()[:16] for record in caplog.records] == ["other parameters"]
    tally.end()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("given", [(0, 1), (1, 0)])
def test_a_step_is_one_of_each_optimizer_in_whatever_order(order: tuple[int, int], given: tuple[int, int]) -> None:
    model = nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)]
    tally = StepCounter([optimizers[index] for index in given], None, 7)
    tally.begin()
    complete = [[tally.stepped(optimizers[index]) for index in order] for _ in range(3)]
    assert complete == [[False, True]] * 3
    tally.end()


def test_an_optimizer_that_steps_more_often_than_another_makes_no_more_steps() -> None:
    """As a GAN's discriminator. Tokens of all its steps are those of the one step."""
    model = nn.Linear(2, 1)
    often, seldom = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    tally = StepCounter([often, seldom], None, 0)
    taken: list[Any] = []
    tally.begin()
    for step in range(10):
        tally.count(8, None)
        due = (often, seldom) if step % 5 == 4 else (often,)
        taken += [tally.take() for optimizer in due if tally.stepped(optimizer)]
    assert taken == [(40, None, True)] * 2
    tally.end()


def test_one_of_several_optimizers_that_never_steps_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    steps, rests = torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)
    tally = StepCounter([steps, rests], None, 7)
    tally.begin()
    for _ in range(2 * OTHER_STEPS):
        steps.step()
        tally.stepped(steps)
    assert [record.getMessage()[:27] for record in caplog.records] == ["the AdamW that p2pdiloco.Di"]
    tally.end()


def test_parameters_that_no_optimizer_holds_are_told_by_their_names(caplog: pytest.LogCaptureFixture) -> None:
    """Those that a second optimizer has are not among them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([model[1].weight], lr=0.1)
    second = torch.optim.AdamW([model[0].weight, model[0].bias], lr=1e-3, fused=True)
    tally = StepCounter([optimizer], None, 7, list(model.named_parameters()))
    tally.begin()
    for step in range(2 * COVERED_STEPS):
        second.step()
        optimizer.step()
        tally.take()
        assert len(caplog.records) == (step >= COVERED_STEPS - 1)
    assert (
        caplog.records[0]
        .getMessage()
        .startswith("no optimizer that stepped in the last 32 steps holds 1.bias of the model's 4 trainable")
    )
    tally.end()
