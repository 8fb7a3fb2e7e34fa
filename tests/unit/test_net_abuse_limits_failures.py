"""Who is shut out for what came to nothing."""

from __future__ import annotations

from p2pdiloco.net.abuse_limits import FORGOTTEN_S, SHUT_OUT, Exclusion


def test_who_came_to_nothing_often_is_out_for_a_while_and_sooner_the_next_time() -> None:
    exclusion = Exclusion(failures=4, time_s=FORGOTTEN_S)
    assert [exclusion.failed("ann", 1.0) for _ in range(6)] == [False, False, False, True, False, False]
    assert exclusion.has("ann", 1.0)
    assert not exclusion.has("bob", 1.0)
    assert exclusion.machines(2.0) == ["ann"]
    ends = exclusion.ends()
    assert ends == 1.0 + FORGOTTEN_S
    assert not exclusion.has("ann", ends)
    assert exclusion.machines(ends) == []
    assert exclusion.ends() is None
    assert exclusion.failed("ann", ends), "half of six, and one more"


def test_a_machine_that_fails_once_a_minute_is_never_shut_out() -> None:
    exclusion = Exclusion(failures=64, time_s=60.0)
    assert not any(exclusion.failed("monitor", 60.0 * minute) for minute in range(300))


def test_so_many_are_out_at_once() -> None:
    exclusion = Exclusion(failures=1, time_s=60.0)
    for number in range(SHUT_OUT + 3):
        assert exclusion.failed(f"{number}", number / 1000)
    machines = exclusion.machines(1.0)
    assert len(machines) == SHUT_OUT
    assert not exclusion.has("2", 1.0)
    assert exclusion.has("3", 1.0)
