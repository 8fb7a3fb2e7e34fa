"""Rates on the command line."""

import argparse

import pytest

from p2pdiloco.cli.argument_types import bytes_per_second, up_budget


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.5gbit", 312.5e6), ("100mbit", 12.5e6), ("800kbit", 100e3), ("1GBIT", 125e6), ("none", None)],
)
def test_a_rate_is_bits_per_second_in_the_fields_units(text: str, expected: float | None) -> None:
    assert bytes_per_second(text) == expected


@pytest.mark.parametrize("text", ["", "100", "0mbit", "-1gbit", "1 gbit", "1gbps", "infmbit", "1e3kbit"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write 2\.5gbit"):
        bytes_per_second(text)


def test_what_is_sent_may_be_learned() -> None:
    assert up_budget("AUTO") == "auto"
    assert up_budget("none") is None
    assert up_budget("8mbit") == 1e6
