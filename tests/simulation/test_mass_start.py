"""Many peers that come at once."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.protocol.churn import swarm


@pytest.mark.parametrize("peers", [16, 48])
def test_peers_that_come_at_once_have_all_states_within_ten_seconds(peers: int) -> None:
    """A newcomer asked one peer per heartbeat, and most donors must have reported (H2b): 48 peers took two minutes."""
    world = swarm(peers, heartbeat_s=1.0, fragments=8, sync_every=192)
    for name, setting in world.settings.items():
        world.settings[name] = msgspec.structs.replace(setting, state_bytes=1000, load_s=1e6)
    world.run_until(10.0)
    assert sum(process.machine.core.is_current for process in world.processes.values()) == peers
