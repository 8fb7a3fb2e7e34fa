"""Which of two processes with one identity ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.swarm import duplicate_identity
from p2pdiloco.swarm.duplicate_identity import DuplicateIdentity, IdentityTaken, must_give_way
from p2pdiloco.util.event_bus import EventBus
from p2pdiloco.wire.directory_records import PeerRecord


@pytest.mark.parametrize(
    ("first", "second"), [((100.0, "b"), (101.0, "a")), ((100.0, "a"), (100.0, "b")), ((0.0, "z"), (1e9, "a"))]
)
def test_the_later_one_does_and_the_other_does_not(first: tuple[float, str], second: tuple[float, str]) -> None:
    assert must_give_way(*second, to=PeerRecord((), first[1], first[0]))
    assert not must_give_way(*first, to=PeerRecord((), second[1], second[0]))


@pytest.mark.parametrize(("began_s", "answers", "ends"), [(101.0, True, 1), (99.0, True, 0), (101.0, False, 0)])
def test_it_ends_once_if_a_process_that_began_earlier_answers(
    began_s: float, answers: bool, ends: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_duplicate(record: PeerRecord, peer: PeerId, _: object) -> str | None:
        looked.append(record.life)
        return "/ip4/127.0.0.1/tcp/1" if answers else None

    def spawn(work: Coroutine[Any, Any, None], *, name: str) -> None:
        asyncio.run(work)

    looked: list[str] = []
    ended: list[IdentityTaken] = []
    clock = SimpleNamespace(at=0.0)
    monkeypatch.setattr(duplicate_identity, "find_duplicate", find_duplicate)
    host: Any = SimpleNamespace(now=lambda: clock.at, spawn=spawn)
    events = EventBus()
    events.subscribe(IdentityTaken, ended.append)
    seen = DuplicateIdentity(PeerId("me"), None, host, events, began_s=began_s, life="mine")
    for clock.at in (0.0, 1.0, duplicate_identity.LOOK_S + 1.0):
        seen.handle_record(PeerRecord((), "other", 100.0))
    assert (len(ended), seen.must_end) == (ends, bool(ends))
    assert len(looked) == (1 if ends else 2), "it is looked at now and then, until it has won"
