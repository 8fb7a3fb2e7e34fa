"""Copies of shards' states, made on the worker thread and paired with what the machine says of them.

Rules of this file:
1. A copy and what is said of it are of one head: ``then`` runs in the turn of the loop in which the copy is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from p2pdiloco.peer.driver import Driver
from p2pdiloco.peer.host import within
from p2pdiloco.peer.integrity import SpoiltStateError
from p2pdiloco.protocol.ids import Digest, ShardId

T = TypeVar("T")

COPY_S = 60.0


class CopyError(Exception):
    """There is none now; the message says why."""


async def copied(
    driver: Driver,
    shard: ShardId,
    data: memoryview,
    then: Callable[[Digest, bytes], T],
    *,
    chunks: range | None = None,
    is_checked: bool = True,
) -> T:
    """Fill ``data`` with the shard's state as it travels (only ``chunks``, by default all); what ``then`` makes of its
    head and the digests of its chunks. ``is_checked``: chunks that nobody has looked at are compared with these.

    Raises:
        CopyError: the state is not here, or not as it should be, or the worker is busy for ``COPY_S``.
    """
    found: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def take(result: tuple[Digest, bytes]) -> None:
        if not found.done():
            found.set_result(then(*result))

    def refuse(error: Exception) -> None:
        if isinstance(error, SpoiltStateError):
            driver.spoilt(error)
        if not found.done():
            found.set_exception(CopyError(str(error)))

    driver.job(lambda: driver.state.copy(shard, data, chunks, is_checked=is_checked), take, refuse, shard=shard)
    try:
        return await within(driver.host, found, COPY_S)
    except TimeoutError:
        raise CopyError("busy") from None
