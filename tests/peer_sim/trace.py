"""Follow one contribution from its arrival at an owner to the learner's parameters: which files it enters, how often.

    python -m tests.peer_sim.trace [--files]

Two peers train in virtual time. Of the first contribution whose arrival makes the owner merge, every call of
p2pdiloco's code is counted that happens because of it, until the owner's learner has added the update to its
parameters: on worker threads and in later callbacks, too, since the mark travels with ``contextvars``. Timers that are
set meanwhile, and what other peers do with the commit, do not count. The way through the socket is counted between two
real transports.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import Answer, Transport
from tests.peer_sim.worker import prepare

PACKAGE = str(Path(__file__).parents[2] / "p2pdiloco")
WAIT_S = 20.0


class CallCounter:
    """Calls of functions below ``p2pdiloco/`` because of one contribution."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.changes = 0
        """Calls from one file of the package into another one."""

    def called(self, frame: FrameType, path: str) -> None:
        """Count one call."""
        self.files[path] += 1
        caller = frame.f_back
        while caller is not None and _path(caller.f_code) is None:
            caller = caller.f_back  # through a library or a simulated host
        self.changes += caller is None or _path(caller.f_code) != path


CAUSE: ContextVar[CallCounter | None] = ContextVar("cause", default=None)
"""The contribution because of which the code runs."""


def _profile(frame: FrameType, event: str, _: object) -> None:
    if event == "call" and (path := _path(frame.f_code)) is not None and (counter := CAUSE.get()) is not None:
        counter.called(frame, path)


