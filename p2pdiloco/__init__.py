"""Peer-to-peer training of language models with Decoupled DiLoCo.

``DiLoCo`` connects a training script to a run. ``load_model`` and ``load_into`` load what a run has trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pdiloco.diloco import DiLoCo, DiLoCoError
    from p2pdiloco.training.export import load_into, load_model

__all__ = ["DiLoCo", "DiLoCoError", "load_into", "load_model"]


def __getattr__(name: str) -> Any:
    """Import torch only when needed: most commands do not use it."""
    if name in ("load_into", "load_model"):
        from p2pdiloco.training import export

        return getattr(export, name)
    if name in __all__:
        from p2pdiloco import diloco

        return getattr(diloco, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
