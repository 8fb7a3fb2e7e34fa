"""What a node may ask of a training loop, where that is the user's own script: nothing."""

from __future__ import annotations

from torch import Tensor

from p2pdiloco.protocol.data_blocks import Block


class ScriptTrainer:
    """An ``outer_link.Trainer``."""

    def evaluate(self, theta: Tensor) -> float:
        """Runs of scripts (``evaluation.every`` is 0) are evaluated by the scripts."""
        raise AssertionError("no node asks for this")

    def train(self, block: Block) -> None:
        """The script has data of its own."""

    def save(self) -> None:
        """The script saves its own optimizer."""

    def merged(self, tokens: int) -> None:
        """A script's rate is its own affair."""

    def begin_again(self) -> None:
        """Nothing was given."""

    def end(self) -> None:
        """Nothing to finish."""
