"""Parts of a learner: its link to the node, data, models. Importing this package itself is cheap."""

# The script that a node starts as its learner.
PROGRAM = "p2pdiloco.learner"
# Let waiting OpenMP threads sleep instead of spin, unless the user says otherwise. Spinning threads occupy cores while
# the thread that they wait for waits for one. Beside two busy loops on two cores, a learner makes 3.95 steps per second
# with it and 0.05 without (``benchmarks/notes.md``). The variables are read once, when torch is loaded.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
# The learner's process name in the system's process lists.
NAME = "learner"
