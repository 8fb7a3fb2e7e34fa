"""The learner's side of its node, over a real socket: answers whose copies take time, as on a GPU."""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import FragmentId, ShardId
from p2pdiloco.protocol.manifest import make_layout
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.node_reconnect import IS_POSSIBLE, NodeListener, find_learner
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.wire import learner_ipc


class SlowParameters(FlatParameters):
    """Copies end when the test says so."""

    pending: list[bool]
    is_slow = True

    def copy_to(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Callable[[], bool] | None:
        super().copy_to(vector, shards, at)
        if not self.is_slow:
            return None
        index = len(self.pending)
        self.pending.append(False)
        return lambda: self.pending[index]


class Bench:
    """The learner's side, and this test as the node."""

    def __init__(self, listener: NodeListener | None = None) -> None:
        model = nn.Linear(4, 3)
        named = list(model.named_parameters())
        tensors = tensor_specs([(name, p.shape, False) for name, p in named], 2, math.inf)  # none is cut
        layout = make_layout(tensors, 2, 1024, "rda")
        self.flat = SlowParameters(named, tensors, layout)
        self.flat.pending = []
        self.vectors = SharedVectors.create(layout.elements)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self.parameters = [p for _, p in named]
        # How often the state of the training loop was to be saved.
        self.saves = 0
        self.blocks: deque[Block] = deque()
        self.doubt = ""
        self.link = NodeLink(
            self.flat,
            self.vectors,
            Channel(theirs),
            last_step=1000,
            node_search=listener,
            doubt=lambda: self.doubt,
            evaluate=lambda theta: float(theta.sum()),
            save=self._save,
            blocks=self.blocks,
        )
        self.decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)

    def _save(self) -> None:
        self.saves += 1

    def step(self, change: float) -> None:
        """An inner step by which every parameter moves."""
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.add_(change)
        self.link.stepped(10, None, 0.1)

    def load(self, step: int) -> tuple[learner_ipc.FromNode, ...]:
        """All parameters in one piece."""
        return learner_ipc.Shift(shards=self.flat.everything, replace=True), learner_ipc.Begin(step=step)

    def hear(self) -> list[learner_ipc.FromLearner]:
        """What has arrived."""
        try:
            return self.decoder.feed(self.socket.recv(1 << 16))
        except BlockingIOError:
            return []

    def values(self) -> Tensor:
        """Its parameters in the flat order."""
        found = torch.empty(15)
        FlatParameters.copy_to(self.flat, found, self.flat.everything)
        return found

    def do(self, *messages: learner_ipc.FromNode) -> list[learner_ipc.FromLearner]:
        """One step with these commands; what has arrived after another boundary."""
        self.socket.sendall(b"".join(map(learner_ipc.encode, messages)))
        assert self.link.boundary()
        if self.link.is_training:
            self.link.stepped(1, None, 0.1)
        assert self.link.boundary()
        return self.hear()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.socket.close()
    made.vectors.close()


def test_answers_keep_their_order_while_a_copy_is_under_way_and_steps_are_told(bench: Bench) -> None:
    kinds = [type(m) for m in bench.do(*bench.load(0))]
    assert kinds == [learner_ipc.Shifted, learner_ipc.Progress]
    commands = (
        learner_ipc.Snapshot(fragment=FragmentId(0), step=1),
        learner_ipc.Shift(shards=(ShardId(0),), replace=False),
        learner_ipc.Snapshot(fragment=FragmentId(1), step=1),
    )
    assert [type(m) for m in bench.do(*commands)] == [learner_ipc.Progress], (
        "nothing is answered before its copy has ended"
    )
    bench.flat.pending[1] = True
    assert [type(m) for m in bench.do()] == [learner_ipc.Progress], "and nothing overtakes"
    bench.flat.pending[0] = True
    answered = bench.do()
    assert [type(m) for m in answered] == [
        learner_ipc.Snapshotted,
        learner_ipc.Shifted,
        learner_ipc.Snapshotted,
        learner_ipc.Progress,
    ]
    taken = [m for m in answered if isinstance(m, learner_ipc.Snapshotted)]
    assert [(m.fragment, m.steps) for m in taken] == [(0, 1), (1, 1)], "of the step at which it was asked for"


