"""What is made small before anything is imported, so that small vectors have several chunks, and short runs more than
checkpoints.

``tensors.recipes.CHUNK`` is a constant of the protocol: in a real process nothing sets it.
"""

from __future__ import annotations

import random
import sys

CHUNK = 256
"""Parameters of a chunk."""
COMMITS_S = 0.5
"""Between two looks at what was committed since a checkpoint."""
DRAWN = 1
"""Signatures that are checked of each commit of a lineage: fewer than there are."""


def install() -> None:
    """To be called first of all in a process."""
    taken = [name for name in sys.modules if name.startswith("p2pdiloco.codec.") and name != "p2pdiloco.codec.formats"]
    assert not taken, f"{taken} know another chunk already"
    from p2pdiloco.codec import formats

    setattr(formats, "CHUNK", CHUNK)  # noqa: B010 (it is Final for everybody else)
    from p2pdiloco.peer import checkpoint_writer, model_state

    model_state.new_random = lambda: random.Random(0)  # a seed is the same world again

    checkpoint_writer.EVERY_S = COMMITS_S
    from p2pdiloco.peer import signatures

    signatures.DRAWN = DRAWN
