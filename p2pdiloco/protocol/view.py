"""Read-only view of the machine for its driver and other code.

``status`` summarizes the machine for people; effects say what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from p2pdiloco.protocol import messages as msg
from p2pdiloco.protocol.config import RunEnd
from p2pdiloco.protocol.contributions import Contributions
from p2pdiloco.protocol.evaluation import Evaluations
from p2pdiloco.protocol.events import Convictions, ShardState
from p2pdiloco.protocol.going_back import GoingBack
from p2pdiloco.protocol.ids import Digest, PeerId, RunId, ShardId
from p2pdiloco.protocol.messages import CommitHeader, Evaluation, Head
from p2pdiloco.protocol.replication import Replication
from p2pdiloco.protocol.state import Core


class MachineView:
    """Read access to the current state of one machine."""

    def __init__(
        self,
        core: Core,
        replication: Replication,
        evaluations: Evaluations,
        contributions: Contributions,
        going_back: GoingBack,
    ) -> None:
        self._going_back = going_back
        self._core = core
        self._contributions = contributions
        self._replication = replication
        self._evaluations = evaluations

    # -- this peer -----------------------------------------------------------------------------------------------------

    @property
    def run(self) -> RunId:
        """The run's id."""
        return self._core.config.run

    @property
    def me(self) -> PeerId:
        """This peer's id."""
        return self._core.config.peer

    @property
    def sync_every(self) -> int:
        """Inner steps between two rounds of a fragment (H)."""
        return self._core.config.sync_every

    @property
    def step(self) -> int:
        """The global step."""
        return self._core.step

    @property
    def last_step(self) -> int:
        """Estimated global step at which the run ends."""
        return self._contributions.budget.last_step

    @property
    def heard_by_others(self) -> frozenset[int]:
        """Fingerprints of all peers that connected peers of this group say they hear."""
        membership = self._core.membership
        lists = {peer: prints for peer, prints in membership.connectivity.lists.items() if membership.is_near(peer)}
        return frozenset().union(*(prints for peer, prints in lists.items() if peer != self.me))

    @property
    def group_bits(self) -> int:
        """Base-2 logarithm of the number of groups."""
        return self._core.chains[0].group_bits

    def is_leaving(self, peer: PeerId) -> bool:
        """Return whether this live peer is leaving before the run's end."""
        return peer in self._core.participation.leaving()

    @property
    def admitted(self) -> frozenset[int] | None:
        """Fingerprints of the peers that have a place here, as last reported to the machine; None: every peer has."""
        return self._core.membership.connectivity.admitted

    @property
    def is_current(self) -> bool:
        """True if every shard has had a state."""
        return self._core.is_current

    @property
    def has_heard_end(self) -> bool:
        """True if a peer has said that the run is complete."""
        return self._core.has_heard_end

    @property
    def has_finished(self) -> bool:
        """True if the run is complete here."""
        return self._core.departure == "finished"

    @property
    def is_shared(self) -> bool:
        """True if the run is complete here, and all others have this peer's heads: those that are live have finished
        with them, or nobody is left and the last one said goodbye, which it does only then."""
        core = self._core
        if core.membership.live:
            return self.has_finished and core.are_others_at_rest
        return self.has_finished and core.membership.partition_detector.silently_lost_at is None

    @property
    def end(self) -> RunEnd:
        """The run's end, as far as this peer knows."""
        return self._core.end

    @property
    def is_prolonged(self) -> bool:
        """True if this peer has finished, and the run then got a later end."""
        return self.has_finished and not self._contributions.budget.is_over

    def merged_tokens(self) -> list[int]:
        """Return, by shard, the tokens that its chain's contributions have declared."""
        return [chain.counts.merged for chain in self._core.chains]

    def unmerged_tokens(self) -> int:
        """Return the learner's own unmerged tokens, in the shard where there are most."""
        return self._core.unmerged_tokens()

    @property
    def evaluation(self) -> Evaluation | None:
        """The held-out loss that this peer shows (rule S3)."""
        return self._evaluations.shown

    @property
    def missing(self) -> int:
        """Number of peers missing after a suspected partition; they may have another model."""
        return len(self._core.membership.partition_detector.missing)

    # -- for people ----------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> msg.Phase:
        """Phase of this peer."""
        return self._core.phase()

    @property
    def participants(self) -> tuple[PeerId, ...]:
        """Participating peers, sorted, with this one if it participates."""
        return tuple(sorted(self._core.participation.participants()))

    @property
    def learners(self) -> int:
        """Number of participating peers in the whole run: with groups, at least those that contributed lately."""
        here, chain = len(self.participants), self._core.chains[0]
        return max(here, len(chain.counts.usual)) if chain.group_bits else here

    @property
    def weight_averaged(self) -> int:
        """Number of learners merged by the newest commit that is known."""
        newest = max(self.newest_commits(), key=lambda header: header.step, default=None)
        return 0 if newest is None else len(newest.contributors)

    @property
    def epochs(self) -> float:
        """Epochs of the run's data that were trained and merged; 0 without blocks."""
        ledger = self._core.chains[0].ledger
        return 0.0 if ledger is None else ledger.trained / ledger.blocks

    @property
    def blocks_repeated(self) -> float:
        """Repeated blocks, as a share of the trained ones."""
        ledger = self._core.chains[0].ledger
        return 0.0 if ledger is None else ledger.repeated / max(1, ledger.trained)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Health warnings, one sentence each (``HealthWarnings``)."""
        return self._contributions.health.sentences()

    # -- states --------------------------------------------------------------------------------------------------------

    @property
    def heads_mark(self) -> int:
        """Digest of all heads: equal at two peers if their heads are."""
        return self._core.heads_mark

    def heads(self) -> list[Head | None]:
        """Return the heads of all shards; None where there is no state."""
        return [chain.head for chain in self._core.chains]

    @property
    def known_heads(self) -> tuple[Head, ...]:
        """Heads of the shards that have a state."""
        return tuple(head for head in self.heads() if head is not None)

    def head(self, shard: ShardId) -> Head | None:
        """Return the head of one shard; None if there is no state or no such shard."""
        return self._core.chains[shard].head if shard < len(self._core.chains) else None

    def state(self, shard: ShardId) -> ShardState:
        """Return the part of a shard's state that is not tensors. The shard must have a state."""
        return self._core.chains[shard].state()

    def ancestry(self, shard: ShardId) -> Sequence[Digest]:
        """Return the known heads before a shard's head, oldest first."""
        return self._core.chains[shard].ancestry

    def commits_after(self, shard: ShardId, head: Digest) -> list[CommitHeader] | None:
        """Return the commits from ``head`` to the shard's head; None if they are not all in the log."""
        return self._core.chains[shard].commits_after(head)

    def commit_of(self, shard: ShardId, head: Digest) -> CommitHeader | None:
        """Return the commit that made this head of the shard, if it is the newest one of its log."""
        chain = self._core.chains[shard]
        return chain.log[-1] if chain.log and chain.log_ids[-1] == head else None

    def newest_commits(self) -> list[CommitHeader]:
        """Return the newest commit of each log that has one."""
        return [chain.log[-1] for chain in self._core.chains if chain.log]

    def unfetched(self) -> list[ShardId]:
        """Return the shards that have no state and are not being fetched."""
        replication = self._replication
        busy = replication.asked.keys() | replication.applying.keys() | replication.staged.keys()
        return [chain.shard for chain in self._core.chains if chain.head is None and chain.shard not in busy]

    def offering(self, shard: ShardId) -> list[PeerId]:
        """Return the peers that have reported a state of the shard, while joining."""
        return sorted(peer for peer, heads in self._replication.offers.items() if shard in heads)

    def refusal(self, head: Head) -> str | None:
        """Return why the state at ``head``, offered just now, must not be downloaded, or None."""
        return self._replication.acceptance.refusal(head)

    def is_given_up(self, shard: ShardId) -> bool:
        """Return whether a corrupted shard's state is neither requested nor on its way."""
        replication = self._replication
        return not any(shard in those for those in (replication.repairing, replication.asked, replication.applying))

    # -- other peers ---------------------------------------------------------------------------------------------------

    @property
    def live(self) -> tuple[PeerId, ...]:
        """Live peers, sorted, without this one."""
        return self._core.participation.peers()

    @property
    def participating(self) -> frozenset[PeerId]:
        """Live peers that participate."""
        return self._core.membership.participating

    @property
    def barred(self) -> frozenset[PeerId]:
        """Peers excluded from ownership: they equivocated, or made a rejected commit."""
        return self._core.membership.owners.barred

    def next_owner(self, shard: ShardId) -> PeerId | None:
        """Return the current owner of the shard's next version; None if there is no state."""
        participation = self._core.participation
        if self.head(shard) is None or not participation.candidates(shard):
            return None
        return participation.ranked_owners(shard)[0]

    @property
    def is_doubtful(self) -> bool:
        """Whether this peer or most peers have found a far higher held-out loss than usual (rule K1)."""
        return self._evaluations.is_doubtful

    def convictions(self) -> Convictions:
        """Return the reasons for which peers are ``barred``."""
        known, back = self._replication.refusals.barred_owners.convictions(), self._going_back
        if not back.made and not self._core.abandoned:
            return known
        return msgspec.structs.replace(known, abandoned=tuple(self._core.abandoned), made=back.made, starts=back.starts)

    def is_connected(self, peer: PeerId) -> bool:
        """Return whether there is a connection, live or not."""
        return peer in self._core.membership.peers

    def marks(self) -> dict[PeerId, int]:
        """Return the ``heads_mark`` of each live peer that has states."""
        peers = self._core.membership.peers
        beats = ((peer, peers[peer].beat) for peer in self._core.participation.donors())
        return {peer: beat.heads_mark for peer, beat in beats if beat is not None}

    def fastest_step_time_s(self) -> float:
        """Return the smallest step time of all learners that train; 0 if none does."""
        return self._core.fastest_step_time_s()
