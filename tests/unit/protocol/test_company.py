"""Rules C6 of docs/protocol.md: whoever may have been cut off says so, and waits."""

from __future__ import annotations

import msgspec
import pytest
from stage import BEAT, A, B, C, D, Stage, notes, only, sent

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.connectivity import listed
from p2pdiloco.protocol.ids import PeerId, fingerprint
from p2pdiloco.protocol.membership import PartitionDetector

E, F, G = PeerId("e"), PeerId("f"), PeerId("g")


def lose(stage: Stage, *peers: PeerId, goodbye: bool = False) -> list[ef.Effect]:
    """They are gone."""
    effects = []
    for peer in peers:
        stage.beats.pop(peer, None)
        effects += stage.hear(peer, msg.Leaving("asked to")) if goodbye else []
        effects += stage.tell(ev.PeerDisconnected(peer, "timed out"))
    return effects


def missing(stage: Stage) -> int:
    """As the node reads it."""
    return stage.machine.view.missing


@pytest.mark.parametrize("is_shut_out", [True, False])
def test_who_was_shut_out_is_not_missing(is_shut_out: bool) -> None:
    """C6f: a peer whose last honest companion left in order took itself for cut off, because of the liar."""
    stage = Stage(B, C)
    stage.beats.pop(C)
    stage.tell(ev.PeerDisconnected(C, "too much that was forged", is_shut_out))
    stage.says(B, hears=listed(map(fingerprint, (A,))))
    lose(stage, B, goodbye=True)
    assert missing(stage) == (0 if is_shut_out else 1)


def test_who_is_lost_with_as_many_as_stay_may_be_cut_off() -> None:
    """C6a: three of four; two of four as well; not one of four."""
    stage = Stage(B, C, D)
    lose(stage, B)
    assert missing(stage) == 0
    effects = lose(stage, C)
    assert missing(stage) == 2
    assert "lost 2 peers at once" in notes(effects, "apart")[0]
    lose(stage, D)
    assert missing(stage) == 3


@pytest.mark.parametrize(("phase", "is_same", "count"), [("done", True, 0), ("done", False, 1), ("leaving", True, 1)])
def test_who_left_at_the_runs_end_with_the_same_heads_was_not_cut_off(phase: str, is_same: bool, count: int) -> None:
    """C6f: of a run that is not fully connected, peers leave one after the other. The last one that saw a peer die
    waited for it, and ended with a warning."""
    stage = Stage(B, C, D, has_learner=False)
    lose(stage, D)
    stage.machine.core.departure = "finished"
    for peer in (B, C):
        stage.says(peer, phase=phase, heads_mark=0 if is_same else 1)
    lose(stage, B, C, goodbye=True)
    assert missing(stage) == count


def test_who_was_never_live_does_not_count_as_here_when_it_leaves() -> None:
    """C6f: else one that connects with many keys, and leaves at once, hides that this peer was cut off."""
    stage = Stage(B, C, D, has_learner=False)
    lose(stage, B, C, D)
    assert missing(stage) == 3
    stage.machine.core.departure = "finished"
    for peer in map(PeerId, ("k", "l", "m")):
        stage.tell(ev.PeerConnected(peer))
        stage.hear(peer, msgspec.structs.replace(BEAT, phase="done", heads_mark=stage.machine.core.heads_mark))
        lose(stage, peer, goodbye=True)
    assert missing(stage) == 3


def test_those_who_are_lost_one_after_the_other_are_dead() -> None:
    """C6a: while most stay they will find out themselves, if it is they who were cut off."""
    stage = Stage(B, C, D)
    lose(stage, B)
    stage.wait(20.0)
    lose(stage, C)
    assert missing(stage) == 0
    stage.wait(20.0)
    lose(stage, D)
    assert missing(stage) == 1, "of two one is as many as stay"


def test_whom_only_the_lost_heard_is_lost_with_them() -> None:
    """C6a: the public peer dies, and with it the way to those behind other routers."""
    stage = Stage(B)
    stage.says(B, hears=listed(map(fingerprint, (A, C, D))))
    lose(stage, B)
    assert missing(stage) == 3


def test_who_says_goodbye_is_not_missing() -> None:
    """C6a: nor is whom only others heard, and hear no more."""
    stage = Stage(B, C)
    lose(stage, B, C, goodbye=True)
    assert missing(stage) == 0
    stage = Stage(B)
    stage.says(B, hears=listed(map(fingerprint, (A, C, D, E))))
    stage.says(B, hears=listed(map(fingerprint, (A,))))
    stage.wait(5.0)
    assert missing(stage) == 0


def test_who_stood_still_and_says_goodbye_is_not_missing() -> None:
    """C6f: it went on, saw that all was done, and left at once; nor are those missing whom it heard."""
    stage = Stage(B)
    stage.says(B, hears=listed(map(fingerprint, (A, C))))
    stage.beats.pop(B)
    stage.wait(10.0)
    assert missing(stage) == 2
    effects = stage.hear(B, msg.Leaving("the run is complete"))
    assert missing(stage) == 0
    assert "connected again" in notes(effects, "apart")[-1]


def test_nobody_hears_who_has_said_goodbye() -> None:
    """C6f: b, which is lost, had not noticed."""
    stage = Stage(B, C)
    stage.says(B, hears=listed(map(fingerprint, (A, C))))
    lose(stage, C, goodbye=True)
    lose(stage, B)
    assert missing(stage) == 1


