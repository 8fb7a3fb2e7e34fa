"""Why no initial peer answered, in words: what libp2p's daemon says of a dial, and what to do about each kind."""

from __future__ import annotations

from collections.abc import Mapping

_CAUSES = (
    (
        "peer id mismatch",
        "another key answers there",
        "take the address that this peer prints now, since its key is new",
    ),
    (
        "connection refused",
        "connection refused",
        "nothing listens there: start it again, or mend the port in the address",
    ),
    ("no good addresses", "its name cannot be resolved", "mend the name in the address, or write its number with /ip4"),
    ("no route to host", "no route to host", "this machine has no way there; has it IPv6? Else take an /ip4 address"),
    (
        "network is unreachable",
        "no route to host",
        "this machine has no way there; has it IPv6? Else take an /ip4 address",
    ),
    ("i/o timeout", "no answer", "a firewall or a router drops it: open or forward its port"),
    ("deadline exceeded", "no answer", "a firewall or a router drops it: open or forward its port"),
    ("dial to self", "that is this machine's own address", "name another peer's, or none, to found a network"),
)
"""Of what the daemon says: a part of it, what that means, the remedy."""
CHECK = "check that it is running, and that its port can be reached from here"


def in_words(reason: str) -> tuple[str, str]:
    """What happened, and what to do."""
    for part, what, remedy in _CAUSES:
        if part in reason:
            return what, remedy
    return reason.rpartition("failed to dial: ")[2] or "no answer", CHECK


def sentence(failures: Mapping[str, str]) -> str:
    """Of all: ``failures`` has the daemon's words for each address."""
    told = {text: in_words(reason) for text, reason in failures.items()}
    tried = "; ".join(f"{text}: {what}" for text, (what, _) in told.items())
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in told.values()))
    return (
        f"none of the initial peers answers ({tried}): {remedies}. Any running bootstrap or peer of "
        "the run will do: it prints its address (directory is up), which may also stand behind an invite; to found a "
        "network of your own, name none"
    )
