"""The protocol's pure decisions, one by one. Time is a number."""

from __future__ import annotations

from collections import Counter

import pytest

from p2pdiloco.protocol.contributions import STAY, Ledger, Walk
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId
from p2pdiloco.protocol.machine import Machine
from p2pdiloco.protocol.ownership import ranked_owners
from p2pdiloco.protocol.state import BURST_ROUNDS, HASTE, USUAL_STEP_S, StepClaimLimit
from p2pdiloco.protocol.support import Support
from p2pdiloco.protocol.waiting import CommitView, QuorumView, Waits, decide, due, grace_window_s
from tests.machine_sim.scenarios import base_config

RUN = RunId("run")
WAITS = Waits(takeover_s=3.0, usual_s=2.5, nearly_all_s=2.0, few_s=5.0, commit_s=0.5)
SLOW, USUAL = {PeerId("c"): 9.0}, {PeerId("c"): 1.0}
"""Who is missing, and usually takes so long."""


def view(**changes: object) -> QuorumView:
    usual = QuorumView(
        now=10.0,
        opened_at=8.0,
        quorum_at=9.5,
        given=2,
        answers=Support(2, 3),
        missing=SLOW,
        min_quorum=2,
        rank=0,
        grace_s=0.5,
        waits=WAITS,
    )
    return usual._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "is_close", "look_again_at"),
    [
        ({"given": 1, "quorum_at": None}, False, None),
        ({"given": 1, "quorum_at": None, "missing": {}}, False, None),
        ({"missing": {}}, True, None),
        ({"missing": {}, "grace_s": 1e9}, True, None),
        ({"now": 9.6}, False, 10.0),
        ({}, True, None),
        ({"grace_s": 0.0}, True, None),
        ({"grace_s": 1e9}, False, 12.5),
        ({"missing": USUAL}, False, 10.5),
        ({"missing": USUAL, "now": 10.5}, True, None),
        ({"missing": USUAL, "is_extended": False}, True, None),
        ({"missing": USUAL, "departing_s": 1.5}, False, 11.0),
        ({"missing": USUAL, "departing_s": 0.1}, True, None),
        ({"answers": Support(1, 3), "missing": SLOW | {PeerId("b"): 9.0}, "now": 9.9}, False, 10.0),
        ({"answers": Support(3, 4), "missing": SLOW, "now": 9.9, "grace_s": 0.0}, True, None),
        ({"answers": Support(1, 2), "missing": SLOW, "now": 9.9, "grace_s": 0.0}, True, None),
        ({"answers": Support(2, 4), "missing": SLOW, "now": 9.9, "grace_s": 0.0}, False, 10.0),
        ({"rank": 1, "missing": {}}, False, 11.0),
        ({"rank": 1, "missing": {}, "now": 11.0}, True, None),
        ({"rank": 1, "now": 11.0}, True, None),
        ({"rank": 2, "now": 11.0}, False, 14.0),
    ],
)
def test_when_an_owner_closes(changes: dict[str, object], is_close: bool, look_again_at: float | None) -> None:
    decision = decide(view(**changes))
    assert (decision.is_close, decision.look_again_at) == (is_close, look_again_at)
    assert decision.reason


def test_who_was_waited_for_until_the_usual_time_is_late() -> None:
    assert decide(view()).late == frozenset(), "the grace window was shorter"
    assert decide(view(now=10.5)).late == SLOW.keys()
    assert decide(view(now=10.5, missing={})).late == frozenset()


@pytest.mark.parametrize(
    ("changes", "at", "is_unusual"),
    [
        ({"took_part": Support(3, 4)}, 10.0, False),
        ({"took_part": Support(3, 4), "rank": 2}, 10.0, False),
        ({"took_part": Support(3, 5), "rank": 2}, 10.5, False),
        ({"took_part": Support(1, 2)}, 10.0, False),
        ({"took_part": Support(1, 2), "rank": 1}, 11.5, False),
        ({}, 10.5, False),
        ({"now": 10.5}, 10.5, False),
        ({"opened_at": None}, 12.0, False),
        ({"opened_at": None, "now": 12.5}, 12.0, True),
        ({"rank": 1}, 11.5, False),
        ({"rank": 2}, 12.0, False),
        ({"is_suspect": True}, 14.5, False),
        ({"is_suspect": True, "opened_at": None}, 13.0, False),
        ({"is_suspect": True, "now": 15.0}, 15.0, False),
    ],
)
def test_when_a_commit_may_be_applied(changes: dict[str, object], at: float, is_unusual: bool) -> None:
    few = Support(2, 4)
    usual = CommitView(now=10.0, began_at=7.0, opened_at=8.5, rank=0, took_part=few, is_suspect=False, waits=WAITS)
    found = due(usual._replace(**changes))  # type: ignore[arg-type]
    assert (found.at, found.is_unusual, found.is_suspect) == (at, is_unusual, "is_suspect" in changes)


