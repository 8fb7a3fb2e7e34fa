"""The learner: torch, training loops, data, and the link to its node. Importing this package itself is cheap."""

# The module that a node starts as its learner.
PROGRAM = "p2pdiloco.training.learner_main"
# Let waiting OpenMP threads sleep instead of spin, unless the user says otherwise. Spinning threads occupy cores while
# the thread that they wait for waits for one. Beside two busy loops on two cores, a learner makes 3.95 steps per second
# with it and 0.05 without (``python -m benchmarks.training.busy``). The variables are read once, when torch is loaded.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
# The learner's process name in the system's process lists.
NAME = "learner"
