"""A learner in a process of its own, over a real socket and real shared memory, with this test as its node."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import forked
import pytest
import torch

from p2pdiloco.codec.fragments import tensor_specs
from p2pdiloco.learner import Learner
from p2pdiloco.node.learner_process import COMMAND
from p2pdiloco.protocol.ids import Digest, FragmentId, PeerId, ShardId
from p2pdiloco.protocol.manifest import (
    DataConfig,
    EvaluationConfig,
    HeldOut,
    InnerConfig,
    Layout,
    Manifest,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
)
from p2pdiloco.script_node import ParentNode
from p2pdiloco.training.corpus import load_corpus
from p2pdiloco.training.ipc_channel import Channel
from p2pdiloco.training.models import build_model, loss, named_tensors
from p2pdiloco.training.node_reconnect import find_learner
from p2pdiloco.training.parameters import FlatParameters
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.wire import learner_ipc

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
DEADLINE_S = 30.0
FOREVER = 1_000_000

Message = TypeVar("Message", bound=learner_ipc.FromLearner)


def make_manifest(*, steps: int = FOREVER) -> Manifest:
    config = RunConfig(
        name="test",
        model=ModelConfig(width=16, depth=1, heads=2, context=8),
        data=DataConfig(kind="files", pattern="*.txt", held_out_share=0.3),
        inner=InnerConfig(steps=steps, batch=2, warmup=0, learning_rate=1e-3),
        schedule=ScheduleConfig(fragments=2, sync_every=4, overlap=1, max_shard=1024),
        evaluation=EvaluationConfig(samples=4),
    )
    specs = tensor_specs(named_tensors(build_model(config.model, 0)), 2)
    held_out = HeldOut(symbol=1, samples=bytes(range(4 * 9)))
    return Manifest(
        founder=PeerId("founder"), config=config, tensors=specs, genesis=(Digest("0" * 40),), held_out=held_out
    )


class Node:
    """This test's side of one learner's process."""

    def __init__(self, manifest: Manifest, folder: Path, *extra: str, is_forked: bool = True) -> None:
        self.layout = Layout.of(manifest)
        self.vectors = SharedVectors.create(self.layout.elements, ring_elements(self.layout))
        path = folder / "manifest.msgpack"
        path.write_bytes(manifest.encode())
        self.socket, theirs = socket.socketpair()
        self.decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        self.seen: list[learner_ipc.FromLearner] = []
        self.unread = 0
        fds = (theirs.fileno(), self.vectors.fd)
        words = ("--manifest", str(path), "--incarnation", "founder/1", "--threads", "1", *extra)
        self.process: subprocess.Popen[bytes] | forked.Learner
        if is_forked:
            self.process = forked.Learner(words, socket_fd=fds[0], memory_fd=fds[1])
        else:
            command = [*COMMAND, "--socket-fd", str(fds[0]), "--memory-fd", str(fds[1]), *words]
            self.process = subprocess.Popen(command, cwd=ROOT, pass_fds=fds)
        theirs.close()

    def send(self, *messages: learner_ipc.FromNode) -> None:
        self.socket.sendall(b"".join(map(learner_ipc.encode, messages)))

    def load(self, step: int, *then: learner_ipc.FromNode) -> None:
        """Send all parameters in one piece, to train from ``step``."""
        everything = tuple(shard.shard for shard in self.layout.shards)
        self.send(learner_ipc.Shift(shards=everything, replace=True), learner_ipc.Begin(step=step), *then)

    def read(self) -> bool:
        self.socket.settimeout(DEADLINE_S)
        data = self.socket.recv(1 << 16)
        self.seen += self.decoder.feed(data)
        return bool(data)

    def until(self, kind: type[Message], holds: Callable[[Message], bool] = lambda _: True) -> Message:
        """The next message of this kind for which ``holds`` is true; those before it are passed over."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while self.unread < len(self.seen):
                message = self.seen[self.unread]
                self.unread += 1
                if isinstance(message, learner_ipc.Failed) and kind is not learner_ipc.Failed:
                    raise AssertionError(message.reason)
                if isinstance(message, kind) and holds(message):
                    return message
            assert time.monotonic() < deadline, f"no {kind.__name__} came"
            assert self.read(), f"the learner ended before {kind.__name__}, with status {self.process.wait(DEADLINE_S)}"

    def end(self) -> int:
        """Read what is left, wait for the process, give its status."""
        try:
            while self.read():
                pass
        except ConnectionError:
            pass
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()
        self.vectors.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"file {i} of the corpus\n" * 5)
    return folder


