"""Data (D) of docs/protocol.md: which blocks of an epoch of 100 a peer's learner is given, and when they are done."""

from __future__ import annotations

from typing import Any

import msgspec
from stage import SHARD, TOKENS, A, B, Stage, head_of, life, only, sent, tokens

from p2pdiloco.protocol import effects as ef
from p2pdiloco.protocol import events as ev
from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.data_blocks import Block, BlockLedger
from p2pdiloco.protocol.ids import PeerId

BLOCKS = 100


def stage_with(*others: Any, has_blocks: bool = True, **changes: Any) -> tuple[Stage, list[Block]]:
    """A stage whose learner has the run's data, and what it was given."""
    stage = Stage(*others, has_learner=False, blocks=BLOCKS, **changes)
    return stage, given(stage.tell(ev.LearnerStarted(life(A), has_blocks)))


def given(effects: list[ef.Effect]) -> list[Block]:
    return [effect.block for effect in only(effects, ef.Train)]


def ledger(stage: Stage) -> BlockLedger:
    found = stage.machine.core.chains[SHARD].ledger
    assert found is not None
    return found


def test_a_block_has_been_trained_when_its_last_token_is_merged_in_shard_0() -> None:
    """D1a: the contribution carries those that ended within its range, and the commit carries them on."""
    stage, (first, second) = stage_with(B, owners="ab")
    stage.tell(ev.BlockFinished(first, 4 * TOKENS))
    contributed = stage.give(4)
    stage.tell(ev.BlockFinished(second, 5 * TOKENS))
    assert not ledger(stage).is_trained(first)
    effects = stage.work(contributed + stage.offer(B, 0, 0) + stage.wait(5.0))
    header = next(message.header for _, message in sent(effects, msg.Commit))
    assert [c.blocks for c in header.contributors] == [(first,)]
    assert ledger(stage).is_trained(first)
    assert not ledger(stage).is_trained(second)


def test_what_a_learner_had_not_given_when_it_died_is_free_again() -> None:
    """D1a: what it had in hand, and what it had trained and not given; the next life is given it."""
    stage, (first, second) = stage_with()
    stage.tell(ev.BlockFinished(first, TOKENS))
    stage.tell(ev.LearnerStopped("killed"))
    assert stage.machine.block_assignment.claims() == ()
    assert given(stage.tell(ev.LearnerStarted(life(A, 2), has_blocks=True))) == [first, second]


def test_the_ledger_of_blocks_travels_with_the_state_of_shard_0() -> None:
    """D1a."""
    stage, _ = stage_with(B)
    header = stage.commit(msgspec.structs.replace(tokens(B, 0, 40), blocks=(Block(3), Block(70))))
    stage.take(header)
    other, _ = stage_with(B)
    state = stage.machine.core.chains[SHARD].state()
    assert state.head == head_of(header)
    other.machine.core.chains[SHARD].replace(state)
    assert [b for b in range(BLOCKS) if ledger(other).is_trained(Block(b))] == [3, 70]


def test_a_learner_has_a_block_in_hand_and_one_in_reserve() -> None:
    """D2a: from the start, and again as soon as it has finished one; what it was not given it cannot finish."""
    stage, blocks = stage_with()
    assert len(set(blocks)) == 2
    for i in range(2 * BLOCKS):
        more = given(stage.tell(ev.BlockFinished(blocks[i], TOKENS * (i + 1))))
        assert len(more) == (1 if len(blocks) < 2 * BLOCKS else 0)
        blocks += more
    assert sorted(blocks) == list(range(2 * BLOCKS)), "two epochs, each block once, and then nothing is free"
    assert given(stage.tell(ev.BlockFinished(Block(0), TOKENS))) == []


def test_blocks_that_others_claim_are_not_taken() -> None:
    """D2a: unless they claim them no more."""
    peers = (B, *map(PeerId, "cde"))
    stage, mine = stage_with(*peers)
    free = (7, 8, 9)
    others = tuple(Block(b) for b in range(2 * BLOCKS) if b not in (*mine, *free))
    for i, peer in enumerate(peers):
        stage.says(peer, claims=others[64 * i : 64 * (i + 1)])
    taken = [b for i in range(4) for b in given(stage.tell(ev.BlockFinished((*mine, *map(Block, free))[i], 10 * i)))]
    assert set(taken) <= set(free)
    stage.says(B, claims=())
    assert given(stage.wait(1.0)), "at the next heartbeat"


def test_a_peer_claims_what_it_has_in_hand_and_what_is_not_merged_yet() -> None:
    """D2c: and, for a while, what was merged."""
    stage, (first, second) = stage_with(B, owners="ab")
    third = given(stage.tell(ev.BlockFinished(first, 4 * TOKENS)))
    claimed = [beat.claims for to, beat in sent(stage.wait(0.6), msg.Heartbeat) if to == B]
    assert set(claimed[-1]) == {first, second, *third}
    stage.work(stage.give(4) + stage.offer(B, 0, 0) + stage.wait(5.0))
    assert ledger(stage).is_trained(first)
    assert first in stage.machine.block_assignment.claims(), "others may not have the commit yet"
    in_hand = [second, *third]
    for step in range(5, 25):
        in_hand += given(stage.tell(ev.BlockFinished(in_hand.pop(0), step * TOKENS)))
    assert first not in stage.machine.block_assignment.claims()


def test_a_learner_with_other_data_is_given_none() -> None:
    """D3: nor any learner of a run without blocks."""
    stage, blocks = stage_with(has_blocks=False)
    assert blocks == given(stage.wait(5.0)) == []
    without = Stage(has_learner=False)
    assert given(without.tell(ev.LearnerStarted(life(A), has_blocks=True)) + without.wait(5.0)) == []