def test_a_pause_waits_for_copies_under_way(bench: Bench) -> None:
    bench.do(*bench.load(0))
    assert bench.do(learner_ipc.Snapshot(fragment=FragmentId(0), step=1), learner_ipc.Pause()) == []
    bench.flat.pending[0] = True
    bench.link.wait()  # returns soon though the node says nothing
    assert [type(m) for m in bench.do()] == [learner_ipc.Snapshotted, learner_ipc.Paused]


def told(messages: list[learner_ipc.FromLearner]) -> list[str]:
    return [m.reason for m in messages if isinstance(m, learner_ipc.Unable)]


def snapshots(bench: Bench, *fragments: int) -> list[str]:
    """What the learner says of its health when these are copied."""
    said = []
    for fragment in fragments:
        answers = bench.do(learner_ipc.Snapshot(fragment=FragmentId(fragment), step=1))
        bench.flat.pending[-1] = True
        answers += bench.do()
        assert any(isinstance(m, learner_ipc.Snapshotted) for m in answers), "a snapshot is answered all the same"
        said += told(answers)
    return said


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_parameters_that_are_not_finite_are_told_once_and_once_that_they_are_again(bench: Bench, value: float) -> None:
    bench.do(*bench.load(0))
    assert snapshots(bench, 0, 1) == []
    spoilt = bench.flat._shards[0][0].view
    spoilt[1] = value
    (reason,) = snapshots(bench, 0, 1, 0)
    assert "parameters are not finite" in reason
    assert "start it again" in reason
    assert snapshots(bench, 1) == [], "the other fragment says nothing of this one"
    spoilt[1] = 3e38
    spoilt[2] = 3e38  # their sum overflows, and they are finite
    assert snapshots(bench, 0) == [""]


def test_a_loss_that_is_not_finite_is_told_until_it_and_a_snapshot_are(bench: Bench) -> None:
    bench.do(*bench.load(0))
    bench.link.stepped(1, float("nan"), 0.1)
    bench.link.stepped(1, float("inf"), 0.1)
    answers = bench.do()
    (reason,) = told(answers)
    assert "the loss is nan at step" in reason
    assert all(m.loss is None for m in answers if isinstance(m, learner_ipc.Progress)), "no number that JSON has not"
    assert snapshots(bench, 0) == [], "the loss is still what it was"
    bench.link.stepped(1, 2.5, 0.1)
    assert snapshots(bench, 0) == [""]


def test_what_the_training_loop_doubts_is_told_and_given_to_nobody_until_it_is_over(bench: Bench) -> None:
    """However finite it is; and what is not finite meanwhile is told as long as it lasts."""
    bench.do(*bench.load(0))
    assert snapshots(bench, 0) == []
    assert bench.vectors.snapshot.isfinite().all()
    bench.doubt = "the optimizer has a copy"
    assert snapshots(bench, 0, 1, 0) == ["the optimizer has a copy"]
    assert bench.vectors.snapshot.isnan().all()
    bench.link.stepped(1, float("nan"), 0.1)
    bench.link.stepped(1, 2.5, 0.1)
    bench.doubt = ""
    assert snapshots(bench, 0, 1) == [""]
    assert bench.vectors.snapshot.isfinite().all()


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
def test_a_nodes_next_life_hears_that_nothing_can_be_merged(tmp_path: Path) -> None:
    """The last one has taken the word with it."""
    name = f"p2pdiloco-test-doubt-{tmp_path}"
    bench = Bench(NodeListener(name, patience_s=60.0))
    bench.flat.is_slow = False
    bench.link.greet(device="cpu")
    bench.do(*bench.load(0))
    bench.doubt = "the optimizer has a copy"
    assert told(bench.do(learner_ipc.Snapshot(fragment=FragmentId(0), step=1))) == ["the optimizer has a copy"]
    bench.socket.close()
    assert bench.link.boundary()
    memory = adopt(bench, name, 100.0)
    assert told(bench.hear()) == ["the optimizer has a copy"]
    bench.socket.close()
    memory.close()


