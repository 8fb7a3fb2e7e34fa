"""Prints the diagram of a learner's states as its peer sees them, in simulations of whole peers.

These simulations need a process of their own (``tests.peer_sim.worker``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.peer_sim.worker import outcomes, prepare

if TYPE_CHECKING:
    from p2pdiloco.peer.learner_supervisor import SupervisedLearner

SEEDS = (0, 1, 15)


def state(of: SupervisedLearner) -> str | None:
    if "has_blocks" not in vars(of):
        return None
    if of.process is None:
        return "none"
    return "training" if of.is_loaded else "ready" if of.is_ready else "starting"


def main() -> None:
    prepare()
    from p2pdiloco.peer.learner_supervisor import SupervisedLearner
    from tests.golden.watch import attributes_of

    with attributes_of(SupervisedLearner, state) as picture:
        list(outcomes(SEEDS))
    print(picture.mermaid(), end="")


if __name__ == "__main__":
    main()
