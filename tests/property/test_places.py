"""Places in a file: no two share a byte, and what was given back is used again."""

import itertools
from collections import deque
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.peer.payload_store import FileAllocator, Place, place_bytes
from p2pdiloco.util.files import SECTOR_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400_000)), max_size=60))
def test_places_share_nothing_and_gaps_are_used(steps: list[tuple[bool, int]]) -> None:
    places, taken = FileAllocator(), list[Place]()
    for is_taken, number in steps:
        if is_taken or not taken:
            before, gaps = places.end, set(range(0, places.end, SECTOR_BYTES))
            for one in taken:
                gaps -= {*range(one.at, one.end, SECTOR_BYTES)}
            place = places.allocate(number)
            wanted = {*range(0, place.size, SECTOR_BYTES)}
            fits = [at for at in sorted(gaps) if {at + one for one in wanted} <= gaps]
            assert place == Place(fits[0] if fits else before, place_bytes(number))
            taken.append(place)
        else:
            places.free(taken.pop(number % len(taken)))
        taken.sort()
        assert all(one.end <= other.at for one, other in itertools.pairwise(taken))
        assert all(not one.at % SECTOR_BYTES and not one.size % SECTOR_BYTES for one in taken)
        assert places.allocated_bytes() == sum(one.size for one in taken)
        assert places.end == max((one.end for one in taken), default=0)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_when_all_is_given_back_the_file_is_empty(sizes: list[int], random: object) -> None:
    places = FileAllocator()
    taken = [places.allocate(size) for size in sizes]
    random.shuffle(taken)  # type: ignore[attr-defined]
    for one in taken:
        places.free(one)
    assert (places.end, places.allocated_bytes()) == (0, 0)


@given(st.integers(0, 1 << 30))
def test_a_place_is_hardly_larger_than_its_piece(size: int) -> None:
    found = place_bytes(size)
    assert not found % SECTOR_BYTES
    assert size <= found < size + max(SECTOR_BYTES, size / 32) or (size, found) == (0, SECTOR_BYTES)


def test_pieces_of_nearly_one_size_leave_no_slivers() -> None:
    """int4's of a shard, Huffman-coded, some of which live for longer than others."""
    places, random = FileAllocator(), Random(1)
    kept = {life: deque[Place]() for life in (5, 32)}
    for _ in range(60 * 20):
        for life, places_of in kept.items():
            places_of.append(places.allocate(int(random.gauss(535_000, 1500))))
            if len(places_of) > 20 * life:
                places.free(places_of.popleft())
    assert len({place.size for places_of in kept.values() for place in places_of}) <= 2
    assert places.end <= 1.05 * places.allocated_bytes()
