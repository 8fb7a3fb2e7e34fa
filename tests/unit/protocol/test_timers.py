"""The timers (W) of docs/protocol.md, measured from outside; a step and a heartbeat take 0.5 s."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from stage import BEAT, SHARD, A, B, C, Stage, digest, head_of, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.ids import PeerId
from p2pdiloco.protocol.messages import Head


def lag(stage: Stage, peer: PeerId, *delays_s: float) -> None:
    """``peer`` echoes heartbeats of ours, one after the other, after these delays."""
    beat = stage.beats.pop(peer)
    for delay_s in delays_s:
        before = stage.beaten[peer]
        while stage.beaten[peer] == before:
            stage.wait(0.01)
        echo, at = stage.beaten[peer]
        stage.wait(at + delay_s - stage.now)
        beat = msgspec.structs.replace(beat, sequence=beat.sequence + 1, echo=echo, echo_held_s=0.0)
        stage.hear(peer, beat)


def is_live(stage: Stage, peer: PeerId) -> bool:
    """Whether it is, decided now."""
    stage.tell(ev.PeerDisconnected(PeerId("nobody"), "makes the machine look"))
    return peer in stage.machine.view.live


def test_every_heartbeat_s_it_beats_to_all() -> None:
    """W1a: to all that are connected, live or not, with numbers that count up."""
    stage = Stage(B)
    stage.tell(ev.PeerConnected(C))
    beats = sent(stage.wait(5.01), msg.Heartbeat)
    assert [to for to, _ in beats].count(B) == [to for to, _ in beats].count(C) == 10
    numbers = [beat.sequence for to, beat in beats if to == B]
    assert numbers == sorted(set(numbers))


def test_at_its_heartbeat_it_decides_membership_anew() -> None:
    """W1a: nothing happens, and yet a silent peer is lost."""
    stage = Stage(B)
    del stage.beats[B]
    stage.wait(2.1)
    assert stage.machine.view.live == ()


def test_at_its_heartbeat_it_asks_for_heads_that_stay_different() -> None:
    """W1a: not for those that differ once, nor for those that move."""
    stage = Stage(B)
    mark = stage.machine.core.heads_mark
    assert not sent(stage.wait(3.0), msg.HeadsRequest)
    moving = [stage.says(B, heads_mark=mark + i) for i in range(1, 20)]
    assert not [request for effects in moving for request in sent(effects, msg.HeadsRequest)]
    assert {to for to, _ in sent(stage.wait(2.0), msg.HeadsRequest)} == {B}


MANY = tuple(PeerId(f"p{i:02}") for i in range(48))


@pytest.mark.parametrize(("peers", "interval_s"), [(24, 0.5), (36, 0.75), (48, 1.0)])
def test_beyond_24_peers_it_beats_more_slowly(peers: int, interval_s: float) -> None:
    """W1d: in proportion; each heartbeat says so."""
    stage = Stage(*MANY[:peers], has_learner=False)
    stage.wait(2.0)
    beats = [beat for to, beat in sent(stage.wait(6.0), msg.Heartbeat) if to == MANY[0]]
    assert len(beats) == round(6.0 / interval_s)
    assert {beat.interval_s for beat in beats} == {interval_s}


@pytest.mark.parametrize(("says_s", "silent_s"), [(0.0, 1.5), (0.3, 1.5), (1.2, 3.6), (2.0, 6.0), (1e9, 6.0)])
def test_who_beats_more_slowly_may_be_silent_for_longer(says_s: float, silent_s: float) -> None:
    """W1d: three of the intervals that it tells of, at most four times ours (0.5 s), and never less than ours."""
    stage = Stage(B)
    stage.says(B, interval_s=says_s)
    stage.wait(1.0)
    del stage.beats[B]
    stage.wait(silent_s - 0.12)  # it beat up to a tenth of a second ago
    assert is_live(stage, B)
    stage.wait(0.14)
    assert not is_live(stage, B)


def test_what_several_heartbeats_change_is_looked_at_together() -> None:
    """W1a: within a sixteenth of the interval, once; a connection that ends, immediately."""
    stage = Stage(B, C)
    effects = stage.tell(ev.Received(B, msgspec.structs.replace(BEAT, sequence=10**6, is_participating=False)))
    effects += stage.tell(ev.Received(C, msgspec.structs.replace(BEAT, sequence=10**6, is_participating=False)))
    assert stage.machine.core.membership.participating == {B, C}
    stage.wait(stage.config.heartbeat_s / 16 + 0.001)
    assert stage.machine.core.membership.participating == set()
    stage.tell(ev.PeerDisconnected(B, "gone"))
    assert stage.machine.core.membership.live == (C,)


def test_what_heartbeats_changed_is_looked_at_before_what_happens_next() -> None:
    """W1a: also by a peer that stood still when it was due (seed 6013210)."""
    stage = Stage(B, C, owners="a", has_learner=False, min_quorum=2)
    stage.says(C, is_participating=False)
    stage.tell(ev.Received(C, msgspec.structs.replace(stage.beats[C], sequence=10**6, is_participating=True)))
    stage.now += stage.config.heartbeat_s
    assert not only(stage.offer(B), ef.Merge), "the quorum of two that take part is two"


@pytest.mark.parametrize("delays_s", [[0.2] * 20, [0.1, 0.4] * 10])
def test_silence_is_3_heartbeats_2_round_trips_and_4_variations(delays_s: list[float]) -> None:
    """W2: round trip and variation by RFC 6298."""
    stage = Stage(B)
    lag(stage, B, *delays_s)
    round_trip_s, variation_s = delays_s[0], delays_s[0] / 2
    for delay_s in delays_s[1:]:
        variation_s = 0.75 * variation_s + 0.25 * abs(round_trip_s - delay_s)
        round_trip_s = 0.875 * round_trip_s + 0.125 * delay_s
    stage.wait(3 * 0.5 + 2 * round_trip_s + 4 * variation_s - 0.02)
    assert is_live(stage, B)
    stage.wait(0.04)
    assert not is_live(stage, B)


def merges_after(stage: Stage) -> float:
    """How long it takes until the next merge begins."""
    began_at = stage.now
    for _ in range(1000):
        if only(stage.wait(0.01), ef.Merge):
            return round(stage.now - began_at, 2)
    raise AssertionError("no merge")


def owner() -> Stage:
    """Peer a owns everything and only merges; b gives and c does not."""
    stage = Stage(B, C, has_learner=False, grace_share=1.0, overlap=4)
    stage.says(B, weight=0.0)
    stage.says(C, weight=0.0)
    return stage


def test_grace_is_gamma_times_tau_steps_less_the_quorum_time() -> None:
    """W3a: 4 steps of 0.5 s, of which 0.3 s are over when the quorum is in."""
    stage = owner()
    stage.announce(B, 4)
    stage.wait(0.3)
    stage.offer(B)
    assert merges_after(stage) == pytest.approx(1.7, abs=0.02)
    half = Stage(B, C, owners="abc", has_learner=False, grace_share=0.5, overlap=4)
    half.announce(B, 4)
    half.wait(0.3)
    half.offer(B)
    assert merges_after(half) == pytest.approx(0.85, abs=0.02)


def test_grace_is_shortened_by_the_sync_time() -> None:
    """W3a: the last merge took 2 s, which count for a fifth (smoothed)."""
    stage = owner()
    effects = stage.offer(B) + stage.offer(C)
    stage.wait(2.0)
    stage.work(effects)
    stage.offer(B, 40, 80)
    assert merges_after(stage) == pytest.approx(2.0 - 0.2 * 2.0, abs=0.02)


def test_grace_is_never_below_0() -> None:
    """W3a: the quorum came later than all the overlap lasts."""
    stage = owner()
    stage.announce(B, 4)
    stage.wait(5.0)
    assert only(stage.offer(B), ef.Merge)


def test_grace_is_never_above_the_takeover_time() -> None:
    """W3a: all learners that are left take 30 s for a step."""
    stage = owner()
    for other in (B, C):
        stage.says(other, step_time_s=30.0)
    stage.wait(1.0)
    assert stage.machine.aggregation.waits().takeover_s == stage.config.takeover_ceiling_s
    stage.offer(B)
    assert merges_after(stage) == pytest.approx(stage.config.takeover_ceiling_s, abs=0.02)


def offers_after(stage: Stage, offers: int) -> list[float]:
    """The times between a contribution's offers."""
    times: list[float] = []
    since = stage.now
    assert sent(stage.give(), msg.Contribution)
    while len(times) < offers:
        assert stage.now < since + 30.0
        if sent(stage.wait(0.01), msg.Contribution):
            times.append(round(stage.now - since, 2))
            since = stage.now
    return times


