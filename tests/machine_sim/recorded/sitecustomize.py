"""A process whose import path begins with this folder records its node's machine (Python imports this module at its
start)."""

from tests.machine_sim import recorder

recorder.install()
