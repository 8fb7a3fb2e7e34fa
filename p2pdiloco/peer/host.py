"""Interface between a peer and the world: time, long work, other peers, its learner, its disk.

Rules of this file:
1. Nothing in ``peer/`` knows threads, sockets, processes, files or clocks: it has a host. ``hosts/`` is the world as it
   is (an event loop, threads, a disk); ``peersim/`` is a world in virtual time, in which everything may fail.
2. Coroutines, futures and locks of asyncio are notation, the same in both: every wait ends in something that the host
   began, so that a host that stands still holds all of its peer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from p2pdiloco.protocol.ids import PeerId, ShardId
from p2pdiloco.wire import learner_ipc
from p2pdiloco.wire.request_reply import Response

# -- Disk interface ----------------------------------------------------------------------------------------------------
# What a peer does to its disk, in steps that each may fail or be the last, and how a file is replaced with them.
# Rules of this file:
# 1. A crash leaves the old file or the new one, never a mixture: bytes reach the disk before the name does, and the
#    name before ``replace`` returns. The temporary file lies in the target's own folder.
# 2. Everything here blocks: it belongs on the host's ``disk`` queue, or into a program that waits for it.


Buffer = bytes | bytearray | memoryview

PART = ".part"
"""Suffix of what is being written; whatever has it and is not being written is a crash's."""


class Disk(Protocol):
    """A file system. All raise OSError; ``util.files.LocalDisk`` is the real one."""

    def names(self, folder: Path) -> list[str]:
        """What lies in ``folder``, sorted; nothing if it is not there."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """The file's bytes from ``start``; at most ``size``, or all."""

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        """A new file of ``parts``, one after the other; its folder is made. Not durable before ``sync``."""

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        """``parts``, one after the other, from ``at`` on, where a sector of 4096 bytes begins, in a file that is made
        if it is not there. What comes behind them in their last sector is lost. Not durable before ``sync``."""

    def append(self, path: Path, part: Buffer) -> None:
        """``part`` at the end of a file that is there. Not durable before ``sync``."""

    def sync(self, path: Path) -> None:
        """The file's bytes are durable when this returns."""

    def sync_folder(self, folder: Path) -> None:
        """Renames in ``folder`` are durable when this returns."""

    def rename(self, old: Path, new: Path) -> None:
        """``new`` is what ``old`` was, at once."""

    def remove(self, path: Path) -> None:
        """A file; nothing if it is not there."""

    def remove_folder(self, folder: Path) -> None:
        """Remove ``folder`` and all that is in it, as far as possible."""


def replace(disk: Disk, path: Path, parts: Iterable[Buffer], *, is_durable: bool = True) -> None:
    """Replace ``path`` by ``parts``.

    Raises:
        OSError: the disk is full, or the folder is not writable. The old file is then untouched.
    """
    temporary = path.with_name(f".{path.name}{PART}")
    try:
        disk.write(temporary, parts)
        if is_durable:
            disk.sync(temporary)
        disk.rename(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(temporary)
        raise
    if is_durable:
        disk.sync_folder(path.parent)


def sweep(disk: Disk, folder: Path) -> list[str]:
    """Remove what a crash left half-written in ``folder``; the names. Only where nobody else writes."""
    found = [name for name in disk.names(folder) if name.endswith(PART)]
    for name in found:
        disk.remove(folder / name)
    return found


# -- Host interface ----------------------------------------------------------------------------------------------------
# What a peer needs of the world, in one place: time, long work, other peers, its learner, its disk.


T = TypeVar("T")

Queue = Literal["tensors", "checks", "disk", "log"]
"""Where long work runs, in the order in which it came: what touches the global state (of each shard in that order);
checks of what others sent, so that a flood of payloads does not delay our own merges; files; the write-ahead log, since
own commits wait for no checkpoint."""


class Links(Protocol):
    """Connections to other peers. ``transport.transport.Transport`` is the real one."""

    @property
    def up_bytes_per_s(self) -> float | None:
        """What may be sent, budgeted or measured; None: no limit is known."""

    @property
    def line_bytes_per_s(self) -> float | None:
        """What the line carries, told or measured; infinite: nothing leaves this machine; None: not known."""

    def peers(self) -> list[PeerId]:
        """Who can be sent to."""

    def queued_bytes(self, peer: PeerId) -> int:
        """Bytes that wait to be sent to ``peer``."""

    def send(
        self, peer: PeerId, body: bytes, payload: bytes | memoryview | None = None, *, topic: str | None = None
    ) -> bool:
        """Send a message; it takes the place of one with its ``topic`` that only waits. False: not connected, or too
        much waits."""

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Ask; raises RequestError."""

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """End the connection with ``peer`` at once; what waits to be sent is lost."""

    def blame(self, peer: PeerId) -> None:
        """``peer`` sent what cannot be read. Too much of that, and it is cut off for a while."""


class Handle(Protocol):
    """A scheduled call, which can be cancelled."""

    def cancel(self) -> None: ...


class LearnerLife(Protocol):
    """One life of a learner, running."""

    @property
    def is_adopted(self) -> bool:
        """Whether the node's last life started it."""

    @property
    def pid(self) -> int:
        """Process ID of the learner."""

    def send(self, message: learner_ipc.FromNode) -> None:
        """Queue a command. A learner that takes none for so long that the queue is full is stuck, and ends."""


class StartLearner(Protocol):
    """Start a learner, or take over one that waits. Entering raises OSError (it cannot be started) or TimeoutError (no
    training script came); leaving ends it in order."""

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        heard: Callable[[learner_ipc.FromLearner], None],
        ended: Callable[[str, int], None],
        reunion: str,
        manifest: bytes | None,
        patience_s: float,
    ) -> AbstractAsyncContextManager[LearnerLife]:
        """``heard`` gets its messages, ``ended`` a sentence and an exit status when it is gone. With a ``manifest`` it
        is a training script, for which ``patience_s`` seconds are waited."""


class Host(Protocol):
    """One peer's world. ``node.local_host.LocalHost`` is the real one."""

    @property
    def disk(self) -> Disk:
        """What survives this life, for the ``disk`` queue."""

    @property
    def start_learner(self) -> StartLearner:
        """See there."""

    @property
    def links(self) -> Links:
        """To other peers."""

    def now(self) -> float:
        """Seconds, never going back."""

    def call_at(self, when: float, action: Callable[[], None]) -> Handle:
        """``action`` at time ``when``, unless it is cancelled."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run ``work``, which ends by itself, beside the rest. Its failure is logged, and takes nothing else down."""

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run ``work()`` beside the rest, until the peer ends. If it fails, that is told and it is started again."""

    def work(self, queue: Queue, work: Callable[[], T], shard: ShardId | None = None) -> asyncio.Future[T]:
        """Run ``work`` after all that came before on the same queue. What touches tensors of one ``shard`` only comes
        after all that is for that shard or for none."""

    def draw_name(self) -> str:
        """12 characters that nobody else will draw."""


async def within(host: Host, future: asyncio.Future[T], limit_s: float) -> T:
    """What ``future`` brings.

    Raises:
        TimeoutError: nothing, in ``limit_s`` seconds; it is cancelled.
    """
    is_late = False

    def expire() -> None:
        nonlocal is_late
        is_late = True
        future.cancel()

    timer = host.call_at(host.now() + limit_s, expire)
    try:
        return await future
    except asyncio.CancelledError:
        if is_late:
            raise TimeoutError from None
        raise
    finally:
        timer.cancel()