def test_takeover_is_tau_steps_and_3_rounds_and_4_round_trips() -> None:
    """W4: a round counts as the floor of 0.6 s until one is measured."""
    unbounded: dict[str, Any] = {"takeover_floor_s": 0.6, "takeover_ceiling_s": 60.0, "weight": 0.0}
    stage = Stage(B, C, **unbounded)
    assert offers_after(stage, 1) == pytest.approx([2 * 0.5 + 3 * 0.6], abs=0.02)
    stage = Stage(B, C, **unbounded)
    lag(stage, B, *[0.2] * 20)
    stage.wait(0.51)  # membership takes the round trip in at its next heartbeat
    assert stage.machine.aggregation.waits().takeover_s == pytest.approx(2 * 0.5 + 3 * 0.6 + 4 * 0.2, abs=0.04)


def test_takeover_follows_the_measured_rounds() -> None:
    """W4: rounds of 2 s, smoothed by a fifth."""
    stage = Stage(B, takeover_floor_s=0.6, takeover_ceiling_s=60.0, weight=0.0)
    round_s = 0.6
    for _ in range(3):
        [(_, given)] = sent(stage.give(), msg.Contribution)
        stage.wait(2.0)
        stage.take(stage.commit(given.contributor))
        round_s += 0.2 * (2.0 - round_s)
    assert stage.machine.aggregation.waits().takeover_s == pytest.approx(2 * 0.5 + 3 * round_s, abs=0.02)


