"""Inputs of the machine. Nothing else reaches it; a journal is a list of (now, event)."""

from __future__ import annotations

import msgspec

from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import Block, Trained
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Contributor, Equivocation, Head, Message
from p2pdiloco.protocol.norm_bound import NO_NORM, NormBound


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """How far a chain has merged one learner: its tokens and steps so far, and the version that did it."""

    tokens: int
    steps: int
    version: int


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """All that the machine knows of a shard at one head; travels with a state transfer and lies in a checkpoint."""

    head: Head
    step: int
    """Global step of the head's turn."""
    marks: tuple[tuple[LearnerId, Mark], ...]
    """Sorted by learner."""
    trained: Trained = Trained()
    """Shard 0: the blocks of data that its chain has merged."""
    norm_bound: NormBound = NO_NORM
    counts: TokenCounts = NOTHING_COUNTED
    """What the chain knows of its contributions' tokens."""


class Convictions(msgspec.Struct, frozen=True, array_like=True):
    """Who may own nothing, and why: what a peer keeps on its disk."""

    proofs: tuple[Equivocation, ...] = ()
    refused: tuple[tuple[PeerId, ShardId, int], ...] = ()
    """Owners of commits that were not taken here, with shard and version of the latest."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """First event: the shards this peer brings (the founder's version 0, a checkpoint's, or none)."""

    shards: tuple[ShardState, ...]
    lineages: tuple[tuple[Digest, ...], ...] = ()
    """Of each of them the commits that led to it, oldest first, as far as they were saved; or of none."""
    own: tuple[CommitHeader, ...] = ()
    """Commits that this peer made in earlier lives, by shard and version: none is made anew."""
    convictions: Convictions = Convictions()
    """Of earlier lives; their signatures were checked."""


class Woke(msgspec.Struct, frozen=True, array_like=True, tag="woke"):
    """A deadline may have passed."""


class PeerConnected(msgspec.Struct, frozen=True, array_like=True, tag="connected"):
    """An authenticated connection to ``peer`` stands."""

    peer: PeerId


class PeerDisconnected(msgspec.Struct, frozen=True, array_like=True, tag="disconnected"):
    """No connection to ``peer`` is left."""

    peer: PeerId
    reason: str


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """``peer`` sent ``message``; its payload, if it has one, is whole, matches its digest, and is at hand."""

    peer: PeerId
    message: Message


class LearnerStarted(msgspec.Struct, frozen=True, array_like=True, tag="learner-started"):
    """A learner trains, starting from the global parameters at the current heads."""

    learner: LearnerId
    has_blocks: bool = False
    """It has the run's own data, and can be given blocks of it."""


class LearnerStopped(msgspec.Struct, frozen=True, array_like=True, tag="learner-stopped"):
    """The learner is gone, and its unmerged progress with it."""

    reason: str


class LearnerPaused(msgspec.Struct, frozen=True, array_like=True, tag="learner-paused"):
    """The learner makes no more steps (asked to, or the run is complete) but still gives snapshots."""

    steps: int
    tokens: int


class LearnerRested(msgspec.Struct, frozen=True, array_like=True, tag="learner-rested"):
    """The learner makes no steps for now, since its machine is wanted by others; its next ``Stepped`` ends that."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """The learner's counters after an inner step, over its whole life."""

    steps: int
    tokens: int
    step_time_s: float


class BlockFinished(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """The learner has trained a whole block of data; it had ``tokens`` tokens at its end."""

    block: Block
    tokens: int


class Snapshotted(msgspec.Struct, frozen=True, array_like=True, tag="snapshotted"):
    """The learner copied a fragment at a step boundary."""

    fragment: FragmentId
    step: int
    steps: int
    tokens: int


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """A shard's outer gradient against ``base`` is quantized, compressed, and signed for."""

    shard: ShardId
    base: Digest
    contributor: Contributor
    """As it was asked for, with payload and signature."""
    payload_bytes: int


class Merged(msgspec.Struct, frozen=True, array_like=True, tag="merged"):
    """A merge that this peer asked for is done; nothing is applied yet."""

    shard: ShardId
    base: Digest
    payload: Digest
    result: Digest
    length: float = 0.0
    """Of the merged outer gradient, as it is in the payload."""
    factors: tuple[int, ...] = ()
    """How much of each contribution's weight counted, in per cent; empty: all of all."""


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied"):
    """A commit or a fetched state is now the shard's global state, and its digest is right."""

    shard: ShardId
    head: Digest


class StateOffered(msgspec.Struct, frozen=True, array_like=True, tag="offered"):
    """``peer`` offers a state at ``head``, with the commits that led to it, oldest first; all its proofs were checked.
    Whether it may be downloaded, the machine tells (``AncestryCheck.refusal``)."""

    peer: PeerId
    head: Head
    lineage: tuple[Digest, ...]
    owner: PeerId = PeerId("")
    """Who made and signed the commit at ``head``; nobody has made version 0."""


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """A shard's state arrived, matches its digest, and waits to be installed."""

    peer: PeerId
    state: ShardState
    lineage: tuple[Digest, ...] = ()
    """Commits that led to it, oldest first, as far as its donor's log reaches; all were checked."""
    owner: PeerId = PeerId("")
    """Who made and signed the commit at its head; nobody has made version 0."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Long work on a shard did not come to its end: ``work`` is the effect's name; ``give``: what
    was encoded before is gone."""

    work: str
    shard: ShardId
    peer: PeerId | None
    reason: str


class LeaveRequested(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Leave the run in order."""

    reason: str


class Contradicted(msgspec.Struct, frozen=True, array_like=True, tag="contradicted"):
    """Among the signed commits that are here are two of one owner on one parent."""

    proof: Equivocation


class Evaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated"):
    """The learner measured the global model's held-out loss."""

    version: int
    loss: float


OwnEvent = (
    Started
    | Woke
    | PeerConnected
    | PeerDisconnected
    | LearnerStarted
    | LearnerStopped
    | LearnerPaused
    | LearnerRested
    | Stepped
    | BlockFinished
    | Snapshotted
    | Encoded
    | Merged
    | Applied
    | StateOffered
    | Fetched
    | Failed
    | LeaveRequested
    | Contradicted
    | Evaluated
)
"""What happens here."""

Event = Received | OwnEvent
"""What ``Machine.handle`` takes."""
