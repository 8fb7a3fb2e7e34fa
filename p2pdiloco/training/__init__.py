"""The learner: torch, its loops, data, and the link to its node. Importing this much is cheap."""

PROGRAM = "p2pdiloco.training.learner_main"
"""The module that a node starts as its learner."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Threads that wait for each other sleep, unless the user says otherwise: they would spin, on cores that others want,
while the one that they wait for waits for a core. Beside two busy loops on two cores a learner makes 3.95 steps a
second with it and 0.05 without (``python -m benchmarks.training.busy``). Read once, when torch is loaded."""
NAME = "learner"
"""A learner's process, as the system's lists call it."""