@pytest.fixture
def start(tmp_path: Path, data: Path) -> Iterator[Callable[..., Node]]:
    nodes = []

    def begin(*extra: str, steps: int = FOREVER, is_forked: bool = True) -> Node:
        nodes.append(Node(make_manifest(steps=steps), tmp_path, "--data", str(data), *extra, is_forked=is_forked))
        return nodes[-1]

    yield begin
    for node in nodes:
        node.close()


def test_all_measure_on_the_runs_samples_whatever_their_data(data: Path, tmp_path: Path) -> None:
    manifest, (ours, theirs) = make_manifest(), socket.socketpair()
    with ours, theirs:
        node = ParentNode(tmp_path / "manifest.msgpack", ours, -1)
        corpus = load_corpus(manifest.config.data, str(data))
        learner = Learner(node, manifest, corpus, incarnation="founder/1")
        expected = float(loss(learner.model, torch.arange(4 * 9).view(4, 9)).detach())
        assert learner.evaluate() == pytest.approx(expected, abs=1e-5)


def test_a_life(start: Callable[..., Node]) -> None:
    """Load, shift, replace, snapshot and evaluate with every number checked, while the learner does not train; then
    training, without a moment of blocking."""
    node = start(is_forked=False)
    elements = node.layout.elements
    assert node.until(learner_ipc.Ready) == learner_ipc.Ready(device="cpu", parameters=elements)
    vectors, everything = node.vectors, tuple(s.shard for s in node.layout.shards)
    fragments = node.layout.fragments

    # Pause comes with Begin, so no step lies between: what is in the parameters is exactly what was loaded.
    initial = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 0.02
    vectors.shift[:elements] = initial
    node.load(100, learner_ipc.Pause())
    assert node.until(learner_ipc.Shifted).shards == everything
    assert node.until(learner_ipc.Paused) == learner_ipc.Paused(steps=0, tokens=0, step=100)

    vectors.shift.fill_(0.5)
    node.send(
        learner_ipc.Shift(shards=fragments[0], replace=False), learner_ipc.Shift(shards=everything[-1:], replace=True)
    )
    node.until(learner_ipc.Shifted, lambda m: m.shards == fragments[0])
    node.until(learner_ipc.Shifted, lambda m: m.shards == everything[-1:])
    expected = initial.clone()
    for shard in fragments[0]:
        expected[node.layout.shards[shard].start : node.layout.shards[shard].stop] += 0.5
    last = node.layout.shards[everything[-1]]
    expected[last.start : last.stop] = 0.5
    node.send(learner_ipc.Snapshot(fragment=FragmentId(0), step=101))
    taken = node.until(learner_ipc.Snapshotted)
    assert (taken.fragment, taken.step, taken.steps, taken.tokens) == (0, 101, 0, 0)
    boundary = node.layout.shards[fragments[1][0]].start
    assert torch.equal(vectors.snapshot[:boundary], expected[:boundary])
    assert not vectors.snapshot[boundary:].any()  # the other fragment was not asked for
    node.send(learner_ipc.Snapshot(fragment=FragmentId(1), step=101))
    node.until(learner_ipc.Snapshotted)
    assert torch.equal(vectors.snapshot[:elements], expected)

    manifest = make_manifest()
    model = build_model(manifest.config.model, 0)
    FlatParameters(model.named_parameters(), manifest.tensors, node.layout).copy_to(vectors.theta, everything)
    node.send(learner_ipc.Evaluate(version=7))
    evaluated = node.until(learner_ipc.Evaluated)
    written = [message.text for message in node.seen if isinstance(message, learner_ipc.Written)]
    assert len(written) == 1
    assert "│" in written[0], "what was given, and what the model makes of it"
    assert evaluated.version == 7
    measured = loss(model, torch.arange(4 * 9).view(4, 9))
    assert evaluated.loss == pytest.approx(float(measured.detach()), abs=1e-5), (
        "on the run's samples, not on its own data"
    )

    vectors.shift[:elements] = initial
    node.load(100)
    node.until(learner_ipc.Shifted)
    progress = node.until(learner_ipc.Progress, lambda p: p.steps >= 50)
    assert progress.tokens == progress.steps * 2 * 8
    node.send(learner_ipc.Snapshot(fragment=FragmentId(0), step=5), learner_ipc.Pause())
    assert node.until(learner_ipc.Snapshotted).steps >= 50
    assert not torch.equal(vectors.snapshot[:boundary], initial[:boundary])
    paused = node.until(learner_ipc.Paused)
    assert paused.tokens == paused.steps * 16

    steps = [m for m in node.seen if isinstance(m, learner_ipc.Progress)]
    assert [p.steps for p in steps] == list(range(1, paused.steps + 1))
    assert sum(p.blocked_s for p in steps) == 0.0
    assert all(p.step_time_s > 0 for p in steps)
    assert sum(p.overhead_s for p in steps) > 0
    node.send(learner_ipc.Exit())
    assert node.end() == 0


