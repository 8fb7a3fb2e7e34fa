"""Going back: the run goes on without the commits that ruined the model (rules K).

Rules of this file:
1. A peer votes only for what it has measured itself, and names commits. So voters need not agree on a version: each
   commit is counted by itself, and more votes can only add to what is abandoned.
2. An abandoned commit is treated like a rejected one, but nobody is barred for it. A peer whose own head is abandoned
   merges nothing, and takes the state of its known-good checkpoint, or that of another peer.
3. Peers that went back and saw the others not follow give in, since the run must not stay divided.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from p2pdiloco.protocol.aggregation import Aggregation
from p2pdiloco.protocol.chain import Chain
from p2pdiloco.protocol.effects import Restore
from p2pdiloco.protocol.evaluation import Evaluations
from p2pdiloco.protocol.events import Convictions, Restored, ShardState
from p2pdiloco.protocol.ids import Digest, PeerId, ShardId
from p2pdiloco.protocol.messages import MAX_ABANDONED, AbandonVote, CommitHeader
from p2pdiloco.protocol.replication import Replication
from p2pdiloco.protocol.state import Core
from p2pdiloco.protocol.support import Support

VOTE_EVALUATIONS = 4
"""Evaluations that may be due before a vote no longer counts. All peers measure, so the votes come soon."""
LEAST_NAMED = 2
"""Votes that must name a commit: of two participants both, since nobody can tell which one is wrong."""
REST_LOGS = 2
"""A peer votes again this many log lengths of shard 0 later, so that a run that always diverges is not caught."""


def named_by_most(votes: list[tuple[Digest, ...]], total: int) -> list[Digest]:
    """Return the commits that at least two votes name, and more than half of ``total`` participants, of whom those that
    name nothing abstain. More votes only add to them, in whatever order they come."""
    named = [commits for commits in votes if commits]
    able = total - (len(votes) - len(named))
    counts = Counter(commit for commits in named for commit in dict.fromkeys(commits))
    return [commit for commit, count in counts.items() if count >= LEAST_NAMED and Support(count, able).is_most]


class Vote(NamedTuple):
    """A peer's vote, and the version of shard 0 until which it counts."""

    vote: AbandonVote
    counts_until: int


