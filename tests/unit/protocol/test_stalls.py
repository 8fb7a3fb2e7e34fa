"""Rule W9 of docs/protocol.md: a peer that stands still knows it, and no estimate suffers. Heartbeats of 0.5 s."""

from __future__ import annotations

import msgspec
import pytest
from stage import BEAT, A, B, C, Stage, notes, only, sent

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from tests.machine_sim.process import PeerSetting
from tests.machine_sim.scenarios import P0, P1, P2, base_config, make_world

STOP_S = 46.0


def stop(stage: Stage) -> list[ef.Effect]:
    """Nothing runs for 46 s; then the machine is woken."""
    stage.now += STOP_S
    stage.next_tick += STOP_S
    return stage.tell(ev.Woke())


def test_a_peer_that_stood_still_measures_nothing_and_loses_nobody() -> None:
    """W9a."""
    stage = Stage(B, C, owners="bca")
    stage.give()
    takeover_s = stage.machine.aggregation.waits().takeover_s
    effects = stop(stage)
    assert len(notes(effects, "stall")) == 1
    assert stage.machine.view.live == (B, C)
    assert not sent(effects, msg.Contribution), "the owner had no time either"
    stage.take(stage.commit(stage.machine.contributions.pending[0].contribution.contributor))
    assert stage.machine.aggregation.waits().takeover_s <= takeover_s
    due = stage.machine.next_deadline()
    assert due is not None
    assert stage.now < due < stage.now + stage.config.heartbeat_s + 0.001


def test_what_came_while_a_peer_stood_still_is_heard_before_its_deadlines_pass() -> None:
    """W9a: a merge that was due gets what had come in time."""
    stage = Stage(B, C, owners="abc", grace_share=1.0, overlap=4)
    stage.wait(0.3)
    stage.give()
    stage.wait(1.9)
    effects = stop(stage)
    assert not only(effects, ef.Merge)
    stage.offer(B)
    effects = stage.offer(C)
    assert [len(merge.contributions) for merge in only(effects, ef.Merge)] == [3]


def test_who_goes_on_after_a_stall_beats_at_once() -> None:
    """W9a."""
    stage = Stage(B, C)
    stage.wait(0.75)
    assert {to for to, _ in sent(stop(stage), msg.Heartbeat)} == {B, C}


@pytest.mark.parametrize("stopped", [P0, P1])
def test_no_round_trip_that_spans_a_stall_is_a_sample_at_neither_end(stopped: str) -> None:
    """W9c: what had come meanwhile was read late; what is echoed says so."""
    world = make_world(base_config(takeover_ceiling_s=60.0), {p: PeerSetting(step_s=0.25) for p in (P0, P1, P2)}, None)
    world.run_until(10.0)
    before = [p.machine.core.membership.slowest_round_trip_s for p in world.living()]
    world.pause(stopped, STOP_S)  # type: ignore[arg-type]
    world.run_until(10.0 + STOP_S + 3.0)
    views = [view for p in world.living() for view in p.machine.core.membership.peers.values()]
    assert max(view.round_trip_s for view in views) < max(before) + 0.5
    assert max(view.deadline_s(0.5) for view in views) < 4.0
    assert max(p.machine.aggregation.waits().takeover_s for p in world.living()) < 3.0
    assert len({p.states.heads[0] for p in world.living()}) == 1, "caught up in 3 s"
    assert not world.checks.violations


def test_what_is_echoed_after_a_stall_tells_how_long_it_may_have_been_held() -> None:
    """W9c: until an answer to a later heartbeat has come."""
    stage = Stage(B)
    [(_, beat)] = sent(stop(stage), msg.Heartbeat)
    assert beat.echo_held_s > STOP_S
    queued = stage.beats.pop(B)
    stage.hear(B, msgspec.structs.replace(queued, sequence=queued.sequence + 1))
    [(_, beat)] = sent(stage.wait(0.6), msg.Heartbeat)
    assert beat.echo_held_s > STOP_S
    stage.beats[B] = msgspec.structs.replace(queued, sequence=queued.sequence + 1)
    beats = [b for _, b in sent(stage.wait(2.0), msg.Heartbeat)]
    assert beats[-1].echo_held_s < 1.0


def test_who_is_told_of_a_stall_takes_no_sample() -> None:
    """W9c: and yet knows that it is heard."""
    stage = Stage(B)
    stage.wait(2.0)
    view = stage.machine.core.membership.peers[B]
    view.record_round_trip(0.2)
    before, acked_at = view.round_trip_s, view.acked_at
    beat = stage.beats.pop(B)
    stage.wait(1.0)
    sequence, _ = stage.beaten[B]
    late = msgspec.structs.replace(BEAT, sequence=beat.sequence + 1, echo=sequence, echo_held_s=STOP_S)
    stage.hear(B, late)
    assert view.round_trip_s == before
    assert view.acked_at > acked_at
    assert A not in stage.machine.core.membership.peers


def test_what_was_told_before_is_no_sample() -> None:
    """W9c: who had stood still for a minute, and hears us no more, echoes an old heartbeat of ours as if it had just
    come, again and again: the way would be taken for a long one, and its deafness not be noticed (10058894)."""
    stage = Stage(B)
    stage.wait(2.0)
    view = stage.machine.core.membership.peers[B]
    beat = stage.beats.pop(B)
    echo, _ = stage.beaten[B]
    stage.wait(20.0)
    found = set()
    for number in range(1, 6):
        stage.hear(B, msgspec.structs.replace(BEAT, sequence=beat.sequence + number, echo=echo, echo_held_s=0.0))
        found.add((view.round_trip_s, view.variation_s))
    assert len(found) == 1


@pytest.mark.parametrize("is_known", [False, True])
def test_what_comes_first_after_a_silence_is_a_sample_only_of_an_unknown_way(is_known: bool) -> None:
    """W9c: it has waited for what was cut. Where nothing is known of a way it is better than nothing: somebody may be
    so busy that each of its heartbeats comes after a silence. (10061630: a mesh of forks took as long as its cuts to go
    on, and who left went with what was not merged.)"""
    stage = Stage(B)
    stage.wait(2.0)
    view = stage.machine.core.membership.peers[B]
    view.round_trip_s = view.variation_s = 0.01 if is_known else 0.0
    beat = stage.beats.pop(B)
    stage.wait(8.0)
    echo, sent_at = stage.beaten[B]
    stage.wait(4.0)
    waited = msgspec.structs.replace(BEAT, sequence=beat.sequence + 1, echo=echo - 1, echo_held_s=0.0)
    stage.hear(B, waited)
    assert (view.round_trip_s == 0.01) if is_known else (view.round_trip_s >= stage.now - sent_at)
    before = view.round_trip_s
    stage.hear(B, msgspec.structs.replace(waited, sequence=beat.sequence + 2, echo=echo))
    assert view.round_trip_s != before, "the next one is measured"
