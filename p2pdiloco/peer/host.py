"""Host interface: all that a peer needs of its environment (time, long work, other peers, its learner, its disk).

Rules of this file:
1. Modules in ``peer/`` do not use threads, sockets, processes, files or clocks directly. They use a host.
   ``node.local_host.LocalHost`` is the real one (event loop, threads, disk). The tests have one in virtual time, in
   which every operation may fail (``tests/peer_sim``).
2. Coroutines, futures and locks of asyncio work the same with both. Every wait ends in something that the host started,
   so a host that stops also stops its whole peer.
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
# Elementary file operations. Each may fail, or be the last before a crash.
# Rules of this section:
# 1. After a crash the old file or the new one is there, never a mixture: ``replace`` makes the bytes durable before the
#    name, and the name before it returns. The temporary file lies in the target's own folder.
# 2. Everything here blocks: call it on the host's ``disk`` queue, or in a program that may wait.


Buffer = bytes | bytearray | memoryview

# Suffix of a file that is being written. If nobody is writing it, a crash left it.
PART = ".part"


class Disk(Protocol):
    """A file system. All methods raise OSError. ``util.files.LocalDisk`` is the real one."""

    def names(self, folder: Path) -> list[str]:
        """Return the names in ``folder``, sorted; an empty list if there is no such folder."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """Return at most ``size`` bytes of the file (None: all) from ``start``."""

    def write(self, path: Path, parts: Iterable[Buffer]) -> None:
        """Create a file from ``parts``, and its folder if needed. Not durable before ``sync``."""

    def put(self, path: Path, at: int, *parts: Buffer) -> None:
        """Write ``parts`` at offset ``at``, the start of a sector of 4096 bytes. Creates the file if needed.

        The rest of the last sector is overwritten. Not durable before ``sync``.
        """

    def append(self, path: Path, part: Buffer) -> None:
        """Append ``part`` to an existing file. Not durable before ``sync``."""

    def sync(self, path: Path) -> None:
        """Make the file's bytes durable before returning."""

    def sync_folder(self, folder: Path) -> None:
        """Make renames in ``folder`` durable before returning."""

    def rename(self, old: Path, new: Path) -> None:
        """Rename ``old`` to ``new`` atomically, replacing ``new``."""

    def remove(self, path: Path) -> None:
        """Remove a file; do nothing if there is none."""

    def remove_folder(self, folder: Path) -> None:
        """Remove ``folder`` and everything in it, as far as possible."""


def replace(disk: Disk, path: Path, parts: Iterable[Buffer], *, is_durable: bool = True) -> None:
    """Replace the content of ``path`` by ``parts``, atomically.

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
    """Remove half-written files that a crash left in ``folder``; return their names. Only where nobody else writes."""
    found = [name for name in disk.names(folder) if name.endswith(PART)]
    for name in found:
        disk.remove(folder / name)
    return found


# -- Host interface ----------------------------------------------------------------------------------------------------


T = TypeVar("T")

# Queues for long work, each in order of submission. ``tensors``: the model state (in order for each shard). ``checks``:
# verification of received data, apart, so that a flood of payloads does not delay own merges. ``disk``: files. ``log``:
# the write-ahead log, apart, so that own commits do not wait for a checkpoint. ``audits``: other owners' merges, made
# again, apart, so that nothing waits for them.
Queue = Literal["tensors", "checks", "disk", "log", "audits"]


class Links(Protocol):
    """Connections to other peers. ``transport.transport.Transport`` is the real one."""

    @property
    def up_bytes_per_s(self) -> float | None:
        """Upload rate limit, budgeted or measured; None: no limit is known."""

    @property
    def line_bytes_per_s(self) -> float | None:
        """Rate that the link carries, configured or measured. Infinite: all traffic stays on this machine. None: not
        known."""

    def peers(self) -> list[PeerId]:
        """Return the connected peers."""

    def queued_bytes(self, peer: PeerId) -> int:
        """Return the bytes queued for ``peer``."""

    def send(
        self, peer: PeerId, body: bytes, payload: bytes | memoryview | None = None, *, topic: str | None = None
    ) -> bool:
        """Queue a message. It replaces a message with the same ``topic`` that is still waiting.

        Returns False if the peer is not connected or its queue is full.
        """

    async def request(self, peer: PeerId, body: bytes, *, timeout_s: float, max_payload: int = 0) -> Response:
        """Send a request and return the response; raises RequestError."""

    def hang_up(self, peer: PeerId, reason: str) -> None:
        """Close the connection with ``peer`` at once. Queued messages are lost."""

    def blame(self, peer: PeerId, *, is_forged: bool = False) -> None:
        """Record that ``peer`` sent malformed data. After too much of it, the peer is blocked for a while: after a few
        messages if they were forged."""

    def is_shut_out(self, peer: PeerId) -> bool:
        """Return whether ``peer`` is blocked for what it sent."""


class Handle(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None: ...


class LearnerLife(Protocol):
    """One running process of a learner."""

    @property
    def is_adopted(self) -> bool:
        """True if an earlier life of this node started it."""

    @property
    def pid(self) -> int:
        """Process ID of the learner."""

    def send(self, message: learner_ipc.FromNode) -> None:
        """Queue a command. If the queue is full, the learner is stuck and is ended."""

    def end(self, reason: str) -> None:
        """End the process, which hangs. ``reason`` is reported as that of its end. Not for training scripts."""


class StartLearner(Protocol):
    """Starts a learner, or adopts one that waits for its node.

    Entering the context raises OSError (the learner cannot be started) or TimeoutError (no training script came).
    Leaving it ends the learner in order.
    """

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        heard: Callable[[learner_ipc.FromLearner], None],
        ended: Callable[[str, int], None],
        socket_name: str,
        manifest: bytes | None,
        patience_s: float,
    ) -> AbstractAsyncContextManager[LearnerLife]:
        """Return a context manager for one learner.

        ``heard`` gets the learner's messages. ``ended`` gets a sentence and an exit status when it is gone. A learner
        waits for its node on the socket ``socket_name``. With a ``manifest``, the learner is a training script,
        which has ``patience_s`` seconds to connect.
        """


class Host(Protocol):
    """The environment of one peer. ``node.local_host.LocalHost`` is the real one."""

    @property
    def disk(self) -> Disk:
        """Storage that survives a restart. Use it on the ``disk`` queue."""

    @property
    def start_learner(self) -> StartLearner:
        """Starts this peer's learner."""

    @property
    def links(self) -> Links:
        """Connections to other peers."""

    def now(self) -> float:
        """Return the time in seconds; never goes back."""

    def call_at(self, when: float, action: Callable[[], None]) -> Handle:
        """Call ``action`` at time ``when``, unless the handle is cancelled."""

    async def sleep(self, seconds: float) -> None:
        """Wait for this many seconds."""

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run a coroutine that ends by itself, in the background. A failure is logged and stops nothing else."""

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run ``work()`` in the background until the peer ends. If it fails, that is logged and it is started again."""

    def work(self, queue: Queue, work: Callable[[], T], shard: ShardId | None = None) -> asyncio.Future[T]:
        """Run ``work`` after all earlier jobs of the same queue. A job of one ``shard`` only waits for earlier jobs of
        that shard and of no shard."""

    def draw(self) -> float:
        """Return a random number from 0 to 1, which no other peer can foresee."""

    def draw_name(self) -> str:
        """Return a random name of 12 characters that is practically unique."""


async def within(host: Host, future: asyncio.Future[T], limit_s: float) -> T:
    """Wait for ``future`` and return its result.

    Raises:
        TimeoutError: there was no result in ``limit_s`` seconds. The future is cancelled.
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