def test_what_the_node_has_said_before_it_left_is_done(bench: Bench) -> None:
    """A run that was over before its script came: parameters, and goodbye, in one go."""
    bench.vectors.shift.copy_(torch.arange(15.0))
    bench.socket.sendall(b"".join(map(learner_ipc.encode, (*bench.load(7), learner_ipc.Exit()))))
    bench.socket.shutdown(socket.SHUT_WR)
    assert not bench.link.boundary()
    assert bench.link.is_loaded
    assert bench.link.is_dismissed
    assert not bench.link.is_training
    assert bench.link.counts.global_step == 7
    for fragment in (0, 1):
        bench.flat.copy_to(bench.vectors.snapshot, bench.flat.layout.fragments[FragmentId(fragment)])
    assert torch.equal(bench.vectors.snapshot, torch.arange(15.0))
    assert not bench.link.boundary(), "and it stays over"


def test_shifts_and_snapshots_are_exact_whatever_the_parameters_are(bench: Bench) -> None:
    bench.vectors.shift.copy_(torch.arange(15.0))
    bench.do(*bench.load(0))
    bench.vectors.shift.fill_(0.5)
    bench.do(learner_ipc.Shift(shards=bench.flat.everything, replace=False))
    for fragment in (0, 1):
        bench.do(learner_ipc.Snapshot(fragment=FragmentId(fragment), step=1))
    assert torch.equal(bench.vectors.snapshot, torch.arange(15.0) + 0.5)


def test_of_the_nodes_memory_what_is_used_is_page_locked_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard's shift comes in the same slot."""
    locked: list[torch.Tensor] = []
    monkeypatch.setattr(bench.flat, "pin", locked.extend)
    bench.do(*bench.load(0))
    before = bench.values().clone()
    bench.vectors.shift.fill_(0.5)
    for shard in bench.flat.everything:
        bench.do(learner_ipc.Shift(shards=(shard,), replace=False, at=(0,)))
    assert torch.equal(bench.values(), before + 0.5)
    assert [slot.data_ptr() for slot in locked] == [bench.vectors.shift.data_ptr()]


def test_a_parameter_that_is_not_contiguous_is_named() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3).t())
    tensors = tensor_specs([("head.weight", parameter.shape, False)], 1)
    with pytest.raises(ValueError, match=r"head\.weight is not contiguous"):
        FlatParameters([("head.weight", parameter)], tensors, make_layout(tensors, 1, 1024, "rda"))


def test_a_replacement_takes_the_place_of_what_was_trained(bench: Bench) -> None:
    bench.do(*bench.load(0))
    bench.step(3.0)
    bench.vectors.shift.copy_(torch.arange(15.0))
    bench.do(learner_ipc.Shift(shards=(bench.flat.everything[0],), replace=True))
    bench.do(learner_ipc.Shift(shards=bench.flat.everything[1:], replace=False))
    cut = bench.flat.layout.shards[0].stop
    assert torch.equal(bench.values()[:cut], torch.arange(15.0)[:cut])
    assert torch.equal(bench.values()[cut:], torch.arange(15.0)[cut:] + 3.0)


