"""What a peer tells a person who asks how it is."""

from __future__ import annotations

from types import SimpleNamespace

from p2pdiloco.peer.peer import Peer
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT


def troubled(learner: str, *swarm: str) -> str:
    """Of a peer whose supervision and machine say this."""
    peer = Peer.__new__(Peer)
    peer.supervision = SimpleNamespace(absence="", trouble=learner)  # type: ignore[assignment]
    peer.machine = SimpleNamespace(status=lambda: SimpleNamespace(troubles=swarm))  # type: ignore[assignment]
    return peer.trouble


def test_the_learners_trouble_comes_first_then_the_swarms() -> None:
    assert troubled("") == ""
    assert troubled("", "stuck: no version for 60 s", "poisoned") == "stuck: no version for 60 s; poisoned"
    assert troubled("its loss is not finite", "stuck") == "its loss is not finite"


def test_what_is_told_has_a_bound() -> None:
    assert len(troubled("", *["stuck"] * 1000)) == TROUBLE_LIMIT
