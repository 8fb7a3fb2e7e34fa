"""The learner's side of its node, over a real socket: answers whose copies take time, as on a GPU."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn

from p2pdiloco.protocol.blocks import Block
from p2pdiloco.protocol.identifiers import FragmentId, ShardId
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.tensors.fragments import tensor_specs
from p2pdiloco.training.channel import Channel
from p2pdiloco.training.outer_link import OuterLink
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors
from p2pdiloco.wire import link


class Loop:
    """A training loop that does nothing."""

    def evaluate(self, theta: Tensor) -> float:
        return float(theta.sum())

    def train(self, block: Block) -> None: ...

    def save(self) -> None: ...

    def begin_again(self) -> None: ...

    def end(self) -> None: ...


class SlowParameters(FlatParameters):
    """Copies end when the test says so."""

    pending: list[bool]

    def copy_to(self, vector: Tensor, shards: Iterable[ShardId]) -> Callable[[], bool]:
        super().copy_to(vector, shards)
        index = len(self.pending)
        self.pending.append(False)
        return lambda: self.pending[index]


class Bench:
    """The learner's side, and this test as the node."""

    def __init__(self) -> None:
        model = nn.Linear(4, 3)
        named = list(model.named_parameters())
        tensors = tensor_specs([(name, p.shape, False) for name, p in named], 2)
        layout = make_layout(tensors, 2, 1024, "rda")
        self.flat = SlowParameters(named, tensors, layout)
        self.flat.pending = []
        self.vectors = SharedVectors.create(layout.elements)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.link = OuterLink(Loop(), self.flat, layout, self.vectors, Channel(theirs), last_step=1000)
        self.decoder = link.Decoder[link.FromLearner](link.FromLearner)

    def do(self, *messages: link.FromNode) -> list[link.FromLearner]:
        """One step with these commands; what has arrived after another boundary."""
        self.socket.sendall(b"".join(map(link.encode, messages)))
        assert self.link.boundary()
        if self.link.is_training:
            self.link.stepped(1, None, 0.1)
        assert self.link.boundary()
        try:
            return self.decoder.feed(self.socket.recv(1 << 16))
        except BlockingIOError:
            return []


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.socket.close()
    made.vectors.close()


def test_answers_keep_their_order_while_a_copy_is_under_way_and_steps_are_told(bench: Bench) -> None:
    kinds = [type(m) for m in bench.do(link.Load(step=0))]
    assert kinds == [link.Shifted, link.Progress]
    commands = (
        link.Snapshot(fragment=FragmentId(0), step=1),
        link.Shift(shards=(ShardId(0),), replace=False),
        link.Snapshot(fragment=FragmentId(1), step=1),
    )
    assert [type(m) for m in bench.do(*commands)] == [link.Progress], "nothing is answered before its copy has ended"
    bench.flat.pending[1] = True
    assert [type(m) for m in bench.do()] == [link.Progress], "and nothing overtakes"
    bench.flat.pending[0] = True
    answered = bench.do()
    assert [type(m) for m in answered] == [link.Snapshotted, link.Shifted, link.Snapshotted, link.Progress]
    taken = [m for m in answered if isinstance(m, link.Snapshotted)]
    assert [(m.fragment, m.steps) for m in taken] == [(0, 1), (1, 1)], "of the step at which it was asked for"


def test_a_pause_waits_for_copies_under_way(bench: Bench) -> None:
    bench.do(link.Load(step=0))
    assert bench.do(link.Snapshot(fragment=FragmentId(0), step=1), link.Pause()) == []
    bench.flat.pending[0] = True
    bench.link.wait()  # returns soon though the node says nothing
    assert [type(m) for m in bench.do()] == [link.Snapshotted, link.Paused]


def test_shifts_and_snapshots_are_exact_whatever_the_parameters_are(bench: Bench) -> None:
    bench.vectors.shift.copy_(torch.arange(15.0))
    bench.do(link.Load(step=0))
    bench.vectors.shift.fill_(0.5)
    bench.do(link.Shift(shards=bench.flat.everything, replace=False))
    for fragment in (0, 1):
        bench.do(link.Snapshot(fragment=FragmentId(fragment), step=1))
    assert torch.equal(bench.vectors.snapshot, torch.arange(15.0) + 0.5)


def test_a_parameter_that_is_not_contiguous_is_named() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3).t())
    tensors = tensor_specs([("head.weight", parameter.shape, False)], 1)
    with pytest.raises(ValueError, match=r"head\.weight is not contiguous"):
        FlatParameters([("head.weight", parameter)], tensors, make_layout(tensors, 1, 1024, "rda"))
