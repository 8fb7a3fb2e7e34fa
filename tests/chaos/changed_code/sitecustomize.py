"""A process whose import path begins with this folder is a peer with changed code: it tells the lies that
``P2PDILOCO_SWARM_LIES`` names, joined by "+" (Python imports this module at its start), and writes the names of those
that have left for another peer into the file ``P2PDILOCO_SWARM_LIES_SENT``."""

import os
import sys
from pathlib import Path

from tests.machine_sim import recorder

if "p2pdiloco" in sys.orig_argv:  # the node; its learner and its daemon are as they are
    from tests.chaos import byzantine

    byzantine.tell(os.environ["P2PDILOCO_SWARM_LIES"].split("+"), Path(os.environ["P2PDILOCO_SWARM_LIES_SENT"]))

recorder.install()
