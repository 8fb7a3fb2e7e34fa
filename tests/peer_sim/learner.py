"""A simulated learner's process: the real ``NodeLink`` over parameters of which every step leaves a mark."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from p2pdiloco.peer.learner_supervisor import RESTARTS
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.ids import LearnerId, PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout, Manifest
from p2pdiloco.training.cuda_copies import Finished
from p2pdiloco.training.node_link import NodeLink
from p2pdiloco.training.parameters import FlatParameters, moves
from p2pdiloco.training.shared_memory import ring_elements
from p2pdiloco.wire import learner_ipc
from tests.peer_sim.disk import START
from tests.peer_sim.tuning import CHUNK

if TYPE_CHECKING:
    from tests.peer_sim.host import SimulatedHost
    from tests.peer_sim.world import World


IDLE_S = 0.05
EXIT_S = 5.0
BLOCK_STEPS = 3


class Vectors:
    """What node and learner share (``training.shared_memory.SharedVectors``)."""

    fd = -1

    def __init__(self, layout: Layout) -> None:
        self.elements = layout.elements
        self.theta = torch.zeros(layout.elements)
        self.shift, self.snapshot = (torch.zeros(ring_elements(layout)) for _ in range(2))

    def give_back(self, vector: Literal["shift", "snapshot"], start: int, stop: int) -> None:
        """Nobody may look at it any more."""
        (self.shift if vector == "shift" else self.snapshot)[start:stop] = float("nan")

    def close(self) -> None:
        """The memory goes with whoever holds it last."""


class SimulatedChannel:
    """The learner's end of the link (``training.channel.Channel``)."""

    def __init__(self, host: SimulatedHost, heard: Callable[[learner_ipc.FromLearner], None]) -> None:
        self._host = host
        self._heard = heard
        self._link_s = host.world.computers[host.name].setting.link_s
        self._outgoing: list[learner_ipc.FromLearner] = []
        self.incoming: list[learner_ipc.FromNode] = []
        self.arrives_at = 0.0
        """When the node has heard all that was said so far."""
        self._reaches_at = 0.0
        self.blocked_s = 0.0
        self.is_cut = False

    @property
    def is_closed(self) -> bool:
        """Whether the node is dead."""
        return self.is_cut or self._host.is_dead

    def post(self, message: learner_ipc.FromLearner) -> bool:
        """Queue an answer."""
        self._outgoing.append(message)
        return True

    def exchange(self) -> list[learner_ipc.FromNode]:
        """Send what is queued, take what came."""
        self.flush(0.0)
        commands, self.incoming = self.incoming, []
        return commands

    def flush(self, timeout_s: float) -> bool:
        """Send what is queued, which always goes."""
        outgoing, self._outgoing = self._outgoing, []
        world = self._host.world
        for message in outgoing:
            self.arrives_at = max(self.arrives_at, world.now) + self._link_s * world.random.random()
            world.at(self.arrives_at, partial(self._host.do, partial(self._heard, message)))
        return True

    def tell(self, message: learner_ipc.FromNode) -> None:
        """The node says something."""
        world = self._host.world
        self._reaches_at = max(self._reaches_at, world.now) + self._link_s * world.random.random()
        world.at(self._reaches_at, lambda: self.incoming.append(message))


class _NodeConnection(NamedTuple):
    """The node's next life (``training.node_reconnect.NodeConnection``)."""

    vectors: Vectors
    channel: SimulatedChannel

    def attach(self, layout: Layout) -> tuple[Vectors, SimulatedChannel]:
        """What it shares with its learner."""
        return self.vectors, self.channel


class SimulatedNodeListener:
    """Where a learner whose node has died is found (``training.node_reconnect.NodeListener``)."""

    def __init__(self, world: World, patience_s: float) -> None:
        self._world = world
        self._patience_s = patience_s
        self._until = 0.0
        self.is_open = False
        self.incoming: _NodeConnection | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody came in time."""
        return self._world.now > self._until

    def open(self) -> bool:
        """Look out for a node."""
        self.is_open, self._until = True, self._world.now + self._patience_s
        return True

    def poll(self) -> _NodeConnection | None:
        """The node's next life, if it is there."""
        found, self.incoming = self.incoming, None
        self.is_open = found is None
        return found

    def close(self) -> None:
        """Look out no more."""
        self.is_open = False


