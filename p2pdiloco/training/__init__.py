"""The learner: torch, its loops, data, and the link to its node. Importing this much is cheap."""

PROGRAM = "p2pdiloco.training.program"
"""The module that a node starts as its learner."""