def test_training_ends_at_the_runs_last_step(start: Callable[..., Node]) -> None:
    node = start(steps=1000)
    node.load(990)
    assert node.until(learner_ipc.Paused) == learner_ipc.Paused(steps=10, tokens=160, step=1000)
    node.send(learner_ipc.Snapshot(fragment=FragmentId(0), step=1000))  # it still answers
    assert node.until(learner_ipc.Snapshotted).steps == 10
    node.load(0)
    node.until(learner_ipc.Progress, lambda p: p.steps > 10)
    node.send(learner_ipc.AdoptStep(step=5), learner_ipc.AdoptStep(step=1000))
    assert node.until(learner_ipc.Paused).steps < 1000


def test_a_learner_that_rests_makes_no_steps_and_goes_on_answering(start: Callable[..., Node]) -> None:
    node = start()
    node.load(0)
    node.until(learner_ipc.Progress)
    node.send(learner_ipc.Rest(is_resting=True))
    node.until(learner_ipc.Rested)
    steps = []
    for fragment in (0, 1, 0):
        node.send(learner_ipc.Snapshot(fragment=FragmentId(fragment), step=9))
        steps.append(node.until(learner_ipc.Snapshotted).steps)
    assert len(set(steps)) == 1, "not one in between"
    node.send(learner_ipc.Rest(is_resting=False))
    assert node.until(learner_ipc.Progress, lambda p: p.steps > steps[0]).blocked_s == 0.0, (
        "a rest is no wait for the network"
    )
    node.send(learner_ipc.Rest(is_resting=True), learner_ipc.Pause())
    node.until(learner_ipc.Paused)
    node.send(learner_ipc.Exit())
    assert node.end() == 0


def test_training_yields_the_processor_to_nodes(start: Callable[..., Node]) -> None:
    node = start()
    node.load(0)
    node.until(learner_ipc.Progress)
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, node.process.pid) == min(19, ours + 5)


def test_the_nodes_death_ends_it(start: Callable[..., Node]) -> None:
    idle, busy = start(), start()
    busy.load(0)
    busy.until(learner_ipc.Progress)
    idle.until(learner_ipc.Ready)
    for node in (idle, busy):
        node.socket.close()
        assert node.process.wait(DEADLINE_S) == 0