class Truth:
    """What a learner has really done, in its own hand."""

    def __init__(self, shards: int) -> None:
        self.tokens: list[int] = []
        """After each step."""
        self.thrown = [0] * shards
        """Steps, by shard, before which everything that was not merged is gone: the learner took the global
        parameters."""

    def steps_in(self, shard: ShardId, tokens_from: int, tokens_to: int) -> int:
        """Steps of a range of tokens that the learner still held after its last reset."""
        held = enumerate(self.tokens, start=1)
        return sum(tokens_from < tokens <= tokens_to and step > self.thrown[shard] for step, tokens in held)


class Learners:
    """All that there ever were in a world."""

    def __init__(self) -> None:
        self.by_name: dict[LearnerId, SimulatedLearner] = {}
        self.truths: dict[LearnerId, Truth] = {}
        self.newest: dict[PeerId, SimulatedLearner] = {}
        """Of each peer's processes."""
        self._lanes = 0

    def draw_lane(self) -> int:
        """A new learner's."""
        self._lanes += 1
        return (self._lanes - 1) % CHUNK


class SimulatedLearner:
    """One life of a learner's process, which a node may outlive, and which may outlive a node."""

    def __init__(self, world: World, peer: PeerId, channel: SimulatedChannel, vectors: Vectors) -> None:
        self.world = world
        self.peer = peer
        self.model = MarkedModel(world.manifest, world.layout, world.learners.draw_lane())
        self.model.flat.replaced = self._replaced
        self.truth = Truth(len(world.layout.shards))
        """Since its counters began."""
        setting = self._setting = world.computers[peer].setting
        self.model.flat.looks = lambda: world.random.randint(0, most) if (most := setting.copies) else 0
        self.listener = SimulatedNodeListener(world, setting.reattach_s) if setting.reattach_s else None
        self.channel = channel
        self._blocks: deque[Block] = deque()
        """Those in hand."""
        self._block_steps = 0
        """Made of the first of them."""
        self.link = NodeLink(
            self.model.flat,
            vectors,  # type: ignore[arg-type]
            channel,  # type: ignore[arg-type]
            last_step=world.manifest.config.inner.steps,
            node_search=self.listener,  # type: ignore[arg-type]
            evaluate=evaluate,
            blocks=self._blocks,
        )
        self.is_dead = False
        self.has_ended = False
        """In order: it has taken all that its node had told it."""
        self.is_paused = False
        self.hears_since = 0.0
        """Since when it does what the node tells it."""
        self.is_poisoned = False
        """Its parameters are not numbers any more."""
        self.gone: Callable[[str, int], None] | None = None
        """Of the node that has it."""

    # -- its life ------------------------------------------------------------------------------------------------------

    def begin(self, name: LearnerId) -> None:
        """A node has it, and calls it so."""
        self.hears_since = self.world.now
        self.world.learners.by_name[name] = self
        self.world.learners.truths[name] = self.truth

    def _replaced(self, shards: Iterable[ShardId]) -> None:
        self.world.checks.threw_away(self, tuple(shards))
        for shard in shards:
            self.truth.thrown[shard] = len(self.truth.tokens)

    def wake(self, after_s: float) -> None:
        """Look at the link after this time."""
        self.world.at(self.world.now + after_s, self._boundary)

    def _boundary(self) -> None:
        if self.is_dead:
            return
        if self.is_paused:
            self.wake(IDLE_S)
            return
        before = self.link.counts.steps
        was_lost = self.listener is not None and self.listener.is_open
        try:
            goes_on = self.link.boundary()
        except (RuntimeError, ValueError) as error:
            self.link.fail(str(error))
            self.exit(1, str(error))
            return
        if (
            not was_lost
            and self.listener is not None
            and self.listener.is_open
            and self.link.counts.steps == 0 < before
        ):
            self.truth = Truth(len(self.world.layout.shards))  # what it makes from now on is another learner's
        if not goes_on:
            self.has_ended = True
            self.exit(0, "it ended")
        elif self.link.is_training:
            setting = self._setting
            step_s = setting.step_s * (1 + 0.2 * (self.world.random.random() - 0.5))
            self.world.at(self.world.now + step_s, lambda: self._step(step_s))
        else:
            self.wake(IDLE_S)

    def _step(self, step_s: float) -> None:
        if self.is_dead:
            return
        if self.is_paused:
            self.world.at(self.world.now + IDLE_S, lambda: self._step(step_s))
            return
        self.model.step()
        if self.is_poisoned:
            self.model.poison()
        tokens = self._setting.tokens_per_step
        self.truth.tokens.append(self.link.counts.tokens + tokens)
        self.link.stepped(tokens, float("nan") if self.is_poisoned else 1.0, step_s)
        self._block_steps = self._block_steps + 1 if self._blocks else 0
        if self._block_steps == BLOCK_STEPS:
            self._block_steps = 0
            self.link.block_finished(self._blocks.popleft())
        self._boundary()

    def exit(self, status: int, reason: str) -> None:
        """The process ends."""
        if self.is_dead:
            return
        self.is_dead = True
        gone = self.gone
        if gone is not None:
            heard_all_s = max(self.world.now, self.channel.arrives_at) + 0.01
            self.world.at(heard_all_s, lambda: gone(reason, status))

    def kill(self) -> None:
        """SIGKILL."""
        self.exit(-9, "killed")


