"""A training script that a node has started: what ``DiLoCo`` offers its loop, with this test as the node."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import p2pdiloco
from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.protocol.ids import Digest, PeerId
from p2pdiloco.protocol.manifest import InnerConfig, Layout, Manifest, ModelConfig, RunConfig, ScheduleConfig
from p2pdiloco.script_node import ParentNode
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.wire import learner_ipc

STEPS = 5


class Stand:
    """A script and its node."""

    def __init__(self, folder: Path, tokens: int = 0) -> None:
        self.model = nn.Linear(4, 3)
        specs = tensor_specs([(name, p.shape, False) for name, p in self.model.named_parameters()], 1)
        inner = InnerConfig(steps=STEPS, tokens=tokens) if tokens else InnerConfig(steps=STEPS)
        config = RunConfig(
            name="story",
            model=ModelConfig(kind="external"),
            inner=inner,
            schedule=ScheduleConfig(fragments=1, sync_every=4, overlap=1),
        )
        manifest = Manifest(founder=PeerId("founder"), config=config, tensors=specs, genesis=(Digest("0" * 40),))
        path = folder / "manifest.msgpack"
        path.write_bytes(manifest.encode())
        layout = Layout.of(manifest)
        self.vectors = SharedVectors.create(layout.elements, ring_elements(layout))
        self.vectors.shift.zero_()
        self.vectors.theta.fill_(2.0)
        self.socket, theirs = socket.socketpair()
        self.everything = tuple(shard.shard for shard in layout.shards)
        self.decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        self.parent = ParentNode(path, theirs, os.dup(self.vectors.fd))
        self.saves = 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.outer = p2pdiloco.DiLoCo(
            self.model,
            self.optimizer,
            run=self.parent,
            tokens_per_step=8,
            evaluate=lambda: self.model.weight.sum(),
            on_save=self._save,
        )

    def _save(self) -> None:
        self.saves += 1

    def send(self, *messages: learner_ipc.FromNode) -> None:
        self.socket.sendall(b"".join(map(learner_ipc.encode, messages)))

    def load(self) -> None:
        """All parameters are 0; training begins."""
        self.send(learner_ipc.Shift(shards=self.everything, replace=True), learner_ipc.Begin(step=0))

    def step(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def heard(self) -> list[learner_ipc.FromLearner]:
        return self.decoder.feed(self.socket.recv(1 << 16))


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path)
    yield made
    made.vectors.close()


def test_its_loop_trains_to_the_end_and_on_when_the_run_is_prolonged(stand: Stand) -> None:
    stand.load()
    steps = 0
    with stand.outer as outer:
        while outer.wait():
            assert outer.progress == outer.global_step / outer.total_steps
            stand.step()
            steps += 1
            if outer.is_complete:
                stand.send(learner_ipc.MoveEnd(last_step=2 * STEPS) if steps == STEPS else learner_ipc.Exit())
        assert not outer.wait(), "it stays so"
    assert (steps, stand.saves, outer.progress) == (2 * STEPS, 2, 1.0)
    counted = [m.steps for m in stand.heard() if isinstance(m, learner_ipc.Progress)]
    assert counted == list(range(1, steps + 1))


def test_the_loss_is_that_of_the_runs_parameters_and_changes_nothing(stand: Stand) -> None:
    stand.load()
    with stand.outer as outer:
        stand.send(learner_ipc.Evaluate(version=7), learner_ipc.Exit())
        stand.step()
        assert not outer.wait()
    told = [m for m in stand.heard() if isinstance(m, learner_ipc.Evaluated)]
    assert told == [learner_ipc.Evaluated(version=7, loss=2.0 * 12)]
    assert torch.allclose(stand.model.weight, torch.full((3, 4), -0.1))


def test_with_a_budget_progress_is_the_merged_part_of_it(tmp_path: Path) -> None:
    stand = Stand(tmp_path, tokens=1000)
    stand.load()
    with stand.outer as outer:
        stand.send(learner_ipc.AdoptStep(step=2, tokens=250), learner_ipc.AdoptStep(step=2, tokens=200))
        stand.step()
        assert outer.progress == 0.25
        stand.send(learner_ipc.Exit())
        stand.step()
    stand.vectors.close()


def test_its_error_reaches_the_node(stand: Stand) -> None:
    stand.load()

    def train() -> None:
        with stand.outer:
            stand.step()
            raise RuntimeError("the loss is nan")

    with pytest.raises(RuntimeError):
        train()
    assert learner_ipc.Failed(reason="the loss is nan") in stand.heard()


def test_an_error_of_the_link_ends_it_too(stand: Stand) -> None:
    """Its node starts another one; a script that has started its node trains alone instead."""
    stand.load()

    def train() -> None:
        with stand.outer:
            stand.socket.sendall(b"\0\0\0\1\xc1")
            stand.step()

    with pytest.raises(ValueError, match="frame"):
        train()
    assert any("frame" in m.reason for m in stand.heard() if isinstance(m, learner_ipc.Failed))


@pytest.mark.parametrize("is_loaded", [True, False])
def test_without_its_node_it_ends(stand: Stand, is_loaded: bool) -> None:
    if is_loaded:
        stand.load()
        with stand.outer as outer:
            stand.socket.close()
            stand.step()
            assert not outer.wait()
    else:
        stand.socket.close()
        with stand.outer as outer:
            assert not outer.wait()