def test_answers_that_do_not_fit_into_the_socket_come_later_and_whole(bench: Bench) -> None:
    """The node reads nothing for a while: what was begun goes on where it stopped."""
    bench.do(*bench.load(0))
    reasons = [f"{number} " * 2000 for number in range(300)]
    for reason in reasons:
        bench.link.tell(learner_ipc.Trouble(reason=reason))
        bench.link.boundary()
    heard: list[learner_ipc.FromLearner] = []
    for _ in range(10 * len(reasons)):
        heard += bench.hear()
        assert bench.link.boundary()
    assert [m.reason for m in heard if isinstance(m, learner_ipc.Trouble)] == reasons


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
def test_a_learner_that_is_adopted_keeps_its_progress_since_the_loss_and_counts_nothing_twice(tmp_path: Path) -> None:
    """To the swarm it is a new learner: tokens from before the loss were the last one's, of which some were merged."""
    name = f"p2pdiloco-test-{tmp_path}"
    bench = Bench(NodeListener(name, patience_s=60.0))
    try:
        bench.link.greet(device="cpu")
        bench.do(*bench.load(7))
        bench.step(1.0)
        assert bench.link.counts.tokens == 11
        bench.do(learner_ipc.Snapshot(fragment=FragmentId(0), step=7))
        bench.flat.is_slow = False
        bench.socket.close()
        assert bench.link.boundary(), "it looks out for its node"
        assert (bench.link.counts.steps, bench.link.counts.tokens) == (0, 0)
        bench.step(2.0)
        bench.step(2.0)

        memory = SharedVectors.create(15, ring_elements(bench.flat.layout))
        memory.shift.fill_(100.0)
        found = find_learner(name, memory.fd)
        assert found is not None
        found.setblocking(False)
        bench.socket, bench.decoder = found, learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        assert bench.link.boundary()
        bench.step(2.0)
        assert bench.link.is_alone, "a node that was told to leave now would know of no progress"
        bench.socket.sendall(b"".join(map(learner_ipc.encode, bench.load(20))))
        assert bench.link.boundary()
        assert not bench.link.is_alone
        assert bench.link.boundary()
        heard = bench.hear()
        assert [type(m) for m in heard] == [learner_ipc.Ready, learner_ipc.Progress, learner_ipc.Shifted], (
            "nothing that the last was told"
        )
        assert [(m.steps, m.tokens) for m in heard if isinstance(m, learner_ipc.Progress)] == [(3, 30)]
        assert bench.link.counts.global_step == 20
        assert not bench.vectors.theta.numel(), "the last node's memory is let go"
        assert torch.equal(bench.values(), torch.full((15,), 106.0)), "what was trained since, on top of the swarm's"
        bench.step(1.0)
        assert bench.link.boundary()
        assert [(m.steps, m.tokens) for m in bench.hear() if isinstance(m, learner_ipc.Progress)] == [(4, 40)]
        memory.close()
    finally:
        bench.socket.close()


def test_what_it_is_asked_for_reaches_the_loop_and_is_answered_in_order(bench: Bench) -> None:
    bench.link.greet(device="cpu", inner_steps=5)
    bench.vectors.theta.fill_(2.0)
    heard = bench.do(learner_ipc.Evaluate(version=3))
    assert heard == [
        learner_ipc.Ready(device="cpu", parameters=15, inner_steps=5, has_blocks=False),
        learner_ipc.Evaluated(version=3, loss=30.0),
    ]
    bench.do(*bench.load(0))
    bench.do(learner_ipc.Train(block=Block(7)), learner_ipc.Save())
    assert bench.blocks == deque([7])
    assert bench.saves == 1
    bench.link.block_finished(Block(7))
    tokens = bench.link.counts.tokens
    assert bench.do()[0] == learner_ipc.BlockFinished(block=Block(7), tokens=tokens)