def test_signals(start: Callable[..., Node]) -> None:
    """Ctrl+C is the node's business; SIGTERM is the learner's."""
    node = start()
    node.load(0)
    before = node.until(learner_ipc.Progress).steps
    node.process.send_signal(signal.SIGINT)
    node.until(learner_ipc.Progress, lambda p: p.steps > before + 20)
    node.process.terminate()
    assert node.end() == -signal.SIGTERM


def test_data_that_is_missing_is_named(start: Callable[..., Node], tmp_path: Path) -> None:
    node = start("--data", str(tmp_path / os.fsdecode(b"caf\xe9")))  # a name that is no text
    assert "caf? is not a folder" in node.until(learner_ipc.Failed).reason
    assert node.end() == 2


def test_a_node_that_does_not_read_does_not_stop_training(start: Callable[..., Node]) -> None:
    """The socket fills up with Progress; training goes on, and no answer is lost."""
    node = start()
    node.load(0)
    node.until(learner_ipc.Progress)
    usage = Path(f"/proc/{node.process.pid}/stat")
    deadline = time.monotonic() + DEADLINE_S

    def cpu_ticks() -> int:
        return int(usage.read_text().rpartition(")")[2].split()[11])

    goal = cpu_ticks() + os.sysconf("SC_CLK_TCK")
    while cpu_ticks() < goal:  # one CPU second: hundreds of steps, whose messages no one reads
        assert time.monotonic() < deadline, "training stands still"
        os.sched_yield()
    node.send(learner_ipc.Pause())
    steps = node.until(learner_ipc.Paused).steps
    progress = [m for m in node.seen if isinstance(m, learner_ipc.Progress)]
    assert progress[-1].steps <= steps
    assert sum(p.blocked_s for p in progress) == 0.0


# ----------------------------------------------------------------------------------------------------- link, channel


MESSAGES: list[learner_ipc.FromNode] = [
    learner_ipc.Begin(step=3),
    learner_ipc.Shift(shards=(ShardId(0), ShardId(2)), replace=True),
    learner_ipc.Snapshot(fragment=FragmentId(1), step=4),
    learner_ipc.AdoptStep(step=5),
    learner_ipc.Evaluate(version=6),
    learner_ipc.Pause(),
    learner_ipc.Exit(),
]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_come_out_whole_however_they_are_cut(size: int) -> None:
    stream = b"".join(map(learner_ipc.encode, MESSAGES))
    decoder = learner_ipc.Decoder[learner_ipc.FromNode](learner_ipc.FromNode)
    found = [m for at in range(0, len(stream), size) for m in decoder.feed(stream[at : at + size])]
    assert found == MESSAGES


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0\0\0", learner_ipc.encode(learner_ipc.Failed(reason="x"))]
)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(ValueError, match="frame"):
        learner_ipc.Decoder[learner_ipc.FromNode](learner_ipc.FromNode).feed(frame)


def test_too_large_a_message_is_not_sent() -> None:
    with pytest.raises(ValueError, match="at most"):
        learner_ipc.encode(learner_ipc.Failed(reason="x" * (1 << 20)))


def test_a_full_socket_drops_progress_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        progress = learner_ipc.Progress(steps=1, tokens=1, loss=1.0, step_time_s=1.0, overhead_s=0.0, blocked_s=0.0)
        while channel.post(progress):
            channel.exchange()
        assert channel.post(learner_ipc.Evaluated(version=1, loss=1.0))
        assert not channel.is_closed
        decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
        received: list[learner_ipc.FromLearner] = []
        while not received or received[-1] == progress:
            received += decoder.feed(theirs.recv(1 << 16))
            channel.exchange()
        assert received[-1] == learner_ipc.Evaluated(version=1, loss=1.0)
        assert channel.blocked_s == 0.0
        theirs.close()
        channel.exchange()
        assert channel.is_closed


