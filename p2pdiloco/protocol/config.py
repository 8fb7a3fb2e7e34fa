"""Limits on what a peer may declare: numbers that no honest peer exceeds, derived from the manifest alone.

Rules of this file:
1. A number that goes into a chain (tokens, steps, blocks, a commit's step) is judged by the chain and these limits
   alone, so that all peers judge alike. Who makes a commit or a contribution keeps to them by itself.
2. What does not fit is refused before it is added to anything: no sum can leave the range of a message's ``Count``.
"""

from __future__ import annotations

import msgspec

RANGE_TURNS = 64
"""A contribution counts for at most the steps of so many turns; who holds more declares the last of them."""
AGAIN = 8
"""Times that a learner may make the steps of a whole run."""
LEAD_TURNS = 16
"""A commit's global step lies at most so many turns beyond its parent's."""
MAX_COUNT = 2**56
"""What a message's ``Count`` can hold."""
LEAST_FACTOR = 10
"""Per cent of its weight that a contribution keeps that most others disagree with (``codec.agreement``)."""
BATCH_ROOM = 16
"""How much larger than the run's a peer's batch may be."""
STEP_TOKENS = 2**24
"""Tokens of an inner step, where the manifest does not say: the batches of the largest runs have fewer."""
_MOST_RANGE_TOKENS = 2**42
"""4,096 contributors of these still fit into a ``Count``."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What one step, one block and one shard of a run hold."""

    step_tokens: int = STEP_TOKENS
    """Most tokens that an inner step of anybody's learner may count for."""
    block_tokens: int = 1
    """Fewest tokens of a block of data."""
    elements: tuple[int, ...] = ()
    """Parameters of each shard; none: how long a first merged step may be is not known."""
    budget: int = 0
    """Tokens of the run, which end it before ``total_steps`` do; 0: it has none."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one learner and one commit can hold."""

    step_tokens: int = STEP_TOKENS
    """Most tokens of an inner step."""
    block_tokens: int = 1
    """Fewest tokens of a block of data."""
    range_steps: int = RANGE_TURNS
    """Most inner steps that a contribution declares."""
    turn_steps: int = 1
    """H."""
    lead_steps: int = LEAD_TURNS
    """How far a commit's step may lie beyond its parent's."""
    run_steps: int = 2**40
    """Of a whole run."""

    @property
    def range_tokens(self) -> int:
        """Most tokens that a contribution declares."""
        return min(self.range_steps * self.step_tokens, _MOST_RANGE_TOKENS)

    @property
    def run_tokens(self) -> int:
        """Most tokens that one learner trains in a run."""
        return min(self.learner_steps * self.step_tokens, MAX_COUNT // 16)

    @property
    def first_tokens(self) -> int:
        """What a contribution counts for that is merged alone before anything else was: a turn of the run's batches."""
        return max(1, self.turn_steps * self.step_tokens // BATCH_ROOM)

    @property
    def learner_steps(self) -> int:
        """Most inner steps of one learner: it may outlive its node, and make the steps again that a run has lost."""
        return AGAIN * self.run_steps

    def most_tokens(self, steps: int) -> int:
        """Return the largest number of tokens in a contribution of so many steps."""
        return min(steps * self.step_tokens, _MOST_RANGE_TOKENS)

    def most_blocks(self, tokens: int) -> int:
        """Whose last token lies in a range of so many tokens; the first may have begun before it."""
        return 1 + tokens // self.block_tokens

    def range_problem(self, tokens: int, steps: int, blocks: int) -> str | None:
        """Why no learner gives this, or None."""
        if steps > self.range_steps:
            return f"{steps} steps are more than a contribution holds ({self.range_steps})"
        if tokens > self.most_tokens(steps):
            return f"{tokens} tokens are more than {steps} steps hold ({self.most_tokens(steps)})"
        if blocks > self.most_blocks(tokens):
            return f"{blocks} blocks of data are more than {tokens} tokens hold ({self.most_blocks(tokens)})"
        return None
