"""What becomes of a script's parameters and of its node: after an evaluation, an error of ours, an error of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import p2pdiloco
from p2pdiloco.training.node_link import Counts
from p2pdiloco.training.step_check import StepCheck


class Node:
    """A script's node, which writes down what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.is_asked = False

    def stop(self, number: signal.Signals) -> None:
        """Told to end, and not started again."""
        self.done.append(f"stopped by {number.name}")
        self.is_asked = True

    def send(self, number: signal.Signals) -> None:
        """Sent a signal."""
        self.done.append(f"sent {number.name}")

    def wait(self, timeout_s: float) -> int:
        """It ends in order."""
        self.done.append("waited for")
        return 0

    def release_folder(self) -> None:
        """The next script may have the folder."""
        self.done.append("released")


class Link(SimpleNamespace):
    """The link to it: there until the node is asked to leave."""

    is_training, is_dismissed, is_resting, is_alone, last_step = True, False, False, False, 1000

    def __init__(self, node: Node, model: nn.Module, error: Exception | None = None) -> None:
        super().__init__(counts=Counts(), batches=lambda _: None, swarm=None)
        self._node, self._model, self._error = node, model, error

    def stepped(self, *_: Any) -> None:
        """Count the step."""
        self.counts.global_step += 1

    def boundary(self) -> bool:
        """Whether the node is there."""
        if self._error is not None:
            raise self._error
        return not self._node.is_asked

    def wait(self) -> None:
        """Nothing comes."""

    def load_global(self) -> None:
        """Those of the run are behind those of the script."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.mul_(0.5)


def part(folder: Path, model: nn.Module, error: Exception | None = None) -> tuple[Any, Node]:
    """A script that takes part with a node."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer: Any = p2pdiloco.DiLoCo(model, optimizer, run="story", tokens_per_step=8, state=folder)
    node = outer._node_process = Node()
    outer._link, outer._is_linked, outer._begun_in = Link(node, model, error), True, os.getpid()
    outer._check = StepCheck(model, [optimizer], outer._named)
    outer._unhook()
    outer._hook_steps()
    outer._tally.begin()
    outer._check.rest()
    return outer, node


def step(outer: Any) -> None:
    outer._model(torch.ones(1, 32)).sum().backward()
    outer._optimizers[0].step()
    outer._optimizers[0].zero_grad()


def same_model(start: nn.Module) -> nn.Module:
    model = nn.Linear(32, 8)
    model.load_state_dict(start.state_dict())
    return model


def test_evaluations_on_the_global_parameters_change_nothing_that_is_trained(tmp_path: Path) -> None:
    """Not the parameters, and not what is thought of the script: it puts nothing back."""
    start = nn.Linear(32, 8)
    (plain, _), (evaluated, node) = part(tmp_path / "a", same_model(start)), part(tmp_path / "b", same_model(start))
    for _ in range(40):
        step(plain)
        step(evaluated)
        with evaluated.global_parameters():
            assert not torch.equal(evaluated._model.weight, plain._model.weight)
        assert torch.equal(evaluated._model.weight, plain._model.weight)
        assert torch.equal(evaluated._model.bias, plain._model.bias)
        assert evaluated._problem() == ""
    assert node.done == []
    plain.close()
    evaluated.close()


def test_after_an_error_of_ours_the_script_trains_on_and_its_node_is_told_to_end(tmp_path: Path) -> None:
    outer, node = part(tmp_path, nn.Linear(32, 8), OSError("the folder is gone"))
    step(outer)
    assert node.done == ["stopped by SIGTERM"], "else it waits for the script, and is a follower of the run for ever"
    before = outer._model.weight.detach().clone()
    step(outer)
    assert not torch.equal(outer._model.weight, before)
    assert node.done == ["stopped by SIGTERM"]
    outer.close()
    assert node.done == ["stopped by SIGTERM", "waited for"]


@pytest.mark.parametrize(
    ("error", "is_rank", "done"),
    [
        (None, False, ["stopped by SIGTERM", "waited for"]),
        (ValueError("the script's own"), False, ["stopped by SIGTERM", "waited for"]),
        (KeyboardInterrupt(), False, ["stopped by SIGTERM", "waited for"]),
        (ValueError("the script's own"), True, ["released"]),
        (KeyboardInterrupt(), True, ["sent SIGTERM", "released"]),
    ],
    ids=str,
)
def test_a_script_that_ends_takes_its_node_along_and_a_rank_that_fails_leaves_it(
    error: BaseException | None, is_rank: bool, done: list[str], tmp_path: Path
) -> None:
    """A rank's node waits for torchrun to start all ranks again; a person who interrupts wants all of it to end."""
    outer, node = part(tmp_path, nn.Linear(32, 8))
    step(outer)
    if is_rank:
        outer._ranks = SimpleNamespace()
    outer.__exit__(None if error is None else type(error), error, None)
    assert node.done == done
    step(outer)
    outer.close()
    assert node.done == done, "nothing of ours happens after the end"
