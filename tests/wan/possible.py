"""Whether this machine's kernel can shape links between network namespaces."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.netbed.kernel_features import choose_engine, probe
from benchmarks.netbed.namespaces import TestbedError


def why_not(*needed: Callable[[], object]) -> str:
    """Why tests on shaped links cannot run here, or ""; ``needed``: what must work, too."""
    try:
        choose_engine(probe())
        for one in needed:
            one()
    except (TestbedError, OSError) as error:
        return str(error)
    return ""