def test_who_was_lost_before_this_peer_left_does_not_count_afterwards() -> None:
    """C6a: one of four was lost, and the others leave after this peer."""
    stage = Stage(B, C, D, total_steps=4, has_learner=False)
    lose(stage, B)
    assert only(stage.tell(ev.LeaveRequested("asked to")), ef.Leave)
    lose(stage, C, D, goodbye=True)
    assert missing(stage) == 0


def test_who_comes_back_only_to_say_goodbye_is_not_waited_for() -> None:
    """C6f."""
    stage = complete()
    stage.tell(ev.PeerConnected(B))
    effects = stage.hear(B, msg.Leaving("the run is complete"))
    assert "all progress is merged" in notes(effects, "leave")[-1]


def test_it_is_over_when_most_are_here_again() -> None:
    """C6a: those who were missing, or others."""
    for *some, last in ((B, C), (E, F, G)):
        stage = Stage(B, C, D)
        lose(stage, B, C, D)
        for peer in some:
            stage.meet(peer)
        assert missing(stage) == (2 if last == C else 3)
        effects = stage.meet(last)
        assert missing(stage) == 0
        assert "connected again" in notes(effects, "apart")[-1]


def test_a_cut_is_noticed_bit_by_bit() -> None:
    """C6a: within 32 heartbeats."""
    company = PartitionDetector()
    company.update(0.0, frozenset(range(6)), 10.0, is_silent=False)
    for at, left in enumerate((5, 4, 3)):
        company.update(3.0 * at, frozenset(range(left)), 10.0, is_silent=True)
    assert not company.is_apart, "this peer and three others, and three are lost"
    company.update(9.0, frozenset(range(2)), 10.0, is_silent=True)
    assert company.missing == {2, 3, 4, 5}
    slow = PartitionDetector()
    slow.update(0.0, frozenset(range(6)), 10.0, is_silent=False)
    for at, left in enumerate((5, 4, 3, 2)):
        slow.update(9.0 * at, frozenset(range(left)), 10.0, is_silent=True)
    assert not slow.is_apart


def complete(**changes: object) -> Stage:
    """b is lost, and then peer a's run is complete and all its progress merged, by itself."""
    stage = Stage(B, owners="ba", total_steps=4, finish_s=60.0, **changes)
    lose(stage, B)
    effects = stage.work(stage.give() + stage.wait(5.0))
    assert stage.machine.core.unmerged_tokens() == 0 or changes, notes(effects, "close")
    stage.work(stage.tell(ev.LearnerPaused(4, 40)))
    return stage


def test_at_the_runs_end_who_is_apart_waits_and_then_says_so() -> None:
    """C6c."""
    stage = complete()
    effects = stage.work(stage.wait(54.0))
    assert not only(effects, ef.Leave)
    effects = stage.work(stage.wait(7.0))
    assert only(effects, ef.Leave)
    assert "may have another model" in notes(effects, "leave")[-1]
    assert missing(stage) == 1


def test_at_the_runs_end_those_who_come_back_end_it_in_order() -> None:
    """C6c: with the heavier head, as ever."""
    stage = complete()
    stage.work(stage.wait(10.0))
    effects = stage.meet(B, phase="finished", is_participating=False)
    assert only(effects, ef.Leave)
    assert "all progress is merged" in notes(effects, "leave")[-1]
    assert missing(stage) == 0


def test_after_its_end_a_peer_that_stays_still_heals() -> None:
    """C6c: its heads are compared, and a heavier chain's commits asked for."""
    stage = complete()
    stage.work(stage.wait(61.0))
    theirs = msg.Head(stage.head().shard, 9, "9" * 40, 900)  # type: ignore[arg-type]
    stage.meet(B, phase="finished", is_participating=False, heads_mark=7)
    asked = sent(stage.wait(3.0), msg.HeadsRequest)
    assert [to for to, _ in asked][:1] == [B]
    effects = stage.hear(B, msg.Heads((theirs,), 4)) + stage.wait(3.0)
    assert [to for to, _ in sent(effects, msg.CommitsRequest)] == [B]


def test_where_a_majority_is_needed_the_fewer_merge_nothing() -> None:
    """C6e: and go on when the others are back."""
    stage = complete(needs_majority=True)
    assert stage.machine.core.unmerged_tokens() == 40
    assert stage.head().version == 0
    stage.wait(10.0)
    effects = stage.work(stage.meet(B, is_participating=False, phase="following", weight=0.0) + stage.wait(5.0))
    assert [len(merge.contributions) for merge in only(effects, ef.Merge)] == [1]
    most = Stage(B, C, owners="abc", needs_majority=True)
    lose(most, C)
    most.hear(B, most.contribution(B, 0, 40))
    assert only(most.work(most.give() + most.wait(5.0)), ef.Merge), "two of three"


def test_where_a_majority_is_needed_no_version_is_made_without_it() -> None:
    """C6e: b stands still, and is not lost yet."""
    stage = Stage(B, owners="ab", needs_majority=True)
    effects = stage.work(stage.give() + stage.wait(8.0))
    assert not only(effects, ef.Merge)
    assert only(stage.offer(B), ef.Merge)


def test_who_goes_after_this_peer_is_not_lost() -> None:
    """C6a: two that leave at the same moment do not hear each other's goodbye."""
    stage = Stage(B, total_steps=4, has_learner=False)
    effects = stage.tell(ev.LeaveRequested("asked to"))
    assert only(effects, ef.Leave)
    lose(stage, B)
    assert missing(stage) == 0
