"""Waiting for a condition with a deadline, for tests that must never sleep and hope."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.005
PROCESS_POLL_S = 0.05


async def until(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return once ``condition()`` is true.

    Raises:
        AssertionError: it is not within ``timeout_s``.
    """

    async def check() -> object:
        return condition()

    await until_async(check, timeout_s, what)


async def until_async(
    condition: Callable[[], Awaitable[object]], timeout_s: float = 10.0, what: str = "the condition"
) -> None:
    """Return once ``await condition()`` is true.

    Raises:
        AssertionError: it is not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0, what: str = "the condition") -> None:
    """As ``until``, for tests without an event loop that watch other processes.

    Raises:
        AssertionError: it is not within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s"
        time.sleep(PROCESS_POLL_S)
