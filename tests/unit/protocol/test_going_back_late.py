"""Going back (K4): states that arrive when they are not wanted any more."""

from __future__ import annotations

from stage import SHARD, B, C, D, Stage, only, tokens
from test_going_back import gone_back, grow, ids, ruined

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg


def test_a_checkpoint_that_is_read_after_a_state_was_taken_is_not_installed() -> None:
    """K4a: the disk was slow, and others had the state meanwhile; what its learner has trained since then stays."""
    stage = Stage(B, C, D)
    states = ruined(stage)
    gone_back(stage, states)
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((states[0].head,), 8))
    assert only(stage.wait(2.0), ef.Fetch)
    stage.work(stage.tell(ev.Fetched(B, states[0], (), B)))
    assert stage.head() == states[0].head
    for late in (states[0], states[2]):
        assert not only(stage.tell(ev.Restored(SHARD, late, ids(states[: states.index(late)]))), ef.Install)
    assert stage.head() == states[0].head


def test_an_abandoned_state_that_waited_for_other_work_is_not_installed() -> None:
    """K3b, K4a: it was fetched before the votes, and came while a commit was being applied."""
    twin, stage = Stage(B, C, D), Stage(B, C, D)
    later, states = grow(twin, 5)[4], ruined(stage, 3)
    stage.wait(2.0)
    [apply] = only(stage.hear_in_turn(B, stage.commit(tokens(B, 120, 160), step=16)), ef.Apply)
    for peer in (B, C, D):
        stage.hear(peer, msg.Heads((later.head,), 20))
    assert not only(stage.tell(ev.Fetched(B, later, (*ids(states), apply.id), B)), ef.Install)
    assert stage.machine.replication.staged
    gone_back(stage, states)
    assert not only(stage.tell(stage.end_of(apply)), ef.Install)
