"""The bootstrap node's program: ``python -m bootstrap`` is ``p2pdiloco bootstrap`` with the same options.

For a checkout of the repository; the systemd unit and the Dockerfile beside it run the installed command. It needs no
GPU and about 120 MB of memory, holds no run's state, and may be restarted at any time; with ``--identity`` its address
stays the same.
"""

import sys

from p2pdiloco.cli.main import main

sys.exit(main(["bootstrap", *sys.argv[1:]]))
