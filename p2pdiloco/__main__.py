"""``python -m p2pdiloco`` is ``p2pdiloco``."""

import sys

from p2pdiloco.cli.main import main

sys.exit(main())
