"""The judge: a good run passes, and each promise that is broken is found, by its name and no other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from evidences import BEGAN, OVER, PLAN, SAID, SETTLED, SETTLING, TOKENS, commits, evidence, peer, struck, with_peer

from tests.chaos.checks import goodput, judge, quiet_windows
from tests.chaos.evidence import Commit, Evidence, EvidenceError, HostilePeer, LearnerLife, Life, Twin, read_evidence
from tests.chaos.schedule import Least, Oddities
from tests.chaos.timeline import draw

LEFT = peer("A").left
LIFE = peer("A").lives[0]
assert LEFT is not None


def of_life(**changes: object) -> tuple[Life, ...]:
    return (msgspec.structs.replace(LIFE, **changes),)


def renamed(shard: int, version: int) -> Evidence:
    """B took another state at one version."""
    return with_peer(
        "B",
        commits=tuple(
            msgspec.structs.replace(c, head="other") if (c.shard, c.version) == (shard, version) else c
            for c in commits()
        ),
    )


def without(began: float, ended: float, *names: str) -> Evidence:
    """Some peers took nothing for a while."""
    kept = tuple(c for c in commits() if not began <= c.time <= ended)
    whole = evidence()
    peers = tuple(msgspec.structs.replace(p, commits=kept) if p.name in names else p for p in whole.peers)
    return msgspec.structs.replace(whole, peers=peers)


def demanding(**least: Any) -> Evidence:
    whole = evidence()
    plan = msgspec.structs.replace(PLAN, **least)
    return msgspec.structs.replace(whole, schedule=msgspec.structs.replace(whole.schedule, plan=plan))


def beside_liar(lies: str, peer: str = "12D3", faults: int = 1, sent: tuple[str, ...] | None = None) -> Evidence:
    """B has changed code."""
    told = tuple(lies.split("+")) if sent is None else sent
    liar = HostilePeer(name="B", peer=peer, faults=faults, sent=told)
    return msgspec.structs.replace(demanding(odd=Oddities(hostile=("", lies, ""))), hostile=(liar,))


def after_a_power_cut(back_s: float, *who: str, heads: str = "") -> Evidence:
    """All lost power at 10 s, and were started again at 12 s; the learners of ``who`` were merged from ``back_s`` on,
    and all took the same versions, or C has others (``heads``)."""
    whole = evidence()
    lives = (*of_life(ended=BEGAN + 10, status=-9), *of_life(began=BEGAN + 12, trained=BEGAN + 14))

    def took(name: str) -> tuple[Commit, ...]:
        merging = dict.fromkeys((f"{one}/2" for one in who), 1)
        return tuple(
            msgspec.structs.replace(
                commit,
                head=commit.head + (heads if name == "C" else ""),
                contributors=merging if commit.time >= BEGAN + back_s else {},
            )
            for commit in commits()
        )

    peers = tuple(msgspec.structs.replace(one, lives=lives, commits=took(one.name)) for one in whole.peers)
    return msgspec.structs.replace(whole, peers=peers, faults=(struck(1, "power-cut", PLAN.names, 10.0, 20.0),))


def test_peers_that_merge_together_after_a_power_cut_have_met() -> None:
    (met,) = (one for one in judge(after_a_power_cut(20.0, "A", "B", "C")) if one.name == "met again")
    assert met.is_kept
    assert "within 8 s of the last start" in met.sentence


@pytest.mark.parametrize(
    "apart",
    [
        after_a_power_cut(20.0, "A", "B"),
        after_a_power_cut(80.0, "A", "B", "C"),
        after_a_power_cut(20.0, "A", "B", "C", heads="-elsewhere"),
    ],
    ids=["one is not merged", "late", "on another chain"],
)
def test_peers_that_stay_apart_after_a_power_cut_have_not(apart: Evidence) -> None:
    assert not next(one for one in judge(apart) if one.name == "met again").is_kept


def without_a_process(*, told: bool = True, is_back: bool = True) -> Evidence:
    """A could start no process for ten seconds, and lives on for long."""
    times = (BEGAN + 2.0,) if told else ()
    whole = with_peer(
        "A", absences=times, starts=(BEGAN - 1.0, BEGAN + 15.0)[: 1 + is_back], lives=of_life(ended=OVER + 60.0)
    )
    return msgspec.structs.replace(whole, faults=(*whole.faults, struck(3, "no-process", ("A",), 1.0, 11.0)))


def test_who_could_start_no_process_told_so_and_has_a_learner_again() -> None:
    (found,) = (one for one in judge(without_a_process()) if one.name == "shortages survived")
    assert found.is_kept
    assert found.sentence.startswith("1 times")


BROKEN = {
    "no learner, and not a word": (without_a_process(told=False), "shortages survived"),
    "no learner any more": (without_a_process(is_back=False), "shortages survived"),
    "none of the faults was done": (evidence(faults=(), skipped=2), "faults done"),
    "two states of one version": (renamed(1, 75), "one model"),
    "another last chain": (with_peer("A", left=msgspec.structs.replace(LEFT, heads=("x", "head-1-85"))), "one model"),
    "an older head on another chain": (
        with_peer("A", left=msgspec.structs.replace(LEFT, versions=(84, 85), heads=("x", "head-1-85"))),
        "one model",
    ),
    "another last digest": (
        with_peer("A", left=msgspec.structs.replace(LEFT, digests=("x", "digest-1-85"))),
        "one model",
    ),
    "unmerged": (with_peer("A", left=msgspec.structs.replace(LEFT, tokens_unmerged=5)), "tokens conserved"),
    "marks too low in one shard": (
        with_peer("C", marks=peer("C").marks | {"A/1": (TOKENS, TOKENS - 1)}),
        "tokens conserved",
    ),
    "a leaver gave up early": (
        with_peer("A", lives=(*of_life(ended=BEGAN + 5, status=1, leave_s=3.0, lost_tokens=7), LIFE)),
        "tokens conserved",
    ),
    "no version for a while": (without(BEGAN + 45, BEGAN + 85, "A", "B", "C"), "versions advanced"),
    "blocked": (with_peer("A", lives=of_life(blocked_s=5.0)), "learners never blocked"),
    "blocked beyond the time that it was stopped": (with_peer("B", lives=of_life(blocked_s=5.0)), "learners never"),
    "ended by itself": (
        with_peer("A", lives=(*of_life(ended=BEGAN + 5, status=-11, is_expected=False), LIFE)),
        "nobody ended by itself",
    ),
    "failed at the end": (with_peer("A", lives=of_life(status=1)), "nobody ended by itself"),
    "did not come back": (without(SETTLING, OVER, "B"), "everybody came back"),
    "a journal that replays to something else": (with_peer("A", journal_problem="event 7"), "journals replay"),
    "a process left": (evidence(leftovers=("77 python",)), "no leftovers"),
    "a copy goes on": (evidence(twins=(Twin(peer="A", given_s=60.0, status=None, said=""),)), "twins ended"),
    "a copy fails": (evidence(twins=(Twin(peer="A", given_s=9.0, status=1, said=SAID),)), "twins ended"),
    "a copy says something else": (evidence(twins=(Twin(peer="A", given_s=9.0, status=2, said="no"),)), "twins ended"),
    "nobody is told of its clock": (demanding(odd=Oddities(clocks_off_s=(0.0, 3600.0))), "wrong clocks told"),
    "an honest owner is barred": (with_peer("B", charged=1), "liars counted"),
    "a liar is not counted": (beside_liar("values", faults=0), "liars counted"),
    "a lie never left its liar": (beside_liar("values+tokens", sent=("values",)), "liars counted"),
    "a liar never came": (beside_liar("steps", peer=""), "liars counted"),
    "little goodput": (demanding(least=Least(goodput=0.95)), "goodput"),
}


def test_a_good_run_keeps_every_promise() -> None:
    verdicts = judge(evidence())
    assert [verdict.name for verdict in verdicts if not verdict.is_kept] == []
    assert all(verdict.sentence for verdict in verdicts)


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_promise_is_found(what: str) -> None:
    broken, name = BROKEN[what]
    found = [verdict.name for verdict in judge(broken) if not verdict.is_kept]
    assert any(one.startswith(name) for one in found), found
    others = {one for one in found if not one.startswith(name)}
    assert others <= ({"one model", "everybody came back"} if name == "versions advanced" else set())


def test_without_evidence_nothing_is_kept() -> None:
    nothing = msgspec.structs.replace(
        evidence(), peers=tuple(msgspec.structs.replace(peer(n), commits=(), left=None, lives=()) for n in PLAN.names)
    )
    found = {verdict.name for verdict in judge(nothing) if not verdict.is_kept}
    assert {"one model", "tokens conserved", "learners never blocked", "everybody came back"} <= found


def test_a_stopped_learner_may_seem_blocked_for_as_long_as_it_was_stopped() -> None:
    judged = judge(with_peer("B", lives=of_life(blocked_s=4.5)))
    assert all(verdict.is_kept for verdict in judged)


def test_a_leaver_that_is_cut_off_may_give_up_when_its_time_is_over() -> None:
    lives = (*of_life(ended=BEGAN + 25, status=1, leave_s=20.2, lost_tokens=7), LIFE)
    assert all(verdict.is_kept for verdict in judge(with_peer("A", lives=lives)))


def test_a_copy_that_was_ended_before_its_time_is_not_judged() -> None:
    judged = judge(evidence(twins=(Twin(peer="A", given_s=20.0, status=None, said=""),)))
    assert all(verdict.is_kept for verdict in judged)


def test_who_is_told_of_its_clock_is_judged_as_everybody() -> None:
    told = with_peer("B", told_of_clock=1)
    plan = msgspec.structs.replace(PLAN, odd=Oddities(clocks_off_s=(0.0, 3600.0)))
    judged = judge(msgspec.structs.replace(told, schedule=msgspec.structs.replace(told.schedule, plan=plan)))
    assert all(verdict.is_kept for verdict in judged)


def test_quiet_windows_begin_a_while_after_the_last_fault_has_ended() -> None:
    overlapping = (struck(1, "cut", ("A",), 10.0, 40.0), struck(2, "stop", ("B",), 12.0, 14.0))
    windows = quiet_windows(evidence(faults=overlapping))
    assert [(w.began - BEGAN, w.ended - BEGAN) for w in windows] == [(0.0, 10.0), (46.0, SETTLED - BEGAN)]


def test_goodput_is_merged_time_over_time() -> None:
    found = goodput(evidence())
    assert found.of_all == pytest.approx(3 * 72 / 240)
    assert found.of_living == pytest.approx(3 * 72 / (240 - 4)), "who is stopped is not available"
    assert found.tokens_merged == 1.0
    longer = goodput(with_peer("A", lives=of_life(trained_s=100)))
    assert longer.of_all == pytest.approx(3 * 72 / (80 + 80 + 100))


def test_a_dead_learners_time_is_available_in_all_but_not_of_the_living() -> None:
    found = goodput(with_peer("A", lives=of_life(ended=BEGAN + 78, trained_s=78)))
    assert found.of_all == pytest.approx(3 * 72 / 240)
    assert found.of_living == pytest.approx(3 * 72 / (238 - 4))


def test_tokens_of_the_dead_count_as_trained() -> None:
    dead = LearnerLife(learner="A/0", tokens=TOKENS, compute_s=72.0)
    some = with_peer("A", learners=(dead, *peer("A").learners))
    assert goodput(some).tokens_merged == pytest.approx(3 / 4)
    plan = msgspec.structs.replace(PLAN, least=Least(merged=0.98))
    judged = judge(msgspec.structs.replace(some, schedule=msgspec.structs.replace(some.schedule, plan=plan)))
    assert [verdict.name for verdict in judged if not verdict.is_kept] == ["goodput"]


def test_tokens_that_nobody_merged_are_no_goodput() -> None:
    found = goodput(with_peer("C", left=msgspec.structs.replace(LEFT, tokens_merged=TOKENS)))
    assert found.of_all == pytest.approx(0.3)
    assert found.tokens_merged == pytest.approx(1 / 3)


def test_a_run_that_broke_off_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "schedule.json").write_bytes(msgspec.json.encode(evidence().schedule))
    (tmp_path / "happened.jsonl").write_text('{"time": 1.0, "what": "began"}\n')
    with pytest.raises(EvidenceError, match="broke off"):
        read_evidence(tmp_path)


def test_the_timeline_is_a_picture(tmp_path: Path) -> None:
    whole = evidence()
    draw(whole, judge(whole), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_what_hits_a_hostile_peer_is_not_drawn(tmp_path: Path) -> None:
    """It has no row: nothing of it is judged."""
    whole = evidence()
    honest = msgspec.structs.replace(whole, peers=whole.peers[1:])
    assert whole.faults[0].peers == (whole.peers[0].name,)
    draw(honest, judge(honest), tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").exists()
