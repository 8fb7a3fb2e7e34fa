"""Inputs of the machine. Nothing else reaches it, so a journal is a list of (now, event) pairs."""

from __future__ import annotations

from typing import Literal

import msgspec

from p2pdiloco.protocol.config import LONGEST_RUN, RunEnd
from p2pdiloco.protocol.counted_tokens import NOTHING_COUNTED, TokenCounts
from p2pdiloco.protocol.data_blocks import Block, Trained
from p2pdiloco.protocol.ids import Digest, FragmentId, LearnerId, PeerId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Contributor, GroupMerge, Head, Message, Proof
from p2pdiloco.protocol.norm_bound import NO_NORM, NormBound


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one learner on a chain: its merged tokens and steps, and the version that merged them last."""

    tokens: int
    steps: int
    version: int


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """All that the machine knows of a shard at one head. State transfers and checkpoints contain it."""

    head: Head
    step: int
    """Global step of the head's round."""
    marks: tuple[tuple[LearnerId, Mark], ...]
    """Sorted by learner."""
    trained: Trained = Trained()
    """Blocks of data that the chain has merged; shard 0 only."""
    norm_bound: NormBound = NO_NORM
    counts: TokenCounts = NOTHING_COUNTED
    """Statistics about the tokens of the chain's contributions."""


