"""What a peer tells a person who asks how it is."""

from __future__ import annotations

from types import SimpleNamespace

from p2pdiloco.peer.peer import Peer
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT


def troubled(learner: str, *swarm: str, dissenters: dict[str, int] | None = None) -> str:
    """Of a peer whose supervision and machine say this."""
    peer = Peer.__new__(Peer)
    peer.line_trouble = ""
    peer.config = SimpleNamespace(peer="me")  # type: ignore[assignment]
    peer.state = SimpleNamespace(agreement=SimpleNamespace(dissenters=lambda: dissenters or {}))  # type: ignore[assignment]
    peer.supervision = SimpleNamespace(absence="", hang="", trouble=learner)  # type: ignore[assignment]
    peer.machine = SimpleNamespace(view=SimpleNamespace(troubles=swarm))  # type: ignore[assignment]
    return peer.trouble


def test_the_learners_trouble_comes_first_then_the_swarms() -> None:
    assert troubled("") == ""
    assert troubled("", "stuck: no version for 60 s", "poisoned") == "stuck: no version for 60 s; poisoned"
    assert troubled("its loss is not finite", "stuck") == "its loss is not finite"


def test_a_peer_whose_own_contributions_point_away_says_what_to_check() -> None:
    assert troubled("", dissenters={"other": 30}) == "", "another's is no trouble here"
    told = troubled("", "stuck", dissenters={"other": 30, "me": 12})
    assert told.startswith("the last 12 contributions of this peer")
    assert told.endswith("check its data and its learning rate")


def test_what_is_told_has_a_bound() -> None:
    assert len(troubled("", *["stuck"] * 1000)) == TROUBLE_LIMIT
