"""A process whose import path begins with this folder has a wall clock that is off by ``P2PDILOCO_SWARM_CLOCK_OFF_S``
seconds (Python imports this module at its start). Monotonic clocks, files' times and other programs are as they are."""

import os
import time

from tests.machine_sim import recorder

_off_s = float(os.environ["P2PDILOCO_SWARM_CLOCK_OFF_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _off_s
time.time_ns = lambda: _time_ns() + int(_off_s * 1e9)

recorder.install()