class Convictions(msgspec.Struct, frozen=True, array_like=True):
    """Peers that are excluded from ownership, with the reasons. Each peer stores its own on disk."""

    proofs: tuple[Proof, ...] = ()
    refused: tuple[tuple[PeerId, ShardId, int], ...] = ()
    """Owners of commits that were rejected here, with shard and version of the latest."""
    abandoned: tuple[Digest, ...] = ()
    """Commits without which the run goes on."""
    made: tuple[tuple[ShardId, Digest], ...] = ()
    """When the run went back: parents of this peer's latest commits, on which it must make no others."""
    starts: tuple[int, ...] = ()
    """By shard: the version with which this peer's life had begun when the run went back."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """First event: the shards that this peer has (version 0 at the run's creator, a checkpoint, or none)."""

    shards: tuple[ShardState, ...]
    lineages: tuple[tuple[Digest, ...], ...] = ()
    """For each shard the commits that led to it, oldest first, as far as saved; or empty."""
    own: tuple[CommitHeader, ...] = ()
    """Commits that this peer made in earlier runs, by shard and version, so that it makes no conflicting ones."""
    convictions: Convictions = Convictions()
    """Exclusions stored in earlier runs; they have been checked."""


class Woke(msgspec.Struct, frozen=True, array_like=True, tag="woke"):
    """A deadline may have passed."""


class PeerConnected(msgspec.Struct, frozen=True, array_like=True, tag="connected"):
    """An authenticated connection to ``peer`` is open."""

    peer: PeerId


class PeerDisconnected(msgspec.Struct, frozen=True, array_like=True, tag="disconnected"):
    """The last connection to ``peer`` has closed."""

    peer: PeerId
    reason: str
    is_shut_out: bool = False
    """This peer closed it, because of what ``peer`` sent, and lets it in no more for a while."""


class Admitted(msgspec.Struct, frozen=True, array_like=True, tag="admitted"):
    """The peers that have a place here have changed: that are certified by name, or admitted by an invite."""

    prints: frozenset[int]
    """Their fingerprints."""


LineSpeed = Literal["slow", "usual", "fast"]


class LineChanged(msgspec.Struct, frozen=True, array_like=True, tag="line-changed"):
    """This peer's line is too slow for a full share of a swarm's commits, or fast enough for more, or neither."""

    speed: LineSpeed


class Received(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """``peer`` sent ``message``. If it has a payload, that is complete, matches its digest, and is available."""

    peer: PeerId
    message: Message


class LearnerStarted(msgspec.Struct, frozen=True, array_like=True, tag="learner-started"):
    """A learner begins to train, from the global parameters at the current heads."""

    learner: LearnerId
    has_blocks: bool = False
    """Whether it has the run's own data and can be assigned blocks of it."""


class LearnerStopped(msgspec.Struct, frozen=True, array_like=True, tag="learner-stopped"):
    """The learner is gone; its unmerged progress is lost."""

    reason: str


class LearnerPaused(msgspec.Struct, frozen=True, array_like=True, tag="learner-paused"):
    """The learner makes no more steps (asked to, or the run is complete) but still gives snapshots."""

    steps: int
    tokens: int
    step: int = LONGEST_RUN
    """Global step at which it stopped."""


class LearnerRested(msgspec.Struct, frozen=True, array_like=True, tag="learner-rested"):
    """The learner pauses because other processes need its machine. Its next ``Stepped`` ends the pause."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """The learner's total steps and tokens after an inner step."""

    steps: int
    tokens: int
    step_time_s: float


class BlockFinished(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """The learner has trained a whole block of data, and had trained ``tokens`` tokens in total at its end."""

    block: Block
    tokens: int


class Snapshotted(msgspec.Struct, frozen=True, array_like=True, tag="snapshotted"):
    """The learner copied a fragment at a step boundary."""

    fragment: FragmentId
    step: int
    steps: int
    tokens: int


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag="encoded"):
    """A shard's outer gradient against ``base`` has been quantized, compressed and signed."""

    shard: ShardId
    base: Digest
    contributor: Contributor
    """The range from ``Encode``, with payload and signature."""
    payload_bytes: int


class Merged(msgspec.Struct, frozen=True, array_like=True, tag="merged"):
    """A merge has finished. Nothing has been applied yet."""

    shard: ShardId
    base: Digest
    payload: Digest
    result: Digest
    length: float = 0.0
    """Norm of the merged outer gradient in the payload."""
    factors: tuple[int, ...] = ()
    """Per cent of each contribution's weight that counted; empty: all of all."""


class GroupMerged(msgspec.Struct, frozen=True, array_like=True, tag="group-merged"):
    """A group's contributions have been merged, and the result signed."""

    shard: ShardId
    base: Digest
    group: GroupMerge
    payload_bytes: int


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="applied"):
    """A commit or a fetched state has become the shard's global state, and its digest matches."""

    shard: ShardId
    head: Digest


class StateOffered(msgspec.Struct, frozen=True, array_like=True, tag="offered"):
    """``peer`` offers a state at ``head``, with the commits that led to it, oldest first. All proofs were checked.

    ``StateAcceptance.refusal`` then says whether it may be downloaded.
    """

    peer: PeerId
    head: Head
    lineage: tuple[Digest, ...]
    owner: PeerId = PeerId("")
    """The peer that made and signed the commit at ``head``; empty for version 0."""


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """A shard's state has arrived, matches its digest, and waits to be installed."""

    peer: PeerId
    state: ShardState
    lineage: tuple[Digest, ...] = ()
    """Commits that led to it, oldest first, as far as its donor's log reaches. All were checked."""
    owner: PeerId = PeerId("")
    """The peer that made and signed the commit at its head; empty for version 0."""


class Restored(msgspec.Struct, frozen=True, array_like=True, tag="restored"):
    """The shard's state in this peer's known-good checkpoint waits to be installed. None: there is none."""

    shard: ShardId
    state: ShardState | None
    lineage: tuple[Digest, ...] = ()


class CheckpointGood(msgspec.Struct, frozen=True, array_like=True, tag="checkpoint-good"):
    """Training went on well from this peer's checkpoint at ``heads`` (by shard), which was written in this life."""

    heads: tuple[Digest, ...]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Work on a shard has failed. ``work`` names the effect; "give" means that an encoded payload was lost, "commit"
    that ``peer`` sent an invalid one, "state" that the state does not match its head, and "owner" that it does not and
    ``peer`` has the same state."""

    work: str
    shard: ShardId
    peer: PeerId | None
    reason: str


class LeaveRequested(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """Request to shut down gracefully."""

    reason: str


class EndMoved(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The run's end is another one than before: a statement of the founder or an admin has come, or counts no more.

    It may come before ``Started``.
    """

    end: RunEnd


class Contradicted(msgspec.Struct, frozen=True, array_like=True, tag="contradicted"):
    """A proof against an owner was found here: two commits on one parent, or a wrong merge."""

    proof: Proof


class Audited(msgspec.Struct, frozen=True, array_like=True, tag="audited"):
    """An audit has ended without a proof: the merge is right, or ``owner`` did not deliver the contributions."""

    shard: ShardId
    version: int
    owner: PeerId
    has_delivered: bool
    head_version: int = 0
    """Version of the shard's head here when the owner was asked or, if it refused at once, now."""


class Evaluated(msgspec.Struct, frozen=True, array_like=True, tag="evaluated"):
    """The learner measured the global model's held-out loss."""

    version: int
    loss: float


OwnEvent = (
    Started
    | Woke
    | PeerConnected
    | PeerDisconnected
    | Admitted
    | LineChanged
    | LearnerStarted
    | LearnerStopped
    | LearnerPaused
    | LearnerRested
    | Stepped
    | BlockFinished
    | Snapshotted
    | Encoded
    | Merged
    | GroupMerged
    | Applied
    | StateOffered
    | Fetched
    | Restored
    | CheckpointGood
    | Failed
    | LeaveRequested
    | EndMoved
    | Contradicted
    | Audited
    | Evaluated
)
"""Events of this peer itself."""

Event = Received | OwnEvent
"""Any input of ``Machine.handle``."""
