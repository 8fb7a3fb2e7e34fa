"""A line that does not carry the rounds is told within two of them, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from p2pdiloco.node.thin_line import ThinLine
from p2pdiloco.wire.control_messages import TROUBLE_LIMIT

SYNC_EVERY = 24
ROUND_BYTES = 860_000
"""Each way. With steps of a second, a line that carries 287 kbit/s carries the rounds."""
STEP_S = 1.0


def told(
    rate: Callable[[float], float],
    *,
    rounds: float = 6.0,
    down: Callable[[float], float] | None = None,
    has_merges: bool = True,
    is_alone: bool = False,
    step_s: float = STEP_S,
) -> list[tuple[float, str]]:
    """Return each sentence about the line, and after how many rounds it came, if the line carries these bytes per
    second at a time.

    Payloads queue up, and a round's progress is merged when its bytes have come both ways. ``is_alone``: peers lose
    each other, and merge their own progress at once.
    """
    line, heard = ThinLine(SYNC_EVERY), list[tuple[float, str]]()
    carried, asked, merged, now = [0.0, 0.0], 0.0, 0.0, 0.0
    while now <= rounds * SYNC_EVERY * step_s:
        steps = int(now / step_s)
        asked = steps // SYNC_EVERY * float(ROUND_BYTES) if has_merges else 0.0
        for way, speed in enumerate((rate, down or rate)):
            carried[way] = min(asked, carried[way] + speed(now))
        merged = min(carried) // ROUND_BYTES * SYNC_EVERY
        up, down_ = map(int, carried)
        waits = (up < asked, down_ < asked)
        if is_alone:  # at every third look it has no connection
            line.look(
                now, steps, 3, 0, 0.0 if now % 3 == 2 else ROUND_BYTES, (up, down_), waits if now % 3 else (False,) * 2
            )
        else:
            line.look(now, steps, steps - merged, int(merged), ROUND_BYTES, (up, down_), waits)
        if line.sentence != (heard[-1][1] if heard else ""):
            heard.append((now / SYNC_EVERY / step_s, line.sentence))
        now += 1.0
    return heard


def test_a_thin_line_is_told_within_two_rounds_with_numbers_and_what_to_do() -> None:
    line = ThinLine(SYNC_EVERY)
    for second in range(1 + 2 * SYNC_EVERY):
        assert not line.sentence
        line.look(float(second), second, second, 0, ROUND_BYTES, (8000 * second,) * 2, (True, True))
    for part in (
        "a round (24 steps, 24 s) needs 860 kB each way (287 kbit/s)",
        "it carried 192 kB sent (64 kbit/s) and 192 kB received (64 kbit/s)",
        "48 steps of this peer are not merged",
        "--up",
        "schedule.sync_every",
        "model.lora",
        "codec.up",
    ):
        assert part in line.sentence
    assert len(line.sentence) <= TROUBLE_LIMIT


@pytest.mark.parametrize("step_s", [0.2, 1.0, 30.0])
def test_it_is_told_as_long_as_it_is_true(step_s: float) -> None:
    fast_s = 10.0 * SYNC_EVERY * step_s
    found = told(lambda now: (0.2 if now < fast_s else 20.0) * ROUND_BYTES / 24 / step_s, rounds=16, step_s=step_s)
    first, text = found[0]
    assert first <= 1.0 + 2 * max(1.0, 10.0 / SYNC_EVERY / step_s) + 0.5, "two rounds after the first was due"
    assert "too thin" in text
    assert 10.0 <= found[-1][0] < 15.0
    assert not found[-1][1]


@pytest.mark.parametrize(
    "rate",
    [
        pytest.param(lambda now: 10 * ROUND_BYTES / 24, id="healthy"),
        pytest.param(lambda now: 0.9 * ROUND_BYTES / 24, id="a little short"),
        pytest.param(lambda now: 0.0 if 24 < now < 47 else 4 * ROUND_BYTES / 24, id="one late round"),
    ],
)
def test_a_line_that_carries_the_rounds_is_not_told_of(rate: Callable[[float], float]) -> None:
    assert told(rate, rounds=12) == []


def test_peers_that_lose_each_other_on_a_thin_line_and_merge_alone_are_told() -> None:
    (after, text), *_ = told(lambda now: 8000.0, is_alone=True)
    assert after <= 3.0
    assert "nothing of other peers is merged here" in text
    assert "needs 860 kB each way" in text


def test_a_thin_line_one_way_is_told_of_that_way() -> None:
    (_, up), *_ = told(lambda now: 8000.0, down=lambda now: 1e7)
    (_, down), *_ = told(lambda now: 1e7, down=lambda now: 8000.0)
    assert "sent (" in up
    assert "received (" not in up
    assert "received (" in down
    assert "sent (" not in down
    assert "the line is too thin for this run, or that of the peers that send" in down
    assert "peers that send" not in up


def test_a_line_that_is_long_and_not_thin_is_not_told_of() -> None:
    """Rounds of 60 ms do not fit into round trips of 800 ms, and losses keep payloads waiting; progress is merged."""
    line = ThinLine(3)
    for second in range(200):
        line.look(float(second), 50 * second, 150, second, 43_000, (5_000 * second,) * 2, (False, second % 2 == 0))
        assert not line.sentence


def test_a_swarm_that_stands_still_is_no_thin_line() -> None:
    assert told(lambda now: 1e6, has_merges=False) == []
    line = ThinLine(SYNC_EVERY)
    for second in range(200):
        line.look(float(second), second, second, 0, ROUND_BYTES, (0, 0), (second % 10 == 0, False))
        assert not line.sentence


def test_a_learner_that_rests_begins_anew() -> None:
    line = ThinLine(SYNC_EVERY)
    for second in range(200):
        steps = None if second % 40 == 0 else second
        line.look(float(second), steps, second, 0, ROUND_BYTES, (8000 * second,) * 2, (True, True))
    assert not line.sentence