def test_takeover_is_within_floor_and_ceiling() -> None:
    """W4."""
    ceiling = Stage(B, C, takeover_floor_s=0.6, takeover_ceiling_s=1.5, weight=0.0)
    assert offers_after(ceiling, 1) == pytest.approx([1.5], abs=0.02)
    floor = Stage(B, C, takeover_floor_s=1.5, takeover_ceiling_s=60.0, weight=0.0)
    for _ in range(60):
        [(_, given)] = sent(floor.give(), msg.Contribution)
        floor.take(floor.commit(given.contributor))
    assert offers_after(floor, 1) == pytest.approx([1.5], abs=0.02)


def test_takeover_is_longer_with_each_lap() -> None:
    """W4: two owners; after each round through both, once as long more."""
    stage = Stage(B, C, takeover_floor_s=0.6, takeover_ceiling_s=1.0, weight=0.0)
    assert offers_after(stage, 5) == pytest.approx([1.0, 1.0, 2.0, 2.0, 3.0], abs=0.02)


def asks_after(stage: Stage) -> float:
    """How long it takes until the commits of a heavier head, some versions ahead, are asked for."""
    began_at = stage.now
    stage.announce(C, 4, Head(SHARD, 9, digest("heavier"), 1000))
    while not sent(stage.wait(0.01), msg.CommitsRequest):
        assert stage.now < began_at + 10.0
    return stage.now - began_at


def test_commit_patience_is_one_round_and_2_round_trips() -> None:
    """W5a: a round counts as the floor until one is measured."""
    assert asks_after(Stage(B, C, takeover_floor_s=0.3)) == pytest.approx(0.3, abs=0.02)
    stage = Stage(B, C, takeover_floor_s=0.3)
    lag(stage, B, *[0.2] * 20)
    stage.wait(0.51)
    assert asks_after(stage) == pytest.approx(0.3 + 2 * 0.2, abs=0.04)


def test_commit_patience_counts_at_most_a_heartbeat_of_the_round() -> None:
    """W5a."""
    assert asks_after(Stage(B, C, takeover_floor_s=5.0)) == pytest.approx(0.5, abs=0.02)


