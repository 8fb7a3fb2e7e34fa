"""The line that a founder shows, and that others type. Swarms of tests and training scripts look for it."""

from __future__ import annotations

INVITED = "to join from another machine"
"""How it begins."""


def invitation(address: str, run: str) -> str:
    """The line of an open run, with a directory address of ours and the run's name."""
    return f"{INVITED}:  p2pdiloco join {address} --run {run}"


def private_invitation(invite: str) -> str:
    """The line of a run that takes members only."""
    return f"{INVITED}:  p2pdiloco join {invite}"
