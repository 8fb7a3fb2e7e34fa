"""Every kind of fault has a look of its own in the picture."""

from __future__ import annotations

from typing import get_args

import pytest

from tests.chaos.schedule import DURATIONS_S, Kind


def test_every_kind_of_fault_can_be_drawn_and_has_a_duration() -> None:
    pytest.importorskip("matplotlib")
    from tests.chaos.timeline import LOOKS

    assert set(LOOKS) == set(get_args(Kind)) == set(DURATIONS_S)
    assert len({(marker, color) for marker, color, _ in LOOKS.values()}) == len(LOOKS)
