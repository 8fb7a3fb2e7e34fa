"""Outputs of the machine. The driver runs effects in order; the result of long work returns as an event."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from p2pdiloco.protocol.config import RunEnd
from p2pdiloco.protocol.data_blocks import Block
from p2pdiloco.protocol.events import ShardState
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Contribution, Contributor, Head, Message


class Send(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Send ``message``, with its payload if it has one, to each of ``peers`` that is connected."""

    peers: tuple[PeerId, ...]
    message: Message


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Learner: copy the fragment at the next step boundary. Ends in ``Snapshotted``."""

    fragment: FragmentId
    step: int


class Train(msgspec.Struct, frozen=True, array_like=True, tag="train"):
    """Learner: train this block of data after all blocks assigned before. Ends in ``BlockFinished``."""

    block: Block


class Encode(msgspec.Struct, frozen=True, array_like=True, tag="encode"):
    """Quantize and compress the shard's outer gradient (base minus snapshot), and sign its range.

    Ends in ``Encoded`` or ``Failed``.
    """

    shard: ShardId
    base: Head
    contributor: Contributor
    """The range, without payload and signature."""


class Merge(msgspec.Struct, frozen=True, array_like=True, tag="merge"):
    """Merge these contributions (sorted by learner) and prepare the outer step. Ends in ``Merged`` or ``Failed``."""

    shard: ShardId
    base: Head
    contributions: tuple[Contribution, ...]
    longest: float = math.inf
    """Maximum norm of the merged outer gradient; a longer one is scaled down."""
    is_group: bool = False
    """Merge them for a group, and sign the result. Prepares no outer step; ends in ``GroupMerged``."""


class Apply(msgspec.Struct, frozen=True, array_like=True, tag="apply"):
    """Apply a commit to the current state. Ends in ``Applied`` or ``Failed``.

    The learner's parameters move by (new global - old global), plus the payloads of ``settled`` (its own contributions
    that this commit merged, so they are no longer its delta), minus those of ``restored``. This is ``carry``.
    """

    header: CommitHeader
    id: Digest
    learner: LearnerId | None
    """The learner that ``settled`` and ``restored`` refer to; they do not apply to any other learner."""
    settled: tuple[Digest, ...]
    restored: tuple[Digest, ...]
    is_reset: bool
    """Discard the learner's delta and take the global parameters: the delta is unknown, or ``overwrite`` is set."""


class Restore(msgspec.Struct, frozen=True, array_like=True, tag="restore"):
    """Set newer checkpoints aside, and read the shard's state from the known-good one. Ends in ``Restored``."""

    shard: ShardId


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Download the shard's state from ``peer``. Ends in ``Fetched`` or ``Failed``."""

    shard: ShardId
    peer: PeerId


class Install(msgspec.Struct, frozen=True, array_like=True, tag="install"):
    """Make a fetched state the shard's state; the learner moves as in ``Apply``. Ends in ``Applied`` or ``Failed``."""

    state: ShardState
    learner: LearnerId | None
    settled: tuple[Digest, ...]
    restored: tuple[Digest, ...]
    is_reset: bool
    farthest: float = math.inf
    """Maximum distance of its parameters from the current ones, for an outer learning rate of 1."""


class AdoptStep(msgspec.Struct, frozen=True, array_like=True, tag="adopt-step"):
    """Learner: the swarm's global step is at least this."""

    step: int
    tokens: int = 0
    """Tokens of its budget that the swarm has merged; 0 without a budget."""


class BecameCurrent(msgspec.Struct, frozen=True, array_like=True, tag="current"):
    """Every shard has a state: the learner may start."""


class PauseLearner(msgspec.Struct, frozen=True, array_like=True, tag="pause-learner"):
    """Learner: make no more steps. Ends in ``LearnerPaused``."""


class MoveEnd(msgspec.Struct, frozen=True, array_like=True, tag="move-end"):
    """Learner: the run's end has moved. If it has stopped at an earlier end, it trains again."""

    end: RunEnd


class Evaluate(msgspec.Struct, frozen=True, array_like=True, tag="evaluate"):
    """Learner: measure the global model's held-out loss. May end in ``Evaluated``."""

    version: int


class Audit(msgspec.Struct, frozen=True, array_like=True, tag="audit"):
    """With probability ``chance``, make the merge of another owner's applied commit again, and compare.

    Only the driver draws, so that nobody can foresee which commits are audited. May end in ``Audited`` or
    ``Contradicted``.
    """

    shard: ShardId
    commit: Digest
    chance: float
    patience_s: float = math.inf
    """Time in which the owner should begin to answer."""
    part: int = -1
    """The group's merge to make again instead, whose collector is asked."""


class HangUp(msgspec.Struct, frozen=True, array_like=True, tag="hang-up"):
    """Close the connection to ``peer`` at once, so that a new one can replace it. Ends in ``PeerDisconnected``."""

    peer: PeerId
    reason: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The run is over for this peer: save, say goodbye, exit."""

    reason: str


class Note(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """A decision and its reason, for logs and journals."""

    level: Literal["debug", "info", "warning"]
    topic: str
    reason: str


ForLearner = Snapshot | Train | AdoptStep | PauseLearner | MoveEnd | Evaluate
"""Effects that the node forwards to the learner."""

Effect = (
    Send
    | Snapshot
    | Train
    | Encode
    | Merge
    | Apply
    | Fetch
    | Restore
    | Install
    | AdoptStep
    | BecameCurrent
    | PauseLearner
    | MoveEnd
    | Evaluate
    | Audit
    | HangUp
    | Leave
    | Note
)
