"""Commands, and the programs of this repository that are none, as a person types them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from p2pdiloco.cli import main as commands


def main(words: Sequence[str]) -> int:
    """Run ``p2pdiloco WORDS``, or ``python -m WORDS`` where the first word names a module of tests or benchmarks."""
    first, *rest = words or ("",)
    if not first.startswith(("tests.", "benchmarks.")):
        return commands.main(words)
    module = import_module(first)
    if hasattr(module, "__path__"):
        module = import_module(f"{first}.__main__")
    status: int = module.main(rest)
    return status
