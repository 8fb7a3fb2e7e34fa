"""Whole peers in one process, for tests of what a peer decides beyond the protocol: the real ``Peer`` with its driver,
global state, transfers, checkpoints and supervision, and a real ``OuterLink`` over a socket as its learner. Only the
host is a stage: time is a number, long work is done in the order in which it was asked for, messages arrive at once,
and the test may change or drop them. Files lie in a real folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from actors import FOUNDER, Learner, Recorded, genesis, make_manifest

from p2pdiloco.peer.ending import Ending
from p2pdiloco.peer.host import Queue
from p2pdiloco.peer.options import LearnerOptions, LinkOptions, PeerOptions
from p2pdiloco.peer.peer import InitialState, Peer
from p2pdiloco.peer.signatures import Permissions
from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.protocol.manifest import Layout
from p2pdiloco.training.shared_memory import SharedVectors, ring_elements
from p2pdiloco.transport.identity import Identity
from p2pdiloco.util.files import LOCAL
from p2pdiloco.wire.control_messages import decode_message, encode
from p2pdiloco.wire.request_reply import RequestError, Response
from tests.peer_sim.members import Everybody

T = TypeVar("T")

PATIENCE = 20
"""Rounds of the loop without anything to do, after which nothing will come by itself."""


def options_of(folder: Path, **options: Any) -> PeerOptions:
    """A peer's options, of which those of its link and its learner need no names of their own."""
    link = {name: options.pop(name) for name in LinkOptions.__struct_fields__ if name in options}
    learner = {name: options.pop(name) for name in LearnerOptions.__struct_fields__ if name in options}
    return PeerOptions(folder=folder, link=LinkOptions(**link), learner=LearnerOptions(**learner), **options)


