"""A peer that was killed comes back."""

from __future__ import annotations

from p2pdiloco.peersim.faults import Fault
from p2pdiloco.peersim.world import World

LONGEST_S = 10.0


def again(world: World, fault: Fault) -> None:
    """After as long as the fault lasts, but soon."""
    world.at(world.now + 0.05 + min(fault.seconds, LONGEST_S), lambda: world.begin(fault.peer))
