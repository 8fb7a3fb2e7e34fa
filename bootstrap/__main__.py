"""The bootstrap node's program: ``python -m bootstrap`` is ``p2pdiloco bootstrap`` with the same options.

This module is for a checkout of the repository; the systemd unit and the Dockerfile beside it run the installed
command. The node needs about 120 MB of memory and no GPU. It stores no run's state, and may be restarted at any time;
with ``--identity`` its address stays the same.
"""

import sys

from p2pdiloco.cli.main import main

sys.exit(main(["bootstrap", *sys.argv[1:]]))
