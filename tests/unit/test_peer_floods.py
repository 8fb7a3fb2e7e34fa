"""A member that floods another with messages that are well-formed and cost it time."""

from __future__ import annotations

from pathlib import Path

import pytest
from actors import genesis
from troupe import Stage, act

from p2pdiloco.peer import peer as module
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import FragmentId, ShardId, digest_of
from p2pdiloco.wire.control_messages import encode

FLOODS: list[msg.Message] = [
    msg.HeadsRequest(),
    msg.Turn(FragmentId(0), 8, ()),
    msg.Refused(ShardId(0), digest_of(b"base"), "stale", msg.Head(ShardId(0), 0, digest_of(b"head"), 0)),
]


@pytest.mark.parametrize("message", FLOODS, ids=lambda message: type(message).__name__)
def test_a_flood_of_one_kind_is_dropped_and_costs_its_sender_the_connection(
    tmp_path: Path, message: msg.Message
) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            eve = await stage.add("eve", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            blamed: list[str] = []
            ann.peer.host.links.blame = blamed.append  # type: ignore[method-assign]
            before = len(ann.events)
            for _ in range(module.MESSAGE_BURST + 500):
                ann.peer.message(eve.id, encode(message), None)
            taken = sum(isinstance(e, ev.Received) and e.peer == eve.id for e in ann.events[before:])
            assert taken == module.MESSAGE_BURST
            assert blamed == [eve.id] * 500
            assert ann.peer.metrics.faults["flood"] == 500
            ann.peer.message(eve.id, encode(msg.Leaving("done")), None)
            assert ann.peer.metrics.faults["flood"] == 500, "other kinds have a limit of their own"

    act(story)


def test_a_peer_is_heard_again_once_it_is_slower(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stage(tmp_path) as stage:
            ann = await stage.found()
            eve = await stage.add("eve", genesis(stage.manifest), has_learner=False)
            await stage.wait(3.0)
            for _ in range(module.MESSAGE_BURST + 10):
                ann.peer.message(eve.id, encode(msg.HeadsRequest()), None)
            faults = ann.peer.metrics.faults["flood"]
            await stage.wait(1.0)
            for _ in range(module.MESSAGES_PER_S // 2):
                ann.peer.message(eve.id, encode(msg.HeadsRequest()), None)
            assert ann.peer.metrics.faults["flood"] == faults

    act(story)
