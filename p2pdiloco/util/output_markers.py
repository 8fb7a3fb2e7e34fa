"""Lines that a peer shows and others use: what is typed to join it, where it is looked at. Swarms of tests and training
scripts look for them."""

from __future__ import annotations

import re

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


def script_invitation(word: str) -> str:
    """The line of a run of training scripts, with an invite or an address: ``p2pdiloco join`` has no script."""
    return f'{INVITED}:  initial_peers=["{word}"]'


def invited_with(told: str) -> str:
    """The invite or the address in the first such line of what a peer has told; empty if there is none."""
    found = re.search(rf'^{INVITED}:  (?:p2pdiloco join |initial_peers=\[")([^\s"]+)', told, re.MULTILINE)
    return "" if found is None else found[1]


def sight(address: str) -> str:
    """Where a page is."""
    return f"{LOOK_AT}  {address}"
