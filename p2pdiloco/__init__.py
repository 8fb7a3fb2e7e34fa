"""Decoupled DiLoCo without a syncer, peer to peer. For training scripts: ``p2pdiloco.DiLoCo``; for what came of a run:
``p2pdiloco.load_model`` and ``load_into``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from p2pdiloco.diloco import DiLoCo, DiLoCoError
    from p2pdiloco.training.export import load_into, load_model

__all__ = ["DiLoCo", "DiLoCoError", "load_into", "load_model"]


def __getattr__(name: str) -> Any:
    """Import torch and all that only when it is asked for: most commands need none of it."""
    if name in ("load_into", "load_model"):
        from p2pdiloco.training import export

        return getattr(export, name)
    if name in __all__:
        from p2pdiloco import diloco

        return getattr(diloco, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