def evaluate(theta: Tensor) -> float:
    """A loss that becomes less and less: every step moves the parameters farther from their beginning."""
    return 1e3 / (1.0 + float(theta.abs().sum()))


class _Life:
    """A node's handle of a learner (``peer.host.LearnerLife``)."""

    def __init__(self, learner: SimulatedLearner, channel: SimulatedChannel, *, is_adopted: bool) -> None:
        self._learner = learner
        self._channel = channel
        self.is_adopted = is_adopted
        self.pid = 1

    def send(self, message: learner_ipc.FromNode) -> None:
        """Queue a command."""
        self._channel.tell(message)

    def end(self, reason: str) -> None:
        """Kill it."""
        self._learner.exit(-9, reason)


class StartSimulatedLearner:
    """``peer.host.StartLearner`` of one life of a node."""

    def __init__(self, host: SimulatedHost, vectors: Vectors) -> None:
        self._host = host
        self._vectors = vectors

    def __call__(
        self,
        arguments: Any,
        *,
        heard: Callable[[learner_ipc.FromLearner], None],
        ended: Callable[[str, int], None],
        socket_name: str,
        manifest: bytes | None,
        patience_s: float,
    ) -> _Starting:
        """See there."""
        name = LearnerId(arguments[list(arguments).index("--incarnation") + 1])
        return _Starting(self._host, self._vectors, name, heard, ended)


class _Starting:
    """The block in which a learner lives."""

    def __init__(
        self,
        host: SimulatedHost,
        vectors: Vectors,
        name: LearnerId,
        heard: Callable[[learner_ipc.FromLearner], None],
        ended: Callable[[str, int], None],
    ) -> None:
        self._host = host
        self._vectors = vectors
        self._name = name
        self._channel = SimulatedChannel(host, heard)
        self._ended = ended
        self._learner: SimulatedLearner | None = None

    async def __aenter__(self) -> _Life:
        host = self._host
        world = host.world
        world.check_alive(host)
        try:
            host.disk.refuse(START)
        except OSError:
            world.happened["learner-not-started"] += 1
            raise
        waiting = world.waiting_learner(host.name)
        is_adopted = waiting is not None
        if waiting is not None:
            assert waiting.listener is not None
            waiting.listener.incoming = _NodeConnection(self._vectors, self._channel)
            waiting.channel = self._channel
            learner = waiting
        else:
            learner = SimulatedLearner(world, host.name, self._channel, self._vectors)
            host.workers.learners += 1
            if host.workers.learners > 1 + RESTARTS:
                world.checks.violated(11, f"{host.name[-6:]} starts its learner again")
            world.learners.newest[host.name] = learner
            learner.link.greet(device="cpu", has_blocks=True)
            learner.wake(world.computers[host.name].setting.load_s)
        learner.begin(self._name)
        self._learner = learner
        learner.gone = self._gone
        return _Life(learner, self._channel, is_adopted=is_adopted)

    def _gone(self, reason: str, status: int) -> None:
        self._host.do(lambda: self._ended(reason, status))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        learner = self._learner
        if learner is None or self._host.is_dead:
            return
        self._channel.tell(learner_ipc.Exit())
        until = self._host.now() + EXIT_S
        while not learner.is_dead and self._host.now() < until:
            await self._host.sleep(0.1)
        learner.kill()


