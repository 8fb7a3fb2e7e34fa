"""Calls by rendezvous servers: only so many at once, and each that is over makes room for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.nat import rendezvous_client
from p2pdiloco.nat.messages import Attended, Called
from p2pdiloco.nat.rendezvous_client import CALLS_AT_ONCE, Registration, RendezvousClient
from p2pdiloco.transport.identity import Identity
from p2pdiloco.transport.transport import DialError
from p2pdiloco.util.tasks import Tasks
from p2pdiloco.wire.request_reply import RequestRefused

POINT = Identity.ephemeral().peer_id
CALLED = Called(Identity.ephemeral().peer_id, b"t" * 32, dials=True)


def answer_of(tasks: Tasks) -> Callable[..., Any]:
    """Return the handler of servers' calls, of a client that is registered with ``POINT``."""
    answers = dict[type, Callable[..., Any]]()
    links: Any = SimpleNamespace(
        setup=SimpleNamespace(), answer_requests=answers.__setitem__, channel_of=lambda _: None
    )
    client = RendezvousClient(links, links, links, tasks)
    client.attended[POINT] = Registration(f"/ip4/127.0.0.1/tcp/1/p2p/{POINT}", Attended("127.0.0.1", 1))
    return answers[Called]


def test_only_so_many_calls_are_followed_at_once_and_those_that_failed_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        is_over = asyncio.Event()

        async def fail(*_: object) -> None:
            await is_over.wait()
            raise DialError("nobody is there")

        monkeypatch.setattr(rendezvous_client, "machines", fail)
        async with Tasks() as tasks:
            answer = answer_of(tasks)
            for _ in range(2):
                is_over.clear()
                for _ in range(CALLS_AT_ONCE):
                    await answer(POINT, CALLED)
                    await asyncio.sleep(0)
                with pytest.raises(RequestRefused, match="rate limit"):
                    await answer(POINT, CALLED)
                is_over.set()
                await asyncio.sleep(0.01)

    asyncio.run(story())


def test_calls_of_a_server_with_which_nobody_registered_are_refused() -> None:
    async def story() -> None:
        async with Tasks() as tasks:
            with pytest.raises(RequestRefused, match="not registered"):
                await answer_of(tasks)(Identity.ephemeral().peer_id, CALLED)

    asyncio.run(story())
