"""Where peers keep what they are, unless they are told another place: the commands' default, and training scripts'."""

from __future__ import annotations

import os
from pathlib import Path


def state_home() -> Path:
    """``$XDG_STATE_HOME/p2pdiloco``, else ``~/.local/state/p2pdiloco``. A script's own folder lies in it."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "p2pdiloco"
