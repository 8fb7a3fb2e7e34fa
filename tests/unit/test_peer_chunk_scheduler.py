"""Which chunk is asked from which donor; time is a number."""

from __future__ import annotations

from p2pdiloco.peer.chunk_scheduler import AHEAD_LEAST_CHUNKS, OVERDUE_LEAST_S, Ask, ChunkPlan, Piece
from p2pdiloco.protocol.ids import PeerId, ShardId

MB = 1_000_000
LOOK_S = 0.5
ANN, BOB, CID = PeerId("ann"), PeerId("bob"), PeerId("cid")


def plan_of(*donors: PeerId, shards: int = 4, chunks: int = 4) -> ChunkPlan:
    plan = ChunkPlan()
    for donor in donors:
        plan.add(donor)
    for shard in range(shards):
        plan.begin(ShardId(shard), [MB] * chunks, donors[shard % len(donors)])
    return plan


def deliver(plan: ChunkPlan, rates: dict[PeerId, float]) -> tuple[dict[PeerId, int], float, int]:
    """All donors deliver one chunk after the other at their rates: chunks by donor, when all was here, chunks asked."""
    now, delivered, here, asked = 0.0, dict.fromkeys(rates, 0), set(), 0
    queues: dict[PeerId, list[Ask]] = {peer: [] for peer in rates}
    due: dict[PeerId, float] = {}
    total = sum(len(shard.wanted) for shard in plan._shards.values())
    while len(here) < total:
        for ask in plan.next(now, is_ending=True):
            asked += 1
            queues[ask.donor].append(ask)
            if len(queues[ask.donor]) == 1:
                due[ask.donor] = now + MB / rates[ask.donor]
        peer = min(due, key=lambda peer: due[peer])
        if due[peer] > now + LOOK_S:
            now += LOOK_S
            continue
        now = due.pop(peer)
        ask = queues[peer].pop(0)
        delivered[peer] += ask.piece not in here
        here.add(ask.piece)
        for other in plan.arrived(ask, now):
            queues[other.donor].remove(other)
            if not queues[other.donor]:
                due.pop(other.donor, None)
        if queues[peer]:
            due[peer] = now + MB / rates[peer]
    return delivered, now, asked


def test_donors_share_the_load_by_their_rates() -> None:
    plan = plan_of(ANN, BOB, CID, shards=50)
    delivered, ended_at, asked = deliver(plan, {ANN: 20 * MB, BOB: 10 * MB, CID: 2 * MB})
    assert delivered[ANN] > 1.6 * delivered[BOB] > 4 * delivered[CID] > 0
    assert ended_at < 1.1 * 200 / 32
    assert asked <= 203


def test_a_slow_donor_does_not_hold_up_the_end() -> None:
    plan = plan_of(ANN, BOB, shards=2)
    _, ended_at, _ = deliver(plan, {ANN: 10 * MB, BOB: MB / 20})
    assert ended_at < 5.0  # BOB's first chunk alone would take 20 s


def test_what_a_donor_offered_it_is_asked_for_first() -> None:
    asks = plan_of(ANN, BOB, shards=2).next(0.0, is_ending=False)
    assert len(asks) == 2 * AHEAD_LEAST_CHUNKS
    assert {(ask.donor, ask.piece.shard) for ask in asks} == {(ANN, 0), (BOB, 1)}


def test_a_donor_that_is_dropped_costs_what_was_asked_from_it() -> None:
    plan = plan_of(ANN, BOB, shards=1)
    asks = plan.next(0.0, is_ending=False)
    lost = plan.drop(BOB)
    assert lost == [ask for ask in asks if ask.donor == BOB]
    plan.arrived(asks[0], 0.1)
    again = [ask.piece for now in (0.2, 0.3) for ask in plan.next(now, is_ending=False)]
    assert {ask.piece for ask in lost} & set(again)
    assert plan.can_end(ShardId(0))
    plan.drop(ANN)
    assert not plan.can_end(ShardId(0))


def test_who_does_not_have_a_shard_is_not_asked_for_it_again() -> None:
    plan = plan_of(ANN, BOB, shards=1, chunks=8)
    for ask in plan.next(0.0, is_ending=False):
        if ask.donor == BOB:
            plan.failed(ask, is_unable=True)
    asks = plan.next(0.1, is_ending=False)
    assert all(ask.donor == ANN for ask in asks)
    plan.failed(Ask(Piece(ShardId(0), 0), ANN), is_unable=True)
    assert not plan.can_end(ShardId(0))


def test_a_silent_donors_chunk_is_asked_of_one_other_donor() -> None:
    plan = plan_of(ANN, BOB, CID, shards=1, chunks=3)
    silent = [ask for ask in plan.next(0.0, is_ending=False) if ask.donor == ANN]
    assert not plan.next(0.1, is_ending=False)
    for ask in (Ask(piece, donor) for donor in (BOB, CID) for piece in list(plan._donors[donor].asked)):
        plan.arrived(ask, 0.2)
    late = plan.next(OVERDUE_LEAST_S * 10, is_ending=False)
    assert [ask.piece for ask in late] == [ask.piece for ask in silent]
    assert ANN not in {ask.donor for ask in late}
    assert not plan.next(OVERDUE_LEAST_S * 10, is_ending=False)
    assert set(plan.arrived(late[0], OVERDUE_LEAST_S * 11)) == {Ask(late[0].piece, ANN)}


def test_what_comes_after_the_end_is_no_error() -> None:
    plan = plan_of(ANN, shards=1)
    asks = plan.next(0.0, is_ending=False)
    assert plan.end(ShardId(0)) == asks
    assert plan.arrived(asks[0], 1.0) == []
    plan.failed(asks[1], is_unable=True)
    assert plan.is_idle