def test_commit_patience_covers_what_commits_took_to_come_by_themselves() -> None:
    """W5a: shorter or longer than a round; also what one came too late for, but not what was asked for."""
    stage = Stage(B, C, takeover_floor_s=5.0)
    header = stage.commit(tokens(B, 0, 40))
    stage.announce(C, 4, head_of(header))
    stage.wait(0.1)
    stage.take(header)
    assert asks_after(stage) == pytest.approx(1.5 * 0.1, abs=0.02)
    stage = Stage(B, C, takeover_floor_s=5.0)
    header = stage.commit(tokens(B, 0, 40))
    stage.announce(C, 4, head_of(header))
    stage.wait(1.0)
    stage.take(header, C)
    assert stage.machine.aggregation.arrival_s == 0.0
    stage.wait(0.2)
    stage.take(header, B)
    assert stage.machine.aggregation.arrival_s == pytest.approx(1.2, abs=0.02)
    waits = stage.machine.aggregation.waits()
    assert waits.commit_s == waits.takeover_s / 4, "long before the next owner's turn"


def test_who_leaves_asks_for_commits_at_once() -> None:
    """W5a (seed 9885): a commit that does not come by itself must not take a third of the time that it has."""
    stage = Stage(B, C, takeover_floor_s=0.3)
    stage.train(2)
    stage.tell(ev.LeaveRequested("asked to"))
    assert sent(stage.announce(C, 4, Head(SHARD, 9, digest("heavier"), 1000)), msg.CommitsRequest)


def test_who_has_refused_a_state_waits_for_no_commits() -> None:
    """W5a (fresh seed 49013528223): until its head moves, none that follows it is on its way."""
    stage = Stage(B, C, takeover_floor_s=20.0, takeover_ceiling_s=20.0, has_learner=False)
    stage.machine.aggregation.arrival_s = 100.0
    assert stage.machine.aggregation.waits().commit_s == pytest.approx(20.0 / 4, abs=0.1)
    stage.tell(ev.Failed("fetch", SHARD, C, "the other peers are asked for their heads first"))
    assert asks_after(stage) == pytest.approx(stage.config.heartbeat_s, abs=0.02)
    stage.take(stage.commit(tokens(B, 0, 40)))
    assert asks_after(stage) == pytest.approx(20.0 / 4, abs=0.1)


def test_a_heavier_sibling_of_the_head_is_asked_for_at_once() -> None:
    """W5a: two commits of one version are a fork; nothing that follows ours is on its way (seeds 1003547, 2241)."""
    for is_told in (False, True):
        stage = Stage(B, C)
        ours, heavier = stage.commit(tokens(B, 0, 40)), stage.commit(tokens(B, 0, 40), tokens(C, 0, 40))
        stage.take(ours)
        news = msg.Heads((head_of(heavier),), 1) if is_told else msg.Commit(heavier)
        effects = stage.hear(C, news) + stage.wait(0.001)
        assert [to for to, _ in sent(effects, msg.CommitsRequest)] == [C]


def test_after_request_s_a_request_for_commits_was_in_vain() -> None:
    """A3d: who has a heavier head then is asked after the patience, as if nobody had been asked."""
    stage = Stage(B, C, request_s=3.0)
    asks_after(stage)
    assert not sent(stage.wait(2.9), msg.CommitsRequest)
    stage.wait(0.2)
    assert not stage.machine.replication.asked
    stage.announce(B, 12, Head(SHARD, 1, digest("heavier"), 1000))
    assert [to for to, _ in sent(stage.wait(1.0), msg.CommitsRequest)] == [B]


def test_after_leave_s_or_finish_s_the_peer_goes_with_a_warning_if_it_holds_unmerged_tokens() -> None:
    """C4a, C5a."""
    for last, length_s in ((ev.LeaveRequested("asked to"), 20.0), (ev.LearnerPaused(2, 20), 60.0)):
        stage = Stage(B, leave_s=20.0, finish_s=60.0)
        stage.train(2)
        effects = stage.tell(last) + stage.tell(ev.LearnerPaused(2, 20)) + stage.wait(length_s - 0.01)
        assert not only(effects, ef.Leave)
        effects = stage.wait(0.02)
        assert only(effects, ef.Leave)
        assert [n.level for n in only(effects, ef.Note) if "20 tokens unmerged" in n.reason] == ["warning"]


def test_who_holds_nothing_unmerged_goes_without_a_warning() -> None:
    """C4a."""
    stage = Stage(B, weight=0.0)
    stage.give()
    stage.take(stage.commit(tokens(A, 0, 40)))
    stage.tell(ev.LeaveRequested("asked to"))
    effects = stage.tell(ev.LearnerPaused(4, 40))
    assert only(effects, ef.Leave)
    assert not [n for n in only(effects, ef.Note) if n.level == "warning"]
