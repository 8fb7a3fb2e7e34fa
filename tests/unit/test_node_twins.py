"""Which of two processes with one identity ends."""

from __future__ import annotations

import pytest

from p2pdiloco.node.twins import gives_way
from p2pdiloco.wire.records import PeerRecord


@pytest.mark.parametrize(
    ("first", "second"), [((100.0, "b"), (101.0, "a")), ((100.0, "a"), (100.0, "b")), ((0.0, "z"), (1e9, "a"))]
)
def test_the_later_one_does_and_the_other_does_not(first: tuple[float, str], second: tuple[float, str]) -> None:
    assert gives_way(*second, to=PeerRecord((), first[1], first[0]))
    assert not gives_way(*first, to=PeerRecord((), second[1], second[0]))
