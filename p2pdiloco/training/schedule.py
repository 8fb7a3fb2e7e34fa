"""The inner learning rate.

Rules of this file:
1. Warm-up and decay follow the *global* step, so that learners of any speed decay together. The decay is a line, in
   runs of earlier releases, whose manifests do not say which share of them it is, a cosine.
2. With a budget of tokens (warm-up, stable, decay) the rate falls with what the swarm has merged: neither the fastest
   learner nor the number of learners makes it fall sooner.
3. A learner that joins late has a fresh AdamW, whose first steps are the least reliable: it warms up over its own first
   steps as well, but briefly.
"""

from __future__ import annotations

import math

from msgspec import UNSET

from p2pdiloco.protocol.manifest import InnerConfig

_OWN_WARMUP = 20
"""Longest warm-up of a learner's own, in its own steps."""


def learning_rate(config: InnerConfig, global_step: int, own_steps: int, merged_tokens: int = 0) -> float:
    """The rate of the step from ``global_step`` to the next, for an inner optimizer that has made ``own_steps``, where
    the swarm has merged so many tokens of its budget, if it has one."""
    ramp = 1.0
    if config.warmup:
        own_warmup = min(config.warmup, _OWN_WARMUP)
        ramp = min(1.0, (global_step + 1) / config.warmup, (own_steps + 1) / own_warmup)
    if config.tokens is not UNSET or config.decay_share is not UNSET:
        passed = global_step / config.steps if config.tokens is UNSET else merged_tokens / config.tokens
        left = (1.0 - passed) / (config.decay_share or 1.0)
        return config.learning_rate * ramp * max(config.final_share, min(1.0, left))
    done = (global_step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0.0, done))))
    return config.learning_rate * ramp * (config.final_share + (1.0 - config.final_share) * cosine)
