"""Lines that a peer shows and others use: what is typed to join it, where it is looked at. Swarms of tests and training
scripts look for them."""

from __future__ import annotations

INVITED = "to join from another machine"
"""How the first begins,"""
LOOK_AT = "look at"
"""and the second."""


def invitation(address: str, run: str) -> str:
    """The line of an open run, with a directory address of ours and the run's name."""
    return f"{INVITED}:  p2pdiloco join {address} --run {run}"


def private_invitation(invite: str) -> str:
    """The line of a run that takes members only."""
    return f"{INVITED}:  p2pdiloco join {invite}"


def sight(address: str) -> str:
    """Where a page is."""
    return f"{LOOK_AT}  {address}"
