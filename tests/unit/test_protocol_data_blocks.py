"""Blocks of data: what a chain has trained, and which one a peer takes next."""

from __future__ import annotations

from random import Random

import pytest

from p2pdiloco.protocol.block_assignment import epoch_slots
from p2pdiloco.protocol.data_blocks import SLOTS, Block, BlockLedger, EpochSlots, Trained
from p2pdiloco.protocol.ids import PeerId, RunId

ALL = range(SLOTS)


def everything(place: float) -> EpochSlots:
    return EpochSlots(tuple(ALL), (), place)


def test_an_epoch_is_over_when_all_of_its_blocks_are_trained() -> None:
    ledger = BlockLedger(10)
    ledger.add(map(Block, range(9)))
    ledger.add([Block(10), Block(12)])
    assert (ledger.epoch, ledger.trained, ledger.repeated) == (0, 11, 0)
    ledger.add([Block(9)])
    assert (ledger.epoch, ledger.trained) == (1, 12)
    assert ledger.is_trained(Block(3))
    assert ledger.is_trained(Block(12))
    assert not ledger.is_trained(Block(11))


def test_what_is_trained_again_is_counted() -> None:
    ledger = BlockLedger(2)
    ledger.add([Block(0), Block(0), Block(1), Block(1)])
    assert (ledger.epoch, ledger.trained, ledger.repeated) == (1, 2, 2)


def test_what_is_not_open_is_not_counted() -> None:
    ledger = BlockLedger(2)
    ledger.add([Block(4), Block(2**50)])
    assert (ledger.epoch, ledger.trained, ledger.repeated) == (0, 0, 0)


@pytest.mark.parametrize("blocks", [1, 7, 8, 64, 1000])
def test_a_ledger_travels(blocks: int) -> None:
    random, ledger, other = Random(blocks), BlockLedger(blocks), BlockLedger(blocks)
    ledger.add(Block(random.randrange(2 * blocks)) for _ in range(blocks))
    other.restore(ledger.state())
    assert other.state() == ledger.state()
    assert all(other.is_trained(Block(b)) == ledger.is_trained(Block(b)) for b in range(3 * blocks))


def test_a_hostile_ledger_is_taken_within_its_bounds() -> None:
    ledger = BlockLedger(3)
    ledger.restore(Trained(5, (b"\xff" * 8000,), 0, 0))
    assert [len(row) for row in ledger.rows] == [3, 3]
    assert ledger.epoch == 6


@pytest.mark.parametrize("blocks", [5, 64, 100, 1000])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.99])
def test_a_peer_alone_takes_each_block_once_going_round(blocks: int, place: float) -> None:
    ledger, taken = BlockLedger(blocks), []
    for _ in range(2 * blocks):
        block = ledger.next_free(taken, lambda _: everything(place))
        assert block is not None
        taken.append(block)
    begin = int(place * blocks)
    assert taken[:blocks] == [(begin + i) % blocks for i in range(blocks)]
    assert sorted(taken) == list(range(2 * blocks))
    assert ledger.next_free(taken, lambda _: everything(place)) is None


def test_peers_share_an_epoch_and_meet_only_at_its_end() -> None:
    """Three peers of speeds 1, 1, 4 that see each other's claims: every block once, and the fast one takes most."""
    peers = [PeerId("a"), PeerId("b"), PeerId("c")]
    ledger, taken = BlockLedger(600), []
    shares = dict.fromkeys(peers, 0)
    for sync_round in range(600):
        peer = peers[(0, 1, 2, 2, 2, 2)[sync_round % 6]]
        block = ledger.next_free(taken, lambda epoch, peer=peer: epoch_slots(RunId("r"), epoch, tuple(peers))[peer])  # type: ignore[misc]
        assert block is not None
        taken.append(block)
        shares[peer] += block < 600
    assert len(set(taken)) == 600
    assert shares[PeerId("c")] > 1.5 * (shares[PeerId("a")] + shares[PeerId("b")])


def test_slots_are_shared_among_peers() -> None:
    found = epoch_slots(RunId("r"), 3, tuple(PeerId(f"p{i}") for i in range(8))).values()
    assert sorted(slot for d in found for slot in d.own) == list(ALL)
    assert sorted(slot for d in found for slot in d.helped) == list(ALL)
    assert all(not set(d.own) & set(d.helped) for d in found)
    assert len({d.place for d in found}) == 8
