"""What a peer needs of the world, in one place: time, long work, other peers, its learner, its disk.

Rules of this file:
1. Nothing in ``peer/`` knows threads, sockets, processes, files or clocks: it has a host. ``hosts/`` is the world as it
   is (an event loop, threads, a disk); ``peersim/`` is a world in virtual time, in which everything may fail.
2. Coroutines, futures and locks of asyncio are notation, the same in both: every wait ends in something that the host
   began, so that a host that stands still holds all of its peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from p2pdiloco.wire import link


class LearnerLife(Protocol):
    """One life of a learner, running."""

    @property
    def is_adopted(self) -> bool:
        """Whether the node's last life started it."""

    @property
    def pid(self) -> int:
        """Of its process."""

    def send(self, message: link.FromNode) -> None:
        """Queue a command. A learner that takes none for so long that the queue is full is stuck, and ends."""


class StartLearner(Protocol):
    """Start a learner, or take over one that waits. Entering raises OSError (it cannot be started) or TimeoutError (no
    training script came); leaving ends it in order."""

    def __call__(
        self,
        arguments: Sequence[str],
        *,
        heard: Callable[[link.FromLearner], None],
        ended: Callable[[str, int], None],
        reunion: str,
        manifest: bytes | None,
        patience_s: float,
    ) -> AbstractAsyncContextManager[LearnerLife]:
        """``heard`` gets its messages, ``ended`` a sentence and an exit status when it is gone. With a ``manifest`` it
        is a training script, for which ``patience_s`` seconds are waited."""