# -- A simulated learner's parameters, of which every step leaves a mark -----------------------------------------------
# A learner has a *lane*: one element of each chunk of the model. Each of its inner steps takes 1 off the parameters
# there, so its outer gradient holds, in its lane and nowhere else, how many steps it is about. Whoever loses a step, or
# counts one twice, changes these numbers.


class _Watched(FlatParameters):
    """Tells which shards the learner threw away to take the global parameters."""

    replaced: Callable[[Iterable[ShardId]], None]
    looks: Callable[[], int]
    """How often the next copy is asked for before it has ended."""

    def copy_from(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Finished | None:
        """Parameters = ``vector``."""
        super().copy_from(vector, shards, at)
        self.replaced(shards)
        return self._under_way(lambda: None)

    def add_from(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Finished | None:
        """Parameters += ``vector``."""
        super().add_from(vector, shards, at)
        return self._under_way(lambda: None)

    def copy_to(self, vector: Tensor, shards: Iterable[ShardId], at: Sequence[int] = ()) -> Finished | None:
        """``vector`` = parameters of now, when the copy ends."""
        copy, placed = torch.empty_like(vector), tuple(moves(self.layout, tuple(shards), at))
        super().copy_to(copy, tuple(shard for shard, _ in placed), at)

        def arrive(of: tuple[tuple[ShardId, int], ...]) -> None:
            for shard, moved in of:
                piece = self.layout.shards[shard]
                here = slice(piece.start + moved, piece.stop + moved)
                vector[here].copy_(copy[here])

        arrive(placed[:1])  # a copy under way is there in part
        return self._under_way(lambda: arrive(placed[1:]))

    def _under_way(self, arrive: Callable[[], None]) -> Finished | None:
        left = self.looks()
        if not left:
            arrive()
            return None

        def is_finished() -> bool:
            nonlocal left
            left -= 1
            if not left:
                arrive()
            return left <= 0

        return is_finished


class MarkedModel:
    """Parameters of which every step leaves a mark in ``lane``."""

    def __init__(self, manifest: Manifest, layout: Layout, lane: int) -> None:
        self.lane = lane
        self.parameters = [torch.zeros(spec.shape) for spec in manifest.tensors]
        named = [(spec.name, tensor) for spec, tensor in zip(manifest.tensors, self.parameters, strict=True)]
        self.flat = _Watched(named, manifest.tensors, layout)
        self.flat.looks = lambda: 0
        self._mark = torch.zeros(layout.elements)
        """What one step adds, as the run's flat vector."""
        for shard in layout.shards:
            for start in range(shard.start, shard.stop, CHUNK):
                self._mark[start + lane] = -1.0

    def step(self) -> None:
        """One inner step."""
        FlatParameters.add_from(self.flat, self._mark, self.flat.everything)

    def poison(self) -> None:
        """They are not numbers any more."""
        self.parameters[0].view(-1)[self.lane] = float("nan")

    def vector(self) -> Tensor:
        """As the run's flat vector."""
        out = torch.empty(len(self._mark))
        FlatParameters.copy_to(self.flat, out, self.flat.everything)
        return out
