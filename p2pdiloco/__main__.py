"""Entry point of ``python -m p2pdiloco``, which is the command ``p2pdiloco``."""

import sys

from p2pdiloco.cli.main import main

sys.exit(main())
