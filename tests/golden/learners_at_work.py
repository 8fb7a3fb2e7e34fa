"""Prints the picture of a learner's life, as its peer sees it in worlds of whole peers, which want a process of their
own (``p2pdiloco.peersim.worker``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.peersim.worker import outcomes, prepare

if TYPE_CHECKING:
    from p2pdiloco.peer.supervision import Supervision

SEEDS = (0, 1, 7)


def state(of: Supervision) -> str | None:
    if "is_over" not in vars(of):
        return None
    if of._process is None:
        return "over" if of.is_over else "none"
    if not of._is_loaded:
        return "ready" if of._is_ready else "starting"
    return "unable" if of.trouble else "training"


def main() -> None:
    prepare(None)
    from watch import attributes_of

    from p2pdiloco.peer.supervision import Supervision

    with attributes_of(Supervision, state) as picture:
        list(outcomes(SEEDS))
    print(picture.mermaid(), end="")


if __name__ == "__main__":
    main()
