"""Places in a file: no two share a byte, and what was given back is used again."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.peer.places import Place, Places, whole_sectors
from p2pdiloco.runtime.files import SECTOR_BYTES


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
def test_places_share_nothing_and_gaps_are_used(steps: list[tuple[bool, int]]) -> None:
    places, taken = Places(), list[Place]()
    for is_taken, number in steps:
        if is_taken or not taken:
            before, gaps = places.end, set(range(0, places.end, SECTOR_BYTES))
            for one in taken:
                gaps -= {*range(one.at, one.end, SECTOR_BYTES)}
            place = places.take(number)
            wanted = {*range(0, place.size, SECTOR_BYTES)}
            fits = [at for at in sorted(gaps) if {at + one for one in wanted} <= gaps]
            assert place == Place(fits[0] if fits else before, whole_sectors(number))
            taken.append(place)
        else:
            places.give(taken.pop(number % len(taken)))
        taken.sort()
        assert all(one.end <= other.at for one, other in itertools.pairwise(taken))
        assert all(not one.at % SECTOR_BYTES and not one.size % SECTOR_BYTES for one in taken)
        assert places.taken_bytes() == sum(one.size for one in taken)
        assert places.end == max((one.end for one in taken), default=0)


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_when_all_is_given_back_the_file_is_empty(sizes: list[int], random: object) -> None:
    places = Places()
    taken = [places.take(size) for size in sizes]
    random.shuffle(taken)  # type: ignore[attr-defined]
    for one in taken:
        places.give(one)
    assert (places.end, places.taken_bytes()) == (0, 0)
