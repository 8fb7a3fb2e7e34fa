"""What a node's event log has of what its machine is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from actors import FOUNDER, make_manifest

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