def _path(code: CodeType) -> str | None:
    """Below the package, without its ending; None for code of others, and for comprehensions."""
    name = code.co_filename
    if not name.startswith(PACKAGE) or code.co_name in ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"):
        return None
    return name[len(PACKAGE) + 1 :].removesuffix(".py")


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in a context without a cause: what it schedules does not count."""

    def called(*arguments: Any, **named: Any) -> Any:
        context = copy_context()
        context.run(CAUSE.set, None)
        return context.run(function, *arguments, **named)

    return called


def trace_peers() -> CallCounter:
    """From the owner's admission to its learner's parameters. To be called first of all in a process."""
    prepare()
    from p2pdiloco.peer.peer import Peer
    from p2pdiloco.protocol import events as ev
    from p2pdiloco.protocol import messages as msg
    from p2pdiloco.protocol.manifest import CodecConfig, OuterConfig, ScheduleConfig
    from p2pdiloco.wire.control_messages import decode_message
    from tests.peer_sim.host import SimulatedHost
    from tests.peer_sim.learner import SimulatedLearner
    from tests.peer_sim.machine import PeerSetting
    from tests.peer_sim.network import SimulatedLinks
    from tests.peer_sim.world import World, WorldSetting

    peers = tuple(PeerSetting(step_s=0.2, tokens_per_step=10) for _ in range(2))
    setting = WorldSetting(
        peers=peers,
        schedule=ScheduleConfig(fragments=1, sync_every=6, overlap=3, min_quorum=2, grace_share=0.7),
        outer=OuterConfig(learning_rate=0.5, momentum=0.5),
        codec=CodecConfig(),
        steps=60,
        shards_a_fragment=1,
        blocks=0,
        delay_s=0.02,
        bytes_per_s=1e6,
    )
    world = World(0, setting)
    for name in world.computers:
        world.at(0.0, lambda name=name: world.begin(name))  # type: ignore[misc]
    admit, observed, boundary = Peer.admit, World._observed, SimulatedLearner._boundary
    merged: list[tuple[SimulatedHost, CallCounter]] = []

    def admitted(peer: Peer, source: Any, body: bytes, size: int) -> msg.Message | None:
        if size and not merged and isinstance(decode_message(body), msg.Contribution):
            CAUSE.set(CallCounter())
        return admit(peer, source, body, size)

    def seen(world: World, host: SimulatedHost, event: ev.Event) -> None:
        counter = CAUSE.get()
        if isinstance(event, ev.Applied) and counter is not None and not merged:
            merged.append((host, counter))
        observed(world, host, event)

    def looked(learner: SimulatedLearner) -> None:
        if not merged or learner is not world.learners.newest.get(merged[0][0].name):
            _apart(boundary)(learner)
            return
        context = copy_context()
        context.run(CAUSE.set, merged[0][1])
        context.run(boundary, learner)
        world.end()

    patches: list[Any] = [
        mock.patch.object(Peer, "admit", admitted),
        mock.patch.object(World, "_observed", seen),
        mock.patch.object(SimulatedLearner, "_boundary", looked),
        mock.patch.object(SimulatedHost, "_set", _apart(SimulatedHost._set)),
        mock.patch.object(SimulatedLinks, "send", _apart(SimulatedLinks.send)),
    ]
    for patch in patches:
        patch.start()
    sys.setprofile(_profile)
    try:
        violations = world.run()
    finally:
        sys.setprofile(None)
        mock.patch.stopall()
    if not merged:
        raise RuntimeError(f"no contribution was merged when it came; {violations}")
    return merged[0][1]


class _Receiver:
    """A handler that stops counting when its message is there."""

    def __init__(self) -> None:
        self.is_there = threading.Event()

    def connected(self, peer: PeerId, address: str, is_observer: bool, inbound: bool) -> None:
        """Nothing happens."""

    def disconnected(self, peer: PeerId, reason: str) -> None:
        """Nothing happens."""

    def message(self, peer: PeerId, body: Any, payload: memoryview | None) -> None:
        """Here the way through the socket ends."""
        sys.setprofile(None)
        self.is_there.set()

    def admit(self, peer: PeerId, body: bytes, size: int) -> bytes:
        """Everything may come."""
        return body

    async def answer(self, peer: PeerId, body: bytes) -> Answer:
        """Nothing is asked."""
        return Answer(b"")


def trace_socket() -> CallCounter:
    """From bytes on a TLS socket to the handler of messages, of one message with a payload of 1 KB."""
    counter, receiver, ready, over = CallCounter(), _Receiver(), threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def receive() -> None:
        CAUSE.set(counter)
        async with transport(receiver) as opened:
            found.update(loop=asyncio.get_running_loop(), address=opened.listen_addresses()[0], peer=opened.peer_id)
            ready.set()
            await asyncio.to_thread(over.wait, WAIT_S)

    async def send() -> None:
        await asyncio.to_thread(ready.wait, WAIT_S)
        async with transport(_Receiver()) as opened:
            await opened.dial(found["address"])
            await asyncio.sleep(0.5)  # what follows a handshake is over
            found["loop"].call_soon_threadsafe(sys.setprofile, _profile)
            opened.send(found["peer"], b"message", bytes(1024))
            if not await asyncio.to_thread(receiver.is_there.wait, WAIT_S):
                raise RuntimeError("the message did not arrive")
            over.set()

    def transport(handler: _Receiver) -> AbstractAsyncContextManager[Transport]:
        return Transport(Identity.ephemeral(), listen="/ip4/127.0.0.1/tcp/0", run="run", version=1).serve(handler)

    thread = threading.Thread(target=asyncio.run, args=(receive(),), name="receiver")
    thread.start()
    try:
        asyncio.run(send())
    finally:
        over.set()
        thread.join()
    return counter


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer_sim.trace", description=__doc__)
    parser.add_argument("--files", action="store_true", help="print each file and the calls of its functions")
    options = parser.parse_args()
    peers = trace_peers()
    counter = trace_socket()
    counter.files += peers.files
    counter.changes += peers.changes
    print(f"{len(counter.files)} files, {counter.files.total()} calls, {counter.changes} of them into another file")
    if options.files:
        for path, calls in counter.files.most_common():
            print(f"{calls:6} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