class GoingBack:
    """Votes against commits, and the way back to states without them."""

    def __init__(
        self, core: Core, replication: Replication, aggregation: Aggregation, evaluations: Evaluations
    ) -> None:
        self.core = core
        self.replication = replication
        self.aggregation = aggregation
        self.evaluations = evaluations
        self.good: tuple[Digest, ...] = ()
        """Heads of the known-good checkpoint of this life, by shard."""
        self.made: tuple[tuple[ShardId, Digest], ...] = ()
        """Parents of this peer's commits when it went back, and the versions with which its life had begun."""
        self.starts: tuple[int, ...] = ()
        self._votes: dict[PeerId, Vote] = {}
        """The newest vote of each peer, this one included."""
        self._most = 0
        """Most participants since the first of these votes: none gains weight because others leave."""
        self._rests_until = 0
        """Version of shard 0 before which this peer does not vote again."""
        self._deaf_until = 0
        """Version of shard 0 before which votes do not count."""
        self._hopeless_at: float | None = None
        """Since when a head is abandoned and nobody reports another one."""
        self._ends_at = math.inf
        """When this peer, which goes back, counts no further votes: they would lead to states that nobody has kept."""
        self._left_at: float | None = None
        """Since when at least half have left this peer's chain, after votes against it."""

    # -- votes ---------------------------------------------------------------------------------------------------------

    def vote_if_due(self) -> None:
        """Vote against all commits since the known-good checkpoint, if the held-out loss has jumped."""
        core = self.core
        if not core.is_current or not self.evaluations.has_jumped or self._version() < self._rests_until:
            return
        self._rests_until = self._version() + REST_LOGS * core.config.log_length
        bad = self._commits_since_good()
        which = f"the last {len(bad)} commits" if bad else "those commits that most others name"
        core.note(
            "warning", "going-back", f"the held-out loss has jumped: this peer votes for going on without {which}"
        )
        self._tell(bad)

    def _commits_since_good(self) -> tuple[Digest, ...]:
        """Return the commits since the known-good checkpoint; none if there is none, or too many commits since."""
        bad: list[Digest] = []
        for chain, good in zip(self.core.chains, self.good, strict=False):
            assert chain.head is not None
            heads = (*chain.ancestry, chain.head.id)
            if good not in heads:
                return ()
            bad += heads[heads.index(good) + 1 :]
        return tuple(bad) if len(bad) <= MAX_ABANDONED else ()

    def _tell(self, commits: tuple[Digest, ...]) -> None:
        """Vote, and send the vote to all live peers."""
        vote = AbandonVote(commits[:MAX_ABANDONED])
        self.core.send(self.core.membership.live, vote)
        self.on_vote(self.core.config.peer, vote)

    def send_vote(self, peer: PeerId) -> None:
        """Send the own vote to a peer that has connected."""
        self._expire()
        known = self._votes.get(self.core.config.peer)
        if known is not None:
            self.core.send((peer,), known.vote)

    def on_vote(self, peer: PeerId, vote: AbandonVote) -> None:
        """Record a vote, and count all. Further votes of a peer are counted at the next heartbeat."""
        core, known = self.core, self._votes.get(peer)
        if self._version() < self._deaf_until:
            return
        counts_until = self._version() + VOTE_EVALUATIONS * max(1, core.config.evaluation_every)
        self._votes[peer] = Vote(vote, counts_until)
        if known is None or peer == core.config.peer:
            self._count()

    def _expire(self) -> None:
        here, version = self.core.membership.peers.keys() | {self.core.config.peer}, self._version()
        self._votes = {
            peer: told for peer, told in self._votes.items() if peer in here and version <= told.counts_until
        }

    def _count(self) -> None:
        """Abandon what most votes name."""
        self._expire()
        able, total = self._voters()
        self._most = max(self._most, total) if self._votes else 0
        votes = [told.vote.commits for peer, told in self._votes.items() if peer in able]
        found = named_by_most(votes, self._most)
        if new := [commit for commit in found if commit not in self.core.abandoned]:
            self._abandon(new)

    def _voters(self) -> tuple[frozenset[PeerId], int]:
        """Return the peers that may vote here, which participate and are not proved to have lied, and how many there
        are in all: some are only heard by others."""
        able = self.core.participation.participants() - self.replication.refusals.barred_owners.proofs.keys()
        return able, len(able) + len(self.core.membership.connectivity.indirect)

    # -- back ----------------------------------------------------------------------------------------------------------

    def _abandon(self, commits: list[Digest]) -> None:
        core = self.core
        for commit in commits:
            core.abandon(commit)
        self.made, self.starts = self.aggregation.own_commits.parents(), tuple(self.aggregation.own_commits.starts)
        before = self._version()
        left = [chain.shard for chain in core.chains if self._leave(chain)]
        if left:
            text = f"more than half of the members have voted: the run goes back, without {len(commits)} commits"
            core.note("warning", "going-back", text)
            self.evaluations.forget_jump()
            self._rests_until = before + REST_LOGS * core.config.log_length
            self._ends_at = min(self._ends_at, core.now + core.config.request_s)

    def _leave(self, chain: Chain) -> bool:
        """Abandon what follows an abandoned commit on this peer's chain; return whether its head does."""
        core, replication, shard = self.core, self.replication, chain.shard
        if chain.head is None:
            return False
        is_gone = False
        for commit in (*chain.ancestry, chain.head.id):
            is_gone = is_gone or commit in core.abandoned
            if is_gone:
                core.abandon(commit)
        if not is_gone:
            return False
        next_id, target = replication.applying.get(shard, (None, None))
        if next_id is not None and isinstance(target, CommitHeader):
            core.abandon(next_id)
        self.aggregation.drop_job(shard)
        core.effects.append(Restore(shard))
        return True

    def on_restored(self, event: Restored) -> None:
        """Install the state of the known-good checkpoint, unless it follows an abandoned commit."""
        shard, state, replication = event.shard, event.state, self.replication
        if state is None or not self._is_lost(self.core.chains[shard]):
            return
        if replication.refusals.holds(state.head.id, event.lineage):
            return
        replication.acceptance.restore(state.head, event.lineage)
        if shard in replication.applying:
            replication.staged[shard] = state
        else:
            replication.install(state)

    def _follow(self) -> None:
        """Abandon what at least half have voted against and left for long. Who hears few peers counts few votes."""
        core, live = self.core, self.core.participation.peers()
        total = len(live) + len(core.membership.connectivity.indirect) + 1
        left = [one for one in self._votes if one in live and self.replication.reports.has_left(one)]
        if not Support(len(left), total, total - len(left)).is_leading:
            self._left_at = None
            return
        self._left_at = core.now if self._left_at is None else self._left_at
        if core.now - self._left_at >= self.replication.acceptance.patience_s(ShardId(0)):
            found = named_by_most([self._votes[one].vote.commits for one in left], len(left))
            if new := [commit for commit in found if commit not in core.abandoned]:
                self._abandon(new)

    def check(self) -> None:
        """Fetch states for shards whose head is abandoned; give in if the others have not gone back, or nobody can."""
        core, acceptance = self.core, self.replication.acceptance
        if not core.is_current:
            return
        if core.now >= self._ends_at:
            self._forget_votes()
        if self._votes:
            self._count()
            self._follow()
        if not core.abandoned:
            return
        lost = [chain.shard for chain in core.chains if self._is_lost(chain)]
        if not lost and self._version() > self._rests_until:
            return
        hopeless = [shard for shard in lost if not self._fetch(shard)]
        self._hopeless_at = (core.now if self._hopeless_at is None else self._hopeless_at) if hopeless else None
        deserted = [chain.shard for chain in core.chains if acceptance.is_deserted(chain.shard)]
        if deserted:
            self._give_in(f"most others have not gone back in shard {deserted[0]}")
        elif self._hopeless_at is not None and core.now - self._hopeless_at >= 2 * acceptance.patience_s(hopeless[0]):
            self._give_in(f"nobody has an earlier state of shard {hopeless[0]}")

    def _fetch(self, shard: ShardId) -> bool:
        """Fetch a state of the shard, unless one is on its way; return whether some peer may have one."""
        core, replication = self.core, self.replication
        if shard in replication.asked or shard in replication.applying:
            return True
        is_back = replication.reports.is_back
        donors = [peer for peer in core.participation.donors(shard) if is_back(peer, shard)]
        if donors:
            replication.fetch(shard, donors[core.membership.sequence % len(donors)])
        else:
            replication.request_heads(core.membership.live)
        return bool(donors)

    def _give_in(self, reason: str) -> None:
        """Go on with what was abandoned, and count no votes for a while."""
        self.core.note("warning", "going-back", f"{reason}: this peer goes on with what it had left")
        self.core.abandoned.clear()
        self._forget_votes()
        self._hopeless_at = None
        for chain in self.core.chains:
            self.aggregation.reopen(chain.shard)

    def _forget_votes(self) -> None:
        """Count no votes before this peer may vote again."""
        self._votes.clear()
        self._deaf_until, self._ends_at = self._rests_until, math.inf

    def _is_lost(self, chain: Chain) -> bool:
        return chain.head is not None and chain.head.id in self.core.abandoned

    def _version(self) -> int:
        head = self.core.chains[0].head
        return 0 if head is None else head.version

    # -- restarts ------------------------------------------------------------------------------------------------------

    def restore(self, earlier: Convictions, states: tuple[ShardState, ...]) -> None:
        """Remember from which commits earlier lives went back. ``states`` are those that this life begins with."""
        chains = len(self.core.chains)
        for commit in earlier.abandoned:
            self.core.abandon(commit)
        starts = [0] * chains
        for state in states:
            starts[state.head.shard] = state.head.version
        if len(earlier.starts) == chains:
            self.starts = earlier.starts
            starts = [max(pair) for pair in zip(starts, earlier.starts, strict=True)]
        self.made = tuple((shard, parent) for shard, parent in earlier.made if shard < chains)
        self.aggregation.own_commits.restore_made(self.made, starts)
