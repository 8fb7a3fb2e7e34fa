"""Limits on the numbers that a peer may declare, which derive from the manifest alone and which no honest peer exceeds,
and the end of a run, which may be moved.

Rules of this file:
1. Every number that goes into a chain (tokens, steps, blocks, a commit's step) is checked against the chain and these
   limits alone, so that all peers come to the same verdict. An honest peer keeps its own messages within them.
2. A number beyond its limit is refused before it is added to a sum, so no sum can exceed a message's ``Count``.
3. No limit of a chain depends on the run's end: a run may be prolonged, and peers learn of that at different times.
"""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol.groups import MOST_TOGETHER

RANGE_ROUNDS = 64
"""Maximum number of rounds whose steps a contribution declares; a learner that has more declares the last of them."""
AGAIN = 8
"""Factor by which a learner's steps may exceed those of the longest run."""
LONGEST_RUN = 2**40
"""Maximum number of steps of a run, however often it is prolonged."""
MOST_BUDGET = 2**50
"""Maximum token budget of a run."""
LEAD_ROUNDS = 16
"""Maximum number of rounds by which a commit's global step lies beyond its parent's."""
MAX_COUNT = 2**56
"""Maximum of a message's ``Count``."""
LEAST_FACTOR = 10
"""Per cent of its weight that a contribution keeps that most others disagree with (``codec.agreement``)."""
BATCH_ROOM = 16
"""Factor by which a peer's batch may be larger than the run's."""
STEP_TOKENS = 2**24
"""Maximum tokens of an inner step if the manifest does not say; the batches of the largest runs have fewer."""
_MOST_RANGE_TOKENS = 2**42
"""Maximum tokens of a range: 4,096 contributors of these still fit into a ``Count``."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a run's steps, blocks and shards."""

    step_tokens: int = STEP_TOKENS
    """Maximum number of tokens for which an inner step of any learner counts."""
    block_tokens: int = 1
    """Minimum number of tokens in a block of data."""
    elements: tuple[int, ...] = ()
    """Number of parameters of each shard; if empty, the first merged update has no length limit."""
    budget: int = 0
    """Token budget of the run in its manifest, which may end it before ``total_steps`` do; 0: no budget."""


class RunEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a run: as the manifest says, or a later one that the founder or an admin has signed."""

    steps: int
    """Global step at which the run is complete."""
    tokens: int = 0
    """Token budget, which may end the run before ``steps`` do; 0: no budget."""


def describe_end(end: RunEnd) -> str:
    """Return the end in words."""
    return f"{end.tokens:,} merged tokens" if end.tokens else f"step {end.steps:,}"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one learner and of one commit."""

    step_tokens: int = STEP_TOKENS
    """Maximum number of tokens of an inner step."""
    block_tokens: int = 1
    """Minimum number of tokens in a block of data."""
    range_steps: int = RANGE_ROUNDS
    """Maximum number of inner steps that a contribution declares."""
    round_steps: int = 1
    """Inner steps between two rounds (H)."""
    lead_steps: int = LEAD_ROUNDS
    """Maximum number of steps by which a commit's step may exceed its parent's."""
    together: int = MOST_TOGETHER
    """Maximum number of learners whose contributions are merged together; more are divided into groups (``groups``)."""

    @property
    def range_tokens(self) -> int:
        """Maximum number of tokens that a contribution declares."""
        return min(self.range_steps * self.step_tokens, _MOST_RANGE_TOKENS)

    @property
    def run_tokens(self) -> int:
        """Maximum number of tokens that one learner trains in a run."""
        return min(self.learner_steps * self.step_tokens, MAX_COUNT // 16)

    @property
    def first_tokens(self) -> int:
        """Tokens counted for a contribution that is merged alone before any other: one round of the run's batches."""
        return max(1, self.round_steps * self.step_tokens // BATCH_ROOM)

    @property
    def learner_steps(self) -> int:
        """Maximum number of inner steps of one learner.

        The limit exceeds the steps of any run: a learner may outlive its node, and may repeat steps that the run has
        lost.
        """
        return AGAIN * LONGEST_RUN

    def most_tokens(self, steps: int) -> int:
        """Return the maximum number of tokens in a contribution of ``steps`` inner steps."""
        return min(steps * self.step_tokens, _MOST_RANGE_TOKENS)

    def most_blocks(self, tokens: int) -> int:
        """Return the largest number of blocks that can end within ``tokens`` tokens; the first may begin earlier."""
        return 1 + tokens // self.block_tokens

    def range_problem(self, tokens: int, steps: int, blocks: int) -> str | None:
        """Return why no honest learner declares such a range, or None."""
        if steps > self.range_steps:
            return f"{steps} steps are more than a contribution holds ({self.range_steps})"
        if tokens > self.most_tokens(steps):
            return f"{tokens} tokens are more than {steps} steps hold ({self.most_tokens(steps)})"
        if blocks > self.most_blocks(tokens):
            return f"{blocks} blocks of data are more than {tokens} tokens hold ({self.most_blocks(tokens)})"
        return None