def test_the_inner_optimizer_outlives_a_life(start: Callable[..., Node], tmp_path: Path) -> None:
    """Saved on demand and when training stops; another life goes on with it, also after the file was cut off."""
    path = tmp_path / "checkpoint" / "learner.safetensors"

    def life() -> tuple[Node, learner_ipc.Ready]:
        node = start("--inner-state", str(path))
        ready = node.until(learner_ipc.Ready)
        node.load(0)
        return node, ready

    node, ready = life()
    assert ready.inner_steps == 0
    node.until(learner_ipc.Progress, lambda p: p.steps >= 5)
    node.send(learner_ipc.Save())
    node.until(learner_ipc.Progress, lambda _: path.exists())
    node.send(learner_ipc.Pause())
    paused = node.until(learner_ipc.Paused)
    node.send(learner_ipc.Exit())
    assert node.end() == 0
    assert sum(m.blocked_s for m in node.seen if isinstance(m, learner_ipc.Progress)) == 0.0

    node, ready = life()
    assert ready.inner_steps == paused.steps
    node.process.kill()

    path.write_bytes(path.read_bytes()[:-100])
    node = start("--inner-state", str(path))
    assert "starts fresh" in node.until(learner_ipc.Trouble).reason
    assert node.until(learner_ipc.Ready).inner_steps == 0


SOCKET_NAME = f"p2pdiloco-unit-test-{os.getpid()}"
WAITS = ("--socket-name", SOCKET_NAME, "--reattach-s", "60")


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_a_learner_that_lost_its_node_trains_on_and_is_found(start: Callable[..., Node]) -> None:
    """The next node gets a learner with counters that begin at the loss, and parameters that are those it gives plus
    the progress since then."""
    node = start(*WAITS)
    node.until(learner_ipc.Ready)
    elements = node.layout.elements
    node.vectors.shift[:elements] = torch.randn(elements, generator=torch.Generator().manual_seed(1)) * 0.02
    node.load(0)
    node.until(learner_ipc.Progress, lambda p: p.steps >= 3)
    node.socket.close()

    vectors = SharedVectors.create(node.layout.elements, ring_elements(node.layout))
    deadline = time.monotonic() + DEADLINE_S
    while (found := find_learner(SOCKET_NAME, vectors.fd)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    node.socket, node.vectors, node.seen, node.unread = found, vectors, [], 0
    node.decoder = learner_ipc.Decoder[learner_ipc.FromLearner](learner_ipc.FromLearner)
    assert node.until(learner_ipc.Ready).parameters == node.layout.elements
    begun = node.until(learner_ipc.Progress)
    vectors.shift.fill_(0.25)
    node.load(500)
    for fragment in range(2):
        node.send(learner_ipc.Snapshot(fragment=FragmentId(fragment), step=501))
    node.send(learner_ipc.Pause())
    taken = node.until(learner_ipc.Snapshotted, lambda m: m.fragment == 1)
    progress = vectors.snapshot[:elements] - 0.25
    assert begun.steps <= taken.steps
    assert taken.tokens == taken.steps * 16
    assert 0 < progress.abs().max() <= 1.5e-3 * taken.steps, "AdamW's steps are about the learning rate each"
    assert node.until(learner_ipc.Paused).steps == taken.steps
    node.send(learner_ipc.Exit())
    assert node.end() == 0


@pytest.mark.parametrize("extra", [(), ("--socket-name", SOCKET_NAME, "--reattach-s", "0.3")])
def test_a_learner_that_nobody_finds_ends(start: Callable[..., Node], extra: tuple[str, ...]) -> None:
    node = start(*extra)
    node.until(learner_ipc.Ready)
    node.load(0)
    node.until(learner_ipc.Progress)
    node.socket.close()
    assert node.process.wait(DEADLINE_S) == 0
    assert find_learner(SOCKET_NAME, node.vectors.fd) is None


def test_a_learner_that_never_trained_ends_with_its_node(start: Callable[..., Node]) -> None:
    node = start(*WAITS)
    node.until(learner_ipc.Ready)
    node.socket.close()
    assert node.process.wait(DEADLINE_S) == 0