class StageHost:
    """One peer's world."""

    disk = LOCAL
    up_bytes_per_s: float | None = None
    line_bytes_per_s: float | None = None

    def __init__(self, stage: Stage, member: Member) -> None:
        self._stage = stage
        self._member = member
        self.links = self

    # -- time and work

    def now(self) -> float:
        return self._stage.now

    def call_at(self, when: float, action: Callable[[], None]) -> _Call:
        return self._stage.call_at(when, action)

    async def sleep(self, seconds: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_at(self.now() + seconds, lambda: over.done() or over.set_result(None))
        await over

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._stage.tasks.add(task)
        return task

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        return self.spawn(work(), name=name)

    def work(self, queue: Queue, work: Callable[[], T], shard: ShardId | None = None) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - as an executor does
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        if queue in self._member.held:
            self._member.held[queue].append(run)
        else:
            self._stage.soon(run)
        return future

    def draw(self) -> float:
        return self._member.draws

    def draw_name(self) -> str:
        return f"{next(self._stage.names):012d}"

    # -- the learner

    def start_learner(
        self, arguments: Sequence[str], *, heard: Any, ended: Any, socket_name: str, manifest: Any, patience_s: float
    ) -> Learner:
        self._member.arguments = list(arguments)
        return Learner(self._member, heard, ended)

    # -- other peers

    def hang_up(self, peer: PeerId, reason: str) -> None:
        self._member.hung_up[peer] += 1

    def is_shut_out(self, peer: PeerId) -> bool:
        """Nobody is."""
        return False

    def blame(self, peer: PeerId, *, is_forged: bool = False) -> None:
        self._member.blamed[peer] += 1
        self._member.forged[peer] += is_forged

    def peers(self) -> list[PeerId]:
        return [b for a, b in self._stage.connections if a == self._member.id]

    def queued_bytes(self, peer: PeerId) -> int:
        return self._member.queued[peer]

    def send(
        self, peer: PeerId, body: bytes, payload: bytes | memoryview | None = None, *, topic: str | None = None
    ) -> bool:
        return self._stage.send(self._member.id, peer, body, payload)

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        if (self._member.id, peer) not in self._stage.connections:
            raise RequestError("not connected")
        self._member.asked[peer] += 1
        asking = asyncio.ensure_future(self._stage.members[peer].peer.answer(self._member.id, body))
        lost = self._stage.lost.setdefault((self._member.id, peer), asyncio.get_running_loop().create_future())
        late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_at(self.now() + timeout_s, lambda: late.done() or late.set_result(None))
        try:
            await asyncio.wait({asking, lost, late}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                answer = asking.result()
                payload = None if answer.payload is None else bytearray(answer.payload)
                self._stage.spoil_answer(peer, body, payload)
            if lost.done():
                raise RequestError("the connection is lost")
            if not asking.done():
                raise RequestError("no answer in time")
        finally:
            timer.cancel()
            asking.cancel()
        return Response(answer.body, None if payload is None else memoryview(payload))


class Member:
    """One peer on the stage, and what is seen of it."""

    def __init__(
        self,
        stage: Stage,
        folder: Path,
        identity: Identity,
        *,
        has_learner: bool,
        permissions: Permissions | None = None,
        **options: Any,
    ) -> None:
        self._stage = stage
        self.id = identity.peer_id
        self.lives: list[Learner] = []
        self.arguments: list[str] = []
        """Of the latest learner's program."""
        self.is_learner_waiting = False
        """The next learner is the last life's."""
        self.held: dict[Queue, list[Callable[[], None]]] = {}
        """Queues that stand still, with what waits in them; ``release`` lets them go on."""
        self.asked: Counter[PeerId] = Counter()
        """Questions of its own."""
        self.blamed: Counter[PeerId] = Counter()
        self.forged: Counter[PeerId] = Counter()
        self.hung_up: Counter[PeerId] = Counter()
        """For what could not be read."""
        self.draws = 1.0
        """What it draws: with 1 it audits nothing, with 0 everything."""
        self.queued: Counter[PeerId] = Counter()
        """Bytes that wait to be sent, as it sees them."""
        self.ending: Ending | None = None
        self.events: list[ev.Event] = []
        self.before: Callable[[ev.Event, list[ef.Effect]], None] = lambda event, effects: None
        """Called with each event before its effects are carried out."""
        self.host = StageHost(stage, self)
        layout = Layout.of(stage.manifest)
        self.vectors = SharedVectors.create(layout.elements, ring_elements(layout))
        self.metrics = Recorded(folder / "metrics.jsonl")
        self.peer = Peer(
            stage.manifest,
            options_of(folder, is_follower=not has_learner, **options),
            identity,
            self.host,
            self.vectors,
            self.metrics,
            sent_bytes=lambda: 0,
            status=lambda _: None,  # type: ignore[arg-type,return-value]
            observed=self._observed,
            permissions=permissions or Everybody(),
        )
        self.driver = self.peer.driver
        self.machine = self.peer.machine
        self.state = self.peer.state

    def _observed(self, event: ev.Event, effects: list[ef.Effect], now: float) -> None:
        self.events.append(event)
        self.before(event, effects)

    @property
    def learner(self) -> Learner:
        """The present life."""
        return self.lives[-1]

    @property
    def versions(self) -> list[int]:
        """Of its heads."""
        return [chain.head.version if chain.head is not None else -1 for chain in self.machine.core.chains]

    async def release(self, queue: Queue) -> None:
        """What waited is done now."""
        for run in self.held.pop(queue):
            self._stage.soon(run)
        await self._stage.settle()

    def faults(self) -> dict[str, int]:
        """What it holds against others."""
        return dict(self.metrics.faults)

    async def live(self) -> None:
        self.ending = await self.peer.live()


class Caught(NamedTuple):
    """A message that did not arrive."""

    sender: PeerId
    to: PeerId
    message: msg.Message
    payload: bytes


class _Call:
    """Of the stage's clock."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Stage:
    """``async with Stage(tmp_path) as stage``."""

    def __init__(self, folder: Path, **run: Any) -> None:
        """``run``: what ``make_manifest`` takes."""
        self.folder = folder
        self.manifest = make_manifest(**run)
        self.now = 1000.0
        self.names = itertools.count(1)
        self.members: dict[PeerId, Member] = {}
        self.connections: set[tuple[PeerId, PeerId]] = set()
        self.lost: dict[tuple[PeerId, PeerId], asyncio.Future[None]] = {}
        """Ends the questions over a connection."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.catch: Callable[[PeerId, PeerId, msg.Message], bool] = lambda sender, to, message: False
        """Messages that do not arrive; they are in ``caught``."""
        self.caught: list[Caught] = []
        self.spoil_answer: Callable[[PeerId, bytes, bytearray | None], None] = lambda a, body, payload: None
        """May change what a donor sends."""
        self._calls: list[tuple[float, int, _Call]] = []
        self._numbers = itertools.count()
        self._busy = 0

    async def __aenter__(self) -> Self:
        torch.set_num_threads(1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self.tasks:
            task.cancel()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        for member in self.members.values():
            member.driver.close()
            for life in member.lives:
                with contextlib.suppress(OSError):
                    await life.__aexit__(None, None, None)
        if error is None:
            failed = [r for r in results if isinstance(r, Exception)]
            assert not failed, failed

    # -- the world

    def soon(self, action: Callable[[], None]) -> None:
        """In this moment, after what was to be done before."""
        self._busy += 1

        def run() -> None:
            self._busy -= 1
            action()

        asyncio.get_running_loop().call_soon(run)

    def call_at(self, when: float, action: Callable[[], None]) -> _Call:
        call = _Call(action)
        heapq.heappush(self._calls, (when, next(self._numbers), call))
        return call

    async def settle(self) -> None:
        """Until nothing more happens in this moment."""
        idle = 0
        while idle < PATIENCE:
            idle = 0 if self._busy else idle + 1
            await asyncio.sleep(0)

    async def wait(self, seconds: float) -> None:
        """Time passes."""
        until = self.now + seconds
        await self.settle()
        while self._calls and self._calls[0][0] <= until:
            when, _, call = heapq.heappop(self._calls)
            if not call.is_cancelled:
                self.now = max(self.now, when)
                call.action()
                await self.settle()
        self.now = until

    def send(self, sender: PeerId, to: PeerId, body: bytes, payload: bytes | memoryview | None) -> bool:
        """A message; like a socket it copies."""
        if (sender, to) not in self.connections:
            return False
        data, message = b"" if payload is None else bytes(payload), decode_message(body)
        if self.catch(sender, to, message):
            self.caught.append(Caught(sender, to, message, data))
        else:
            self.soon(lambda: self._deliver(sender, to, body, None if payload is None else memoryview(data)))
        return True

    async def deliver(self, to: Member, sender: PeerId, message: msg.Message, payload: bytes | None = None) -> None:
        """A message of the test's own making."""
        self._deliver(sender, to.id, encode(message), None if payload is None else memoryview(payload))
        await self.settle()

    def _deliver(self, sender: PeerId, to: PeerId, body: bytes, data: memoryview | None) -> None:
        if (sender, to) in self.connections and not self.members[to].driver.is_closed:
            self.members[to].peer.message(sender, body, data)

    # -- peers

    async def add(
        self,
        name: str,
        initial: InitialState | None = None,
        *,
        identity: Identity | None = None,
        has_learner: bool = True,
        **options: Any,
    ) -> Member:
        """A peer, connected to all others; without ``initial`` a newcomer."""
        member = Member(self, self.folder / name, identity or Identity.ephemeral(), has_learner=has_learner, **options)
        others = list(self.members.values())
        self.members[member.id] = member
        member.peer.begin(initial)
        member.host.spawn(member.live(), name=f"{name} lives")
        for other in others:
            self.connect(member, other)
        await self.settle()
        return member

    async def found(self, name: str = "ann", **options: Any) -> Member:
        """The founder, whose learner trains."""
        member = await self.add(name, genesis(self.manifest), identity=FOUNDER, **options)
        if options.get("has_learner", True):
            await self.ready(member)
        return member

    async def beside(self, **options: Any) -> Member:
        """Bob, a founder's equal who merges nothing himself; the two know each other."""
        bob = await self.add("bob", genesis(self.manifest), weight=0.0, **options)
        if options.get("has_learner", True):
            await self.ready(bob)
        await self.wait(3.0)
        return bob

    async def ready(self, member: Member) -> None:
        """Its learner has taken the global parameters."""
        await self.settle()
        member.learner.boundary()
        await self.settle()
        assert member.learner.link.is_training

    def connect(self, one: Member, other: Member) -> None:
        for a, b in ((one, other), (other, one)):
            self.connections.add((a.id, b.id))
        for a, b in ((one, other), (other, one)):
            a.peer.connected(b.id, "", False, False)

    def disconnect(self, one: Member, other: Member) -> None:
        """A cut: both hear of it, and questions end."""
        for a, b in ((one, other), (other, one)):
            self.connections.discard((a.id, b.id))
            if (lost := self.lost.pop((a.id, b.id), None)) is not None:
                lost.set_result(None)
        for a, b in ((one, other), (other, one)):
            if not a.driver.is_closed:
                a.peer.disconnected(b.id, "cut")

    async def train(self, member: Member, *changes: float) -> None:
        """Inner steps, each followed by all that comes of it."""
        for change in changes:
            member.learner.step(change)
            await self.rest(member)

    async def rest(self, member: Member) -> None:
        """Until the learner has taken all that is on its way."""
        for _ in range(4):
            member.learner.boundary()
            await self.settle()

    def kill(self, member: Member) -> None:
        """Its node, with its learner: nothing is saved any more."""
        member.driver.close()
        for other in list(self.members.values()):
            if (member.id, other.id) in self.connections:
                self.disconnect(member, other)
        del self.members[member.id]


def act(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run an asynchronous test. Its time is a number, so a busy machine may take as long as pytest allows."""

    async def told() -> None:
        await story()
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}"

    asyncio.run(told())