def test_all_time_between_two_steps_is_told_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of copies, evaluations and saves, and of whatever else the loop does there; not of pauses and rests."""
    clock = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: clock)

    def step(*messages: learner_ipc.FromNode, between_s: float) -> list[float]:
        nonlocal clock
        bench.socket.sendall(b"".join(map(learner_ipc.encode, messages)))
        clock += between_s
        assert bench.link.boundary()
        clock += 2.0
        bench.link.stepped(1, None, 2.0)
        assert bench.link.boundary()
        return [m.overhead_s for m in bench.hear() if isinstance(m, learner_ipc.Progress)]

    bench.socket.sendall(b"".join(map(learner_ipc.encode, bench.load(0))))
    assert bench.link.boundary()
    assert step(between_s=5.0) == [0.0], "nothing precedes the first step"
    assert step(learner_ipc.Evaluate(version=1), between_s=3.0) == [3.0]
    assert step(learner_ipc.Save(), between_s=0.5) == [0.5]
    assert step(between_s=0.0) == [0.0]
    bench.socket.sendall(learner_ipc.encode(learner_ipc.Rest(is_resting=True)))
    assert bench.link.boundary()
    clock += 100.0
    assert bench.link.boundary()
    assert step(learner_ipc.Rest(is_resting=False), between_s=1.0) == [0.0]


def test_the_global_step_never_falls_and_at_the_runs_last_step_training_ends(bench: Bench) -> None:
    bench.do(*bench.load(990))
    bench.do(learner_ipc.AdoptStep(step=995), learner_ipc.AdoptStep(step=993))
    assert bench.link.counts.global_step == 996
    bench.do(learner_ipc.AdoptStep(step=999))
    assert not bench.link.is_training
    assert bench.link.counts.global_step == 1000
    assert bench.saves == 1
    bench.do(learner_ipc.Pause())
    assert bench.saves == 1, "it is saved once"
    paused = [m for m in bench.do(learner_ipc.Pause()) if isinstance(m, learner_ipc.Paused)]
    assert paused[-1] == learner_ipc.Paused(steps=bench.link.counts.steps, tokens=bench.link.counts.tokens, step=1000)


def test_a_learner_at_the_runs_end_trains_on_when_the_end_has_moved_and_stops_there(bench: Bench) -> None:
    """Whether it stopped by itself or was asked to. One that has no parameters yet does not begin by it."""
    bench.do(learner_ipc.MoveEnd(last_step=1000))
    assert not bench.link.is_training
    bench.do(*bench.load(999))
    assert not bench.link.is_training
    bench.do(learner_ipc.MoveEnd(last_step=1010, tokens=7))
    assert bench.link.is_training
    assert (bench.link.last_step, bench.link.token_budget) == (1010, 7)
    bench.do(learner_ipc.Pause(), learner_ipc.MoveEnd(last_step=1020))
    assert bench.link.is_training
    heard = bench.do(learner_ipc.MoveEnd(last_step=1002))
    assert not bench.link.is_training
    assert [m.step for m in heard if isinstance(m, learner_ipc.Paused)] == [bench.link.counts.global_step]
    assert (bench.link.last_step, bench.link.token_budget) == (1002, 0)


def test_it_ends_when_it_is_told_to_and_when_its_node_is_dead() -> None:
    for message in (learner_ipc.Exit(), None):
        bench = Bench()
        bench.do(*bench.load(0))
        if message is None:
            bench.socket.close()
            assert not bench.link.boundary()
            assert not bench.link.is_dismissed
        else:
            bench.socket.sendall(learner_ipc.encode(message))
            assert not bench.link.boundary()
            assert bench.link.is_dismissed
            bench.socket.close()
        bench.vectors.close()


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
def test_a_learner_that_nobody_finds_in_time_ends_and_one_that_does_not_train_ends_at_once(tmp_path: Path) -> None:
    for is_loaded, lasts in ((True, True), (False, False)):
        bench = Bench(NodeListener(f"p2pdiloco-test-{tmp_path}-{is_loaded}", patience_s=0.0))
        bench.flat.is_slow = False
        if is_loaded:
            bench.do(*bench.load(0))
        bench.blocks.append(Block(7))
        bench.socket.close()
        assert bench.link.boundary() is lasts
        assert bool(bench.blocks) is not lasts, "another node may assign it to somebody else"
        assert not bench.link.boundary()
        bench.vectors.close()


def test_what_the_node_does_not_read_is_bounded_and_steps_are_counted_all_the_same(bench: Bench) -> None:
    """Beyond 64 KiB no step is told; the next that is told says how many there were."""
    bench.do(*bench.load(0))
    for _ in range(30_000):
        bench.link.stepped(1, 2.0, 0.1)
    assert bench.link.boundary()
    assert len(bench.link._node.channel._outgoing) <= (64 << 10) + 1000
    steps: list[int] = []
    for _ in range(100):
        steps += [m.steps for m in bench.hear() if isinstance(m, learner_ipc.Progress)]
        assert bench.link.boundary()
    bench.link.stepped(1, 2.0, 0.1)
    steps += [m.steps for m in bench.do() if isinstance(m, learner_ipc.Progress)]
    assert steps == sorted(set(steps))
    assert steps[-1] == bench.link.counts.steps
    assert len(steps) < 30_000


def adopt(
    bench: Bench, name: str, values: float, step: int = 20, before_loading: Callable[[], None] = lambda: None
) -> SharedVectors:
    """The node's next life finds the learner and loads it; its shared memory."""
    memory = SharedVectors.create(15, ring_elements(bench.flat.layout))
    memory.shift.fill_(values)
    found = find_learner(name, memory.fd)
    assert found is not None
    found.setblocking(False)
    bench.socket, bench.decoder = found, learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
    assert bench.link.boundary()
    before_loading()
    bench.socket.sendall(b"".join(map(learner_ipc.encode, bench.load(step))))
    assert bench.link.boundary()
    assert bench.link.boundary()
    return memory


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
def test_a_learner_that_loses_its_node_twice_keeps_what_it_made_since_the_second_time(tmp_path: Path) -> None:
    name = f"p2pdiloco-test-twice-{tmp_path}"
    bench = Bench(NodeListener(name, patience_s=60.0))
    bench.flat.is_slow = False
    bench.link.greet(device="cpu")
    bench.do(*bench.load(0))
    memories = []
    for times in (1, 2):
        bench.socket.close()
        assert bench.link.boundary()
        bench.step(1.0)
        assert (bench.link.counts.steps, bench.link.counts.tokens) == (1, 10)
        memories.append(adopt(bench, name, 100.0 * times))
        assert torch.equal(bench.values(), torch.full((15,), 100.0 * times + 1.0))
    bench.socket.close()
    for memory in memories:
        memory.close()


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
def test_a_learner_whose_next_node_dies_while_it_gives_the_parameters_keeps_all_progress(tmp_path: Path) -> None:
    """Some shards have the second node's parameters then, others what the first had given."""
    name = f"p2pdiloco-test-thrice-{tmp_path}"
    bench = Bench(NodeListener(name, patience_s=60.0))
    bench.flat.is_slow = False
    bench.link.greet(device="cpu")
    bench.vectors.shift.fill_(7.0)
    bench.do(*bench.load(0))
    bench.socket.close()
    assert bench.link.boundary()
    bench.step(1.0)
    memory = SharedVectors.create(15, ring_elements(bench.flat.layout))
    memory.shift.fill_(50.0)
    found = find_learner(name, memory.fd)
    assert found is not None
    found.setblocking(False)
    bench.socket, bench.decoder = found, learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
    assert bench.link.boundary()
    first, cut = bench.flat.everything[:1], bench.flat.layout.shards[0].stop
    bench.socket.sendall(learner_ipc.encode(learner_ipc.Shift(shards=first, replace=True)))
    assert bench.link.boundary()
    bench.step(1.0)
    assert bench.link.is_alone, "it has not got everything"
    assert torch.equal(bench.values()[:cut], torch.full((cut,), 52.0))
    bench.socket.close()
    assert bench.link.boundary()
    bench.step(1.0)
    second = adopt(bench, name, 100.0)
    assert torch.equal(bench.values(), torch.full((15,), 103.0))
    assert not bench.link.is_alone
    bench.socket.close()
    for one in (memory, second):
        one.close()


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
@pytest.mark.parametrize("step", [20, 1000])
@pytest.mark.parametrize("is_found_first", [False, True])
def test_who_reached_the_runs_end_alone_trains_on_where_its_nodes_next_life_says(
    tmp_path: Path, step: int, *, is_found_first: bool
) -> None:
    """A node that comes back to an older state must not hear that its learner has paused when that has just begun."""
    name = f"p2pdiloco-test-end-{step}-{is_found_first}-{tmp_path}"
    bench = Bench(NodeListener(name, patience_s=60.0))
    bench.flat.is_slow = False
    bench.link.greet(device="cpu")
    bench.do(*bench.load(998))
    bench.socket.close()
    assert bench.link.boundary()

    def reach_the_end() -> None:
        bench.step(1.0)
        assert bench.link.boundary()
        assert not bench.link.is_training, "by its own count the run is over"

    if is_found_first:
        memory = adopt(bench, name, 100.0, step, before_loading=reach_the_end)
    else:
        reach_the_end()
        memory = adopt(bench, name, 100.0, step)
    heard = bench.hear()
    assert bench.link.is_training == (step < 1000)
    assert [m for m in heard if isinstance(m, learner_ipc.Paused)] == [
        learner_ipc.Paused(steps=1, tokens=10, step=1000)
    ] * (step == 1000)
    bench.socket.close()
    memory.close()


