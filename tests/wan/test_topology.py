"""Topologies as files: what is shipped, what is refused in which words, what changes do."""

from __future__ import annotations

import pytest

from benchmarks.netbed.topology import SHIPPED, Change, TopologyError, changed, find_topology, parse_topology, rate_text
from benchmarks.netbed.trace import sentence

TWO = 'name = "two"\n[[site]]\nname = "a"\nup = "50mbit"\n[[site]]\nname = "b"\n'


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_topologies_are_right_and_found_by_name(path):
    assert parse_topology(find_topology(path.stem).read_bytes()).sites


def test_defaults_links_and_units():
    text = TWO + '[defaults]\nup = "2.5gbit"\nround_trip_ms = 30\n[[site]]\nname = "c"\n'
    text += '[[link]]\nbetween = ["c", "a"]\nloss = 0.01\n'
    topology = parse_topology(text)
    assert [site.up_bps for site in topology.sites] == [50_000_000, 2_500_000_000, 2_500_000_000]
    assert topology.path(0, 2) == topology.path(2, 0)
    assert (topology.path(0, 2).loss, topology.path(0, 2).round_trip_s) == (0.01, 0.03)
    assert topology.path(1, 2).loss == 0.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('name = "x"\n[[site]]\nname = "a"\n', "length >= 2"),
        (TWO.replace('"b"', '"a"'), "same name"),
        (TWO.replace('"50mbit"', '"50"'), "site a: up: '50' is no rate from 32kbit to 10gbit"),
        (TWO.replace('"50mbit"', '"50gbit"'), "no rate from"),
        (TWO.replace('name = "a"', 'name = "a"\ncolour = 1'), "colour"),
        (TWO.replace('"b"', '"../b"'), "matching regex"),
        (TWO + '[[link]]\nbetween = ["a", "c"]\n', "link: there is no site 'c': two has a, b"),
        (TWO + '[[link]]\nbetween = ["a", "a"]\n', "twice"),
        (TWO + '[[link]]\nbetween = ["a", "b"]\n[[link]]\nbetween = ["b", "a"]\n', "two links"),
        (
            TWO + '[[link]]\nbetween = ["a", "b"]\njitter_ms = 3\nround_trip_ms = 4\n',
            "at most half of round_trip_ms (4)",
        ),
        (TWO + '[[link]]\nbetween = ["a", "b"]\nloss = 0.9\n', "0.5"),
        (TWO + '[[change]]\nat_s = 1\nup = "1mbit"\n', "change at 1 s: name either site or between"),
        (TWO + '[[change]]\nat_s = 1\nsite = "a"\nloss = 0.1\n', "belong to a pair"),
        (TWO + '[[change]]\nat_s = 1\nbetween = ["a", "b"]\nup = "1mbit"\n', "belong to one site"),
        ("name = ", "Invalid value"),
    ],
)
def test_what_is_wrong_is_said(text, says):
    with pytest.raises(TopologyError) as caught:
        parse_topology(text)
    assert says in str(caught.value)


def test_unknown_names_and_files():
    with pytest.raises(TopologyError, match="shipped topologies: dsl, eight"):
        find_topology("nowhere")


def test_changes_come_in_order_and_change_only_what_they_name():
    text = (
        TWO + '[[change]]\nat_s = 5\nsite = "a"\nup = "1mbit"\n[[change]]\nat_s = 2\nbetween = ["b", "a"]\nloss = 0.1\n'
    )
    topology = parse_topology(text)
    assert [change.at_s for change in topology.changes] == [2, 5]
    after = changed(changed(topology, topology.changes[0]), topology.changes[1])
    assert (after.sites[0].up_bps, after.sites[0].down_bps) == (1_000_000, 1_000_000_000)
    assert after.path(0, 1).loss == 0.1
    assert topology.path(0, 1).loss == 0.0
    assert (
        sentence(Change(at_s=1, between=("a", "b"), loss=0.1, round_trip_ms=5))
        == "a to b: round trip 5 ms, loss 10.00%"
    )


def test_rates_are_told_as_people_say_them():
    assert [rate_text(x) for x in (2.5e9, 50e6, 800e3)] == ["2.5 Gbit/s", "50 Mbit/s", "800 kbit/s"]
