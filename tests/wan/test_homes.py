"""Homes behind routers train together: real processes, real routers' address translation. They need root."""

from __future__ import annotations

from pathlib import Path

import pytest
from possible import why_not

from benchmarks.netbed.namespaces import TestbedError
from benchmarks.wan.homes import START_S, gathered, train, wait_for
from benchmarks.wan.sites import network

pytestmark = pytest.mark.xdist_group("wan")  # namespaces are the machine's

STEPS = 200
"""Some 16 turns, all of them with all three: nobody trains before all are connected."""
SOURCE = """
name = "test-homes"
[defaults]
up = "50mbit"
down = "100mbit"
round_trip_ms = 10
[[site]]
name = "hub"
[[site]]
name = "ann"
nat = "keep"
[[site]]
name = "bob"
nat = "cgn"
[[site]]
name = "kim"
nat = "random"
"""


NARROW = """
name = "test-narrow"
[defaults]
up = "50mbit"
down = "100mbit"
round_trip_ms = 10
[[site]]
name = "hub"
[[site]]
name = "ann"
[[site]]
name = "bob"
mtu = 1300
"""


@pytest.mark.long
def test_who_is_behind_a_tunnel_that_drops_long_packets_joins(tmp_path: Path) -> None:
    """Its libp2p daemon cannot use short segments; before, it joined only where all records fitted into one packet."""
    if reason := why_not():
        pytest.skip(reason)
    try:
        with network(NARROW, is_verified=False) as made, gathered(made, tmp_path, steps=100_000) as those:
            bob = those.homes[-1]
            wait_for(lambda: any(event["event"] == "progress" for event in bob.events()), [bob], START_S, "bob trains")
            known = bob.folder / "state" / "narrow-paths.json"
            wait_for(known.exists, [bob], START_S, "what its next life knows")
    except TestbedError as error:
        pytest.skip(str(error))


def test_three_homes_train_together_one_of_them_over_a_relay(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    try:
        with network(SOURCE, is_verified=False) as made:
            outcome = train(made, tmp_path, steps=STEPS, rests=True)
    except TestbedError as error:
        pytest.skip(str(error))
    # 4: on a busy machine a peer sometimes reports at the end that it was cut off, though it was not
    assert set(outcome.statuses.values()) <= {0, 4}, outcome
    assert (outcome.joined, outcome.models) == (3, 1), outcome
    assert outcome.fork_share < 0.5, outcome  # takeovers on a busy machine make some, which heal: one model
    assert outcome.tokens_merged_share == 1.0, outcome
    assert outcome.joint_versions_with_all > 0.0, outcome  # how many depends on who else uses this machine
    assert outcome.ways == {"ann-bob": "punching", "ann-kim": "relay", "bob-kim": "relay"}, outcome
    assert outcome.relayed_bytes > 0, outcome
    assert outcome.relayed_bytes_between_port_keeping == 0, outcome