@pytest.mark.skipif(not IS_POSSIBLE, reason="abstract Unix sockets are Linux's")
def test_a_connection_that_sends_no_memory_is_closed_and_the_next_is_heard(tmp_path: Path) -> None:
    name = f"p2pdiloco-test-visitors-{tmp_path}"
    listener = NodeListener(name, patience_s=60.0)
    assert listener.open()
    assert not NodeListener(name, patience_s=60.0).open(), "one at a time"
    for says in (b"m", b"", None):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
            visitor.connect(b"\0" + name.encode())
            if says is None:
                assert listener.poll() is None, "it says nothing yet"
                assert listener.poll() is None
                continue
            if says:
                visitor.sendall(says)
            else:
                visitor.shutdown(socket.SHUT_WR)
            assert listener.poll() is None
            visitor.settimeout(10.0)
            assert visitor.recv(1) == b"", "it is sent away"
    assert listener.poll() is None, "the last one has gone"
    layout = make_layout(tensor_specs([("all", torch.Size((15,)), False)], 1), 1, 1024, "rda")
    with SharedVectors.create(15) as memory:
        connection = find_learner(name, memory.fd)
        assert connection is not None
        found = listener.poll()
        assert found is not None
        assert not listener.is_open
        vectors, _ = found.attach(layout)
        memory.shift.fill_(7.0)
        assert torch.equal(vectors.shift, memory.shift), "both have the same memory"
        vectors.close()
        connection.close()


