"""What a machine shows to people: the node's status, logs and reports."""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol import messages as msg
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
