"""What a machine shows to people: the node's status, logs and reports."""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.core import Core
from p2pdiloco.protocol.identifiers import PeerId


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The machine's own picture, for people. The four membership numbers are never mixed: known (the caller's
    directory), live, participating, weight averaged."""

    phase: msg.Phase
    step: int
    live: tuple[PeerId, ...]
    """Without this peer."""
    participating: tuple[PeerId, ...]
    """With this peer, if it does."""
    weight_averaged: int
    """Learners merged by the newest commit seen."""
    heads: tuple[msg.Head, ...]
    tokens_trained: int
    tokens_unmerged: int
    evaluation: msg.Evaluation | None
    epochs: float
    """Of the run's data, trained and merged; 0 without blocks."""
    blocks_repeated: float
    """As a share of those trained."""
    troubles: tuple[str, ...] = ()
    """What a person should look at, a sentence each: ``trouble``."""


def status_of(core: Core, evaluation: msg.Evaluation | None, weight_averaged: int, troubles: tuple[str, ...]) -> Status:
    """The machine's picture now."""
    ledger = core.chains[0].ledger
    participating = [*core.membership.participating, *([core.config.peer] if core.is_participating() else [])]
    return Status(
        phase=core.phase(),
        step=core.step,
        live=core.membership.live,
        participating=tuple(sorted(participating)),
        weight_averaged=weight_averaged,
        heads=tuple(c.head for c in core.chains if c.head is not None),
        tokens_trained=0 if core.learner is None else core.learner.tokens,
        tokens_unmerged=core.unmerged_tokens(),
        evaluation=evaluation,
        epochs=0.0 if ledger is None else ledger.trained / ledger.blocks,
        blocks_repeated=0.0 if ledger is None else ledger.repeated / max(1, ledger.trained),
        troubles=troubles,
    )