def test_a_copy_that_is_under_way_when_it_is_told_to_end_is_told() -> None:
    """On a GPU a copy takes a moment: the node still hears that the snapshot is there."""
    bench = Bench()
    bench.do(*bench.load(0))
    bench.flat.pending[:] = [True] * len(bench.flat.pending)
    bench.do()
    commands = learner_ipc.Snapshot(fragment=FragmentId(0), step=1), learner_ipc.Exit()
    bench.socket.sendall(b"".join(map(learner_ipc.encode, commands)))

    def end_copies() -> None:
        bench.flat.pending[:] = [True] * len(bench.flat.pending)

    timer = threading.Timer(0.1, end_copies)
    timer.start()
    assert not bench.link.boundary()
    timer.join()
    assert any(isinstance(message, learner_ipc.Snapshotted) for message in bench.hear())
    bench.socket.close()
    bench.vectors.close()


def test_copies_of_the_parameters_are_told_of_each_update() -> None:
    """Of all parts of a parameter at once, in float32, in its shape."""
    bench = Bench()
    copies = {p: p.detach().clone() for p in bench.parameters}
    bench.link._on_update = lambda p, change: copies[p].add_(change)  # type: ignore[index,assignment]
    elements = bench.flat.layout.elements
    bench.vectors.shift.copy_(torch.arange(float(elements)))
    bench.do(*bench.load(0))
    bench.vectors.shift.copy_(torch.randn(elements))
    bench.do(learner_ipc.Shift(shards=bench.flat.everything[:1], replace=False))
    for p in bench.parameters:
        assert copies[p].shape == p.shape
        torch.testing.assert_close(copies[p], p.detach())
