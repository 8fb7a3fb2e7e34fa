"""What a node's event log has of what its machine is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from actors import FOUNDER, make_manifest

from p2pdiloco.net.bandwidth import Traffic
from p2pdiloco.node import telemetry
from p2pdiloco.node.telemetry import MachineStepped, Telemetry
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.util.event_bus import EventBus


def test_an_evaluation_that_changes_nothing_is_not_written() -> None:
    """A member that tells of thousands fills nobody's disk."""
    written: list[tuple[str, dict[str, Any]]] = []
    view = SimpleNamespace(live=(), sync_every=4, evaluation=msg.Evaluation(0, 40, 4, 2.0))
    peer = SimpleNamespace(
        manifest=make_manifest(),
        config=SimpleNamespace(peer=FOUNDER.peer_id),
        layout=SimpleNamespace(elements=1, shards=()),
        host=SimpleNamespace(now=lambda: 0.0),
        metrics=SimpleNamespace(write=lambda kind, **fields: written.append((kind, fields))),
        machine=SimpleNamespace(view=view),
    )
    nothing = cast(Any, None)
    events = EventBus()
    Telemetry(cast(Any, peer), nothing, nothing, nothing, nothing, lambda: None, events)
    for step in range(1, 9):
        events.publish(MachineStepped(ev.Received(PeerId("liar"), msg.Evaluation(0, 0, step, step / 100)), [], 0.0))
    view.evaluation = msg.Evaluation(5, 80, 8, 1.9)
    events.publish(MachineStepped(ev.Evaluated(5, 1.9), [], 0.0))
    assert [(kind, fields["loss"]) for kind, fields in written] == [("evaluation", 2.0), ("evaluation", 1.9)]


def test_a_line_that_is_too_thin_becomes_a_problem_that_the_status_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and 8 kB a second, of a model of a million parameters, every four steps."""
    seconds = iter(range(40))
    view = SimpleNamespace(
        live=("other",),
        sync_every=4,
        phase="training",
        is_current=False,
        unmerged_tokens=lambda: 10 * peer.metrics.steps,
    )
    peer = SimpleNamespace(
        host=SimpleNamespace(now=lambda: 0.0),
        metrics=SimpleNamespace(steps=0, tokens=0),
        machine=SimpleNamespace(view=view),
        driver=SimpleNamespace(round_bytes=lambda: 430_000.0),
        options=SimpleNamespace(learner=SimpleNamespace(script="")),
        line_trouble="",
    )

    def traffic() -> Traffic:
        second = next(seconds)
        peer.host.now = lambda: float(second)
        peer.metrics.steps, peer.metrics.tokens = second, 10 * second
        return Traffic(sent_bulk=8000 * second, received_bulk=8000 * second)

    links, nothing = SimpleNamespace(traffic=traffic, waiting_payloads=lambda: (True, True)), cast(Any, None)
    monkeypatch.setattr(telemetry, "LOOK_S", 0.0)

    one = Telemetry(cast(Any, peer), cast(Any, links), nothing, nothing, nothing, lambda: None, EventBus())
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(one.keep())
    assert peer.line_trouble.startswith(
        "the line is too thin for this run: a round (4 steps, 4 s) needs 430 kB each way (860 kbit/s), and it carried "
        "32.0 kB sent (64 kbit/s) and 32.0 kB received (64 kbit/s)"
    )