def test_grace_window_is_the_papers_and_never_negative() -> None:
    grace = {"grace_share": 0.5, "overlap_steps": 2, "step_time_s": 1.0}
    assert grace_window_s(**grace, quorum_s=0.4, sync_s=0.6) == 0.5  # type: ignore[arg-type]
    assert grace_window_s(**grace, quorum_s=3.0, sync_s=0.6) == 0.0  # type: ignore[arg-type]


def test_shares_of_ownership_follow_the_weights() -> None:
    candidates = ((PeerId("a"), 1.0), (PeerId("b"), 3.0))
    first = Counter(ranked_owners(RUN, 0, version, candidates)[0] for version in range(4000))
    assert 0.72 < first[PeerId("b")] / 4000 < 0.78


def test_without_a_candidate_the_others_keep_their_order() -> None:
    candidates = tuple((PeerId(name), 1.0) for name in "abcde")
    for version in range(50):
        ranked = ranked_owners(RUN, 3, version, candidates)
        rest = tuple(c for c in candidates if c[0] != ranked[0])
        assert ranked_owners(RUN, 3, version, rest) == ranked[1:]


def ledger(*edges: tuple[int, int, str]) -> Ledger:
    book = Ledger(8)
    for start, stop, payload in edges:
        book.record(start, stop, Digest(payload))
    return book


@pytest.mark.parametrize(
    ("old", "new", "walk"),
    [
        (0, 0, STAY),
        (0, 30, Walk(("a", "b"), ())),
        (30, 0, Walk((), ("b", "a"))),
        (10, 40, Walk(("b", "c"), ())),
        (10, 15, Walk(("d",), ())),
        (30, 15, Walk(("d",), ("b",))),
        (0, 99, None),
    ],
)
def test_walks_along_contributions(old: int, new: int, walk: Walk | None) -> None:
    book = ledger((0, 10, "a"), (10, 30, "b"), (30, 40, "c"), (10, 15, "d"))
    assert book.walk(old, new) == walk


def test_of_the_same_range_sent_twice_the_newer_counts() -> None:
    assert ledger((0, 10, "a"), (0, 10, "b")).walk(0, 10) == Walk((Digest("b"),), ())


def test_a_ledger_forgets_the_oldest() -> None:
    book = Ledger(2)
    for i in range(4):
        book.record(i, i + 1, Digest(str(i)))
    assert book.walk(0, 4) is None
    assert book.walk(2, 4) == Walk((Digest("2"), Digest("3")), ())


def test_the_allowance_for_claims_follows_the_median_step_and_is_used_up() -> None:
    limit = StepClaimLimit(10)
    assert limit.allowed(0.0, 1.0) == BURST_ROUNDS * 10
    limit.use(7, 0.0)
    assert limit.allowed(0.0, 1.0) == BURST_ROUNDS * 10 - 7
    limit.use(1000, 0.0)
    assert limit.allowed(0.0, 1.0) == 0, "more than half of all said so"
    assert limit.allowed(1.0, 4.0) == HASTE / 4.0
    assert limit.allowed(2.0, 0.0) == HASTE / 4.0 + HASTE / USUAL_STEP_S
    limit.add_missed(10.0, 0.5)
    limit.add_missed(10.0, 0.0)
    assert limit.allowed(2.0, 0.5) == HASTE * (1 / 4 + 1 + 20 + 10), "beyond the burst: it must catch up"


def test_a_fragments_shards_need_not_follow_each_other() -> None:
    """Those of a tensor that is cut among fragments lie behind all others."""
    fragments = ((ShardId(0), ShardId(2)), (ShardId(1), ShardId(3)))
    assert Machine(base_config(fragments=fragments)).core.fragment_of == [0, 1, 0, 1]
